"""What only all databases together can break, told by hand: the checker must name it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults.history import many
from faults.history.context import Context
from faults.history.hand import WALL, Scroll, moment

NUMBERS = {"one": 1, "two": 2}
MOVES = ("parcels",)
MOVE = {1: 7 * 1024 + 1, 2: 8 * 1024 + 2}
"""The moves from each database to the other one."""


def job_id(number: int, database: int) -> int:
    return number * 1024 + database


def arrival(job_id: int, new_id: int, source: int, at: Any) -> dict[str, Any]:
    """The receipt for a job that came with its queue."""
    came = {"source_job_id": job_id, "source_created_at": WALL, "move_id": MOVE[source]}
    return {**came, "job_id": new_id, "received_at": at}


class Tale:
    """Two databases and a front; what is told in it is right, as far as it goes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("front", *NUMBERS):
            (folder / name).mkdir()
        self.front, self.one, self.two = (
            Scroll(folder / name) for name in ("front", "one", "two")
        )
        self.contexts: dict[str, Context] = {}

    def check(self) -> many.Together:
        for scroll in (self.front, self.one, self.two):
            scroll.save()
        together, self.contexts = many.check(self._folder, NUMBERS, "front", MOVES)
        return together

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
        source = {"source_job_id": carrier, "source_created_at": WALL}
        self.two.table("receipts", **source, move_id=0, job_id=where)
        return where

    def told(self, uid: str, number: int, database: int = 1, **options: Any) -> int:
        """Enqueue a job in the queue that moves."""
        where = job_id(number, database)
        scroll = self.one if database == 1 else self.two
        scroll.enqueue(where, headers={"uid": uid}, queue="parcels", **options)
        return where

    def moved(self, where: int, new_id: int = 0, source: int = 1, at: float = 5) -> int:
        """Let a job move to the other database, perhaps with a new id."""
        new_id, target = new_id or where, 3 - source
        scrolls = {1: self.one, 2: self.two}
        gone = {"job_id": where, "move_id": MOVE[source], "new_job_id": new_id}
        scrolls[source].table("moved_jobs", database=target, **gone)
        scrolls[target].table("receipts", **arrival(where, new_id, source, moment(at)))
        return new_id

    def ran(self, where: int, uid: str, database: int, at: float = 10, **row: Any) -> None:
        """Let a job of the queue that moves run and succeed there."""
        scroll = self.one if database == 1 else self.two
        run_at = row.pop("due", 0)
        scroll.claim(where, 100, at=at, attempt=row.get("attempts", 1), run_at=run_at)
        scroll.finish(where, 100, at=at + 5)
        told = {"queue": "parcels", "headers": {"uid": uid}, "finished_at": moment(at + 5.5)}
        scroll.ended(where, 100, **{**told, **row})


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
        "receipts", source_job_id=job_id(2, 1), source_created_at=WALL, move_id=0,
        job_id=job_id(1, 2),
    )  # fmt: skip


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


def a_job_that_moved(tale: Tale) -> None:
    where = tale.told("a:1", 1)
    tale.one.claim(where, 90, at=2)
    tale.one.fail(where, 90, at=4, retry_in=0.1)
    tale.ran(tale.moved(where), "a:1", 2, at=120, due=104.5, attempts=2)


def a_move_that_has_ended(tale: Tale) -> None:
    a_job_that_moved(tale)
    tale.two.table("receipts", **{**arrival(0, 0, 1, moment(50)), "move_id": -MOVE[1]})


def a_job_that_moved_late(tale: Tale) -> None:
    tale.ran(tale.moved(tale.told("a:1", 1), job_id(5, 2)), "a:1", 2)


def a_job_that_came_back(tale: Tale) -> None:
    """Where it is it has not left, and the other one leads there."""
    where = tale.told("a:1", 1)
    tale.two.table("receipts", **arrival(where, where, 1, moment(2)))
    tale.ran(tale.moved(where, source=2), "a:1", 1)


def a_job_whose_key_was_live_there(tale: Tale) -> None:
    live = tale.told("b:1", 5, 2, idempotency_key="k")
    tale.moved(tale.told("a:1", 1, idempotency_key="k"), live)
    tale.ran(live, "b:1", 2, idempotency_key="k")


def a_key_that_is_used_there_after_it_was_used_here(tale: Tale) -> None:
    late = tale.told("a:1", 1, idempotency_key="k")
    tale.ran(tale.told("b:1", 5, 2, idempotency_key="k"), "b:1", 2, idempotency_key="k")
    late = tale.moved(late, job_id(6, 2), at=20)
    tale.ran(late, "a:1", 2, at=30, idempotency_key="k")


def a_line_that_moved(tale: Tale) -> None:
    tale.ran(tale.told("a:1", 1), "a:1", 1, ordering_key="k")
    tale.ran(tale.moved(tale.told("a:2", 2)), "a:2", 2, at=20, ordering_key="k")
    tale.ran(tale.told("a:3", 1, 2), "a:3", 2, at=30, ordering_key="k")


def a_job_that_moved_and_is_lost(tale: Tale) -> None:
    tale.moved(tale.told("a:1", 1))


def a_job_that_moved_and_is_doubled(tale: Tale) -> None:
    tale.ran(tale.moved(tale.told("a:1", 1)), "a:1", 2)
    tale.ran(job_id(6, 2), "a:1", 2)


def a_job_that_moved_and_stayed(tale: Tale) -> None:
    where = tale.moved(tale.told("a:1", 1))
    tale.ran(where, "a:1", 2)
    tale.ran(where, "a:1", 1, at=20)


