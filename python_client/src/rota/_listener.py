"""Where a worker that has nothing to do waits to be rung.

The listener has a connection of its own, which holds its doors and hears their channels, and
a task of its own: `go` says where to be and returns at once, so a connection that hangs never
delays a claim.  It calls *on_ring* when it is rung, and *on_arrival* when it has come to its
doors, or lost them: jobs that came before rang nobody, and have to be looked for.  Where it is
known that there are none it calls *on_calm*.  `ask_next` has it call *on_next* with the seconds
until something comes due, if that is soon.

Behind a pooler in transaction mode nothing would be heard and the locks of the doors would
stay with a connection of others.  So first of all it sends itself a message by way of another
connection; only a listener that hears it is on.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from typing import Any

import psycopg
from psycopg import AsyncConnection, Notify, sql

from ._async_client import AsyncClient
from ._database import Database, backoff
from ._errors import RotaError
from ._messages import hear
from ._rows import Door

logger = logging.getLogger("rota")

CHECK_INTERVAL = 10.0
"""Seconds after which a silent connection is asked whether it is still there."""
PATIENCE = 5.0
"""Seconds that an answer may take."""
ON_THE_WAY = 0.02
"""Seconds that a question may be longer on the way than the claim before it was."""
PROBE_PATIENCE = 1.0
PROBE_INTERVAL = 300.0
"""Seconds until it is tried again whether messages arrive."""


class Place(Enum):
    """Where a worker is: at work, at a door, or on watch for all who sleep."""

    AWAY = "away"
    DOOR = "door"
    WATCH = "watch"


class Listener:
    """Waits at the doors of *queues*; *claims* is the other connection."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[AsyncConnection[Any]]],
        claims: Database,
        queues: Sequence[str],
        job_types: Sequence[str],
        poll_interval: float,
    ) -> None:
        self._connect = connect
        self._claims = claims
        self._queues = queues
        self._job_types = job_types
        self._poll_interval = poll_interval
        self._connection: AsyncConnection[Any] | None = None
        self._channels: set[str] = set()
        # Always the same one: a pooler may keep listening to it for us.
        self._probe = f"rota_probe_{secrets.token_hex(6)}"
        self._is_told_off = False
        self._asked = asyncio.Event()
        self._heard = asyncio.Event()
        self._wanted = Place.AWAY
        self._must_move = self._must_ring_others = False
        self._ask_since: float | None = None
        self.on_ring: Callable[[str], None] = lambda message: None
        self.on_arrival: Callable[[], None] = lambda: None
        self.on_calm: Callable[[], None] = lambda: None
        self.on_next: Callable[[float], None] = lambda seconds: None
        self.is_on = False
        self.place = Place.AWAY
        self.doors: list[Door] = []

    @property
    def wanted(self) -> Place:
        """Where it is, or will be in a moment."""
        return self._wanted

    def go(self, place: Place) -> None:
        """Be there as soon as possible, and then ring; also again, for a better door."""
        self._wanted = place
        self._must_move = True
        self._ask_since = None  # it is asked again where it comes to
        self._asked.set()

    def ring_others(self) -> None:
        """Ring those who may take what this worker does not, if there is anything."""
        self._must_ring_others = True
        self._asked.set()

    def ask_next(self, looked_at: float) -> None:
        """Ask when something comes due, or has since then on the monotonic clock."""
        self._ask_since = looked_at
        self._asked.set()

    async def run(self) -> None:
        """Listen until cancelled; whatever happens to the connection, come back."""
        failures = 0
        while True:
            try:
                self._connection = await self._connect()
                self._connection.add_notify_handler(self._hear)
                pause = PROBE_INTERVAL
                if await self._hears():
                    failures = 0
                    self._connection.prepare_threshold = 3  # it is nobody else's
                    self._tell_on()
                    await self._serve(self._connection)
                self._tell_off("no message arrives, as behind a pooler in transaction mode")
            except (psycopg.Error, RotaError, TimeoutError, OSError) as error:
                self._tell_off(" ".join(str(error).split()) or "the connection hangs")
                failures += 1
                pause = backoff(failures)
            except asyncio.CancelledError:
                await self._take_leave()
                raise
            finally:
                await self._drop()
            self.on_arrival()  # at nowhere: from now on by polling
            await asyncio.sleep(pause)

    async def _hears(self) -> bool:
        """Return whether a message of another connection arrives; no lock is held yet."""
        assert self._connection is not None  # noqa: S101 - for the type checker
        channel = sql.Identifier(self._probe)
        self._heard.clear()
        self._channels = set()
        async with asyncio.timeout(PATIENCE):
            await self._connection.execute(sql.SQL("listen {}").format(channel))
        await self._claims.call(
            lambda client: client.connection.execute(sql.SQL("notify {}").format(channel))
        )
        deadline = time.monotonic() + PROBE_PATIENCE
        while not self._heard.is_set() and (left := deadline - time.monotonic()) > 0:
            await hear(self._connection, self._hear, self._heard, left)
        async with asyncio.timeout(PATIENCE):
            await self._connection.execute(sql.SQL("unlisten {}").format(channel))
        return self._heard.is_set()

    async def _serve(self, connection: AsyncConnection[Any]) -> None:
        self.is_on = True
        self._must_move = self._wanted is not Place.AWAY
        self.on_arrival()
        while True:
            await hear(connection, self._hear, self._asked, CHECK_INTERVAL)
            is_silent = not self._asked.is_set()
            self._asked.clear()
            async with asyncio.timeout(PATIENCE):
                if self._must_move:
                    self._must_move = False
                    await self._move(connection, self._wanted)
                elif self._must_ring_others:
                    self._must_ring_others = False
                    client = AsyncClient(connection)
                    await client.ring_others(self._queues, self._job_types)
                elif self._ask_since is not None:
                    await self._ask_next(connection, self._ask_since)
                elif is_silent:
                    await connection.execute("select")
            if self._must_move or self._must_ring_others or self._ask_since is not None:
                self._asked.set()

    async def _move(self, connection: AsyncConnection[Any], place: Place) -> None:
        client = AsyncClient(connection)
        if place is Place.AWAY:
            self.place, self.doors = place, []
            await client.stop_waiting(self._queues)
            return
        doors = await client.wait_for_jobs(self._queues, place is Place.WATCH)
        channels = {door.channel for door in doors if door.channel}
        has_heard = channels == self._channels
        changes = [
            sql.SQL("{} {}").format(sql.SQL(word), sql.Identifier(channel))
            for word, some in (
                ("listen", channels - self._channels),
                ("unlisten", self._channels - channels),
            )
            for channel in sorted(some)
        ]
        if changes:
            await connection.execute(sql.SQL("; ").join(changes))
        self._channels, self.doors = channels, doors
        self.place = Place.WATCH if any(door.has_watch for door in doors) else Place.DOOR
        if place is self._wanted is Place.WATCH:
            self._wanted = self.place  # another is on watch already
        if has_heard and not any(door.is_due for door in doors):
            self.on_calm()
        else:
            self.on_arrival()

    async def _ask_next(self, connection: AsyncConnection[Any], looked_at: float) -> None:
        self._ask_since = None
        since = min(time.monotonic() - looked_at + ON_THE_WAY, 3600.0)
        client = AsyncClient(connection)
        wait = await client.next_due_in(self._queues, timedelta(seconds=since))
        if wait is not None:
            self.on_next(wait.total_seconds())

    def _hear(self, notify: Notify) -> None:
        if notify.channel == self._probe:
            self._heard.set()
        elif notify.channel in self._channels:
            self.on_ring(notify.payload)

    async def _take_leave(self) -> None:
        """Let the next be rung: what rang here may not be claimed any more."""
        if self._connection is not None and self.place is not Place.AWAY:
            with suppress(psycopg.Error, TimeoutError):
                async with asyncio.timeout(PROBE_PATIENCE):
                    await AsyncClient(self._connection).stop_waiting(self._queues)

    async def _drop(self) -> None:
        self.is_on = False
        self.place, self.doors = Place.AWAY, []
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()

    def _tell_on(self) -> None:
        if self._is_told_off:
            self._is_told_off = False
            logger.info("wake-ups are on again")

    def _tell_off(self, reason: str) -> None:
        if not self._is_told_off:
            self._is_told_off = True
            text = "wake-ups are off: %s; polling every %g s"
            logger.info(text, reason, self._poll_interval)
