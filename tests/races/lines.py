"""A queue whose jobs stand in line, and every operation on it; played as bench.py says.

The first job shares an ordering key with the second, the third depends on it, and a fourth
has only its limit_key; there is room for one job of that key at a time.  In the end all that
can be claimed is claimed, so what a line has forgotten stays behind.
"""

from __future__ import annotations

from races.game import Game


def _enqueue(rules: str) -> str:
    return f"select rota.enqueue('t', queue => 'q', {rules}) as job_id"


JOB = "%(job_id)s::bigint"
LEASE = "%(job_id)s::bigint, %(token)s::bigint"
BATCH = "array[%(job_id)s::bigint], array[%(token)s::bigint]"
SECOND = "%(second_id)s::bigint"
THIRD = "%(third_id)s::bigint"
ANSWER = "::text as answer"
OPERATIONS = {
    "enqueue ordered": _enqueue("ordering_key => 'o'"),
    "enqueue limited": _enqueue("limit_key => 'c:1'"),
    "enqueue after": _enqueue(f"depends_on => array[{JOB}]"),
    "enqueue before": _enqueue(f"blocks => {THIRD}"),
    "enqueue before second": _enqueue(f"blocks => {SECOND}"),
    "enqueue many": "select m.is_new from rota.enqueue_many(jsonb_build_array("
    "jsonb_build_object('job_type', 't', 'queue', 'q', 'limit_key', 'c:1'), jsonb_build_object("
    f"'job_type', 't', 'queue', 'q', 'ordering_key', 'o', 'depends_on', array[{JOB}]))) as m",
    "finish": f"select rota.finish_job({LEASE}) as answer",
    "fail": f"select f.* from rota.fail_job({LEASE}, %(me)s) as f",
    "fail for good": f"select f.* from rota.fail_job({LEASE}, %(me)s, fatal => true) as f",
    "release": f"select r.is_released from rota.release_jobs({BATCH}) as r",
    "snooze": f"select rota.snooze_job({LEASE}, '1 hour') as run_at",
    "sweep": "select rota.sweep_stale_leases() as swept",
    "cancel": f"select rota.cancel_job({JOB}) as answer",
    "cancel third": f"select rota.cancel_job({THIRD}) as answer",
    "retry": f"select rota.retry_job({JOB}, true) as answer",
    "retry second": f"select rota.retry_job({SECOND}) as answer",
    "set priority": f"select rota.set_priority({JOB}, 5){ANSWER}",
    "reschedule": f"select rota.reschedule_job({JOB}, delay => '1 hour') as run_at",
    "resume key": "select rota.resume_ordering_key('o') as job_id",
    "limit key": f"select rota.set_limit(limit_key => 'c:1', max_running => 2){ANSWER}",
    "limit type": f"select rota.set_limit(job_type => 't', max_running => 100){ANSWER}",
    "limit no more": f"select rota.set_limit(limit_key => 'c:*', reset => true){ANSWER}",
    "set queue": f"select rota.set_queue('q', lease => '1 hour'){ANSWER}",
    "pause": f"select rota.pause_queue('q'){ANSWER}",
    "resume": f"select rota.resume_queue('q'){ANSWER}",
    "checks": "select rota._do_checks(1000) is null as is_null",
    "claim": "select count(*) is null as is_null from rota.claim_jobs(%(me)s, '{q}') as c",
}
_BACKOFF = '{"kind": "fixed", "base_seconds": 60, "jitter": 0}'
_CHECK = "select rota._do_checks(1000)"
_NEW = [
    f"select rota.set_queue('q', backoff => '{_BACKOFF}')",
    "select rota.set_limit(limit_key => 'c:*', max_running => 1)",
    _enqueue("ordering_key => 'o', limit_key => 'c:1'"),
    _enqueue("ordering_key => 'o'"),
    "select rota.enqueue('t', queue => 'q', depends_on => array[min(j.id)],"
    " if_parent_dead => 'wait') from rota.jobs as j",
    _enqueue("limit_key => 'c:1'"),
    _CHECK,
]
_CLAIM = "select from rota.claim_jobs('first', '{q}', lease => '3 hours')"
_LAPSE = "select from rota.claim_jobs('first', '{q}', lease => '1 second')"
_END = " from rota.jobs as j where j.status = 'running'"
_FINISH = "select rota.finish_job(j.id, j.lease_token)" + _END
_DIE = "select rota.fail_job(j.id, j.lease_token, 'bad', fatal => true)" + _END
STATES = {
    "waiting": _NEW,
    "running": [*_NEW, _CLAIM],
    "lapsed": [*_NEW, _LAPSE],
    "dead": [*_NEW, _CLAIM, _DIE],
    "dead, and looked at": [*_NEW, _CLAIM, _DIE, _CHECK],
    "succeeded": [*_NEW, _CLAIM, _FINISH],
}
_LATER = "update rota_test.clock set stopped_at = stopped_at + interval '1 second'"
_ENTER = "select rota._do_late('later', 1000)"
_HELD = "what somebody holds is left to a check, and which jobs have got the slots is chance"

LINES = Game(
    OPERATIONS,
    STATES,
    passed_over={
        "sweep": [{"swept": 0}],
        "checks": [{"is_null": False}],
        "release": [{"is_released": None}],
        # The producer does not wait for who is at the job that it names.
        "enqueue before": "RT013",
        "enqueue before second": "RT013",
    },
    # In the end everything may run: so what is not running has been forgotten.
    settle=(
        _CHECK, _LATER, _CHECK,
        "select rota.resume_queue('q');"
        " select rota.set_limit(limit_key => l.limit_key, job_type => l.job_type,"
        " reset => true) from rota.limits as l",
        # A check of a limit that was just looked at is due two seconds later.
        *(_LATER, _ENTER, _CHECK) * 3,
        "select from rota.claim_jobs('last', '{q}', 1000)",
        *(_LATER, _ENTER, _CHECK) * 3,
        "select from rota.claim_jobs('last', '{q}', 1000)",
    ),
    seams=("checks",),
    max_stops=3,
    loose=dict.fromkeys(("claim", "limit key", "limit type", "limit no more"), _HELD),
    ignored=frozenset(
        {
            *("upgrade_log", "maintenance", "pending_checks", "key_starts", "lane_starts"),
            *("limit_parts", "limit_slots"),
        }
    ),
    left_over="""
        select 'is due, and nobody finds it', j.id from rota.jobs as j
        where j.status in ('queued', 'failed') and j.run_at <= rota.now()
        union all
        select 'waits for nothing, and nobody knows', j.id from rota.jobs as j
        where j.status = 'blocked'
          and not exists (select from rota.dependencies as d where d.job_id = j.id)
          and not exists (
            select from rota.jobs as o
            where o.ordering_key = j.ordering_key and (o.id < j.id or o.status <> 'blocked')
          )
          and not exists (
            select from rota.halted_keys as s where s.ordering_key = j.ordering_key
          )
    """,
)  # fmt: skip
