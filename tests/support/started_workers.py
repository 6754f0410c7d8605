"""Workers for tests: real processes, and threads of this process."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from rota import Registry, Worker
from support.supervisor import Command
from support.waiting import DEADLINE

HANDLERS = Path(__file__).parents[1] / "client"


class WorkerProcess(Command):
    """A ``rota worker`` of its own with the handlers of sample_handlers.py, and its log."""

    def __init__(self, dsn: str, log: Path, *options: str) -> None:
        command = [sys.executable, "-m", "rota", "worker", "sample_handlers:registry", *options]
        command += ["--poll-interval", "0.1", "--tick-interval", "0.2"]
        super().__init__(command, HANDLERS, {"DATABASE_URL": dsn}, log)

    def lines(self, word: str) -> list[str]:
        """Return the lines of its log about this event."""
        return super().lines(f" {word} ")


def lives(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class BackgroundWorker:
    """A worker in a thread of this process."""

    def __init__(self, dsn: str, registry: Registry, **options: Any) -> None:
        options = {"poll_interval": 0.05, "tick_interval": 0.2, **options}
        self.worker = Worker(dsn, registry, **options)
        self.thread = threading.Thread(target=self.worker.run)
        self.thread.start()

    def stop(self, *, now: bool = False) -> None:
        self.worker.stop(now=now)
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive()
