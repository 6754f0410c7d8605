"""The handlers of a load under faults: of recorded workers, and some that cost nothing."""

from __future__ import annotations

from datetime import timedelta

import rota
from faults.history.recorded_handlers import dice, registry

__all__ = ["registry"]


@registry.handler("quick")
def quick(job: rota.Job) -> None:
    """Do nothing, so that many pass."""


@registry.handler("shaky")
def shaky(job: rota.Job) -> None:
    """Fail one time in twenty, and never for good."""
    if dice.random() < 0.05:
        raise rota.RetryIn(timedelta(seconds=0.05))


@registry.handler("t")
def from_callers(job: rota.Job) -> None:
    """End what the callers of `faults.history.random_callers` have left."""
