// The life of one job from Node.js: no library but the driver, no knowledge but the functions.
//   DATABASE_URL=postgresql://… node tour.mjs
import pg from 'pg';

const client = new pg.Client({ connectionString: process.env.DATABASE_URL });
await client.connect();

/** Call a function of rota with named arguments and return its rows. */
async function rota(name, args) {
  const named = Object.keys(args).map((key, index) => `${key} => $${index + 1}`);
  const query = `select * from rota.${name}(${named.join(', ')})`;
  return (await client.query(query, Object.values(args))).rows;
}

/** Return the SQLSTATE that a call is refused with. */
async function refusal(call) {
  try {
    await call;
  } catch (error) {
    return error.code;
  }
  return 'accepted';
}

const job = { job_type: 'send_mail', payload: { user_id: 7 }, queue: 'node', max_attempts: 3 };
const [{ enqueue: id }] = await rota('enqueue', { ...job, idempotency_key: 'welcome_mail:7' });
const many = JSON.stringify([{ ...job, idempotency_key: 'welcome_mail:7' }]);
const [again] = await rota('enqueue_many', { jobs: many });
console.log('enqueued', again.job_id === id ? 'once' : 'twice', again.is_new);

const [first] = await rota('claim_jobs', { worker: 'node-1', queues: ['node'], lease: '30 seconds' });
console.log('claimed', first.job_type, JSON.stringify(first.payload), first.attempt);

// bigint comes as a string, and goes back as one: a token must not pass through a double.
const ref = { job_id: first.job_id, lease_token: first.lease_token };
const [beat] = await rota('heartbeat', { ...ref, lease: '2 minutes' });
console.log('heartbeat', beat.locked_until > first.locked_until, beat.is_cancel_requested);

const [failed] = await rota('fail_job', { ...ref, error: 'connection refused', error_type: 'ECONNREFUSED' });
console.log('failed', failed.status, failed.run_at instanceof Date);
await rota('reschedule_job', { job_id: id, delay: '0' });

const [second] = await rota('claim_jobs', { worker: 'node-2', queues: ['node'] });
console.log('claimed', second.attempt, BigInt(second.lease_token) > BigInt(first.lease_token));
console.log('stale finish', await refusal(rota('finish_job', ref)));

const newer = { job_id: second.job_id, lease_token: second.lease_token };
const [finished] = await rota('finish_jobs', {
  job_ids: [newer.job_id],
  lease_tokens: [newer.lease_token],
  results: JSON.stringify([{ message_id: 'm-1' }]),
});
console.log('finished', finished.outcome);
const [asked] = await rota('finish_job', newer);
console.log('finished', asked.finish_job);
console.log('unknown job', await refusal(rota('retry_job', { job_id: 0 })));
console.log('bad argument', await refusal(rota('enqueue', { job_type: '' })));

const { rows: [left] } = await client.query('select * from rota.job_runs where id = $1', [id]);
console.log('left', left.status, left.attempts, left.locked_by, left.last_error, JSON.stringify(left.result));
await client.end();
