"""A transaction that stays open delays only the jobs that it has itself taken.

Each act is left open by one session, as if it was forgotten.  Another session then makes all
the calls that have to do with other jobs only, in the same queue and of the same type where
that is possible.  None may wait, and each must do what it is for.

Acts on different things are left open together: a call that waits for one of them waits for
the transaction.  What takes away is not beside what adds, for a row that comes and goes in a
transaction keeps nobody waiting.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import sql

from races.harness import Session
from rota.testing.server import EmbeddedPostgres

Params = dict[str, Any]

JOB = "'t', queue => 'q'"
STAGES = """'[{"stage": "a", "job_type": "t", "queue": "p"}, {"stage": "b", "job_type": "t",
    "queue": "p"}]'"""
MOVE = "(select m.move_id from rota.queue_moves as m where m.queue = 'moving')"
BACKOFF = """'{"kind": "fixed", "base_seconds": 60}'"""


def _enqueue(*arguments: str) -> str:
    return f"select rota.enqueue({', '.join((JOB, *arguments))})"


def _many(*jobs: str) -> str:
    objects = ", ".join(f'{{"job_type": "t", "queue": "q"{job}}}' for job in jobs)
    return f"select job_id from rota.enqueue_many('[{objects}]')"


def _lease(job: str) -> str:
    return f"%({job})s, %({job}_token)s"


def _batch(*jobs: str) -> str:
    ids, tokens = (
        ", ".join(f"%({job}{part})s" for job in jobs).join(("array[", "]::bigint[]"))
        for part in ("", "_token")
    )
    return f"{ids}, {tokens}"


def _ending(job: str, **outcome: str) -> str:
    told = "".join(f", '{key}', '{value}'" for key, value in outcome.items())
    return (
        f"jsonb_build_array(jsonb_build_object('job_id', %({job})s::bigint, 'lease_token',"
        f" %({job}_token)s::bigint{told}))"
    )


def _act(act: str, job: str, arguments: str = "{}") -> str:
    return (
        f"select changed from rota.act_on_jobs('{act}', jsonb_build_object('ids',"
        f" array[%({job})s::bigint]), '{arguments}')"
    )


# One line a job: its name here, and how it is enqueued.  Those of the first half belong to the
# act that is left open, those of the second to all the others.
WAITING = {
    "held": _enqueue("idempotency_key => 'k'", "ordering_key => 'o'", "limit_key => 'c:1'"),
    "behind_held": _enqueue("ordering_key => 'o'"),
    "plain": _enqueue("idempotency_key => 'plain'"),
    "parent": _enqueue(),
    "child": _enqueue("depends_on => array[%(parent)s::bigint]"),
    "dead": _enqueue("ordering_key => 'halted'"),
    "dead_child": _enqueue("depends_on => array[%(dead)s::bigint]"),
    "done": _enqueue("idempotency_key => 'done'"),
    "run": "select rota.start_pipeline('p')",
    "ended_run": "select rota.start_pipeline('p')",
    "late": _enqueue(),
    **{f"other{n}": _enqueue(f"limit_key => 'c:{n + 2}'") for n in range(9)},
    "other_run": "select rota.start_pipeline('p')",
    "other_dead": _enqueue(),
    "other_done": _enqueue(),
}
# Their claims, one by one.
STARTED = (
    *("held", "plain", "dead", "done", "run", "ended_run", "late", "other_run"),
    *(f"other{n}" for n in range(9)),
    *("other_dead", "other_done"),
)
SETTINGS = (
    "create schema kept authorization rota_installer",
    f"select rota.define_pipeline('p', {STAGES})",
    f"select rota.define_pipeline('dropped', {STAGES})",
    "select rota.set_limit(limit_key => 'c:*', max_running => 2)",
    """select rota.set_queue('q', retry_budget => '{"per_minute": 10}')""",
    "select rota.set_retry_rule('E', 't', 'q', retry_in => '1 minute')",
    "select rota.set_breaker('t', 'q', max_failures => 1000)",
    "select rota.set_breaker('u', 'q', max_failures => 1000)",
    "select rota.set_queue('paused', max_attempts => 3)",
    "select rota.pause_queue('paused')",
    "select rota.pause_type('paused', 'paused')",
    "select rota.schedule_job('due', 'every 1 second', 't', queue => 'fired')",
    "select rota.schedule_job('known', '@daily', 't', queue => 'fired')",
    "select rota.schedule_job('disabled', '@daily', 't', queue => 'fired')",
    "select rota.disable_schedule('disabled')",
    "select rota.grant_queue('pg_monitor', 'moving', 'producer')",
    "select rota.enqueue('t', queue => 'moving')",
    "select rota.begin_queue_move('moving', 6)",
    "select rota.report_worker('w', 'box', 1, '1', '{q}')",
    "do $$ begin perform rota._do_checks(1000); end $$",
)
ENDED = (
    f"select rota.record_effect('mail', 'unknown', {_lease('done')})",
    f"select rota.finish_job({_lease('done')})",
    f"select rota.finish_job({_lease('other_done')})",
    f"select rota.fail_job({_lease('dead')}, 'bad', fatal => true)",
    f"select rota.fail_job({_lease('other_dead')}, 'bad', fatal => true)",
    f"select rota.fail_job({_lease('ended_run')}, 'bad', fatal => true)",
    f"select rota.record_effect('mail', 'known', {_lease('held')})",
    "update rota.jobs as j set locked_until = rota.now() - interval '1 hour'"
    " where j.id = %(late)s",
    # What is due for the claims of either side.
    *[f"select rota.enqueue('mine', queue => 'q', idempotency_key => 'mine:{n}')"
      for n in range(3)],
    *[f"select rota.enqueue('theirs', queue => 'q', idempotency_key => 'theirs:{n}')"
      for n in range(9)],
)  # fmt: skip

