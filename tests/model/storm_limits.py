"""Limits: of a queue, a job type, keys and a class of keys, while everybody starts and ends.

The model is what runs, told by the changes in their order.  What must be true:

1. No job starts when as many as allowed run already under a limit that it counts for.
2. A slot is held by a job that runs; none is left.
3. Each job comes to its end: no line waits on with a free slot and nobody to tell it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import psycopg

from model import storm_work
from model.storm import History, Player, Violation
from model.storm_work import BACKOFF, ENDED

QUEUES = ["narrow", "wide"]
KEYS = ["customer:1", "customer:2", "shop:1", "free"]
LIMITS: list[dict[str, Any]] = [
    {"job_type": "charge", "max_running": 3},
    {"queue": "narrow", "max_running": 4},
    {"limit_key": "customer:*", "max_running": 2},
    {"limit_key": "shop:1", "max_running": 1},
]
# How many may run, by the column and its value.
MOST = {
    ("job_type", "charge"): 3,
    ("queue", "narrow"): 4,
    ("limit_key", "customer:1"): 2,
    ("limit_key", "customer:2"): 2,
    ("limit_key", "shop:1"): 1,
}
# More than that only make the lines longer.
WAITING = 60
SET = "select rota.set_limit({} => %s, max_running => %s)"


class Limits:
    """The feature; see the form in storm.py."""

    name = "limits"
    places = ("jobs", "finished_jobs")

    def setup(self, db: psycopg.Connection[Any]) -> None:
        for limit in LIMITS:
            column, value = next(iter(limit.items()))
            db.execute(SET.format(column).encode(), [value, limit["max_running"]])

    def step(self, player: Player) -> None:
        steps = [ask, ask_many, claim, end, maintenance, storm_work.operate, set_again]
        player.random.choices(steps, [13, 3, 34, 36, 8, 5, 1])[0](player)

    def drain(self, player: Player) -> bool:
        return storm_work.drain(player, queues=QUEUES)

    def check(self, history: History) -> list[Violation]:
        return [
            *storm_work.check_jobs(history),
            *check_running(history),
            *check_slots(history),
            *(
                Violation(f"job {job_id} is left {steps[-1].statuses[1]}", f"job {job_id}")
                for job_id, steps in history.steps_by_job.items()
                if steps[-1].statuses[1] not in ENDED
            ),
        ]


FEATURE = Limits()


def new_job(player: Player) -> dict[str, Any]:
    job = {
        "job_type": player.random.choice(["charge", "mail"]),
        "queue": player.random.choice(QUEUES),
        "priority": player.random.choice([0, 0, 5]),
        "max_attempts": 3,
        "backoff": BACKOFF,
        "delay": player.random.choice(["0", "0", "5 ms"]),
    }
    if player.chance(0.7):
        job["limit_key"] = player.random.choice(KEYS)
    return job


def ask(player: Player) -> None:
    storm_work.ask(player, new_job, WAITING, end)


def ask_many(player: Player) -> None:
    storm_work.ask_many(player, new_job, WAITING, end)


def claim(player: Player) -> None:
    wanted: dict[str, Any] = {
        "queues": player.random.choice([QUEUES, QUEUES, *map(_one, QUEUES)])
    }
    if player.chance(0.3):
        wanted["job_types"] = [player.random.choice(["charge", "mail"])]
    storm_work.claim(player, **wanted)


def _one(queue: str) -> list[str]:
    return [queue]


def end(player: Player) -> None:
    (storm_work.end if player.memory.get("held") else claim)(player)


def maintenance(player: Player) -> None:
    player.call(player.random.choice(["sweep_stale_leases", "tick"]))


def set_again(player: Player) -> None:
    """Set a limit as it is: then it is settled anew."""
    player.call("set_limit", **player.random.choice(LIMITS))


def check_running(history: History) -> Iterator[Violation]:
    running: dict[tuple[str, str], set[int]] = defaultdict(set)
    for step in history.steps:
        before, after = step.before or {}, step.after or {}
        was, status = step.statuses
        for limit, most in MOST.items():
            column, value = limit
            if was == "running" and before[column] == value:
                running[limit].discard(step.job_id)
            if status == "running" and after[column] == value:
                running[limit].add(step.job_id)
                if was != "running" and len(running[limit]) > most:
                    key = f"job {step.job_id}"
                    history.families[key] = {*running[limit]}
                    problem = f"{key} started under {column} {value} as one of"
                    yield Violation(f"{problem} {running[limit]}", key, step.call.name)


def check_slots(history: History) -> Iterator[Violation]:
    for step in history.steps:
        held = (step.after or {}).get("held_limits")
        if held and step.statuses[1] != "running":
            problem = f"job {step.job_id} holds slots of {held} and does not run"
            yield Violation(problem, f"job {step.job_id}", step.call.name)
