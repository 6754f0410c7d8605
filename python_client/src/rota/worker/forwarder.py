"""Carry jobs from each of many databases to the others they are meant for.

A job travels in one transaction of its database: it is taken there, received by the other one,
which commits, and ended, and only then is the commit.  So a forwarder that is killed leaves
nothing to clear up, and two of them do not disturb each other.

Each database has a scout, which is notified like a worker and asks where jobs wait to go.
Each pair of databases has a carrier, which opens its two connections when there is
something to carry and closes them when there was nothing for a while; so a database that is
down or does not answer holds up nobody but the jobs that are for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

import psycopg

from ..client.async_client import AsyncClient
from ..client.connecting import one_line
from ..exceptions import RotaError
from ..registry import Registry
from ..rows import ReceivedJob
from .connection import Connection, ConnectionState, Retry, end_task
from .maintenance import Ticker
from .notifier import Notifier, Place

logger = logging.getLogger("rota")

MAX_JOBS = 500
RECEIVE_TIMEOUT = 10.0
"""Seconds that the other database may take; so long jobs that travel stay locked at most."""
IDLE_TIMEOUT = 10.0
"""Seconds after which a carrier without work closes its connections."""
WAKE_PATIENCE = 0.02
"""Seconds after the last job until a scout waits to be notified, and looks by itself before."""
LOOK_INTERVAL = 0.002
ASK_INTERVAL = 5.0
"""Seconds between two questions for its number to a database that has none yet."""


class _TargetError(Exception):
    """The other database could not receive; the jobs stay where they are."""


class Database:
    """A database that sends and receives; *number* is None until it has told it."""

    def __init__(self, conninfo: str) -> None:
        self.conninfo = conninfo
        self.state = ConnectionState()
        self.number: int | None = None


class Carrier:
    """Carries from one database to another; the connections of both are its own."""

    def __init__(self, worker: str, source: Database, target: Database) -> None:
        assert target.number is not None  # noqa: S101 - for the type checker
        self._worker, self._number = worker, target.number
        self._source = Connection(source.conninfo, "rota forwarder", source.state)
        self._target = Connection(target.conninfo, "rota receiver", target.state)
        self._retry = Retry(None, target.state)
        self._task: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()
        self.carried = 0
        """How many jobs have arrived."""

    @property
    def is_open(self) -> bool:
        """Whether it has its connections."""
        return self._task is not None and not self._task.done()

    def go(self) -> None:
        """Carry what there is."""
        self._asked.set()
        if not self.is_open:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop; what is on its way is sent again by whoever comes next."""
        if self._task is not None:
            await end_task(self._task)

    async def _run(self) -> None:
        try:
            while await self._is_asked():
                self._asked.clear()
                try:
                    while await self._carry() == MAX_JOBS:
                        pass
                except (psycopg.Error, RotaError, OSError, _TargetError) as error:
                    cause = error.__cause__ or error
                    if not self._retry.failures:
                        logger.warning(
                            "jobs for database %s stay for now: %s",
                            self._number, one_line(cause),
                        )  # fmt: skip
                    self._asked.set()
                    await self._retry.wait(cause)
                else:
                    if self._retry.failures:
                        logger.warning("jobs go to database %s again", self._number)
                    self._retry.succeed()
        finally:
            await self._source.close()
            await self._target.close()

    async def _is_asked(self) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_TIMEOUT):
                await self._asked.wait()
        return self._asked.is_set()

    async def _carry(self) -> int:
        """Carry a batch; return how many jobs were taken."""

        async def take_send_and_end(client: AsyncClient) -> int:
            async with client.connection.transaction():
                taken = await client.take_forwards(self._worker, self._number, MAX_JOBS)
                if not taken:
                    return 0
                job_ids = [job.job_id for job in taken]
                received = await self._send(job_ids, [job.job for job in taken])
                endings: list[dict[str, object]] = [{} for _ in taken]
                for row in received:
                    endings[row.ordinal - 1] = {
                        "job_id": row.job_id,
                        "error_code": row.error_code,
                        "message": row.message,
                    }
                await client.end_forwards(job_ids, [job.lease_token for job in taken], endings)
            self.carried += sum(row.job_id is not None for row in received)
            return len(taken)

        return await self._source.call(take_send_and_end, 2 * RECEIVE_TIMEOUT)

    async def _send(self, job_ids: list[int], jobs: list[str]) -> list[ReceivedJob]:
        array = f"[{','.join(jobs)}]"
        try:
            return await self._target.call(
                lambda client: client.receive_jobs(self._number, job_ids, array),
                RECEIVE_TIMEOUT,
            )
        except (psycopg.Error, RotaError, OSError) as error:
            raise _TargetError from error  # not of the connection on which they were taken


