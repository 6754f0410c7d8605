"""Connections that handlers are lent, and those over which their own calls of rota go.

A handler has a connection for its transaction; effects and progress share a few that no handler
gets.  So there are never more than *size* of the first and `CALLS` of the second, and a handler
that records progress within its transaction waits for none that waits for it.

Each use of a connection is watched by one thread, whether it is of a thread or of the loop.  A
call of ours that has no answer within its limit, and all that is lent to a job whose lease or
time is over, ends in the same way: its socket is shut down, so that libpq raises at once.
Neither a loop that is blocked nor a server that hangs can keep it from that.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.waiting import Ready, Wait

from ..client.async_client import AsyncClient
from ..client.connecting import connect, connect_async
from ..client.sync_client import Client
from ..exceptions import LeaseLostError, TimeLimitExceeded
from .connection import (
    CALL_TIMEOUT,
    PID,
    SHORTEST_LIMIT,
    ConnectionState,
    NoAnswerError,
    is_own,
    is_readable,
    time_limit,
)

if TYPE_CHECKING:
    from ..job import BaseJob

CALLS = 10
"""So many calls of handlers, such as of effects and of progress, are under way at a time."""
MAX_IDLE_TIME = 60.0
"""Seconds after which an idle connection is not lent out any more."""
LONGEST_SLEEP = 3600.0
PREPARE_AFTER = 5
"""So often a statement is sent before it is prepared, where the session is ours alone."""

_SETTINGS = (
    "autocommit", "isolation_level", "read_only", "deferrable", "prepare_threshold",
    "row_factory", "cursor_factory", "server_cursor_factory",
)  # fmt: skip
"""What a handler may change in a connection itself; then nobody else gets it."""
# As discard all, but for the plans of our functions, which would cost more than the rest.
_RESET = (
    b"close all; set session authorization default; reset all; unlisten *; discard temp;"
    b" discard sequences; "
)
_RESET_SHARED = _RESET + b"deallocate all; select pg_advisory_unlock_all()"
# Where psycopg prepares statements they stay, and one that a handler has prepared by itself is
# told of: only the end of the session is sure to take it away.  To ask costs the half if that
# is prepared, too.
_PREPARE_RESET = """
    prepare rota_reset as
    select pg_advisory_unlock_all(), exists (
        select from pg_prepared_statement() as p where p.from_sql and p.name <> 'rota_reset'
    )
"""
_RESET_OWN = _RESET + b"execute rota_reset"

Plain = psycopg.Connection[Any]
C = TypeVar("C", Plain, AsyncConnection[Any])
D = TypeVar("D", Plain, AsyncConnection[Any])
T = TypeVar("T")


class Session(Generic[C]):
    """One open connection, and a second handle of its socket, by which another thread shuts it.

    The number of the first may be that of another socket by then.
    """

    def __init__(self, connection: C) -> None:
        self.connection: C = connection
        self.idle_since = 0.0
        self.is_new = True
        """Whether nothing is set in it that the next would find."""
        self.is_being_reset = False
        """Whether the server was asked to forget what was set, and has not been heard yet."""
        self._socket = socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM)

    @property
    def works(self) -> bool:
        """Whether it still works, as far as can be told without asking."""
        is_young = time.monotonic() - self.idle_since < MAX_IDLE_TIME
        return (
            is_young
            and not self.connection.closed
            and (
                # A session that was ended has said so, and nothing else is to be read here.
                self.is_being_reset or not is_readable(self.connection.fileno())
            )
        )

    def begin_reset(self) -> None:
        """Have the server forget what was set in the session; wait for nothing."""
        is_own = self.connection.prepare_threshold is not None
        self.connection.pgconn.send_query(_RESET_OWN if is_own else _RESET_SHARED)
        self.is_being_reset, self.is_new = True, False
        if self.connection.pgconn.flush():
            raise psycopg.OperationalError("the connection takes nothing")

    def end_reset(self) -> Generator[Wait, Ready | int, None]:
        """Read what the server has answered."""
        pgconn, is_new = self.connection.pgconn, True
        pgconn.consume_input()  # most often all is there
        while True:
            while pgconn.is_busy():
                yield Wait.R
                pgconn.consume_input()
            if (result := pgconn.get_result()) is None:
                break
            is_new = is_new and result.status != ExecStatus.FATAL_ERROR
            if result.nfields > 1:
                is_new = is_new and result.get_value(0, 1) == b"f"
        self.is_being_reset = False
        self.is_new = is_new and not is_readable(self.connection.fileno())

    def shut(self) -> None:
        """Let whatever waits for an answer raise at once."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it; this never waits."""
        self._socket.close()
        self.connection.pgconn.finish()