ACTS = {
    "a producer, with each argument": {
        "enqueue": _enqueue(),
        "enqueue delay": _enqueue("delay => '1 hour'"),
        "enqueue run_at": _enqueue("run_at => now() + interval '1 second'"),
        "enqueue settings": _enqueue(
            "priority => -1",
            "max_attempts => 3",
            "lease => '1 hour'",
            "time_limit => '1 hour'",
            f"backoff => {BACKOFF}",
            "expires_at => now() + interval '1 day'",
            """headers => '{"a": "b"}'""",
        ),
        "enqueue expires_after": _enqueue("expires_after => '1 day'"),
        "enqueue priority": _enqueue("priority => -1000"),
        "enqueue another queue": "select rota.enqueue('t', queue => 'new')",
        "enqueue key": _enqueue("idempotency_key => 'new'"),
        "enqueue unique_for": _enqueue("idempotency_key => 'new:2'", "unique_for => '1 hour'"),
        "enqueue max_wait": _enqueue(
            "idempotency_key => 'new:3'",
            "on_conflict => 'replace'",
            "delay => '1 minute'",
            "max_wait => '1 hour'",
        ),
        "enqueue ordering_key": _enqueue("ordering_key => 'new'"),
        "enqueue many ordering keys": _many(
            *(f', "ordering_key": "o:{n}"' for n in range(100))
        ),
        "enqueue limit_key": _enqueue("limit_key => 'c:1'"),
        "enqueue new limit_key": _enqueue("limit_key => 'new:1'"),
        "enqueue_many": _many("", ', "delay": "1 hour"'),
        "enqueue_many keys": _many(
            ', "idempotency_key": "k"', ', "idempotency_key": "new:4", "on_conflict": "rerun"'
        ),
        "enqueue_to": "select rota.enqueue_to(6, 't',"
        " ordering_key => 'o', idempotency_key => 'n')",
        "start_pipeline": "select rota.start_pipeline('p', idempotency_key => 'k')",
    },
    "a producer, with what is there": {
        "enqueue known key": _enqueue("idempotency_key => 'k'"),
        "enqueue known unique_for": _enqueue(
            "idempotency_key => 'k'", "unique_for => '1 hour'"
        ),
        "enqueue rerun": _enqueue("idempotency_key => 'k'", "on_conflict => 'rerun'"),
        "enqueue known ordering_key": _enqueue("ordering_key => 'o'", "skip_dead => true"),
    },
    "a producer that changes it": {
        "enqueue replace": _enqueue("idempotency_key => 'plain'", "on_conflict => 'replace'"),
        "enqueue updated_at": _enqueue(
            "idempotency_key => 'k'", "on_conflict => 'rerun'", "updated_at => now()"
        ),
    },
    "a producer of dependants": {
        "enqueue depends_on": _enqueue("depends_on => array[%(plain)s::bigint]"),
        "enqueue blocks": _enqueue("blocks => %(child)s", "if_parent_dead => 'wait'"),
    },
    "a worker that begins": {
        "report_worker": "select rota.report_worker('w', 'box', 1, '1', '{q}')",
        "report_worker new": "select rota.report_worker('new', 'box', 2, '1', '{q}')",
        "wait_for_jobs": "select * from rota.wait_for_jobs('{q}', '{none}')",
        "wait_for_jobs active": "select * from rota.wait_for_jobs('{q}', '{none}',"
        " active => true)",
        "claim_jobs": "select job_id from rota.claim_jobs('a', '{q}', job_types => '{mine}')",
        "claim_jobs of many queues": "select job_id from rota.claim_jobs('a', '{q,fired,none}',"
        " 2, job_types => '{mine}')",
    },
    "a worker that goes on": {
        "deregister_worker": "select rota.deregister_worker('w')",
        "wait_for_result": "select * from rota.wait_for_result(%(held)s)",
        "finish_and_claim": f"select * from rota.finish_and_claim('a', {_batch('held')},"
        " queues => '{q}', job_types => '{mine}')",
    },
    "a job that runs and is finished": {
        "heartbeat": f"select * from rota.heartbeat({_lease('held')})",
        "heartbeat_jobs": f"select * from rota.heartbeat_jobs({_batch('held', 'plain')})",
        "set_progress": f"select rota.set_progress({_lease('held')}, 50, 'half')",
        "record_effect": f"select rota.record_effect('mail', 'new', {_lease('held')})",
        "record_effect again": f"select rota.record_effect('mail', 'known', {_lease('held')},"
        " 'again')",
        "complete_effect": f"select rota.complete_effect('mail', 'known', {_lease('held')})",
        "finish_job": f"select rota.finish_job({_lease('held')}, '{{}}')",
    },
    "a job without its effect": {
        "withdraw_effect": f"select rota.withdraw_effect('mail', 'known', {_lease('held')})",
        "finish_jobs": f"select * from rota.finish_jobs({_batch('held', 'plain')})",
    },
    "jobs and a run that end": {
        "end_jobs": f"select * from rota.end_jobs({_ending('held', outcome='succeeded')})",
        "finish_job of a run": f"select rota.finish_job({_lease('run')}, '{{}}')",
    },
    "a job that fails, a run that goes on": {
        "end_jobs failed": "select * from rota.end_jobs("
        f"{_ending('held', outcome='failed', error='bad')})",
        "finish_job to a stage": f"select rota.finish_job({_lease('run')}, next_stage => 'b')",
    },
    "jobs that fail": {
        "fail_job": f"select * from rota.fail_job({_lease('held')}, 'bad')",
        "fail_job with a rule": f"select * from rota.fail_job({_lease('plain')}, 'bad',"
        " error_type => 'E')",
    },
    "a job and a run that fail for good": {
        "fail_job fatal": f"select * from rota.fail_job({_lease('held')},"
        " 'bad', fatal => true)",
        "fail_job of a run": f"select * from rota.fail_job({_lease('run')},"
        " 'bad', fatal => true)",
    },
    "a job that is put off, another that is late": {
        "snooze_job": f"select rota.snooze_job({_lease('held')}, '1 hour')",
        "sweep_stale_leases": "select rota.sweep_stale_leases()",
    },
    "jobs that are given back, others that travel": {
        "release_jobs": f"select * from rota.release_jobs({_batch('held', 'plain')})",
        "take_forwards": "select * from rota.take_forwards('a', 6)",
        "end_forwards": "select rota.end_forwards('{}', '{}', '[]')",
        "receive_jobs": "select * from rota.receive_jobs(5, '{2054}', '{now}',"
        """ '[{"job_type": "t", "queue": "q", "ordering_key": "o"}]')""",
    },
    "an operator who retries": {
        "settle_effect": "select rota.settle_effect('mail', 'unknown', 'done')",
        "retry_job": "select rota.retry_job(%(dead)s)",
        "retry_job with a key": "select rota.retry_job(%(done)s)",
        "cancel_job": "select rota.cancel_job(%(parent)s)",
        "restart_pipeline": "select rota.restart_pipeline(%(ended_run)s, 'a')",
    },
    "an operator who forces": {
        "retry_with_dependants": "select rota.retry_with_dependants(%(dead)s)",
        "retry_job force": "select rota.retry_job(%(held)s, force => true)",
        "set_priority": "select rota.set_priority(%(parent)s, -1000)",
        "reschedule_job": "select rota.reschedule_job(%(parent)s, delay => '1 hour')",
    },
    "an operator who stops": {
        "resume_ordering_key": "select rota.resume_ordering_key('halted')",
        "cancel_job that runs": "select rota.cancel_job(%(held)s)",
        "act_on_jobs move": _act("move", "parent", '{"queue": "moved"}'),
    },
    "an operator of many jobs": {
        "act_on_jobs retry": _act("retry", "dead", '{"payload": {}}'),
        "act_on_jobs cancel that runs": _act("cancel", "held"),
        "act_on_jobs reschedule": _act("reschedule", "parent", '{"delay": "1 hour"}'),
        "act_on_jobs set_priority": _act("set_priority", "parent", '{"priority": -1000}'),
        "act_on_jobs purge": _act("purge", "done"),
    },
    "an operator who removes many": {
        "act_on_jobs discard": _act("discard", "dead"),
        "act_on_jobs cancel": _act("cancel", "parent"),
        "act_on_jobs erase": _act("erase", "done"),
    },
    "settings": {
        "set_queue": "select rota.set_queue('q', max_attempts => 3)",
        "set_queue lease": "select rota.set_queue('q', lease => '1 hour',"
        " time_limit => '1 hour')",
        "set_queue keep": "select rota.set_queue('q', keep_finished => '0',"
        " keep_dead => '1 day')",
        "set_queue ageing": "select rota.set_queue('q', ageing => '1 minute')",
        "set_queue retry_budget": """
            select rota.set_queue('q', retry_budget => '{"per_minute": 9}')""",
        "set_type": "select rota.set_type('t', time_limit => '1 h', expires_after => '1 d')",
        "set_retry_rule": "select rota.set_retry_rule('E', 't', 'q', fatal => true)",
        "set_retry_rule for all": "select rota.set_retry_rule('E', fatal => true)",
        "set_breaker": "select rota.set_breaker('t', 'q', max_failures => 10)",
        "set_archive": "select rota.set_archive('kept')",
    },
    "pauses": {
        "pause_queue": "select rota.pause_queue('q')",
        "pause_type": "select rota.pause_type('t')",
        "pause_type in a queue": "select rota.pause_type('t', 'q', until => now() + '1 h')",
        "pause_all": "select rota.pause_all('because')",
    },
    "limits": {
        "set_limit": "select rota.set_limit(job_type => 't', max_running => 1000)",
        "set_limit of keys": "select rota.set_limit(limit_key => 'c:*', max_running => 1000)",
        "set_limit of a queue": "select rota.set_limit(queue => 'q', max_running => 1000)",
    },
    "a tick": {
        "tick": "select * from rota.tick()",
    },
    "grants, pipelines and schedules": {
        "grant_queue": "select rota.grant_queue('pg_monitor', 'q', 'worker')",
        "define_pipeline": f"select rota.define_pipeline('p', {STAGES})",
        "define_pipeline new": f"select rota.define_pipeline('new', {STAGES})",
        "disable_schedule": "select rota.disable_schedule('due')",
    },
    "schedules": {
        "schedule_job": "select rota.schedule_job('new', '@daily', 't', queue => 'fired')",
        "schedule_job again": "select rota.schedule_job('known', '@hourly',"
        " 't', queue => 'fired')",
        "enable_schedule": "select rota.enable_schedule('disabled')",
        "run_schedule_now": "select rota.run_schedule_now('known')",
    },
    "what takes away": {
        "set_breaker reset": "select rota.set_breaker('t', 'q', reset => true)",
        "set_limit reset": "select rota.set_limit(limit_key => 'c:*', reset => true)",
        "resume_queue": "select rota.resume_queue('paused')",
        "resume_type": "select rota.resume_type('paused', 'paused')",
        "resume_all": "select rota.resume_all()",
        "revoke_queue": "select rota.revoke_queue('pg_monitor', 'moving', 'producer')",
        "drop_pipeline": "select rota.drop_pipeline('dropped')",
        "unschedule_job": "select rota.unschedule_job('due')",
    },
    "a queue that moves": {
        "begin_queue_move": "select rota.begin_queue_move('paused', 6)",
        "take_moves": f"select * from rota.take_moves({MOVE})",
        "receive_moves": "select * from rota.receive_moves(2054, 6, 'coming', '[]')",
    },
    "a queue that has moved": {
        "end_queue_move": "select rota.end_queue_move('moving')",
    },
}
# Of a mover, whose lock is for other movers of that queue; of the owner and of pg_cron; and
# what leaves nothing open.
NOT_LEFT_OPEN = {
    "end_moves",
    *("set_database_number", "start_ticker", "stop_ticker", "stop_waiting", "tick_loop"),
}

