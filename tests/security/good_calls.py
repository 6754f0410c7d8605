"""A database where every public function has something to do, and one good call of each.

The calls change nothing for good: `attempt` rolls each back.  Only tick_loop() commits, because
a procedure that commits cannot be called in a transaction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from fuzz.plain import PLAIN
from security.rights import OBSERVED
from sql.helpers import call, claim, enqueue, value

Db = psycopg.Connection[Any]

CALLS = {
    "act_on_jobs": """select * from rota.act_on_jobs('set_priority',
        jsonb_build_object('ids', array[%(waiting)s::bigint]), '{"priority": 5}')""",
    "cancel_job": "select rota.cancel_job(%(waiting)s, 'not needed')",
    "claim_jobs": "select * from rota.claim_jobs('w2', '{q,p}', 5, '1 minute')",
    "complete_effect": """select rota.complete_effect('mail', %(key)s, %(job_id)s, %(token)s,
        %(payload)s)""",
    "define_pipeline": """select rota.define_pipeline('other', '[{"stage": "a",
        "job_type": "t", "queue": "p"}, {"stage": "b", "job_type": "t", "lease": "1 minute"}]'
        )""",
    "database_number": "select rota.database_number()",
    "database_number_of": "select rota.database_number_of(%(job_id)s)",
    "describe_schedule": "select rota.describe_schedule('*/5 9-17 * * mon-fri')",
    "disable_schedule": "select rota.disable_schedule('daily')",
    "drop_pipeline": "select rota.drop_pipeline('spare')",
    "effect_result": "select * from rota.effect_result('mail', %(key)s)",
    "enable_schedule": "select rota.enable_schedule('asleep')",
    "enqueue": """select rota.enqueue('t', %(payload)s, 'q', delay => '1 minute',
        backoff => '{"kind": "fixed"}', idempotency_key => 'new' || %(key)s,
        on_conflict => 'rerun', ordering_key => %(key)s,
        depends_on => array[%(waiting)s]::bigint[], limit_key => %(key)s)""",
    "enqueue_to": "select rota.enqueue_to(5, 't', %(payload)s, 'q')",
    "waiting_forwards": "select * from rota.waiting_forwards()",
    "take_forwards": "select * from rota.take_forwards('w2', 6)",
    "end_forwards": "select rota.end_forwards('{}', '{}', '[]')",
    "receive_jobs": """select * from rota.receive_jobs(5, '{1}', '{2026-01-12}',
        jsonb_build_array(jsonb_build_object('job_type', 't',
            'payload', %(payload)s::jsonb)))""",
    "waiting_moves": "select * from rota.waiting_moves()",
    "take_moves": "select * from rota.take_moves(%(move_id)s)",
    "receive_moves": "select * from rota.receive_moves(99, 6, 'coming', '[]', 1)",
    "end_moves": "select rota.end_moves(%(move_id)s, '{}', '[]')",
    "plan_queue_move": "select * from rota.plan_queue_move('free', 6)",
    "queue_move_facts": "select rota.queue_move_facts('q')",
    "receive_plan": "select * from rota.receive_plan('q', '{\"version\": \"0\"}')",
    "begin_queue_move": "select rota.begin_queue_move('free', 6)",
    "end_queue_move": "select rota.end_queue_move('gone')",
    "queue_move_status": "select * from rota.queue_move_status('moving')",
    "enqueue_many": "select * from rota.enqueue_many(%(jobs)s)",
    "end_jobs": """select * from rota.end_jobs(jsonb_build_array(jsonb_build_object(
        'job_id', %(job_id)s::bigint, 'lease_token', %(token)s::bigint, 'outcome', 'failed',
        'error', %(error)s::text, 'error_type', 'E', 'stack', %(error)s::text)))""",
    "fail_job": """select * from rota.fail_job(%(job_id)s, %(token)s, %(error)s, 'E',
        %(error)s)""",
    "finish_and_claim": """select * from rota.finish_and_claim('w2', %(job_ids)s, %(tokens)s,
        %(results)s, queues => '{q,p}', max_jobs => 2)""",
    "finish_job": "select rota.finish_job(%(job_id)s, %(token)s, %(payload)s)",
    "finish_jobs": "select * from rota.finish_jobs(%(job_ids)s, %(tokens)s, %(results)s)",
    "deregister_worker": "select rota.deregister_worker('w')",
    "find_live_keys": "select rota.find_live_keys(%(jobs)s)",
    "front_statements": """select * from rota.front_statements(
        '[{"number": 1, "dbname": "shop", "host": "localhost"}]')""",
    "fold_error": "select rota.fold_error(%(error)s)",
    "grant_queue": "select rota.grant_queue(current_user, '*')",
    "grant_statements": "select * from rota.grant_statements('worker', current_user)",
    "heartbeat": "select * from rota.heartbeat(%(job_id)s, %(token)s, '1 minute')",
    "heartbeat_jobs": "select * from rota.heartbeat_jobs(%(job_ids)s, %(tokens)s)",
    "next_run": "select rota.next_run('30 2 * * *', 'Europe/Berlin')",
    "now": "select rota.now()",
    "pause_queue": "select rota.pause_queue('q', 'the mail server is down')",
    "set_archive": "select rota.set_archive()",
    "set_breaker": "select rota.set_breaker('t', 'q', max_failures => 5)",
    "set_retry_rule": "select rota.set_retry_rule('E', 't', 'q', '1 minute')",
    "pause_type": "select rota.pause_type('t', 'q', 'the mail server is down')",
    "pause_all": "select rota.pause_all('restored')",
    "record_effect": "select rota.record_effect('mail', 'n' || %(key)s, %(job_id)s, %(token)s)",
    "release_jobs": "select * from rota.release_jobs(%(job_ids)s, %(tokens)s)",
    "report_worker": "select rota.report_worker('w2', 'host', 1, '1.0', '{q}')",
    "restart_pipeline": "select rota.restart_pipeline(%(ended)s, 'a')",
    "reschedule_job": "select rota.reschedule_job(%(waiting)s, delay => '1 hour')",
    "resume_ordering_key": "select rota.resume_ordering_key(%(key)s)",
    "revoke_queue": "select rota.revoke_queue(current_user, '*')",
    "resume_queue": "select rota.resume_queue('paused')",
    "resume_type": "select rota.resume_type('t')",
    "resume_all": "select rota.resume_all()",
    "retry_job": "select rota.retry_job(%(dead)s)",
    "retry_with_dependants": "select rota.retry_with_dependants(%(dead)s)",
    "run_schedule_now": "select rota.run_schedule_now('daily')",
    "schedule_job": """select * from rota.schedule_job('weekly', '0 9 * * mon', 't',
        %(payload)s, 'q', 'Europe/Berlin', backoff => '{"kind": "fixed"}')""",
    "set_database_number": "select rota.set_database_number(7)",
    "set_limit": "select rota.set_limit(queue => 'q', max_running => 3, max_starts => 5)",
    "set_priority": "select rota.set_priority(%(waiting)s, 3)",
    "set_progress": "select rota.set_progress(%(job_id)s, %(token)s, 50, %(error)s)",
    "set_queue": """select rota.set_queue('q', backoff => '{"kind": "fixed"}',
        ageing => '1 hour')""",
    "set_type": "select rota.set_type('t', expires_after => '1 hour')",
    "settle_effect": "select rota.settle_effect('sms', %(key)s, 'done', %(payload)s)",
    "snooze_job": "select rota.snooze_job(%(job_id)s, %(token)s, '1 minute')",
    "wait_for_result": "select * from rota.wait_for_result(%(waiting)s, false)",
    "start_pipeline": """select rota.start_pipeline('line', %(payload)s,
        idempotency_key => 'run' || %(key)s)""",
    "start_ticker": "select rota.start_ticker()",
    "stop_ticker": "select rota.stop_ticker()",
    "stop_waiting": "select rota.stop_waiting()",
    "sweep_stale_leases": "select rota.sweep_stale_leases()",
    "tick": "select * from rota.tick()",
    "tick_loop": "call rota.tick_loop('2 milliseconds', '1 millisecond')",
    "unschedule_job": "select rota.unschedule_job('daily')",
    "untaken_jobs": "select * from rota.untaken_jobs('{q}')",
    "upcoming_runs": "select * from rota.upcoming_runs(name => 'daily')",
    "version": "select rota.version()",
    "wait_for_jobs": "select * from rota.wait_for_jobs('{q}')",
    "withdraw_effect": "select rota.withdraw_effect('mail', %(key)s, %(job_id)s, %(token)s)",
}
# What the calls refer to, see `set_scene`.
NAMES = {"job_id", "token", "job_ids", "tokens", "key", "error", "payload", "results", "jobs"}


def _good_call(name: str, arguments: str) -> str:
    """Return the call of a function that only reads, with what it requires."""
    required = re.findall(r"(?:^|,)\s*(\w+) [\w\[\]]+\s*(?=,|$)", arguments)
    given = [f"{a} => %({a})s" if a in NAMES else f"{a} => {PLAIN[a][0]}" for a in required]
    return f"select * from rota.{name}({', '.join(given)})"


CALLS = {**{name: _good_call(name, OBSERVED[name]) for name in OBSERVED}, **CALLS}
# Not in a database without pg_cron.
UNAVAILABLE = {"start_ticker": "0A000"}

PIPELINE = [{"stage": stage, "job_type": "t", "queue": "p"} for stage in "ab"]


def set_scene(owner: Db, secret: str = "s3", key: str = "k3") -> dict[str, Any]:
    """Prepare the database of *owner*; return what the calls refer to.

    *secret* is in every payload, result, error and progress, and *key* in every key.
    """
    call(owner, "set_database_number", number=5)
    payload = {"secret": secret}
    keys = {"idempotency_key": key, "limit_key": key}
    job_id = enqueue(owner, "t", payload=payload, queue="q", max_attempts=9, **keys)
    (job,) = claim(owner, queues=["q"], lease="1 hour")
    call(owner, "record_effect", scope="mail", key=key, **_owner(job))
    call(owner, "define_pipeline", pipeline="line", stages=Jsonb(PIPELINE))
    call(owner, "define_pipeline", pipeline="spare", stages=Jsonb(PIPELINE))
    ended = value(owner, "start_pipeline", pipeline="line", payload=payload)
    for _ in PIPELINE:
        (run,) = claim(owner, queues=["p"])
        call(owner, "record_effect", scope="sms", key=key, **_owner(run))
        call(owner, "finish_job", **_owner(run), result=payload)
    dead, _ = (_die(owner, payload, secret, name) for name in (None, key))
    waiting = enqueue(owner, "t", payload=payload, queue="q", run_at="2030-01-01+00")
    for n in range(3):
        enqueue(owner, "t", payload=payload, queue="q", priority=n)
    for name in ("daily", "asleep"):
        arguments = {"schedule": "0 2 * * *", "job_type": "t", "payload": payload}
        call(owner, "schedule_job", name=name, **arguments)
    call(owner, "disable_schedule", name="asleep")
    call(owner, "set_queue", queue="paused", max_attempts=3)
    call(owner, "pause_queue", queue="paused")
    call(owner, "report_worker", worker="w", host="host", pid=1, version="1", queues=["q"])
    move_id = value(owner, "begin_queue_move", queue="moving", database=6)
    for number, queue in ((99, "coming"), (97, "gone")):
        arrival = {"move_id": number, "from_database": 6, "queue": queue, "jobs": "[]"}
        call(owner, "receive_moves", **arrival)
    owner.execute("update rota.queue_moves set state = 'settled' where move_id = 97")
    many = [
        {"job_type": "t", "queue": "q", "payload": payload, "idempotency_key": key + k}
        for k in "ab"
    ]
    return {
        "job_id": job_id, "token": job.lease_token, "job_ids": [job_id], "move_id": move_id,
        "tokens": [job.lease_token], "waiting": waiting, "dead": dead, "ended": ended,
        "key": key, "error": f"cannot send to {secret}", "payload": Jsonb(payload),
        "results": Jsonb([payload]), "jobs": Jsonb([*many, {"job_type": "t", "queue": "q"}]),
    }  # fmt: skip


def attempt(db: Db, query: str, scene: Mapping[str, Any]) -> str | None:
    """Return the SQLSTATE of a call, None if it works; what it did is undone."""
    try:
        if query.startswith("call "):
            db.execute(query)
        else:
            with db.transaction(force_rollback=True):
                db.execute(query, scene)
    except psycopg.Error as error:
        return error.sqlstate or type(error).__name__
    return None


def as_role(db: Db, role: str) -> Db:
    """Make a superuser's connection one of *role*."""
    db.execute(sql.SQL("set role {}").format(sql.Identifier(role)))
    return db


def _owner(job: Any) -> dict[str, int]:
    return {"job_id": job.job_id, "lease_token": job.lease_token}


def _die(owner: Db, payload: Any, secret: str, ordering_key: str | None) -> int:
    job_id = enqueue(owner, "t", payload=payload, queue="d", ordering_key=ordering_key)
    (job,) = claim(owner, queues=["d"])
    call(owner, "fail_job", **_owner(job), error=f"about {secret}", fatal=True)
    return job_id
