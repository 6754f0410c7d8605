"""Every operation against every other on one key; how is told in bench.py.

An operation is a line in OPERATIONS, a state that a key can be in a line in STATES.
"""

from __future__ import annotations

from typing import Any

from races.game import Game


def _enqueue(rule: str, function: str = "enqueue", by: str = "%(me)s::text") -> str:
    return f"""
        select e.job_id from rota.{function}(
            't', jsonb_build_object('by', {by}), 'q', idempotency_key => 'k',
            backoff => '{{"kind": "fixed", "base_seconds": 60, "jitter": 0}}', {rule}
        ) as e (job_id)"""


def _enqueue_many(*rules: str, first: int = 0) -> str:
    jobs = ", ".join(
        f"jsonb_build_object('job_type', 't', 'queue', 'q', 'idempotency_key', 'k',"
        f" 'max_attempts', 3, 'payload', jsonb_build_object('by', %(me)s::text || {n})"
        f"{', ' if rule else ''}{rule})"
        for n, rule in enumerate(rules, first)
    )
    return (
        f"select m.job_id, m.is_new from rota.enqueue_many(jsonb_build_array({jobs})) as m"
        " order by m.ordinal"
    )


_REPLACE = "'on_conflict', 'replace'"
_RERUN = "'on_conflict', 'rerun'"
_VERSION_1 = f"{_RERUN}, 'updated_at', '2026-01-01'"
JOB = "%(job_id)s::bigint"
LEASE = "%(job_id)s::bigint, %(token)s::bigint"
CLAIMED = "c.job_id, c.lease_token, c.payload, c.attempt"
BATCH = "array[%(job_id)s::bigint], array[%(token)s::bigint]"
OPERATIONS = {
    "enqueue keep": _enqueue("max_attempts => 3"),
    "enqueue replace": _enqueue("max_attempts => 3, on_conflict => 'replace'"),
    "enqueue rerun": _enqueue("max_attempts => 3, on_conflict => 'rerun'"),
    "enqueue version 1": _enqueue("on_conflict => 'rerun', updated_at => '2026-01-01'"),
    "enqueue version 2": _enqueue("on_conflict => 'rerun', updated_at => '2026-01-02'"),
    "enqueue unique": _enqueue("unique_for => '1 day'"),
    "enqueue many": _enqueue_many("", ""),
    "enqueue many rerun": _enqueue_many(_REPLACE, _RERUN),
    "enqueue many mixed": _enqueue_many(_REPLACE, _VERSION_1),
    "claim": f"select {CLAIMED} from rota.claim_jobs(%(me)s, '{{q}}') as c",
    "finish": f"select rota.finish_job({LEASE}) as answer",
    "finish batch": f"select f.outcome from rota.finish_jobs({BATCH}) as f",
    "fail": f"select f.* from rota.fail_job({LEASE}, %(me)s) as f",
    "fail for good": f"select f.* from rota.fail_job({LEASE}, %(me)s, fatal => true) as f",
    "release": f"select r.is_released from rota.release_jobs({BATCH}) as r",
    "snooze": f"select rota.snooze_job({LEASE}, '1 hour') as run_at",
    "heartbeat": f"select h.* from rota.heartbeat({LEASE}) as h",
    "heartbeat batch": f"select is_lost, locked_until from rota.heartbeat_jobs({BATCH})",
    "reschedule": f"select rota.reschedule_job({JOB}, delay => '0') as run_at",
    "sweep": "select rota.sweep_stale_leases() as swept",
    "cancel": f"select rota.cancel_job({JOB}, %(me)s) as answer",
    "retry": f"select rota.retry_job({JOB}) as answer",
    "retry forced": f"select rota.retry_job({JOB}, true) as answer",
}
# The answers of those that lock with `skip locked`, where they passed over the job.
PASSED_OVER: dict[str, list[Any]] = {
    "claim": [],
    "sweep": [{"swept": 0}],
    "finish batch": [{"outcome": "busy"}],
    "heartbeat batch": [{"is_lost": False, "locked_until": None}],
    "release": [{"is_released": None}],
}
_NEW = _enqueue("max_attempts => 3", by="'first'")
_ONE_ATTEMPT = _enqueue("max_attempts => 1", by="'first'")
_CLAIM = "select from rota.claim_jobs('first', '{q}', lease => '3 hours')"
_LAPSE = "select from rota.claim_jobs('first', '{q}', lease => '1 second')"
_FINISH = "select rota.finish_job(j.id, j.lease_token) from rota.jobs as j"
_FAIL = "select from rota.jobs as j, rota.fail_job(j.id, j.lease_token, 'first')"
_DIE = _FAIL.replace("'first'", "'first', fatal => true")
_CANCEL = "select rota.cancel_job(j.id, 'first') from rota.jobs as j"
_AGAIN = _enqueue("on_conflict => 'rerun'", by="'next'")
_VERSION = _enqueue("on_conflict => 'rerun', updated_at => '2026-01-01'", by="'first'")
_UNIQUE = _enqueue("unique_for => '1 day'", by="'first'")
STATES = {
    "none": [],
    "waiting": [_NEW],
    "put off": [_enqueue("max_attempts => 3, delay => '1 day'", by="'first'")],
    "failed": [_NEW, _CLAIM, _FAIL],
    "running": [_NEW, _CLAIM],
    "running, to be rerun": [_NEW, _CLAIM, _AGAIN],
    "running, to be cancelled": [_NEW, _CLAIM, _CANCEL],
    "lapsed": [_NEW, _LAPSE],
    "lapsed, to be rerun": [_NEW, _LAPSE, _AGAIN],
    "lapsed at its last attempt": [_ONE_ATTEMPT, _LAPSE],
    "succeeded": [_NEW, _CLAIM, _FINISH],
    "succeeded, version 1": [_VERSION, _CLAIM, _FINISH],
    "succeeded, still unique": [_UNIQUE, _CLAIM, _FINISH],
    "succeeded, and again waiting": [_NEW, _CLAIM, _FINISH, _NEW],
    "dead": [_NEW, _CLAIM, _DIE],
    "cancelled": [_NEW, _CANCEL],
}

_CHECK = "select rota._do_checks(1000)"
_DUE = "update rota.pending_checks set due_at = '-infinity'"

KEYS = Game(
    OPERATIONS,
    STATES,
    PASSED_OVER,
    later=frozenset(
        {"enqueue rerun", "enqueue version 1", "enqueue version 2", "then rerun", "then mixed"}
    ),
    halves={
        "enqueue many rerun": ("first of many", "then rerun"),
        "enqueue many mixed": ("first of many", "then mixed"),
    },
    parts={
        "first of many": _enqueue_many(_REPLACE),
        "then rerun": _enqueue_many(_RERUN, first=1),
        "then mixed": _enqueue_many(_VERSION_1, first=1),
    },
    # What a check leaves to the next one, or could not do at once, that does.
    settle=(_CHECK, _DUE, _CHECK, _DUE, _CHECK),
)