class Use(Generic[C]):
    """That a job uses a connection, from when it is lent until it is given back."""

    def __init__(self, job: BaseJob, connection: C, watch: Watch | None = None) -> None:
        self.job = job
        self.connection: C = connection
        self.until = inf
        """When there must be an answer, on the monotonic clock."""
        self.limit = 0.0
        self.session: Session[C] | None = None
        self.is_clean = False
        """Whether the next may have the connection."""
        self.error: Exception | None = None
        """Why its socket was shut down."""
        self._watch = watch

    def expect(self, seconds: float | None = None) -> None:
        """Let what follows be a call of ours, which must end within its limit."""
        if self._watch is not None:
            self.limit = limit_of(self.job, seconds)
            self.until = time.monotonic() + self.limit
            self._watch.heed(self.until)

    @contextmanager
    def resetting(self) -> Iterator[None]:
        """Let the block wait for the end of a reset; a session that has ended is not new."""
        self.expect()
        try:
            yield
        except psycopg.Error:
            if self.error is not None:
                raise
        self.allow()

    def allow(self) -> None:
        """Let what follows be the handler's, which may take as long as its lease is kept."""
        self.until = inf


def limit_of(job: BaseJob, seconds: float | None = None) -> float:
    """Return how many seconds a call for a job may take: no longer than its lease."""
    longest = max(job.lease.total_seconds(), SHORTEST_LIMIT)
    return min(seconds or CALL_TIMEOUT, longest)


class Watch:
    """The thread that shuts down the sockets of calls and of jobs whose time is over."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._uses: set[Use[Any]] = set()
        self._wakes_at = inf
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def add(self, use: Use[Any]) -> None:
        """Watch a use until it is removed."""
        job = use.job
        with self._changed:
            self._uses.add(use)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="rota-watch", daemon=True
                )
                self._thread.start()
        self.heed(time.monotonic() + min(job.seconds_left, job.seconds_to_limit))

    def remove(self, use: Use[Any]) -> None:
        """Watch a use no more; from here on its socket is the owner's alone."""
        with self._changed:
            self._uses.discard(use)

    def heed(self, moment: float) -> None:
        """Look again at that time at the latest."""
        with self._changed:
            if moment < self._wakes_at:
                self._changed.notify()

    def cut(self, job: BaseJob) -> bool:
        """Shut down what a job uses; return whether there was anything."""
        with self._changed:
            uses = [use for use in self._uses if use.job is job]
            for use in uses:
                self._shut(use, _reason(job) or _left(job))
        return bool(uses)

    def close(self) -> None:
        """Shut down all that is still in use, and end the thread."""
        with self._changed:
            for use in self._uses:
                self._shut(use, _reason(use.job) or _left(use.job))
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._is_closed:
                self._wakes_at = min(map(self._look, self._uses), default=inf)
                pause = min(self._wakes_at - time.monotonic(), LONGEST_SLEEP)
                if pause > 0.0:
                    self._changed.wait(pause)

    def _look(self, use: Use[Any]) -> float:
        """Shut down what is over; return when to look again."""
        job, now = use.job, time.monotonic()
        if use.error is not None:
            return inf
        if (reason := _reason(job)) is not None:
            self._shut(use, reason)
            return inf
        if now >= use.until:
            self._shut(use, NoAnswerError(f"no answer within {use.limit:g} seconds"))
            return inf
        return min(use.until, now + job.seconds_left, now + job.seconds_to_limit)

    def _shut(self, use: Use[Any], error: Exception) -> None:
        if use.error is None and use.session is not None:
            use.error = error
            if isinstance(error, LeaseLostError):
                use.job.is_told_lost = True  # a later heartbeat gives it back to no handler
            use.session.shut()


def _reason(job: BaseJob) -> Exception | None:
    """Return what ends a job, also while its end is under way."""
    if job.is_told_lost or job.seconds_left < 0:
        return LeaseLostError(f"the lease of job {job.job_id} is lost")
    if job.is_overdue:
        return TimeLimitExceeded(f"job {job.job_id} has taken longer than {job.time_limit}")
    return None


def _left(job: BaseJob) -> Exception:
    return NoAnswerError(f"the worker of job {job.job_id} has left")


