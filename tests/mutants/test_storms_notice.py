"""Functions without one of their guards: the model of a storm must not take them for right."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from model import storm
from mutants.pieces import ALL_START, NO_CONFLICT, TOKEN
from support.mutation import is_noticed

FROM_ANYWHERE = (
    "_first_blocked",
    "(j.ordering_key, j.id) >= (_first_blocked.ordering_key, _first_blocked.first_id)",
    "j.ordering_key = _first_blocked.ordering_key",
)
OLDER = "coalesce(k.source_updated_at, '-infinity') < excluded.source_updated_at"
MUTANTS = {
    "a key that is not unique": (
        "keys",
        [
            ("enqueue", NO_CONFLICT, ""),
            ("_insert_jobs", NO_CONFLICT, ""),
        ],
        "beside job",
    ),
    "an older version that is taken": (
        "keys",
        [("_hold_key", OLDER, "true")],
        "took version",
    ),
    "a rerun that is lost": (
        "rerun",
        [
            ("_archive_jobs", "if v_keyed is not null", "if false"),
            ("_check_reruns", "rota._insert_at_once(v_new_job)", "array[0::bigint]"),
        ],
        "never ran version",
    ),
    "a worker that lost its lease and may finish": (
        "effects",
        [("_archive_jobs", TOKEN, "")],
        "with the lease of another",
    ),
    "a record that is taken from its holder": (
        "effects",
        [("record_effect", "and rota._is_leased(", "and false and rota._is_leased(")],
        "which held its lease",
    ),
    "a key that has two heads": (
        "order",
        [
            ("_key_head", "and j.status <> 'blocked'", "and false"),
            FROM_ANYWHERE,
        ],
        "beside job",
    ),
    "a key whose last job goes first": (
        "order",
        [
            FROM_ANYWHERE,
            ("_first_blocked", "order by j.ordering_key, j.id", "order by j.id desc"),
        ],
        "started before",
    ),
    "a dead job that holds nobody up": (
        "order",
        [
            ("_leave_keys", "and not e.skip_dead", "and false"),
            ("_leave_keys", "(_leave_keys.new_status <> 'dead' or e.skip_dead)", "true"),
        ],
        "although job",
    ),
    "a head that is below the start of its key": (
        "order",
        [
            *ALL_START,
            ("_may_be_head", "boolean := job_id < v_start", "boolean := false"),
            ("_may_be_head", "if job_id < v_start then", "if false then"),
            ("_open_jobs", "o.id < rota._key_start(o.ordering_key)", "false"),
        ],
        "beside job",
    ),
    "a turn that is not passed on": (
        "order",
        [
            (
                "_leave_keys",
                "where e.ordering_key is not null",
                "where e.definition is not null",
            )
        ],
        "is left with jobs",
    ),
    "a parent that is not looked for": (
        "dependencies",
        [
            (
                "_open_children",
                "num_nonnulls(c.ordering_key, c.parent_id)",
                "num_nonnulls(c.ordering_key)",
            ),
            ("_open_free", "where rota._newest_parent(h.id) is null", "where true"),
        ],
        "before its parents",
    ),
    "a parent that tells nobody": (
        "dependencies",
        [("_parents_ended", "where n.edges > 0", "where false")],
        "is left blocked",
    ),
    "a parent that is dead and counts": (
        "dependencies",
        [
            (
                "_check_parent",
                "where c_status = 'succeeded' and j.id is not null\n"
                "            or j.if_parent_dead = 'run'",
                "where true",
            )
        ],
        "before its parents",
    ),
    "a last job that takes a part when it has started": (
        "dependencies",
        [("_block_children", "and j.status = 'blocked'", "")],
        "before its parents",
    ),
    "a slot that is given back twice": (
        "limits",
        [
            (
                "_leave_limits",
                "rota._give_slots(_leave_limits.limit_names)",
                "rota._give_slots(_leave_limits.limit_names || _leave_limits.limit_names)",
            )
        ],
        "as one of",
    ),
    "a slot that is free and nobody is told": (
        "limits",
        [
            ("_leave_limits", "rota._open_held(v_name, slots_given => v_given)", "null"),
            ("_check_limit", "if v_free > 0 and v_next <= rota.now() then", "if false then"),
        ],
        "is left",
    ),
    "a key that keeps its old credit": (
        "fairness",
        [
            (
                "_job_comes_in",
                "v_first := rota._first_place(queue, priority)",
                "v_first := 'epoch'",
            ),
            (
                "_give_places",
                "least(rota._first_place(v_queue, v_lane), v_kind.first_place)",
                "'epoch'",
            ),
        ],
        "before all others",
    ),
    "a job that is given back behind its key": (
        "fairness",
        [
            (
                "_give_places",
                "case when _give_places.keep_places and n.own_lane is null",
                "case when false",
            )
        ],
        "behind its place",
    ),
    "a key that takes more than its share": (
        "fairness",
        [("_last_of_key", "jobs := coalesce(jobs, 0);", "jobs := 0;")],
        "took the place of its key",
    ),
    "a key that waits behind all others": (
        "fairness",
        [
            (
                "_last_of_key",
                "and coalesce(j.limit_key, '') = c_key and j.own_place is not null"
                " and coalesce(j.hold, '') <> 'time' and j.status in ('queued', 'failed')"
                " and coalesce(j.own_place, j.run_at) >= _last_of_key.first_place",
                "and j.own_place is not null and j.hold is null"
                " and j.status in ('queued', 'failed')",
            )
        ],
        "is the first of key",
    ),
}
# A guard that an index holds too is missing only without it.
HELD_BY = {
    "a key that is not unique": "jobs_idempotency_key_idx",
}
FORGET = "; ".join(
    ["drop schema storm cascade"]
    + [
        f"delete from rota.{table}"
        for table in (
            "jobs",
            "effects",
            "halted_keys",
            "dependencies",
            "pending_checks",
            "limits",
            "limit_slots",
            "limit_parts",
            "fair_queues",
        )
    ]
)

# One is for `make test`, the others are for `make prove`.
FIRST = "a key that is not unique"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, marks=[] if m == FIRST else [pytest.mark.long]) for m in MUTANTS],
)
def test_a_guard_that_is_missing_is_found(
    dsn: str, db: psycopg.Connection[Any], mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a fast machine few jobs are in their lane for as long as the checker wants to be sure.
    monkeypatch.setattr("model.storm_fairness.WHILE", 30_000_000)
    feature, mutations, problem = MUTANTS[mutant]
    if mutant in HELD_BY:
        db.execute(f"drop index rota.{HELD_BY[mutant]}")

    def look(seed: int) -> bool:
        found, _ = storm.play(dsn, feature, steps=400, seed=seed, processes=4)
        return any(problem in str(each) for each in found)

    assert is_noticed(db, mutations, look, tries=60, forget=FORGET)
