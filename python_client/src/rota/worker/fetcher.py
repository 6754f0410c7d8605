"""The loop that asks for jobs while there is a free place, and does the upkeep between."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import psycopg

from ..client.async_client import AsyncClient
from ..rows import ClaimedJob
from .connection import Database, backoff
from .executor import Runner
from .maintenance import Upkeep
from .outage import is_lost
from .pace import Pace

logger = logging.getLogger("rota")

PATIENCE = 5
"""Failed claims in a row after which a loop that is to end by itself gives up."""


class ClaimLoop:
    """Claims over one connection; *claim* is the call for a number of jobs."""

    def __init__(
        self,
        database: Database,
        claim: Callable[[AsyncClient, int], Awaitable[list[ClaimedJob]]],
        upkeep: Upkeep,
        pace: Pace,
    ) -> None:
        self._database = database
        self._claim = claim
        self._upkeep = upkeep
        self._pace = pace
        self._wake = asyncio.Event()
        self._is_stopping = False
        self._failures = 0
        pace.start(self.wake)

    def wake(self) -> None:
        """Look again at what there is to do."""
        self._wake.set()

    def stop(self) -> None:
        """Claim no more; call `wake` in the loop's thread after it."""
        self._is_stopping = True

    async def run(self, runner: Runner, *, drain: bool, once: bool) -> None:
        """Claim until stopped, or until nothing is due, or once and wait for the end."""
        may_claim = True
        while not self._is_stopping:
            self._wake.clear()
            await self._upkeep.run_due(
                is_idle=runner.is_idle,
                is_follower=self._pace.is_follower,
                # A tick takes jobs for stale whose ends the database has not heard of yet.
                may_tick=not runner.is_behind,
            )
            runner.cancel_lost()
            was_idle = runner.is_idle
            if was_idle and not may_claim:
                return
            if was_idle and drain and not self._failures:
                self._pace.claim_at = 0.0  # whether more is due is asked at once
            wanted = runner.wanted if may_claim else 0
            if wanted and self._pace.is_due():
                is_patient = not (drain or once)
                has_claimed = await self._claim_for(runner, wanted, is_patient=is_patient)
                may_claim = not (once and has_claimed)
                if drain and has_claimed and was_idle and runner.is_idle:
                    return
            until = self._upkeep.due_at
            if may_claim and runner.wanted:
                until = min(until, self._pace.claim_at)
            await self._sleep(until - time.monotonic())

    async def _claim_for(self, runner: Runner, wanted: int, *, is_patient: bool) -> bool:
        """Claim so many jobs; return whether the database answered."""
        sent_at = time.monotonic()
        try:
            claims = await self._database.call_read_committed(
                lambda client: self._claim(client, wanted)
            )
        except psycopg.Error as error:
            self._failures += 1
            if self._failures >= PATIENCE and not is_patient:
                raise
            if not is_lost(error):
                logger.warning("claim failed, trying again: %s", str(error).strip())
            self._pace.fail(backoff(self._failures))
            return False
        self._failures = 0
        runner.accept(claims, sent_at)
        self._pace.end(len(claims), is_full=len(claims) == wanted)
        return True

    async def _sleep(self, seconds: float) -> None:
        alarm = asyncio.get_running_loop().call_later(max(seconds, 0.0), self._wake.set)
        await self._wake.wait()
        alarm.cancel()
