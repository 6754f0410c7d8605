"""The command ``rota forward``: carry jobs between databases."""

from __future__ import annotations

import argparse
import asyncio
import logging

from ..worker.connection import end_task
from ..worker.forwarder import Forwarder
from ..worker.process import run_in_loop, stop_on_signals
from .output import UsageError, conninfos, set_up_log

logger = logging.getLogger("rota")

TICK_INTERVAL = 1.0
"""As that of a worker: jobs of an ordering key may wait for a check that only a tick makes."""


def forward(arguments: argparse.Namespace) -> None:
    """Carry jobs until SIGTERM or SIGINT."""
    chosen = conninfos(arguments)
    if len(chosen) < 2:
        raise UsageError("name two databases at least: --database A --database B")
    log_format = "json" if arguments.json else arguments.log_format
    set_up_log(log_format, arguments.log_level)
    run_forwarder(chosen)


def run_forwarder(databases: list[str]) -> None:
    """Carry jobs between these databases until a signal comes, SIGTERM or SIGINT."""
    stopping = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    def stop(*, now: bool) -> None:
        for loop in loops:
            loop.call_soon_threadsafe(stopping.set)
        if now or not loops:
            raise KeyboardInterrupt

    async def forward_until_stopped() -> None:
        loops.append(asyncio.get_running_loop())
        forwarder = Forwarder(databases, tick_interval=TICK_INTERVAL)
        running = asyncio.create_task(forwarder.run())
        ending = asyncio.create_task(stopping.wait())
        logger.info("forwarder started databases=%s", len(databases))
        await asyncio.wait([running, ending], return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        await end_task(running)
        if running.done() and not running.cancelled():
            running.result()  # raises what ended it
        logger.info("forwarder stopped carried=%s", forwarder.carried)

    with stop_on_signals(stop):
        run_in_loop(forward_until_stopped())
