"""The settings of a worker: what is wrong with them is said before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from math import inf

from ..client.checks import check_name, check_range
from ..registry import Registry
from .supply import MAX_BATCH

MAX_LEASE = 30 * 24 * 3600


def check_settings(
    registry: Registry,
    name: str | None,
    queues: Sequence[str],
    concurrency: int,
    batch: int | None,
    lease: timedelta | None,
    *,
    poll_interval: float,
    tick_interval: float,
    grace_period: float,
) -> None:
    """Raise ValueError, or TypeError, for the first that is wrong."""
    if not len(registry):
        raise ValueError("the registry has no handler")
    if isinstance(queues, str):
        raise TypeError(f"queues must be a list, got the text {queues!r}")
    if not queues:
        raise ValueError("queues must have a name")
    for queue in queues:
        check_name("queue", queue)
    if name is not None:
        check_range("the length of name", len(name), 1, 255)
    check_range("concurrency", concurrency, 1, inf)
    if batch is not None:
        check_range("batch", batch, 1, MAX_BATCH)
    if lease is not None:
        check_range("lease in seconds", lease.total_seconds(), 0.001, MAX_LEASE)
    check_range("poll_interval", poll_interval, 0.001, inf)
    check_range("tick_interval", tick_interval, 0.001, inf)
    check_range("grace_period", grace_period, 0, inf)
