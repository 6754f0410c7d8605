"""Recorded worker processes that are killed and frozen, and a producer that is recorded too.

    play(url, folder, ...)      a run with some faults; its history is then in the folder

When the faults are over, it is calm until all jobs have ended, or could have.
"""

from __future__ import annotations

import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg

from faults.history.dump import dump
from faults.history.recording import VARIABLE, mark, record, stop_recording
from rota import Client
from support.supervisor import Command, Supervisor
from support.waiting import comes_true

TESTS = Path(__file__).resolve().parents[2]
LEASE = 1.0
TICK = 0.4
BACKOFF = {"kind": "exponential", "base_seconds": 0.05, "cap_seconds": 0.5, "jitter": 0.3}
TYPES = ["plain", "plain", "plain", "together", "mail", "waiting"]
PATIENCE = 30.0


class Crew(Supervisor):
    """Recorded workers."""

    def __init__(self, url: str, folder: Path, count: int) -> None:
        def start(number: int) -> Command:
            options = f"--name crew-{number} --concurrency 4 --batch 4 --lease {LEASE}"
            options += f" --poll-interval 0.1 --tick-interval {TICK} --log-level warning"
            handlers = "faults.history.recorded_handlers:registry"
            command = [sys.executable, "-m", "rota", "worker", handlers]
            return Command(
                [*command, *options.split()],
                TESTS,
                {"DATABASE_URL": url, VARIABLE: str(folder)},
                folder / f"crew-{number}.log",
            )

        super().__init__(start, count)


class Producer:
    """Enqueues a few jobs at a time; some have keys, a delay, or are taken back."""

    def __init__(self, url: str, dice: random.Random) -> None:
        # Rather an error than a run that never ends.
        self._connection = psycopg.connect(
            url, autocommit=True, options=f"-c statement_timeout={PATIENCE:.0f}s"
        )
        self._dice = dice

    def step(self) -> None:
        """Put some jobs in, unless there are more than can be done soon."""
        live = self._connection.execute("select count(*) from rota.jobs").fetchone()
        if live and live[0] > 100:
            return
        jobs = [self._make() for _ in range(self._dice.randint(1, 4))]
        with self._connection.transaction():
            Client(self._connection).enqueue_many(jobs)
            if self._dice.random() < 0.1:
                raise psycopg.Rollback

    def _make(self) -> dict[str, Any]:
        job: dict[str, Any] = {"job_type": self._dice.choice(TYPES), "max_attempts": 6}
        job["backoff"] = BACKOFF
        if self._dice.random() < 0.2:
            job["idempotency_key"] = f"key {self._dice.randrange(5)}"
        if self._dice.random() < 0.2:
            job["delay"] = timedelta(seconds=0.3)
        return job

    def has_ended(self) -> bool:
        """Whether no job is live."""
        found = self._connection.execute("select not exists (select from rota.jobs)").fetchone()
        return found == (True,)

    def sees(self, pids: set[int]) -> bool:
        """Whether all of these workers are at work."""
        rows = self._connection.execute("select w.pid from rota.workers as w").fetchall()
        return pids <= {row[0] for row in rows}

    def close(self) -> None:
        """Let go of the database."""
        self._connection.close()


def play(url: str, folder: Path, *, faults: int = 8, workers: int = 3, seed: int = 1) -> Crew:
    """Record a run with so many faults, each when all are at work; dump in it and after it."""
    folder.mkdir(exist_ok=True)
    record(folder)
    dice = random.Random(seed)
    crew, producer = Crew(url, folder, workers), Producer(url, dice)

    def has_worked() -> bool:
        producer.step()
        return time.monotonic() > since + 0.5 and producer.sees(crew.pids)

    try:
        for _ in range(faults):
            since = time.monotonic()
            comes_true(has_worked, PATIENCE)
            crew.hurt(dice, 0.25, 1.5 * LEASE)
        crew.thaw()
        dump(url, folder)
        # The new ones need their time to come to work.
        comes_true(lambda: producer.sees(crew.pids), PATIENCE, every=0.1)
        mark("calm", lease=LEASE, sweep=TICK)
        is_drained = comes_true(producer.has_ended, PATIENCE, every=0.1)
    finally:
        crew.stop()
        producer.close()
        stop_recording()
    dump(url, folder, is_drained=is_drained)
    return crew
