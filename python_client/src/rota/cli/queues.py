"""Commands about queues and limits: pause, resume, limits."""

from __future__ import annotations

import argparse
import sys
from typing import LiteralString

from ..client.sync_client import Client
from ..client.values import span
from .output import (
    UsageError,
    asking,
    changing,
    confirm,
    print_json,
    print_list,
    short,
    tell,
    tell_of_more,
    text_of,
)


def pause(arguments: argparse.Namespace) -> None:
    """Let no more jobs of a queue, of a type, or none at all, be claimed."""
    what = _what(arguments)
    jobs = _confirmed(arguments, f"pause {what}")
    with changing(arguments) as connection:
        client = Client(connection)
        ((until,),) = (
            row.values()
            for row in connection.execute(
                "select coalesce(%s::timestamptz, rota.now() + %s::interval)",
                [arguments.until, arguments.length],
            )
        )
        if until and not 1 < until.year < 9999:  # what was read as the nearest time
            raise UsageError(f"--{'until' if arguments.until else 'for'}: time out of range")
        if arguments.job_type:
            client.pause_type(arguments.job_type, arguments.queue, arguments.reason, until)
        elif arguments.queue:
            client.pause_queue(arguments.queue, arguments.reason, until)
        else:
            client.pause_all(arguments.reason, until)
    if arguments.dry_run:
        _tell_dry_run(arguments, f"pause {what}", jobs)
        return
    how_long = f", until {short(until)}" if until else ""
    text = f"{what} is paused: running jobs continue, no more are claimed{how_long}"
    tell(arguments, {**_named(arguments), "is_paused": True, "until": until}, text)


def resume(arguments: argparse.Namespace) -> None:
    """Let jobs be claimed again."""
    what = _what(arguments)
    jobs = _confirmed(arguments, f"resume {what}")
    with changing(arguments) as connection:
        client = Client(connection)
        if arguments.job_type:
            was_paused = client.resume_type(arguments.job_type, arguments.queue)
        elif arguments.queue:
            was_paused = client.resume_queue(arguments.queue)
        else:
            was_paused = client.resume_all()
        still = [row["pause_name"] for row in connection.execute(STILL, vars(arguments))]
    if arguments.dry_run:
        _tell_dry_run(arguments, f"resume {what}", jobs)
        return
    which = "its jobs" if arguments.job_type or arguments.queue else "jobs"
    after = f"; still paused: {', '.join(still)}" if still else f": workers claim {which}"
    told = {"still_paused": still} if still else {}
    said = {**_named(arguments), "was_paused": was_paused, "is_paused": False, **told}
    tell(arguments, said, f"{what} {'is resumed' if was_paused else 'was not paused'}{after}")


STILL: LiteralString = """
    select p.pause_name
    from rota.pauses as p
    where (p.until is null or p.until > rota.now())
      and (p.queue is null or %(queue)s::text is null or p.queue = %(queue)s)
      and (p.job_type is null or %(job_type)s::text is null or p.job_type = %(job_type)s)
    order by p.queue is not null, p.job_type is not null, p.pause_name
    limit 10
    """


COUNTS: LiteralString = """
    select coalesce(sum(j.jobs) filter (where j.is_due), 0)::bigint as due,
        coalesce(sum(j.jobs) filter (where not j.is_due), 0)::bigint as later
    from rota.job_counts() as j
    where j.status in ('queued', 'failed')
      and (%(queue)s::text is null or j.queue = %(queue)s)
      and (%(job_type)s::text is null or j.job_type = %(job_type)s)
    """


def _confirmed(arguments: argparse.Namespace, what: str) -> dict[str, int]:
    """Count the jobs that it is about, if anybody wants to know, and ask whether to do it.

    A dry run does it, and takes it back, so that it tells what would be refused.
    """
    is_asked = not (arguments.yes or arguments.dry_run) and (
        arguments.all or sys.stdin.isatty()
    )
    if not (arguments.dry_run or is_asked):
        return {}
    with asking(arguments) as connection:
        jobs: dict[str, int] = connection.execute(COUNTS, vars(arguments)).fetchall()[0]
    if is_asked:
        confirm(f"{what}, with {_words(jobs)}")
    return jobs


def _tell_dry_run(arguments: argparse.Namespace, what: str, jobs: dict[str, int]) -> None:
    text = f"this would {what}, with {_words(jobs)} (dry run: nothing was done)"
    tell(arguments, {**_named(arguments), **jobs, "is_dry_run": True}, text)


def _words(jobs: dict[str, int]) -> str:
    return f"{jobs['due']} due jobs and {jobs['later']} for later"


def _what(arguments: argparse.Namespace) -> str:
    """Return what is meant; all is never meant by saying nothing."""
    if arguments.all == bool(arguments.queue or arguments.job_type):
        raise UsageError("name a queue, a job type with --type, or --all")
    if arguments.job_type:
        where = f" in queue {arguments.queue}" if arguments.queue else ""
        return f"type {arguments.job_type}{where}"
    return f"queue {arguments.queue}" if arguments.queue else "everything"


def _named(arguments: argparse.Namespace) -> dict[str, str]:
    names = {"queue": arguments.queue, "job_type": arguments.job_type}
    return {name: value for name, value in names.items() if value}


def limits(arguments: argparse.Namespace) -> None:
    """List the limits in use, those first that most jobs wait for."""
    with asking(arguments) as connection:
        rows = connection.execute(
            "select * from rota.limit_stats order by waiting desc, limit_name limit %s",
            [arguments.limit],
        ).fetchall()
    if arguments.json:
        print_json(rows)
        return
    print_list(
        [
            {
                "limit": row["limit_name"],
                "running": f"{row['running']}/{text_of(row['max_running']) or '-'}",
                "waiting": row["waiting"],
                "rate": f"{row['max_starts']} in {span(row['per']) or text_of(row['per'])}"
                if row["max_starts"]
                else "",
                "next start": short(row["next_start_at"]) if row["waiting"] else "",
            }
            for row in rows
        ]
    )
    tell_of_more(len(rows), arguments.limit)
