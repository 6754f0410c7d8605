"""A server that hangs: some of its sessions are stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psycopg

from support.waiting import wait_until

WAITS = {"232", "281", "23", "270"} if os.uname().machine == "x86_64" else {"22", "72"}
"""The numbers of the system calls in which a server waits for others: epoll_wait and select."""


class Frozen:
    """Stops the sessions of a worker, by the name that its connections have."""

    def __init__(self, db: psycopg.Connection[Any], name: str) -> None:
        self._db = db
        self._name = name
        self._pids: set[int] = set()

    def freeze(self) -> None:
        """Stop all that there are now."""
        found = self._db.execute(
            "select pid from pg_stat_activity"
            " where application_name like %s and datname = current_database()",
            [self._name],
        ).fetchall()
        for (pid,) in found:
            self._stop(pid)

    def freeze_all(self) -> None:
        """Stop the server, but for the session of the test, so that no new one is begun."""
        (directory,) = self._db.execute("show data_directory").fetchone() or ("",)
        self._stop(int((Path(directory) / "postmaster.pid").read_text().split()[0]))
        self.freeze()

    def thaw(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGCONT)
        self._pids.clear()

    def _stop(self, pid: int) -> None:
        """Stop a process where it waits for another: at work it may hold what all need."""

        def is_stopped() -> bool:
            os.kill(pid, signal.SIGSTOP)
            wait_until(lambda: _state(pid) == "T", "the stop of a process")
            if Path(f"/proc/{pid}/syscall").read_text().split()[0] in WAITS:
                return True
            os.kill(pid, signal.SIGCONT)
            return False

        self._pids.add(pid)
        wait_until(is_stopped, "a moment at which a session waits")


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
