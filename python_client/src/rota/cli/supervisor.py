"""Several worker processes under one parent, which restarts those that end.

The parent runs no job and has no connection.  Each child is the same command for one process,
in a process group of its own: so Ctrl-C reaches the parent alone, which passes it on once.
Where the system can do that (Linux), the children are told to leave when the parent dies.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

from ..worker.process import (
    INSISTS,
    die_with,
    notify_service,
    stop_on_signals,
    told_of,
    watchdog,
)
from .output import LEFT_BEHIND, MAKES_ROOM

logger = logging.getLogger("rota")

CHECK_INTERVAL = 0.1
RELOAD_INTERVAL = 0.5
"""Seconds between two looks at the files."""
HEALTHY_AFTER = 30.0
"""Seconds after which a child that ends is started again at once."""
MAX_PAUSE = 30.0
USED_WRONGLY = 2
REASONS = {
    0: " (though nobody told it to: a handler may have ended it)",
    LEFT_BEHIND: " (a handler, or a thread that it left behind, did not end)",
}
"""What an exit code says that is no failure of the worker itself."""
PEER = struct.Struct("iII")
"""The process, user and group of who has sent a message."""
STOP_NOW = 2
"""So many signals make a worker leave at once; a third one would kill it."""


class Child:
    """One worker process; *number* counts from 0."""

    def __init__(self, command: Sequence[str], number: int) -> None:
        self.number = number
        self.notify_socket = ""
        """Where it says that it is ready."""
        self.has_failed = False
        """Whether the last process ended though nobody had told it to, and as none should."""
        self._command = command
        self._failures = 0
        self._told = self._to_tell = 0
        self.started_at = 0.0
        self.heard_at = inf
        """When it last said that its loop turns, once it has; that is asked for by systemd."""
        self._start_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start_if_due(self) -> None:
        """Start the process if it does not run and its pause is over."""
        if self._process is None and time.monotonic() >= self._start_at:
            self.started_at, self.heard_at = time.monotonic(), inf
            self._told = self._to_tell = 0
            # The parent speaks for all.
            service = {"NOTIFY_SOCKET": self.notify_socket, "WATCHDOG_PID": ""}
            try:
                self._process = subprocess.Popen(  # noqa: S603
                    [*self._command, "--process-number", str(self.number)],
                    env={**os.environ, **service},
                    process_group=0,
                    preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),
                )
            except OSError as error:  # no memory, or half of a deployment
                logger.warning("worker process %s cannot be started: %s", self.number, error)
                self._pause(has_failed=True)

    def poll(self) -> int | None:
        """Return the exit code of a process that has ended since it was last asked."""
        code = None if self._process is None else self._process.poll()
        if code == -signal.SIGTERM and self._to_tell > 0:
            # It was still importing, or had already done with its signals: it held no job.
            # The signal may be that of somebody who has told its parent, too.
            code = 0
        if code is not None:
            lived = time.monotonic() - self.started_at
            # Also with 0, if nobody has told it to leave: a handler may have ended it.
            self.has_failed = code != MAKES_ROOM and (code != 0 or self._told == 0)
            self._pause(has_failed=self.has_failed and lived < HEALTHY_AFTER)
            self._process = None
            code = 0 if code == MAKES_ROOM else code
        return code

    def _pause(self, *, has_failed: bool) -> None:
        """Start it again at once, or later and later if it fails."""
        self._failures = self._failures + 1 if has_failed else 0
        pause = min(2.0 ** (self._failures - 1), MAX_PAUSE) if has_failed else 0.0
        self._start_at = time.monotonic() + pause

    def stop(self, signals: int) -> None:
        """Let it have so many signals: with one it leaves, with two at once."""
        self._to_tell = max(self._to_tell, min(signals, STOP_NOW))

    def tell(self) -> None:
        """Send the next of its signals."""
        if self._process is not None and self._told < self._to_tell:
            self._told += 1
            self._process.send_signal(signal.SIGTERM if self._told == 1 else INSISTS)

    def kill_if_silent(self, seconds: float) -> None:
        """Kill it, as systemd would, if its loop has not turned for so long; 0 is never."""
        is_silent = self.heard_at + seconds < time.monotonic()
        if seconds and is_silent and self._process is not None:
            text = "worker process %s has said nothing for %g s: killing it"
            logger.error(text, self.number, seconds)
            self.heard_at = inf
            self._process.send_signal(signal.SIGABRT)

    def hear(self, pid: int) -> None:
        """Take the word of a process that its loop turns."""
        if self._process is not None and self._process.pid == pid:
            self.heard_at = time.monotonic()

    def hold(self) -> None:
        """Do not start it again until `hurry`."""
        self._start_at = inf

    def hurry(self) -> None:
        """Start it without a pause."""
        self._failures = 0
        self._start_at = 0.0

    @property
    def is_running(self) -> bool:
        """Whether there is a process."""
        return self._process is not None


class Supervisor:
    """Keeps *processes* children running until a signal; *command* starts one.

    With *reload* they are started anew when a Python file below the current directory changes.
    *is_done* says that a child that ends well has done all, and needs no successor.
    """

    def __init__(
        self, command: Sequence[str], processes: int, *, reload: bool, is_done: bool
    ) -> None:
        self._children = [Child(command, number) for number in range(processes)]
        self._reload = reload
        self._is_done = is_done
        self._signals = 0
        self._is_ready = self._has_worked = False
        self._tells_at = 0.0
        self._reloaded_at: float | None = None
        self._code = 0

    def run(self) -> int:
        """Return the worst exit code of the children, once all have left."""
        with stop_on_signals(self._stop), _service_socket() as children:
            files = _Files() if self._reload else None
            if children is not None:
                for child in self._children:
                    child.notify_socket = children.getsockname()
            while True:
                if children is not None:
                    self._pass_on(children)
                for child in list(self._children):
                    if not self._is_stopping:
                        child.start_if_due()
                    child.stop(self._signals)
                    if (code := child.poll()) is not None:
                        self._take_end(child, code)
                    child.kill_if_silent(watchdog())
                    child.tell()
                if self._is_stopping and not any(c.is_running for c in self._children):
                    return self._code
                if files is not None and not self._is_stopping and files.have_changed():
                    logger.info("files have changed: restarting the workers")
                    self._reloaded_at = time.monotonic()
                    for child in self._children:
                        child.hurry()
                        child.stop(STOP_NOW)  # somebody waits for the new code
                time.sleep(CHECK_INTERVAL)

    @property
    def _is_stopping(self) -> bool:
        return self._signals > 0 or not self._children

    def _stop(self, now: bool) -> None:
        # No more than this: a signal may come while a child is being started.
        self._signals += 1
        notify_service("STOPPING=1")

    def _pass_on(self, children: socket.socket) -> None:
        """Tell systemd once that a child is ready, and that this process looks after all."""
        with suppress(BlockingIOError):
            while True:
                message, ((_, _, sender),), *_ = children.recvmsg(
                    100, socket.CMSG_SPACE(PEER.size)
                )
                if message == b"READY=1" and not (self._is_ready or self._is_stopping):
                    self._is_ready = True
                    notify_service("READY=1")
                elif message == b"WATCHDOG=1":
                    pid, *_ = PEER.unpack(sender)
                    for child in self._children:
                        child.hear(pid)
        seconds, now = watchdog(), time.monotonic()
        if seconds and now >= self._tells_at:
            self._tells_at = now + seconds / 2
            notify_service("WATCHDOG=1")

    def _take_end(self, child: Child, code: int) -> None:
        if code == USED_WRONGLY and not self._is_stopping and self._reloaded_at is not None:
            # A file is saved with half a line: it ends no session.
            if child.started_at > self._reloaded_at:
                logger.warning("worker process %s waits for the next change", child.number)
                child.hold()
            return
        if code == USED_WRONGLY and not (self._is_stopping or self._has_worked):
            self._stop(False)
        # One that was told to end, or makes room for another, may have left jobs.
        if self._is_stopping or (self._is_done and child.has_failed):
            self._code = max(self._code, code if code >= 0 else 1)
            self._children.remove(child)
        else:
            # From here on a module that cannot be imported may be half of a deployment.
            self._has_worked = True
            if child.has_failed:
                text = "worker process %s ended with %s, restarting it"
                logger.warning(text, child.number, told_of(code) + REASONS.get(code, ""))


@contextmanager
def _service_socket() -> Iterator[socket.socket | None]:
    """Listen to the children as systemd would, if that wants to hear of this process."""
    if not os.environ.get("NOTIFY_SOCKET"):
        yield None
        return
    with (
        TemporaryDirectory(prefix="rota-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as children,
    ):
        children.bind(os.path.join(folder, "notify"))
        children.setblocking(False)
        children.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # who speaks
        yield children


class _Files:
    """The Python files below the current directory, and when they were changed."""

    def __init__(self) -> None:
        self._seen = dict(self._look())
        self._looked_at = time.monotonic()

    def have_changed(self) -> bool:
        """Whether one was changed, added or removed since the last change."""
        if time.monotonic() < self._looked_at + RELOAD_INTERVAL:
            return False
        before, self._seen = self._seen, dict(self._look())
        self._looked_at = time.monotonic()
        return self._seen != before

    def _look(self) -> Iterator[tuple[str, float]]:
        for folder, folders, files in os.walk("."):
            folders[:] = [f for f in folders if f[0] != "." and f != "node_modules"]
            folders[:] = [f for f in folders if not Path(folder, f, "pyvenv.cfg").exists()]
            for file in files:
                if file.endswith(".py"):
                    path = os.path.join(folder, file)
                    with suppress(OSError):  # removed meanwhile
                        yield path, os.stat(path).st_mtime
