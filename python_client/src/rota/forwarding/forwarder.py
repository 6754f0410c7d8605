"""Carry jobs from each of many databases to the others they are meant for.

A job travels in one transaction of its database: it is taken there, received by the other one,
which commits, and ended, and only then is the commit.  So a forwarder that is killed leaves
nothing to clear up, and two of them do not disturb each other.

Each database has a scout, which is notified like a worker and asks where jobs wait to go; in
a process with workers by the connections of these.
Each pair of databases has a carrier, which opens its two connections when there is
something to carry and closes them when there was nothing for a while; so a database that is
down or does not answer holds up nobody but the jobs that are for it.  To a number that two
databases have nothing is carried, for one of them is a copy.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, Any

import psycopg

from ..client.async_client import AsyncClient
from ..client.connecting import name_of
from ..exceptions import RotaError
from ..rows import WaitingMove
from ..worker.connection import Connection, Retry, end_task, wait_for
from ..worker.maintenance import Presence, Ticker
from ..worker.notifier import FORWARD, Notifier, Place
from .carrier import Carrier, Database, Mover

if TYPE_CHECKING:
    from ..worker.worker import Worker

logger = logging.getLogger("rota")

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


class Scout:
    """Says where jobs of one database are to be carried to, and has them carried.

    *lent* are the connections of a worker of the same process, if there is one.
    """

    def __init__(
        self,
        worker: str,
        source: Database,
        databases: Sequence[Database],
        poll_interval: float,
        tick_interval: float | None,
        lent: tuple[Connection, Notifier] | None,
    ) -> None:
        self._worker, self._source = worker, source
        self._databases, self._poll_interval = databases, poll_interval
        self._is_lent = lent is not None
        if lent is None:
            connection = Connection(source.conninfo, "rota scout", source.state)
            listening = Connection(source.conninfo, "rota notifier", source.state)
            notifier = Notifier(listening, connection, [], list, poll_interval)
            notifier.on_maintenance = self._hurry_ticker
        else:
            connection, notifier = lent
        self._connection, self._notifier = connection, notifier
        self._notifier.on_other = self._hear
        # The list changes when the others tell their numbers.
        self._queues: list[str] = []
        self._wake = asyncio.Event()
        self._ticker = Ticker(connection, tick_interval, jitter=0.2)
        self._presence = Presence(connection, worker, self._queues, lambda: [FORWARD])
        self._has_moves = False
        self._patient_until = inf
        self.carriers: dict[int, Carrier] = {}
        self._movers: dict[int, Mover] = {}

    async def run(self) -> None:
        """Work until cancelled."""
        retry = Retry("a look for jobs that travel", self._connection.state)
        self._patient_until = time.monotonic() + PATIENCE
        moves_at = -inf
        notifying: list[asyncio.Task[None]] = []
        if self._is_lent:
            self._connection.lend()
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
            for lane in (*self.carriers.values(), *self._movers.values()):
                await lane.close()
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
                self._movers[move.move_id] = Mover(move, self._source, carrier.target)
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
        elif notifier.others_heard.issuperset(self._queues):
            # Of a move that begins, and of another database's number, nothing notifies it; and
            # an idle worker's notifier alone asks now and then for what came while it changed.
            knows_all = len(self.carriers) == len(self._databases) - 1
            is_told = not self._is_lent or notifier.place is Place.IDLE
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

    def _hear(self, has_come: bool) -> None:
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

    It ticks as well, every *tick_interval* seconds, where no worker of the process does.  The
    workers of the process, one for each database, have *lent* their connections.
    """

    def __init__(
        self,
        conninfos: Sequence[str],
        *,
        poll_interval: float = 1.0,
        tick_interval: float | None = None,
        lent: Sequence[tuple[Connection, Notifier]] | None = None,
    ) -> None:
        worker = f"forward:{socket.gethostname()[:200]}:{os.getpid()}:{secrets.token_hex(3)}"
        databases = [Database(conninfo) for conninfo in conninfos]
        self._scouts = [
            Scout(
                worker,
                each,
                databases,
                poll_interval,
                tick_interval,
                lent[number] if lent else None,
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
        """Carry within the block until *worker* stops, whose connections may be lent."""
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