# What a stranger calls, and what the first column of the answer is, or None for any.
STRANGERS: dict[str, tuple[str, Any]] = {
    "enqueue": (_enqueue(), None),
    "enqueue with the key of the job": (_enqueue("idempotency_key => 'k'"), None),
    "enqueue a key": (_enqueue("idempotency_key => 'another'"), None),
    "enqueue unique_for": (
        _enqueue("idempotency_key => 'another'", "unique_for => '1 hour'"),
        None,
    ),
    "enqueue rerun": (_enqueue("idempotency_key => 'more'", "on_conflict => 'rerun'"), None),
    "enqueue in order": (_enqueue("ordering_key => 'another'"), None),
    "enqueue depends_on": (_enqueue("depends_on => array[%(other0)s::bigint]"), None),
    "enqueue limit_key": (_enqueue("limit_key => 'c:another'"), None),
    "enqueue_many": (_many("", ', "idempotency_key": "k"', ', "idempotency_key": "z"'), None),
    "enqueue_to": ("select rota.enqueue_to(6, 't', ordering_key => 'another')", None),
    "start_pipeline": ("select rota.start_pipeline('p')", None),
    "claim_jobs": (
        "select job_type from rota.claim_jobs('b', '{q}', 2, job_types => '{theirs}')",
        "theirs",
    ),
    "claim_jobs of many queues": (
        "select job_type from rota.claim_jobs('b', '{q,none}', 2, job_types => '{theirs}')",
        "theirs",
    ),
    "claim_jobs of all types": ("select job_id from rota.claim_jobs('b', '{q}', 1)", None),
    "heartbeat": (f"select locked_until from rota.heartbeat({_lease('other0')})", None),
    "heartbeat_jobs": (
        f"select is_lost from rota.heartbeat_jobs({_batch('other0', 'other1')})",
        False,
    ),
    "set_progress": (f"select rota.set_progress({_lease('other0')}, 50)", None),
    "record_effect": (
        f"select rota.record_effect('mail', 'another', {_lease('other0')})",
        True,
    ),
    "finish_job": (f"select rota.finish_job({_lease('other0')})", "finished"),
    "finish_job of a run": (f"select rota.finish_job({_lease('other_run')})", "finished"),
    "finish_jobs": (
        f"select outcome from rota.finish_jobs({_batch('other1', 'other2')})",
        "finished",
    ),
    "finish_jobs beside the held one": (
        f"select outcome from rota.finish_jobs({_batch('other3', 'held')})",
        "finished",
    ),
    "finish_and_claim": (
        f"select outcome from rota.finish_and_claim('b', {_batch('other4')},"
        " queues => '{q}', job_types => '{theirs}')",
        "claimed",
    ),
    "end_jobs": (
        f"select answer from rota.end_jobs({_ending('other5', outcome='succeeded')})",
        "finished",
    ),
    "fail_job": (f"select status from rota.fail_job({_lease('other6')}, 'bad')", "failed"),
    "fail_job with a type": (
        f"select status from rota.fail_job({_lease('other7')}, 'bad', error_type => 'E',"
        " fatal => true)",
        "dead",
    ),
    "release_jobs": (f"select is_released from rota.release_jobs({_batch('other8')})", True),
    "retry_job": ("select rota.retry_job(%(other_dead)s)", None),
    "cancel_job": ("select rota.cancel_job(%(other8)s)", None),
    "set_priority": ("select rota.set_priority(%(other_dead)s, 5)", None),
    "act_on_jobs": (_act("reschedule", "other_dead", '{"delay": "1 hour"}'), 1),
    "act_on_jobs purge": (_act("purge", "other_done"), 1),
    "set_queue": ("select rota.set_queue('another', max_attempts => 3)", None),
    "set_type": ("select rota.set_type('another', time_limit => '1 h')", None),
    "pause_queue": ("select rota.pause_queue('another')", None),
    "pause_type": ("select rota.pause_type('another', 'q')", None),
    "set_retry_rule": ("select rota.set_retry_rule('E', 'another', fatal => true)", None),
    "set_breaker": ("select rota.set_breaker('another', max_failures => 10)", None),
    "define_pipeline": (f"select rota.define_pipeline('another', {STAGES})", None),
    "schedule_job": ("select rota.schedule_job('another', '@daily', 't')", None),
    "report_worker": ("select rota.report_worker('b', 'box', 1, '1', '{q}')", None),
    "wait_for_jobs": ("select is_active from rota.wait_for_jobs('{q}', '{none}')", None),
    "wait_for_result": (
        "select is_ended from rota.wait_for_result(%(other_run)s, false)",
        None,
    ),
    "sweep_stale_leases": ("select rota.sweep_stale_leases()", None),
    "tick": ("select was_skipped from rota.tick()", None),
    "tick again": ("select was_skipped from rota.tick()", None),
    # It may confine all that come after it.
    "grant_queue": ("select rota.grant_queue('pg_read_all_stats', 'q', 'worker')", True),
}


