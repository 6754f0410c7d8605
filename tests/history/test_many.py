"""What only all databases together can break, told by hand: the checker must name it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from history import many
from history.hand import WALL, Scroll, moment

NUMBERS = {"one": 1, "two": 2}


def job_id(number: int, database: int) -> int:
    return number * 1024 + database


class Tale:
    """Two databases and a front; what is told in it is right, as far as it goes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("front", *NUMBERS):
            (folder / name).mkdir()
        self.front, self.one, self.two = (
            Scroll(folder / name) for name in ("front", "one", "two")
        )

    def check(self) -> many.Together:
        for scroll in (self.front, self.one, self.two):
            scroll.save()
        return many.check(self._folder, NUMBERS, "front")[0]

    def done(self, uid: str, number: int, database: int, **row: Any) -> int:
        """Put a job that has succeeded into a database."""
        scroll = self.one if database == 1 else self.two
        where = job_id(number, database)
        scroll.ended(where, 100, headers={"uid": uid}, **row)
        return where

    def sent(self, uid: str, number: int, **options: Any) -> int:
        """Send a job from database 1 to 2, and let it be carried away."""
        carrier = job_id(number, 1)
        self.one.call("enqueue_to", carrier, at=0, database=2, job_type="t",
                      headers={"uid": uid}, **options)  # fmt: skip
        self.one.ended(carrier, 100, job_type="rota.forward")
        return carrier

    def received(self, uid: str, carrier: int, number: int, **row: Any) -> int:
        """Let database 2 have it, with a receipt."""
        where = self.done(uid, number, 2, **row)
        self.two.table("receipts", source_job_id=carrier, source_created_at=WALL, job_id=where)
        return where


def all_is_right(tale: Tale) -> None:
    tale.one.enqueue(job_id(1, 1), headers={"uid": "a:1"})
    tale.done("a:1", 1, 1)
    tale.received("b:1", tale.sent("b:1", 2), 1)
    tale.front.enqueue(job_id(2, 2), headers={"uid": "c:1"})
    tale.done("c:1", 2, 2)


def what_a_front_was_told_stays(tale: Tale) -> None:
    tale.front.enqueue(job_id(2, 2), headers={"uid": "c:1"}, transaction=1)
    tale.front.end(1, 2, "rollback")
    tale.done("c:1", 2, 2)


def a_call_without_an_answer_that_was_done(tale: Tale) -> None:
    tale.front.enqueue(0, headers={"uid": "c:1"}, lost=True)
    tale.front.enqueue(0, headers={"uid": "c:2"}, lost=True)
    tale.done("c:1", 2, 2)


def a_key_that_is_asked_for_again(tale: Tale) -> None:
    once: dict[str, Any] = {
        "headers": {"uid": "c:1"},
        "idempotency_key": "once",
        "unique_for": 60,
    }
    tale.front.enqueue(0, lost=True, **once)
    tale.front.enqueue(job_id(2, 2), at=5, is_new=False, **once)
    tale.done("c:1", 2, 2, idempotency_key="once")


def a_late_call_through_a_front(tale: Tale) -> None:
    tale.front.enqueue(0, headers={"uid": "c:1"}, lost=True)
    tale.front.enqueue(job_id(2, 2), at=5, headers={"uid": "c:2"})
    tale.done("c:2", 2, 2, ordering_key="k")
    tale.done("c:1", 3, 2, ordering_key="k")


def an_id_that_two_databases_have(tale: Tale) -> None:
    tale.one.enqueue(job_id(1, 1), headers={"uid": "a:1"})
    tale.done("a:1", 1, 1)
    tale.two.ended(job_id(1, 1), 100, headers={"uid": "a:2"})


def an_id_of_another_database(tale: Tale) -> None:
    tale.one.ended(job_id(1, 3), 100, headers={"uid": "a:2"})


def a_job_that_was_told_and_is_nowhere(tale: Tale) -> None:
    tale.front.enqueue(job_id(2, 2), headers={"uid": "c:1"})


def a_job_that_is_there_twice(tale: Tale) -> None:
    tale.received("b:1", tale.sent("b:1", 2), 1)
    tale.done("b:1", 2, 2)


def a_job_that_was_rolled_back(tale: Tale) -> None:
    tale.one.call("enqueue_to", job_id(2, 1), at=0, database=2, transaction=1,
                  headers={"uid": "b:1"})  # fmt: skip
    tale.one.end(1, 2, "rollback")
    tale.done("b:1", 2, 2)


