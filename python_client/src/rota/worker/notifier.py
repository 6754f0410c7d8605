"""How a worker that has nothing to do is notified of jobs.

The notifier has a connection of its own, on which it calls wait_for_jobs() and listens to the
channels, and a task of its own: `go` says what to be and returns at once, so a connection that
hangs never delays a claim.  It calls *on_notify* when it is notified of jobs, *on_maintenance*
when of a check to be done by ``tick()``, *on_answer* with the seconds after which to claim at
the latest, and *on_change* when it is on, or not any more.  While it is idle and no claim is
made it calls wait_for_jobs() again at that time: an idle worker makes one call in each
interval, which tells whether to claim and whether to tick, and that the connection works.

It also waits for jobs that go to other databases, if `wait_also` names their queues, unless
it is active: then the forwarder looks by itself.  It calls *on_other* with true when such jobs
have come, and with false when the forwarder has to look, because some may be there or the
notifier does not wait for them any more.

From when it has first been idle it is also notified of running jobs that an operator cancels
or takes away, and calls *on_running* with their ids.  It listens to that only where it listens
anyway: PostgreSQL wakes each session that listens to anything at each notification, for 30 us
of CPU.

Behind a pooler in transaction mode no notification would arrive and the locks would stay with
a connection of others.  So first of all it sends itself a message by way of another
connection; only a notifier that receives it is on.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from math import inf
from typing import Any

import psycopg
from psycopg import AsyncConnection, Notify, sql

from ..client.async_client import AsyncClient
from ..client.connecting import one_line
from ..exceptions import RotaError
from .connection import CALL_TIMEOUT, Connection, Retry, time_limit, wait_for

logger = logging.getLogger("rota")

CHECK_INTERVAL = 10.0
"""Seconds after which a silent connection is asked whether it is still there."""
ANSWER_TIMEOUT = 5.0
"""Seconds that an answer may take."""
SILENCE = 1.0
"""Seconds without an answer after which the worker ticks as if it were asked to."""
PROBE_TIMEOUT = 1.0
PROBE_INTERVAL = 300.0
"""Seconds until it is tried again whether messages arrive."""
TIMER_ERROR = 0.001
"""Seconds that a timer of the event loop may be early."""
EARLIEST = 0.9
"""Of an interval, the part before which it is not asked again whether anything is due."""
MAX_QUEUES = 100
"""wait_for_jobs() waits for so many queues, the first of those that are given."""
FORWARD = "rota.forward"
"""The type of the jobs that travel."""
MAINTENANCE = "rota_maintenance_"
"""How the channel begins on which any worker is notified of a check to be done."""
RUNNING = "rota_running_jobs"
"""The channel of running jobs that are cancelled or taken away, by their ids."""


class Place(Enum):
    """What a worker is: at work, idle, or active for all who are idle."""

    AWAY = "away"
    IDLE = "idle"
    ACTIVE = "active"


class Notifier:
    """Waits for jobs of *queues*; *other* is the connection that it tries itself with."""

    def __init__(
        self,
        connection: Connection,
        other: Connection,
        queues: Sequence[str],
        job_types: Callable[[], list[str]],
        poll_interval: float,
    ) -> None:
        self._connection = connection
        self._other = other
        self._queues = queues
        self._job_types = job_types
        self._poll_interval = poll_interval
        self._retry = Retry(None, connection.state)
        self._channels: set[str] = set()
        # Always the same one: a pooler may keep listening to it for us.
        self._probe = f"rota_probe_{secrets.token_hex(6)}"
        self._is_off_logged = False
        self._asked = asyncio.Event()
        self._is_probed = asyncio.Event()
        self.wanted = Place.AWAY
        """What it is, or will be in a moment."""
        self._claimed = True
        self._look_at = inf
        self._others: list[str] = []
        self.notified_others: frozenset[str] = frozenset()
        """The queues of jobs for other databases of which it is notified now."""
        self.on_other: Callable[[bool], None] = lambda has_come: None
        self.on_notify: Callable[[], None] = lambda: None
        self.on_maintenance: Callable[[], None] = lambda: None
        self.on_running: Callable[[frozenset[int]], None] = lambda job_ids: None
        self.on_answer: Callable[[float], None] = lambda seconds: None
        self.on_change: Callable[[], None] = lambda: None
        self.is_on = False
        self.place = Place.AWAY
        self.has_maintenance = False

    @property
    def asks_for_all(self) -> bool:
        """Whether its answers tell of jobs in all queues of the worker."""
        return len(self._queues) <= MAX_QUEUES

    def go(self, place: Place, *, claimed: bool = True) -> None:
        """Be that as soon as possible; also again, to ask when to claim.

        *claimed* is whether the last claim was for all that was due.
        """
        self.wanted = place
        self._claimed = claimed
        self._look_at = inf
        self._asked.set()

    def wait_also(self, queues: Sequence[str]) -> None:
        """Wait for jobs of these queues as well, which travel to other databases."""
        if self._others != list(queues):
            self._others = list(queues)
            if self.wanted is not Place.ACTIVE:
                self._asked.set()

    async def run(self) -> None:
        """Listen until cancelled; whatever happens to the connection, come back."""
        while True:
            error: Exception | None = None
            session: AsyncConnection[Any] | None = None
            try:
                # Of several hosts the first may be dead, and is then waited for each time.
                async with time_limit(CALL_TIMEOUT):
                    session = await self._connection.open()
                session.add_notify_handler(self._receive)
                if await self._receives(session):
                    await self._serve(session)
                self._log_off("no message arrives, as behind a pooler in transaction mode")
            except asyncio.CancelledError:
                if session is not None:
                    await self._stop_waiting(session)
                raise
            except (psycopg.Error, RotaError, OSError) as exception:
                self._log_off(one_line(exception))
                error = exception
            except Exception as exception:  # without this task nothing wakes the worker
                logger.exception("notifications failed")
                error = exception
            finally:
                await self._close()
            self.on_change()  # from now on by polling
            if error is None:
                await asyncio.sleep(PROBE_INTERVAL)
            else:
                await self._retry.wait(error)

    async def _receives(self, session: AsyncConnection[Any]) -> bool:
        """Return whether a message of another connection arrives; no lock is held yet."""
        channel = sql.Identifier(self._probe)
        self._is_probed.clear()
        self._channels &= {RUNNING}
        async with time_limit(ANSWER_TIMEOUT):
            await session.execute(sql.SQL("listen {}").format(channel))
        await self._other.call(
            lambda client: client.connection.execute(sql.SQL("notify {}").format(channel))
        )
        await receive(session, self._receive, self._is_probed, PROBE_TIMEOUT)
        async with time_limit(ANSWER_TIMEOUT):
            await session.execute(sql.SQL("unlisten {}").format(channel))
            if self._channels:  # after an outage, which its jobs may have outlived
                await session.execute(sql.SQL("listen {}").format(sql.Identifier(RUNNING)))
        return self._is_probed.is_set()

    async def _serve(self, session: AsyncConnection[Any]) -> None:
        self.is_on = True
        self._asked.set()
        self.on_change()
        while True:
            pause = min(CHECK_INTERVAL, self._look_at - time.monotonic())
            await receive(session, self._receive, self._asked, pause)
            must_move = self._asked.is_set()
            self._asked.clear()
            silence = asyncio.get_running_loop().call_later(SILENCE, self._tick_unasked)
            try:
                async with time_limit(ANSWER_TIMEOUT):
                    if must_move:
                        await self._move(session, self.wanted, claimed=self._claimed)
                    elif time.monotonic() >= self._look_at - TIMER_ERROR:
                        await self._move(session, Place.IDLE, claimed=False)
                    else:
                        await session.execute("select")
            finally:
                silence.cancel()
            # Not before: it may have no right to wait for its queues.
            self._retry.succeed()
            self._log_on()

    def _tick_unasked(self) -> None:
        self.has_maintenance = True  # until there is an answer
        self.on_maintenance()

    async def _move(
        self, session: AsyncConnection[Any], place: Place, *, claimed: bool = True
    ) -> None:
        client = AsyncClient(session)
        own, others = list(self._queues), list(self._others)
        if place is Place.AWAY:
            self.place, own = place, []
            await client.stop_waiting()
        elif place is Place.ACTIVE:
            others = []  # what an active one claims by itself is of its own queues
        if not (own or others):
            self._set_notified(frozenset())
            return
        waiting = await client.wait_for_jobs(
            [*own, *others],
            [*self._job_types(), *([FORWARD] if others else [])],
            timedelta(seconds=min(self._poll_interval, 3600.0)),
            place is Place.ACTIVE,
            claimed,
        )
        channels = set(waiting.channels)
        if channels or waiting.is_active:
            channels.add(RUNNING)
        changes = [
            sql.SQL("{} {}").format(sql.SQL(word), sql.Identifier(channel))
            for word, some in (
                ("listen", channels - self._channels),
                ("unlisten", self._channels - channels),
            )
            for channel in sorted(some)
        ]
        self._channels = channels  # first: the answer may bring a notification with it
        if changes:
            await session.execute(sql.SQL("; ").join(changes))
        seconds = waiting.look_again_in.total_seconds()
        self._set_notified(frozenset([*own, *others][:MAX_QUEUES]) & frozenset(others))
        if others and seconds <= 0.0:
            self.on_other(False)
        if place is Place.AWAY:
            return
        self.has_maintenance = waiting.has_maintenance
        if self.has_maintenance and seconds <= 0.0:
            self.on_maintenance()  # a check has come due that may let a job in
        self.place = Place.ACTIVE if waiting.is_active else Place.IDLE
        if self.wanted is not Place.AWAY:
            if place is self.wanted:
                self.wanted = self.place  # another worker is active already
            if self.wanted is Place.IDLE:
                # What comes due sooner is claimed at its time.
                self._look_at = time.monotonic() + max(seconds, EARLIEST * self._poll_interval)
            self.on_answer(seconds)

    def _set_notified(self, others: frozenset[str]) -> None:
        is_less = not others.issuperset(self.notified_others.intersection(self._others))
        self.notified_others = others
        if is_less:
            self.on_other(False)

    def _receive(self, notify: Notify) -> None:
        if notify.channel == self._probe:
            self._is_probed.set()
        elif notify.channel == RUNNING:
            self.on_running(frozenset(map(int, re.findall(r"\d{1,19}", notify.payload))))
        elif notify.channel not in self._channels:
            return
        elif notify.channel.startswith(MAINTENANCE):
            self.on_maintenance()
        else:
            self.on_notify()
            if self._others:  # it may come before the answer to wait_for_jobs()
                self.on_other(True)

    async def _stop_waiting(self, session: AsyncConnection[Any]) -> None:
        """Let another be notified: jobs of which this one was notified may not be claimed."""
        if self.place is not Place.AWAY or self.notified_others:
            with suppress(psycopg.Error):
                async with time_limit(PROBE_TIMEOUT):
                    await AsyncClient(session).stop_waiting()

    async def _close(self) -> None:
        self.is_on = False
        self._look_at = inf
        self.place = Place.AWAY
        self._set_notified(frozenset())
        await self._connection.close()

    def _log_on(self) -> None:
        if self._is_off_logged:
            self._is_off_logged = False
            logger.info("notifications%s are on again", self._connection.state.place)

    def _log_off(self, reason: str) -> None:
        if not self._is_off_logged:
            self._is_off_logged = True
            text = "notifications%s are off: %s; polling every %g s"
            logger.info(text, self._connection.state.place, reason, self._poll_interval)


async def receive(
    connection: AsyncConnection[Any],
    on_message: Callable[[Notify], None],
    event: asyncio.Event,
    seconds: float,
) -> None:
    """Wait for *event*, but not longer than that; raise if the connection is gone.

    The generator of psycopg would keep the connection to itself, and have to be cancelled and
    begun again for each statement between.
    """
    loop = asyncio.get_running_loop()
    errors: list[psycopg.Error] = []

    def read() -> None:
        try:
            connection.pgconn.consume_input()
            while (notify := connection.pgconn.notifies()) is not None:
                channel, message = notify.relname.decode(), notify.extra.decode()
                on_message(Notify(channel, message, notify.be_pid))
        except psycopg.Error as error:
            errors.append(error)
            event.set()

    socket = connection.fileno()
    loop.add_reader(socket, read)
    try:
        await wait_for(event, seconds)
    finally:
        loop.remove_reader(socket)
    if errors:
        raise errors[0]
