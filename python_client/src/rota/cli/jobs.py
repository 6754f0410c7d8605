"""Commands about jobs: enqueue, list, show, explain; retry, cancel, move and other acts; audit.

The same words say which jobs a command lists or changes: a filter as `act_on_jobs()` takes it.
One job, named by its id, is changed by the function for one.  Many are counted first, which is
shown and asked about, and then changed in short calls, so that workers are not delayed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from functools import partial
from itertools import groupby, islice
from typing import Any, LiteralString

import psycopg
from psycopg import Connection, sql

from ..client.connecting import one_line
from ..client.listing import FEW, beginning, grouped, listed
from ..client.statement import UNSET
from ..client.sync_client import Client
from ..exceptions import JobNotFoundError
from ..rows import ActReport
from .output import (
    CommandError,
    UnknownOutcomeError,
    UsageError,
    acting,
    asking,
    changing,
    confirm,
    connected,
    given_to,
    print_findings,
    print_json,
    print_list,
    print_record,
    short,
    shortened,
    tell,
    tell_of_more,
)

STATUSES = ("blocked", "queued", "running", "failed", "succeeded", "dead", "cancelled")
KEYS = (
    "queue", "status", "job_type", "error", "error_text", "error_type", "cancel_reason",
    "worker", "idempotency_key", "ordering_key", "limit_key", "definition", "pipeline",
    "stage", "older_than", "newer_than",
)  # fmt: skip
"""The options that are called as in a filter of act_on_jobs()."""


def chosen_filter(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what was chosen, as a filter of act_on_jobs()."""
    chosen = {key: value for key in KEYS if (value := getattr(arguments, key)) is not None}
    if getattr(arguments, "all", False):
        chosen["all"] = True
    for name in ("due", "discarded"):
        if told := getattr(arguments, name):
            chosen[f"is_{name}"] = told == "yes"
    if arguments.payload is not None:
        chosen["payload"] = parse_json(arguments.payload)
    if arguments.header:
        chosen["headers"] = dict(pair(text, "--header") for text in arguments.header)
    return chosen


def parse_json(text: str, what: str = "payload") -> Any:
    """Return what a JSON text says."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"the {what} is not JSON: {error}") from None
    except RecursionError:
        raise UsageError(f"the {what} is nested too deeply") from None


def pair(text: str, option: str) -> tuple[str, str]:
    """Return name and value of a NAME=VALUE."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise UsageError(f"{option} is NAME=VALUE, got {text}")
    return name, value


def enqueue(arguments: argparse.Namespace) -> None:
    """Add one job and print its id."""
    if arguments.unique_for and not arguments.idempotency_key:
        raise UsageError("--unique-for needs a --key")
    job = given_to(Client.enqueue, arguments) | {"payload": parse_json(arguments.payload)}
    with connected(arguments) as connection, acting(connection) as client:
        row = client.enqueue(**job)
    text = row.job_id if row.is_new else f"{row.job_id} (already exists)"
    tell(arguments, {"job_id": row.job_id, "is_new": row.is_new}, text)


PATIENCE: LiteralString = "set local statement_timeout = '10s'"
"""A rare job among millions is looked for, but not while a database has other work."""


def jobs(arguments: argparse.Namespace) -> None:
    """List jobs, the newest first."""
    chosen = chosen_filter(arguments)
    if arguments.before is not None:
        chosen["before"] = arguments.before
    values = {
        name: [json.dumps(value, ensure_ascii=False)]
        if name in ("payload", "headers")
        else value
        for name, value in chosen.items()
    }
    with asking(arguments) as connection:
        connection.execute(PATIENCE)
        try:
            few = connection.execute(FEW, values).fetchone() if "queue" in chosen else None
            question = listed(chosen, are_few=bool(few and few["are_few"]))
            limited = {**values, "limit": arguments.limit}
            rows = connection.execute(question, limited).fetchall()
        except psycopg.errors.QueryCanceled:
            raise CommandError(
                "searched for 10 seconds and did not find enough",
                "Narrow the search with --limit, --before ID, or --queue",
            ) from None
    if arguments.json:
        print_json(rows)
        return
    zone = f"{_moment(rows[0]):%Z}" if rows else ""
    print_list([_shown(row, zone) for row in rows])
    if len(rows) == arguments.limit:
        print(f"for more: --before {rows[-1]['id']}")