class Scout:
    """Says where jobs of one database are to be carried to, and has them carried."""

    def __init__(
        self,
        worker: str,
        source: Database,
        databases: Sequence[Database],
        poll_interval: float,
        tick_interval: float | None,
    ) -> None:
        self._worker, self._source = worker, source
        self._databases, self._poll_interval = databases, poll_interval
        self._connection = Connection(source.conninfo, "rota scout", source.state)
        # The list grows while the others tell their numbers.
        self._queues: list[str] = []
        registry = Registry()
        registry.handler("rota.forward")(lambda job: None)
        self._notifier = Notifier(
            Connection(source.conninfo, "rota notifier", source.state),
            self._connection, self._queues, registry, poll_interval,
        )  # fmt: skip
        self._wake = asyncio.Event()
        self._notifier.on_notify = self._hurry
        self._notifier.on_change = self._wake.set
        self._notifier.on_answer = self._expect
        self._ticker = Ticker(self._connection, tick_interval, jitter=0.2)
        self._notifier.on_maintenance = self._hurry_ticker
        self.carriers: dict[int, Carrier] = {}

    async def run(self) -> None:
        """Work until cancelled."""
        retry = Retry("a look for jobs that travel", self._source.state)
        notifying: asyncio.Task[None] | None = None
        found_at = 0.0
        try:
            await self._know(self._source)
            while True:
                self._wake.clear()
                await self._meet_the_others()
                try:
                    waiting = await self._connection.call(AsyncClient.waiting_forwards)
                except (psycopg.Error, RotaError, OSError) as error:
                    await retry.wait(error)
                    continue
                retry.succeed()
                for number in set(waiting) & self.carriers.keys():
                    self.carriers[number].go()
                    found_at = time.monotonic()
                if self.carriers and notifying is None:
                    notifying = asyncio.create_task(self._notifier.run())
                if time.monotonic() >= self._ticker.due_at:
                    await self._ticker.tick()
                await self._rest(is_busy=time.monotonic() - found_at < WAKE_PATIENCE)
        finally:
            if notifying is not None:
                await end_task(notifying)
            for carrier in self.carriers.values():
                await carrier.close()
            await self._connection.close()

    async def _rest(self, *, is_busy: bool) -> None:
        """Wait until it is time to look: at once while jobs come, else when notified."""
        if is_busy:
            if self._notifier.wanted is not Place.AWAY:
                self._notifier.go(Place.AWAY)
            await asyncio.sleep(LOOK_INTERVAL)
            return
        if self._notifier.is_on and self._notifier.wanted is Place.AWAY:
            self._notifier.go(Place.IDLE)
        with suppress(TimeoutError):
            until_tick = max(0.0, self._ticker.due_at - time.monotonic())
            async with asyncio.timeout(min(self._poll_interval, until_tick)):
                await self._wake.wait()

    async def _meet_the_others(self) -> None:
        for other in self._databases:
            number = other.number
            if number is None or number == self._source.number or number in self.carriers:
                continue
            self.carriers[number] = Carrier(self._worker, self._source, other)
            self._queues.append(f"forward:{number}")
            if self._notifier.wanted is not Place.AWAY:
                self._notifier.go(Place.IDLE)  # again, for the new queue too

    async def _know(self, database: Database) -> None:
        """Ask the database for its number until it tells one that no other has."""
        retry = Retry("the question for a database's number", database.state)
        is_told = False
        while database.number is None:
            try:
                number = await self._connection.call(AsyncClient.database_number)
            except (psycopg.Error, RotaError, OSError) as error:
                await retry.wait(error)
                continue
            if number is not None and number not in {each.number for each in self._databases}:
                database.number = number
                return
            if not is_told:
                is_told = True
                name = self._connection.database
                problem = "has none" if number is None else f"has that of another: {number}"
                logger.error("database %s needs a number of its own, it %s", name, problem)
            await asyncio.sleep(ASK_INTERVAL)

    def _hurry(self) -> None:
        """Let those carry at once who have their connections, and look who else has to."""
        for carrier in self.carriers.values():
            if carrier.is_open:
                carrier.go()
        self._wake.set()

    def _hurry_ticker(self) -> None:
        self._ticker.hurry()
        self._wake.set()

    def _expect(self, seconds: float) -> None:
        if seconds <= 0.0:
            self._wake.set()


class Forwarder:
    """Carries jobs between all of these databases until cancelled.

    It ticks as well, every *tick_interval* seconds, where no worker of the process does.
    """

    def __init__(
        self,
        conninfos: Sequence[str],
        *,
        poll_interval: float = 1.0,
        tick_interval: float | None = None,
    ) -> None:
        worker = f"forward:{socket.gethostname()[:200]}:{os.getpid()}:{secrets.token_hex(3)}"
        databases = [Database(conninfo) for conninfo in conninfos]
        self._scouts = [
            Scout(worker, each, databases, poll_interval, tick_interval) for each in databases
        ]

    @property
    def carried(self) -> int:
        """How many jobs have arrived."""
        return sum(
            carrier.carried for scout in self._scouts for carrier in scout.carriers.values()
        )

    async def run(self) -> None:
        """Carry until cancelled."""
        tasks = [asyncio.create_task(scout.run()) for scout in self._scouts]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            # Not a group of tasks, which cancels each of them once and waits without end.
            await asyncio.gather(*map(end_task, tasks))
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()
