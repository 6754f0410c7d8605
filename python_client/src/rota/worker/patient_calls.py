"""Calls about single jobs, each of which may wait for a row that another session has locked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ..client.async_client import AsyncClient
from .connection import Database

T = TypeVar("T")

PATIENCE = 0.25
"""Seconds after which a call that has no answer yet keeps no other call waiting."""
BESIDE_OTHERS = 0.05
"""The same while others wait: somebody has rows locked, and maybe this one's too."""


class PatientCalls:
    """Calls take turns on one connection, but whoever waits there too long keeps it.

    The next call then gets another.  So nothing has to be cancelled and sent again, and there
    are only as many connections as calls that wait, and one more.
    """

    def __init__(self, make: Callable[[], Database]) -> None:
        self._make = make
        self._spare: Database | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def call(self, action: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Run *action* when it is its turn."""
        async with self._turn:
            database, self._spare = self._spare or self._make(), None
            task = asyncio.create_task(self._use(database, action))
            try:
                await asyncio.wait([task], timeout=BESIDE_OTHERS if self._waiting else PATIENCE)
            except asyncio.CancelledError:
                task.cancel()
                await asyncio.wait([task])
                raise
        self._waiting += 1
        try:
            return await task
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        """Close the connection that nobody uses."""
        if self._spare is not None:
            database, self._spare = self._spare, None
            await database.close()

    async def _use(
        self, database: Database, action: Callable[[AsyncClient], Awaitable[T]]
    ) -> T:
        try:
            return await database.call(action)
        finally:
            if self._spare is None:
                self._spare = database
            else:
                await database.close()
