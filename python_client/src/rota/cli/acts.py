"""Commands that change jobs: retry, cancel, discard, reschedule, priority, move, purge, erase.

One job, named by its id, is changed by the function for one.  Many are counted first, which is
shown and asked about, and then changed in short calls, so that workers are not delayed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any, LiteralString

import psycopg

from ..client.connecting import one_line
from ..rows import ActReport
from .filters import chosen_filter, pair, parse_json
from .output import (
    CommandError,
    UnknownOutcomeError,
    UsageError,
    acting,
    asking,
    confirm,
    connected,
    print_findings,
    print_json,
    print_list,
    short,
)

DONE = {
    "retry": "put back to run now",
    "cancel": "cancelled, or asked to stop if running",
    "discard": "acknowledged: still dead, but without alerts",
    "reschedule": "moved to another time",
    "set_priority": "given the priority",
    "move": "moved to the queue",
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
    if getattr(arguments, "with_dependants", False):
        raise UsageError("--with-dependants is for one job, named by its id")
    if not ids and not chosen:
        raise UsageError("name the jobs: ids, a filter such as --queue mail, or --all")
    given = _arguments(arguments)
    wanted = chosen | ({"ids": ids} if ids else {})
    with connected(arguments) as connection:
        found, samples, conflicts = _count(connection, what, wanted, given, arguments.limit)
        if arguments.dry_run:
            return _tell_count(arguments, found, samples, conflicts)
        # Who names jobs by their ids has counted them.
        if found and not arguments.yes and (chosen or what in ("purge", "erase")):
            _confirm(what, found)
        changed, conflicts = 0, []
        done = "put back, due as before" if "keep_run_at" in given else DONE[what]
        try:
            for report in _calls(connection, what, wanted, given, arguments.limit):
                changed += report.changed
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
    if arguments.json:
        print_json({"act": what, "matched": found, "changed": changed, "conflicts": conflicts})
    else:
        print(f"{_jobs(changed)} {done}" if changed else "no job was changed")
        _tell_conflicts(conflicts)
    return 1 if conflicts else 0


def _single(arguments: argparse.Namespace, job_id: int) -> int:
    arguments.job_id = job_id  # for hints, and to look who has locked it
    changes = _arguments(arguments)
    dependants = 0
    if getattr(arguments, "with_dependants", False) and changes.keys() - {"force"}:
        raise UsageError("--with-dependants runs the job unchanged: retry it first")
    with connected(arguments) as connection, acting(connection) as client:
        if arguments.act == "cancel":
            status = client.cancel_job(job_id, reason=arguments.reason)
        elif changes.keys() - {"force"}:
            report = client.act_on_jobs("retry", {"ids": [job_id]}, changes)
            if report.conflicts:
                raise CommandError(f"job {job_id}: {report.conflicts[0]['reason']}")
            status = "queued"
        elif arguments.with_dependants:
            dependants = client.retry_with_dependants(job_id, force=arguments.force) - 1
            status = "to run again"
        else:
            status = client.retry_job(job_id, force=arguments.force)
    if arguments.json:
        print_json({"job_id": job_id, "status": status, "dependants": dependants})
    elif status == "running":
        print(f"job {job_id} is running: its worker is told now, or by its next heartbeat")
    else:
        more = f", and {_jobs(dependants)} cancelled because of it" if dependants else ""
        print(f"job {job_id} is {status}{more}")
    return 0


def _arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the act is given."""
    what, given = arguments.act, dict[str, Any]()
    if what == "retry":
        if arguments.set:
            given["merge"] = {
                name: _value(text)
                for name, text in (pair(text, "--set") for text in arguments.set)
            }
        if arguments.new_payload is not None:
            given["payload"] = parse_json(arguments.new_payload)
        if arguments.max_attempts is not None:
            given["max_attempts"] = arguments.max_attempts
        if arguments.force:
            given["force"] = True
        if arguments.keep_run_at:
            given["keep_run_at"] = True
    elif what == "cancel" and arguments.reason:
        given["reason"] = arguments.reason
    elif what == "reschedule":
        given = {"run_at": arguments.run_at} if arguments.run_at else {}
        given |= {"delay": arguments.delay} if arguments.delay else {}
    elif what == "set_priority":
        given["priority"] = arguments.to
    elif what == "move":
        given["queue"] = arguments.to
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


def _count(
    connection: psycopg.Connection[Any],
    what: str,
    wanted: dict[str, Any],
    given: dict[str, Any],
    limit: int | None,
) -> tuple[int, list[dict[str, Any]], list[dict[str, Any]]]:
    found, samples, conflicts = 0, list[dict[str, Any]](), list[dict[str, Any]]()
    is_first = True
    for report in _calls(connection, what, wanted, given, limit, dry_run=True):
        found += report.matched
        is_last = report.next_after_id is None
        if sys.stderr.isatty() and not (is_first and is_last):
            upto = "in all" if is_last else f"up to id {report.next_after_id}"
            end = "\n" if is_last else ""
            print(f"\r{f'{found} found {upto}':<40}", end=end, file=sys.stderr, flush=True)
        is_first = False
        samples += report.samples[: 10 - len(samples)]
        conflicts += report.conflicts
    return found if limit is None else min(found, limit), samples, conflicts


def _jobs(number: int) -> str:
    return f"{number} job{'' if number == 1 else 's'}"


def _confirm(what: str, found: int) -> None:
    what = "set the priority of" if what == "set_priority" else what
    confirm(f"{what} {_jobs(found)}")


def _tell_count(
    arguments: argparse.Namespace,
    found: int,
    samples: list[dict[str, Any]],
    conflicts: list[dict[str, Any]],
) -> int:
    if arguments.json:
        print_json(
            {
                "act": arguments.act,
                "matched": found,
                "samples": samples,
                "conflicts": conflicts,
            }
        )
        return 0
    # Of an id that is missing there is no job that was counted.
    refused = {conflict["job_id"] for conflict in conflicts if not conflict.get("is_missing")}
    samples = [sample for sample in samples if sample["job_id"] not in refused]
    print(f"{_jobs(found - len(refused))} would be changed{', such as' if samples else ''}")
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
    print_list(
        [
            {
                "when": short(last["acted_at"]),
                "who": last["actor"] or last["role"],
                "act": last["act"],
                "jobs": ""
                if last["jobs"] is None
                else sum(row["jobs"] for row in [last, *steps]),
                "which": json.dumps(last["filter"])
                if last["filter"]
                else " ".join(map(str, last["job_ids"] or [])),
                "after": json.dumps(last["after"]) if last["after"] else "",
            }
            for last, *steps in acts
        ]
    )


def _act_of(row: dict[str, Any]) -> tuple[Any, ...]:
    if row["filter"] is None or row["jobs"] is None:
        return (row["id"],)
    return (row["role"], row["actor"], row["act"], row["filter"], row["after"])
