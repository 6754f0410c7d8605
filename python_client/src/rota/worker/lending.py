"""Connections that handlers are lent, and those over which their own calls of rota go.

A handler has a connection for its transaction; effects and progress share a few that no
handler gets.  So there are never more than *size* of the first and `CALLS` of the second, and
handlers that record progress within their transactions never wait for those of each other.

The thread of the heartbeats watches each use of a connection, be it of a thread or of the loop.
A call of ours that has no answer within its limit, and all that is lent to a job whose lease or
time is over, ends in the same way: its socket is shut down, so that libpq raises at once.
Neither a loop that is blocked nor a server that hangs can keep it from that.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import psycopg
from psycopg import AsyncConnection, generators
from psycopg.abc import PQGen
from psycopg.pq import ConnStatus, ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.transaction import OutOfOrderTransactionNesting

from ..client.async_client import AsyncClient
from ..client.connecting import connect, connect_async
from ..client.sync_client import Client
from ..exceptions import LeaseLostError, TimeLimitExceeded
from .connection import (
    CALL_TIMEOUT,
    OWN,
    PID,
    SHORTEST_LIMIT,
    NoAnswerError,
    is_own,
    is_readable,
    time_limit,
)

if TYPE_CHECKING:
    from ..job import BaseJob

CALLS = 10
"""Calls of handlers, such as for effects and progress, that may be under way at a time."""
MAX_IDLE_TIME = 60.0
"""Seconds after which an idle connection is not lent out any more."""
PREPARE_AFTER = 5
"""How often a statement is sent before it is prepared, where the session is ours alone."""
PREPARED_MAX = 100
"""How many statements are kept prepared: the default of psycopg."""

# As discard all, but for the plans of our functions, which would cost more than the rest.
_RESET = (
    b"close all; set session authorization default; reset all; unlisten *; discard temp;"
    b" discard sequences; "
)
_RESET_SHARED = _RESET + b"deallocate all; select pg_catalog.pg_advisory_unlock_all()"
# Statements that psycopg has prepared stay.  If a handler has prepared one by itself, the
# session is closed: nothing else is sure to remove it.  Asking costs half if it is prepared.
_PREPARE_RESET = b"""
    prepare rota_reset as
    select pg_catalog.pg_advisory_unlock_all(), exists (
        select from pg_catalog.pg_prepared_statement() as p
        where p.from_sql and p.name operator(pg_catalog.<>) 'rota_reset'
    )
