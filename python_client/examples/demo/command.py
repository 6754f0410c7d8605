"""The command ``make demo``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import psycopg
from psycopg.conninfo import conninfo_to_dict

from rota.client.connecting import connect, named

from .display import Display, make_console
from .place import CannotPlayError, clean, given_database, own_server
from .play import play
from .proof import check_all
from .report import print_report

AS_TOLD, NOT_AS_TOLD = 0, 1

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str]) -> int:
    """Play the demo; return 0 if everything was as told, 1 if not."""
    arguments = _parser().parse_args(argv)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, _leave)
    try:
        if arguments.clean:
            return _clean(arguments.database_url)
        return _run(arguments)
    except (CannotPlayError, psycopg.Error, OSError, RuntimeError) as error:
        print(f"demo: {str(error).strip()}", file=sys.stderr)
        return NOT_AS_TOLD


def _run(arguments: argparse.Namespace) -> int:
    begun = time.monotonic()
    console = make_console(is_plain=arguments.plain)
    console.print("rota demo: the background jobs of a small shop\n", style="bold")
    url = _checked(arguments.database_url)
    with (
        tempfile.TemporaryDirectory(prefix="rota-demo-") as folder,
        given_database(url) if url else own_server(arguments.pg_bindir) as place,
    ):
        console.print(f"  database  {place.database}\n  rota      {place.rota}\n", markup=False)
        with Display(console) as display:
            happened = play(place, display, Path(folder))
        with connect(place.conninfo) as connection:
            checks = check_all(happened, connection)
        print_report(console, happened, checks)
    is_as_told = all(check.is_true for check in checks)
    verdict = "All of it is as told" if is_as_told else "NOT as told: see above"
    console.print(f"{verdict}. It took {time.monotonic() - begun:.0f} s.", style="bold")
    if not is_as_told:
        print(happened.logs, file=sys.stderr)
    return AS_TOLD if is_as_told else NOT_AS_TOLD


def _checked(url: str) -> str:
    try:
        conninfo_to_dict(named(url))
    except psycopg.ProgrammingError:  # whose message would repeat a password
        raise CannotPlayError("DATABASE_URL is not a connection string") from None
    return named(url)


def _clean(url: str) -> int:
    if not url:
        raise CannotPlayError("--clean needs to know the database: -d, or DATABASE_URL")
    with connect(_checked(url)) as connection:
        print(clean(connection))
    return AS_TOLD


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make demo",
        description="See jobs run, fail, retry and survive a crash, on real processes.",
        epilog="Without a database it starts a PostgreSQL of its own, and stops it at the end.",
    )
    parser.add_argument(
        "-d", "--database-url", metavar="URL", default=os.environ.get("DATABASE_URL", ""),
        help="play there, and leave it as it was (default: DATABASE_URL)",
    )  # fmt: skip
    parser.add_argument("--pg-bindir", metavar="DIR", help="where initdb and postgres are")
    parser.add_argument("--plain", action="store_true", help="no colours, no live list")
    parser.add_argument(
        "--clean", action="store_true", help="only remove what a killed demo left in a database"
    )
    return parser


def _leave(number: int, frame: FrameType | None) -> None:
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)  # so that every `with` block cleans up
