from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from faults.noting_handlers import TABLES
from support.supervisor import Command, killing
from support.waiting import wait_until


class FaultyWorker(Command):
    """A `rota worker` process with our handlers, and what it wrote down."""

    def __init__(self, dsn: str, db: psycopg.Connection[Any], log: Path, options: str) -> None:
        self._db = db
        command = [sys.executable, "-m", "rota", "worker", "noting_handlers:registry"]
        command += ["--poll-interval", "0.1", "--tick-interval", "0.2", *options.split()]
        super().__init__(command, Path(__file__).parent, {"DATABASE_URL": dsn}, log)

    def wait_for_executions(self, count: int) -> None:
        """Return when handlers of this process have begun so often."""

        def begun() -> bool:
            if self.exitcode is not None:
                pytest.fail(f"the worker has ended: {self.log.read_text()}")
            row = self._db.execute(
                "select count(*) from faults.executions where worker = %s", (self.pid,)
            ).fetchone()
            return row is not None and row[0] >= count

        wait_until(begun, f"{count} executions")


@pytest.fixture
def start(
    dsn: str, db: psycopg.Connection[Any], tmp_path: Path
) -> Iterator[Callable[..., FaultyWorker]]:
    """Start worker processes; those left at the end are killed."""
    db.execute(TABLES)  # type: ignore[arg-type]
    with killing() as started:

        def run(options: str) -> FaultyWorker:
            log = tmp_path / f"worker{len(started)}.log"
            started.append(worker := FaultyWorker(dsn, db, log, options))
            return worker

        yield run
