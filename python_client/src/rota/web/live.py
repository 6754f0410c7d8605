"""Notify open pages that something has changed.

One task polls for all pages, only while one is open, and reads only statistics that the
server collects anyway; it writes nothing.  A notified page reloads itself, and pages that
show the same share the response.  The time that the reloads take is measured, and the next
notification is delayed in proportion: however many pages are open, they use no more than
their share of a core.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import LiteralString

import psycopg
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from .database import Database, TooSlowError, UnreachableError

logger = logging.getLogger("rota")

SHORTEST, LONGEST, SHARE = 2.0, 60.0, 0.02
SERVED = 0.0025
"""Seconds that it takes about to send an answer that is there."""
AT_LEAST_EVERY = 20.0
STAY_AWAKE = 15.0

COUNTED: LiteralString = """
    select case
        when pg_is_in_recovery() then pg_last_wal_replay_lsn()::text
        else (
            select sum(pg_stat_get_tuples_inserted(c.oid) + pg_stat_get_tuples_updated(c.oid)
                + pg_stat_get_tuples_deleted(c.oid))::text
            from pg_class as c
            where c.relnamespace = 'rota'::regnamespace and c.relkind = 'r'
        ) end as counted
    """


@dataclass(frozen=True, slots=True)
class _Shared:
    number: int
    answer: asyncio.Future[Response]


class Pulse:
    """Counts the changes that pages have been told of."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._listeners: set[asyncio.Event] = set()
        self._task: asyncio.Task[None] | None = None
        self._spent = 0.0
        self._number = 0
        self._answers: dict[str, _Shared] = {}

    async def events(self) -> AsyncIterator[str]:
        """Yield a line for each change, and one now and then that keeps the line open."""
        event = asyncio.Event()
        self._listeners.add(event)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            yield "retry: 5000\n\n"
            while True:
                try:
                    await asyncio.wait_for(event.wait(), STAY_AWAKE)
                except TimeoutError:
                    yield ": still here\n\n"
                else:
                    event.clear()
                    yield f"event: change\ndata: {self._number}\n\n"
        finally:
            self._listeners.discard(event)
            if not self._listeners and self._task is not None:
                self._task.cancel()
                self._task = None

    async def share(self, key: str, answer: Callable[[], Awaitable[Response]]) -> Response:
        """Return the answer that all pages of one address get for the same change.

        While no task looks for changes, the pages share only what is under way.
        """
        self._spent += SERVED
        if key not in self._answers or not self._is_fresh(self._answers[key]):
            self._answers = {k: one for k, one in self._answers.items() if self._is_fresh(one)}
            made = asyncio.ensure_future(self._timed(answer))
            self._answers[key] = _Shared(self._number, made)
        return await asyncio.shield(self._answers[key].answer)

    def _is_fresh(self, shared: _Shared) -> bool:
        if shared.number != self._number:
            return False
        if not shared.answer.done():
            return True
        is_good = not shared.answer.cancelled() and shared.answer.exception() is None
        return is_good and self._task is not None and not self._task.done()

    async def _timed(self, answer: Callable[[], Awaitable[Response]]) -> Response:
        began = time.monotonic()
        try:
            return await answer()
        finally:
            self._spent += time.monotonic() - began

    async def _run(self) -> None:
        # What was told before nobody listened is old.
        self._number += 1
        self._spent = 0.0
        self._database.begin_page(has_end=False)
        counted, told_at = None, time.monotonic()
        while True:
            wait = min(max(SHORTEST, self._spent / SHARE), LONGEST)
            self._spent = 0.0
            await asyncio.sleep(wait)
            began = time.monotonic()
            try:
                row = await self._database.row(COUNTED)
            except (psycopg.Error, TooSlowError, UnreachableError) as error:
                logger.debug("pages are not told of changes: %s", error)
                continue
            self._spent += time.monotonic() - began
            found = row["counted"] if row else None
            if found != counted or time.monotonic() - told_at > AT_LEAST_EVERY:
                counted, told_at = found, time.monotonic()
                self._number += 1
                for event in self._listeners:
                    event.set()


async def events(request: Request) -> Response:
    """Stream the changes to a page."""
    pulse: Pulse = request.app.state.site.pulse

    async def stream() -> AsyncIterator[str]:
        with suppress(asyncio.CancelledError):
            async for line in pulse.events():
                yield line

    return StreamingResponse(
        stream(),
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )
