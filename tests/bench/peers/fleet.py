"""The processes of a peer: started, watched, and ended whatever happens."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Any

from bench.peers.catalogue import HERE, Peer

TICKS = os.sysconf("SC_CLK_TCK")
PATIENCE = 300
GRACE = 5


class PeerError(Exception):
    """A program of a peer failed; the message has its last words."""


class Program:
    """One process that takes a step of a peer; leave the `with` block to end it."""

    def __init__(self, peer: Peer, step: str, dsn: str, **values: object) -> None:
        self._step = step
        self._log: IO[Any] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            [*with_parent(), *peer.command(step)],
            cwd=HERE,
            env={**peer.environment(step, **values), "DATABASE_URL": dsn},
            stdout=self._log,
            stderr=self._log,
        )

    @property
    def cpu(self) -> float:
        """The CPU seconds of all its threads, also those that have ended."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / TICKS

    def check(self) -> None:
        """Raise PeerError if it has ended."""
        if self._process.poll() is not None:
            raise PeerError(f"{self._step} ended by itself: {self._last_words()}")

    def finish(self) -> None:
        """Wait for its end; raise PeerError if that is not a good one."""
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise PeerError(f"{self._step} did not end in {PATIENCE} s") from None
        if code != 0:
            raise PeerError(f"{self._step} failed: {self._last_words()}")

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


def with_parent() -> list[str]:
    """Return the words before a command that let it end with us, where the system can."""
    found = shutil.which("setpriv")
    return [found, "--pdeathsig", "KILL"] if found else []


def call(peer: Peer, step: str, dsn: str, **values: object) -> None:
    """Take a step to its end."""
    with Program(peer, step, dsn, **values) as program:
        program.finish()
