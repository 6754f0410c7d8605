"""A running job, its effects and its lease, and everything that a worker does with them.

Two jobs run; the first has recorded the effect that both of them want.  Played as bench.py
says.
"""

from __future__ import annotations

from races.game import Game

JOB = "%(job_id)s::bigint"
LEASE = "%(job_id)s::bigint, %(token)s::bigint"
OTHER = "%(second_id)s::bigint, %(second_token)s::bigint"
BATCH = "array[%(job_id)s::bigint], array[%(token)s::bigint]"
EFFECT, THEIRS = f"'mail', 'e', {LEASE}", f"'mail', 'e', {OTHER}"
ANSWER = "::text as answer"
OPERATIONS = {
    "record": f"select rota.record_effect({EFFECT}) as answer",
    "record again": f"select rota.record_effect({EFFECT}, 'again') as answer",
    "record by another": f"select rota.record_effect({THEIRS}, keep => '1 hour') as answer",
    "record again by another": f"select rota.record_effect({THEIRS}, 'again') as answer",
    "complete": f"select rota.complete_effect({EFFECT}, to_jsonb(%(me)s::text)) as answer",
    "complete by another": f"select rota.complete_effect({THEIRS}) as answer",
    "withdraw": f"select rota.withdraw_effect({EFFECT}){ANSWER}",
    "settle": "select rota.settle_effect('mail', 'e', 'done', '7') as job_id",
    "settle to do it again": "select rota.settle_effect('mail', 'e', 'again') as job_id",
    "heartbeat": f"select h.* from rota.heartbeat({LEASE}, '10 minutes') as h",
    "heartbeat batch": f"select is_lost, locked_until from rota.heartbeat_jobs({BATCH})",
    "progress": f"select rota.set_progress({LEASE}, 50, %(me)s){ANSWER}",
    "finish": f"select rota.finish_job({LEASE}) as answer",
    "finish and claim": "select f.outcome"
    f" from rota.finish_and_claim(%(me)s, {BATCH}, queues => '{{q}}') as f",
    "keep and claim": "select f.outcome from rota.finish_and_claim(%(me)s,"
    " kept_job_ids => array[%(job_id)s::bigint], kept_lease_tokens => array[%(token)s::bigint],"
    " queues => '{q}') as f",
    "fail": f"select f.* from rota.fail_job({LEASE}, %(me)s) as f",
    "release": f"select r.is_released from rota.release_jobs({BATCH}) as r",
    "sweep": "select rota.sweep_stale_leases() as swept",
    "cancel": f"select rota.cancel_job({JOB}) as answer",
    "retry forced": f"select rota.retry_job({JOB}, true) as answer",
    "purge": "select rota._purge('effects', 1000) as purged",
}
_NEW = [
    "select rota.set_queue("
    '\'q\', backoff => \'{"kind": "fixed", "base_seconds": 60, "jitter": 0}\')',
    "select rota.enqueue('t', queue => 'q'), rota.enqueue('t', queue => 'q')",
]
_CLAIM = "select from rota.claim_jobs('first', '{q}', 2, '3 hours')"
_LAPSE = """
    select from rota.claim_jobs('first', '{q}', 1, '1 second');
    select from rota.claim_jobs('first', '{q}', 1, '3 hours')
"""
_FIRST = "from (select j.* from rota.jobs as j order by j.id limit 1) as j"
_RECORD = "select rota.record_effect('mail', 'e', j.id, j.lease_token, keep => '1 s') " + _FIRST
_DONE = "select rota.complete_effect('mail', 'e', j.id, j.lease_token) " + _FIRST
_END = "select rota.finish_job(j.id, j.lease_token) " + _FIRST
STATES = {
    "free": [*_NEW, _CLAIM],
    "recorded": [*_NEW, _CLAIM, _RECORD],
    "recorded, lapsed": [*_NEW, _LAPSE, _RECORD],
    "completed": [*_NEW, _CLAIM, _RECORD, _DONE],
    "unknown": [*_NEW, _CLAIM, _RECORD, _END],
}

LEDGER = Game(
    OPERATIONS,
    STATES,
    passed_over={
        "sweep": [{"swept": 0}],
        "heartbeat batch": [{"is_lost": False, "locked_until": None}],
        "release": [{"is_released": None}],
        "purge": [{"purged": 0}],
    },
    loose=dict.fromkeys(
        ("finish and claim", "keep and claim"),
        "is told busy of a job that is free a moment later, and then claims it",
    ),
)
