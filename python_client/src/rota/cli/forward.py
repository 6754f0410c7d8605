"""The command ``rota forward``: carry jobs between databases."""

from __future__ import annotations

import argparse
import asyncio
import logging

from ..forwarding.forwarder import Forwarder
from ..worker.process import run_until_signal
from .output import UsageError, conninfos, set_up_log

logger = logging.getLogger("rota")

TICK_INTERVAL = 1.0
"""As that of a worker: jobs of an ordering key may wait for a check that only a tick makes."""


def forward(arguments: argparse.Namespace) -> None:
    """Carry jobs until SIGTERM or SIGINT."""
    chosen = conninfos(arguments)
    if len(chosen) < 2:
        raise UsageError("name at least two databases: --database A --database B")
    log_format = "json" if arguments.json else arguments.log_format
    set_up_log(log_format, arguments.log_level)
    run_forwarder(chosen)


def run_forwarder(databases: list[str]) -> None:
    """Carry jobs between these databases until a signal comes, SIGTERM or SIGINT."""

    async def forward_until(stopping: asyncio.Event) -> None:
        forwarder = Forwarder(databases, tick_interval=TICK_INTERVAL)
        logger.info("forwarder started databases=%s", len(databases))
        await forwarder.run_until(stopping.wait())
        logger.info("forwarder stopped carried=%s", forwarder.carried)

    run_until_signal(forward_until)
