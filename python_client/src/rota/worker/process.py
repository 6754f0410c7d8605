"""The process of a worker: its event loop, its signals, and what systemd and HTTP hear of it.

``/live`` answers as long as the event loop turns, with the database or without: to kill all
workers because the database is down would only make its return harder.  ``/ready`` says whether
jobs are asked for.  ``/metrics`` has what prometheus_client knows, ours and the user's own.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
import threading
from asyncio import AbstractEventLoop
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, cast

PR_SET_PDEATHSIG = 1
LAST_WORDS = 1.0
"""Seconds that what is left in a loop has to end after it was cancelled."""
REQUEST_TIMEOUT = 5.0
MAX_REQUEST = 8192
TEXT = "text/plain; charset=utf-8"
NO_METRICS = "pip install 'rota[prometheus]' for metrics\n"

Answer = tuple[int, str, str]
Metrics = Callable[[], tuple[str, str]]


def loop_factory() -> Callable[[], AbstractEventLoop] | None:
    """Return what makes a loop of uvloop where that is installed, or None for asyncio's own."""
    try:
        found = import_module("uvloop").new_event_loop
    except ImportError:
        return None
    return cast(Callable[[], AbstractEventLoop], found)


def run_in_loop(main: Coroutine[Any, Any, None]) -> bool:
    """Run *main* as `asyncio.run` does; return whether all that it began has ended, too.

    That would wait without end for tasks that do not let themselves be cancelled, and for the
    threads of `asyncio.to_thread`.
    """
    runner = asyncio.Runner(loop_factory=loop_factory())
    executor = ThreadPoolExecutor(thread_name_prefix="asyncio")
    runner.get_loop().set_default_executor(executor)
    try:
        runner.run(main)
    finally:
        has_ended = _end_tasks(runner.get_loop()) and _end_threads(executor)
        if has_ended:
            runner.close()
    return has_ended


def _end_tasks(loop: AbstractEventLoop) -> bool:
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        _, left = loop.run_until_complete(asyncio.wait(left, timeout=LAST_WORDS))
    return not left


def _end_threads(executor: ThreadPoolExecutor) -> bool:
    ending = threading.Thread(target=executor.shutdown, daemon=True)
    ending.start()
    ending.join(LAST_WORDS)
    return not ending.is_alive()


class Stop(Protocol):
    """The function that is called on a signal."""

    def __call__(self, *, now: bool) -> None:
        """Stop; with *now* at once."""


@contextmanager
def stop_on_signals(stop: Stop) -> Iterator[bool]:
    """Stop on the first signal, at once on the second, and let the third one kill.

    Only the main thread may set signal handlers; say whether they are set.
    """
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    signals = [signal.SIGTERM, signal.SIGINT]
    # A terminal was closed; after nohup that is nothing to the process.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    count = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        stop(now=count > 1)
        if count > 1:
            for each in signals:
                signal.signal(each, signal.SIG_DFL)

    # Plain handlers, not those of the loop: they run also while a handler blocks the loop.
    before = {each: signal.signal(each, handle) for each in signals}
    try:
        yield True
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def notify_service(message: str) -> None:
    """Tell systemd, if it started this process and wants to know: READY=1, STOPPING=1."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(message.encode(), address.replace("@", "\0", 1))


def die_with(parent: int, number: signal.Signals) -> None:
    """Let this process, a child of *parent*, get a signal when that dies (on Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it has died before
            os._exit(1)


def peak_memory() -> float:
    """Return how many megabytes the process has had in memory at most."""
    with suppress(OSError):  # on Linux, where getrusage() counts the process that started this
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1e3
    resource = import_module("resource")  # which Windows has not
    used: float = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / (1e6 if sys.platform == "darwin" else 1e3)  # bytes there, kilobytes elsewhere


class Served(Protocol):
    """What is asked of a worker."""

    @property
    def is_ready(self) -> bool:
        """Whether it reaches the database and asks for jobs."""


@asynccontextmanager
async def serve_health(host: str, port: int, workers: Sequence[Served]) -> AsyncIterator[int]:
    """Answer requests inside the block; return the port, which is a free one for 0."""
    metrics = _metrics()

    def answer(path: str) -> Answer:
        match path.partition("?")[0]:
            case "/live":
                return 200, TEXT, "live\n"
            case "/ready":
                is_ready = all(worker.is_ready for worker in workers)
                return (200, TEXT, "ready\n") if is_ready else (503, TEXT, "not ready\n")
            case "/metrics" if metrics is not None:
                return (200, *metrics())
            case "/metrics":
                return 404, TEXT, NO_METRICS
        return 404, TEXT, "/live, /ready, /metrics\n"

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT):
                head = await reader.readuntil(b"\r\n\r\n")
                words = head.decode("latin-1").split(" ", 2)
                code, kind, text = answer(words[1] if words[0] in ("GET", "HEAD") else "")
                body = text.encode()
                writer.write(
                    f"HTTP/1.1 {code} {'OK' if code == 200 else 'Unavailable'}\r\n"
                    f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                    "Connection: close\r\n\r\n".encode()
                )
                writer.write(body if words[0] != "HEAD" else b"")
                await writer.drain()
        except (TimeoutError, OSError, IndexError, asyncio.IncompleteReadError):
            pass  # it is the caller who gets no answer
        except asyncio.LimitOverrunError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, host, port, limit=MAX_REQUEST)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def _metrics() -> Metrics | None:
    try:
        found: Metrics = import_module("rota.contrib.prometheus").exposition
    except ImportError:
        return None
    return found
