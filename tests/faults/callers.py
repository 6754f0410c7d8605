"""Callers that speak SQL of their own accord, not workers: any language, any settings.

They do what the players of `history.random_callers` do, wrong things on purpose among it; and
while they are in a hurry each call has so many milliseconds, and some of them hold rows of
others.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from math import inf
from typing import Any

import psycopg

from faults.history.random_callers import Player
from faults.processes import Task, begin
from rota import RotaError

STEPS = {"_enqueue": 25, "_claim": 25, "_speak": 40, "_sweep": 5, "_hold": 5}
MOST = 50
"""Milliseconds that a call in a hurry may take."""


class Caller(Player):
    """One session that takes steps until there were enough of all."""

    def __init__(self, task: Task, number: int, calls: Any, times: int) -> None:
        super().__init__(task.url, number, 0, inf, 0)
        self.name = f"{task.name}-{number}"
        self._dice = random.Random(f"{task.seed} {number}")
        self._is_hurried = bool(task.options.get("is_hurried"))
        self._calls, self._times = calls, times

    def run(self) -> None:
        """Take steps; what the database refuses is in the history."""
        steps, weights = list(STEPS), list(STEPS.values())
        try:
            while self._count():
                step = getattr(self, self._dice.choices(steps, weights)[0])
                with suppress(RotaError, psycopg.Error, psycopg.Rollback):
                    if self._is_hurried:
                        self._hurry()
                    step()
        except BaseException as error:
            self.error = error
        finally:
            self._connection.close()

    def _count(self) -> bool:
        with self._calls.get_lock():
            self._calls.value += 1
            return bool(self._calls.value <= self._times)

    def _hurry(self) -> None:
        statement, lock = (f"{self._dice.randint(1, MOST)}ms" for _ in range(2))
        self._connection.execute(
            "select set_config('statement_timeout', %s, false), "
            "set_config('lock_timeout', %s, false)",
            (statement, lock),
        )

    def _hold(self) -> None:
        """Keep some rows to oneself for a moment."""
        with self._connection.transaction(force_rollback=True):
            self._connection.execute(
                "select from rota.jobs where id >= "
                "(select min(j.id) + %s from rota.jobs as j) limit 5 for update",
                (self._dice.randrange(20),),
            )
            time.sleep(self._dice.uniform(0, MOST / 1000))


def run_callers(task: Task, threads: int, calls: Any, times: int) -> None:
    """Be a process full of callers, until it is told to go."""
    begin(task)
    crew = [Caller(task, number, calls, times) for number in range(threads)]
    for caller in crew:
        caller.start()
    for caller in crew:
        caller.join()
        if caller.error is not None:
            raise caller.error
    threading.Event().wait()
