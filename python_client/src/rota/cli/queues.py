"""Commands about queues and limits: pause, resume, limits."""

from __future__ import annotations

import argparse

from .output import UsageError, acting, connected, print_json, print_list, short, text_of


def pause(arguments: argparse.Namespace) -> None:
    """Let no more jobs of a queue, of a type, or none at all, be claimed."""
    what = _what(arguments)
    with connected(arguments) as connection, acting(connection) as client:
        ((until,),) = (
            row.values()
            for row in connection.execute(
                "select coalesce(%s::timestamptz, rota.now() + %s::interval)",
                [arguments.until, arguments.length],
            )
        )
        if arguments.job_type:
            client.pause_type(arguments.job_type, arguments.queue, arguments.reason, until)
        elif arguments.queue:
            client.pause_queue(arguments.queue, arguments.reason, until)
        else:
            client.pause_all(arguments.reason, until)
    if arguments.json:
        print_json({**_named(arguments), "is_paused": True, "until": until})
        return
    how_long = f", until {short(until)}" if until else ""
    print(f"{what} is paused: running jobs go on, no more are claimed{how_long}")


def resume(arguments: argparse.Namespace) -> None:
    """Let jobs be claimed again."""
    what = _what(arguments)
    with connected(arguments) as connection, acting(connection) as client:
        if arguments.job_type:
            client.resume_type(arguments.job_type, arguments.queue)
        elif arguments.queue:
            client.resume_queue(arguments.queue)
        else:
            client.resume_all()
    if arguments.json:
        print_json({**_named(arguments), "is_paused": False})
    else:
        print(f"{what} is open: its jobs are claimed")


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
    with connected(arguments) as connection:
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
                "rate": f"{row['max_starts']} in {text_of(row['per'])}"
                if row["max_starts"]
                else "",
                "next start": short(row["next_start_at"]),
            }
            for row in rows
        ]
    )
