"""The command ``rota tick``: do the maintenance once, or again and again."""

from __future__ import annotations

import argparse
import logging
import os
import select
import time
from dataclasses import asdict
from typing import Any

import psycopg
from psycopg import Connection

from ..client.checks import check_range
from ..client.sync_client import Client
from ..exceptions import RotaError
from ..rows import TickReport
from ..worker.connection import backoff, connect
from ..worker.outage import Outage, is_lost
from ..worker.signal_handlers import stop_on_signals
from .output import UsageError, connected, conninfo, print_json, print_record, set_up_log

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
        Ticker(conninfo(arguments), arguments.every).run()
        return
    with connected(arguments) as connection:
        report = asdict(Client(connection).tick())
    (print_json if arguments.json else print_record)(report)


class Ticker:
    """Ticks every so many seconds; only an error of the first tick ends it."""

    def __init__(self, database: str, every: float) -> None:
        self._database = database
        self._every = every
        # A signal may come at any time, also while a lock is held; a pipe needs none.
        self._stopping, self._stop = os.pipe()
        self._outage = Outage()
        self._connection: Connection[Any] | None = None
        self._opened_at = 0.0
        self._is_tried = False
        self._failures = 0
        self._broken: list[str] = []

    def run(self) -> None:
        """Tick until `stop` or a signal: SIGTERM or SIGINT; a second one stops at once."""
        with stop_on_signals(self.stop):
            try:
                pause = 0.0
                while not select.select([self._stopping], [], [], pause)[0]:
                    pause = self._tick()
            finally:
                self._close()
        logger.info("ticker stopped")

    def stop(self, *, now: bool = False) -> None:
        """Let the running tick end, and then return from `run`; with *now* at once."""
        os.write(self._stop, b"!")
        if now:
            raise KeyboardInterrupt

    def _tick(self) -> float:
        """Tick, and return how many seconds to wait before the next one."""
        began_at = time.monotonic()
        try:
            report = Client(self._open()).tick()
        except (psycopg.Error, RotaError) as error:
            if not self._is_tried:
                raise
            if is_lost(error):
                self._outage.begin(error, self._opened_at)
            else:
                logger.warning("tick failed, trying again: %s", str(error).strip())
            self._close()
            self._failures += 1
            return max(self._every, backoff(self._failures))
        if not self._is_tried:
            self._is_tried = True
            name = self._open().info.dbname
            logger.info("ticker started database=%s every=%s", name, self._every)
        self._failures = 0
        self._outage.end(self._opened_at)
        self._tell(report)
        passed = time.monotonic() - began_at
        return 0.0 if report.has_more else max(self._every - passed, 0.0)

    def _tell(self, report: TickReport) -> None:
        did = {name: value for name, value in asdict(report).items() if type(value) is int}
        if any(did.values()):
            counts = " ".join(f"{name}={value}" for name, value in did.items() if value)
            logger.info("tick %s", counts)
        broken = [name for name, value in asdict(report).items() if value is None]
        if broken != self._broken:
            self._broken = broken
            names = ", ".join(broken) or "none"
            logger.warning("failing, and why is in the log of the server: %s", names)

    def _open(self) -> Connection[Any]:
        if self._connection is None:
            self._opened_at = time.monotonic()
            self._connection = connect(self._database, "rota tick")
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
