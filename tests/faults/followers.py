"""Producers for queues that move, which follow them, and what moves them.

A queue has a *home*, the database in which producers enqueue.  A mover lets it go to another
one by `rota queue move`, and once the move has settled tells the producers that the home is
there.  They go on for a while in the old one, as callers do that have not heard of it, and
follow when the last job of each of their ordering keys has gone.  Then the mover says `--end`,
and the queue moves on.  A mover may be killed at any moment: the next one finds in the
databases how far it was.

While the queue moves, a producer that needs order pauses, or sends by `enqueue_to()` what is to
come after the jobs that move.  Some jobs are sent to the other database too early: those with
a key are refused there, and others run.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import psycopg

from faults.processes import Task, begin
from faults.senders import QUEUES, Sender
from rota import Client, RotaError

KEYS = 4
"""So many idempotency keys of a queue are used again and again."""
LINES = 3
LATE_SECONDS = 1.0
MOVES = "select direction, state, database from rota.queue_moves where queue = %s"
# What of an ordering key is still in the database that the queue leaves.
LEFT = """
select exists (select from rota.jobs where ordering_key = any(%(lines)s))
    or exists (
        select from rota.moved_jobs where job ->> 'ordering_key' = any(%(lines)s))
"""


class Homes:
    """Where each queue is, and what each producer knows of that; processes share it."""

    def __init__(self, context: Any, homes: Sequence[int], producers: int) -> None:
        self._homes = context.Array("i", homes, lock=False)
        self._heard = context.Array("i", list(homes) * producers, lock=False)
        self.moves = context.Value("i", 0)
        self.is_calm = context.Value("b", False, lock=False)
        """Whether no queue is to begin to move any more."""
        self._at_rest = context.Array("b", len(homes), lock=False)

    def get(self, queue: str) -> int:
        """Return the number of the database in which it is."""
        return int(self._homes[QUEUES.index(queue)])

    def change(self, queue: str, number: int) -> None:
        """Say that it is in another one now."""
        self._homes[QUEUES.index(queue)] = number

    def hear(self, queue: str, producer: int) -> None:
        """Note that a producer has followed."""
        place = QUEUES.index(queue)
        self._heard[producer * len(QUEUES) + place] = self._homes[place]

    def is_heard(self, queue: str) -> bool:
        """Whether all producers have followed."""
        place = QUEUES.index(queue)
        return set(self._heard[place :: len(QUEUES)]) == {self._homes[place]}

    def rest(self, queue: str) -> None:
        """Note that a queue does not move, and will not."""
        self._at_rest[QUEUES.index(queue)] = True

    def are_at_rest(self) -> bool:
        """Whether no queue moves any more."""
        return all(self._at_rest)


class Follower(Sender):
    """Sends to a queue wherever it is."""

    def __init__(self, task: Task, urls: Mapping[int, str], homes: Homes) -> None:
        super().__init__(task, "follow", urls, "")
        self._all_homes = homes
        self._producer = int(task.name.rpartition("-")[2])
        self._homes = {queue: homes.get(queue) for queue in QUEUES}
        self._late_until: dict[str, float] = {}
        self._travel_to: dict[str, int] = {}
        """Queues to which it sends by `enqueue_to` until it follows."""

    def look(self) -> None:
        """Follow the queues that are elsewhere now, after a while."""
        for queue in QUEUES:
            if self._all_homes.get(queue) != self._homes[queue]:
                late_until = self._late_until.setdefault(
                    queue, time.monotonic() + self._dice.uniform(0, LATE_SECONDS)
                )
                if time.monotonic() > late_until:
                    self._follow(queue)

    def step(self, number: int) -> int:
        """Send something to one of the queues; return how many jobs that were."""
        time.sleep(self._dice.uniform(0, 0.1))
        queue = self._dice.choice(QUEUES)
        home = self._homes[queue]
        connection = self._connect(self._urls[home])
        row = connection.execute(MOVES, (queue,)).fetchone()
        if row is None or row[:2] != ("out", "moving"):
            return self._at_home(queue, home)
        return self._while_it_moves(queue, home, row[2])

    def _follow(self, queue: str) -> None:
        """Use the new home, if no job of an ordering key is on its way there."""
        home, new_home = self._homes[queue], self._all_homes.get(queue)
        lines = [self._line(queue, number) for number in range(LINES)]
        lines += [f"forward:{new_home}:{line}" for line in lines]
        row = self._connect(self._urls[home]).execute(LEFT, {"lines": lines}).fetchone()
        if row == (False,):
            self._homes[queue] = new_home
            self._late_until.pop(queue, None)
            self._travel_to.pop(queue, None)
            self._all_homes.hear(queue, self._producer)

    def _line(self, queue: str, number: int) -> str:
        return f"{self._name} {queue} {number}"

    def _at_home(self, queue: str, home: int) -> int:
        luck = self._dice.random()
        client = Client(self._connect(self._urls[home]))
        if luck < 0.2:
            job = self._job(queue)
            job |= {
                "job_type": "quick",
                "idempotency_key": f"{queue} {self._dice.randrange(KEYS)}",
                "delay": timedelta(seconds=self._dice.choice([0, 0.5, 2])),
            }
            client.enqueue_many([job])
            return 1
        line = self._line(queue, self._dice.randrange(LINES)) if luck < 0.7 else None
        if line and queue in self._travel_to:
            return self._travel_after(queue, home, line)
        jobs = self._jobs(line, queue)
        with client.connection.transaction():
            client.enqueue_many(jobs)
            if luck > 0.95:
                raise psycopg.Rollback
        return 0 if luck > 0.95 else len(jobs)

    def _while_it_moves(self, queue: str, home: int, target: int) -> int:
        luck = self._dice.random()
        if luck < 0.3:
            line = self._line(queue, self._dice.randrange(LINES))
            self._travel_to[queue] = target
            return self._travel_after(queue, home, line)
        client = Client(self._connect(self._urls[target if luck < 0.5 else home]))
        jobs = self._jobs(None, queue)[:3]
        if luck < 0.35:
            # Too early, unless the other database has not heard of the move yet.
            jobs[0]["idempotency_key"] = f"early {jobs[0]['headers']['uid']}"
        if luck < 0.6:
            with suppress(RotaError):
                client.enqueue_many(jobs)
                return len(jobs)
        return 0

    def _travel_after(self, queue: str, home: int, line: str) -> int:
        """Send by `enqueue_to` what is to come after the jobs that move."""
        client = Client(self._connect(self._urls[home]))
        jobs = self._jobs(line, queue)[:5]
        with client.connection.transaction():
            for job in jobs:
                client.enqueue_to(self._travel_to[queue], **job)
        return len(jobs)


def run_follower(
    task: Task, urls: Mapping[int, str], homes: Homes, limit: Any, sent: Any
) -> None:
    """Be a producer for queues that move."""
    begin(task)
    Follower(task, urls, homes).run(limit, sent)


class Move(NamedTuple):
    """A move as it is found in the databases."""

    source: int
    target: int
    state: str


class Mover:
    """Lets one queue move from database to database."""

    def __init__(
        self, queue: str, seed: str, file: str, urls: Mapping[int, str], homes: Homes
    ) -> None:
        self._queue, self._file, self._urls, self._homes = queue, file, urls, homes
        self._dice = random.Random(seed)

    def step(self) -> None:
        """Do what is to be done next."""
        move = self._find()
        if move is None:
            if self._homes.is_calm.value:
                self._homes.rest(self._queue)
                time.sleep(0.05)
                return
            home = self._homes.get(self._queue)
            target = self._dice.choice([number for number in self._urls if number != home])
            time.sleep(self._dice.uniform(0, 0.5))
            self._command(home, target)
        elif move.state in ("moving", "settling"):
            self._command(move.source, move.target)
        else:
            self._homes.change(self._queue, move.target)
            until = time.monotonic() + 5.0
            while not self._homes.is_heard(self._queue) and time.monotonic() < until:
                time.sleep(0.02)
            is_heard = self._homes.is_heard(self._queue)
            if is_heard and self._command(move.source, move.target, "--end") == 0:
                with self._homes.moves.get_lock():
                    self._homes.moves.value += 1

    def _find(self) -> Move | None:
        """Find the move that is under way: one that has ended in the source only is settled."""
        found = None
        for number, url in self._urls.items():
            with psycopg.connect(url, autocommit=True, connect_timeout=5) as db:
                row = db.execute(MOVES, (self._queue,)).fetchone()
            if row and row[0] == "out":
                return Move(number, row[2], row[1])
            if row:
                found = Move(row[2], number, "settled")
        return found

    def _command(self, source: int, target: int, *words: str) -> int:
        from rota.cli import main

        numbers = ("--to", str(target), "--from", str(source))
        command = ["queue", "move", self._queue, *numbers, "--databases", self._file]
        return main([*command, *words])


def run_mover(task: Task, file: str, urls: Mapping[int, str], homes: Homes) -> None:
    """Let the queue of this one's number move, until it is killed."""
    begin(task)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- as long as the process lives
    seed = f"{task.seed} {time.monotonic_ns()}"
    mover = Mover(QUEUES[int(task.name.rpartition("-")[2])], seed, file, urls, homes)
    while True:
        try:
            mover.step()
        except (psycopg.Error, RotaError, OSError):
            time.sleep(0.1)