"""
_RESET_OWN = _RESET + OWN + b"execute rota_reset"

Plain = psycopg.Connection[Any]
C = TypeVar("C", Plain, AsyncConnection[Any])
T = TypeVar("T")


class Over:
    """Stands for the session of a connection that is lent no more."""

    status = ConnStatus.BAD
    """To psycopg it is closed."""

    def __init__(self, job: BaseJob) -> None:
        self._job_id = job.job_id

    def refuse(self) -> NoReturn:
        """Raise InterfaceError."""
        raise psycopg.InterfaceError(
            f"the block of transaction() of job {self._job_id} has ended, and with it the use "
            "of its connection: wait in the block for the tasks and threads that use it"
        )

    def __getattr__(self, name: str) -> NoReturn:
        self.refuse()


class Lent(Generic[C]):
    """One open connection, which is lent to one job after the other.

    If it *resets*, the server forgets between two jobs what the first has set.  It has a
    second handle of its socket, by which the *watch* shuts it down: the number of the first may
    be that of another socket by then.
    """

    def __init__(self, connection: C, watch: Watch, *, resets: bool) -> None:
        self.connection: C = connection
        self.job: BaseJob
        self.until = inf
        """When there must be an answer, on the monotonic clock."""
        self.limit = 0.0
        self.error: Exception | None = None
        """Why its socket was shut down."""
        self.has_last_word = False
        """Whether the time of the job may be over, as long as its lease is not."""
        self._watch = watch
        self._resets = resets
        self._is_new = True
        self._is_ready = False
        self._is_being_reset = False
        self._idle_since = 0.0
        self._threshold: int | None = None
        fileno = connection.fileno()
        self._socket = socket.fromfd(fileno, socket.AF_INET, socket.SOCK_STREAM)

    @contextmanager
    def to_handler(self) -> Iterator[C]:
        """Lend the session to a handler, which may take as long as its lease is kept.

        It gets a connection of its own, that is of no use after the block: neither to a task or
        thread that goes on, nor to the next handler, which sees nothing of what was changed.
        """
        self.until = inf
        ours, pgconn = self.connection, self.connection.pgconn
        handlers = pgconn.notice_handler, pgconn.notify_handler
        lent: Any = type(ours)(pgconn)
        lent._autocommit = True
        lent._num_transactions = ours._num_transactions  # a handler does not end ours
        lent._notice_handlers = ours._notice_handlers.copy()
        # Its statements and ours take turns, and their names differ.
        lent.lock, lent._prepared = ours.lock, ours._prepared
        try:
            yield lent
            if pgconn.transaction_status == TransactionStatus.IDLE:
                raise RuntimeError(
                    f"a statement of job {self.job.job_id}, such as commit, has ended its "
                    "transaction: leave that to the end of the block"
                )
            if lent._num_transactions != ours._num_transactions:  # it could undo no more
                raise OutOfOrderTransactionNesting(
                    "a transaction() within that of the job has not ended: wait for it"
                )
        finally:
            lent.pgconn = Over(self.job)
            lent._check_connection_ok = lent.pgconn.refuse
            pgconn.notice_handler, pgconn.notify_handler = handlers
            self.expect()
            if pgconn.transaction_status == TransactionStatus.ACTIVE:
                # What is still open holds the lock, and a rollback would wait for it.
                if isinstance(ours, AsyncConnection):
                    ours.lock = asyncio.Lock()
                else:
                    ours.lock = threading.Lock()
                self.shut(
                    RuntimeError(
                        f"a copy(), stream() or statement of job {self.job.job_id} has not "
                        "ended: read it to its end, or close it, within its transaction"
                    )
                )

    def expect(self, seconds: float | None = None) -> None:
        """Let what follows be a call of ours, which must end within its limit."""
        self.limit = limit_of(self.job, seconds)
        self.until = time.monotonic() + self.limit
        self._watch.look_by(self.until)

    def prepare(self) -> PQGen[bool]:
        """Ask a new session whether it is ours alone, and an old one whether it is reset.

        Return whether it can be lent.
        """
        if self._is_new:
            answer = yield from self._ask(PID)
            if is_own(self.connection, [int(answer.get_value(0, 0) or 0)]):
                self._threshold = PREPARE_AFTER
                yield from self._ask(OWN + (_PREPARE_RESET if self._resets else b""))
            self.connection.prepare_threshold = self._threshold
            self._is_new = False
            self._is_ready = True
        elif self._is_being_reset:
            try:
                self.connection.pgconn.consume_input()  # most often all is there
                answers = yield from generators.fetch_many(self.connection.pgconn)
            except psycopg.Error:
                if self.error is not None:
                    raise
                return False  # it has ended meanwhile
            self._is_being_reset = False
            self._is_ready = (
                all(each.status != ExecStatus.FATAL_ERROR for each in answers)
                and all(each.get_value(0, 1) == b"f" for each in answers if each.nfields > 1)
                and not is_readable(self.connection.fileno())
            )
        else:
            self._is_ready = True
        return self._is_ready

    def give_back(self) -> bool:
        """Let the server forget what was set, and wait for nothing; say if another may come."""
        is_ready, self._is_ready = self._is_ready, False
        is_idle = self.connection.info.transaction_status is TransactionStatus.IDLE
        if not is_ready or self.connection.closed or not is_idle:
            return False
        if self._resets:
            # The handler's connection shares them with ours.
            self.connection.prepare_threshold = self._threshold
            self.connection.prepared_max = PREPARED_MAX
            is_own = self._threshold is not None
            try:
                self.connection.pgconn.send_query(_RESET_OWN if is_own else _RESET_SHARED)
                self._is_being_reset = True
                if self.connection.pgconn.flush():
                    return False
            except psycopg.Error:
                return False
        self._idle_since = time.monotonic()
        return True

    @property
    def works(self) -> bool:
        """Whether an idle one still works, as far as can be told without asking."""
        if self.connection.closed or time.monotonic() - self._idle_since >= MAX_IDLE_TIME:
            return False
        # A session that was ended has said so, and nothing else is to be read here.
        return self._is_being_reset or not is_readable(self.connection.fileno())

    def shut(self, error: Exception) -> None:
        """Let whatever waits for an answer raise at once."""
        if self.error is None:
            self.error = error
            if isinstance(error, LeaseLostError):
                self.job.is_lease_gone = True  # no later heartbeat brings it back
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it; this never waits."""
        self._socket.close()
        self.connection.pgconn.finish()

    def _ask(self, query: bytes) -> PQGen[PGresult]:
        self.connection.pgconn.send_query(query)
        answers: list[PGresult] = yield from generators.execute(self.connection.pgconn)
        if answers[-1].status == ExecStatus.FATAL_ERROR:
            raise psycopg.OperationalError(answers[-1].error_message.decode())
        return answers[-1]


