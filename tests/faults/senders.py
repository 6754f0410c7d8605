"""Producers for many databases, by each way there is, that go on whatever happens.

    direct      batches for one database, of which some are rolled back
    to          `enqueue_to` for another database, a third of it rolled back
    front       batches and keys through a front, of which some are rolled back too late

Every job has a header ``uid``: the name of its producer and a number that grows.  So the jobs
of an ordering key, each of one producer, tell by their rows in which order they were sent.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psycopg

from faults.processes import Task, begin
from faults.producer import BACKOFF
from rota import Client

ATTEMPTS = 60
MIX = {"quick": 964, "shaky": 30, "plain": 2, "together": 2, "mail": 1, "waiting": 1}
LINE = 20
"""So many jobs of one ordering key are sent at a time, for they run one after the other."""
BATCH = {"direct": 400, "to": 200, "front": 60, "follow": 20}
QUEUES = ("parcels", "letters")
"""Queues that move; a batch without an ordering key is now and then for one of them."""


class Sender:
    """Sends until it is told to stop, as long as a database has fewer jobs than a limit."""

    def __init__(self, task: Task, way: str, urls: Mapping[int, str], front: str) -> None:
        self._way, self._urls, self._front, self._name = way, urls, front, task.name
        self._dice = random.Random(task.seed)
        self._most = BATCH[way]
        self._number = 0
        self._connections: dict[str, psycopg.Connection[Any]] = {}
        self._once: dict[str, Any] | None = None
        self._is_stopping = False

    def run(self, limit: Any, sent: Any) -> None:
        """Work until SIGTERM; *limit* is a number that others change, *sent* one of all."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_is_stopping", True))
        while not self._is_stopping:
            number = self._dice.choice(list(self._urls))
            try:
                self.look()
                if self._has_room(number, limit.value):
                    self._most = min(BATCH[self._way], 1 + limit.value // 10)
                    jobs = self.step(number)
                    with sent.get_lock():
                        sent.value += jobs
                    time.sleep(0 if limit.value > 100 else 0.1)
                else:
                    time.sleep(0.02)
            except (psycopg.Error, psycopg.Rollback):  # that escapes where the line is dead
                time.sleep(0.05)

    def look(self) -> None:
        """Do what is to be done also where no database has room."""

    def step(self, number: int) -> int:
        """Send something, to this database if there is a choice; return how many jobs."""
        steps = {"direct": self._direct, "to": self._travel, "front": self._through_front}
        return steps[self._way](number)

    def _connect(self, url: str) -> psycopg.Connection[Any]:
        connection = self._connections.get(url)
        if connection is None or connection.closed:
            connection = psycopg.connect(
                url, autocommit=True, prepare_threshold=None, connect_timeout=5
            )
            self._connections[url] = connection
        return connection

    def _has_room(self, number: int, limit: int) -> bool:
        row = (
            self._connect(self._urls[number])
            .execute("select count(*) from (select from rota.jobs limit %s) as t", (limit,))
            .fetchone()
        )
        return row is not None and row[0] < limit

    def _direct(self, number: int) -> int:
        connection = self._connect(self._urls[number])
        client, luck = Client(connection), self._dice.random()
        line = f"{self._name} in {number}" if luck < 0.1 else None
        jobs = self._jobs(line)
        if luck > 0.8:
            with connection.transaction():
                client.enqueue_many(jobs)
                if luck > 0.95:
                    raise psycopg.Rollback
            return 0 if luck > 0.95 else len(jobs)
        client.enqueue_many(jobs)
        return len(jobs)

    def _travel(self, number: int) -> int:
        # In bursts: while jobs travel, those who carry look all the time.
        time.sleep(self._dice.uniform(0, self._most / 200))
        target = self._dice.choice([each for each in self._urls if each != number])
        connection = self._connect(self._urls[number])
        client, luck = Client(connection), self._dice.random()
        line = f"{self._name} from {number} to {target}" if self._dice.random() < 0.5 else None
        jobs = self._jobs(line)
        with connection.transaction():
            for job in jobs:
                client.enqueue_to(target, **job)
            if luck < 1 / 3:
                raise psycopg.Rollback
        return 0 if luck < 1 / 3 else len(jobs)

    def _through_front(self, number: int) -> int:
        connection = self._connect(self._front)
        client, luck = Client(connection), self._dice.random()
        if self._once or luck < 0.2:
            # Sent again and again until it is known to be there.
            self._once = self._once or self._job()
            key = f"once {self._once['headers']['uid']}"
            job = {**self._once, "idempotency_key": key, "unique_for": timedelta(hours=1)}
            client.enqueue_many([job])
            self._once = None
            return 1
        line = f"{self._name} {self._dice.randrange(4)}" if luck < 0.5 else None
        jobs = self._jobs(line)
        if luck > 0.9:
            with suppress(psycopg.Rollback), connection.transaction():
                client.enqueue_many(jobs)
                raise psycopg.Rollback
        else:
            client.enqueue_many(jobs)
        return len(jobs)

    def _jobs(self, line: str | None, queue: str | None = None) -> list[dict[str, Any]]:
        most = min(self._most, LINE) if line else self._most
        if not line and not queue and self._dice.random() < 0.1:
            queue = self._dice.choice(QUEUES)
        jobs = [self._job(queue) for _ in range(self._dice.randint(1, most))]
        for job in jobs if line else ():
            job |= {"job_type": "shaky", "ordering_key": line}
        return jobs

    def _job(self, queue: str | None = None) -> dict[str, Any]:
        self._number += 1
        return {
            "queue": queue or "default",
            "job_type": self._dice.choices(list(MIX), list(MIX.values()))[0],
            "max_attempts": ATTEMPTS,
            "backoff": BACKOFF,
            "headers": {"uid": f"{self._name}:{self._number}"},
        }


def run_sender(
    task: Task, way: str, urls: Mapping[int, str], front: str, limit: Any, sent: Any
) -> None:
    """Be a producer of one kind."""
    begin(task)
    Sender(task, way, urls, front).run(limit, sent)
