"""Ask for jobs while there is a free place, and do the maintenance between.

A worker claims until nothing is due, and then asks wait_for_jobs() when something will be; the
notifier goes on to ask, and a claim comes when it says so, or does not answer in time.  One
whose places a job fills goes on to wait, until a job is due for which it has none: only then
it lets others be notified, so a job wakes no worker for which there is none.  A queue
where jobs come every few milliseconds would notify all the time, and each notification costs
the producer something; so there the worker becomes the active poller and looks by itself,
until fewer come: then most looks would find nothing, and cost more than notifications.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from math import inf

import psycopg

from ..client.async_client import AsyncClient
from ..rows import ClaimedJob
from .connection import Connection, Retry, wait_for
from .executor import Executor
from .maintenance import IDLE_REPORT_INTERVAL, REPORT_INTERVAL, Presence, Ticker
from .notifier import EARLIEST, Notifier, Place

MAX_FAILURES = 5
"""Failed claims or heartbeats in a row after which a loop that is to end by itself gives up."""
ACTIVE_INTERVAL = (0.002, 0.01)
"""Seconds between two looks of the active poller: the more jobs come, the longer."""
BUSY_RATE = 3000.0
"""Jobs a second from which on that is the longest."""
RATE_WINDOW = 0.1
"""Seconds over which these jobs are counted."""
ACTIVE_FROM = 300.0
"""Jobs a second from which on a worker that is notified becomes the active poller."""
ACTIVE_UNTIL = 200.0
"""Jobs a second below which it is idle again."""
QUIET = 0.03
"""Seconds without a job after which it is so in any case."""
HUNGRY_FOR = 0.25
"""Seconds for which a claim under way keeps places free for the jobs that it may find."""
FULL_CLAIM = 200
"""Jobs that one claim may return at most, though more are due and wanted."""
LOOK_AGAIN = 0.1
"""Seconds after the last notification until it asks when to claim."""
SHORTEST_WAIT = (0.01, 1.0)
"""Seconds between two claims at their time; doubled each time that one finds nothing."""


class Fetcher:
    """Claims over one connection; *claim* is the call for a number of jobs.

    Before each claim *is_over* says whether there shall be no more.  Where it drains,
    *is_drained* says when to end.  Between two claims it ticks about every *tick_interval*
    seconds, or never, and lets the worker report its *presence*.
    """

    def __init__(
        self,
        connection: Connection,
        claim: Callable[[AsyncClient, int], Awaitable[list[ClaimedJob]]],
        is_over: Callable[[], bool],
        is_drained: Callable[[], bool],
        presence: Presence,
        notifier: Notifier,
        poll_interval: float,
        tick_interval: float | None,
    ) -> None:
        self._connection = connection
        self._claim, self._is_over, self._is_drained = claim, is_over, is_drained
        self._presence = presence
        self._ticker = Ticker(connection, tick_interval, jitter=0.2)
        self._must_tick = False
        self._wake = asyncio.Event()
        self.wake = self._wake.set
        self._poller = Poller(notifier, poll_interval, self.wake)
        self.hurry = self._poller.hurry
        notifier.on_maintenance = self._hurry_tick
        self._retry = Retry("claim", connection.state)
        self._looks_since: float | None = None
        self._has_found = False

    @property
    def failures(self) -> int:
        """How many claims in a row were refused, or had no answer."""
        return self._retry.failures

    def is_hungry(self, *, is_short: bool) -> bool:
        """Whether jobs are likely to wait here; *is_short* is whether there is no place.

        A database that does not answer does not keep others waiting.
        """
        now = time.monotonic()
        if self._looks_since is None:
            return now >= self._poller.claim_at and (self._has_found or is_short)
        return now - self._looks_since < HUNGRY_FOR or (self._has_found and is_short)

    def _hurry_tick(self) -> None:
        """Tick soon, whoever else does: this worker was notified of a check to be done."""
        self._must_tick = True
        self._ticker.hurry()
        self.wake()

    @property
    def _tick_at(self) -> float:
        """When to tick next, on the monotonic clock, where that is asked for."""
        is_asked = self._must_tick or self._poller.is_asked_to_tick
        return self._ticker.due_at if is_asked else inf

    async def run(self, executor: Executor, *, drain: bool, once: bool) -> None:
        """Claim until stopped, or until nothing is due, or once and wait for the end."""
        may_claim = True
        while not self._is_over():
            self._wake.clear()
            await self._maintain(executor)
            was_idle = executor.is_idle
            if was_idle and not may_claim:
                return
            if was_idle and drain and executor.heartbeat.failures >= MAX_FAILURES:
                raise psycopg.OperationalError("heartbeats fail, so no lease can be kept")
            if was_idle and drain and not self._retry.failures:
                self._poller.claim_at = 0.0  # whether more is due is asked at once
            wanted = executor.wanted if may_claim else 0
            if wanted and self._poller.is_due() and not self._is_over():
                is_patient = not (drain or once)
                has_claimed = await self._claim_for(executor, wanted, is_patient=is_patient)
                may_claim = not (once and has_claimed)
                is_idle = was_idle and executor.is_idle
                if drain and has_claimed and is_idle and self._is_drained():
                    return
            is_free = may_claim and executor.wanted > 0
            if not is_free:
                self._poller.step_aside()
            until = min(self._tick_at, self._presence.due_at, self._presence.look_at)
            if is_free or self._poller.is_waiting:
                until = min(until, self._poller.claim_at)
            await wait_for(self._wake, max(until - time.monotonic(), 0.0))

    async def _maintain(self, executor: Executor) -> None:
        """Tick and report when it is due; a failure is logged, and tried again later."""
        presence = self._presence
        presence.interval = IDLE_REPORT_INTERVAL if executor.is_idle else REPORT_INTERVAL
        if time.monotonic() >= self._tick_at:
            # For a tick a job is stale whose end has not reached the database.
            if executor.is_behind:
                self._ticker.defer()
            else:
                self._must_tick = False
                await self._ticker.tick()
        await presence.maintain()

    async def _claim_for(self, executor: Executor, wanted: int, *, is_patient: bool) -> bool:
        """Claim so many jobs; return whether the database answered."""
        sent_at = self._looks_since = time.monotonic()
        try:
            claims = await self._connection.call(lambda client: self._claim(client, wanted))
        except psycopg.Error as error:
            pause = self._retry.fail(error)
            if self._retry.failures >= MAX_FAILURES and not is_patient:
                raise
            self._poller.claim_at = time.monotonic() + pause
            return False
        finally:
            self._looks_since = None
        self._retry.succeed()
        self._has_found = bool(claims)
        executor.accept(claims, sent_at)
        self._poller.record(len(claims), is_full=len(claims) >= min(wanted, FULL_CLAIM))
        return True


class Poller:
    """Says when to claim, and calls *wake* whenever that comes nearer.

    The *notifier* is never on where wake-ups are not wanted.
    """

    def __init__(
        self, notifier: Notifier, poll_interval: float, wake: Callable[[], None]
    ) -> None:
        self.claim_at = 0.0
        """When to claim next, on the monotonic clock."""
        self._notifier = notifier
        self._poll_interval = poll_interval
        self._wake = wake
        notifier.on_notify = self._notify
        notifier.on_answer = self._expect
        notifier.on_change = self.hurry
        self._is_notified = self._was_notified = False
        self._is_expected = self._was_expected = False
        self._looked_at, self._shortest_wait = -inf, SHORTEST_WAIT[0]
        self._found_at = self._others_at = self._counted_at = -inf
        self._rate = 0.0

    @property
    def is_asked_to_tick(self) -> bool:
        """Whether to tick: always where no answer says that there is no need."""
        notifier = self._notifier
        is_away = Place.AWAY in (notifier.place, notifier.wanted)
        return is_away or notifier.has_maintenance

    def is_due(self) -> bool:
        """Return whether to claim now; a notification from now on wants another claim."""
        now = time.monotonic()
        if now < self.claim_at:
            return False
        self.claim_at = inf  # unless somebody wants another meanwhile
        self._was_notified, self._is_notified = self._is_notified, False
        self._was_expected, self._is_expected = self._is_expected, False
        self._looked_at = now
        return True

    @property
    def is_waiting(self) -> bool:
        """Whether producers may notify this worker, and not others."""
        return self._notifier.wanted is not Place.AWAY

    def step_aside(self) -> None:
        """Let others be notified, if it is time for a claim for which there is no place."""
        if self.is_waiting and time.monotonic() >= self.claim_at:
            self.claim_at = 0.0  # as soon as there is a free place
            self._notifier.go(Place.AWAY)

    def record(self, found: int, *, is_full: bool) -> None:
        """Record what the claim has found; *is_full* is whether there may be more."""
        now = time.monotonic()
        self._count(found, now)
        if found:
            self._found_at = now
            self._shortest_wait = SHORTEST_WAIT[0]
        elif self._was_expected:
            self._shortest_wait = min(2 * self._shortest_wait, SHORTEST_WAIT[1])
        pause = self._poll_interval * random.uniform(0.75, 1.25)  # noqa: S311
        is_idle = self._notifier.place is self._notifier.wanted is Place.IDLE
        if is_full and self._was_notified and is_idle and self._rate < ACTIVE_FROM:
            self._notifier.go(Place.IDLE, claimed=False)  # others are woken if more is due
        elif is_full:
            pause = 0.0  # as soon as there is a free place
            if self.is_waiting:
                self._notifier.go(Place.AWAY)
        elif self._notifier.is_on:
            pause = self._wait(pause, found=found)
        self.claim_at = min(self.claim_at, now + pause) if pause else 0.0

    def _wait(self, pause: float, *, found: int) -> float:
        """Choose how to wait; return how long if there is neither answer nor notification."""
        notifier, is_busy = self._notifier, self._rate >= ACTIVE_FROM
        if notifier.wanted is Place.AWAY:
            notifier.go(Place.ACTIVE if is_busy else Place.IDLE)
        elif notifier.place is Place.ACTIVE:
            return self._look_actively(pause)
        elif is_busy and self._was_notified:
            notifier.go(Place.ACTIVE)
        elif self._was_notified and found:
            return min(pause, LOOK_AGAIN)
        else:
            notifier.go(Place.IDLE)
        return pause

    def _look_actively(self, pause: float) -> float:
        notifier, now = self._notifier, time.monotonic()
        if self._rate < ACTIVE_UNTIL or now - self._found_at >= QUIET:
            notifier.go(Place.IDLE)
            return pause
        if now - self._others_at >= QUIET:
            self._others_at = now
            notifier.go(Place.ACTIVE)  # again: for jobs of types that it does not take
        shortest, longest = ACTIVE_INTERVAL
        return shortest + (longest - shortest) * min(self._rate / BUSY_RATE, 1.0)

    def _count(self, found: int, now: float) -> None:
        elapsed = max(now - self._counted_at, 1e-6)
        self._rate += min(elapsed / RATE_WINDOW, 1.0) * (found / elapsed - self._rate)
        self._counted_at = now

    def _notify(self) -> None:
        if self.is_waiting:
            self._is_notified = True
            self._shortest_wait = SHORTEST_WAIT[0]
            self.hurry()

    def _expect(self, seconds: float) -> None:
        now = time.monotonic()
        if seconds <= 0.0:
            self.hurry()
        elif self._notifier.place is Place.ACTIVE:
            self.claim_at = min(self.claim_at, now + seconds)
        elif 0.0 < self.claim_at < inf:
            self._is_expected = seconds < EARLIEST * self._poll_interval
            if self._is_expected:
                self.claim_at = max(now + seconds, self._looked_at + self._shortest_wait)
            elif self._notifier.asks_for_all:  # at that time: its next answer comes before
                self.claim_at = now + seconds + self._poll_interval
        self._wake()

    def hurry(self) -> None:
        """Claim as soon as there is a free place."""
        self.claim_at = 0.0
        self._wake()