def limit_of(job: BaseJob, seconds: float | None = None) -> float:
    """Return how many seconds a call for a job may take: no longer than its lease."""
    longest = max(job.lease.total_seconds(), SHORTEST_LIMIT)
    return min(seconds or CALL_TIMEOUT, longest)


class Watch:
    """Watches what jobs have been lent; *look_by* is told when to `look` whose time is over."""

    def __init__(self) -> None:
        self.look_by: Callable[[float], None] = lambda moment: None
        self._lock = threading.Lock()
        self._lent: set[Lent[Any]] = set()

    def add(self, lent: Lent[Any]) -> None:
        """Watch a connection until it is removed."""
        with self._lock:
            self._lent.add(lent)

    def remove(self, lent: Lent[Any]) -> None:
        """Watch it no more; from here on its socket is the owner's alone."""
        with self._lock:
            self._lent.discard(lent)

    def look(self) -> float:
        """Shut down what is over; return when to look again, on the monotonic clock."""
        with self._lock:
            return min(map(self._look, self._lent), default=inf)

    def cut(self, jobs: Container[BaseJob] | None = None) -> None:
        """Shut down what these jobs use, or all do, because the worker leaves."""
        with self._lock:
            for lent in self._lent:
                if jobs is None or lent.job in jobs:
                    text = f"the worker of job {lent.job.job_id} has left"
                    lent.shut(_reason(lent.job) or NoAnswerError(text))

    def _look(self, lent: Lent[Any]) -> float:
        """Shut down what is over; return when to look again."""
        job, now = lent.job, time.monotonic()
        if (reason := _reason(job, lent.has_last_word)) is not None:
            lent.shut(reason)
        elif now >= lent.until:
            lent.shut(NoAnswerError(f"no answer within {lent.limit:g} seconds"))
        if lent.error is not None:
            return inf
        return min(lent.until, now + job.seconds_left if lent.has_last_word else job.over_at)


def _reason(job: BaseJob, has_last_word: bool = False) -> Exception | None:
    """Return what ends a job, also while its end is under way."""
    if job.is_lease_gone or job.seconds_left < 0:
        return LeaseLostError(f"the lease of job {job.job_id} is lost")
    if job.is_overdue and not has_last_word:
        text = f"job {job.job_id} has exceeded its time limit of {job.time_limit}"
        return TimeLimitExceeded(text)
    return None