def _scene(db: psycopg.Connection[Any]) -> Params:
    """Make the jobs and settings of both sides; return the ids and tokens."""
    db.execute("select rota.set_database_number(5)")
    for statement in SETTINGS[:-1]:
        db.execute(statement.encode())
    params: Params = {}
    for name, statement in WAITING.items():
        row = db.execute(statement.encode(), params or None).fetchone()
        assert row is not None
        params[name] = row[0]
    db.execute(SETTINGS[-1].encode())
    db.execute(
        "update rota.jobs set run_at = run_at + interval '1 day' where status = 'queued'"
    )
    for name in STARTED:
        db.execute(
            "update rota.jobs as j set run_at = rota.now() where j.id = %s", (params[name],)
        )
        row = db.execute(
            "select job_id, lease_token from rota.claim_jobs('w', '{q,p}', lease => '1 hour')"
        ).fetchone()
        assert row is not None
        assert row[0] == params[name], name
        params[f"{name}_token"] = row[1]
    for statement in ENDED:
        db.execute(statement.encode(), params)
    return params


@pytest.fixture(scope="module")
def scene() -> Params:
    """The ids and tokens of the jobs that the template has."""
    return {}


@pytest.fixture(scope="module")
def template(
    template: str, scene: Params, server: EmbeddedPostgres, admin: psycopg.Connection[Any]
) -> str:
    """The database that every test gets a copy of, with the jobs and settings of both sides."""
    admin.execute(
        sql.SQL("create database strangers template {}").format(sql.Identifier(template))
    )
    with psycopg.connect(server.url("strangers"), autocommit=True) as connection:
        scene.update(_scene(connection))
    return "strangers"


