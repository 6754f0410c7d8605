"""Functions without one of their guards: the history of a small load must be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

from faults.history import random_callers
from faults.history.checker import check
from mutants.pieces import NO_CONFLICT, TOKEN
from support.mutation import Mutation, is_noticed, some_of

BY_TOKEN = """\
and j.lease_token = _give_back.lease_tokens[array_position(_give_back.job_ids, j.id)]
"""
RUNNING = "and j.status = 'running'"
GROWING = "least(j.lease_token, 9223372036854775806) + 1, c_moment)"
SPREAD = "v_delay * (1 + v_jitter * (2 * random() - 1))"
AGAIN = """\
update rota.finished_jobs as f
    set status = 'dead'
    where f.id = (select max(l.id) from rota.finished_jobs as l);
    return cardinality(v_ids);"""
# The promise that is broken, and what is replaced in which function.
MUTANTS: dict[str, tuple[str, list[Mutation]]] = {
    "two claims take the same row": (
        "I1",
        [
            ("claim_jobs", "for update of j skip locked", ""),
            ("_lock_lanes", "for update skip locked", ""),
        ],
    ),
    "a lease is swept before its end": (
        "I1",
        [("_lock_late", "and j.locked_until < v_now", "and j.locked_until < v_now + '0.3 s'")],
    ),
    "a token that goes back": ("I2", [("claim_jobs", GROWING, "4711 - j.attempts)")]),
    "anybody may finish": ("I3", [("_archive_jobs", TOKEN, "")]),
    "anybody may send a heartbeat": (
        "I3",
        [("heartbeat", "and j.lease_token = heartbeat.lease_token", "")],
    ),
    "anybody may give back": (
        "I3",
        [
            ("_give_back", f"{BY_TOKEN} {RUNNING} for update", f"{RUNNING} for update"),
            ("_give_back", f"{BY_TOKEN} {RUNNING} returning", f"{RUNNING} returning"),
        ],
    ),
    "a finish that is told and was not": (
        "I3",
        [("_is_finished", "and f.lease_token = _is_finished.lease_token", "")],
    ),
    "a job that ends without a trace": (
        "I4",
        [
            (
                "_archive_jobs",
                "from ended as e\n    )",
                "from ended as e where e.id % 9 > 0\n    )",
            )
        ],
    ),
    "a key that is not unique": (
        "I5",
        [
            ("_insert_jobs", NO_CONFLICT, ""),
            ("_find_jobs", "when n.idempotency_key is null then", "when true then"),
        ],
    ),
    "an attempt that is given back and counts": (
        "I6",
        [("_give_back", "then 0 else j.attempts - 1 end", "then 0 else j.attempts end")],
    ),
    "a job that does not die": (
        "I6",
        [("_fail_running", "or v_job.attempts >= v_job.max_attempts then", "then")],
    ),
    "a retry at once": ("I7", [("_backoff", SPREAD, "0")]),
    "a claim that does not look at the time": (
        "I7",
        [
            (
                "claim_jobs",
                "and coalesce(j.own_place, j.run_at) <= v_end and j.run_at <= v_now",
                "",
            ),
            (
                "_lock_lanes",
                "and coalesce(j.own_place, j.run_at) <= _lock_lanes.ends[1]\n"
                f"{' ' * 14}and j.run_at <= _lock_lanes.due",
                "",
            ),
        ],
    ),
    "a job that is changed when it has ended": (
        "I8",
        [("_do_these_late", "return cardinality(v_ids);", AGAIN)],
    ),
    "an error of its own": ("I12", [("_raise_lost", "'RT002'", "'RT099'")]),
}
FORGET = "truncate rota.jobs, rota.finished_jobs, rota.job_errors"


@pytest.mark.parametrize("mutant", some_of(MUTANTS, every=len(MUTANTS)))
def test_a_guard_that_is_missing_is_found(
    dsn: str, db: psycopg.Connection[Any], tmp_path: Path, mutant: str
) -> None:
    promise, mutations = MUTANTS[mutant]
    if promise == "I5":
        db.execute("drop index rota.jobs_idempotency_key_idx")

    def look(seed: int) -> bool:
        folder = tmp_path / str(seed)
        random_callers.play(dsn, folder, seconds=0.8, steps=100, seed=seed)
        return promise in check(folder).broken

    assert is_noticed(db, mutations, look, tries=5, forget=FORGET)