class Pool:
    """At most *size* connections, plain and async ones together, also those that are idle.

    Threads and tasks take turns, first come first served.  With *resets* what was set in a
    session is gone before another gets it.
    """

    def __init__(self, conninfo: str, size: int, watch: Watch, *, resets: bool = False) -> None:
        self._conninfo = conninfo
        self._free = size
        self._watch = watch
        self._resets = resets
        self._lock = threading.Lock()
        self._waiting: deque[Future[None]] = deque()
        self._is_closed = False
        self._idle: list[Lent[Any]] = []

    @contextmanager
    def lend(self, job: BaseJob, seconds: float | None = None) -> Iterator[Lent[Plain]]:
        """Lend a plain connection; wait for it no longer than that."""
        limit = limit_of(job, seconds)
        if (turn := self._take_turn()) is not None:
            try:
                turn.result(limit)
            except TimeoutError:
                self._abandon(turn)
                raise NoAnswerError("no connection became free") from None
        try:
            while True:
                lent = self._take(psycopg.Connection)
                if lent is None:
                    connection = connect(self._conninfo, "rota job", limit)
                    lent = Lent(connection, self._watch, resets=self._resets)
                with self._using(job, lent):
                    if lent.connection.wait(lent.prepare()):
                        yield lent
                        return
        finally:
            self._give_turn()

    @asynccontextmanager
    async def lend_async(
        self, job: BaseJob, seconds: float | None = None
    ) -> AsyncIterator[Lent[AsyncConnection[Any]]]:
        """Lend an async connection like `lend`."""
        task = asyncio.current_task()
        cancels = task.cancelling() if task else 0
        limit = limit_of(job, seconds)
        if (turn := self._take_turn()) is not None:
            try:
                async with asyncio.timeout(limit):
                    await asyncio.wrap_future(turn)
            except BaseException as error:
                self._abandon(turn)
                if isinstance(error, TimeoutError):
                    raise NoAnswerError("no connection became free") from None
                raise
        try:
            while True:
                lent = self._take(AsyncConnection)
                if lent is None:
                    async with time_limit(limit):
                        connection = await connect_async(self._conninfo, "rota job", limit)
                    lent = Lent(connection, self._watch, resets=self._resets)
                with self._using(job, lent):
                    if await lent.connection.wait(lent.prepare()):
                        yield lent
                        return
        except (psycopg.Error, LeaseLostError, TimeLimitExceeded) as error:
            # It was cancelled, and the driver waited for a server that hangs.
            if task and task.cancelling() > cancels:
                raise asyncio.CancelledError from error
            raise
        finally:
            self._give_turn()

    def call(
        self, job: BaseJob, action: Callable[[Client], T], seconds: float | None = None
    ) -> T:
        """Run *action*, a call of ours, for a job in a thread."""
        with self.lend(job, seconds) as lent:
            lent.expect(seconds)
            return action(Client(lent.connection))

    async def call_async(
        self,
        job: BaseJob,
        action: Callable[[AsyncClient], Awaitable[T]],
        seconds: float | None = None,
    ) -> T:
        """Run *action*, a call of ours, for a job in the loop."""
        async with self.lend_async(job, seconds) as lent:
            lent.expect(seconds)
            return await action(AsyncClient(lent.connection))

    def close(self) -> None:
        """Close the idle connections, and the others when they come back."""
        self._is_closed = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close the idle connections."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def _take_turn(self) -> Future[None] | None:
        """Take a turn; return what to wait for, if there is none."""
        with self._lock:
            if self._free:
                self._free -= 1
                return None
            turn: Future[None] = Future()
            self._waiting.append(turn)
            return turn

    def _give_turn(self) -> None:
        """Let the next have its turn."""
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._free += 1

    def _abandon(self, turn: Future[None]) -> None:
        """Wait no more; a turn that has come meanwhile is the next one's."""
        if not turn.cancel():
            self._give_turn()

    def _take(self, kind: type[C]) -> Lent[C] | None:
        """Return the last idle connection; without one, make room for another to be opened."""
        with self._lock:
            for each in reversed(self._idle.copy()):
                if isinstance(each.connection, kind):
                    self._idle.remove(each)
                    lent: Lent[C] = each
                    if lent.works:
                        return lent
                    lent.close()
            while len(self._idle) > self._free:
                self._idle.pop(0).close()
        return None

    @contextmanager
    def _using(self, job: BaseJob, lent: Lent[Any]) -> Iterator[None]:
        lent.job = job
        lent.has_last_word = job.last_words > 0 and not self._resets
        self._watch.add(lent)
        lent.expect()
        try:
            yield
        except psycopg.Error as error:
            if lent.error is not None:
                raise lent.error from error
            raise
        finally:
            is_clean = lent.give_back()
            self._watch.remove(lent)
            with self._lock:
                if is_clean and lent.error is None and not self._is_closed:
                    self._idle.append(lent)
                else:
                    lent.close()