def _moment(row: dict[str, Any]) -> datetime:
    moment: datetime = row["finished_at"] or row["run_at"]
    return moment


def _shown(row: dict[str, Any], zone: str) -> dict[str, Any]:
    error = ": ".join(filter(None, (row["error_type"], row["last_error"])))
    if row["status"] == "cancelled":
        error = row["cancel_reason"] or ""
    return {
        "id": row["id"],
        "status": row["status"],
        "queue": row["queue"],
        "job_type": row["job_type"],
        "tries": f"{row['attempts']}/{row['max_attempts']}",
        # The other half of the year has another zone.
        f"when {zone}": short(_moment(row)).removesuffix(f" {zone}"),
        "error": error if row["status"] != "succeeded" else "",
    }


STORY: dict[str, LiteralString] = {
    "errors": """
        select attempt, started_at, failed_at, worker, error_type, message, stack
        from {views}.job_errors where job_id = %s order by lease_token
        """,
    "depends_on": """
        select d.parent_id as job_id, r.job_type, r.queue, r.status
        from {views}.dependencies as d
        left join lateral (
            select i.job_type, i.queue, i.status from {views}.job_runs as i
            where i.id = d.parent_id limit 1
        ) as r on true
        where d.job_id = %s order by d.parent_id limit 100
        """,
    "dependants": """
        select d.job_id, r.job_type, r.queue, r.status
        from {views}.dependencies as d
        left join lateral (
            select i.job_type, i.queue, i.status from {views}.job_runs as i
            where i.id = d.job_id limit 1
        ) as r on true
        where d.parent_id = %s order by d.job_id limit 100
        """,
    "stages": """
        select stage, status, attempts, worker, queued_at, started_at, finished_at
        from {views}.stage_runs where job_id = %s order by lease_token
        """,
    "acts": """
        select acted_at, act, coalesce(actor, role) as done_by
        from {views}.audit_log where job_ids @> array[%s::bigint] order by id
        """,
}
"""What else there is to know of a job: those that it waits for have not succeeded.  A job is
looked up for each, since a join would read the whole history."""
MAX_KIN = 100
MAX_TOLD = 300
"""So much of an error is told of each attempt, for the first lines to stay on the screen."""


def job(arguments: argparse.Namespace) -> None:
    """Show a job: its state, its history and all its details."""
    job_id = arguments.job_id
    with asking(arguments) as connection:
        reasons = Client(connection).explain_job(job_id)
        views = _views(connection, job_id)
        whole = sql.SQL("select * from {views}.job_runs where id = %s").format(views=views)
        row = connection.execute(whole, [job_id]).fetchone()
        story = {
            name: connection.execute(sql.SQL(query).format(views=views), [job_id]).fetchall()
            for name, query in STORY.items()
        }
    if row is None:
        raise JobNotFoundError(f"job {job_id} not found")
    if arguments.json:
        print_json({**row, **story, "reasons": [asdict(reason) for reason in reasons]})
        return
    print(f"job {job_id}, {row['job_type']} in queue {row['queue']}, is {row['status']}\n")
    print_findings(
        [(r.reason, r.explanation, r.remedy) for r in reasons if r.reason != "attempt"]
    )
    print("\nhistory")
    for moment, what in _happened(row, story["errors"], story["stages"], story["acts"]):
        told = shortened(" ".join(what.split()), MAX_TOLD)
        print(f"{moment.isoformat(sep=' ', timespec='seconds')}  {told}")
    for name in ("depends_on", "dependants"):
        if story[name]:
            print(f"\n{name.replace('_', ' ')}")
            print_list(story[name])
            if len(story[name]) == MAX_KIN:
                print(f"the first {MAX_KIN}; all: rota.dependencies")
    print("\ndetails")
    print_record({name: value for name, value in row.items() if value is not None})
    if story["errors"] and story["errors"][-1]["stack"]:
        print("")
        for line in story["errors"][-1]["stack"].splitlines():
            print(f"  {line}")