class Turns:
    """So many at a time, threads and tasks alike, first come first served."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._free = count
        self._waiting: deque[Future[None]] = deque()

    def take(self) -> Future[None] | None:
        """Take a turn; return what to wait for, if there is none."""
        with self._lock:
            if self._free:
                self._free -= 1
                return None
            turn: Future[None] = Future()
            self._waiting.append(turn)
            return turn

    def give_back(self) -> None:
        """Let the next have its turn."""
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._free += 1

    def abandon(self, turn: Future[None]) -> None:
        """Wait no more; a turn that has come meanwhile is the next one's."""
        if not turn.cancel():
            self.give_back()


class Pool:
    """At most *size* connections, plain and async ones together, also those that are idle."""

    def __init__(self, conninfo: str, size: int, watch: Watch) -> None:
        self._conninfo = conninfo
        self._size = size
        self._watch = watch
        self._turns = Turns(size)
        self._lock = threading.Lock()
        self._lent = 0
        self._idle: deque[Session[Plain]] = deque()
        self._idle_in_loop: deque[Session[AsyncConnection[Any]]] = deque()

    @contextmanager
    def lend(self, job: BaseJob, seconds: float | None = None) -> Iterator[Use[Plain]]:
        """Lend a plain connection; wait for it no longer than that.

        It is closed in the end unless the use says `is_clean`.
        """
        if (turn := self._turns.take()) is not None:
            try:
                turn.result(limit_of(job, seconds))
            except TimeoutError:
                self._turns.abandon(turn)
                raise NoAnswerError("no connection has become free") from None
        with self._turn_taken():
            is_lent = False
            while not is_lent:
                session = self._take(self._idle, self._idle_in_loop)
                if session is None:
                    limit = limit_of(job, seconds)
                    session = Session(connect(self._conninfo, "rota job", limit))
                with self._using(job, session, self._idle) as use:
                    if session.is_being_reset:
                        with use.resetting():
                            session.connection.wait(session.end_reset())
                    if is_lent := session.is_new:
                        yield use

    @asynccontextmanager
    async def lend_async(
        self, job: BaseJob, seconds: float | None = None
    ) -> AsyncIterator[Use[AsyncConnection[Any]]]:
        """Lend an async connection like `lend`."""
        task = asyncio.current_task()
        cancels = task.cancelling() if task else 0
        if (turn := self._turns.take()) is not None:
            try:
                async with asyncio.timeout(limit_of(job, seconds)):
                    await asyncio.wrap_future(turn)
            except BaseException as error:
                self._turns.abandon(turn)
                if isinstance(error, TimeoutError):
                    raise NoAnswerError("no connection has become free") from None
                raise
        with self._turn_taken():
            try:
                is_lent = False
                while not is_lent:
                    session = self._take(self._idle_in_loop, self._idle)
                    if session is None:
                        session = Session(await self._open(limit_of(job, seconds)))
                    with self._using(job, session, self._idle_in_loop) as use:
                        if session.is_being_reset:
                            with use.resetting():
                                await session.connection.wait(session.end_reset())
                        if is_lent := session.is_new:
                            yield use
            except (psycopg.Error, LeaseLostError, TimeLimitExceeded) as error:
                # It was cancelled, and the driver waited for a server that hangs.
                if task and task.cancelling() > cancels:
                    raise asyncio.CancelledError from error
                raise

    def close(self) -> None:
        """Close the idle connections, and the others when they come back."""
        self._size = 0
        self.close_idle()

    def close_idle(self) -> None:
        """Close the idle connections."""
        with self._lock:
            for idle in (self._idle, self._idle_in_loop):
                while idle:
                    idle.pop().close()

    async def _open(self, seconds: float) -> AsyncConnection[Any]:
        async with time_limit(seconds):
            return await connect_async(self._conninfo, "rota job")

    @contextmanager
    def _turn_taken(self) -> Iterator[None]:
        with self._lock:
            self._lent += 1
        try:
            yield
        finally:
            with self._lock:
                self._lent -= 1
            self._turns.give_back()

    def _take(self, idle: deque[Session[C]], others: deque[Session[D]]) -> Session[C] | None:
        """Return an idle connection; without one, make room for another to be opened."""
        with self._lock:
            while idle:
                if (session := idle.pop()).works:
                    return session
                session.close()
            while others and self._lent + len(others) > self._size:
                others.popleft().close()
        return None

    @contextmanager
    def _using(
        self, job: BaseJob, session: Session[C], idle: deque[Session[C]]
    ) -> Iterator[Use[C]]:
        use = Use(job, session.connection, self._watch)
        use.session = session
        self._watch.add(use)
        try:
            yield use
        except psycopg.Error as error:
            if use.error is not None:
                raise use.error from error
            raise
        finally:
            self._watch.remove(use)
            with self._lock:
                if use.is_clean and use.error is None and self._size:
                    session.idle_since = time.monotonic()
                    idle.append(session)
                else:
                    session.close()


