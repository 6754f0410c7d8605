"""Carry jobs from each of many databases to the others they are meant for.

A job travels in one transaction of its database: it is taken there, received by the other one,
which commits, and ended, and only then is the commit.  So a forwarder that is killed leaves
nothing to clear up, and two of them do not disturb each other.

A route is two connections and what goes over them, batch by batch: a `Carrier` carries single
jobs that are meant for another database, a `Mover` those of a queue that moves there.

Each database has a scout, which is notified like a worker and asks where jobs wait to go; in
a process with workers by the connections of these.  Each pair of databases has a carrier, which
opens its connections when there is something to carry and closes them when there was nothing
for a while; so a database that is down or does not answer holds up nobody but the jobs that are
for it.  To a number that two databases have nothing is carried, for one of them is a copy.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from .client.async_client import AsyncClient
from .client.connecting import name_of, one_line
from .exceptions import JobMovedError, RotaError
from .rows import ForwardJob, ReceivedJob, TakenMoves, WaitingMove
from .worker.connection import (
    REASON_INTERVAL,
    Connection,
    ConnectionState,
    Retry,
    end_task,
    wait_for,
)
from .worker.maintenance import Presence, Ticker
from .worker.notifier import FORWARD, Notifier, Place
from .worker.process import new_name

if TYPE_CHECKING:
    from .worker.worker import Worker

logger = logging.getLogger("rota")

T = TypeVar("T")

MAX_JOBS = 500
MAX_BYTES = 8_000_000
"""What is sent at a time at most; after each failure half of it."""
RECEIVE_TIMEOUT = 10.0
"""Seconds that the other database may take; so long jobs that travel stay locked at most."""
IDLE_TIMEOUT = 10.0
"""Seconds after which a carrier without work closes its connections."""
FOR_LATER = ("42501", JobMovedError.sqlstate, "55", "XX")
"""How the codes begin with which a job is refused that is sent again later."""
UNFIT = (UnicodeError, psycopg.errors.UntranslatableCharacter)
UNTRANSLATABLE = ReceivedJob(
    1, None, "22P05", "the other database has another encoding, which lacks characters of it"
)
MAX_MOVERS = 4
"""Queues that move at a time from one database to another, by two connections each."""
TURN = 1.0
"""Seconds after which a mover that has nothing to carry for now gives way to others."""
PAUSE, MAX_PAUSE = 0.2, 5.0
"""Seconds until a mover looks again where nothing can go for now; among very many jobs of other
queues it rests ten times as long as it has looked."""
WAKE_PATIENCE = 0.02
"""Seconds after the last job until a scout waits to be notified, and looks by itself before."""
LOOK_INTERVAL = 0.002
QUIET_FACTOR = 10
"""So many times less often looks a scout that is notified of all that it could find."""
ACTIVE_INTERVAL = 0.005
"""Seconds between two looks while a worker that lends its notifier is active."""
ASK_INTERVAL = 5.0
"""Seconds between two questions for its number to a database that has none yet."""
ASK_AGAIN = 60.0
"""Seconds between two to one that had one."""
PATIENCE = 2.0
"""Seconds for which nothing is carried until all databases have told their numbers: of two with
the same one the first to answer is not the right one."""


class ReceiverError(Exception):
    """The other database could not receive; the jobs stay where they are."""


FAILURES = (psycopg.Error, RotaError, OSError, ReceiverError)


class Database:
    """A database that sends and receives.

    *number* is None until it has told one, and as long as another one tells the same.
    """

    def __init__(self, conninfo: str) -> None:
        self.conninfo = conninfo
        self.state = ConnectionState(name_of(conninfo))
        self.number: int | None = None
        self.told: int | None = None
        self.was_asked = False
        """Whether it has told its number, or that it has none, or failed to."""
        self.problem: str | None = None
        self.ask_at = 0.0
        """When to ask for its number, on the monotonic clock."""


class Route:
    """Carries in a task of its own, which has its connections as long as it runs."""

    max_doublings = 0
    """How often the other database gets twice as long after it did not answer."""

    def __init__(self, name: str, source: Database, target: Database) -> None:
        self.target = target
        self._source = Connection(source.conninfo, name, source.state, 0)
        self._target = Connection(
            target.conninfo, "rota receiver", target.state, self.max_doublings
        )
        self._retry = Retry(None, target.state)
        self._task: asyncio.Task[None] | None = None
        self._halvings = 0
        self._reason = ""
        """Of its failures, as it was logged last, and when."""
        self._reason_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether it has its connections."""
        return self._task is not None and not self._task.done()

    @property
    def is_held(self) -> bool:
        """Whether it has failed, and waits for its next try."""
        return self.is_open and self._retry.failures > 0

    def go(self) -> None:
        """Carry until there is nothing for now."""
        if not self.is_open:
            self._task = asyncio.create_task(self._run_and_close())

    async def close(self) -> None:
        """Stop; what is on its way is sent again by whoever comes next."""
        if self._task is not None:
            await end_task(self._task)

    async def _run(self) -> None:
        raise NotImplementedError

    async def _run_and_close(self) -> None:
        try:
            await self._run()
        finally:
            await self._disconnect()

    async def _disconnect(self) -> None:
        await self._source.close()
        await self._target.close()

    @property
    def _batch(self) -> tuple[int, int]:
        """How many jobs to send at a time, and how many bytes."""
        return max(1, MAX_JOBS >> self._halvings), max(1, MAX_BYTES >> self._halvings)

    async def _take(self, action: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Run what takes jobs, has them received, and ends them."""
        return await self._source.call(action, 2 * self._target.limit(RECEIVE_TIMEOUT))

    async def _receive(
        self, jobs: int, action: Callable[[AsyncClient], Awaitable[list[ReceivedJob]]]
    ) -> list[ReceivedJob]:
        """Have the other database receive so many jobs.

        Its error is raised as one that is not of the connection on which they were taken.
        """
        try:
            return await self._target.call(action, RECEIVE_TIMEOUT)
        except (psycopg.Error, RotaError, OSError, UnicodeError) as error:
            if isinstance(error, UNFIT):
                if jobs == 1:
                    return [UNTRANSLATABLE]
                self._halvings = MAX_JOBS.bit_length()  # one by one, it may be any of them
            raise ReceiverError from error

    async def _reach(self) -> None:
        """Connect to the other database, if it is not, while no job is locked.

        Of several hosts the first may be dead, and is waited for.
        """
        try:
            await self._target.call(_do_nothing)
        except FAILURES as error:
            raise ReceiverError from error

    async def _fail(
        self, error: BaseException, text: str, subject: object, at_most: float = inf
    ) -> None:
        """Log the first failure of each reason, and wait until it is time to send half."""
        cause = error.__cause__ or error
        reason, now = one_line(cause), time.monotonic()
        is_new = reason != self._reason and now - self._reason_at >= REASON_INTERVAL
        if is_new or not self._retry.failures:
            self._reason, self._reason_at = reason, now
            place = (self._target if error.__cause__ else self._source).state.place
            hint = getattr(getattr(cause, "diag", None), "message_hint", None)
            hint = hint or getattr(cause, "hint", None)
            logger.warning(text, subject, f"{reason}{place}{f' ({hint})' if hint else ''}")
        self._halvings = min(self._halvings + 1, 20)
        await self._retry.wait(cause, at_most)


async def _do_nothing(client: AsyncClient) -> None:
    pass


def _endings(count: int, received: list[ReceivedJob]) -> list[dict[str, object]]:
    """Return for each job that was sent what became of it, where that was told."""
    endings: list[dict[str, object]] = [{} for _ in range(count)]
    for row in received:
        endings[row.ordinal - 1] = {
            "job_id": row.job_id,
            "error_code": row.error_code,
            "message": row.message,
        }
    return endings


def _waits(row: ReceivedJob) -> bool:
    """Return whether a job stays where it is, maybe until somebody sees to it."""
    return row.error_code is not None and row.error_code.startswith(FOR_LATER)


class Carrier(Route):
    """Carries the jobs that are meant for another database.

    *on_carried* is called whenever jobs have left.
    """

    def __init__(
        self, worker: str, source: Database, target: Database, on_carried: Callable[[], None]
    ) -> None:
        assert target.number is not None  # noqa: S101 - for the type checker
        super().__init__("rota forwarder", source, target)
        self._worker, self._number = worker, target.number
        self._asked = asyncio.Event()
        self._on_carried = on_carried
        self.carried = 0
        """How many jobs have arrived."""
        self.carried_at = -inf
        """When the last have left, on the monotonic clock."""
        self._told: str | None = None
        """Why jobs stay, as it was logged last, and when."""
        self._told_at = -inf

    def go(self) -> None:
        """Carry what there is."""
        self._asked.set()
        super().go()

    async def _run(self) -> None:
        while await wait_for(self._asked, IDLE_TIMEOUT):
            self._asked.clear()
            try:
                while await self._carry():
                    self._succeed()
                self._succeed()
            except FAILURES as error:
                self._asked.set()
                self.target.ask_at = 0.0  # it may have another number now
                await self._fail(error, "jobs for database %s stay for now: %s", self._number)

    def _succeed(self) -> None:
        if self._retry.failures:
            logger.warning("jobs go to database %s again", self._number)
        self._retry.succeed()

    async def _carry(self) -> bool:
        """Carry a batch; return whether there may be more."""
        await self._reach()
        max_jobs, max_bytes = self._batch

        async def take_send_and_end(client: AsyncClient) -> list[ForwardJob]:
            async with client.connection.transaction():
                taken = await client.take_forwards(
                    self._worker, self._number, max_jobs, max_bytes
                )
                if not taken:
                    return taken
                received = await self._send(taken)
                await client.end_forwards(
                    [job.job_id for job in taken],
                    [job.lease_token for job in taken],
                    _endings(len(taken), received),
                )
            self.carried += sum(row.job_id is not None for row in received)
            self._tell([row for row in received if _waits(row)])
            return taken

        taken = await self._take(take_send_and_end)
        if taken:
            self.carried_at = time.monotonic()
            self._on_carried()
        is_less = self._halvings > 0
        self._halvings = max(0, self._halvings - 1)
        size = sum(len(job.job) for job in taken)
        return bool(taken) and (is_less or len(taken) == max_jobs or size > max_bytes // 2)

    def _tell(self, waiting: list[ReceivedJob]) -> None:
        """Log now and then why jobs stay: they are sent again and again."""
        now = time.monotonic()
        if not waiting or (
            waiting[0].message == self._told and now - self._told_at < REASON_INTERVAL
        ):
            return
        self._told, self._told_at = waiting[0].message, now
        text = "%s jobs for database %s stay for now: %s"
        logger.warning(text, len(waiting), self._number, self._told)

    async def _send(self, taken: list[ForwardJob]) -> list[ReceivedJob]:
        array = f"[{','.join(job.job for job in taken)}]"
        job_ids = [job.job_id for job in taken]
        created_at = [job.created_at for job in taken]
        return await self._receive(
            len(taken),
            lambda client: client.receive_jobs(self._number, job_ids, created_at, array),
        )


class Mover(Route):
    """Carries the jobs of a queue that moves, those of one move.

    They are taken out of the live table in one transaction and sent in another, during which
    no other mover is at the same move.  It begins where something waits, or if *is_asked*, and
    has connections only while it has one of *places*.
    """

    max_doublings = 3  # a job may have very many effects, and locks nothing while it is sent

    def __init__(
        self,
        move: WaitingMove,
        source: Database,
        target: Database,
        places: asyncio.Semaphore,
        *,
        is_asked: bool = False,
    ) -> None:
        assert source.number is not None  # noqa: S101 - for the type checker
        super().__init__("rota mover", source, target)
        self.move, self._places = move, places
        self._is_asked = is_asked
        self._reasons: set[str | None] = set()
        self._number = source.number
        self._looks_since = 0.0
        """When it has begun, or has sent the last job, on the monotonic clock."""

    async def _run(self) -> None:
        """Carry until the move has settled in both databases and nothing waits."""
        while True:
            async with self._places:
                try:
                    if await self._take_turn():
                        return
                finally:
                    await self._disconnect()
            await asyncio.sleep(MAX_PAUSE)  # to connect costs more than to look

    async def _take_turn(self) -> bool:
        """Carry until nothing is left and return True, or until it is another's turn."""
        ends_at = time.monotonic() + TURN
        while not (self._places.locked() and time.monotonic() > ends_at):
            try:
                is_done = await self._carry_on()
            except FAILURES as error:
                text = "queue %s stays for now: %s"
                longest = TURN if self._places.locked() else inf
                await self._fail(error, text, self.move.queue, longest)
                continue
            self._retry.succeed()
            if is_done:
                return True
            looked = time.monotonic() - self._looks_since
            await asyncio.sleep(min(MAX_PAUSE, max(PAUSE, 10 * looked)))
        return False

    async def _carry_on(self) -> bool:
        """Carry what can go now; return whether nothing is left."""
        moves = await self._source.call(AsyncClient.waiting_moves)
        if not self._is_asked and self.move.move_id not in [each.move_id for each in moves]:
            return True  # an operator may have ended it
        self._is_asked = False
        self._looks_since = time.monotonic()
        while taken := await self._take(self._carry):
            if taken.job_ids:
                self._looks_since = time.monotonic()
                self._halvings = max(0, self._halvings - 1)
            if not taken.has_more:
                return taken.settle_above is not None
        return False  # another mover is at it

    async def _carry(self, client: AsyncClient) -> TakenMoves | None:
        """Take jobs out, or send those that are out, or have the other database settle."""
        move_id = self.move.move_id
        async with client.connection.transaction():
            taken = await client.take_moves(move_id, *self._batch)
            if taken is not None and taken.jobs is not None:
                received = await self._send(taken, taken.jobs)
                if taken.job_ids:
                    endings = _endings(len(taken.job_ids), received)
                    await client.end_moves(move_id, taken.job_ids, endings)
                    self._warn(received)
        return taken

    def _warn(self, received: list[ReceivedJob]) -> None:
        """Log each reason once: those jobs are sent again and again."""
        for row in received:
            if _waits(row) and row.message not in self._reasons:
                logger.warning(
                    "jobs of queue %s stay for now: %s", self.move.queue, row.message
                )
                self._reasons.add(row.message)

    async def _send(self, taken: TakenMoves, jobs: str) -> list[ReceivedJob]:
        return await self._receive(
            len(taken.job_ids),
            lambda client: client.receive_moves(
                self.move.move_id, self._number, self.move.queue, jobs, taken.settle_above
            ),
        )


class Scout:
    """Says where jobs of one database are to be carried to, and has them carried.

    *shared* are the connections of a worker of the same process, if there is one.
    """

    def __init__(
        self,
        worker: str,
        source: Database,
        databases: Sequence[Database],
        poll_interval: float,
        tick_interval: float | None,
        shared: tuple[Connection, Notifier] | None,
    ) -> None:
        self._worker, self._source = worker, source
        self._databases, self._poll_interval = databases, poll_interval
        self._is_shared = shared is not None
        if shared is None:
            connection = Connection(source.conninfo, "rota scout", source.state)
            listening = Connection(source.conninfo, "rota notifier", source.state)
            notifier = Notifier(listening, connection, [], list, poll_interval)
            notifier.on_maintenance = self._hurry_ticker
        else:
            connection, notifier = shared
        self._connection, self._notifier = connection, notifier
        self._notifier.on_other = self._on_other
        # The list changes when the others tell their numbers.
        self._queues: list[str] = []
        self._wake = asyncio.Event()
        self._ticker = Ticker(connection, tick_interval, jitter=0.2)
        self._presence = Presence(connection, worker, self._queues, lambda: [FORWARD])
        self._has_moves = False
        self._patient_until = inf
        self.carriers: dict[int, Carrier] = {}
        self._movers: dict[int, Mover] = {}
        self._places: defaultdict[int, asyncio.Semaphore]
        self._places = defaultdict(lambda: asyncio.Semaphore(MAX_MOVERS))
        """For the movers to each number."""

    async def run(self) -> None:
        """Work until cancelled."""
        retry = Retry("a look for jobs that travel", self._connection.state)
        self._patient_until = time.monotonic() + PATIENCE
        moves_at = -inf
        notifying: list[asyncio.Task[None]] = []
        if self._is_shared:
            self._connection.share()
        else:
            notifying.append(asyncio.create_task(self._notifier.run()))
        try:
            while True:
                self._wake.clear()
                try:
                    await self._ask_again()
                    await self._meet_the_others()
                    waiting = await self._connection.call(AsyncClient.waiting_forwards)
                    if time.monotonic() >= moves_at:
                        self._move(await self._connection.call(AsyncClient.waiting_moves))
                        moves_at = time.monotonic() + self._poll_interval
                    if self._queues and time.monotonic() >= self._presence.due_at:
                        await self._presence.report()
                except (psycopg.Error, RotaError, OSError) as error:
                    self._source.was_asked = True
                    await retry.wait(error)
                    continue
                retry.succeed()
                for number in set(waiting) & self.carriers.keys():
                    if not self.carriers[number].is_held:
                        self.carriers[number].go()
                if time.monotonic() >= self._ticker.due_at:
                    await self._ticker.tick()
                await self._rest()
        finally:
            self._notifier.wait_also([])
            await asyncio.gather(*map(end_task, notifying))
            for route in (*self.carriers.values(), *self._movers.values()):
                await route.close()
            with suppress(psycopg.Error, RotaError, OSError):
                await self._presence.leave()
            await self._connection.close()

    def _move(self, moves: list[WaitingMove]) -> None:
        """Have queues carried that move to a database that is known here."""
        self._has_moves = bool(moves)
        for move in moves:
            carrier = self.carriers.get(move.database)
            if carrier is None or self._source.number is None:
                continue
            if move.move_id not in self._movers:
                places = self._places[move.database]
                mover = Mover(move, self._source, carrier.target, places)
                self._movers[move.move_id] = mover
            self._movers[move.move_id].go()

    async def _rest(self) -> None:
        """Wait until it is time to look: at once while jobs go, else when notified."""
        carried_at = max((each.carried_at for each in self.carriers.values()), default=-inf)
        if time.monotonic() - carried_at < WAKE_PATIENCE:
            self._notifier.wait_also([])  # producers notify nobody
            await asyncio.sleep(LOOK_INTERVAL)
            return
        self._notifier.wait_also(self._queues)
        pause, notifier = self._poll_interval, self._notifier
        if notifier.place is Place.ACTIVE:
            pause = min(pause, ACTIVE_INTERVAL)
        elif notifier.notified_others.issuperset(self._queues):
            # Of a move that begins, and of another database's number, nothing notifies it; and
            # an idle worker's notifier alone asks now and then for what came while it changed.
            knows_all = len(self.carriers) == len(self._databases) - 1
            is_told = not self._is_shared or notifier.place is Place.IDLE
            if knows_all and is_told and not self._has_moves:
                pause *= QUIET_FACTOR
        until_tick = max(0.0, self._ticker.due_at - time.monotonic())
        await wait_for(self._wake, min(pause, until_tick))

    async def _meet_the_others(self) -> None:
        """Have a carrier for each database of another number, under that which it has now."""
        here = self._source.number
        for known, carrier in list(self.carriers.items()):
            if here is not None and carrier.target.number == known != here:
                continue
            await self.carriers.pop(known).close()
            for move_id, mover in list(self._movers.items()):
                if mover.target is carrier.target:
                    await self._movers.pop(move_id).close()
            self._queues.remove(f"forward:{known}")
            self._presence.hurry()
        is_early = time.monotonic() < self._patient_until
        if here is None or (is_early and not all(each.was_asked for each in self._databases)):
            return
        for other in self._databases:
            number = other.number
            if number is None or number == here or number in self.carriers:
                continue
            self.carriers[number] = Carrier(self._worker, self._source, other, self._wake.set)
            self._queues.append(f"forward:{number}")
            self._presence.hurry()

    async def _ask_again(self) -> None:
        """Ask the database for its number, which its owner may have changed."""
        source = self._source
        if time.monotonic() < source.ask_at:
            return
        source.told = await self._connection.call(AsyncClient.database_number)
        source.was_asked = True
        for each in self._databases:
            same = [other for other in self._databases if other.told == each.told]
            each.number = each.told if len(same) == 1 else None
            if each.number is not None:
                each.problem = None
        self._complain()
        pause = ASK_INTERVAL if source.number is None else ASK_AGAIN
        source.ask_at = time.monotonic() + pause

    def _complain(self) -> None:
        """Log once what keeps jobs from being carried from here, and to this number."""
        source = self._source
        if source.number is not None:
            return
        same = [each for each in self._databases if each.told == source.told]
        if source.told is None:
            same = [source]
            problem = (
                f"database {name_of(source.conninfo)} needs a number of its own, it has none"
            )
        else:
            names = " and ".join(name_of(each.conninfo) for each in same)
            problem = f"databases {names} have the same number {source.told}, nothing is"
            problem += " carried to it or from them until each has a number of its own, or"
            problem += " only one of the two is named, if one is a standby"
        if problem != source.problem:
            logger.error("%s", problem)
        for each in same:
            each.problem = problem
            each.ask_at = min(each.ask_at, time.monotonic() + ASK_INTERVAL)

    def _on_other(self, has_come: bool) -> None:
        """Let those carry at once who have their connections, and look who else has to."""
        for carrier in self.carriers.values() if has_come else ():
            if carrier.is_open and not carrier.is_held:
                carrier.go()
        self._wake.set()

    def _hurry_ticker(self) -> None:
        self._ticker.hurry()
        self._wake.set()


class Forwarder:
    """Carries jobs between all of these databases.

    It ticks as well, every *tick_interval* seconds, where no worker of the process does.
    *shared* are connections of the workers of the process, one for each database.
    """

    def __init__(
        self,
        conninfos: Sequence[str],
        *,
        poll_interval: float = 1.0,
        tick_interval: float | None = None,
        shared: Sequence[tuple[Connection, Notifier]] | None = None,
    ) -> None:
        worker = f"forward:{new_name()}"
        databases = [Database(conninfo) for conninfo in conninfos]
        self._scouts = [
            Scout(
                worker,
                each,
                databases,
                poll_interval,
                tick_interval,
                shared[number] if shared else None,
            )
            for number, each in enumerate(databases)
        ]

    @property
    def carried(self) -> int:
        """How many jobs have arrived."""
        return sum(each.carried for scout in self._scouts for each in scout.carriers.values())

    async def run_until(self, stopping: Coroutine[Any, Any, object]) -> None:
        """Carry until *stopping* returns, or this is cancelled."""
        works = [stopping, *(scout.run() for scout in self._scouts)]
        tasks = [asyncio.create_task(work) for work in works]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Not a group of tasks, which cancels each of them once and waits without end.
            await asyncio.gather(*map(end_task, tasks))
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()

    @asynccontextmanager
    async def run_beside(self, worker: Worker) -> AsyncIterator[None]:
        """Carry within the block until *worker* stops, whose connections may be shared."""
        running = asyncio.create_task(self._run_beside(worker))
        try:
            yield
        finally:
            await end_task(running)

    async def _run_beside(self, worker: Worker) -> None:
        try:
            await self.run_until(worker.wait_until_stopping())
        except Exception:  # the workers go on, and others may carry
            logger.exception("this process no longer carries jobs between databases")
