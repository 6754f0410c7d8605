"""The worker's connections: one name for each, and a time limit for every call.

A `Connection` is opened when it is needed, and again after an error or a call without answer.
What all of them know together, that the database is lost or back, is the `ConnectionState` of
the worker: it is logged once for each reason, however many calls fail, and all that wait for
their next try are woken when the database is back.  What handlers are lent is in lending.py.
"""

from __future__ import annotations

import asyncio
import logging
import random
import select
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from math import inf
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection, IsolationLevel

from ..client.async_client import AsyncClient
from ..client.connecting import connect_async, one_line
from ..client.statement import read_quickly
from ..exceptions import IsolationLevelError
from .process import call_in_loop

logger = logging.getLogger("rota")

T = TypeVar("T")

CALL_TIMEOUT = 30.0
"""Seconds that a call may take."""
OVERDUE_AFTER = 5.0
"""Seconds after which the answer to a call is overdue, and the worker is not ready."""
SHORTEST_LIMIT = 1.0
"""Seconds that a call for a job may take, however short its lease is."""
MAX_JOBS = 1000
"""Jobs that one call takes at most."""
BUSY_PAUSE = 0.5
"""Seconds until a call is repeated for a job whose row another session has locked."""
REASON_INTERVAL = 10.0
"""Seconds of an outage after which another reason for it is logged."""
IDLE_TIMEOUT = 60.0
"""Seconds after which a worker without jobs closes the connections that only they need."""
CANCEL_TIMEOUT = 1.0
"""Seconds that the server has to confirm the end of a call that was cancelled."""
PROBE_INTERVAL = (0.25, 0.5)
"""Seconds until one of all that wait for a database tries whether it is back."""
UNREACHABLE = {"53300", "57P01", "57P02", "57P03", "57P05"}
"""Too many connections; the server shuts down, crashes, starts, or ends idle sessions."""
PID = b"select pg_catalog.pg_backend_pid()"
QUESTION = PID + b", pg_catalog.current_setting('default_transaction_isolation')"
OWN = b"""
    set tcp_keepalives_idle = 30; set tcp_keepalives_interval = 10;
    set tcp_user_timeout = 30000;
"""
"""With it the server, too, notices that a host has vanished: it would let its session keep
locks, and its place among those who are notified, for hours."""
PASSING = (psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction)
"""What a call raises that may go through later; in a failover the database is read-only."""


class NoAnswerError(psycopg.OperationalError):
    """A call had no answer within its time limit."""


def is_lost(error: BaseException) -> bool:
    """Return whether *error* says that the database cannot be reached, or went away."""
    if not isinstance(error, psycopg.OperationalError) or isinstance(error, NoAnswerError):
        return False
    state = error.sqlstate
    return state is None or state.startswith("08") or state in UNREACHABLE


def is_wrong(sqlstate: str | None) -> bool:
    """Whether the server will never take it: a wrong value, or more than it can do."""
    return (sqlstate or "")[:2] in ("22", "54")


class ConnectionState:
    """What all connections of a worker know together; its methods may be called by any thread.

    *opened_at* says when a connection was opened, on the monotonic clock.  One from before the
    last outage that turns out to be broken is no news, and one from before this outage that
    still works does not end it.  *name* tells the database from others in the log.
    """

    def __init__(self, name: str = "") -> None:
        self.database = f"the database {name}".strip()
        self.place = f" in {name}" if name else ""
        self.back_at = -inf
        """When the last outage ended."""
        self._lock = threading.Lock()
        self._began_at: float | None = None
        self._ended_at: float | None = None
        self._probe_at = 0.0
        self._reason = ""
        """Of the outage, as it was logged last, and when."""
        self._reason_at = 0.0
        self._on_back: list[Callable[[], None]] = []

    def on_back(self, callback: Callable[[], None]) -> None:
        """Have *callback* called, by any thread, whenever the database is back."""
        with self._lock:
            self._on_back.append(callback)

    @property
    def is_up(self) -> bool:
        """Whether the database was reached, and is not lost."""
        return self._ended_at is not None and self._began_at is None

    def lost(self, error: Exception, opened_at: float) -> None:
        """Record that a connection is gone, or could not be opened.

        An outage may begin with a restart, and last because of a password.
        """
        reason, now = one_line(error), time.monotonic()
        with self._lock:
            if self._began_at is None:
                if self._ended_at is None or opened_at < self._ended_at:
                    return  # before the first connection the error is the caller's
                self._began_at, text = now, "the connection to %s is lost, retrying: %s"
            elif (
                opened_at < self._began_at
                or reason == self._reason
                or now - self._reason_at < REASON_INTERVAL
            ):
                return
            else:
                text = "%s is still away: %s"
            self._reason, self._reason_at = reason, now
        logger.warning(text, self.database, reason)

    def works(self, opened_at: float) -> None:
        """Record that a connection works."""
        with self._lock:
            began_at = self._began_at
            if self._ended_at is None:
                self._ended_at = opened_at
            if began_at is None or opened_at < began_at:
                return
            self._began_at, self._ended_at = None, opened_at
            self.back_at = time.monotonic()
            callbacks = list(self._on_back)
        seconds = self.back_at - began_at
        logger.warning("%s is back after %.1f s", self.database, seconds)
        for callback in callbacks:
            callback()

    def pause(self, longest: float) -> float:
        """Return how long to wait for a database that is away: all but one take their time.

        That one looks often, and when it is back all are woken.
        """
        with self._lock:
            now = time.monotonic()
            if now < self._probe_at:
                return longest
            pause = random.uniform(*PROBE_INTERVAL)  # noqa: S311
            self._probe_at = now + pause
            return min(pause, longest)

    @contextmanager
    def waking(self, callback: Callable[[], None]) -> Iterator[None]:
        """Have *callback* called like `on_back` while the block lasts."""
        self.on_back(callback)
        try:
            yield
        finally:
            with self._lock:
                self._on_back.remove(callback)


