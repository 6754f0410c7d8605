"""Every function that writes against every other, all of them on the same things.

In this world there is one of everything: a queue `q`, whose jobs share one idempotency key,
one ordering key and one limit, with room for a single job; a pipeline `p`, a schedule `s`, a
worker, an effect, a role that is confined to that queue and does all that is done.  The first
job is what everybody wants; a second waits for it, a third stands behind it.

Strictness is for the smaller games.  Here a claim or a tick finds more than one thing to take
and leaves what somebody holds, so the pairs with one of them are looked at for errors,
warnings, endless waits and broken rules, and for work that nobody would ever find again.
"""

from __future__ import annotations

from races.game import Game

JOB = "%(job_id)s::bigint"
LEASE = "%(job_id)s::bigint, %(token)s::bigint"
BATCH = "array[%(job_id)s::bigint], array[%(token)s::bigint]"
ENDING = (
    "jsonb_build_object('job_id', %(job_id)s::bigint, 'lease_token', %(token)s::bigint,"
    " 'outcome', 'failed', 'error', 'bad')"
)
ME = "%(me)s"
ANSWER = "::text as answer"
LINE = "ordering_key => 'o', limit_key => 'c:1'"
EFFECT = f"'mail', 'e', {LEASE}"
ROLE = "racer"


def _schedule(text: str) -> str:
    return f"""
        select s.* from rota.schedule_job('s', '{text}', 't', queue => 'q') as s"""


def _stages(*names: str) -> str:
    stages = ", ".join(
        f'{{"stage": "{name}", "job_type": "t", "queue": "q"}}' for name in names
    )
    return f"select rota.define_pipeline('p', '[{stages}]'){ANSWER}"


def _jobs(*jobs: str) -> str:
    objects = ", ".join(f"jsonb_build_object('job_type', 't', 'queue', 'q', {j})" for j in jobs)
    return f"select m.is_new from rota.enqueue_many(jsonb_build_array({objects})) as m"