def _views(connection: Connection[Any], job_id: int) -> sql.Identifier:
    """Return the schema with the views of a job's database, which may be behind a front."""
    (found,) = connection.execute(
        "select case when to_regclass('rota.job_runs') is not null then 'rota'"
        " else format('rota_%%s', rota.database_number_of(%s)) end as views",
        [job_id],
    ).fetchall()
    return sql.Identifier(found["views"])


def _happened(
    row: dict[str, Any],
    errors: list[dict[str, Any]],
    stages: list[dict[str, Any]],
    acts: list[dict[str, Any]],
) -> list[tuple[datetime, str]]:
    found = [(row["created_at"], "enqueued")]
    for error in errors:
        what = ": ".join(filter(None, (error["error_type"], error["message"])))
        line = " ".join(what.split())
        found += [
            (error["started_at"], f"attempt {error['attempt']} began on {error['worker']}"),
            (error["failed_at"], f"attempt {error['attempt']} failed: {line}"),
        ]
    found += [(run["finished_at"], f"stage {run['stage']} {run['status']}") for run in stages]
    found += [(act["acted_at"], f"{act['act']} by {act['done_by']}") for act in acts]
    if row["started_at"] and row["started_at"] not in [e["started_at"] for e in errors]:
        found.append((row["started_at"], f"attempt {row['attempts']} began"))
    if row["cancel_requested_at"]:
        found.append((row["cancel_requested_at"], "cancel requested"))
    if row["finished_at"]:
        found.append((row["finished_at"], row["status"]))
    return sorted(found, key=lambda entry: entry[0])


def explain(arguments: argparse.Namespace) -> None:
    """Say why a job does not run, or how it runs or ended; what decides comes first."""
    with asking(arguments) as connection:
        reasons = Client(connection).explain_job(arguments.job_id)
        whole = sql.SQL("select job_type, queue, status from {views}.job_runs where id = %s")
        views = _views(connection, arguments.job_id)
        job = connection.execute(whole.format(views=views), [arguments.job_id]).fetchone()
    if arguments.json:
        print_json([asdict(reason) for reason in reasons])
        return
    told = ", {job_type} in queue {queue}, is {status}".format(**job) if job else ""
    print(f"job {arguments.job_id}{told}\n")
    print_findings([(row.reason, row.explanation, row.remedy) for row in reasons])


GROUPS = grouped(
    f"{beginning('i.message', '200')} as start",
    "(array_agg(n.start order by n.job_id desc))[1] as last_message",
)
MAX_ERRORS = 20000
QUOTE = "'...'"


def errors(arguments: argparse.Namespace) -> None:
    """List the errors of failed attempts, those of one kind in one line, the most first."""
    values = {
        name: getattr(arguments, name) for name in ("since", "queue", "job_type", "limit")
    }
    with asking(arguments) as connection:
        rows = connection.execute(GROUPS, {**values, "max_rows": MAX_ERRORS}).fetchall()
    if arguments.json:
        print_json(rows)
        return
    print_findings(
        [
            (
                f"{row['failures']} x",
                f"{': '.join(filter(None, (row['error_type'], row['message'])))}"
                f" ({row['job_type']} in {_in_queues(row['queues'])}, {_jobs(row['jobs'])},"
                f" last {short(row['last_failed_at'])}, such as job {row['last_job_id']}"
                # Folded, a KeyError does not even tell the key.
                f"{': ' + row['last_message'] if QUOTE in row['message'] else ''})",
                None,
            )
            for row in rows
        ]
    )
    if not rows:
        print("(none)")
    tell_of_more(len(rows), arguments.limit)
    if sum(row["failures"] for row in rows) >= MAX_ERRORS:
        print(f"of the newest {MAX_ERRORS} failures")


def _in_queues(queues: list[str]) -> str:
    return f"queue {queues[0]}" if len(queues) == 1 else f"{len(queues)} queues"


