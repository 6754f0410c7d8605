"""Carry jobs from each of many databases to the others they are meant for.

A job travels in one transaction of its database: it is taken there, received by the other one,
which commits, and ended, and only then is the commit.  So a forwarder that is killed leaves
nothing to clear up, and two of them do not disturb each other.

Each database has a scout, which is notified like a worker and asks where jobs wait to go; in
a process with workers by the connections that these have while they are idle.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf

import psycopg

from ..client.async_client import AsyncClient
from ..client.connecting import name_of
from ..exceptions import RotaError
from ..registry import Registry
from ..rows import WaitingMove
from .carrier import Carrier, Database, Mover
from .connection import Connection, Retry, end_task
from .maintenance import Ticker, leave, report
from .notifier import Notifier, Place

logger = logging.getLogger("rota")

WAKE_PATIENCE = 0.02
"""Seconds after the last job until a scout waits to be notified, and looks by itself before."""
LOOK_INTERVAL = 0.002
QUIET_FACTOR = 5
"""So many times less often looks a scout that is notified of all that it could find."""
MAX_QUEUES = 100
"""Of more queues wait_for_jobs() notifies nobody."""
LOOK_AWAY = (0.01, 0.05)
"""Seconds between two looks while a worker that lends its notifier is at work, and after which
the scout takes one of its own."""
OWN_NOTIFIER = 5.0
"""Seconds that the worker has to be idle until that one is closed again."""
ASK_INTERVAL = 5.0
"""Seconds between two questions for its number to a database that has none yet."""
ASK_AGAIN = 60.0
"""Seconds between two to one that had one."""
PATIENCE = 2.0
"""Seconds for which nothing is carried until all databases have told their numbers: of two with
the same one the first to answer is not the right one."""
REPORT_INTERVAL = 60.0
"""Seconds between two reports of which databases are known here."""


class Listener:
    """Has a scout notified of jobs of *queues*.

    It does so by the notifier *lent* by a worker, as long as that is idle, and else by one of
    its *own*; without that the scout only polls.
    """

    def __init__(
        self,
        own: Notifier | None,
        lent: Notifier | None,
        queues: list[str],
        wake: Callable[[], None],
    ) -> None:
        self._own, self._lent, self._queues = own, lent, queues
        self._task: asyncio.Task[None] | None = None
        if lent is not None:
            lent.other_types = ("rota.forward",)
            lent.on_other = wake

    @property
    def hears_all(self) -> bool:
        """Whether a notification comes of a job in any of the queues."""
        lent, own = self._lent, self._own
        if own is None or len(self._queues) >= MAX_QUEUES - (
            0 if lent is None else lent.queue_count
        ):
            return False
        if lent is not None and lent.wanted is Place.IDLE:
            # One of its own is still to be closed.
            return self._task is None and lent.others_heard == frozenset(self._queues)
        return own.is_on and own.place is Place.IDLE and not own.is_moving

    def listen(self, poll_interval: float) -> float:
        """Wait for notifications; return the seconds after which to look without one."""
        lent, own = self._lent, self._own
        if own is None or not self._queues:
            return poll_interval
        if lent is not None and lent.wanted is Place.IDLE:
            if lent.others_heard != frozenset(self._queues):
                lent.other_queues = list(self._queues)
                lent.go(Place.IDLE)
            if self._task is not None and time.monotonic() - lent.away_at > OWN_NOTIFIER:
                self._task.cancel()
                self._task = None
            return poll_interval
        if lent is not None and self._task is None:
            interval, patience = LOOK_AWAY
            if time.monotonic() - lent.away_at < patience:
                return interval
        if self._task is None:
            self._task = asyncio.create_task(own.run())
        if own.is_on and own.wanted is Place.AWAY:
            own.go(Place.IDLE)
        return poll_interval

    def listen_again(self) -> None:
        """Wait for those queues that have come, too."""
        if self._own is not None and self._own.wanted is not Place.AWAY:
            self._own.go(Place.IDLE)

    def turn_away(self) -> None:
        """Have producers notify nobody: the scout looks by itself."""
        if self._own is not None and self._own.wanted is not Place.AWAY:
            self._own.go(Place.AWAY)
        lent = self._lent
        if lent is not None and lent.other_queues:
            lent.other_queues = ()
            if lent.wanted is Place.IDLE:
                lent.go(Place.IDLE)

    async def close(self) -> None:
        """Listen no more."""
        if self._lent is not None:
            self._lent.other_queues = ()
        if self._task is not None:
            await end_task(self._task)


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
        lent: tuple[Connection, Notifier | None] | None,
    ) -> None:
        self._worker, self._source = worker, source
        self._databases, self._poll_interval = databases, poll_interval
        self._is_lent = lent is not None
        self._connection = (
            Connection(source.conninfo, "rota scout", source.state) if lent is None else lent[0]
        )
        # The list changes when the others tell their numbers.
        self._queues: list[str] = []
        self._wake = asyncio.Event()
        self._ticker = Ticker(self._connection, tick_interval, jitter=0.2)
        # It listens where the worker does, or not at all.
        own, theirs = None, None if lent is None else lent[1]
        if lent is None or theirs is not None:
            own = self._notifier(theirs.conninfo if theirs else source.conninfo)
        self._listener = Listener(own, theirs, self._queues, self._hurry)
        self._report_at = inf
        self._has_moves = False
        self._patient_until = inf
        self._connection.state.on_back(self._report_soon)
        self.carriers: dict[int, Carrier] = {}
        self._movers: dict[int, Mover] = {}

    def _notifier(self, conninfo: str) -> Notifier:
        registry = Registry()
        registry.handler("rota.forward")(lambda job: None)
        notifier = Notifier(
            Connection(conninfo, "rota notifier", self._source.state),
            self._connection, self._queues, registry, QUIET_FACTOR * self._poll_interval,
        )  # fmt: skip
        notifier.on_notify = self._hurry
        notifier.on_change = self._wake.set
        notifier.on_answer = self._expect
        notifier.on_maintenance = self._hurry_ticker
        return notifier

    async def run(self) -> None:
        """Work until cancelled."""
        retry = Retry("a look for jobs that travel", self._connection.state)
        if self._is_lent:
            self._connection.lend()
        self._patient_until = time.monotonic() + PATIENCE
        try:
            while True:
                self._wake.clear()
                try:
                    await self._ask_again()
                    await self._meet_the_others()
                    waiting = await self._connection.call(AsyncClient.waiting_forwards)
                    moves = await self._connection.call(AsyncClient.waiting_moves)
                    await self._report()
                except (psycopg.Error, RotaError, OSError) as error:
                    self._source.was_asked = True
                    await retry.wait(error)
                    continue
                retry.succeed()
                self._has_moves = bool(moves)
                for number in set(waiting) & self.carriers.keys():
                    if not self.carriers[number].is_held:
                        self.carriers[number].go()
                self._move(moves)
                if time.monotonic() >= self._ticker.due_at:
                    await self._ticker.tick()
                await self._rest()
        finally:
            await self._listener.close()
            for carrier in self.carriers.values():
                await carrier.close()
            for mover in self._movers.values():
                await mover.close()
            await self._leave()

    def _move(self, moves: list[WaitingMove]) -> None:
        """Have queues carried that move to a database that is known here."""
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
            self._listener.turn_away()
            await asyncio.sleep(LOOK_INTERVAL)
            return
        pause = self._listener.listen(self._poll_interval)
        # Of a move that begins, and of another database's number, nothing notifies it.
        knows_all = len(self.carriers) == len(self._databases) - 1
        if knows_all and not self._has_moves and self._listener.hears_all:
            pause *= QUIET_FACTOR
        until_tick = max(0.0, self._ticker.due_at - time.monotonic())
        with suppress(TimeoutError):
            async with asyncio.timeout(min(pause, until_tick)):
                await self._wake.wait()

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
            self._report_at = -inf
        is_early = time.monotonic() < self._patient_until
        if here is None or (is_early and not all(each.was_asked for each in self._databases)):
            return
        for other in self._databases:
            number = other.number
            if number is None or number == here or number in self.carriers:
                continue
            self.carriers[number] = Carrier(self._worker, self._source, other, self._wake.set)
            self._queues.append(f"forward:{number}")
            self._listener.listen_again()
            self._report_at = -inf

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

    async def _report(self) -> None:
        """Let it be seen here which databases jobs can go to."""
        if not self._queues or time.monotonic() < self._report_at:
            return
        self._report_at = time.monotonic() + REPORT_INTERVAL
        await report(self._connection, self._worker, list(self._queues), ["rota.forward"])

    def _report_soon(self) -> None:
        self._report_at = -inf

    async def _leave(self) -> None:
        with suppress(psycopg.Error, RotaError, OSError):
            if self._report_at < inf:
                await leave(self._connection, self._worker)
        await self._connection.close()

    def _hurry(self) -> None:
        """Let those carry at once who have their connections, and look who else has to."""
        for carrier in self.carriers.values():
            if carrier.is_open and not carrier.is_held:
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

    It ticks as well, every *tick_interval* seconds, where no worker of the process does.  The
    workers of the process, one for each database, have *lent* their connections.
    """

    def __init__(
        self,
        conninfos: Sequence[str],
        *,
        poll_interval: float = 1.0,
        tick_interval: float | None = None,
        lent: Sequence[tuple[Connection, Notifier | None]] | None = None,
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
                None if lent is None else lent[number],
            )
            for number, each in enumerate(databases)
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