class JobConnections:
    """What a worker with *size* places lends to the handlers of its jobs.

    What a handler has set in its session is gone before another gets the connection.
    """

    def __init__(self, conninfo: str, size: int, state: ConnectionState) -> None:
        self.state = state
        self._watch = Watch()
        self._handlers = Pool(conninfo, size, self._watch)
        self._calls = Pool(conninfo, min(size, CALLS), self._watch)
        self._is_direct: bool | None = None
        state.on_back(self._close_idle)  # an old one may lead to a standby

    @contextmanager
    def lend(self, job: BaseJob) -> Iterator[Use[Plain]]:
        """Lend a connection to a handler in a thread."""
        with self._handlers.lend(job) as use:
            if self._may_prepare(use.connection):
                use.expect()
                self._set_direct(use.connection, use.connection.execute(PID).fetchone())
                if self._is_direct:
                    use.connection.execute(_PREPARE_RESET)
                use.allow()
            settings = _settings_of(use.connection)
            try:
                yield use
            finally:
                self._take_back(use, settings)

    @asynccontextmanager
    async def lend_async(self, job: BaseJob) -> AsyncIterator[Use[AsyncConnection[Any]]]:
        """Lend a connection to a handler in the loop."""
        async with self._handlers.lend_async(job) as use:
            if self._may_prepare(use.connection):
                use.expect()
                row = await (await use.connection.execute(PID)).fetchone()
                self._set_direct(use.connection, row)
                if self._is_direct:
                    await use.connection.execute(_PREPARE_RESET)
                use.allow()
            settings = _settings_of(use.connection)
            try:
                yield use
            finally:
                self._take_back(use, settings)

    def call(
        self, job: BaseJob, action: Callable[[Client], T], seconds: float | None = None
    ) -> T:
        """Run *action* for a job in a thread, over a connection that no handler gets."""
        with self._calls.lend(job, seconds) as use:
            use.expect(seconds)
            if self._may_prepare(use.connection):
                self._set_direct(use.connection, use.connection.execute(PID).fetchone())
            try:
                return action(Client(use.connection))
            finally:
                use.is_clean = _is_idle(use.connection)

    async def call_async(
        self,
        job: BaseJob,
        action: Callable[[AsyncClient], Awaitable[T]],
        seconds: float | None = None,
    ) -> T:
        """Run *action* for a job in the loop, over a connection that no handler gets."""
        async with self._calls.lend_async(job, seconds) as use:
            use.expect(seconds)
            if self._may_prepare(use.connection):
                cursor = await use.connection.execute(PID)
                self._set_direct(use.connection, await cursor.fetchone())
            try:
                return await action(AsyncClient(use.connection))
            finally:
                use.is_clean = _is_idle(use.connection)

    def _may_prepare(self, connection: Plain | AsyncConnection[Any]) -> bool:
        """Return whether it is to be asked if the session is ours alone."""
        return connection.prepare_threshold is None and self._is_direct is not False

    def _set_direct(self, connection: Plain | AsyncConnection[Any], row: Any) -> None:
        self._is_direct = is_own(connection, row)
        connection.prepare_threshold = PREPARE_AFTER if self._is_direct else None

    def _take_back(self, use: Use[C], settings: list[Any]) -> None:
        with suppress(psycopg.Error):
            if (
                use.session is not None
                and _is_idle(use.connection)
                and _settings_of(use.connection) == settings
            ):
                use.session.begin_reset()
                use.is_clean = True

    def cut(self, job: BaseJob) -> bool:
        """Shut down what a job has been lent; return whether there was anything."""
        return self._watch.cut(job)

    def close(self) -> None:
        """Close the idle connections, and shut down the others."""
        self._handlers.close()
        self._calls.close()
        self._watch.close()

    def _close_idle(self) -> None:
        self._handlers.close_idle()
        self._calls.close_idle()


def _settings_of(connection: Plain | AsyncConnection[Any]) -> list[Any]:
    return [getattr(connection, name) for name in _SETTINGS]


def _is_idle(connection: Plain | AsyncConnection[Any]) -> bool:
    is_idle = connection.info.transaction_status is TransactionStatus.IDLE
    return is_idle and not connection.closed