@pytest.mark.parametrize("acts", ACTS)
def test_an_open_transaction_delays_only_what_it_has_taken(
    scene: Params, session: Callable[[], Session], acts: str
) -> None:
    """A acts and stays open; B makes the calls of strangers, none of which waits."""
    params = dict(scene)
    a, b = session(), session()
    b.fetch("set statement_timeout = '1s'")
    a.fetch("begin")
    for statement in ACTS[acts].values():
        a.fetch(statement.encode(), params)

    wrong = []
    for name, (statement, expected) in STRANGERS.items():
        if name == "act_on_jobs purge" and "enqueue depends_on" in ACTS[acts]:
            expected = 0  # nobody sees yet for which jobs theirs wait, so none is deleted
        try:
            answer = b.fetch(statement.encode(), params)
        except psycopg.Error as error:
            wrong.append(f"{name}: {error}")
        else:
            if expected is not None and [row[0] for row in answer][:1] != [expected]:
                wrong.append(f"{name}: {answer}")

    assert wrong == []


def test_each_act_and_each_argument_of_enqueue_is_left_open(
    db: psycopg.Connection[Any],
) -> None:
    functions = db.execute(
        "select proname::text, proargnames from pg_proc where not proname like '\\_%'"
        " and pronamespace = 'rota'::regnamespace and provolatile = 'v'"
    ).fetchall()
    statements = [statement for acts in ACTS.values() for statement in acts.values()]
    called = set(re.findall(r"rota\.(\w+)\(", " ".join(statements)))
    producing = " ".join(act for act in statements if "rota.enqueue(" in act)
    given = set(re.findall(r"(\w+) =>", producing)) | {"job_type", "payload"}

    assert {name for name, _ in functions} - called == NOT_LEFT_OPEN
    assert set(dict(functions)["enqueue"]) == given
