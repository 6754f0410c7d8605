"""Every operation on a schedule against every other; what is played is in pairs.py.

In the end all that is still to be done is done, so that what one of two has left to a later
tick does not look like a difference.
"""

from __future__ import annotations

from typing import Any

from races.game import Game


def _schedule(text: str, **arguments: str) -> str:
    given = {"name": "'s'", "schedule": f"'{text}'", "job_type": "'t'", **arguments}
    named = ", ".join(f"{name} => {value}" for name, value in given.items())
    return f"select d.* from rota.schedule_job({named}) as d"


HOURLY, LATER, OFTEN = "0 * * * *", "30 12 * * *", "every 20 minutes"
ALL, SKIP, QUEUE = {"catch_up": "'all'"}, {"overlap": "'skip'"}, {"overlap": "'queue'"}
JOB = "%(job_id)s::bigint"
LEASE = "%(job_id)s::bigint, %(token)s::bigint"
OPERATIONS = {
    "tick": "select rota._enqueue_due_schedules(1000) as enqueued",
    "tick one by one": "select rota._enqueue_one_by_one(rota.now(), 1000) as enqueued",
    "checks": "select rota._do_checks(1000) is null as is_null",
    "schedule": _schedule(HOURLY),
    "schedule later": _schedule(LATER, payload="jsonb_build_object('by', %(me)s::text)"),
    "schedule payload": _schedule(HOURLY, payload="jsonb_build_object('by', %(me)s::text)"),
    "schedule after": _schedule("after 10 minutes"),
    "unschedule": "select rota.unschedule_job('s')::text as answer",
    "enable": "select rota.enable_schedule('s') as next_run_at",
    "disable": "select rota.disable_schedule('s')::text as answer",
    "run now": "select rota.run_schedule_now('s') as job_id",
    "claim": "select c.job_id, c.attempt, c.scheduled_for from rota.claim_jobs(%(me)s) as c",
    "finish": f"select rota.finish_job({LEASE}) as answer",
    "fail": f"select f.* from rota.fail_job({LEASE}, %(me)s, fatal => true) as f",
    "cancel": f"select rota.cancel_job({JOB}, %(me)s) as answer",
    "retry": f"select rota.retry_job({JOB}) as answer",
}
PASSED_OVER: dict[str, list[Any]] = {
    "tick": [{"enqueued": 0}],
    "tick one by one": [{"enqueued": 0}],
    "checks": [{"is_null": False}],
    "claim": [],
}
_DUE = "select rota._enqueue_due_schedules(1000)"
_CHECK = "select rota._do_checks(1000)"
_NOW = "select rota.run_schedule_now('s')"
_CLAIM = "select from rota.claim_jobs('first', lease => '3 hours')"
_FINISH = "select rota.finish_job(j.id, j.lease_token) from rota.jobs as j"
_RETRY = "select rota.retry_job(f.id) from rota.finished_jobs as f"
_DISABLE = "select rota.disable_schedule('s')"
_AFTER = _schedule("after 10 minutes")
STATES = {
    "none": [],
    "waiting": [_schedule(LATER)],
    "waiting, its job running": [_schedule(LATER), _NOW, _CLAIM],
    "due": [_schedule(HOURLY)],
    "due, skip": [_schedule(HOURLY, **SKIP)],
    "due since long, one": [_schedule(OFTEN)],
    "due since long, all": [_schedule(OFTEN, **ALL)],
    "due since long, all queue": [_schedule(OFTEN, **ALL, **QUEUE)],
    "due, its job running": [_schedule(HOURLY), _NOW, _CLAIM],
    "due, its job running, skip": [_schedule(HOURLY, **SKIP), _NOW, _CLAIM],
    "due, its job running, queue": [_schedule(HOURLY, **QUEUE), _NOW, _CLAIM],
    "due, to end": [_schedule(HOURLY, ends_at="'2026-03-01 12:30+00'")],
    "due and bad": [
        _schedule(HOURLY),
        "update rota.job_definitions set schedule = 'no schedule'",
    ],
    "disabled": [_schedule(HOURLY), _DISABLE],
    "disabled by an error": [
        _schedule("30 11 * * *"),
        "update rota.job_definitions set is_enabled = false, disabled_at = rota.now(),"
        " last_error = 'bad', next_run_at = null",
    ],
    "after, due": [_AFTER],
    "after, waiting": [_schedule("after 2 hours"), _DUE, _CLAIM, _FINISH, _CHECK],
    "after, queued": [_AFTER, _DUE],
    "after, running": [_AFTER, _DUE, _CLAIM],
    "after, ended": [_AFTER, _DUE, _CLAIM, _FINISH],
    "after, due again": [_AFTER, _DUE, _CLAIM, _FINISH, _CHECK],
    "after, due, its job retried": [
        _AFTER, _DUE, _CLAIM, _FINISH, _CHECK, _RETRY, _CLAIM,
    ],
    "after, disabled, running": [_AFTER, _DUE, _CLAIM, _DISABLE],
}  # fmt: skip

SCHEDULES = Game(
    OPERATIONS,
    STATES,
    PASSED_OVER,
    settle=(
        _CHECK,
        _DUE,
        "update rota_test.clock set stopped_at = stopped_at + interval '1 second'",
        _CHECK,
    ),
    # What is due before a change is enqueued first.
    fronts={name: ("tick",) for name in OPERATIONS if name.startswith("schedule")},
    warnings=("'no schedule'",),
)
