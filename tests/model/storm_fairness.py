"""Fair shares: keys of two queues, some with many jobs, one with a weight, some that come anew.

The model is where each job stands in its lane, told by the changes in their order.  A stay is
the time from the call that gave a job a place to the call that took it out of its lane.  What
must be true:

1. A key has its share: no job of it comes to a place that as many as its weight had reached
   before the call began, all still in the lane at its end.
2. No key keeps old credit: no job comes to a place before all that may be in the lane, but one
   that is given back, and that comes to its own.
3. No key waits behind the backlog of others: the first of a key stands no later than any job
   that has been in the lane for a while.
4. None starves: a claim that nothing disturbs passes over no job that has been in front for a
   while.
5. Each job comes to its end, and then verify() finds nothing.

Two producers that do not see each other may give out the same places, and a session that
remembers where a lane begins may miss a job that came late; so what calls see of each other
is only held against them where it is certain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from model import storm_work
from model.storm import Call, History, Player, Step, Violation
from model.storm_work import BACKOFF, ENDED

QUEUES = ["narrow", "wide"]
# The first sends most, the last comes seldom.
KEYS = {"large": 8, "heavy": 4, "small": 2, None: 2, "rare": 1}
WEIGHTS = {"heavy": 3}
# Enough for lanes that are long, and few enough for jobs to come through.
WAITING = 80
# How long a session may remember where a lane begins, on a lane as short as these.
WHILE = 300_000_000  # ns
SLICE = 500_000_000  # ns
SLACK = 50  # us, between the clocks of the client and the server
Lane = tuple[str, int]


class Fairness:
    """The feature; see the form in storm.py."""

    name = "fairness"
    places = ("jobs", "finished_jobs")

    def setup(self, db: psycopg.Connection[Any]) -> None:
        pass

    def step(self, player: Player) -> None:
        steps = [ask, ask_many, claim, end, maintenance, storm_work.operate, set_weight]
        player.random.choices(steps, [24, 6, 30, 32, 6, 3, 1])[0](player)

    def drain(self, player: Player) -> bool:
        if storm_work.drain(player, queues=QUEUES):
            return True
        player.call("verify")
        return False

    def check(self, history: History) -> list[Violation]:
        stays = Stays(history)
        for stay in stays.all:
            history.families.setdefault(f"job {stay.job_id}", {stay.job_id})
        return [
            *storm_work.check_jobs(history),
            *check_places(history, stays),
            *check_claims(history, stays),
            *check_ends(history),
        ]


FEATURE = Fairness()


def new_job(player: Player) -> dict[str, Any]:
    job = {
        "job_type": "t",
        "queue": player.random.choice(QUEUES),
        "priority": player.random.choice([0, 0, 0, 5]),
        "max_attempts": 3,
        "backoff": BACKOFF,
        "delay": player.random.choice(["0", "0", "0", "5 ms"]),
    }
    key = player.random.choices([*KEYS], [*KEYS.values()])[0]
    if key:
        job["limit_key"] = key
    return job


def ask(player: Player) -> None:
    storm_work.ask(player, new_job, WAITING, end)


def ask_many(player: Player) -> None:
    storm_work.ask_many(player, new_job, WAITING, end)


def claim(player: Player) -> None:
    queue = player.random.choice(QUEUES)
    storm_work.claim(player, queues=player.random.choice([QUEUES, [queue], [queue]]))


def end(player: Player) -> None:
    (storm_work.end if player.memory.get("held") else claim)(player)


def maintenance(player: Player) -> None:
    player.call(player.random.choice(["sweep_stale_leases", "tick"]))


def set_weight(player: Player) -> None:
    """Give one key its weight, or take all weights away: so places are found in both ways."""
    key, weight = player.random.choice([*WEIGHTS.items()])
    if player.chance(0.5):
        player.call("set_limit", limit_key=key, weight=weight)
    else:
        player.call("set_limit", limit_key=key, reset=True)


@dataclass(frozen=True)
class Stay:
    """A job at a place of its lane, from one call to another; places are microseconds."""

    job_id: int
    key: str | None
    lane: Lane
    place: int
    has_own_place: bool
    since: Call
    until: Call | None

    def is_certain(self, call: Call, before: int = 0) -> bool:
        """Whether the job was there through all of the call, and so long before."""
        stays = self.until is None or self.until.began > call.ended
        return stays and self.since.ended + before < call.began

    def is_possible(self, call: Call) -> bool:
        stays = self.until is None or self.until.ended >= call.began
        return stays and self.since.began <= call.ended


class Stays:
    """All stays of a history, by lane and time."""

    def __init__(self, history: History) -> None:
        self.all: list[Stay] = []
        self._slices: dict[tuple[Lane, int], list[Stay]] = defaultdict(list)
        last = max(call.ended for call in history.calls.values())
        for steps in history.steps_by_job.values():
            for step, following in zip(steps, [*steps[1:], None], strict=True):
                stay = _stay(step, following)
                if stay:
                    self.all.append(stay)
                    end = stay.until.ended if stay.until else last
                    for number in range(stay.since.began // SLICE, end // SLICE + 1):
                        self._slices[stay.lane, number].append(stay)

    def during(self, lane: Lane, call: Call) -> Iterator[Stay]:
        """Give those that may have been in the lane at some moment of a call."""
        first, last = call.began // SLICE, call.ended // SLICE
        found = {
            id(s): s for n in range(first, last + 1) for s in self._slices.get((lane, n), [])
        }
        return (stay for stay in found.values() if stay.is_possible(call))


def _stay(step: Step, following: Step | None) -> Stay | None:
    row = step.after or {}
    if step.statuses[1] not in ("queued", "failed") or row["hold"] is not None:
        return None
    return Stay(
        step.job_id,
        row["limit_key"],
        (row["queue"], row["priority"]),
        _micros(row["own_place"] or row["run_at"]),
        row["own_place"] is not None,
        step.call,
        following.call if following else None,
    )


def _micros(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1_000_000)


def check_places(history: History, stays: Stays) -> Iterator[Violation]:
    """What a job may be given as its place."""
    for stay in stays.all:
        call = stay.since
        if not stay.has_own_place:
            continue
        if call.function == "release_jobs" and (was := _place_before(history, stay)):
            if stay.place != was:
                name = f"job {stay.job_id}"
                told = f"{name} was given back {stay.place - was} us behind its place"
                yield Violation(told, name, call.name)
            continue
        beside = [
            other
            for other in stays.during(stay.lane, call)
            if other.job_id != stay.job_id and other.since is not call
        ]
        # A key that a producer did not see yet to have places has none of its own.
        its_own = [other for other in beside if other.key == stay.key and other.has_own_place]
        ahead = [o for o in its_own if o.is_certain(call) and o.place >= stay.place]
        first = min(
            [o.place for o in stays.during(stay.lane, call) if o is not stay]
            + [*_given_back(history, stay), int(call.began_at * 1_000_000)]
        )
        before = [o for o in beside if o.is_certain(call, WHILE) and o.place < stay.place]
        problem, others = "", []
        if len(ahead) >= WEIGHTS.get(stay.key or "", 1):
            problem, others = f"took the place of its key {stay.key} from", ahead
        elif stay.place < first - SLACK:
            problem = f"of key {stay.key} went before all others, by {first - stay.place} us"
        elif before and not its_own and not _has_batch(history, stay):
            problem, others = f"is the first of key {stay.key}, and went behind", before
        if problem:
            name = f"job {stay.job_id}"
            history.families[name] |= {other.job_id for other in others}
            told = f" {[other.job_id for other in others]}" if others else ""
            yield Violation(f"{name} {problem}{told}", name, call.name)


def _place_before(history: History, stay: Stay) -> int | None:
    """Return the place that the job had when it was claimed, if it had one in this lane."""
    for step in history.steps_by_call[stay.since.name]:
        row = step.before or {}
        if step.job_id == stay.job_id and row.get("own_place"):
            return _micros(row["own_place"])
    return None


def _given_back(history: History, stay: Stay) -> Iterator[int]:
    """Give the places that the call's own jobs had when they were claimed.

    A job that was claimed before its queue had places stood at its run_at, and is given back
    there, or by retry_job(), which lets it be at the head of its lane.
    """
    for step in history.steps_by_call[stay.since.name]:
        row = step.before or {}
        if "own_place" in row and (row["queue"], row["priority"]) == stay.lane:
            place = row["own_place"]
            if not place and stay.since.function in ("release_jobs", "retry_job"):
                place = row["run_at"]
            if place:
                yield _micros(place)


def _has_batch(history: History, stay: Stay) -> bool:
    """Whether the call gave places to other jobs of the key too, which stand before this."""
    return any(
        step.job_id != stay.job_id and (step.after or {}).get("limit_key") == stay.key
        for step in history.steps_by_call[stay.since.name]
    )


def check_claims(history: History, stays: Stays) -> Iterator[Violation]:
    """A claim takes what stands first, if no other session may have it locked meanwhile."""
    disturbing = sorted(
        (call for call in history.calls.values() if call.function not in ("verify", "enqueue")),
        key=lambda call: call.began,
    )
    until = 0
    for call, following in zip(disturbing, [*disturbing[1:], None], strict=True):
        is_alone = until < call.began and (following is None or following.began > call.ended)
        until = max(until, call.ended)
        if call.function != "claim_jobs" or not is_alone:
            continue
        for row in call.rows:
            given = next(
                step.before or {}
                for step in history.steps_by_call[call.name]
                if step.job_id == row["job_id"]
            )
            place = _micros(given["own_place"] or given["run_at"])
            for queue in call.arguments["queues"]:
                passed = [
                    stay.job_id
                    for stay in stays.during((queue, row["priority"]), call)
                    if stay.has_own_place
                    and stay.place < place
                    and stay.is_certain(call, WHILE)
                ]
                if passed:
                    name = f"job {row['job_id']}"
                    history.families[name] |= {*passed}
                    yield Violation(f"{name} was claimed before {passed}", name, call.name)


def check_ends(history: History) -> Iterator[Violation]:
    for job_id, steps in history.steps_by_job.items():
        if steps[-1].statuses[1] not in ENDED:
            yield Violation(f"job {job_id} is left {steps[-1].statuses[1]}", f"job {job_id}")
    recounts = [call for call in history.calls.values() if call.function == "verify"]
    if not recounts:
        yield Violation("the storm did not come to its end")
    for row in (row for call in recounts for row in call.rows if row["violations"]):
        yield Violation(f"verify() has found: {row}")
