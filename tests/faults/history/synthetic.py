"""Histories that are right by the way they are made, as long as one likes.

    synthetic.py DIR [--operations N] [--seed N]

A queue is played in the memory of one process, one step after the other, so what really
happened is known; the calls around the steps overlap.  Some get no answer: half of these have
happened.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import heapq
import json
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

WALL = 1_700_000_000_000_000  # microseconds
STEP, CALL = 20_000, 150_000  # nanoseconds
LEASE = 500_000  # microseconds
LIMIT = 4
BACKOFF = {"kind": "fixed", "base_seconds": 0.05, "jitter": 0.2}
PROCESSES = 8


@dataclass(slots=True)
class Job:
    """A job as the database has it."""

    id: int
    created_at: int
    key: str | None
    run_at: int
    status: str = "queued"
    attempts: int = 0
    token: int = 0
    worker: str | None = None
    until: int = 0
    started_at: int = 0
    finished_at: int | None = None

    def row(self) -> dict[str, Any]:
        """Return its row as a dump tells it."""
        row = {
            "id": self.id,
            "queue": "default",
            "job_type": "t",
            "status": self.status,
            "max_attempts": LIMIT,
            "attempts": self.attempts,
            "backoff": BACKOFF,
            "lease_token": self.token,
            "locked_by": self.worker,
            "run_at": self.run_at,
            "created_at": self.created_at,
            "idempotency_key": self.key,
            "finished_at": self.finished_at,
        }
        return {name: value for name, value in row.items() if value is not None}


@dataclass
class Play:
    """The queue, and the files that its callers write."""

    folder: Path
    dice: random.Random
    files: Sequence[TextIO]
    rows: TextIO
    now: int = 1_000_000_000
    calls: int = 0
    jobs: int = 0
    waiting: list[tuple[int, int, Job]] = field(default_factory=list)
    held: deque[tuple[int, Job]] = field(default_factory=deque)
    lost: deque[Job] = field(default_factory=deque)
    ended: Counter[tuple[int, str]] = field(default_factory=Counter)

    def call(self, function: str, arguments: dict[str, Any], number: int) -> tuple[int, bool]:
        """Begin a call; return when the database does it, and whether it will be answered."""
        self.now += STEP
        self.calls += 1
        line = {"call": self.calls, "function": function, "began": self.now}
        self.write(number, {**line, "arguments": arguments})
        return WALL + (self.now + CALL // 2) // 1000, self.dice.random() > 0.01

    def answer(self, number: int, rows: list[Any]) -> None:
        """Answer the last call."""
        self.write(number, {"call": self.calls, "ended": self.now + CALL, "rows": rows})

    def write(self, number: int, line: dict[str, Any]) -> None:
        """Write a line of a process."""
        self.files[number].write(json.dumps(line) + "\n")

    def put_back(self, job: Job) -> None:
        """Let a job wait for its time."""
        heapq.heappush(self.waiting, (job.run_at, job.id, job))

    def end(self, job: Job, status: str, moment: int) -> None:
        """Move a job to the history, and forget it."""
        job.status, job.finished_at = status, moment
        self.ended[moment // 3_600_000_000 * 3_600_000_000, status] += 1
        self.rows.write(json.dumps({"table": "finished_jobs", "row": job.row()}) + "\n")


def enqueue(play: Play, number: int) -> None:
    """Put a job in; one in fifty has a key of its own."""
    key = f"key {play.calls}" if play.dice.random() < 0.02 else None
    job = {"job_type": "t", "backoff": BACKOFF} | ({"idempotency_key": key} if key else {})
    moment, is_answered = play.call("enqueue_many", {"jobs": [job]}, number)
    if is_answered or play.dice.random() < 0.5:
        play.jobs += 1
        play.put_back(Job(play.jobs, moment, key, moment))
        if is_answered:
            play.answer(number, [{"ordinal": 1, "job_id": play.jobs, "is_new": True}])


def claim(play: Play, number: int) -> None:
    """Take the first due job; without an answer nobody will ever speak for it."""
    worker = f"w{number}"
    arguments = {"worker": worker, "max_jobs": 1, "lease": LEASE / 1e6}
    moment, is_answered = play.call("claim_jobs", arguments, number)
    rows = []
    is_done = is_answered or play.dice.random() < 0.5
    if is_done and play.waiting and play.waiting[0][0] <= moment:
        job = heapq.heappop(play.waiting)[2]
        job.status, job.worker, job.attempts = "running", worker, job.attempts + 1
        job.token, job.until, job.started_at = (
            max(job.token + 1, moment),
            moment + LEASE,
            moment,
        )
        told = {"job_id": job.id, "lease_token": job.token, "attempt": job.attempts}
        told |= {"max_attempts": LIMIT, "run_at": job.run_at, "created_at": job.created_at}
        rows = [{**told, "locked_until": job.until, "locked_for": LEASE / 1e6}]
        if is_answered and play.dice.random() > 0.01:
            play.held.append((play.now + CALL, job))
        else:
            play.lost.append(job)
    if is_answered:
        play.answer(number, rows)


def end(play: Play, number: int) -> None:
    """Speak for a job that has been held for a while."""
    if not play.held or play.held[0][0] >= play.now:
        return claim(play, number)
    job = play.held.popleft()[1]
    ways = ["finish_job", "fail_job", "release_jobs", "heartbeat"]
    way = play.dice.choices(ways, [88, 5, 4, 3])[0]
    arguments: dict[str, Any] = {"job_id": job.id, "lease_token": job.token}
    if way == "release_jobs":
        arguments = {"job_ids": [job.id], "lease_tokens": [job.token]}
    moment, is_answered = play.call(way, arguments, number)
    rows: list[Any] = ["finished"]
    if not (is_answered or play.dice.random() < 0.5):
        play.lost.append(job)
        return None
    if way == "finish_job":
        play.end(job, "succeeded", moment)
    elif way == "fail_job":
        rows = [fail(play, job, moment, "Error")]
    elif way == "release_jobs":
        job.status, job.worker, job.attempts = "queued", None, job.attempts - 1
        rows = [{"job_id": job.id, "is_released": True}]
        play.put_back(job)
    else:
        job.until = moment + LEASE
        rows = [{"locked_until": job.until, "is_cancel_requested": False}]
        play.held.append((play.now + CALL, job))
    if is_answered:
        play.answer(number, rows)
    return None


def fail(play: Play, job: Job, moment: int, kind: str) -> dict[str, Any]:
    """Fail an attempt, as a worker or as the sweep."""
    row: dict[str, Any] = {"job_id": job.id, "lease_token": job.token}
    row |= {
        "attempt": job.attempts,
        "worker": job.worker,
        "started_at": job.started_at,
        "failed_at": moment,
    }
    play.rows.write(
        json.dumps({"table": "job_errors", "row": {**row, "error_type": kind}}) + "\n"
    )
    if job.attempts >= LIMIT:
        play.end(job, "dead", moment)
        return {"status": "dead", "run_at": None}
    job.status, job.worker = "failed", None
    job.run_at = moment + round(50_000 * play.dice.uniform(0.8, 1.2))
    play.put_back(job)
    return {"status": "failed", "run_at": job.run_at}


def sweep(play: Play, number: int) -> None:
    """Take back what has been lost for long enough."""
    moment, is_answered = play.call("sweep_stale_leases", {}, number)
    while play.lost and play.lost[0].until < moment:
        fail(play, play.lost.popleft(), moment, "lease_expired")
    if is_answered:
        play.answer(number, [0])


def write(folder: Path, operations: int, seed: int = 1) -> None:
    """Write a history of about so many operations, and let its jobs end."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [(folder / f"calls-{n}-0.ndjson").open("w") for n in range(PROCESSES)]
    dice, rows = random.Random(seed), (folder / "rows-001.ndjson").open("w")
    play = Play(folder, dice, files, rows)
    while play.calls < operations or play.waiting or play.held or play.lost:
        steps = [enqueue, claim, end, sweep]
        is_open = 0 if play.calls >= operations else 34 if len(play.waiting) < 1000 else 5
        step = dice.choices(steps, [is_open, 34, 33, 0.1])[0]
        step(play, dice.randrange(PROCESSES))
        if not is_open and not play.held:
            play.now += LEASE * 100  # nanoseconds: the end need not be long
    _write_end(play)
    for file in (*files, rows):
        file.close()


def _write_end(play: Play) -> None:
    hours = sorted({hour for hour, _ in play.ended})
    states = ("succeeded", "dead", "cancelled")
    for hour in hours:
        row: dict[str, Any] = {"hour": hour, "queue": "default", "job_type": "t"}
        row |= {status: play.ended[hour, status] for status in states}
        play.rows.write(json.dumps({"table": "hourly_stats", "row": row}) + "\n")
    dead = sum(play.ended[hour, "dead"] for hour in hours)
    stats: dict[str, Any] = {"queue": "default", "dead": dead, "running": 0, "blocked": 0}
    play.rows.write(json.dumps({"table": "queue_stats", "row": stats}) + "\n")
    tables = ["hourly_stats", "queue_stats"]
    clocks = {"at": play.now, "wall": WALL + play.now // 1000}
    play.rows.write(
        json.dumps({"dump": 1, "tables": tables, "is_drained": True, **clocks}) + "\n"
    )


def main() -> None:
    """Write one for the command line."""
    parser = argparse.ArgumentParser(description="Write a history that is right.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    write(arguments.folder, arguments.operations, arguments.seed)
    print(f"{arguments.folder}: about {arguments.operations:,} operations")


if __name__ == "__main__":
    main()
