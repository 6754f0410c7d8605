"""What goes around the calls that add jobs, such as the span of a trace.

A hook is a context manager that gets the jobs on their way out, may change their headers, and
after the call finds the ids that they got.  See `rota.contrib.otel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from .values import check_is_job


class Outgoing:
    """The jobs of one call: mappings of the arguments of ``enqueue``."""

    def __init__(self, jobs: Sequence[Mapping[str, Any]]) -> None:
        self.jobs = jobs
        self.ids: list[int] = []
        """The ids of the jobs once they are added, in the same order."""

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Add headers to all jobs, in copies; those that a job has already stay as they are."""
        if headers:
            self.jobs = [
                {**job, "headers": {**headers, **(job.get("headers") or {})}}
                for job in self.jobs
            ]


Hook = Callable[[Outgoing], AbstractContextManager[None]]
HOOKS: list[Hook] = []


@contextmanager
def outgoing(jobs: Sequence[Mapping[str, Any]]) -> Iterator[Outgoing]:
    """Run a call that adds jobs within all hooks, which may take them for mappings."""
    out = Outgoing(list(jobs))
    for job in out.jobs:
        check_is_job(job)
    with ExitStack() as stack:
        for hook in HOOKS:
            stack.enter_context(hook(out))
        yield out
