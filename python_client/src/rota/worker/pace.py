"""When a worker looks for jobs next, and whether it is notified of them until then.

It claims until nothing is due, and then asks wait_for_jobs() when to claim again at the latest.
A queue where jobs come every few milliseconds would notify all the time, and each notification
costs the producer something; so there the worker becomes the active poller and looks by itself,
until it is quiet again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from math import inf

from .notifier import Listener, Place

ACTIVE_INTERVAL = (0.002, 0.01)
"""Seconds between two active looks: the more jobs come, the more each look shall find."""
BUSY_RATE = 3000.0
"""Jobs a second from which on it is the longest."""
RATE_WINDOW = 0.1
"""Seconds over which these are counted."""
ACTIVE_FROM = 0.01
"""Seconds between two finds from which on a worker becomes active."""
ACTIVE_UNTIL = 0.03
"""Seconds without a find after which it is idle again."""
LOOK_AGAIN = 0.1
"""Seconds after the last notification until it asks when to claim."""
SHORTEST_WAIT = (0.01, 1.0)
"""Seconds between two claims at their time; doubled each time that one finds nothing."""


class Pace:
    """Says when to claim; *listener* is None where wake-ups are not wanted."""

    def __init__(self, listener: Listener | None, poll_interval: float) -> None:
        self.claim_at = 0.0
        """When to claim next, on the monotonic clock."""
        self._listener = listener
        self._poll_interval = poll_interval
        self._wake: Callable[[], None] = lambda: None
        self._must_come = self._is_notified = self._was_notified = False
        self._is_expected = self._was_expected = False
        self._looked_at, self._shortest_wait = -inf, SHORTEST_WAIT[0]
        self._is_busy = False
        self._found_at = self._others_at = self._counted_at = -inf
        self._rate = 0.0

    def start(self, wake: Callable[[], None]) -> None:
        """Call *wake* whenever *claim_at* comes nearer."""
        self._wake = wake
        if self._listener is not None:
            self._listener.on_notify = self._notify
            self._listener.on_answer = self._expect
            self._listener.on_change = self._come

    @property
    def is_follower(self) -> bool:
        """Whether another idle worker does the upkeep, and has left nothing to do."""
        listener = self._listener
        if listener is None or listener.place is Place.AWAY:
            return False
        return not listener.has_maintenance

    def is_due(self) -> bool:
        """Return whether to claim now; a notification from now on wants another claim."""
        now = time.monotonic()
        if now < self.claim_at:
            return False
        self._must_come = False
        self._was_notified, self._is_notified = self._is_notified, False
        self._was_expected, self._is_expected = self._is_expected, False
        self._looked_at = now
        return True

    def fail(self, pause: float) -> None:
        """Note that the claim failed."""
        self.claim_at = time.monotonic() + pause

    def end(self, found: int, *, is_full: bool) -> None:
        """Note what the claim has found; *is_full* is whether there may be more."""
        now = time.monotonic()
        self._count(found, now)
        is_near = found > 0 and now - self._found_at < ACTIVE_FROM
        if found:
            self._found_at = now
            self._shortest_wait = SHORTEST_WAIT[0]
        elif self._was_expected:
            self._shortest_wait = min(2 * self._shortest_wait, SHORTEST_WAIT[1])
        if is_full:
            self._is_busy = is_near
            self.claim_at = 0.0  # as soon as there is a free place
            if self._listener is not None and self._listener.wanted is not Place.AWAY:
                self._listener.go(Place.AWAY)
        else:
            pause = self._poll_interval * random.uniform(0.75, 1.25)  # noqa: S311
            if self._listener is not None and self._listener.is_on:
                pause = self._wait(self._listener, pause, found=found, is_near=is_near)
            self.claim_at = 0.0 if self._must_come else now + pause

    def _wait(self, listener: Listener, pause: float, *, found: int, is_near: bool) -> float:
        """Choose how to wait; return how long if there is neither answer nor notification."""
        if listener.wanted is Place.AWAY:
            listener.go(Place.ACTIVE if self._is_busy else Place.IDLE)
        elif listener.place is Place.ACTIVE:
            return self._look_actively(listener, pause)
        elif is_near and self._was_notified:
            listener.go(Place.ACTIVE)
        elif self._was_notified and found:
            return min(pause, LOOK_AGAIN)
        else:
            listener.go(Place.IDLE)
        return pause

    def _look_actively(self, listener: Listener, pause: float) -> float:
        now = time.monotonic()
        if now - self._found_at >= ACTIVE_UNTIL:
            self._is_busy = False
            listener.go(Place.IDLE)
            return pause
        if now - self._others_at >= ACTIVE_UNTIL:
            self._others_at = now
            listener.go(Place.ACTIVE)  # again: for jobs of types that it does not take
        shortest, longest = ACTIVE_INTERVAL
        return shortest + (longest - shortest) * min(self._rate / BUSY_RATE, 1.0)

    def _count(self, found: int, now: float) -> None:
        elapsed = max(now - self._counted_at, 1e-6)
        self._rate += min(elapsed / RATE_WINDOW, 1.0) * (found / elapsed - self._rate)
        self._counted_at = now

    def _notify(self) -> None:
        if self._listener is not None and self._listener.wanted is not Place.AWAY:
            self._is_notified = True
            self._shortest_wait = SHORTEST_WAIT[0]
            self._come()

    def _expect(self, seconds: float) -> None:
        now = time.monotonic()
        if seconds <= 0.0:
            self._come()
        elif self._listener is not None and self._listener.place is Place.ACTIVE:
            self.claim_at = min(self.claim_at, now + seconds)
            self._wake()
        elif self.claim_at > 0.0:
            self.claim_at = max(now + seconds, self._looked_at + self._shortest_wait)
            self._is_expected = seconds < 0.75 * self._poll_interval
            self._wake()

    def _come(self) -> None:
        self._must_come = True
        self.claim_at = 0.0
        self._wake()
