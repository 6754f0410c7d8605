from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from faults.noting_handlers import TABLES
from support.waiting import wait_until


class FaultyWorker:
    """A `rota worker` process with our handlers, and what it wrote down."""

    def __init__(self, dsn: str, db: psycopg.Connection[Any], log: Path, options: str) -> None:
        self.log = log
        self._db = db
        command = [sys.executable, "-m", "rota", "worker", "noting_handlers:registry"]
        command += ["--poll-interval", "0.1", "--tick-interval", "0.2", *options.split()]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=Path(__file__).parent,
                env={**os.environ, "DATABASE_URL": dsn},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_for_executions(self, count: int) -> None:
        """Return when handlers of this process have begun so often."""

        def begun() -> bool:
            if self.process.poll() is not None:
                pytest.fail(f"the worker has ended: {self.log.read_text()}")
            row = self._db.execute(
                "select count(*) from faults.executions where worker = %s", (self.process.pid,)
            ).fetchone()
            return row is not None and row[0] >= count

        wait_until(begun, f"{count} executions")


@pytest.fixture
def start(
    dsn: str, db: psycopg.Connection[Any], tmp_path: Path
) -> Iterator[Callable[..., FaultyWorker]]:
    """Start worker processes; those left at the end are killed."""
    db.execute(TABLES)  # type: ignore[arg-type]
    started: list[FaultyWorker] = []

    def run(options: str) -> FaultyWorker:
        log = tmp_path / f"worker{len(started)}.log"
        started.append(FaultyWorker(dsn, db, log, options))
        return started[-1]

    yield run
    for worker in started:
        worker.process.kill()
        worker.process.wait()
