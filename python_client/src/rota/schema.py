r"""Install the SQL parts without psql.

The manifest uses only a few psql lines: ``\ir`` (relative to the file it stands in), ``\if``
with ``\else`` and ``\endif``, ``\set``, and queries that end in ``\gset``.  Everything else
is plain SQL and is sent as it stands.  Any other psql line is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from psycopg import Connection, Cursor
from psycopg.rows import dict_row

_META = re.compile(r"\s*\\(\w+)\s*(.*?)\s*$")
_GSET = re.compile(r"(.*)\\gset\s*$")
_CONDITION = re.compile(r":(?:\{\?(\w+)\}|(\w+))$")


def sql_dir() -> Path:
    """Return the folder of the SQL parts: that of the package, else that of the repository."""
    packaged = Path(str(resources.files("rota"))) / "sql"
    if (packaged / "install.sql").is_file():
        return packaged
    folder = Path(__file__).resolve().parents[3] / "sql"
    if (folder / "install.sql").is_file():
        return folder
    raise FileNotFoundError("the SQL parts of rota are neither in the package nor beside it")


def install(
    connection: Connection[Any], *, with_roles: bool = False, with_cron: bool = False
) -> None:
    """Install rota over a connection, or bring it up to date, in a transaction of its own.

    *with_roles* creates the four roles, and *with_cron* lets pg_cron tick.
    """
    if not connection.autocommit:
        raise ValueError(
            "the script has a transaction of its own: connect with autocommit=True"
        )
    run_script(connection, "install.sql", {"with_roles": with_roles, "with_cron": with_cron})


def run_script(connection: Connection[Any], name: str, options: Mapping[str, bool]) -> None:
    """Run one of the SQL scripts; *options* are its psql variables.

    The connection must be in autocommit mode: the script has its own transaction.
    """

    def execute(text: str) -> None:
        # Not with a cursor of another class, which may take only one statement at a time.
        Cursor(connection).execute(text.encode())

    _Script(connection, options, execute).run(sql_dir() / name)


def script_text(connection: Connection[Any], name: str, options: Mapping[str, bool]) -> str:
    """Return what `run_script` would send; only reads."""
    parts: list[str] = []
    _Script(connection, options, parts.append).run(sql_dir() / name)
    return "".join(parts)


class _Script:
    """Reads a script, and the scripts it includes, the way psql does."""

    def __init__(
        self,
        connection: Connection[Any],
        options: Mapping[str, bool],
        execute: Callable[[str], None],
    ) -> None:
        self._connection = connection
        self._variables = {name: True for name, is_set in options.items() if is_set}
        self._execute = execute
        self._pending: list[str] = []
        self._is_live: list[bool] = []

    def run(self, path: Path) -> None:
        self._read(path)
        self._flush()

    def _read(self, path: Path) -> None:
        depth = len(self._is_live)
        is_comment = False
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            is_comment = is_comment or line.startswith("/*")
            if is_comment:
                # A header shows how psql lines look; there they are only text.
                if all(self._is_live):
                    self._pending.append(line)
                is_comment = "*/" not in line
            elif meta := _META.match(line):
                self._follow(meta[1], meta[2], path)
            elif all(self._is_live):
                self._take(line)
        if len(self._is_live) != depth:
            raise ValueError(f"{path.name}: \\if without \\endif")

    def _follow(self, command: str, argument: str, path: Path) -> None:
        match command:
            case "if":
                self._is_live.append(self._is_true(argument, path))
            case "else":
                self._is_live[-1] = not self._is_live[-1]
            case "endif":
                self._is_live.pop()
            case "ir":
                if all(self._is_live):
                    self._read(path.parent / argument)
            case "set":
                pass
            case _:
                raise ValueError(f"{path.name}: cannot follow \\{command}")

    def _is_true(self, argument: str, path: Path) -> bool:
        condition = _CONDITION.match(argument)
        if condition is None:
            raise ValueError(f"{path.name}: cannot follow \\if {argument}")
        if condition[1]:
            return condition[1] in self._variables
        return self._variables.get(condition[2], False)

    def _take(self, line: str) -> None:
        if query := _GSET.match(line):
            self._flush()
            self._variables |= self._ask(query[1])
        else:
            self._pending.append(line)

    def _flush(self) -> None:
        if text := "".join(self._pending).strip():
            self._execute(text + "\n")
        self._pending.clear()

    def _ask(self, query: str) -> Mapping[str, bool]:
        with self._connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(query.encode()).fetchone() or {}
