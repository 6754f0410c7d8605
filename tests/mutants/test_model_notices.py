"""Functions without one of their guards: the machine must tell each from the real one."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from model.acts import call_of
from model.database import opened
from model.machine import play
from model.rows import Divergence
from mutants.pieces import TOKEN
from support.mutation import Mutation, is_noticed, some_of

COUNTED = "attempts = least(j.attempts, 2147483646) + 1"
CANCELLED = "if v_job.cancel_requested_at is not null then"
GROWS = "least(j.lease_token, 9223372036854775806) + 1"
LEFT = "when _fail_running.fatals[v_n] or v_job.attempts >= v_job.max_attempts then 'dead'"
HELD = """\
          and j.lease_token = _fail_running.lease_tokens[
            array_position(_fail_running.job_ids, j.id)]
"""

MUTANTS: dict[str, list[Mutation]] = {
    "a finish with any token": [("_archive_jobs", TOKEN, "")],
    "a failure with any token": [("_fail_running", HELD, "")],
    "a heartbeat with any token": [
        ("heartbeat", "and j.lease_token = heartbeat.lease_token", "")
    ],
    "a job that has ended and may end again": [
        ("_is_finished", "and f.lease_token = _is_finished.lease_token", "")
    ],
    "a token that stands still with the clock": [("claim_jobs", GROWS, "j.lease_token")],
    "a forced retry that leaves the lease": [
        ("_requeue", "lease_token = j.lease_token + (j.status = 'running')::integer,", "")
    ],
    "an attempt that counts when it fails": [
        ("claim_jobs", COUNTED, "attempts = j.attempts"),
        (
            "_fail_running",
            "failed_at = v_now,",
            "failed_at = v_now, attempts = j.attempts + 1,",
        ),
    ],
    "an attempt too many": [("_fail_running", LEFT, LEFT.replace(">=", ">"))],
    "an attempt that is used by giving back": [
        ("_give_back", "then 0 else j.attempts - 1 end", "then 0 else j.attempts end")
    ],
    "a lease that ends a moment too early": [
        ("_lock_late", "and j.locked_until < v_now", "and j.locked_until <= v_now"),
        ("_has_late", "and j.locked_until < v_now", "and j.locked_until <= v_now"),
    ],
    "a cancel that nobody minds": [("_fail_running", CANCELLED, "if false then")],
    "a delay beyond its cap": [("_backoff", "v_cap / (1 + v_jitter)", "v_cap")],
    "a queue whose pause is not looked for": [
        ("_is_paused", "('all', 'queue ' || _is_paused.queue,", "("),
    ],
    "a job before its time": [
        (
            "_lock_lanes",
            "and coalesce(j.own_place, j.run_at) <= _lock_lanes.ends[1]\n"
            f"{' ' * 14}and j.run_at <= _lock_lanes.due",
            "",
        )
    ],
    "a lane in the order of its ids": [
        ("_lock_lanes", "order by coalesce(j.own_place, j.run_at), j.id", "order by j.id")
    ],
    "a key that is free too soon": [
        (
            "_enqueue_keyed",
            "_enqueue_keyed.unique_for is not null and k.unique_until > rota.now()",
            "false",
        ),
        ("_hold_key", "coalesce(k.unique_until, '-infinity') <= v_now", "true"),
    ],
    "a run after this one that is lost": [
        ("_archive_jobs", "if v_keyed is not null", "if false")
    ],
    "a token that does not outlive a retry": [
        (
            "_restore_jobs",
            "case when e.pipeline is null then e.lease_token\n",
            "case when e.pipeline is null then 0::bigint\n",
        )
    ],
    "a dead job that holds nobody up": [("_leave_keys", "and not e.skip_dead", "and false")],
    "an ordering key whose jobs do not wait": [
        ("_key_head", "and j.status <> 'blocked'", "and false"),
        (
            "_first_blocked",
            "(j.ordering_key, j.id) >= (_first_blocked.ordering_key, _first_blocked.first_id)",
            "j.ordering_key = _first_blocked.ordering_key",
        ),
    ],
    "a parent that nobody waits for": [
        (
            "_open_children",
            "num_nonnulls(c.ordering_key, c.parent_id)",
            "num_nonnulls(c.ordering_key)",
        ),
        ("_open_free", "where rota._newest_parent(h.id) is null", "where true"),
    ],
    "a parent that is dead and does not matter": [
        (
            "_check_parent",
            "where c_status = 'succeeded' and j.id is not null\n"
            "            or j.if_parent_dead = 'run'",
            "where true",
        )
    ],
    "a part that waits for others itself": [
        ("_check_waits", "num_nonnulls(depends_on, ordering_key) > 0 then", "false then")
    ],
    "a limit with a slot too many": [
        ("_adjust_slots", "then bound.max_running else 0", "then bound.max_running + 1 else 0")
    ],
    "a start that its rate does not count": [
        (
            "_take_starts",
            "bound.limit_name, v_cell, v_free",
            "bound.limit_name, v_cell, 0",
        )
    ],
    "a limit that nobody tells of its room": [
        (
            "_leave_limits",
            "perform rota._open_held(v_name, slots_given => v_given);",
            "null;",
        )
    ],
    "a time that nobody waits for any more": [
        ("_do_these_late", "rota._let_in(job_ids, 'time')", "'{}'::bigint[]")
    ],
    "a stage that follows whatever was said": [
        (
            "_end_stages",
            "coalesce(_end_stages.next_stages[h.place], s.next_stage)",
            "s.next_stage",
        )
    ],
    "a stage that does not know of the cancel": [
        (
            "_end_stages",
            "where n.stage is not null and h.cancel_requested_at is null",
            "where n.stage is not null",
        )
    ],
    "a run that is over with its first stage": [
        (
            "_end_stages",
            "filter (where n.stage is not null and h.cancel_requested_at is null)",
            "filter (where false)",
        ),
        ("_end_stages", "filter (where n.stage is null)", ""),
    ],
    "a stage whose finish nobody remembers": [
        ("_is_finished", "r.status = 'succeeded'", "r.status = 'dead'")
    ],
    "a token that is good for two stages": [
        ("_end_stages", "least(j.lease_token, 9223372036854775806) + 1", "j.lease_token")
    ],
    "a result of any stage at all": [("_stage_input", "and p.ordinal < stage.ordinal", "")],
    "an effect that is taken from its holder": [
        ("record_effect", "and rota._is_leased(", "and false and rota._is_leased(")
    ],
    "a job that is due and explained as one for later": [
        ("_explain_time", "elsif job.run_at > c_now then", "elsif job.run_at >= c_now then")
    ],
    "a planned time that is skipped for nobody": [
        ("_plan_due", "when v_group.is_live then 'skipped'", "when false then ''")
    ],
    "a late tick that makes up for all": [
        ("_plan_due", "v_group.catch_up_max else 1 end", "v_group.catch_up_max else 2 end")
    ],
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", some_of(MUTANTS, every=len(MUTANTS)))
def test_a_guard_that_is_missing_is_found(
    dsn: str, db: psycopg.Connection[Any], mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mutant == "a result of any stage at all":  # else one history in a thousand comes to it
        monkeypatch.setattr("model.machine.call_of", lambda _, *call: call_of("pass", *call))
    with opened(dsn) as database:

        def look(number: int) -> bool:
            try:
                play(database, number, examples=150, can_shrink=False)
            except Divergence as divergence:
                print(database.examples, divergence)  # noqa: T201
                return True
            return False

        assert is_noticed(db, MUTANTS[mutant], look, tries=6)
