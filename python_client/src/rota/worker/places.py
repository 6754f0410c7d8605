"""The places for handlers, and how the databases of one process share them.

Those that are hungry have equal parts of the places: who has jobs that wait for a place, found
some when it claimed last, or is about to claim.  So one with a long backlog gets all places
where the others are quiet, and no less than its floor, a part of all databases, where they are
not; and a job that comes in where all was quiet waits for one handler at most.  A database that
is lost is never hungry.
"""

from __future__ import annotations

from collections.abc import Callable


class Places:
    """Places for so many handlers, shared by the databases that have a `Share` of them."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.shares: list[Share] = []

    @property
    def free(self) -> int:
        """How many handlers may still start."""
        return max(0, self.total - sum(share.used() for share in self.shares))


class Share:
    """What one database has of the places.

    *used* says how many of its handlers run, *is_hungry* whether it wants more; *look* is
    called when there is more room than there was.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        places.shares.append(self)
        self.used: Callable[[], int] = lambda: 0
        self.is_hungry: Callable[[], bool] = lambda: False
        self.look: Callable[[], None] = lambda: None
        self.is_short = False
        """Whether there was no room for it when it asked the last time."""

    @property
    def total(self) -> int:
        """How many places there are for all."""
        return self._places.total

    @property
    def floor(self) -> int:
        """How many places are its own."""
        return self._part_of(self._places.shares)

    def room(self) -> int:
        """Return how many more of its handlers may start now."""
        free = self._places.free
        if len(self._places.shares) > 1:
            hungry = [each for each in self._places.shares if each is self or each.is_hungry()]
            if len(hungry) > 1:
                free = max(0, min(free, self._part_of(hungry) - self.used()))
        self.is_short = free == 0
        return free

    def _part_of(self, shares: list[Share]) -> int:
        each, left = divmod(self._places.total, len(shares))
        return each + (shares.index(self) < left)

    def tell(self) -> None:
        """Let those look for whom there was no room; there may be some now."""
        if len(self._places.shares) > 1 and self._places.free:
            for other in self._places.shares:
                if other is not self and other.is_short:
                    other.look()