# One line for each function that writes, at least.
OPERATIONS = {
    "enqueue": f"select rota.enqueue('t', queue => 'q', {LINE}) as job_id",
    "enqueue keyed": "select rota.enqueue('t', queue => 'q', idempotency_key => 'k',"
    " on_conflict => 'rerun') as job_id",
    "enqueue after": "select rota.enqueue('t', queue => 'q',"
    " depends_on => array[%(job_id)s::bigint]) as job_id",
    "enqueue before": "select rota.enqueue('t', queue => 'q',"
    " blocks => %(second_id)s) as job_id",
    "enqueue many": _jobs(
        "'idempotency_key', 'k'", "'ordering_key', 'o'", "'blocks', %(second_id)s::bigint"
    ),
    "start pipeline": "select rota.start_pipeline('p', idempotency_key => 'k',"
    f" {LINE}) as job_id",
    "claim": f"select c.job_id, c.attempt from rota.claim_jobs({ME}, '{{q}}', 2) as c",
    "finish": f"select rota.finish_job({LEASE}) as answer",
    "finish batch": f"select f.outcome from rota.finish_jobs({BATCH}) as f",
    "finish and claim": "select f.outcome, f.job_id"
    f" from rota.finish_and_claim({ME}, {BATCH}, queues => '{{q}}') as f",
    "end batch": f"select e.answer from rota.end_jobs(jsonb_build_array({ENDING})) as e",
    "fail": f"select f.* from rota.fail_job({LEASE}, 'bad', fatal => true) as f",
    "snooze": f"select rota.snooze_job({LEASE}, '1 hour') as run_at",
    "release": f"select r.is_released from rota.release_jobs({BATCH}) as r",
    "heartbeat": f"select h.* from rota.heartbeat({LEASE}) as h",
    "heartbeat batch": f"select is_lost from rota.heartbeat_jobs({BATCH})",
    "progress": f"select rota.set_progress({LEASE}, 50){ANSWER}",
    "record effect": f"select rota.record_effect({EFFECT}, 'again') as answer",
    "complete effect": f"select rota.complete_effect({EFFECT}) as answer",
    "withdraw effect": f"select rota.withdraw_effect({EFFECT}){ANSWER}",
    "settle effect": "select rota.settle_effect('mail', 'e', 'done') as job_id",
    "report worker": f"select rota.report_worker('w', {ME}, 1, '1', '{{q}}'){ANSWER}",
    "forget worker": f"select rota.deregister_worker('w'){ANSWER}",
    "wait for jobs": "select w.look_again_in < '1 s' as is_soon"
    " from rota.wait_for_jobs('{q}', '{x}') as w",
    "poll actively": "select w.is_active from rota.wait_for_jobs('{q}', active => true) as w",
    "stop waiting": f"select rota.stop_waiting(){ANSWER}",
    "tick": "select true as is_done from rota.tick()",
    "tick alone": "select t.was_skipped is null as is_null from rota.tick() as t",
    "tick loop": "call rota.tick_loop('1 ms', '1 ms')",
    "sweep": "select rota.sweep_stale_leases() is null as is_null",
    "start ticker": "select rota.start_ticker() as answer",
    "stop ticker": "select rota.stop_ticker() as answer",
    "retry all": f"select rota.retry_with_dependants({JOB}, true) as jobs",
    "retry": f"select rota.retry_job({JOB}, true) as answer",
    "cancel": f"select rota.cancel_job({JOB}) as answer",
    "set priority": f"select rota.set_priority({JOB}, 5){ANSWER}",
    "reschedule": f"select rota.reschedule_job({JOB}, delay => '1 hour') as run_at",
    "pause": f"select rota.pause_queue('q'){ANSWER}",
    "resume": f"select rota.resume_queue('q'){ANSWER}",
    "pause type": f"select rota.pause_type('t', 'q'){ANSWER}",
    "resume type": f"select rota.resume_type('t', 'q'){ANSWER}",
    "pause all": f"select rota.pause_all(){ANSWER}",
    "resume all": f"select rota.resume_all(){ANSWER}",
    "act on jobs": "select a.changed from rota.act_on_jobs('set_priority',"
    f" jsonb_build_object('ids', array[{JOB}]), '{{\"priority\": 5}}') as a",
    "wait for result": f"select w.is_ended from rota.wait_for_result({JOB}, false) as w",
    "set queue": f"select rota.set_queue('q', keep_finished => '0', max_attempts => 5){ANSWER}",
    "limit key": f"select rota.set_limit(limit_key => 'c:*', max_running => 2){ANSWER}",
    "limit type": f"select rota.set_limit(job_type => 't', max_running => 1){ANSWER}",
    "limit no more": f"select rota.set_limit(limit_key => 'c:*', reset => true){ANSWER}",
    "archive": f"select rota.set_archive(){ANSWER}",
    "set type": f"select rota.set_type('t', expires_after => '1 day'){ANSWER}",
    "retry rule": f"select rota.set_retry_rule('E', fatal => true){ANSWER}",
    "breaker": f"select rota.set_breaker('t', 'q', max_failures => 1000){ANSWER}",
    "resume key": "select rota.resume_ordering_key('o') as job_id",
    "define pipeline": _stages("a", "m", "b"),
    "drop pipeline": f"select rota.drop_pipeline('p'){ANSWER}",
    "restart pipeline": f"select rota.restart_pipeline({JOB}, 'a') as job_id",
    "schedule": _schedule("30 * * * *"),
    "unschedule": f"select rota.unschedule_job('s'){ANSWER}",
    "enable schedule": "select rota.enable_schedule('s') as next_run_at",
    "disable schedule": f"select rota.disable_schedule('s'){ANSWER}",
    "run schedule now": "select rota.run_schedule_now('s') as job_id",
    "enqueue to": "select rota.enqueue_to(6, 't', queue => 'q', ordering_key => 'o') as job_id",
    "take forwards": "select f.job_id from rota.take_forwards('w', 6) as f",
    "end forwards": f"select rota.end_forwards('{{}}', '{{}}', '[]'){ANSWER}",
    "receive jobs": "select r.job_id from rota.receive_jobs(7, '{1030}',"
    ' \'{2026-01-12}\', \'[{"job_type": "t", "queue": "q"}]\') as r',
    "begin move": "select rota.begin_queue_move('m', 6) > 0 as answer",
    "end move": f"select rota.end_queue_move('m'){ANSWER}",
    "take moves": "select t.job_ids from rota.take_moves(1) as t",
    "receive moves": "select r.job_id from rota.receive_moves(1, 6, 'n', '[]') as r",
    "end moves": f"select rota.end_moves(1, '{{}}', '[]'){ANSWER}",
    # No transaction can undo what is done to a sequence: so it stays that of the states.
    "database number": f"select rota.set_database_number(7){ANSWER}",
    "grant queue": f"select rota.grant_queue('{ROLE}', 'q') as answer",
    "revoke queue": f"select rota.revoke_queue('{ROLE}', 'q') as answer",
}
_MANY = "looks at several jobs, and takes those that nobody holds"
_LATER = "what somebody holds is left to a check, and to the tick that does it"
LOOSE = {
    **dict.fromkeys(("claim", "finish and claim"), _MANY),
    **dict.fromkeys(("tick", "tick alone", "tick loop", "sweep"), _MANY),
    **dict.fromkeys(("limit key", "limit type", "limit no more"), _LATER),
    **dict.fromkeys(("finish batch", "end batch"), "is told busy where somebody holds the job"),
    "poll actively": "is told no while another is the active one, also one who rolls back",
    "act on jobs": "is told of a conflict where somebody holds the job",
    "enqueue keyed": "asks for a run that follows where somebody holds the job",
    **dict.fromkeys(
        ("heartbeat batch", "release"), "is told nothing where somebody holds the job"
    ),
}
_BACKOFF = '{"kind": "fixed", "base_seconds": 60, "jitter": 0}'
_THINGS = [
    "select rota.set_database_number(7)",
    f"select rota.set_queue('q', backoff => '{_BACKOFF}')",
    "select rota.set_limit(limit_key => 'c:*', max_running => 1)",
    _stages("a", "b"),
    _schedule("0 * * * *"),
    "select rota.report_worker('w', 'box', 1, '1', '{q}')",
    f"select rota.grant_queue('{ROLE}', 'q', a)"
    " from unnest('{worker,producer}'::text[]) as a",
    f"select rota.grant_queue('{ROLE}', 'forward:6', 'worker')",
]
_RUN = f"select rota.start_pipeline('p', idempotency_key => 'k', {LINE})"
_PLAIN = f"select rota.enqueue('t', queue => 'q', idempotency_key => 'k', {LINE})"
_CHECK = "select rota._do_checks(1000)"
_CLAIM = "select from rota.claim_jobs('first', '{q}', lease => '3 hours')"
_LAPSE = "select from rota.claim_jobs('first', '{q}', lease => '1 second')"
_EFFECT = "select rota.record_effect('mail', 'e', j.id, j.lease_token) from rota.jobs as j"
_OTHERS = [
    "select rota.enqueue('t', queue => 'q', depends_on => array[min(r.id)],"
    " if_parent_dead => 'wait') from rota.job_runs as r",
    f"select rota.enqueue('t', queue => 'q', {LINE})",
    _CHECK,
]
_DIE = """
    select from rota.jobs as j, rota.fail_job(j.id, j.lease_token, 'bad', fatal => true)
    where j.status = 'running'
"""
STATES = {
    "a job waits": [*_THINGS, _PLAIN, _CHECK, *_OTHERS],
    "a run is under way": [*_THINGS, _RUN, _CHECK, _CLAIM, _EFFECT, *_OTHERS],
    "a lease is over": [*_THINGS, _PLAIN, _CHECK, _LAPSE, _EFFECT, *_OTHERS],
    "a run is dead": [*_THINGS, _RUN, _CHECK, _CLAIM, _EFFECT, *_OTHERS, _DIE],
}
_LATER = "update rota_test.clock set stopped_at = stopped_at + interval '3 seconds'"
_ENTER = "select rota._do_late('later', 1000)"
SETTLE = (
    _CHECK,
    *(_LATER, _ENTER, _CHECK) * 2,
    "select from rota.claim_jobs('last', '{q}', 1000)",
    # What was held for a limit that has room is let go.
    *(_LATER, _ENTER, _CHECK) * 2,
    "select from rota.claim_jobs('last', '{q}', 1000)",
)
# After the last claim; a job behind a limit may well wait.
LEFT_OVER = """
    select 'is due, and nobody finds it', j.id from rota.jobs as j
    where j.status in ('queued', 'failed') and j.hold is null and j.queue = 'q'
      and j.run_at <= rota.now()
      and not exists (select from rota.pauses as p where coalesce(p.queue, 'q') = 'q')
    union all
    select 'waits for nothing, and nobody knows', j.id from rota.jobs as j
    where j.status = 'blocked'
      and not exists (select from rota.dependencies as d where d.job_id = j.id)
      and not exists (
        select from rota.jobs as o
        where o.ordering_key = j.ordering_key and o.status <> 'blocked'
      )
      and not exists (
        select from rota.halted_keys as s where s.ordering_key = j.ordering_key
      )
      and not exists (
        select from rota.jobs as o join rota.dependencies as d on d.job_id = o.id
        where o.ordering_key = j.ordering_key and o.id < j.id
      )
    union all
    select 'has room, and nobody claims it', min(j.id) from rota.jobs as j
    where j.status in ('queued', 'failed') and j.limit_key = 'c:1' and j.run_at <= rota.now()
      and not exists (select from rota.pauses as p where coalesce(p.queue, 'q') = 'q')
      and not exists (
        select from rota.jobs as r
        where r.status = 'running' and (r.limit_key = 'c:1' or exists (
            select from rota.limits as l where l.job_type = 't'))
      )
    having count(*) > 0
"""

WORLD = Game(
    OPERATIONS,
    STATES,
    settle=SETTLE,
    seams=("checks",),
    parts={"checks": _CHECK},
    loose=LOOSE,
    # The producer does not wait for who is at the job that it names.
    passed_over={"enqueue before": "RT013", "enqueue many": "RT013"},
    outside=frozenset({"tick alone", "tick loop"}),
    # Who looked where, and when; what follows from it is seen in the jobs.
    ignored=frozenset(
        {
            *("upgrade_log", "maintenance", "pending_checks", "key_starts", "lane_starts"),
            *("limit_parts", "limit_slots"),
        }
    ),
    max_stops=3,
    left_over=LEFT_OVER,
    role=ROLE,
)
