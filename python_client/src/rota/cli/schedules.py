"""The commands of ``rota schedule``: add, list, show, remove, enable, …, import, sync.

`read_crontab` reads the file that import puts in.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from inspect import signature
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
from psycopg import Connection

from ..client.connecting import one_line
from ..client.sync_client import Client
from ..client.values import span
from ..exceptions import BadScheduleError, InvalidArgumentError, RotaError, UnknownScheduleError
from ..rows import ScheduleChange, UpcomingRun
from .jobs import parse_json
from .output import (
    CommandError,
    UsageError,
    acting,
    aligned,
    asking,
    changing,
    confirm,
    connected,
    day,
    given_to,
    hint_for,
    print_json,
    print_list,
    print_record,
    print_table,
    printable,
    table_lines,
    tell,
    tell_of_more,
    text_of,
)
from .worker import load_registry

ARGUMENTS = list(signature(Client.schedule_job).parameters)[1:]
KEYS = [name for name in ARGUMENTS if name not in ("schedule", "job_type", "payload")]
"""Of a line of a file: the others stand in it without their names."""


def add(arguments: argparse.Namespace) -> None:
    """Put in one schedule, or change it."""
    name, schedule = arguments.name, arguments.schedule
    job = given_to(Client.schedule_job, arguments)
    job["payload"] = parse_json(arguments.payload)
    with changing(arguments) as connection:
        use_zone(connection, arguments.time_zone, arguments.starts_at, arguments.ends_at)
        client = Client(connection)
        change, row, changed = put(connection, job)
        words = client.describe_schedule(schedule)
        runs = client.upcoming_runs(name=row["name"], max_runs=3)
        if arguments.json:
            said = {"name": name, "description": words, "is_dry_run": arguments.dry_run}
            said |= dataclasses.asdict(change) | {"changes": changed}
            print_json(said | {"runs": list(map(dataclasses.asdict, runs))})
            return
        print(f"{change.outcome} {name}: {words}, in {row['time_zone']}")
        for line in lines(changed):
            print(line)
        print_runs(connection, runs, schedule, row["time_zone"])
    if not row["is_enabled"]:
        print(f"(it is disabled: rota schedule enable {name})")
    if arguments.dry_run:
        print("(dry run: nothing was done)")


def list_all(arguments: argparse.Namespace) -> None:
    """List the schedules, by their names."""
    with asking(arguments) as connection:
        rows = definitions(connection, limit=arguments.limit)
    if arguments.json:
        print_json(rows)
        return
    print_list(
        [
            {
                **{key: row[key] for key in ("name", "schedule", "job_type")},
                "next run": f"{day(moment)} {moment:%H:%M %z}" if moment else "",
                "last": row["last_status"],
                "state": row["state"],
            }
            for row in rows
            for moment in [in_zone(row["next_run_at"], row)]
        ],
        whole=1,  # by its name it is shown and run
    )
    tell_of_more(len(rows), arguments.limit)


def remove(arguments: argparse.Namespace) -> None:
    """Remove a schedule, after a question."""
    name = arguments.name
    with connected(arguments) as connection:
        definition(connection, name)
        if not arguments.yes:
            confirm(f"remove the schedule {name}")
        with acting(connection) as client:
            client.unschedule_job(name)
    text = f"schedule {name} is removed; the jobs that it has made stay"
    tell(arguments, {"name": name, "outcome": "removed"}, text)


def switch(arguments: argparse.Namespace) -> int:
    """Enable or disable those that are named, or all that are not so yet; say what was done."""
    is_enabled, verb = arguments.command == "enable", arguments.command
    if bool(arguments.names) == arguments.all:
        raise UsageError("give the names of schedules, or --all")
    code = 0
    told: list[dict[str, Any]] = []
    with connected(arguments) as connection:
        names = arguments.names
        if arguments.all:
            rows = definitions(connection, with_runs=False)
            names = [row["name"] for row in rows if row["is_enabled"] != is_enabled]
        if arguments.all and names and not arguments.yes:
            confirm(f"{verb} all schedules ({len(names)}: {', '.join(names)})")
        for arguments.name in names:
            try:
                with acting(connection) as client:
                    act = client.enable_schedule if is_enabled else client.disable_schedule
                    act(arguments.name)
                row = definition(connection, arguments.name)
                told.append({key: row[key] for key in ("name", "is_enabled", "next_run_at")})
                when = in_zone(row["next_run_at"], row)
                done = "disabled; the jobs that it has made stay"
                if is_enabled:
                    next_run = f"it runs next at {when}" if when else "no next run is planned"
                    done = f"enabled: {next_run}"
                if not arguments.json:
                    print(f"schedule {arguments.name} is {done}")
            except RotaError as error:
                code = 1
                hint = hint_for(error, arguments)
                told.append({"name": arguments.name, "error": one_line(error), "hint": hint})
                if not arguments.json:
                    told_hint = f" ({hint})" if hint else ""
                    print(printable(f"rota: {one_line(error)}{told_hint}"), file=sys.stderr)
    if arguments.json:
        print_json(told)
    elif not names:
        print(f"all schedules are {verb}d already")
    return code


def run(arguments: argparse.Namespace) -> None:
    """Make a job of a schedule now and print its id."""
    with connected(arguments) as connection, acting(connection) as client:
        job_id = client.run_schedule_now(arguments.name)
    tell(arguments, {"job_id": job_id}, job_id)


OCCURRENCES = """
    select
        f.scheduled_for, f.recorded_at - f.scheduled_for as late, f.outcome, f.job_id, r.status
    from rota.occurrences as f
    left join lateral (
        select i.status from rota.job_runs as i where i.id = f.job_id limit 1
    ) as r on true
    where f.definition = %(name)s
    order by f.scheduled_for desc
    limit 10
    """


def show(arguments: argparse.Namespace) -> None:
    """Show one schedule, when it runs next, and what became of its last times."""
    name = arguments.name
    words: str | None = None
    problem: str | None = None
    runs: list[UpcomingRun] = []
    with asking(arguments) as connection:
        client = Client(connection)
        row = definition(connection, name)
        try:
            with connection.transaction():
                words = client.describe_schedule(row["schedule"])
                runs = client.upcoming_runs(name=row["name"], max_runs=5)
        except (BadScheduleError, InvalidArgumentError, psycopg.DataError) as error:
            problem = one_line(error)
        occurrences = connection.execute(OCCURRENCES, {"name": name}).fetchall()
        if arguments.json:
            said: dict[str, Any] = {"description": words, "problem": problem}
            said |= {"runs": list(map(dataclasses.asdict, runs))}
            print_json({**row, **said, "occurrences": occurrences})
            return
        head = {"name": name, "description": problem or words, "state": row["state"]}
        print_record(head | _shown(row))
        if problem or (row["last_error"] and not row["is_enabled"]):
            print(f"(correct it with: rota schedule add {name} ...)")
        if not problem:
            print("\nnext runs" if row["is_enabled"] else "\nnext runs, if it were enabled")
            print_runs(connection, runs, row["schedule"], row["time_zone"])
    print("\nlast runs")
    print_table([{**f, "scheduled_for": in_zone(f["scheduled_for"], row)} for f in occurrences])


def _shown(row: Definition) -> Definition:
    """Return what a row tells to a person, in the zone of the schedule."""
    # The last planned time may have made no job: the list of the last runs tells.
    left_out = {"last_run_at"}
    if row["kind"] != "every":
        left_out.add("anchored_at")
    return {
        key: in_zone(value, row) if isinstance(value, datetime) else value
        for key, value in row.items()
        if value is not None and key not in left_out
    }


MAX_RUNS = 1000


def next_runs(arguments: argparse.Namespace) -> None:
    """Explain a schedule, and list its next runs."""
    schedule, name, time_zone = arguments.schedule, arguments.name, arguments.time_zone
    if (schedule is None) == (name is None):
        raise UsageError("give a schedule in quotes, or --name NAME")
    if name is not None and time_zone is not None:
        raise UsageError("--tz is for a schedule in quotes; an existing one has its own zone")
    if not 1 <= arguments.number <= MAX_RUNS:
        raise UsageError(f"-n must be 1 to {MAX_RUNS}, got {arguments.number}")
    more: dict[str, Any] = {"max_runs": arguments.number}
    if arguments.after is not None:
        more["after"] = arguments.after
    with asking(arguments) as connection:
        client = Client(connection)
        if name:
            row = definition(connection, name)
        else:
            row = {"schedule": schedule, "kind": "".join(schedule.lower().split()[:1])}
        zone = row.get("time_zone", time_zone or "UTC")
        words = client.describe_schedule(row["schedule"])
        use_zone(connection, zone, arguments.after)
        if name:
            runs = client.upcoming_runs(name=row["name"], **more)
        else:
            runs = client.upcoming_runs(schedule, zone, **more)
        if arguments.json:
            said = {"schedule": row["schedule"], "time_zone": zone, "description": words}
            print_json(said | {"runs": list(map(dataclasses.asdict, runs))})
            return
        print(f"{words}, in {zone}")
        if not name and time_zone is None:
            print("(for another zone: --tz Europe/Warsaw)")
        if row.get("state", "").startswith("overdue"):
            print(f"({row['state']})")
        print()
        print_runs(connection, runs, row["schedule"], zone)
    if row["kind"] == "after":
        if not name:
            print("(here counted from now; the first run is at once, or at starts_at)")
        print("(each later run is planned when the one before it has ended)")
    elif not name and words.endswith("counted from its start"):
        print("(here counted from now; in a schedule from starts_at, or when it is added)")


# A file of schedules: lines as in a crontab, with a job type where that has a command.
ZONE = re.compile(r"(?:CRON_)?TZ\s*=\s*(.*?)(?:(?<=\s)#.*)?")
VARIABLE = re.compile(r"[A-Za-z_]\w*\s*=")
# In a value, blanks are within quotes; a comment begins after a blank.
WORD = re.compile(r"""\s*((?:[^\s'"]|'[^']*'|"[^"]*")+)""")
COMMENT = re.compile(r"\s*(?:#.*)?")
_DAY = "SUN|MON|TUE|WED|THU|FRI|SAT"
FIELD = re.compile(rf"(?:[*?\d]|{_DAY})(?:[\d*,/#?L-]|{_DAY})*", re.IGNORECASE)
UNIT = re.compile(r"(?:second|minute|hour|day|week)s?", re.IGNORECASE)
FORM = "a line is SCHEDULE JOB_TYPE [KEY=VALUE ...] [JSON PAYLOAD]"


@dataclass(frozen=True)
class Entry:
    """What one line says: the arguments of `schedule_job`."""

    line: int
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the schedule."""
        return str(self.arguments["name"])


@dataclass
class Crontab:
    """What a file says: zones by line, schedules, and what is wrong with which line."""

    zones: list[tuple[int, str]]
    entries: list[Entry]
    problems: dict[int, str]


def read_crontab(lines: Iterable[str], time_zone: str) -> Crontab:
    """Return what the lines say; *time_zone* is for those before the first that sets one."""
    crontab = Crontab([(0, time_zone)], [], {})
    entries: dict[str, Entry] = {}
    for number, raw in enumerate(lines, 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        try:
            if found := ZONE.fullmatch(line):
                time_zone = "".join(shlex.split(found[1]))
                crontab.zones.append((number, time_zone))
                continue
            entry = Entry(number, _arguments(line, time_zone))
            if entry.name in entries:
                first = f"already that of line {entries[entry.name].line}"
                raise ValueError(f"the name {entry.name} is {first}: use name=OTHER")
            entries[entry.name] = entry
        except ValueError as error:
            crontab.problems[number] = str(error)
    crontab.entries.extend(entries.values())
    return crontab


def _arguments(line: str, time_zone: str) -> dict[str, Any]:
    if VARIABLE.match(line):
        raise ValueError("only TZ and CRON_TZ can be set")
    words, payload = _words(line)
    bare = list(takewhile(lambda word: "=" not in word, words))
    given = words[len(bare) :]
    if any("=" not in word for word in given):
        raise ValueError(f"{FORM}, in this order")
    _check_job_type(bare)

    said: dict[str, Any] = {}
    for word in given:
        key, _, value = word.partition("=")
        if key not in KEYS:
            raise ValueError(f"unknown key {key!r}; known are: {', '.join(KEYS)}")
        if key in said:
            raise ValueError(f"{key} is given twice")
        text = value if value.startswith("{") else "".join(shlex.split(value))
        said[key] = _json(key, text) if key == "backoff" else text
    schedule, job_type = " ".join(bare[:-1]), bare[-1]
    job = {"name": job_type, "schedule": schedule, "job_type": job_type, "time_zone": time_zone}
    return job | said | payload


def _check_job_type(bare: list[str]) -> None:
    """Refuse what is a schedule and no more, and what cron has besides."""
    first, last = (bare[0].lower(), bare[-1]) if bare else ("", "")
    fields = 1 if first.startswith("@") else 5 if FIELD.fullmatch(first) else 0
    is_period = first in ("every", "after") and UNIT.fullmatch(last)
    if len(bare) < 2 or is_period or (fields == 5 and FIELD.fullmatch(last)):
        raise ValueError(f"{FORM}; there is no job type after the schedule")
    if fields and len(bare) > fields + 1 and not FIELD.fullmatch(bare[fields]):
        reason = "only a job type follows the schedule, no user and no command"
        raise ValueError(f"{reason}: {bare[fields]!r}")


def _words(line: str) -> tuple[list[str], dict[str, Any]]:
    """Return the words before a payload, and that, if there is one, by its name."""
    words: list[str] = []
    end = 0
    while not COMMENT.fullmatch(line, end):
        rest = line[end:].lstrip()
        if rest[0] in '{["':
            return words, {"payload": _payload(rest)}
        found = WORD.match(line, end)
        if found is None:
            raise ValueError("a quote is not closed")
        words.append(found[1])
        end = found.end()
    return words, {}


def _payload(text: str) -> Any:
    try:
        payload, end = json.JSONDecoder().raw_decode(text)
    except ValueError as error:
        raise ValueError(f"the payload is not JSON: {error}") from None
    if not isinstance(payload, dict):
        raise ValueError("the payload must be an object: {...}")
    if not COMMENT.fullmatch(text, end):
        raise ValueError("the payload is not JSON: more follows its end")
    return payload


def _json(what: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{what} is not JSON: {error}") from None


Changes = dict[str, tuple[str, str]]
Row = tuple[dict[str, Any], Changes]


class Source:
    """A file, or with - standard input, which is read once, for however many databases."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.name = "stdin" if file == "-" else file

    @cached_property
    def lines(self) -> list[str]:
        """What it says."""
        file = self._file
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise CommandError(f"cannot read {file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise CommandError(f"cannot read {file}: it is not UTF-8 text") from None
        # Not splitlines(), which ends a line at characters that JSON and comments may hold.
        return text.removeprefix("\ufeff").split("\n")


def import_file(arguments: argparse.Namespace) -> None:
    """Put in, or change, what each line of a file says."""
    crontab = read_crontab(arguments.file.lines, arguments.time_zone or "UTC")
    entries = crontab.entries
    with changing(arguments) as connection:
        rows = _put_all(connection, crontab)
        if crontab.problems:
            raise _refusal(arguments, crontab.problems)
    if arguments.json:
        told = (rows[entry.name] for entry in entries)
        print_json([row | {"changes": changed} for row, changed in told])
        return
    _print_rows([rows[entry.name] for entry in entries])
    counts = Counter(row["outcome"] for row, _ in rows.values())
    _print_counts(counts, ("created", "changed", "unchanged"), arguments)


def _put_all(connection: Connection[Any], crontab: Crontab) -> dict[str, Row]:
    """Put in what can be; what cannot becomes a problem of its line."""
    problems = crontab.problems
    bad_zones = set()
    for line, zone in crontab.zones:
        try:
            with connection.transaction():
                connection.execute("select rota.next_run('@daily', %s)", [zone])
        except (RotaError, psycopg.DataError) as error:
            problems[line] = one_line(error)
            bad_zones.add(zone)

    rows = {}
    # By name, so that two imports at once wait for each other in one order.
    for entry in sorted(crontab.entries, key=lambda entry: entry.name):
        if entry.arguments["time_zone"] in bad_zones:
            # Its own line has told of the zone; here the rest is of interest.
            entry.arguments["time_zone"] = "UTC"
        done = _put(connection, entry.arguments)
        if isinstance(done, str):
            problems[entry.line] = done
        else:
            rows[entry.name] = done
    return rows


def _put(connection: Connection[Any], said: dict[str, Any]) -> Row | str:
    """Put a schedule in; return what that did, or what is wrong with it."""
    try:
        with connection.transaction():
            use_zone(
                connection, said.get("time_zone"), said.get("starts_at"), said.get("ends_at")
            )
            change, row, changed = put(connection, said)
            return _shown_row(connection, change.outcome, row), changed
    except (RotaError, psycopg.DataError) as error:
        hint = error.hint if isinstance(error, RotaError) else None
        return one_line(error) + (f" ({hint})" if hint else "")


def _shown_row(connection: Connection[Any], outcome: str, row: Definition) -> dict[str, Any]:
    told = {key: row[key] for key in ("name", "schedule", "time_zone")}
    try:
        with connection.transaction():
            meaning = Client(connection).describe_schedule(row["schedule"])
        if not row["is_enabled"]:
            meaning += f" ({row['state']})"
    except BadScheduleError:
        # Of one that the code no longer has, and that no longer runs.
        meaning = row["state"]
    return {"outcome": outcome, **told, "meaning": meaning}


def sync(arguments: argparse.Namespace) -> None:
    """Put in the schedules of a registry, and remove those that its code has no more."""
    registry = load_registry(arguments.registry)
    if arguments.prune and registry.name is None:
        raise UsageError(
            "without a name rota cannot know which schedules are of this registry: "
            'write rota.Registry("shop") or similar, and omit --prune the first time'
        )
    rows: list[Row] = []
    problems: list[str] = []
    with changing(arguments) as connection:
        for said in registry.schedules:
            done = _put(connection, said | {"source": registry.name})
            if isinstance(done, str):
                problems.append(f"{said['name']}: {done}")
            else:
                rows.append(done)
        if problems:
            raise _all_of(arguments, problems)
        names = {said["name"] for said in registry.schedules}
        for row in definitions(connection, with_runs=False):
            if registry.name is not None and row["source"] == registry.name:
                if row["name"] in names:
                    continue
                if arguments.prune:
                    # Another deployment may just have removed it.
                    with suppress(UnknownScheduleError), connection.transaction():
                        Client(connection).unschedule_job(row["name"])
                outcome = "removed" if arguments.prune else "left"
                rows.append((_shown_row(connection, outcome, row), {}))
    if arguments.json:
        print_json([row | {"changes": changed} for row, changed in rows])
        return
    _print_rows(rows)
    counts = Counter(row["outcome"] for row, _ in rows)
    if counts["left"]:
        print("(those that are left are no longer in the code: --prune removes them)")
    outcomes = ["created", "changed", "unchanged"] + ["removed"] * arguments.prune
    _print_counts(counts, outcomes, arguments)


def _print_rows(rows: Sequence[Row]) -> None:
    head, *shown = table_lines([row for row, _ in rows])
    print(head)
    for (_, changed), line in zip(rows, shown, strict=True):
        print(line, *lines(changed), sep="\n    ")


def _print_counts(
    counts: Mapping[str, int], outcomes: Sequence[str], arguments: argparse.Namespace
) -> None:
    said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in outcomes)
    print(said + (" (dry run: nothing was done)" if arguments.dry_run else ""))


def _refusal(arguments: argparse.Namespace, problems: dict[int, str]) -> CommandError:
    """Print the problems by line, but for one alone, and return what ends the command."""
    return _all_of(
        arguments,
        [
            f"{arguments.file.name}:{line}: {problem}" if line else f"--tz: {problem}"
            for line, problem in sorted(problems.items())
        ],
        "lines",
    )


def _all_of(
    arguments: argparse.Namespace, told: Sequence[str], what: str = "schedules"
) -> CommandError:
    if len(told) == 1:
        return CommandError(told[0])
    message = f"{len(told)} {what} are wrong: no schedule was added"
    if arguments.json:
        return CommandError(message, "\n".join(told))  # one document, as of any error
    for text in told:
        print(f"rota: {printable(text)}", file=sys.stderr)
    return CommandError(message)


def put(
    connection: Connection[Any], said: dict[str, Any]
) -> tuple[ScheduleChange, Definition, Changes]:
    """Put a schedule in; return what that did, its row, and what is not as before."""
    rows = definitions(connection, said["name"])
    change = Client(connection).schedule_job(**said)
    row = definition(connection, said["name"])
    return change, row, changes(rows[0], row) if rows else {}


def changes(before: Definition, after: Definition) -> Changes:
    """Return the arguments that differ, as they were and as they are."""
    return {
        key: (_said(before[key], after), _said(after[key], after))
        for key in ARGUMENTS
        if before[key] != after[key]
    }


def lines(changed: Changes) -> list[str]:
    """Return one line for each argument that differs."""
    return [f"{key}: {old} -> {new}" for key, (old, new) in changed.items()]


def _said(value: Any, row: Definition) -> str:
    if value is None:
        return "none"
    return text_of(in_zone(value, row) if isinstance(value, datetime) else value)


Definition = dict[str, Any]


# A job is looked up for each: a join would read the whole history.
DEFINITIONS = """
    select d.*, r.scheduled_for as last_run, r.status as last_status, rota.now() as now
    from (
        select i.* from rota.job_definitions as i
        where %(name)s::text is null or i.name = %(name)s
        order by i.name limit %(limit)s
    ) as d
    left join lateral (
        select j.scheduled_for, j.status from rota.job_runs as j
        where j.id = d.last_job_id and %(with_runs)s limit 1
    ) as r on true
    order by d.name
    """


def definitions(
    connection: Connection[Any],
    name: str | None = None,
    *,
    limit: int | None = None,
    with_runs: bool = True,
) -> list[Definition]:
    """Return the rows of the schedules, or of the one of that name, each with its state."""
    rows: list[Definition] = connection.execute(
        DEFINITIONS, {"name": name, "limit": limit, "with_runs": with_runs}
    ).fetchall()
    for row in rows:
        row["state"] = _state(row, row.pop("now"))
    return rows


def definition(connection: Connection[Any], name: str) -> Definition:
    """Return the row of a schedule; raise UnknownScheduleError if there is none."""
    for row in definitions(connection, name):
        return row
    raise UnknownScheduleError(f"schedule {name!r} not found")


def _state(row: Definition, now: datetime) -> str:
    """Say in a few words whether a schedule makes jobs."""
    if row["disabled_by"] is not None:
        return f"disabled by {row['disabled_by']}"
    if not row["is_enabled"]:
        return f"disabled: {row['last_error']}"
    if row["next_run_at"] is None:
        waits = row["kind"] == "after" and row["last_job_id"] is not None
        return f"waits for the end of job {row['last_job_id']}" if waits else "ended"
    late = now - row["next_run_at"]
    if late > timedelta(minutes=1):
        return f"overdue by {span(late)}: does anything tick?"
    return "due" if late >= timedelta(0) else "enabled"


def in_zone(moment: datetime | None, row: Mapping[str, Any]) -> datetime | None:
    """Return *moment* in the zone of a schedule, in UTC where that is not known here."""
    if moment is None:
        return None
    try:
        return moment.astimezone(ZoneInfo(row["time_zone"]))
    except (OSError, ValueError, LookupError):
        return moment.astimezone(UTC)


def use_zone(connection: Connection[Any], time_zone: str | None, *moments: str | None) -> None:
    """Let moments that name no zone be of *time_zone*, until the end of the transaction."""
    if any(moments):
        connection.execute("select set_config('TimeZone', %s, true)", [time_zone or "UTC"])


WANTED = """
    select rota.next_run(
        %(schedule)s, 'UTC',
        ((%(run_at)s::timestamptz - interval '1 microsecond') at time zone %(zone)s)
            at time zone 'UTC'
    ) at time zone 'UTC' as wanted
    """


def print_runs(
    connection: Connection[Any], runs: Sequence[UpcomingRun], schedule: str, time_zone: str
) -> None:
    """Print the runs of *schedule* in the zone and in UTC, with a note for changed clocks."""
    row = connection.execute("select rota.now() as now").fetchone() or {}
    has_seconds = any(run.local_time.second or run.local_time.microsecond for run in runs)
    shape = "%Y-%m-%d %H:%M:%S" if has_seconds else "%Y-%m-%d %H:%M"
    table = [[time_zone, "" if time_zone == "UTC" else "UTC", "from now", ""]]
    for run in runs:
        local = f"{run.local_time:%a {shape}} {offset(run.utc_offset)}"
        utc = "" if time_zone == "UTC" else f"{run.local_time - run.utc_offset:{shape}}"
        mark = _mark(connection, run, schedule, time_zone)
        table.append([local, utc, _distance(row["now"], run.run_at), mark])
    if not runs:
        print("(none planned)")
        return

    head, first, *others = aligned(table)
    print(head, first, sep="\n")
    for (before, run), line in zip(pairwise(runs), others, strict=True):
        if before.utc_offset != run.utc_offset:
            print(_change(before.utc_offset, run.utc_offset))
        print(line)


def offset(value: timedelta) -> str:
    """Return an offset from UTC as in +02:00."""
    minutes, seconds = divmod(abs(round(value.total_seconds())), 60)
    sign = "-" if value < timedelta(0) else "+"
    text = f"{sign}{minutes // 60:02}:{minutes % 60:02}"
    return f"{text}:{seconds:02}" if seconds else text


def _change(before: timedelta, after: timedelta) -> str:
    direction = "forward" if after > before else "back"
    return f"--- clocks go {direction}, from {offset(before)} to {offset(after)}"


def _mark(connection: Connection[Any], run: UpcomingRun, schedule: str, time_zone: str) -> str:
    shown = _clock(run.local_time)
    if run.clock_change == "moved":
        arguments = {"schedule": schedule, "run_at": run.run_at, "zone": time_zone}
        row = connection.execute(WANTED, arguments).fetchone() or {}
        wanted = _clock(row["wanted"])
        return f"clocks go forward: {wanted} does not exist, runs at {shown}"
    return f"{run.clock_change} of two {shown}" if run.clock_change else ""


def _clock(local_time: datetime) -> str:
    return f"{local_time:%H:%M:%S}".removesuffix(":00")


def _distance(now: datetime, moment: datetime) -> str:
    """Return a distance in time by its two largest units."""
    # Of two times of one zone Python subtracts what the wall clocks show.
    distance = moment.astimezone(UTC) - now.astimezone(UTC)
    text = span(distance)
    if not text:
        return "now"
    return f"{text} ago" if distance < timedelta(0) else f"in {text}"