class Retry:
    """Counts the failures in a row of one activity, and waits after each: longer and longer.

    When the database is back, no wait for it goes on.  An activity without a name logs its
    failures by itself.
    """

    def __init__(self, activity: str | None, state: ConnectionState) -> None:
        self.failures = 0
        self._activity = activity
        self._state = state

    def fail(self, error: BaseException) -> float:
        """Log a failure, unless the outage is logged already; return the seconds to wait."""
        self.failures += 1
        if self._activity is not None and not is_lost(error):
            activity = self._activity + self._state.place
            logger.warning("%s failed, retrying: %s", activity, one_line(error))
        pause = min(10.0, 0.1 * 2.0 ** min(self.failures, 10)) * random.uniform(0.5, 1.0)  # noqa: S311
        return self._state.pause(pause) if is_lost(error) else pause

    def succeed(self) -> None:
        """Begin to count anew."""
        self.failures = 0

    async def wait(self, error: BaseException, at_most: float = inf) -> None:
        """Log a failure like `fail`, and wait in a loop until it is time for the next try."""
        back = asyncio.Event()
        with self._state.waking(partial(call_in_loop, asyncio.get_running_loop(), back.set)):
            await wait_for(back, min(self.fail(error), at_most))

    def wait_in_thread(self, error: BaseException, at_most: float = inf) -> None:
        """Log a failure like `fail`, and wait in a thread until it is time for the next try."""
        back = threading.Event()
        with self._state.waking(back.set):
            back.wait(min(self.fail(error), at_most))


async def wait_for(event: asyncio.Event, seconds: float) -> bool:
    """Wait for *event*, but not longer than that; return whether it is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds if seconds < inf else None):
            await event.wait()
    return event.is_set()


async def first_of(
    *awaited: asyncio.Event | asyncio.Task[Any], timeout: float | None = None
) -> None:
    """Wait until an event is set or a task has ended, but not longer than that."""
    tasks = [each for each in awaited if isinstance(each, asyncio.Task)]
    events = [each for each in awaited if isinstance(each, asyncio.Event)]
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks + waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Raise NoAnswerError in a block that takes longer, however the server hangs.

    When it is cancelled, psycopg asks the server to end the statement and waits for it.  A
    server that hangs never answers, so the block is cancelled again.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None  # noqa: S101 - for the type checker
    cancels, others = 0, task.cancelling()
    timer: asyncio.TimerHandle

    def expire() -> None:
        nonlocal timer, cancels
        # After a handler that has blocked the loop the answer may be there, and not read yet.
        if loop.time() < timer.when() + CANCEL_TIMEOUT:
            cancels += 1
            task.cancel()
        timer = loop.call_later(CANCEL_TIMEOUT, expire)

    timer = loop.call_later(seconds, expire)
    try:
        yield
    except asyncio.CancelledError:
        if cancels and task.cancelling() - cancels <= others:
            raise NoAnswerError(f"no answer within {seconds:g} seconds") from None
        raise
    finally:
        timer.cancel()
        for _ in range(cancels):  # the task itself was not meant
            task.uncancel()


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end; cancel it again while its server does not answer."""
    for _ in range(3):
        if task.done():
            return
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_TIMEOUT)


async def outlast(
    task: asyncio.Task[Any], on_cancel: Callable[[], object] = lambda: None
) -> None:
    """Wait for the end of a task, and only then raise a cancellation that came meanwhile."""
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancellation = error
            on_cancel()
    if cancellation is not None:
        raise cancellation from task.exception()
    task.result()


