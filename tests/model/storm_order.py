"""Strict order: jobs of a few ordering keys, over queues and types, with deaths in between.

Some of the jobs wait for a parent as well, and their key with them.

The model is the life of one key, told by the changes in their order.  What must be true:

1. At most one job of a key is not blocked.
2. A job starts, which is to stop being blocked, only when no live job of its key with a lower
   id was committed before the call that started it began.  What is committed later is late.
3. No job starts from the death of one without skip_dead until that is retried or resumed.
4. No job starts before its parents have ended as it wants (storm_dependencies.py).
5. Each job comes to its end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import psycopg

from model import storm_dependencies, storm_work
from model.storm import Call, Change, History, Player, Step, Violation
from model.storm_work import BACKOFF, ENDED, LIVE

KEYS = 4
STEPS_OF_A_KEY = 100
QUEUES = ["default", "other"]


class Order:
    """The feature; see the form in storm.py."""

    name = "order"
    places = ("jobs", "finished_jobs", "halted_keys")

    def setup(self, db: psycopg.Connection[Any]) -> None:
        pass

    def step(self, player: Player) -> None:
        steps = [ask, ask_many, claim, storm_work.end, maintenance, operate]
        player.random.choices(steps, [13, 3, 34, 36, 6, 8])[0](player)

    def drain(self, player: Player) -> bool:
        halted = player.connection.execute("select ordering_key, job_id from rota.halted_keys")
        for row in halted.fetchall():
            if player.chance(0.5):
                player.call("resume_ordering_key", ordering_key=row["ordering_key"])
            else:
                player.call("retry_job", job_id=row["job_id"])
        storm_dependencies.retry_parents(player)
        return storm_work.drain(player, queues=QUEUES)

    def check(self, history: History) -> list[Violation]:
        events: dict[str, list[Step | Change]] = defaultdict(list)
        for step in history.steps:
            events[history.keys[step.job_id]].append(step)
        for change in history.changes:
            call = history.calls.get(change.call)
            if (
                change.place == "halted_keys"
                and call
                and call.function == "resume_ordering_key"
            ):
                events[(change.old or {})["ordering_key"]].append(change)
        return [
            *storm_work.check_jobs(history),
            *(found for key, its in events.items() for found in check_life(key, its)),
            *(found for call in history.calls.values() for found in check_retry(history, call)),
        ]


FEATURE = Order()


def new_job(player: Player) -> dict[str, Any]:
    """Return the arguments of a new job for one of the keys of these days."""
    job: dict[str, Any] = {
        "job_type": player.random.choice(["t", "u"]),
        "queue": player.random.choice(QUEUES),
        "priority": player.random.randrange(2),
        "ordering_key": random_key(player),
        "skip_dead": player.chance(0.5),
        "max_attempts": 2,
        "backoff": BACKOFF,
        "delay": player.random.choice(["0", "0", "5 ms"]),
    }
    seen = player.memory.get("seen", [])
    if seen and player.chance(0.1):
        job["depends_on"] = [player.random.choice(seen)]
        job["if_parent_dead"] = player.random.choice(storm_dependencies.POLICIES)
    return job


def random_key(player: Player) -> str:
    return f"o{player.random.randrange(KEYS)}.{player.steps // STEPS_OF_A_KEY}"


def ask(player: Player) -> None:
    with player.transaction(is_committed=player.chance(0.8)):
        call = player.call("enqueue", **new_job(player))
    remember(player, call, "enqueue")


def ask_many(player: Player) -> None:
    jobs = [new_job(player) for _ in range(player.random.randint(2, 5))]
    with player.transaction(is_committed=player.chance(0.8)):
        call = player.call("enqueue_many", jobs=jobs)
    remember(player, call, "job_id")


def remember(player: Player, call: Call, column: str) -> None:
    """Let operators act on what was enqueued, also while it is blocked."""
    if call.is_done:
        player.memory.setdefault("seen", []).extend(row[column] for row in call.rows)


def claim(player: Player) -> None:
    queues = player.random.choice([QUEUES, QUEUES, *([queue] for queue in QUEUES)])
    storm_work.claim(player, queues=queues)


def maintenance(player: Player) -> None:
    player.call(player.random.choice(["sweep_stale_leases", "tick"]))


def operate(player: Player) -> None:
    if player.chance(0.4):
        player.call("resume_ordering_key", ordering_key=random_key(player))
    else:
        storm_work.operate(player)


def check_life(key: str, events: list[Step | Change]) -> Iterator[Violation]:
    """One job at a time, the lowest id first, and none behind one that is dead."""
    live: dict[int, Call] = {}
    head: int | None = None
    halted: int | None = None
    for event in sorted(events, key=lambda event: event.number):
        if isinstance(event, Change):
            halted = None
            continue
        job_id, call, after = event.job_id, event.call, event.after or {}
        was, status = event.statuses
        if was in ENDED | {"none"}:
            live[job_id] = call
            halted = None if halted == job_id else halted
        problem = ""
        if status in LIVE and was not in LIVE:
            ahead = [i for i in live if i < job_id and live[i].ended < call.began]
            if head is not None:
                problem = f"had job {job_id} started beside job {head}"
            elif halted is not None:
                problem = f"went on with job {job_id}, although job {halted} is dead"
            elif ahead:
                problem = f"had job {job_id} started before {ahead}"
            head = job_id
        elif was in LIVE and head != job_id:
            problem = f"had job {job_id} run, but {head} was its head"
        if status in ENDED:
            head = None if head == job_id else head
            del live[job_id]
        if status == "dead" and not after["skip_dead"]:
            halted = job_id
        if problem:
            yield Violation(problem, key, call.name)
            return
    if live:
        yield Violation(f"is left with jobs {[*live]}, {halted=}", key)


def check_retry(history: History, call: Call) -> Iterator[Violation]:
    """Who retries a job is told whether it has to wait."""
    if call.function == "retry_job" and call.is_done:
        told = call.rows[0]["retry_job"]
        done = [
            step.statuses[1]
            for step in history.steps_by_call.get(call.name, [])
            if step.job_id == call.arguments["job_id"]
        ]
        if done[-1:] != [told]:
            key = history.keys[call.arguments["job_id"]]
            yield Violation(f"was told {told} and did {done}", key, call.name)