def a_line_that_ran_in_two_databases_at_once(tale: Tale) -> None:
    tale.ran(tale.told("a:1", 1), "a:1", 1, at=40, ordering_key="k")
    tale.ran(tale.moved(tale.told("a:2", 2)), "a:2", 2, ordering_key="k")


def what_left_and_never_came(tale: Tale) -> None:
    where = tale.told("a:1", 1)
    gone = {"job_id": where, "move_id": MOVE[1], "new_job_id": where}
    tale.one.table("moved_jobs", database=2, **gone)
    tale.ran(where, "a:1", 1)


def what_came_and_never_left(tale: Tale) -> None:
    where = tale.told("a:1", 1)
    tale.two.table("receipts", **arrival(where, where, 1, WALL))
    tale.ran(where, "a:1", 2)


def what_was_here_before_it_came_and_never_left(tale: Tale) -> None:
    """That it came back once does not tell of the next time."""
    where = tale.told("a:1", 1)
    tale.moved(where, source=2)
    tale.two.table("receipts", **arrival(where, where, 1, moment(7)))
    tale.ran(where, "a:1", 2)


def what_is_still_on_its_way(tale: Tale) -> None:
    where = tale.told("a:1", 1)
    tale.one.table("moved_jobs", job_id=where, move_id=MOVE[1], database=2, new_job_id=None)
    tale.ran(where, "a:1", 1)


def what_went_into_a_job_of_another_key(tale: Tale) -> None:
    live = tale.told("b:1", 5, 2, idempotency_key="other")
    tale.moved(tale.told("a:1", 1, idempotency_key="k"), live)
    tale.ran(live, "b:1", 2, idempotency_key="other")


def a_job_that_ran_in_both_databases(tale: Tale) -> None:
    where = tale.told("a:1", 1)
    tale.one.claim(where, 90, at=2, until=40)
    tale.ran(tale.moved(where), "a:1", 2)


def a_stale_token_that_the_old_database_took(tale: Tale) -> None:
    where = tale.told("a:1", 1)
    tale.one.claim(where, 90, at=2)
    tale.one.release(where, 90, at=4)
    tale.ran(tale.moved(where), "a:1", 2)
    tale.one.finish(where, 90, at=30)


def a_job_whose_attempts_began_anew(tale: Tale) -> None:
    where = tale.told("a:1", 1)
    tale.one.claim(where, 90, at=2)
    tale.one.fail(where, 90, at=4, retry_in=0.1)
    tale.ran(tale.moved(where), "a:1", 2, at=120)


def a_key_with_two_live_jobs(tale: Tale) -> None:
    late = tale.moved(tale.told("a:1", 1, idempotency_key="k"), job_id(6, 2))
    tale.ran(late, "a:1", 2, at=30, idempotency_key="k")
    tale.ran(tale.told("b:1", 5, 2, idempotency_key="k"), "b:1", 2, at=40, idempotency_key="k")


MOVED: list[Callable[[Tale], None]] = [
    a_job_that_moved, a_move_that_has_ended, a_job_that_moved_late, a_job_that_came_back,
    a_job_whose_key_was_live_there,
    a_key_that_is_used_there_after_it_was_used_here, a_line_that_moved,
]  # fmt: skip
RIGHT: list[Callable[[Tale], None]] = [
    all_is_right, what_a_front_was_told_stays, a_call_without_an_answer_that_was_done,
    a_key_that_is_asked_for_again, a_late_call_through_a_front, *MOVED,
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
    ("M1", a_job_that_moved_and_stayed),
    ("M2", a_job_that_moved_and_is_lost),
    ("M2", a_job_that_moved_and_is_doubled),
    ("M6", a_line_that_ran_in_two_databases_at_once),
    ("M8", what_left_and_never_came),
    ("M8", what_came_and_never_left),
    ("M8", what_was_here_before_it_came_and_never_left),
    ("M8", what_is_still_on_its_way),
    ("M8", what_went_into_a_job_of_another_key),
]
LIVES: list[tuple[str, Callable[[Tale], None]]] = [
    ("I1", a_job_that_ran_in_both_databases),
    ("I3", a_stale_token_that_the_old_database_took),
    ("I4", a_job_that_moved_and_is_lost),
    ("I4", a_job_that_moved_and_stayed),
    ("I5", a_key_with_two_live_jobs),
    ("I6", a_job_whose_attempts_began_anew),
]


@pytest.mark.parametrize("story", RIGHT, ids=lambda story: story.__name__)
def test_what_is_right_is_accepted(tmp_path: Path, story: Callable[[Tale], None]) -> None:
    tale = Tale(tmp_path)
    story(tale)

    together = tale.check()

    assert together.problems == []
    if story in MOVED:
        assert tale.contexts[many.MOVING].violations == []


@pytest.mark.parametrize(("rule", "story"), WRONG, ids=[story.__name__ for _, story in WRONG])
def test_what_is_wrong_is_named(
    tmp_path: Path, rule: str, story: Callable[[Tale], None]
) -> None:
    tale = Tale(tmp_path)
    story(tale)

    together = tale.check()

    assert rule in together.broken, together.problems


@pytest.mark.parametrize(("rule", "story"), LIVES, ids=[story.__name__ for _, story in LIVES])
def test_a_job_that_moves_has_one_life(
    tmp_path: Path, rule: str, story: Callable[[Tale], None]
) -> None:
    tale = Tale(tmp_path)
    story(tale)

    tale.check()

    assert rule in tale.contexts[many.MOVING].broken


def test_each_rule_is_broken_by_a_tale() -> None:
    assert {rule for rule, _ in WRONG} == {*many.SENTENCES}
