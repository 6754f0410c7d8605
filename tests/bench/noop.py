"""Handlers that do nothing, for measuring what the queue itself costs."""

from __future__ import annotations

import rota

registry = rota.Registry()


@registry.handler("part")
@registry.handler("report")
async def nothing(job: rota.AsyncJob) -> None:
    """Do nothing."""
