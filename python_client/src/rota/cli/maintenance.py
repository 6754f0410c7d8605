"""Commands that keep a database going: install, uninstall, tick."""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from dataclasses import asdict

from ..client.sync_client import Client
from ..client.values import check_range
from ..rows import TickReport
from ..schema import run_script, script_text
from ..worker.connection import Connection, ConnectionState, wait_for
from ..worker.maintenance import Ticker
from ..worker.process import run_until_signal
from .output import (
    CommandError,
    UsageError,
    answered,
    confirm,
    connected,
    conninfo,
    print_json,
    print_record,
    set_up_log,
    tell,
)

logger = logging.getLogger("rota")

MAX_EVERY = 3600.0


def install(arguments: argparse.Namespace) -> None:
    """Install, or bring up to date."""
    options = {
        "with_roles": arguments.with_roles,
        "with_cron": arguments.with_cron,
        "allow_downgrade": arguments.force,
    }
    with connected(arguments) as connection:
        if arguments.dry_run:
            text = script_text(connection, "install.sql", options)
            print_json({"sql": text}) if arguments.json else print(text, end="")
            return
        run_script(connection, "install.sql", options)
        version, database = Client(connection).version(), connection.info.dbname
    said = {"database": database, "version": version}
    tell(arguments, said, f"rota {version} is installed in {database}")


def uninstall(arguments: argparse.Namespace) -> None:
    """Remove the schema with everything in it, after a question."""
    with connected(arguments) as connection:
        database = connection.info.dbname
        row = connection.execute("select to_regnamespace('rota') as schema").fetchone()
        if not row or row["schema"] is None:
            raise CommandError(f"rota is not installed in {database}")
        if not arguments.yes:
            confirm(f"delete rota and all its jobs from {database}")
        run_script(connection, "uninstall.sql", {})
    tell(arguments, {"database": database, "version": None}, f"rota is removed from {database}")


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

    async def tick_until(stopping: asyncio.Event) -> None:
        connection = Connection(database, "rota tick", ConnectionState())
        try:
            ticker, broken = Ticker(connection, every), list[str]()
            report = await ticker.tick(is_patient=False)
            name = connection.database
            logger.info("ticker started database=%s every=%s", name, every)
            while True:
                if report is not None:
                    broken = _log(report, broken)
                if await wait_for(stopping, ticker.due_at - time.monotonic()):
                    break
                report = await ticker.tick()
        finally:
            await connection.close()

    run_until_signal(tick_until)
    logger.info("ticker stopped")


def _log(report: TickReport, broken_before: list[str]) -> list[str]:
    """Log what a tick did, if anything, and which parts fail; return these."""
    did = {
        name: value
        for name, value in asdict(report).items()
        if name != "look_again_in" and type(value) is not bool
    }
    if any(did.values()):
        counts = " ".join(f"{name}={value}" for name, value in did.items() if value)
        logger.info("tick %s", counts)
    broken = [name for name, value in did.items() if value is None]
    if broken != broken_before:
        logger.warning("failing (see the server log): %s", ", ".join(broken) or "none")
    return broken
