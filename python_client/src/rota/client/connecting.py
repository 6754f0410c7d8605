"""Open connections that are fit for a pooler, and tell what went wrong in one line."""

from __future__ import annotations

import asyncio
import codecs
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from math import ceil, inf
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import Diagnostic

logger = logging.getLogger("rota")

T = TypeVar("T")

# Settings of the client's side only: a pooler refuses startup options.
_SOCKET = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
_PRIMARY = ("read-write", "primary")
_PLACE = ("host", "hostaddr", "port")
# The host and port to which a connection string has led last.
_last: dict[str, tuple[str, str]] = {}
_DRIVER = re.compile(r"^(postgres(?:ql)?)\+\w+://")
_BARE_NAME = re.compile(r"[^=/:@]+")


def named(database: str) -> str:
    """Return a connection string for what may, as in psql, be the bare name of a database.

    A URL for SQLAlchemy names a driver, which libpq does not understand.
    """
    database = _DRIVER.sub(r"\1://", database)
    return make_conninfo(dbname=database) if _BARE_NAME.fullmatch(database) else database


def words_of(database: str) -> dict[str, Any]:
    """Return what a connection string says; `named` is what it may be."""
    with suppress(psycopg.ProgrammingError):
        words = conninfo_to_dict(named(database))
        hosts, ports = (str(words.get(key) or "") for key in ("host", "port"))
        # A password that is not encoded ends in the host, or in the port.
        if not (re.search(r"[^,]@", hosts) or re.search(r"[^\d, ]", ports)):
            return words
    # The message of libpq would repeat the string, or a part of it, with its password.
    raise psycopg.ProgrammingError(
        "invalid connection string; it looks like "
        "postgresql://user:password@host:5432/database, "
        "and a password has %40 for @ and %2F for /"
    )


def name_of(database: str) -> str:
    """Return what tells a database from others, without a password."""
    words = words_of(database)
    place = ":".join(str(words[key]) for key in ("host", "port") if words.get(key))
    # Of a service libpq alone knows the database.
    name = str(words.get("dbname") or words.get("service") or "")
    return f"{place}/{name}" if place else name


def settings(conninfo: str, name: str) -> dict[str, Any]:
    """Return the arguments of a connection; what *conninfo* says goes first."""
    chosen = {**_SOCKET, "fallback_application_name": name, **words_of(conninfo)}
    # JSON is read as UTF-8, whatever the database and PGCLIENTENCODING have.
    chosen["client_encoding"] = "utf8"
    # Prepared statements break behind a pooler in transaction mode.
    return {**chosen, "autocommit": True, "prepare_threshold": None}


def _primary_first(chosen: dict[str, Any], last: tuple[str, str] | None) -> dict[str, Any]:
    """Let the one of several hosts that was the primary last be tried first.

    One that is switched off would be waited for each time.
    """
    hosts = str(chosen.get("host") or "").split(",")
    ports = str(chosen.get("port") or "5432").split(",")
    if last is None or len(hosts) == 1 or chosen.get("target_session_attrs") not in _PRIMARY:
        return chosen
    ports = ports * len(hosts) if len(ports) == 1 else ports
    places = list(zip(hosts, ports, strict=False))
    order = sorted(range(len(places)), key=lambda number: places[number] != last)
    found = {key: str(chosen[key]).split(",") for key in _PLACE if key in chosen}
    return chosen | {
        key: ",".join(each[number] for number in order)
        for key, each in found.items()
        if len(each) == len(order)
    }


def spelled_for(connection: Connection[Any] | AsyncConnection[Any], text: str) -> str:
    """Return a text with escapes for the characters that the database's encoding lacks."""
    encoding = connection.info.parameter_status("server_encoding")
    codec = "utf-8"
    if encoding not in (None, "UTF8", "SQL_ASCII"):
        # Of those with other names in Python only this is known for sure.
        codec = "ascii"
        with suppress(LookupError):
            codec = codecs.lookup(str(encoding)).name
    return text.encode(codec, "backslashreplace").decode(codec)


