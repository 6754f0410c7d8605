"""A producer that goes on whatever happens to the server, as a careful application would.

Most of what it enqueues is forgotten when no answer comes.  Some jobs have a key of their own,
and these it sends again until it is told that they are there: there must be one of each.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any

import psycopg

from rota import Client

BACKOFF = {"kind": "exponential", "base_seconds": 0.05, "cap_seconds": 0.5, "jitter": 0.3}
MIX = {"quick": 70, "plain": 14, "together": 6, "mail": 5, "waiting": 5}
BATCH = 20
ATTEMPTS = 60
PAUSE = 0.1
"""Seconds from one step to the next: most faults strike by the clock, whatever the load."""


class Producer:
    """Enqueues until it is told to stop, as long as there are fewer live jobs than a limit."""

    def __init__(
        self, url: str, seed: str, *, mix: Mapping[str, int], has_keys: bool, pause: float
    ) -> None:
        self._url, self._mix, self._has_keys, self._pause = url, mix, has_keys, pause
        self._dice = random.Random(seed)
        self._again: list[dict[str, Any]] = []
        self._number = 0
        self._is_stopping = False

    def run(self, limit: Any) -> None:
        """Work until SIGTERM; *limit* is a shared number that others change."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_is_stopping", True))
        while not self._is_stopping:
            try:
                with closing(self._connect()) as connection:
                    while not self._is_stopping:
                        self._step(connection, limit.value)
                        time.sleep(self._pause)
            except (psycopg.Error, psycopg.Rollback):  # that escapes where the line is dead
                time.sleep(0.1)

    def _connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(
            self._url, autocommit=True, prepare_threshold=None, connect_timeout=5
        )

    def _step(self, connection: psycopg.Connection[Any], limit: int) -> None:
        live = connection.execute(
            "select count(*) from (select from rota.jobs limit %s) as t", (limit,)
        ).fetchone()
        if live is not None and live[0] >= limit:
            time.sleep(0.02)
            return
        client = Client(connection)
        self._again = jobs = self._again or self._once()
        if jobs:
            client.enqueue_many(jobs)
            self._again = []
        elif self._dice.random() < 0.2:
            with connection.transaction():
                client.enqueue_many(self._batch())
                if self._dice.random() < 0.2:
                    raise psycopg.Rollback
        else:
            client.enqueue_many(self._batch())

    def _once(self) -> list[dict[str, Any]]:
        """Return jobs with keys of their own, one time in ten."""
        if not self._has_keys or self._dice.random() > 0.1:
            return []
        jobs = [self._make() for _ in range(self._dice.randint(1, 5))]
        for job in jobs:
            self._number += 1
            job["idempotency_key"] = f"once {os.getpid()} {self._number}"
            job["unique_for"] = timedelta(hours=1)
        return jobs

    def _batch(self) -> Sequence[dict[str, Any]]:
        jobs = [self._make() for _ in range(self._dice.randint(1, BATCH))]
        if self._has_keys and self._dice.random() < 0.3:
            jobs[0]["idempotency_key"] = f"key {self._dice.randrange(5)}"
        return jobs

    def _make(self) -> dict[str, Any]:
        kind = self._dice.choices(list(self._mix), list(self._mix.values()))[0]
        job = {"job_type": kind, "max_attempts": ATTEMPTS, "backoff": BACKOFF}
        if self._dice.random() < 0.05:
            job["delay"] = timedelta(seconds=0.3)
        return job
