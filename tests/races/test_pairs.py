"""Every operation against every other on the same job.

Interleaving of all: A does the first operation and keeps its transaction open; B starts the
second, which ends or waits; then A commits, or rolls back; then B ends.

What B may see is what it would have seen one after the other, with A's work or without it.
Only claim, sweep and expiry have a choice: they pass over a job that somebody else holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import psycopg
import pytest

from invariants import check_invariants
from races.harness import Session, keeping, restoring
from support.clock import Clock

OPERATIONS = {
    "claim": "select c.attempt from rota.claim_jobs('second', array[%(queue)s]) as c",
    "finish": "select rota.finish_job(%(job_id)s, %(token)s)",
    "fail": "select f.status from rota.fail_job(%(job_id)s, %(token)s, 'no luck', 'Luck') as f",
    "snooze": "select rota.snooze_job(%(job_id)s, %(token)s, '1 hour') is null",
    "release": "select r.is_released from rota.release_jobs(array[%(job_id)s::bigint], "
    "array[%(token)s::bigint]) as r",
    "heartbeat": "select h.is_cancel_requested from rota.heartbeat(%(job_id)s, %(token)s) as h",
    "sweep": "select rota.sweep_stale_leases()",
    "expire": "select rota._do_late('expiry', 1000)",
    "cancel": "select rota.cancel_job(%(job_id)s, 'not wanted')",
    "retry": "select rota.retry_job(%(job_id)s)",
    "retry forced": "select rota.retry_job(%(job_id)s, true)",
    "set_priority": "select rota.set_priority(%(job_id)s, 5)::text",
    "reschedule": "select rota.reschedule_job(%(job_id)s, delay => '0') is null",
}
PASS_OVER: dict[str, list[Any]] = {
    "claim": [],
    "sweep": [(0,)],
    "expire": [(0,)],
    "release": [(None,)],
}
OTHERS = ("expired", "running too long", "running its last attempt", "succeeded")
STATES = [
    *("waiting", "running", "dead"),
    *(pytest.param(state, marks=pytest.mark.long) for state in OTHERS),
]
REFUSALS = {"RT002", "RT003", "RT008"}
# What an operation changes of a job.
TABLES = ("jobs", "finished_jobs", "job_errors")


@dataclass(frozen=True)
class Ending:
    """What B was answered, and what became of the job."""

    answer: Any
    job: Any


class Bench:
    """Brings a job into a state and plays operations on it."""

    def __init__(
        self, a: Session, b: Session, db: psycopg.Connection[Any], clock: Clock, state: str
    ) -> None:
        self.a, self.b, self.db, self.state = a, b, db, state
        self._count = 0
        self._in_turn: dict[tuple[str, ...], Ending] = {}
        clock.set("2026-03-01 12:00:00+00")
        self._job = self._first_job(clock)
        db.execute(keeping(*TABLES).encode())

    def _first_job(self, clock: Clock) -> dict[str, Any]:
        """Make a job of our state; its lease, if it has one, is over."""
        token, attempts = 0, 1 if self.state == "running its last attempt" else 3
        job_id = self.b.fetch(
            "select rota.enqueue('t', queue => 'q', max_attempts => %s, idempotency_key => 'k',"
            " expires_at => rota.now() + %s::interval, time_limit => %s)",
            (
                attempts,
                "1 second" if self.state in ("expired", "running") else None,
                "1 second" if self.state == "running too long" else None,
            ),
        )[0][0]
        if self.state == "expired":
            clock.advance("1 minute")
        elif self.state != "waiting":
            claim = "select c.lease_token from rota.claim_jobs('first', '{q}', 1, '1 s') as c"
            token = self.b.fetch(claim)[0][0]
            clock.advance("1 minute")
        if self.state == "dead":
            self.b.fetch(
                "select from rota.fail_job(%s, %s, 'fatal', fatal => true)", (job_id, token)
            )
        elif self.state == "succeeded":
            self.b.fetch("select rota.finish_job(%s, %s)", (job_id, token))
        return {"job_id": job_id, "token": token}

    def new_job(self) -> dict[str, Any]:
        """Make that job again, alone in the tables, in a queue where nobody has looked yet."""
        self._count += 1
        queue = f"q{self._count}"
        self.db.execute(
            f"update kept.jobs set queue = '{queue}';"
            f"update kept.finished_jobs set queue = '{queue}';{restoring(*TABLES)}".encode()
        )
        return {**self._job, "queue": queue}

    def play_in_turn(self, *names: str) -> Ending:
        """Do the operations one after the other, once; the answer is that of the last."""
        if names not in self._in_turn:
            job, answer = self.new_job(), None
            for name in names:
                answer = answer_of(lambda name=name: self.b.fetch(OPERATIONS[name], job))
            self._in_turn[names] = Ending(answer, self.read_job())
        return self._in_turn[names]

    def play_at_once(self, first: str, second: str, is_committed: bool) -> tuple[bool, Ending]:
        """Play the race; return whether B had to wait, and how it ended."""
        job = self.new_job()
        self.a.fetch("begin")
        answer_of(lambda: self.a.fetch(OPERATIONS[first], job))
        pending = self.b.start(OPERATIONS[second], job)
        has_waited = pending.wait_settled()
        self.a.fetch("commit" if is_committed else "rollback")
        return has_waited, Ending(answer_of(pending.result), self.read_job())

    def read_job(self) -> Any:
        rows = self.db.execute(
            """
            select
                r.status, r.attempts, r.locked_by, r.priority, r.run_at <= rota.now() as is_due,
                r.cancel_requested_at is not null as is_cancel_requested, r.error_type,
                split_part(r.cancel_reason, ' at ', 1) as cancel_reason,
                (select count(*) from rota.job_errors) as errors
            from rota.job_runs as r
            """
        ).fetchall()
        assert len(rows) == 1, f"the job has {len(rows)} rows"
        check_invariants(self.db)
        return rows[0]


def answer_of(action: Any) -> Any:
    try:
        return action()
    except psycopg.Error as error:
        if error.sqlstate not in REFUSALS:
            raise
        return error.sqlstate


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_two_operations_at_once_are_like_one_after_the_other(
    a: Session, b: Session, db: psycopg.Connection[Any], clock: Clock, state: str
) -> None:
    """A does *first* and stays open; B starts each of the others; A commits, or rolls back."""
    bench = Bench(a, b, db, clock, state)
    untouched = bench.play_in_turn().job

    for first, second in product(OPERATIONS, repeat=2):
        alone = bench.play_in_turn(first)
        for is_committed in (True, False):
            in_turn = bench.play_in_turn(*([first] if is_committed else []), second)

            has_waited, ending = bench.play_at_once(first, second, is_committed)

            allowed = [in_turn]
            if not has_waited and second in PASS_OVER:
                allowed.append(
                    Ending(PASS_OVER[second], alone.job if is_committed else untouched)
                )
            if not has_waited and ending not in allowed:
                # B was done before A committed: as if B had been first, and A none the wiser.
                in_turn = bench.play_in_turn(second, first)
                if is_committed and in_turn.answer == alone.answer:
                    allowed.append(Ending(bench.play_in_turn(second).answer, in_turn.job))
            assert ending in allowed, f"{first} / {second}, {is_committed=}, {has_waited=}"
