"""A lost database is told once, and once that it is back, however many calls fail meanwhile."""

from __future__ import annotations

import logging
import threading
import time

import psycopg

logger = logging.getLogger("rota")

_UNREACHABLE = {"53300", "57P01", "57P02", "57P03", "57P05"}
"""Too many connections; the server shuts down, crashes, starts, or ends idle sessions."""
PASSING = (psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction)
"""What a call raises that may go through later; in a failover the database is read-only."""


def is_lost(error: Exception) -> bool:
    """Return whether *error* says that the database cannot be reached, or went away."""
    if not isinstance(error, psycopg.OperationalError):
        return False
    state = error.sqlstate
    return state is None or state.startswith("08") or state in _UNREACHABLE


class Outage:
    """What all connections of a worker know together; its methods may be called by any thread.

    *opened_at* says when a connection was opened, on the monotonic clock.  One from before the
    last outage that turns out to be broken is no news, and one from before this outage that
    still works does not end it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began_at: float | None = None
        self._ended_at: float | None = None

    def begin(self, error: Exception, opened_at: float) -> None:
        """Note that a connection is gone, or could not be opened."""
        with self._lock:
            if self._began_at is not None:
                return
            if self._ended_at is None or opened_at < self._ended_at:
                return  # before the first connection the error is the caller's
            self._began_at = time.monotonic()
        logger.warning("the database is lost, trying again: %s", " ".join(str(error).split()))

    def end(self, opened_at: float) -> None:
        """Note that a connection works."""
        with self._lock:
            began_at = self._began_at
            if self._ended_at is None:
                self._ended_at = opened_at
            if began_at is None or opened_at < began_at:
                return
            self._began_at, self._ended_at = None, opened_at
        logger.warning("the database is back after %.1f s", time.monotonic() - began_at)
