"""Rerun, as those see it who ask and those who work, by what they were answered.

The keys are documents of which newer versions come in all the time.  What must be true:

1. The versions that were worked on, from begin to accepted end, only grow for a key.
2. Two such runs of a key never overlap.
3. A run has a version at least as new as any that was committed before it was claimed.
4. After each request comes a run with its version or a newer one; the newest runs once.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import psycopg

from model import storm_work
from model.storm import Call, History, Player, Violation
from model.storm_work import BACKOFF

KEYS = 6
STEPS_OF_A_KEY = 100


class Rerun:
    """The feature; see the form in storm.py."""

    name = "rerun"
    places = ("jobs", "finished_jobs", "idempotency_keys", "reruns")

    def setup(self, db: psycopg.Connection[Any]) -> None:
        pass

    def step(self, player: Player) -> None:
        steps = [ask, ask_many, storm_work.claim, storm_work.end, storm_work.sweep]
        player.random.choices(steps, [20, 15, 25, 35, 5])[0](player)

    def drain(self, player: Player) -> bool:
        return storm_work.drain(player)

    def check(self, history: History) -> list[Violation]:
        requests: dict[str, list[Request]] = defaultdict(list)
        runs: dict[str, list[Run]] = defaultdict(list)
        for request in find_requests(history):
            requests[request.key].append(request)
        for run in find_runs(history):
            runs[run.key].append(run)
        noted = {
            change.new["job"]["payload"]["v"]
            for change in history.changes
            if change.place == "reruns" and change.new and not change.new["seen"]
        }
        return [
            *storm_work.check_jobs(history),
            *(
                found
                for key in requests | runs
                for found in check_key(key, requests[key], runs[key], noted)
            ),
        ]


FEATURE = Rerun()


@dataclass(frozen=True)
class Request:
    """A version that was enqueued and committed."""

    key: str
    version: int
    call: Call


@dataclass(frozen=True)
class Run:
    """A claim and, if it ended the job, its end; with the numbers of the changes they made."""

    key: str
    version: int
    claim: Call
    claimed: int
    ended: int | None


def new_job(player: Player, key: int) -> dict[str, Any]:
    """Return the next version of a document."""
    # Of all players the newest, and never the same twice.
    version = time.monotonic_ns() // 1000 * 100 + player.number
    return {
        "job_type": "t",
        "idempotency_key": f"k{key}.{player.steps // STEPS_OF_A_KEY}",
        "payload": {"v": version},
        "on_conflict": "rerun",
        "max_attempts": 1000,
        "backoff": BACKOFF,
        "updated_at": (
            datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=version)
        ).isoformat(),
    }


def ask(player: Player) -> None:
    job = new_job(player, player.random.randrange(KEYS))
    with player.transaction(is_committed=player.chance(0.8)):
        player.call("enqueue", **job)


def ask_many(player: Player) -> None:
    keys = player.random.sample(range(KEYS), 3)
    jobs = [new_job(player, key) for key in [*keys, player.random.choice(keys)]]
    with player.transaction(is_committed=player.chance(0.8)):
        player.call("enqueue_many", jobs=jobs)


def find_requests(history: History) -> Iterator[Request]:
    for call in history.calls.values():
        jobs = (
            [call.arguments] if call.function == "enqueue" else call.arguments.get("jobs", [])
        )
        for job in jobs if call.is_done else []:
            yield Request(job["idempotency_key"], job["payload"]["v"], call)


def find_runs(history: History) -> Iterator[Run]:
    claimed: dict[tuple[int, int], int] = {}
    ended: dict[tuple[int, int], int] = {}
    for step in history.steps:
        if step.statuses[0] != "none" and step.after:
            lease = (step.job_id, step.after["lease_token"])
            if step.call.function == "claim_jobs":
                claimed[lease] = step.number
            elif step.statuses[1] in ("succeeded", "dead"):
                ended[lease] = step.number
    for call in history.calls.values():
        for row in call.rows if call.is_done and call.function == "claim_jobs" else []:
            key, lease = row["idempotency_key"], (row["job_id"], row["lease_token"])
            yield Run(key, row["payload"]["v"], call, claimed[lease], ended.get(lease))


def check_key(
    key: str, requests: list[Request], runs: list[Run], noted: set[int]
) -> Iterator[Violation]:
    """Versions only grow, one at a time, and the newest is the last; what was not noted, since
    its job was neither running nor locked, is the next to run."""
    done = sorted((run for run in runs if run.ended), key=lambda run: run.claimed)
    for one, next_one in pairwise(done):
        if next_one.version <= one.version:
            problem = f"ran version {next_one.version} after {one.version}"
            yield Violation(problem, key, next_one.claim.name)
        if next_one.claimed < (one.ended or 0):
            problem = f"ran version {next_one.version} while {one.version} was running"
            yield Violation(problem, key, next_one.claim.name)

    for run in runs:
        # A version that is not newer than one that was noted is ignored.
        ignored = max(
            (
                r.version
                for r in requests
                if r.version in noted
                if r.call.began < run.claim.began
            ),
            default=0,
        )
        before = [
            r.version
            for r in requests
            if r.call.ended < run.claim.began and r.version > ignored
        ]
        if run.version < max(before, default=0):
            problem = f"ran version {run.version} when {max(before)} was there"
            yield Violation(problem, key, run.claim.name)

    last = max((run.version for run in done), default=0)
    for request in requests:
        if request.version > last:
            yield Violation(f"never ran version {request.version}", key, request.call.name)
    if done and requests and last > max(request.version for request in requests):
        yield Violation(f"ran version {last}, which was not committed", key)
