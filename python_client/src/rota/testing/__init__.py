"""Helpers for your tests: run a handler, check what is enqueued, drain, get a database.

`run_job` runs one handler.  `drain` runs the jobs that are due, and `assert_enqueued` checks
waiting jobs, both on the test's own connection, within its own uncommitted transaction.
`rota.testing.pytest` is a plugin with a throwaway server and a database for each test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .asserting import assert_enqueued, assert_not_enqueued
from .running import JobOutcome, drain, drain_async, run_job, run_job_async

if TYPE_CHECKING:
    from .server import EmbeddedPostgres, find_binaries

__all__ = [
    "EmbeddedPostgres",
    "JobOutcome",
    "assert_enqueued",
    "assert_not_enqueued",
    "drain",
    "drain_async",
    "find_binaries",
    "run_job",
    "run_job_async",
]


def __getattr__(name: str) -> Any:
    if name in ("EmbeddedPostgres", "find_binaries"):  # they need testing.postgresql
        from . import server

        return getattr(server, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
