"""Which of two answers to "when next?" is right, found the slow and plain way.

Neither the SQL nor the oracle is asked.  A wall time is looked up in Python's zoneinfo, the
sets of a text are those that cronsim read from it, and every second in question is tried.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim

SECOND = timedelta(seconds=1)
DAY = timedelta(days=1)


def wall(instant: datetime, zone: ZoneInfo) -> datetime:
    """Return what the clock on the wall shows, without a zone."""
    return instant.astimezone(zone).replace(tzinfo=None, fold=0)


def change_near(instant: datetime, zone: ZoneInfo, reach: timedelta) -> datetime | None:
    """Return the first instant within *reach* of *instant* that has a new offset."""
    low, high = instant - reach, instant + reach
    offset = low.astimezone(zone).utcoffset()
    if high.astimezone(zone).utcoffset() == offset:
        return None
    while high - low > SECOND:
        middle = low + (high - low) // SECOND // 2 * SECOND
        if middle.astimezone(zone).utcoffset() == offset:
            low = middle
        else:
            high = middle
    return high


def first_instant(shown: datetime, zone: ZoneInfo) -> datetime:
    """Return the first instant at which the wall shows *shown*, or more, having skipped it."""
    instant = shown.replace(tzinfo=zone, fold=0).astimezone(UTC)
    if wall(instant, zone) == shown:
        return instant
    change = change_near(instant, zone, timedelta(hours=26))
    assert change is not None
    return change


class Referee:
    """One text in one zone."""

    def __init__(self, text: str, zone: ZoneInfo) -> None:
        self._sets = CronSim(text, datetime(2000, 1, 1))
        self._zone = zone

    def names(self, shown: datetime) -> bool:
        """Return whether the text names this wall time."""
        sets = self._sets
        return (
            shown.second in sets.seconds
            and shown.minute in sets.minutes
            and shown.hour in sets.hours
            and shown.month in sets.months
            and sets.match_day(shown.date())
        )

    def is_shown(self, instant: datetime) -> bool:
        """Return whether a job that follows the wall clock runs at *instant*."""
        return self.names(wall(instant, self._zone))

    def is_fixed(self, instant: datetime) -> bool:
        """Return whether a job of fixed time runs at *instant*."""
        shown = wall(instant, self._zone)
        if self.names(shown):
            return first_instant(shown, self._zone) == instant
        before = wall(instant - SECOND, self._zone)
        skipped = int((shown - before) / SECOND) - 1
        return any(self.names(before + SECOND * n) for n in range(1, skipped + 1))
