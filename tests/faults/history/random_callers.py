"""A small load for a recorded history: threads that do all kinds of things to a few jobs.

Some of what they do is wrong on purpose: they keep tokens after their end, ask twice, roll
back, and let leases run out.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg

from faults.history.dump import dump
from faults.history.recording import record, stop_recording
from rota import Client, RotaError

BACKOFF = {"kind": "fixed", "base_seconds": 0.02, "jitter": 0.5}
LEASES = (timedelta(milliseconds=30), timedelta(milliseconds=400))
MEMORY = 8


class Player(threading.Thread):
    """One session that takes random steps until a moment, and so many at least."""

    def __init__(self, url: str, number: int, seed: int, until: float, steps: int) -> None:
        super().__init__(name=f"player-{number}")
        self._connection = psycopg.connect(url, autocommit=True)
        self._client = Client(self._connection)
        self._dice = random.Random(f"{seed} {number}")
        self._until, self._steps = until, steps
        self._held: list[tuple[int, int]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """Take steps; what the database refuses is in the history."""
        steps = [self._enqueue, self._claim, self._speak, self._sweep]
        try:
            while self._steps > 0 or time.monotonic() < self._until:
                self._steps -= 1
                step = self._dice.choices(steps, [30, 25, 40, 5])[0]
                with suppress(RotaError, psycopg.Error):
                    step()
        except BaseException as error:
            self.error = error
        finally:
            self._connection.close()

    def _enqueue(self) -> None:
        dice = self._dice
        jobs: list[dict[str, Any]] = [
            {
                "job_type": "t",
                "max_attempts": 3,
                "backoff": BACKOFF,
                "priority": dice.choice([0, 1]),
            }
            for _ in range(dice.randint(1, 3))
        ]
        if dice.random() < 0.4:
            jobs[0]["idempotency_key"] = f"key {dice.randrange(3)}"
        if dice.random() < 0.3:
            jobs[-1]["delay"] = timedelta(milliseconds=20)
        with self._connection.transaction():
            self._client.enqueue_many(jobs)
            if dice.random() < 0.1:
                raise psycopg.Rollback

    def _claim(self) -> None:
        lease, number = self._dice.choice(LEASES), self._dice.randint(1, 3)
        jobs = self._client.claim_jobs(self.name, max_jobs=number, lease=lease)
        self._held += [(job.job_id, job.lease_token) for job in jobs]
        del self._held[:-MEMORY]

    def _speak(self) -> None:
        """Say something of a job, half of the times of the last one."""
        if not self._held:
            return
        last = len(self._held) - 1
        job_id, token = self._held[
            last if self._dice.random() < 0.5 else self._dice.randrange(last + 1)
        ]
        client, ref = self._client, {"job_id": job_id, "lease_token": token}
        ways: list[tuple[int, Callable[[], object]]] = [
            (20, lambda: client.finish_job(job_id, token)),
            (10, lambda: client.finish_jobs([job_id], [token])),
            (10, lambda: self._finish_together(job_id, token)),
            (15, lambda: client.fail_job(job_id, token, "bad luck")),
            (
                5,
                lambda: client.fail_job(job_id, token, "sad", retry_in=timedelta(seconds=0.05)),
            ),
            (2, lambda: client.fail_job(job_id, token, "fatal", fatal=True)),
            (15, lambda: client.release_jobs([job_id], [token])),
            *(
                (3, lambda more=more: client.end_jobs([more]))
                for more in (
                    {**ref, "outcome": "succeeded"},
                    {**ref, "outcome": "failed", "error": "sad", "retry_in": 0.05},
                    {**ref, "outcome": "snoozed", "delay": 0.05},
                    {**ref, "outcome": "released"},
                )
            ),
            (8, lambda: client.snooze_job(job_id, token, timedelta(milliseconds=30))),
            (10, lambda: client.heartbeat(job_id, token, self._dice.choice(LEASES))),
            (10, lambda: client.heartbeat_jobs([job_id], [token], LEASES[0])),
            (5, lambda: client.set_progress(job_id, token, 50)),
        ]
        self._dice.choices([way for _, way in ways], [weight for weight, _ in ways])[0]()

    def _finish_together(self, job_id: int, token: int) -> None:
        """Finish in a transaction that may not come to its end."""
        with self._connection.transaction():
            self._client.finish_job(job_id, token)
            if self._dice.random() < 0.3:
                raise psycopg.Rollback

    def _sweep(self) -> None:
        self._client.sweep_stale_leases()


def play(
    url: str,
    folder: Path,
    *,
    seconds: float = 1.5,
    steps: int = 250,
    players: int = 4,
    seed: int = 1,
) -> None:
    """Record a load, let every job come to its end, and dump the rows."""
    folder.mkdir(exist_ok=True)
    record(folder)
    try:
        until = time.monotonic() + seconds
        crew = [Player(url, number, seed, until, steps) for number in range(players)]
        for player in crew:
            player.start()
        for player in crew:
            player.join()
        for player in crew:
            if player.error is not None:
                raise player.error
        is_drained = drain(url)
    finally:
        stop_recording()
    dump(url, folder, is_drained=is_drained)


def drain(url: str, patience: float = 60.0) -> bool:
    """Finish what is left; return whether that was possible."""
    until = time.monotonic() + patience
    with psycopg.connect(url, autocommit=True) as connection:
        client = Client(connection)
        while time.monotonic() < until:
            client.sweep_stale_leases()
            for job in client.claim_jobs("drain", max_jobs=100, lease=timedelta(seconds=5)):
                with suppress(RotaError, psycopg.Error):
                    client.finish_job(job.job_id, job.lease_token)
            if connection.execute("select not exists (select from rota.jobs)").fetchone() == (
                True,
            ):
                return True
            time.sleep(0.02)
    return False
