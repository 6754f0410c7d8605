"""The command ``rota tick``: do the maintenance once, or again and again."""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import asdict

from ..client.async_client import AsyncClient
from ..client.sync_client import Client
from ..client.values import check_range
from ..rows import TickReport
from ..worker.connection import Connection, ConnectionState
from ..worker.maintenance import Ticker, TickLog
from ..worker.process import run_in_loop, stop_on_signals
from .output import (
    UsageError,
    answered,
    connected,
    conninfo,
    print_json,
    print_record,
    set_up_log,
)

logger = logging.getLogger("rota")

MAX_EVERY = 3600.0


def tick(arguments: argparse.Namespace) -> None:
    """Do the maintenance that is due, or go on doing it."""
    if arguments.loop:
        try:
            check_range("every", arguments.every, 0.001, MAX_EVERY)
        except ValueError as error:
            raise UsageError(str(error)) from None
        set_up_log()
        run_ticker(conninfo(arguments), arguments.every)
        return
    with connected(arguments) as connection, answered(connection):
        report = asdict(Client(connection).tick())
    (print_json if arguments.json else print_record)(report)


def run_ticker(database: str, every: float) -> None:
    """Tick until a signal comes, SIGTERM or SIGINT; only an error of the first tick ends it."""
    stopping = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    def stop(*, now: bool) -> None:
        for loop in loops:
            loop.call_soon_threadsafe(stopping.set)
        if now or not loops:
            raise KeyboardInterrupt

    async def tick_until_stopped() -> None:
        loops.append(asyncio.get_running_loop())
        connection = Connection(database, "rota tick", ConnectionState())
        try:
            report: TickReport | None
            report = await connection.call_read_committed(AsyncClient.tick)
            name = connection.database
            logger.info("ticker started database=%s every=%s", name, every)
            ticker, log = Ticker(connection, every), TickLog()
            while not stopping.is_set():
                if report is not None:
                    log.add(report)
                with suppress(TimeoutError):
                    async with asyncio.timeout(ticker.due_at - time.monotonic()):
                        await stopping.wait()
                        break
                report = await ticker.tick()
        finally:
            await connection.close()

    with stop_on_signals(stop):
        run_in_loop(tick_until_stopped())
    logger.info("ticker stopped")