UNKNOWN = "select * from rota.unknown_effects order by recorded_at desc limit %s"


def effects(arguments: argparse.Namespace) -> None:
    """List the effects that may or may not have happened, the newest first."""
    with asking(arguments) as connection:
        rows = connection.execute(UNKNOWN, [arguments.limit]).fetchall()
    if arguments.json:
        print_json(rows)
        return
    names = ("scope", "key", "job_id", "status", "job_type")
    print_list(
        [
            {name: row[name] for name in names} | {"recorded": short(row["recorded_at"])}
            for row in rows
        ],
        whole=2,  # by scope and key it is settled
    )
    tell_of_more(len(rows), arguments.limit)
    if rows:
        print("\n(once you know: rota effects settle SCOPE KEY --done, or --again)")


def settle(arguments: argparse.Namespace) -> None:
    """Say what became of one of them."""
    scope, key, result = arguments.scope, arguments.key, UNSET
    if arguments.result is not None:
        if arguments.outcome == "again":
            raise UsageError("--result goes with --done")
        result = parse_json(arguments.result, "result")
    with changing(arguments) as connection:
        job_id = Client(connection).settle_effect(scope, key, arguments.outcome, result)
        found = connection.execute(
            "select job_type, status from rota.job_runs where id = %s", [job_id]
        ).fetchone()
    job = found or {"job_type": None, "status": None}
    if arguments.json:
        said = {"scope": scope, "key": key, "outcome": arguments.outcome, "job_id": job_id}
        print_json(said | job | {"is_dry_run": arguments.dry_run})
        return
    is_done = arguments.outcome == "done"
    print(f"effect {scope} {key} is {'done' if is_done else 'due again'}")
    if not is_done and job["status"] in ("succeeded", "dead", "cancelled"):
        print(f"(job {job_id} has ended, {job['status']}; to run it: rota retry {job_id})")
    if arguments.dry_run:
        print("(dry run: nothing was done)")


DONE = {
    "retry": "put back to run now",
    "cancel": "cancelled, or asked to stop if running",
    "discard": "acknowledged: still dead, but without alerts",
    "reschedule": "moved to another time",
    "set_priority": "given priority {to}",
    "move": "moved to queue {to}",
    "purge": "deleted",
    "erase": "erased",
}
AT_ONCE = 1000
MAX_SHOWN = 20


def act(arguments: argparse.Namespace) -> int:
    """Do one thing to the jobs that ids or a filter name; return 1 if some are left."""
    what: str = arguments.act
    ids: list[int] = arguments.job_ids
    chosen = chosen_filter(arguments)
    if len(ids) == 1 and not chosen and not arguments.dry_run and what in ("retry", "cancel"):
        return _single(arguments, ids[0])
    if not ids and not chosen:
        raise UsageError("name the jobs: ids, a filter such as --queue mail, or --all")
    given = _arguments(arguments)
    wanted = chosen | ({"ids": ids} if ids else {})
    with connected(arguments) as connection:
        calls = partial(_calls, connection, what, wanted, given, arguments.limit)
        counted, at_most = _count(calls(dry_run=True), arguments.limit)
        is_cut = bool(at_most) or counted.dependants >= AT_ONCE
        more = _tell_dependants(what, counted.dependants, given, at_least=is_cut)
        untaken = _untaken(connection, arguments.to) if what == "move" else ""
        if arguments.dry_run:
            return _tell_count(arguments, counted, at_most, more + untaken)
        found = counted.matched
        # Who names jobs by their ids has counted them.
        if found and not arguments.yes and (chosen or what in ("purge", "erase")):
            verb = "set the priority of" if what == "set_priority" else what
            confirm(f"{verb} {_jobs(found)}{more}{untaken}")
        changed, dependants, is_cut = 0, 0, False
        conflicts: list[dict[str, Any]] = []
        done = "put back, due as before" if "keep_run_at" in given else DONE[what]
        done = done.format(to=getattr(arguments, "to", None))
        done += f", spread over {given['spread']}" if "spread" in given else ""
        try:
            for report in calls():
                changed += report.changed
                dependants += report.dependants
                is_cut |= report.dependants >= AT_ONCE
                conflicts += report.conflicts
                _tell_progress(
                    changed + len(conflicts), found, is_last=report.next_after_id is None
                )
        except (psycopg.OperationalError, UnknownOutcomeError) as error:
            if not changed:
                raise
            before = f"; {_jobs(changed)} {done} before"
            if isinstance(error, UnknownOutcomeError):
                raise UnknownOutcomeError(error.error, before) from error
            raise CommandError(f"{one_line(error)}{before}") from error
        first = [sample["job_id"] for sample in counted.samples]
        unasked = _unasked(connection, first) if what == "retry" and changed and first else ""
    if arguments.json:
        said = {"act": what, "matched": found, "changed": changed, "conflicts": conflicts}
        print_json(said | {"dependants": dependants})
    else:
        more = _tell_dependants(what, dependants, given, at_least=is_cut) + unasked + untaken
        print(f"{_jobs(changed)} {done}{more}" if changed else "no job was changed")
        _tell_conflicts(conflicts)
    return 1 if conflicts else 0


