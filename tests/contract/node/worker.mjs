// A whole worker: DATABASE_URL=postgresql://… node worker.mjs queue.  See sql/README.md.
import { hostname } from 'node:os';
import { setTimeout as delay } from 'node:timers/promises';
import pg from 'pg';

const handlers = {
  greet: async (job) => ({ hello: decodeURI(job.payload.name) }),
  fail: async () => { throw new TypeError('no greeting'); },
  sleep: (job) => delay(job.payload.ms, null, { signal: job.stop.signal }),
};
const [queues, job_types, places, worker] = [[process.argv[2]], Object.keys(handlers), 4, `${hostname()}-${process.pid}`];
let [running, endings, isStopping, mayTick, wake] = [new Set(), [], false, true, () => {}];
const [db, beats] = [1, 2].map(() => new pg.Client({ connectionString: process.env.DATABASE_URL, query_timeout: 20_000 }));
await Promise.all([db.connect(), beats.connect()]);
const call = async (client, text, ...values) => (await client.query(text, values)).rows;

// jsonb takes no NUL and no half of a surrogate pair.
const toJson = (value) => JSON.stringify(value, (_, v) => (typeof v === 'string' ? v.replace(/[\0\ud800-\udfff]/gu, '\ufffd') : v));
const end = (job, ending) => wake(endings.push({ job, error: ending.error, json: toJson({ job_id: job.job_id, lease_token: job.lease_token, ...ending }) }));
async function run(job) {
  try { end(job, { outcome: 'succeeded', result: await handlers[job.job_type](job) }); } catch (error) {
    end(job, { outcome: 'failed', error: String(error?.message ?? error), error_type: job.stop.signal.reason ?? error?.name, stack: error?.stack });
  }
}
const heartbeat = async (held = [...running]) => (await call(beats, 'select is_overdue, is_lost or is_cancel_requested or is_overdue as must_stop from rota.heartbeat_jobs($1, $2)',
  held.map((job) => job.job_id), held.map((job) => job.lease_token))).forEach((beat, n) => beat.must_stop && held[n].stop.abort(beat.is_overdue ? 'time_limit' : 'stopped'));
const report = () => call(beats, 'select from rota.report_worker($1, $2, $3, null, $4, $5, $6, $7)', worker, hostname(), process.pid, queues, job_types, places, beats.processID);
setInterval(report, 60_000, await report());
setInterval(() => { heartbeat(); mayTick || wake(mayTick = true); }, 1000);
db.on('notification', () => wake());
process.on('SIGTERM', () => wake(isStopping = true));
while (!isStopping || running.size) {
  const woken = new Promise((resolve) => { wake = resolve; });
  const told = endings.splice(0, 1000);
  for (const [n, { answer, message }] of (await call(db, 'select answer, message from rota.end_jobs($1)', `[${told.map((t) => t.json)}]`)).entries()) {
    if (answer === 'busy') setTimeout(() => wake(endings.push(told[n])), 500);
    else if (answer === 'refused' && message !== told[n].error) end(told[n].job, { outcome: 'failed', error: message });
    else running.delete(told[n].job);
  }
  const free = isStopping ? 0 : places - running.size;
  const jobs = free && await call(db, 'select job_id, lease_token, job_type, payload, attempt from rota.claim_jobs($1, $2, $3, job_types => $4)', worker, queues, free, job_types);
  for (const job of jobs || []) { running.add(Object.assign(job, { stop: new AbortController() })); run(job); }
  const [wait] = await call(db, free > jobs.length ? 'select *, 1000 * extract(epoch from look_again_in) as ms from rota.wait_for_jobs($1, $2)'
    : 'select rota.stop_waiting(), $1::text[], $2::text[], null as channels, 1000 as ms', queues, job_types);
  for (const channel of wait.channels ?? []) await call(db, `listen ${channel}`);
  if (mayTick && (wait.has_maintenance ?? true)) { mayTick = false; await call(db, 'select from rota.tick()'); wake(); }
  await Promise.race([woken, new Promise((resolve) => setTimeout(resolve, wait.ms))]);
}
await call(db, 'select from rota.deregister_worker($1)', worker);
process.exit();
