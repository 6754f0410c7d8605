"""Carry the jobs of a queue that moves from one database to another.

Jobs are taken out of the live table in one transaction and sent in another, during which no
other mover is at the same move.  So it may be killed at any moment, and the next one goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import psycopg

from ..client.async_client import AsyncClient
from ..client.connecting import one_line
from ..exceptions import RotaError
from ..rows import ReceivedMove, TakenMove, WaitingMove
from .connection import Connection, ConnectionState, Retry, end_task

logger = logging.getLogger("rota")

T = TypeVar("T")

MAX_JOBS = 500
MAX_BYTES = 8_000_000
"""What is sent at a time at most; after each failure half of it."""
RECEIVE_TIMEOUT = 10.0
"""Seconds that the other database may take."""
PAUSE = 0.2
"""Seconds until it looks again where nothing can go for now."""


class ReceiverError(Exception):
    """The other database could not receive; the jobs stay where they are."""


class Mover:
    """Carries one move; *number* is the one of the database that the queue leaves."""

    def __init__(
        self,
        move: WaitingMove,
        number: int,
        source: tuple[str, ConnectionState],
        target: tuple[str, ConnectionState],
    ) -> None:
        self.move = move
        self._number = number
        self._source = Connection(source[0], "rota mover", source[1])
        self._target = Connection(target[0], "rota receiver", target[1])
        self._retry = Retry(None, target[1])
        self._task: asyncio.Task[None] | None = None
        self._is_open = False
        self._halvings = 0

    def go(self) -> None:
        """Carry until there is nothing for now."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self.run())

    async def close(self) -> None:
        """Stop; what is on its way is sent again by the next mover."""
        if self._task is not None:
            await end_task(self._task)

    async def run(self) -> None:
        """Carry until the move has settled in both databases and nothing waits."""
        try:
            while True:
                try:
                    is_done = await self._carry_on()
                except (psycopg.Error, RotaError, OSError, ReceiverError) as error:
                    cause = error.__cause__ or error
                    if not self._retry.failures:
                        text = "queue %s stays for now: %s"
                        logger.warning(text, self.move.queue, one_line(cause))
                    self._halvings = min(self._halvings + 1, 20)
                    await self._retry.wait(cause)
                    continue
                self._retry.succeed()
                if is_done:
                    return
                await asyncio.sleep(PAUSE)
        finally:
            with suppress(psycopg.Error):
                await self._source.close()
                await self._target.close()

    async def _carry_on(self) -> bool:
        """Carry what can go now; return whether nothing is left."""
        move_id = self.move.move_id
        if not self._is_open:
            await self._receive(
                lambda client: client.open_arrival(move_id, self._number, self.move.queue)
            )
            self._is_open = True
        while True:
            max_jobs = max(1, MAX_JOBS >> self._halvings)
            max_bytes = max(1, MAX_BYTES >> self._halvings)
            picked = await self._source.call(
                lambda client: client.pick_moves(move_id, max_jobs, max_bytes)  # noqa: B023
            )
            if picked is None:
                return False  # another mover is at it
            if picked.in_transit:
                await self._send(max_jobs, max_bytes)
                self._halvings = max(0, self._halvings - 1)
            if picked.state == "settling":
                await self._settle()
            elif not picked.has_more:
                return picked.state == "settled" and not picked.in_transit

    async def _settle(self) -> None:
        move_id = self.move.move_id
        for move in await self._source.call(AsyncClient.waiting_moves):
            if move.move_id == move_id:
                await self._receive(partial(_settle_arrival, move))
                await self._source.call(lambda client: client.confirm_arrival(move_id))

    async def _send(self, max_jobs: int, max_bytes: int) -> None:
        move_id = self.move.move_id

        async def take_send_and_end(client: AsyncClient) -> None:
            async with client.connection.transaction():
                taken = await client.take_moves(move_id, max_jobs, max_bytes)
                if not taken:
                    return
                received = await self._send_to_the_other(taken)
                endings = [row._asdict() for row in received]
                await client.end_moves(move_id, [job.job_id for job in taken], endings)

        await self._source.call(take_send_and_end, 2 * RECEIVE_TIMEOUT, max_doublings=0)

    async def _send_to_the_other(self, taken: list[TakenMove]) -> list[ReceivedMove]:
        move_id, array = self.move.move_id, f"[{','.join(job.job for job in taken)}]"
        return await self._receive(
            lambda client: client.receive_moves(
                move_id, [job.job_id for job in taken], taken[0].is_late, array
            )
        )

    async def _receive(self, action: Callable[[AsyncClient], Awaitable[T]]) -> T:
        try:
            return await self._target.call(action, RECEIVE_TIMEOUT, max_doublings=0)
        except (psycopg.Error, RotaError, OSError) as error:
            raise ReceiverError from error  # not of the connection to the source


async def _settle_arrival(move: WaitingMove, client: AsyncClient) -> None:
    await client.settle_arrival(move.move_id, move.last_id)
