"""Commands about a front: one database that passes calls on to many (PL/Proxy)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from psycopg.conninfo import conninfo_to_dict

from ..client.connecting import connect, name_of, named, one_line
from ..client.sync_client import Client
from ..exceptions import RotaError
from ..schema import run_script, script_text
from .output import LOCK_TIMEOUT, CommandError, UsageError, conninfos, print_json, print_table

KNOWN = ("host", "hostaddr", "port", "dbname", "sslmode", "target_session_attrs")
TRIES = 100
SETTLED: LiteralString = """
    select distinct format('select rota_front.follow_move(%s, %s);', rota.database_number(),
        m.database)
    from rota.queue_moves as m where m.direction = 'out' and m.state = 'settled'
    """


def make(arguments: argparse.Namespace) -> int:
    """Make a front of many databases, or bring it up to date; tell what is left to do."""
    databases = _shards(conninfos(arguments))
    roles = [_role(word) for word in arguments.role or []]
    passwords = _passwords(arguments.passwords)
    statements = _statements(arguments, databases)
    with connect(named(arguments.front), "rota front") as front:
        if arguments.dry_run:
            print(script_text(front, "front.sql", {}), *statements, sep="\n")
            return 0
        # That of a front that is there already is for calls.
        front.execute("set statement_timeout = 0")
        try:
            run_script(front, "front.sql", {})
            _write(front, statements, roles, passwords)
        except psycopg.errors.LockNotAvailable:
            raise CommandError(
                f"another session has the views of {front.info.dbname} locked, or makes it too",
                "Nothing was done. Try again, or end its transaction: pg_stat_activity has it",
            ) from None
        front.execute("reset statement_timeout")
        left = _rebalance(front)
        rows, bad = _told_of_shards(front)
        code, user = int(left > 0 or bool(bad)), front.info.user
        if arguments.json:
            print_json({"front": front.info.dbname, "shards": rows, "slots_left": left})
            return code
        print(f"{front.info.dbname} is a front of {len(databases)} databases")
        print_table(rows)
    if left:
        print(f"{left} slots have not moved yet: open transactions use them; run it again")
    if bad:
        print(
            f"role {user} does not reach {', '.join(bad)} as it should: see the answers, and"
            f" name it as well, as --role {user}=operator"
        )
    return code


def _write(
    front: psycopg.Connection[Any],
    statements: list[str],
    roles: list[tuple[str, str]],
    passwords: dict[str, str],
) -> None:
    with front.transaction():
        # Or one who has read from it and not committed would hold up all other readers.
        front.execute(LOCK_TIMEOUT)
        for statement in statements:
            front.execute(statement.encode())
        for role, access in roles:
            front.execute(
                "select rota_front.set_role(%s, %s, password => %s)",
                (role, access, passwords.get(role)),
            )


def status(arguments: argparse.Namespace) -> int:
    """Tell which databases are behind a front, and whether they answer it."""
    with connect(named(arguments.front), "rota front") as front:
        rows, bad = _told_of_shards(front)
    (print_json if arguments.json else print_table)(rows)
    return int(bool(bad))


def _shards(databases: list[str]) -> list[dict[str, Any]]:
    """Return the databases as front_statements() takes them; they have to be alike."""
    if not databases:
        raise UsageError("name the databases: --database A --database B, or --databases FILE")
    shards, versions = [], {}
    for database in databases:
        name = name_of(database)
        try:
            with connect(database, "rota front") as connection:
                client = Client(connection)
                number, versions[name] = client.database_number(), client.version()
                # The front knows neither the services of this machine nor its PGHOST.
                words = {
                    option.keyword.decode(): option.val.decode()
                    for option in connection.pgconn.info
                    if option.val and option.keyword != b"hostaddr"
                }
        except (psycopg.Error, RotaError) as error:
            raise CommandError(f"{name}: {one_line(error)}") from None
        if number is None:
            raise CommandError(
                f"{name} has no number", "Give each its own: select rota.set_database_number(N)"
            )
        words |= {key: str(value) for key, value in conninfo_to_dict(database).items()}
        shards.append({"number": number} | {k: words[k] for k in KNOWN if words.get(k)})
    if len(set(versions.values())) > 1:
        told = ", ".join(f"{name} {version}" for name, version in versions.items())
        raise CommandError(f"the databases have different versions: {told}", "rota install")
    return shards


def _statements(arguments: argparse.Namespace, shards: list[dict[str, Any]]) -> list[str]:
    moves: list[str] = []
    for database in conninfos(arguments):
        with connect(database, "rota front") as connection:
            # Before that the database which the queue leaves carries on what its keys get.
            moves += [statement for (statement,) in connection.execute(SETTLED).fetchall()]
    with connect(conninfos(arguments)[0], "rota front") as connection:
        given = {"time_limit": arguments.time_limit} if arguments.time_limit else {}
        return Client(connection).front_statements(shards, **given) + moves


def _role(word: str) -> tuple[str, str]:
    role, _, access = word.partition("=")
    if access not in ("producer", "operator"):
        raise UsageError(f"--role {word}: must be ROLE=producer or ROLE=operator")
    return role, access


def _passwords(file: str | None) -> dict[str, str]:
    if not file:
        return {}
    try:
        lines = Path(file).read_text().splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if line.strip() and ":" not in line:
            raise UsageError(f"line {number} of {file} is not ROLE:PASSWORD")
    return {role: word for role, _, word in (line.partition(":") for line in lines) if word}


def _rebalance(front: psycopg.Connection[Any]) -> int:
    """Give new databases their slots; return how many calls keep where they are."""
    remaining = 0
    for _ in range(TRIES):
        ((switched, remaining),) = front.execute(
            "select switched, remaining from rota_front.rebalance()"
        ).fetchall()
        if sys.stderr.isatty() and remaining:
            print(f"\r{remaining} slots to hand over ", end="", file=sys.stderr, flush=True)
        if not remaining or not switched:
            break
    return int(remaining)


def _told_of_shards(front: psycopg.Connection[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row a database, and which do not answer or have another version."""
    shards = front.execute(
        "select h.number, count(s.slot) filter (where s.number = h.number),"
        " count(s.slot) filter (where h.number = any(s.earlier))"
        " from rota_front.shards as h cross join rota_front.slots as s group by 1 order by 1"
    ).fetchall()
    ((version,),) = front.execute("select rota.version()").fetchall()
    rows = []
    for number, slots, earlier in shards:
        try:
            asked = front.execute("select rota_front.version_of(%s)", (number,)).fetchone()
            answer = asked[0] if asked else None
        except psycopg.Error as error:
            answer = one_line(error)
        rows.append(
            {"database": number, "slots": slots, "earlier_slots": earlier, "answer": answer}
        )
    return rows, [f"database {row['database']}" for row in rows if row["answer"] != version]
