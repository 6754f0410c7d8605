"""The place of a job in its lane, where keys have fair shares."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from sql.helpers import Db, call, claim, enqueue, owner, owners, rows, value


def places(db: Db) -> dict[int, datetime]:
    return {row.id: row.own_place for row in rows(db, "select id, own_place from rota.jobs")}


def release(db: Db, jobs: list[Any]) -> None:
    call(db, "release_jobs", **owners(*jobs))


def end_together(db: Db, jobs: list[Any], outcome: str = "released") -> None:
    more = {"delay": "0"} if outcome == "snoozed" else {}
    call(db, "end_jobs", endings=json.dumps(
        [{**owner(job), "outcome": outcome, **more} for job in jobs]))  # fmt: skip


@pytest.mark.parametrize("give_back", [release, end_together])
def test_jobs_given_back_together_are_each_where_they_were(db, give_back):
    for key in "aabcaabd":
        enqueue(db, limit_key=key)
    before = places(db)

    give_back(db, claim(db, max_jobs=4))

    assert places(db) == before


def test_heads_of_ordering_keys_given_back_keep_their_turns(db):
    """The one that had to wait for its key has the lower id, and the later place."""
    enqueue(db, limit_key="x")
    line = [enqueue(db, ordering_key="k") for _ in range(2)]
    other = enqueue(db, ordering_key="l")
    while (job := claim(db)[0]).job_id != line[0]:
        value(db, "finish_job", **owner(job))
    value(db, "finish_job", **owner(job))
    before = places(db)
    assert before[other] < before[line[1]]

    release(db, claim(db, max_jobs=2)[::-1])

    assert places(db) == before


def test_a_job_that_is_given_back_is_not_behind_the_backlog_of_its_key(db):
    first, *_ = [enqueue(db, limit_key="large") for _ in range(20)]
    (job,) = claim(db)

    release(db, [job])

    assert claim(db)[0].job_id == job.job_id == first


def test_a_job_that_comes_back_later_is_behind_its_key(db):
    first, second = (enqueue(db, limit_key="a") for _ in range(2))

    end_together(db, claim(db), "snoozed")

    assert [job.job_id for job in claim(db, max_jobs=2)] == [second, first]


@pytest.mark.parametrize("by", ["set_priority", "act"])
def test_a_job_that_is_given_back_to_another_lane_has_a_place_of_that(db, by):
    enqueue(db, limit_key="a")
    (job,) = claim(db)
    before = places(db)[job.job_id]
    enqueue(db, limit_key="b", priority=1)
    last = [enqueue(db, limit_key="a", priority=1) for _ in range(3)][-1]
    if by == "act":
        one = {"ids": [job.job_id]}
        call(db, "act_on_jobs", act="set_priority", filter=one, arguments={"priority": 1})
    else:
        value(db, "set_priority", job_id=job.job_id, priority=1)

    release(db, [job])

    now = places(db)
    assert now[job.job_id] > now[last] > before