def _single(arguments: argparse.Namespace, job_id: int) -> int:
    arguments.job_id = job_id  # for hints, and to look who has locked it
    changes = _arguments(arguments)
    dependants, more = 0, ""
    with connected(arguments) as connection, acting(connection) as client:
        if not _is_front(connection, job_id):
            # A role may be granted this act and not the one on many that counts.
            with suppress(psycopg.errors.InsufficientPrivilege), connection.transaction():
                report = client.act_on_jobs(arguments.act, {"ids": [job_id]}, dry_run=True)
                dependants = report.dependants
        if arguments.act == "cancel":
            status = client.cancel_job(job_id, reason=arguments.reason)
        elif changes.keys() - {"force", "with_dependants"}:
            report = client.act_on_jobs("retry", {"ids": [job_id]}, changes)
            if report.conflicts:
                raise CommandError(f"job {job_id}: {report.conflicts[0]['reason']}")
            status = "queued"
        elif arguments.with_dependants:
            dependants = client.retry_with_dependants(job_id, force=arguments.force) - 1
            status = "to run again"
        else:
            status = client.retry_job(job_id, force=arguments.force)
        is_cut = dependants >= AT_ONCE
        more = _tell_dependants(arguments.act, dependants, changes, "it", at_least=is_cut)
        if arguments.act == "retry":
            more += _unasked(connection, [job_id])
    if status == "running":
        more = f": its worker is told now, or by its next heartbeat{more}"
    said = {"job_id": job_id, "status": status, "dependants": dependants}
    tell(arguments, said, f"job {job_id} is {status}{more}")
    return 0


def _is_front(connection: psycopg.Connection[Any], job_id: int) -> bool:
    return _views(connection, job_id) != sql.Identifier("rota")


def _unasked(connection: psycopg.Connection[Any], job_ids: list[int]) -> str:
    """Say so if keys of jobs may be live in a database that only a front would ask."""
    query = """
        select from rota.job_runs
        where id = any(%s) and idempotency_key is not null
          and rota.database_number() is not null
        limit 1
        """
    if (
        _is_front(connection, job_ids[0])
        or connection.execute(query, [job_ids]).fetchone() is None
    ):
        return ""
    whose = "its key" if len(job_ids) == 1 else "their keys"
    return f"; {whose} may be live in another database: none was asked"


def _untaken(connection: psycopg.Connection[Any], queue: str) -> str:
    """Say so if nobody takes the jobs of a queue, whose name may be mistyped."""
    query = "select from rota.worker_health as w where w.is_live and %s = any(w.queues) limit 1"
    is_taken = connection.execute(query, [queue]).fetchone() is not None
    return "" if is_taken else f"; no live worker takes queue {queue}"


GIVEN = (
    *("max_attempts", "force", "keep_run_at", "spread", "with_dependants", "reason"),
    *("run_at", "delay"),
)
"""The options that are called as in the arguments of act_on_jobs()."""