def a_job_that_a_front_has_refused(tale: Tale) -> None:
    tale.front.call("enqueue_many", at=0, error="22023", jobs=[{"headers": {"uid": "c:1"}}])
    tale.done("c:1", 2, 2)


def a_job_that_nobody_sent(tale: Tale) -> None:
    tale.done("d:1", 2, 2)


def half_of_a_batch(tale: Tale) -> None:
    jobs = [{"headers": {"uid": uid}, "job_type": "t"} for uid in ("c:1", "c:2")]
    tale.front.call("enqueue_many", at=0, lost=True, jobs=jobs)
    tale.done("c:2", 2, 2)


def a_receipt_that_was_not_kept(tale: Tale) -> None:
    tale.sent("b:1", 2)
    tale.done("b:1", 2, 2)


def a_receipt_for_another_job(tale: Tale) -> None:
    tale.received("b:2", tale.sent("b:1", 2), 1)
    tale.received("b:1", tale.sent("b:2", 3), 2)


def a_receipt_of_what_nobody_sent(tale: Tale) -> None:
    tale.two.table(
        "receipts", source_job_id=job_id(2, 1), source_created_at=WALL, job_id=job_id(1, 2)
    )


def two_that_came_in_the_wrong_order(tale: Tale) -> None:
    tale.received("b:2", tale.sent("b:2", 3), 1, ordering_key="k")
    tale.received("b:1", tale.sent("b:1", 2), 2, ordering_key="k")


def two_that_ran_at_once(tale: Tale) -> None:
    tale.received("b:1", tale.sent("b:1", 2), 1, ordering_key="k", finished_at=moment(90))
    second = tale.received("b:2", tale.sent("b:2", 3), 2, ordering_key="k")
    tale.two.claim(second, 100, at=10)


def a_key_in_two_databases(tale: Tale) -> None:
    for number, database in ((1, 1), (2, 2)):
        uid = f"c:{number}"
        once: dict[str, Any] = {
            "headers": {"uid": uid},
            "idempotency_key": "once",
            "unique_for": 60,
        }
        tale.front.enqueue(job_id(number, database), **once)
        tale.done(uid, number, database, idempotency_key="once")


def a_key_whose_calls_were_told_of_two_jobs(tale: Tale) -> None:
    for number in (1, 2):
        once: dict[str, Any] = {
            "headers": {"uid": "c:1"},
            "idempotency_key": "once",
            "unique_for": 60,
        }
        tale.front.enqueue(job_id(number, 2), at=number * 5, **once)
    tale.done("c:1", 1, 2, idempotency_key="once")


RIGHT: list[Callable[[Tale], None]] = [
    all_is_right, what_a_front_was_told_stays, a_call_without_an_answer_that_was_done,
    a_key_that_is_asked_for_again, a_late_call_through_a_front,
]  # fmt: skip
WRONG: list[tuple[str, Callable[[Tale], None]]] = [
    ("M1", an_id_that_two_databases_have),
    ("M1", an_id_of_another_database),
    ("M2", a_job_that_was_told_and_is_nowhere),
    ("M2", a_job_that_is_there_twice),
    ("M3", a_job_that_was_rolled_back),
    ("M3", a_job_that_a_front_has_refused),
    ("M4", a_job_that_nobody_sent),
    ("M4", half_of_a_batch),
    ("M5", a_receipt_that_was_not_kept),
    ("M5", a_receipt_for_another_job),
    ("M5", a_receipt_of_what_nobody_sent),
    ("M6", two_that_came_in_the_wrong_order),
    ("M6", two_that_ran_at_once),
    ("M7", a_key_in_two_databases),
    ("M7", a_key_whose_calls_were_told_of_two_jobs),
]


@pytest.mark.parametrize("story", RIGHT, ids=lambda story: story.__name__)
def test_what_is_right_is_accepted(tmp_path: Path, story: Callable[[Tale], None]) -> None:
    tale = Tale(tmp_path)
    story(tale)

    together = tale.check()

    assert together.problems == []


@pytest.mark.parametrize(("rule", "story"), WRONG, ids=[story.__name__ for _, story in WRONG])
def test_what_is_wrong_is_named(
    tmp_path: Path, rule: str, story: Callable[[Tale], None]
) -> None:
    tale = Tale(tmp_path)
    story(tale)

    together = tale.check()

    assert rule in together.broken, together.problems


def test_each_rule_is_broken_by_a_tale() -> None:
    assert {rule for rule, _ in WRONG} == {*many.SENTENCES}
