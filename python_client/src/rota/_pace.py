"""When a worker looks for jobs next, and where it waits until then.

It claims until nothing is due, goes to its doors, and is rung when something is.  A queue where
jobs come every few milliseconds would ring all the time, and each message costs whoever brings
the job; so there the worker goes on watch and looks by itself, until it is quiet again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from math import inf

from ._listener import Listener, Place
from ._rows import Door

WATCH_INTERVAL = (0.002, 0.01)
"""Seconds between two looks on watch: the more jobs come, the more each look shall find."""
BUSY_RATE = 3000.0
"""Jobs a second from which on it is the longest."""
RATE_WINDOW = 0.1
"""Seconds over which these are counted."""
WATCH_FROM = 0.01
"""Seconds between two finds from which on a worker goes on watch."""
WATCH_UNTIL = 0.03
"""Seconds without a find after which it goes back to its doors."""
DOUBTS = (0.005, 0.02, 0.08, 0.32)
"""Seconds between the looks for jobs that may have come unheard."""
LOOK_AGAIN = 0.1
"""Seconds after the last ring until it is asked when something comes due."""
SHORTEST_WAIT = 0.01
"""Seconds between two looks for what comes due; doubled each time that it was not for us."""
PASS_ON = 0.05
"""Seconds in which somebody may still ring at a door that was just left."""
FOLLOWERS = ((4, 2), (16, 5))
CROWD = 15
"""So many times less often than the first the others poll: by their door, and without one."""


class Pace:
    """Says when to claim; *listener* is None where wake-ups are not wanted."""

    def __init__(self, listener: Listener | None, poll_interval: float) -> None:
        self.claim_at = 0.0
        """When to claim next, on the monotonic clock."""
        self._listener = listener
        self._poll_interval = poll_interval
        self._wake: Callable[[], None] = lambda: None
        self._must_come = self._is_rung = self._was_rung = False
        self._is_expected = self._was_expected = False
        self._looked_at, self._shortest_wait = -inf, SHORTEST_WAIT
        self._may_pass_on = self._must_move_up = self._is_busy = False
        self._doubts: Iterator[float] = repeat(inf)
        self._found_at = self._left_at = self._others_at = self._counted_at = -inf
        self._rate = 0.0

    def start(self, wake: Callable[[], None]) -> None:
        """Call *wake* whenever *claim_at* comes nearer."""
        self._wake = wake
        if self._listener is not None:
            self._listener.on_ring = self._ring
            self._listener.on_arrival = self._arrive
            self._listener.on_calm = self._calm
            self._listener.on_next = self._expect

    @property
    def is_follower(self) -> bool:
        """Whether another worker that sleeps does the upkeep, and has left nothing to do."""
        listener = self._listener
        if listener is None or listener.place is Place.AWAY:
            return False
        return not any(
            door.is_first or door.has_upkeep for door in listener.doors if not door.queue
        )

    def is_due(self) -> bool:
        """Return whether to claim now; who rings from now on wants another claim."""
        now = time.monotonic()
        if now < self.claim_at:
            return False
        if self._must_move_up and self._listener is not None:
            # The claim comes with the arrival, or soon if there is none.
            self._must_move_up = False
            self._listener.go(Place.DOOR)
            self.claim_at = now + self._poll_interval
            return False
        self._must_come = False
        self._was_rung, self._is_rung = self._is_rung, False
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
        is_near = found > 0 and now - self._found_at < WATCH_FROM
        if found:
            self._found_at = now
            self._shortest_wait = SHORTEST_WAIT
        elif self._was_expected:
            self._shortest_wait = min(2 * self._shortest_wait, self._poll_interval)
        if is_full:
            self._is_busy = is_near
            self.claim_at = 0.0  # as soon as there is a free place
            if self._listener is not None and self._listener.wanted is not Place.AWAY:
                self._left_at = now
                self._listener.go(Place.AWAY)
        else:
            pause = self._poll_interval * random.uniform(0.75, 1.25)  # noqa: S311
            if self._listener is not None and self._listener.is_on:
                pause = self._wait(self._listener, pause, is_empty=found == 0, is_near=is_near)
            self.claim_at = 0.0 if self._must_come else now + pause

    def _wait(
        self, listener: Listener, pause: float, *, is_empty: bool, is_near: bool
    ) -> float:
        """Choose a place; return how long to stay there if nobody rings."""
        self._must_move_up = False
        if listener.wanted is Place.AWAY:
            listener.go(Place.WATCH if self._is_busy else Place.DOOR)
        elif listener.place is Place.WATCH:
            return self._watch(listener, pause)
        elif is_near and self._was_rung:
            listener.go(Place.WATCH)
        elif listener.place is Place.DOOR:
            doubt = next(self._doubts)
            is_first = any(door.is_first for door in listener.doors)
            if is_first and self._was_rung and not is_empty:
                pause = min(pause, LOOK_AGAIN)
            elif is_first or self._was_rung:
                listener.ask_next(self._looked_at)
            is_by_itself = is_first and not self._was_rung and doubt == inf
            if is_empty and (self._may_pass_on or is_by_itself):
                listener.ring_others()
            self._may_pass_on = False
            self._must_move_up = not is_first and doubt == inf
            return min(doubt, pause if is_first else pause * _times(listener.doors))
        return pause

    def _watch(self, listener: Listener, pause: float) -> float:
        now = time.monotonic()
        if now - self._found_at >= WATCH_UNTIL:
            self._is_busy = False
            listener.go(Place.DOOR)
            return pause
        if now - self._others_at >= WATCH_UNTIL:
            self._others_at = now
            listener.ring_others()
        shortest, longest = WATCH_INTERVAL
        return shortest + (longest - shortest) * min(self._rate / BUSY_RATE, 1.0)

    def _count(self, found: int, now: float) -> None:
        elapsed = max(now - self._counted_at, 1e-6)
        self._rate += min(elapsed / RATE_WINDOW, 1.0) * (found / elapsed - self._rate)
        self._counted_at = now

    def _ring(self, message: str) -> None:
        listener = self._listener
        if listener is not None and listener.wanted is Place.AWAY:
            if not message and time.monotonic() - self._left_at < PASS_ON:
                listener.go(Place.AWAY)  # it meant whoever is at the door now
            return
        self._is_rung = True
        self._may_pass_on = not message
        self._come()

    def _arrive(self) -> None:
        self._doubt()
        self._come()

    def _calm(self) -> None:
        self._doubt()
        if self._listener is not None and self.claim_at > 0.0:
            pause = self._poll_interval * random.uniform(0.75, 1.25)  # noqa: S311
            pause = self._wait(self._listener, pause, is_empty=True, is_near=False)
            self.claim_at = time.monotonic() + pause
            self._wake()

    def _expect(self, seconds: float) -> None:
        due_at = max(time.monotonic() + seconds, self._looked_at + self._shortest_wait)
        if due_at < self.claim_at:
            self.claim_at = due_at
            self._is_expected = True
            self._wake()

    def _doubt(self) -> None:
        doors = self._listener.doors if self._listener is not None else []
        is_sure = all(door.is_sure for door in doors if door.channel)
        self._doubts = chain(() if is_sure else DOUBTS, repeat(inf))

    def _come(self) -> None:
        self._must_come, self._must_move_up = True, False
        self.claim_at = 0.0
        self._wake()


def _times(doors: list[Door]) -> int:
    """Return how many times less often than the first a worker with these doors polls."""
    numbers = [int(d.channel.rsplit("_", 1)[1]) for d in doors if d.queue and d.channel]
    nearest = min(numbers, default=inf)
    return next((times for number, times in FOLLOWERS if nearest < number), CROWD)