def _arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the act is given."""
    given = {name: value for name in GIVEN if (value := getattr(arguments, name, None))}
    if arguments.act in ("set_priority", "move"):
        given["priority" if arguments.act == "set_priority" else "queue"] = arguments.to
    if arguments.act == "retry" and arguments.set:
        pairs = (pair(text, "--set") for text in arguments.set)
        given["merge"] = {name: _value(text) for name, text in pairs}
    if arguments.act == "retry" and arguments.new_payload is not None:
        given["payload"] = parse_json(arguments.new_payload)
    return given


def _value(text: str) -> Any:
    """Return what a text says as JSON, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        raise UsageError("--set: the value is nested too deeply") from None


def _calls(
    connection: psycopg.Connection[Any],
    what: str,
    wanted: dict[str, Any],
    given: dict[str, Any],
    limit: int | None,
    *,
    dry_run: bool = False,
) -> Iterator[ActReport]:
    """Call until there are no more, each time in a transaction of its own."""
    after_id: int | None = 0
    left = limit
    while after_id is not None and left != 0:
        with acting(connection) as client:
            report = client.act_on_jobs(
                what,
                wanted,
                given,
                max_jobs=AT_ONCE if left is None else min(AT_ONCE, left),
                after_id=after_id,
                dry_run=dry_run,
            )
        after_id = report.next_after_id
        left = None if left is None else max(0, left - report.matched)
        yield report


def _count(reports: Iterator[ActReport], limit: int | None) -> tuple[ActReport, str]:
    """Return the sum of what calls have counted, and whether that is a limit."""
    found, dependants = 0, 0
    samples, conflicts = list[dict[str, Any]](), list[dict[str, Any]]()
    is_first, at_most = True, ""
    for report in reports:
        found += report.matched
        is_last = report.next_after_id is None
        if sys.stderr.isatty() and not (is_first and is_last):
            upto = "in all" if is_last else f"up to id {report.next_after_id}"
            end = "\n" if is_last else ""
            print(f"\r{f'{found} found {upto}':<40}", end=end, file=sys.stderr, flush=True)
        is_first = False
        if min(report.matched, limit or found) > AT_ONCE:
            at_most = "at most "  # of a call that counts, the others are not looked at
        samples += report.samples[: 10 - len(samples)]
        conflicts += report.conflicts
        dependants += report.dependants
    total = ActReport(
        matched=found if limit is None else min(found, limit),
        changed=0,
        conflicts=conflicts,
        samples=samples,
        next_after_id=None,
        dependants=dependants,
    )
    return total, at_most


def _tell_dependants(
    act: str, number: int, given: dict[str, Any], whom: str = "them", *, at_least: bool = False
) -> str:
    """Return what becomes of the jobs that wait for those of an act, or were cancelled so."""
    if not number:
        return ""
    so_many = f"{'at least ' if at_least else ''}{_jobs(number)}"
    is_one = number == 1
    if act != "retry":
        is_are, wait = ("is", "waits") if is_one else ("are", "wait")
        return f"; {so_many} that {wait} for {whom} {is_are} cancelled with {whom}"
    becomes = f"stay{'s' if is_one else ''} so (--with-dependants restores these, too)"
    if "with_dependants" in given:
        becomes = f"come{'s' if is_one else ''} back, too"
    return f"; {so_many} cancelled because of {whom} {becomes}"


def _jobs(number: int) -> str:
    return f"{number} job{'' if number == 1 else 's'}"


def _tell_count(
    arguments: argparse.Namespace, counted: ActReport, at_most: str, more: str
) -> int:
    conflicts = counted.conflicts
    if arguments.json:
        said = {"act": arguments.act, "matched": counted.matched, "samples": counted.samples}
        said |= {"conflicts": conflicts, "has_all_conflicts": not at_most}
        print_json(said | {"dependants": counted.dependants})
        return 0
    # Of an id that is missing there is no job that was counted.
    refused = {conflict["job_id"] for conflict in conflicts if not conflict.get("is_missing")}
    samples = [sample for sample in counted.samples if sample["job_id"] not in refused]
    such_as = ", such as" if samples else ""
    print(f"{at_most}{_jobs(counted.matched - len(refused))} would be changed{more}{such_as}")
    if samples:
        names = ("job_id", "status", "queue", "job_type", "last_error")
        print_list([{name: sample[name] for name in names} for sample in samples])
    _tell_conflicts(conflicts)
    return 0