class Connection:
    """One connection of a worker, by its *name*; calls take turns.

    So many times in a row as *max_doublings* a call that had no answer is given twice the time:
    one that takes long would never end if it were cut off in time each time.
    """

    def __init__(
        self, conninfo: str, name: str, state: ConnectionState, max_doublings: int = 4
    ) -> None:
        self.state = state
        self.database = ""
        """The name of the database, once there was a connection."""
        self.conninfo = conninfo
        self._name = name
        self._opened_at = 0.0
        self._connection: AsyncConnection[Any] | None = None
        self._is_open = False
        """Whether the server has answered over it."""
        self._turn = asyncio.Lock()
        self._max_doublings = max_doublings
        self._unanswered = 0
        self._asked_at = inf
        """When the call that is under way has begun."""
        self._others = 0
        self._must_begin = False

    @property
    def is_overdue(self) -> bool:
        """Whether the database did not answer in good time, the last time that it was asked."""
        return self._unanswered > 0 or time.monotonic() - self._asked_at > OVERDUE_AFTER

    def limit(self, timeout: float) -> float:
        """Return how long the next call may take."""
        return timeout * 2.0 ** min(self._unanswered, self._max_doublings)

    async def call(
        self, action: Callable[[AsyncClient], Awaitable[T]], timeout: float = CALL_TIMEOUT
    ) -> T:
        """Run *action*; after a database error the next call opens a new connection.

        A cancellation is raised even if the driver has answered at the same moment.
        """
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - for the type checker
        cancels = task.cancelling()
        async with self._turn:
            self._asked_at = time.monotonic()
            try:
                async with time_limit(self.limit(timeout)):
                    value = await self._act(action)
            except (psycopg.Error, asyncio.CancelledError) as error:
                if isinstance(error, NoAnswerError):
                    self._unanswered += 1
                    if not self._is_open:
                        error.args = (
                            f"{error} to a new connection; behind a pooler, its pool may be "
                            "too small: a worker needs four connections",
                        )
                elif isinstance(error, psycopg.Error) and is_lost(error):
                    self.state.lost(error, self._opened_at)
                # Also when it seems usable: after a failover it may lead to a standby.
                await self._close()
                if task.cancelling() > cancels:
                    raise asyncio.CancelledError from error
                raise
            finally:
                self._asked_at = inf
            self._unanswered = 0
            self.state.works(self._opened_at)
            if task.cancelling() > cancels:
                raise asyncio.CancelledError
            return value

    async def _act(self, action: Callable[[AsyncClient], Awaitable[T]]) -> T:
        connection = await self.open()
        try:
            async with connection.transaction() if self._must_begin else nullcontext():
                return await action(AsyncClient(connection))
        except IsolationLevelError:
            if self._must_begin:
                raise
            self._must_begin = True  # behind a pooler it may be another session by now
            return await self._act(action)

    async def open(self) -> AsyncConnection[Any]:
        """Return the connection; open it if it is not."""
        if self._connection is None or self._connection.closed:
            self._opened_at, self._is_open = time.monotonic(), False
            # Ours from here on: the questions below may fail or be cancelled.
            self._connection = await connect_async(self.conninfo, self._name, CALL_TIMEOUT)
            read_quickly(self._connection)
            await self._connection.set_isolation_level(IsolationLevel.READ_COMMITTED)
            self.database = self._connection.info.dbname
            row = await (await self._connection.execute(QUESTION)).fetchone()
            if is_own(self._connection, row):
                self._connection.prepare_threshold = 2
                # That limit is for forgotten sessions; this one waits for jobs.
                await self._connection.execute(OWN + b"set idle_session_timeout = 0")
            # Claims and ticks are refused where the database's default is another level.
            self._must_begin = row is not None and row[1] != "read committed"
            self._is_open = True
        return self._connection

    def share(self) -> None:
        """Let another use it, too: it stays open until both have closed it."""
        self._others += 1

    async def close(self) -> None:
        """Close the connection, if there is one and no other uses it."""
        if self._others:
            self._others -= 1
        else:
            await self._close()

    async def _close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()


def is_own(connection: psycopg.Connection[Any] | AsyncConnection[Any], row: Any) -> bool:
    """Return from the answer to `PID` whether the server's session is ours alone.

    A pooler has told a number of its own.
    """
    return row is not None and row[0] == connection.info.backend_pid


def is_readable(fileno: int) -> bool:
    """Return whether a socket has something to read, or is at its end."""
    if hasattr(select, "poll"):  # which Windows has not
        poll = select.poll()
        poll.register(fileno, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([fileno], [], [], 0)[0])