class BoundedConnection(psycopg.Connection[Any]):
    """Is broken by a call that has no answer within *patience* seconds, however it hangs."""

    patience = inf
    _is_too_late = False

    def wait(self, *arguments: Any, **named: Any) -> Any:
        """Wait for an answer."""
        if self.patience == inf:
            return super().wait(*arguments, **named)
        timer = threading.Timer(self.patience, self._break)
        timer.start()
        try:
            return super().wait(*arguments, **named)
        except psycopg.OperationalError:
            if self._is_too_late:
                text = f"no answer within {self.patience:g} seconds"
                raise psycopg.OperationalError(text) from None
            raise
        finally:
            timer.cancel()

    def _break(self) -> None:
        self._is_too_late = True
        with suppress(OSError, psycopg.Error), socket.socket(
            fileno=os.dup(self.pgconn.socket)
        ) as own:  # fmt: skip
            own.shutdown(socket.SHUT_RDWR)


def connect(conninfo: str, name: str = "rota", seconds: float = inf) -> BoundedConnection:
    """Open a connection in autocommit mode, fit for a pooler, within about so many seconds."""
    chosen = _primary_first(settings(conninfo, name), _last.get(conninfo))
    if seconds < inf:
        # For libpq 0 is without end, and the least are 2 seconds.
        allowed = int(chosen["connect_timeout"]) or inf
        chosen["connect_timeout"] = max(2, ceil(min(allowed, seconds)))
    try:
        try:
            connection = BoundedConnection.connect("", **chosen)
        except psycopg.OperationalError:
            socket.socket().close()  # libpq does not say that no file can be opened
            raise
    except OSError as error:
        raise psycopg.OperationalError(str(error)) from None
    _last[conninfo] = connection.info.host, str(connection.info.port)
    connection.add_notice_handler(_WarningLog().add)
    return connection


async def connect_async(
    conninfo: str, name: str = "rota", seconds: float = inf
) -> AsyncConnection[Any]:
    """Open an async connection like `connect`, and in a thread.

    libpq itself blocks, as when it looks up a service, and psycopg looks up names in the
    threads of the loop: handlers may use them all, and the end of the loop waits for them.
    """
    try:
        opening = begin(partial(connect, conninfo, name, seconds))
    except RuntimeError as error:  # the system has no room for a thread
        raise psycopg.OperationalError(str(error)) from None
    try:
        opened = await asyncio.wrap_future(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_drop)
        raise
    connection: AsyncConnection[Any] = AsyncConnection(opened.pgconn)
    del opened.pgconn  # or it would complain that nobody has closed it
    connection._autocommit = True  # set_autocommit() may be cancelled, and it would be lost
    connection.prepare_threshold = None
    connection.add_notice_handler(_WarningLog().add)
    return connection


def _drop(opening: Future[BoundedConnection]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def begin(function: Callable[[], T], name: str = "rota-begin") -> Future[T]:
    """Run it in a thread, for whose end neither an interrupt nor the process waits."""
    answer: Future[T] = Future()

    def work() -> None:
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(function())
            except BaseException as error:  # raised where the answer is taken
                answer.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return answer


class _WarningLog:
    """Logs what maintenance has to say: a schedule that it disabled, a part that failed."""

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}

    def add(self, notice: Diagnostic) -> None:
        """Log a warning of the server, the same one once in a minute."""
        if notice.severity_nonlocalized != "WARNING":
            return
        now, message = time.monotonic(), notice.message_primary or ""
        if now - self._logged_at.get(message, -60.0) >= 60.0:
            logger.warning("database: %s", message)
            if len(self._logged_at) >= 100:
                self._logged_at.clear()
            self._logged_at[message] = now


def one_line(error: BaseException) -> str:
    """Return what an error says, without the line that Postgres shows for it."""
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    return " ".join((primary or str(error) or type(error).__name__).split())
