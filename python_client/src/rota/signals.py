"""What a handler raises to say how its job goes on, and what it gets to see in turn."""

from __future__ import annotations

from datetime import timedelta

from .client.checks import to_duration


class Snooze(Exception):
    """Run the job again after *delay* (seconds or timedelta); no attempt is burnt."""

    def __init__(self, delay: timedelta | float) -> None:
        self.delay = to_duration("delay", delay)
        super().__init__(f"snooze for {self.delay}")


class RetryIn(Exception):
    """Fail the attempt and try again after *delay* (seconds or timedelta)."""

    def __init__(self, delay: timedelta | float, reason: str = "the handler asked") -> None:
        super().__init__(reason)
        self.delay = to_duration("delay", delay)


class FatalError(Exception):
    """Fail the job for good: it is dead at once, whatever attempts are left."""


class JobCancelled(Exception):
    """Raised by ``job.check()`` when the job should end: cancelled, or the worker stops."""
