"""The process of a worker: its event loop, its signals, its memory, and messages to systemd."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, cast

logger = logging.getLogger("rota")

PR_SET_PDEATHSIG = 1
CRASH = "a crash, as of an extension in C: PYTHONFAULTHANDLER=1 shows where"
CAUSES = {
    "SIGKILL": "by hand, or by the system for want of memory: see dmesg, and --max-memory",
    **dict.fromkeys(["SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV"], CRASH),
}
"""What may be behind a signal that has ended a process."""
INSISTS = signal.SIGINT
"""What a parent sends to a process that is to leave at once.  SIGTERM may come again though
nobody means that: from systemd or pkill as well as from the parent, and when that is killed
once for each of its threads."""
LAST_WORDS = 1.0
"""Seconds that a handler, or what is left in a loop, has to end after it was told to."""


def new_name() -> str:
    """Return a name for a worker, which no other has."""
    return f"{socket.gethostname()[:200]}:{os.getpid()}:{secrets.token_hex(3)}"


def loop_factory() -> Callable[[], AbstractEventLoop]:
    """Return what makes a loop: uvloop where that is installed."""
    try:
        return cast(Callable[[], AbstractEventLoop], import_module("uvloop").Loop)
    except ImportError:
        return asyncio.SelectorEventLoop


def is_in_loop() -> bool:
    """Whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def call_in_loop(loop: AbstractEventLoop, function: Callable[[], object]) -> None:
    """Have a function called by the thread of a loop, unless that is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


def run_in_loop(
    main: Coroutine[Any, Any, None], *, ends_on: tuple[type[BaseException], ...] = ()
) -> bool:
    """Run *main* as `asyncio.run` does; return whether all that it began has ended, too.

    That would wait without end for tasks that do not let themselves be cancelled, and for the
    threads of `asyncio.to_thread`.  It goes on if a task or callback in its loop, as of a
    handler, raises what leaves the loop, unless *main* is to end on that.
    """
    runner = asyncio.Runner(loop_factory=loop_factory())
    executor = ThreadPoolExecutor(thread_name_prefix="asyncio")
    runner.get_loop().set_default_executor(executor)
    try:
        _run_to_end(main, runner.get_loop(), ends_on)
    finally:
        has_ended = _end_tasks(runner.get_loop()) and _end_threads(executor)
        if has_ended:
            runner.close()
    return has_ended


def _run_to_end(
    main: Coroutine[Any, Any, None],
    loop: AbstractEventLoop,
    ends_on: tuple[type[BaseException], ...],
) -> None:
    running = loop.create_task(main)
    loop.create_task(_tell_alive())  # kept by its timer, and ended by _end_tasks
    while not running.done():
        try:
            loop.run_until_complete(running)
        except ends_on:
            raise
        except (SystemExit, KeyboardInterrupt) as error:  # the loop can go on
            if not running.done():
                text = "a task or callback of the event loop has raised %s"
                logger.exception(text, type(error).__name__)
        except RuntimeError:
            if not running.done():
                logger.error("a task or callback has stopped the event loop, which goes on")
    running.result()


async def _tell_alive() -> None:
    """Tell systemd that the loop turns."""
    while seconds := watchdog():
        notify_service("WATCHDOG=1")
        await asyncio.sleep(seconds / 2)


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


@contextmanager
def stop_on_signals(
    stop: Callable[[bool], None], *, has_parent: bool = False
) -> Iterator[bool]:
    """Call *stop* on the first signal, with true on the second, and let the third one kill.

    Where it *has_parent*, the second is one that `INSISTS`.  Only the main thread may set
    signal handlers; say whether they are set.
    """
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    signals = [signal.SIGTERM, signal.SIGINT]
    # A terminal was closed; after nohup that is nothing to the process.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    count, owner = 0, os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal count
        if os.getpid() != owner and number == signal.SIGTERM:
            # Of a process that a job has forked, as by multiprocessing, which terminates it.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if count and has_parent and number != INSISTS:
            return
        count += 1
        stop(count > 1)
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


def run_until_signal(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run *main* in a loop; a signal sets its event, and a second one interrupts it."""
    stopping = asyncio.Event()
    loops: list[AbstractEventLoop] = []

    def stop(now: bool) -> None:
        for loop in loops:
            loop.call_soon_threadsafe(stopping.set)
        if now or not loops:
            raise KeyboardInterrupt

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await main(stopping)

    with stop_on_signals(stop):
        run_in_loop(run(), ends_on=(KeyboardInterrupt,))


def notify_service(message: str) -> None:
    """Tell systemd, if it started this process and wants to know: READY=1, WATCHDOG=1."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)  # a parent that hangs reads nothing
            sender.sendto(message.encode(), re.sub("^@", "\0", address))


def watchdog() -> float:
    """Return after how many seconds of silence systemd ends this process; 0 is never."""
    is_meant = os.environ.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
    return int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6 if is_meant else 0.0


def die_with(parent: int, number: signal.Signals) -> None:
    """Let this process, a child of *parent*, get a signal when that dies (on Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it has died before
            os._exit(1)


def told_of(code: int) -> str:
    """Return an exit code with what is known of it: a negative one is a signal."""
    try:
        name = signal.Signals(-code).name
    except ValueError:  # it is none, or of no name
        return str(code)
    return f"{code}, {name} ({CAUSES[name]})" if name in CAUSES else f"{code}, {name}"


def peak_memory() -> float:
    """Return how many megabytes the process has had in memory at most."""
    with suppress(OSError):  # on Linux, where getrusage() counts the process that started this
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1e3
    resource = import_module("resource")  # which Windows has not
    used: float = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / (1e6 if sys.platform == "darwin" else 1e3)  # bytes there, kilobytes elsewhere
