"""Workers for tests: real processes, and threads of this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from rota import Registry, Worker
from support.waiting import DEADLINE, wait_until

HANDLERS = Path(__file__).parents[1] / "client"


class WorkerProcess:
    """A ``rota worker`` of its own with the handlers of sample_handlers.py, and its log."""

    def __init__(self, dsn: str, log: Path, *options: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "rota", "worker", "sample_handlers:registry", *options]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, "--poll-interval", "0.1", "--tick-interval", "0.2"],
                cwd=HANDLERS,
                env={**os.environ, "DATABASE_URL": dsn},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = DEADLINE) -> int:
        return self.process.wait(timeout)

    def lines(self, event: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if f" {event} " in line]

    def wait_for_line(self, event: str) -> str:
        found: list[str] = wait_until(lambda: self.lines(event), f"a log line {event!r}")
        return found[0]


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
