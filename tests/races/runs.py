"""A pipeline, and every operation on its jobs against every other; played as bench.py says.

The pipeline has two stages; it may be defined anew with a third between them, or dropped.
"""

from __future__ import annotations

from races.game import Game


def _stages(*names: str) -> str:
    stages = ", ".join(
        f'{{"stage": "{name}", "job_type": "t", "queue": "q"}}' for name in names
    )
    return f"select rota.define_pipeline('p', '[{stages}]')::text as answer"


def _start(rules: str, by: str = "%(me)s::text") -> str:
    return f"""
        select rota.start_pipeline('p', jsonb_build_object('by', {by}), {rules}) as job_id"""


JOB = "%(job_id)s::bigint"
LEASE = "%(job_id)s::bigint, %(token)s::bigint"
SECOND = "%(second_id)s::bigint"
# The first claim of each state, in the third minute; the token is that of the first stage.
FIRST_CLAIM = "extract(epoch from timestamptz '2026-03-01 11:03:00+00') * 1000000"
EARLIER = f"%(job_id)s::bigint, ({FIRST_CLAIM})::bigint"
BATCH = "array[%(job_id)s::bigint], array[%(token)s::bigint]"
AFTER = "depends_on => array[%(job_id)s::bigint]"
OPERATIONS = {
    "start": _start("idempotency_key => 'k', ordering_key => 'o'"),
    "start another": _start("ordering_key => 'o'"),
    "start after": _start(f"if_parent_dead => 'wait', {AFTER}"),
    "enqueue keep": "select rota.enqueue('t', queue => 'q', idempotency_key => 'k') as job_id",
    "enqueue after": f"select rota.enqueue('t', queue => 'q', {AFTER}) as job_id",
    "define same": _stages("a", "b"),
    "define more": _stages("a", "m", "b"),
    "define less": _stages("b"),
    "drop": "select rota.drop_pipeline('p')::text as answer",
    "restart": f"select rota.restart_pipeline({JOB}, 'a') as job_id",
    "restart from b": f"select rota.restart_pipeline({JOB}, 'b') as job_id",
    "claim": "select c.job_id, c.stage, c.stage_input from rota.claim_jobs(%(me)s, '{q}') as c",
    "finish": f"select rota.finish_job({LEASE}, to_jsonb(%(me)s::text)) as answer",
    "finish to the end": f"select rota.finish_job({LEASE}, next_stage => 'end') as answer",
    "finish batch": "select f.outcome"
    f" from rota.finish_jobs({BATCH}, next_stages => '{{b}}') as f",
    "finish earlier": f"select rota.finish_job({EARLIER}) as answer",
    "finish earlier batch": "select f.outcome from rota.finish_jobs("
    f"array[%(job_id)s::bigint], array[({FIRST_CLAIM})::bigint]) as f",
    "fail earlier": f"select f.* from rota.fail_job({EARLIER}, %(me)s) as f",
    "fail for good": f"select f.* from rota.fail_job({LEASE}, %(me)s, fatal => true) as f",
    "sweep": "select rota.sweep_stale_leases() as swept",
    "cancel": f"select rota.cancel_job({JOB}, %(me)s) as answer",
    "cancel second": f"select rota.cancel_job({SECOND}, %(me)s) as answer",
    "retry": f"select rota.retry_job({JOB}) as answer",
    "retry by force": f"select rota.retry_job({JOB}, true) as answer",
    "retry second": f"select rota.retry_job({SECOND}, true) as answer",
    "checks": "select rota._do_checks(1000) is null as is_null",
}
_DEFINE = f"""
    select rota.set_queue(
        'q', backoff => '{{"kind": "fixed", "base_seconds": 60, "jitter": 0}}');
    {_stages("a", "b")}
"""
_NEW = _start("idempotency_key => 'k', ordering_key => 'o'", by="'first'")
_CLAIM = "select from rota.claim_jobs('first', '{q}', lease => '3 hours')"
_LAPSE = "select from rota.claim_jobs('first', '{q}', lease => '1 second')"
_FINISH = "select rota.finish_job(j.id, j.lease_token, '1') from rota.jobs as j"
_FINISH += " where j.status = 'running'"
_FAIL = "select from rota.jobs as j, rota.fail_job(j.id, j.lease_token, 'bad', fatal => true)"
_FAIL += " where j.status = 'running'"
_CANCEL = "select rota.cancel_job(j.id, 'first') from rota.jobs as j where j.status = 'running'"
_CHILD = (
    "select rota.enqueue('c', queue => 'q', depends_on => array[min(r.id)])"
    " from rota.job_runs as r"
)
_NEXT = _start("ordering_key => 'o'", by="'next'")
_CHECK = "select rota._do_checks(1000)"
STATES = {
    "none": [_DEFINE],
    "waiting": [_DEFINE, _NEW, _CHECK],
    "running": [_DEFINE, _NEW, _CLAIM],
    "running, others wait": [_DEFINE, _NEW, _CLAIM, _CHILD, _NEXT, _CHECK],
    "running, to be cancelled": [_DEFINE, _NEW, _CLAIM, _CANCEL],
    "lapsed": [_DEFINE, _NEW, _LAPSE],
    "in its second stage": [_DEFINE, _NEW, _CLAIM, _FINISH],
    "running its second stage": [_DEFINE, _NEW, _CLAIM, _FINISH, _CLAIM, _CHECK],
    "running its second stage, to be cancelled": [
        _DEFINE, _NEW, _CLAIM, _FINISH, _CLAIM, _CANCEL,
    ],
    "succeeded": [_DEFINE, _NEW, _CLAIM, _FINISH, _CLAIM, _FINISH],
    "cancelled after its first stage": [_DEFINE, _NEW, _CLAIM, _CANCEL, _FINISH],
    "dead": [_DEFINE, _NEW, _CLAIM, _FAIL],
    "dead, others wait": [_DEFINE, _NEW, _CLAIM, _NEXT, _CHECK, _FAIL],
    "dead in its second stage": [_DEFINE, _NEW, _CLAIM, _FINISH, _CLAIM, _FAIL],
    "running, and the pipeline is dropped": [
        _DEFINE, _NEW, _CLAIM, "select rota.drop_pipeline('p')",
    ],
}  # fmt: skip

RUNS = Game(
    OPERATIONS,
    STATES,
    passed_over={
        "claim": [],
        "sweep": [{"swept": 0}],
        "finish batch": [{"outcome": "busy"}],
        "finish earlier batch": [{"outcome": "busy"}],
        "checks": [{"is_null": False}],
    },
    settle=(
        _CHECK,
        "update rota_test.clock set stopped_at = stopped_at + interval '1 second'",
        _CHECK,
    ),
    seams=("checks",),
    max_stops=3,
)
