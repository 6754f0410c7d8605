// A whole worker: DATABASE_URL=postgresql://… node worker.mjs queue.  See sql/README.md.
import pg from 'pg';

const handlers = {
  greet: async (job) => ({ hello: job.payload.name }),
  fail: async () => { throw new TypeError('no greeting'); },
  sleep: (job) => new Promise((resolve) => setTimeout(resolve, job.payload.ms)),
};
const [queues, job_types, places] = [[process.argv[2]], Object.keys(handlers), 4];
let [running, endings, isStopping, mayTick, wake] = [new Map(), [], false, true, () => {}];
const [db, beats] = [1, 2].map(() => new pg.Client({ connectionString: process.env.DATABASE_URL }));
await Promise.all([db.connect(), beats.connect()]);
const call = async (client, text, ...values) => (await client.query(text, values)).rows;

async function run(job) {
  const ending = { job_id: job.job_id, lease_token: job.lease_token, outcome: 'succeeded' };
  await handlers[job.job_type](job).then((result) => { ending.result = result; }, (error) => Object.assign(
    ending, { outcome: 'failed', error: error.message, error_type: error.name, stack: error.stack }));
  wake(endings.push(ending));
}
setInterval(() => { call(beats, 'select from rota.heartbeat_jobs($1, $2)', [...running.keys()], [...running.values()]); mayTick || wake(mayTick = true); }, 1000);
db.on('notification', () => wake());
process.on('SIGTERM', () => wake(isStopping = true));
while (!isStopping || running.size) {
  const woken = new Promise((resolve) => { wake = resolve; });
  const told = endings.splice(0, 1000);
  for (const [n, { answer }] of (await call(db, 'select answer from rota.end_jobs($1)', JSON.stringify(told))).entries()) {
    if (['busy', 'refused'].includes(answer)) setTimeout(() => wake(endings.push(told[n])), 500);
    else running.delete(told[n].job_id);
  }
  const free = isStopping ? 0 : places - running.size;
  const jobs = free && await call(db, "select * from rota.claim_jobs($1, $2, $3, '3 s', $4)", `node-${process.pid}`, queues, free, job_types);
  for (const job of jobs || []) running.set(job.job_id, job.lease_token) && run(job);
  const [wait] = await call(db, free > jobs.length ? 'select *, 1000 * extract(epoch from look_again_in) as ms from rota.wait_for_jobs($1, $2)'
    : 'select rota.stop_waiting(), $1::text[], $2::text[], null as channels, 1000 as ms', queues, job_types);
  for (const channel of wait.channels ?? []) await call(db, `listen ${channel}`);
  if (mayTick && (wait.has_maintenance ?? true)) { mayTick = false; await call(db, 'select from rota.tick()'); }
  await Promise.race([woken, new Promise((resolve) => setTimeout(resolve, wait.ms))]);
}
process.exit();