def _tell_progress(done: int, found: int, *, is_last: bool) -> None:
    """Say on a terminal's stderr how far it is."""
    if not sys.stderr.isatty():
        return
    part = min(1.0, done / found) if found else 1.0
    bar = "#" * round(part * 30)
    print(f"\r[{bar:<30}] {done} of {found}", end="\n" if is_last else "", file=sys.stderr)


def _tell_conflicts(conflicts: list[dict[str, Any]]) -> None:
    if not conflicts:
        return
    print(f"{_jobs(len(conflicts))} could not be changed:")
    reasons = Counter(conflict["reason"] for conflict in conflicts)
    examples = {conflict["reason"]: conflict["job_id"] for conflict in reversed(conflicts)}
    holders = {conflict["reason"]: conflict.get("pid") for conflict in conflicts}
    print_findings(
        [
            (
                _jobs(count),
                f"such as job {examples[reason]}: {reason}",
                f"select pg_terminate_backend({pid});" if (pid := holders[reason]) else None,
            )
            for reason, count in reasons.most_common(MAX_SHOWN)
        ]
    )
    if len(reasons) > MAX_SHOWN:
        print(f"and {len(reasons) - MAX_SHOWN} more reasons: see them all with --json")


LOG: LiteralString = """
    select id, acted_at, role, actor, act, filter, jobs, before, after,
        case when %(all_ids)s then job_ids else job_ids[1:5] end as job_ids
    from rota.audit_log
    where (%(job_id)s::bigint is null or job_ids @> array[%(job_id)s::bigint])
      and (%(act)s::text is null or act = %(act)s)
      and (%(who)s::text is null or %(who)s in (role, actor))
      and (%(since)s::text is null or acted_at > rota.now() - %(since)s::interval)
    order by acted_at desc, id desc limit %(limit)s
    """


def audit(arguments: argparse.Namespace) -> None:
    """List who did what, the newest first."""
    values = {
        "job_id": arguments.job,
        "act": arguments.act,
        "who": arguments.by,
        "since": arguments.since,
        "limit": arguments.limit if arguments.json else None,
        "all_ids": arguments.json,
    }
    with asking(arguments) as connection, connection.cursor("acts") as rows:
        rows.execute(LOG, values, binary=True)
        if arguments.json:
            print_json(rows.fetchall())
            return
        # A command acts on a thousand jobs at a time.
        steps_of = islice(groupby(rows, _act_of), arguments.limit)
        acts = [list(steps) for _, steps in steps_of]
    # Whole, since a filter and a reason are what an undo needs.
    print_findings(
        [(short(last["acted_at"]), _told(last, steps), None) for last, *steps in acts]
    )
    if not acts:
        print("(none)")
    tell_of_more(len(acts), arguments.limit)


def _told(last: dict[str, Any], steps: list[dict[str, Any]]) -> str:
    """Return who did what to which jobs, and what of them it changed."""
    text = f"{last['act']} by {last['actor'] or last['role']}"
    if last["jobs"] is not None:
        text += f", {_jobs(sum(row['jobs'] for row in [last, *steps]))}"
    which = json.dumps(last["filter"], ensure_ascii=False) if last["filter"] else ""
    which = which or " ".join(map(str, last["job_ids"] or []))
    set_to = {name: value for name, value in (last["after"] or {}).items() if value is not None}
    after = json.dumps(set_to, ensure_ascii=False) if set_to else ""
    after = shortened(after, 300)  # the whole of a schedule, for one
    return ": ".join(filter(None, [text, " -> ".join(filter(None, [which, after]))]))


def _act_of(row: dict[str, Any]) -> tuple[Any, ...]:
    if row["filter"] is None or row["jobs"] is None:
        return (row["id"],)
    return (row["role"], row["actor"], row["act"], row["filter"], row["after"])
