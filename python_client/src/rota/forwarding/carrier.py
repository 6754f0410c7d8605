"""Carry jobs from one database to another, batch by batch.

A lane is two connections of its own.  What is under way in it is done or undone by one commit,
so it may be killed at any moment, and whoever comes next goes on.  A `Carrier` carries single
jobs that are meant for another database, a `Mover` those of a queue that moves there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from math import inf
from typing import TypeVar

import psycopg

from ..client.async_client import AsyncClient
from ..client.connecting import name_of, one_line
from ..exceptions import RotaError
from ..rows import ForwardJob, ReceivedJob, TakenMoves, WaitingMove
from ..worker.connection import (
    Connection,
    ConnectionState,
    Retry,
    end_task,
    wait_for,
)

logger = logging.getLogger("rota")

T = TypeVar("T")

MAX_JOBS = 500
MAX_BYTES = 8_000_000
"""What is sent at a time at most; after each failure half of it."""
RECEIVE_TIMEOUT = 10.0
"""Seconds that the other database may take; so long jobs that travel stay locked at most."""
IDLE_TIMEOUT = 10.0
"""Seconds after which a carrier without work closes its connections."""
NO_RIGHT = "42501"
UNFIT = (UnicodeError, psycopg.errors.UntranslatableCharacter)
UNTRANSLATABLE = ReceivedJob(
    1, None, "22P05", "the other database has another encoding, which lacks characters of it"
)
PAUSE = 0.2
"""Seconds until a mover looks again where nothing can go for now."""


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


class Lane:
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

    async def _fail(self, error: BaseException, text: str, subject: object) -> None:
        """Log the first failure, and wait until it is time to try with half as much."""
        cause = error.__cause__ or error
        if not self._retry.failures:
            logger.warning(text, subject, one_line(cause))
        self._halvings = min(self._halvings + 1, 20)
        await self._retry.wait(cause)


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
    """Return whether somebody has to see to it that a job can be received."""
    code = row.error_code
    return code is not None and (code == NO_RIGHT or code.startswith(("55", "XX")))


class Carrier(Lane):
    """Carries the jobs that are meant for another database.

    *on_carried* is called whenever jobs have left.
    """

    def __init__(
        self,
        worker: str,
        source: Database,
        target: Database,
        on_carried: Callable[[], None],
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
            if waiting := [row for row in received if _waits(row)]:
                text = "%s jobs for database %s stay for now: %s"
                logger.warning(text, len(waiting), self._number, waiting[0].message)
            return taken

        taken = await self._take(take_send_and_end)
        if taken:
            self.carried_at = time.monotonic()
            self._on_carried()
        is_less = self._halvings > 0
        self._halvings = max(0, self._halvings - 1)
        size = sum(len(job.job) for job in taken)
        return bool(taken) and (is_less or len(taken) == max_jobs or size > max_bytes // 2)

    async def _send(self, taken: list[ForwardJob]) -> list[ReceivedJob]:
        array = f"[{','.join(job.job for job in taken)}]"
        job_ids = [job.job_id for job in taken]
        created_at = [job.created_at for job in taken]
        return await self._receive(
            len(taken),
            lambda client: client.receive_jobs(self._number, job_ids, created_at, array),
        )


class Mover(Lane):
    """Carries the jobs of a queue that moves, those of one move.

    They are taken out of the live table in one transaction and sent in another, during which
    no other mover is at the same move.  It begins where something waits, or if *is_asked*.
    """

    max_doublings = 3  # a job may have very many effects, and locks nothing while it is sent

    def __init__(
        self, move: WaitingMove, source: Database, target: Database, *, is_asked: bool = False
    ) -> None:
        assert source.number is not None  # noqa: S101 - for the type checker
        super().__init__("rota mover", source, target)
        self.move = move
        self._is_asked = is_asked
        self._reasons: set[str | None] = set()
        self._number = source.number

    async def _run(self) -> None:
        """Carry until the move has settled in both databases and nothing waits."""
        while True:
            try:
                is_done = await self._carry_on()
            except FAILURES as error:
                await self._fail(error, "queue %s stays for now: %s", self.move.queue)
                continue
            self._retry.succeed()
            if is_done:
                return
            await asyncio.sleep(PAUSE)

    async def _carry_on(self) -> bool:
        """Carry what can go now; return whether nothing is left."""
        moves = await self._source.call(AsyncClient.waiting_moves)
        if not self._is_asked and self.move.move_id not in [each.move_id for each in moves]:
            return True  # an operator may have ended it
        self._is_asked = False
        while taken := await self._take(self._carry):
            if taken.job_ids:
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
