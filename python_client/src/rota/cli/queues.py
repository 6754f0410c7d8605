"""Commands about queues and limits: pause, resume, limits."""

from __future__ import annotations

import argparse

from .output import acting, connected, print_json, print_list, short, text_of


def pause(arguments: argparse.Namespace) -> None:
    """Let no more jobs of a queue be claimed."""
    with connected(arguments) as connection, acting(connection) as client:
        client.pause_queue(arguments.queue, reason=arguments.reason)
    _print(arguments, is_paused=True)


def resume(arguments: argparse.Namespace) -> None:
    """Let the jobs of a queue be claimed again."""
    with connected(arguments) as connection, acting(connection) as client:
        client.resume_queue(arguments.queue)
    _print(arguments, is_paused=False)


def _print(arguments: argparse.Namespace, *, is_paused: bool) -> None:
    if arguments.json:
        print_json({"queue": arguments.queue, "is_paused": is_paused})
    elif is_paused:
        print(f"queue {arguments.queue} is paused: running jobs go on, no more are claimed")
    else:
        print(f"queue {arguments.queue} is open: its jobs are claimed")


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
