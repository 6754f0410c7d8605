"""Commands about several databases: forward, queue move, and front.

Jobs travel between databases by what forwarding.py does.  A front is a database that passes
calls on to many (PL/Proxy).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from psycopg.conninfo import conninfo_to_dict

from ..client.connecting import begin, connect, name_of, named, one_line
from ..client.sync_client import Client
from ..exceptions import RotaError
from ..forwarding import MAX_MOVERS, Database, Forwarder, Mover
from ..rows import MoveFinding, MoveStatus, WaitingMove
from ..schema import run_script, script_text
from ..worker.process import run_in_loop, run_until_signal
from .output import (
    LOCK_TIMEOUT,
    CommandError,
    UsageError,
    acting,
    conninfos,
    print_findings,
    print_json,
    print_table,
    set_up_log,
    tell,
)

logger = logging.getLogger("rota")

TICK_INTERVAL = 1.0
"""As that of a worker: jobs of an ordering key may wait for a check that only a tick makes."""
NOT_SETTLED = 3
WATCH_INTERVAL = 1.0
PATIENCE = 15.0
"""Seconds, more than a connection may take, that databases have to tell their numbers."""
UNKNOWN = "it has neither settings nor jobs here: check its name, or make it known"
"""Of a name with a typing error nothing would ever move."""


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


def move(arguments: argparse.Namespace) -> int:
    """Move a queue; go on with a move that is under way."""
    source, target, number = _databases(arguments)
    if arguments.status:
        status = _status(source, arguments.queue)
        if not _is_of(status, "out", arguments.to):
            raise _unmoved(number, arguments)
        return _tell(arguments, status)
    if arguments.end:
        _end(source, target, number, arguments)
        text = f"queue {arguments.queue}: jobs enqueued in {name_of(source)} stay there"
        tell(arguments, {"queue": arguments.queue, "is_ended": True}, text)
        return 0
    findings = _plan(source, target, arguments)
    is_refused = any(finding.severity == "refused" for finding in findings)
    if not arguments.json:
        print_findings([(f"{f.severity} {f.finding}", f.evidence, f.remedy) for f in findings])
    if arguments.dry_run or is_refused:
        rows = [finding._asdict() for finding in findings]
        said = {"queue": arguments.queue, "can_move": not is_refused, "findings": rows}
        answer = "cannot move" if is_refused else "can move"
        tell(arguments, said, f"queue {arguments.queue} {answer} to database {arguments.to}")
        return 1 if is_refused else 0
    with connect(source, "rota cli") as connection, acting(connection) as client:
        move_id = client.begin_queue_move(arguments.queue, arguments.to)
    each = WaitingMove(move_id, arguments.queue, arguments.to)
    with suppress(KeyboardInterrupt):
        carrying = _carry(source, target, number, each, arguments)
        run_in_loop(carrying, ends_on=(KeyboardInterrupt,))
    status = _status(source, arguments.queue)
    code = _tell(arguments, status)
    left = status.waiting + status.running + status.in_transit if status else 0
    if code == 0 and not left and not arguments.json:
        print("let producers and workers use the other database, then run it with --end")
    return code


def _end(source: str, target: str, number: int, arguments: argparse.Namespace) -> None:
    """End it in both databases, or in the one that still knows it."""
    queue = arguments.queue
    has_left = _is_of(_status(source, queue), "out", arguments.to)
    if has_left:
        _end_in(source, queue)
    # Asked only now, since a mover may have told it of the move until then.
    if _is_of(_status(target, queue), "in", number):
        _end_in(target, queue)
    elif not has_left:
        raise _unmoved(number, arguments)


def _is_of(status: MoveStatus | None, direction: str, database: int) -> bool:
    return status is not None and (status.direction, status.database) == (direction, database)


def _unmoved(number: int, arguments: argparse.Namespace) -> CommandError:
    return CommandError(
        f"queue {arguments.queue} does not move from database {number} to database"
        f" {arguments.to}"
    )


def _end_in(database: str, queue: str) -> None:
    with connect(database, "rota cli") as connection, acting(connection) as client:
        client.end_queue_move(queue)


def _databases(arguments: argparse.Namespace) -> tuple[str, str, int]:
    """Return the database that the queue leaves, the one it goes to, and the first's number.

    Others of the list may be down.
    """
    numbers: dict[int, str] = {}
    problems: list[str] = []
    chosen = conninfos(arguments)
    # Each of them may take its whole time limit.
    answers = [begin(partial(number_of, database)) for database in chosen]
    deadline = time.monotonic() + PATIENCE
    for database, answer in zip(chosen, answers, strict=True):
        try:
            number, problem = answer.result(max(0, deadline - time.monotonic()))
        except TimeoutError:
            number, problem = None, f"no answer for {PATIENCE:.0f} s"
        if number is None:
            problems.append(f"{name_of(database)}: {problem}")
            continue
        if number in numbers:
            raise CommandError(f"two of the databases have the number {number}")
        numbers[number] = database
    if arguments.source == arguments.to:
        raise UsageError("--to and --from are the same")
    for wanted in (arguments.to, arguments.source):
        # The status is told by the database that the queue leaves.
        is_needed = wanted is not None and not (arguments.status and wanted == arguments.to)
        if is_needed and wanted not in numbers:
            message = f"none of the databases has the number {wanted}"
            if problems:
                raise CommandError(message, "; ".join(problems))
            raise UsageError(message)
    others = [number for number in numbers if number != arguments.to]
    if arguments.source is not None:
        others = [number for number in others if number == arguments.source]
    if len(others) != 1 or (problems and arguments.source is None):
        hint = "; ".join(problems) or None
        message = "name the database that the queue leaves with --from NUMBER"
        raise UsageError(message, hint)
    return numbers[others[0]], numbers.get(arguments.to, ""), others[0]


def number_of(database: str) -> tuple[int | None, str]:
    """Return the number of a database, or why there is none."""
    try:
        with connect(database, "rota cli") as connection:
            number = Client(connection).database_number()
    except (psycopg.Error, RotaError) as error:
        return None, one_line(error)
    return number, "it has no number: set_database_number()"


def _plan(source: str, target: str, arguments: argparse.Namespace) -> list[MoveFinding]:
    with connect(source, "rota cli") as connection:
        client = Client(connection)
        findings = client.plan_queue_move(arguments.queue, arguments.to)
        facts = client.queue_move_facts(arguments.queue)
        if not client.queue_move_status(arguments.queue) and not _is_known(
            connection, arguments.queue
        ):
            remedy = f"select rota.set_queue('{arguments.queue}');"
            findings.append(MoveFinding("refused", "queue", UNKNOWN, remedy))
    with connect(target, "rota cli") as connection:
        return findings + Client(connection).receive_plan(arguments.queue, facts)


def _is_known(connection: psycopg.Connection[Any], queue: str) -> bool:
    # Of very many jobs the first tells only what was there when they were counted.
    query = """
        select from rota.queue_stats where queue = %(queue)s
        union all
        select from rota.job_runs
        where queue = %(queue)s and status in ('blocked', 'queued', 'running', 'failed')
        limit 1
        """
    return connection.execute(query, {"queue": queue}).fetchone() is not None


def _status(database: str, queue: str) -> MoveStatus | None:
    with connect(database, "rota cli") as connection:
        return Client(connection).queue_move_status(queue)


def _tell(arguments: argparse.Namespace, status: MoveStatus | None) -> int:
    if status is None:
        raise CommandError(f"queue {arguments.queue} does not move")
    tell(arguments, {"queue": arguments.queue, **status._asdict()}, _words(status))
    return 0 if status.state == "settled" else NOT_SETTLED


def _words(status: MoveStatus) -> str:
    obstacle = f", waits for {status.obstacle}" if status.obstacle else ""
    return (
        f"{status.state}: {status.moved} moved, {status.in_transit} in transit, "
        f"{status.waiting} wait here, {status.running} run here{obstacle}"
    )


async def _carry(
    source: str, target: str, number: int, each: WaitingMove, arguments: argparse.Namespace
) -> None:
    """Carry, beside the forwarders that may be there, until the move has settled."""
    origin = Database(source)
    origin.number = number
    # The other database may have been restored, and have forgotten that it has settled.
    places = asyncio.Semaphore(MAX_MOVERS)
    mover = Mover(each, origin, Database(target), places, is_asked=True)
    mover.go()
    told_at, told = time.monotonic(), ""
    try:
        while mover.is_open:
            await asyncio.sleep(0.1)
            if not arguments.json and time.monotonic() - told_at >= WATCH_INTERVAL:
                # In a thread: among very many jobs it takes seconds.
                answer = begin(partial(_status, source, arguments.queue))
                with suppress(psycopg.OperationalError):  # the mover goes on, too
                    status = await asyncio.wrap_future(answer)
                    # What stands is told once, and the end below.
                    if mover.is_open and status and (words := _words(status)) != told:
                        print(told := words, file=sys.stderr)
                told_at = time.monotonic()
    finally:
        await mover.close()


KNOWN = ("host", "hostaddr", "port", "dbname", "sslmode", "target_session_attrs")
TRIES = 100
SETTLED: LiteralString = """
    select distinct format('select rota_front.follow_move(%s, %s);', rota.database_number(),
        m.database)
    from rota.queue_moves as m where m.direction = 'out' and m.state = 'settled'
    """


def make_front(arguments: argparse.Namespace) -> int:
    """Make a front of many databases, or bring it up to date; tell what is left to do."""
    databases = conninfos(arguments)
    shards = _shards(databases)
    roles = [_role(word) for word in arguments.role or []]
    passwords = _passwords(arguments.passwords)
    statements = _front_statements(databases, shards, arguments.time_limit)
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


def front_status(arguments: argparse.Namespace) -> int:
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


def _front_statements(
    databases: list[str], shards: list[dict[str, Any]], time_limit: str | None
) -> list[str]:
    moves: list[str] = []
    for database in databases:
        with connect(database, "rota front") as connection:
            # Before that the database which the queue leaves carries on what its keys get.
            moves += [statement for (statement,) in connection.execute(SETTLED).fetchall()]
    with connect(databases[0], "rota front") as connection:
        given: dict[str, Any] = {"time_limit": time_limit} if time_limit else {}
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
