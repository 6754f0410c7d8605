"""The command ``rota status``: what is there, and why a job may be waiting."""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import LiteralString

from .._version import __version__
from ..client.sync_client import Client
from .output import connected, print_json, print_record, print_table, span

PARTS: dict[str, LiteralString] = {
    "queues": "select * from rota.queue_stats order by queue",
    "paused": """
        select queue, paused_by, paused_at, pause_reason
        from rota.queues
        where is_paused
        order by queue
        """,
    # A worker claims only the types that it has handlers for: its log names them at its start.
    "due_jobs": """
        select
            j.queue, j.job_type, count(*) as due, rota.now() - min(j.run_at) as oldest_waits,
            (
                select count(*)
                from rota.workers as w
                where j.queue = any (w.queues)
                  -- One that is idle reports every five.
                  and w.last_seen_at > rota.now() - interval '6 minutes'
            ) as workers_of_queue
        from rota.job_runs as j
        where j.status in ('queued', 'failed')
          and j.run_at <= rota.now()
        group by j.queue, j.job_type
        order by min(j.run_at)
        """,
    "ticker": "select * from rota.ticker_health",
    "disabled_schedules": """
        select name, disabled_at, last_error
        from rota.job_definitions
        where not is_enabled and disabled_by is null
        order by name
        """,
    "workers": """
        select
            worker, host, pid, version, queues, started_at, last_seen_at,
            rota.now() - last_seen_at as silent_for
        from rota.workers
        order by worker
        """,
}

TITLES = {"disabled_schedules": "schedules disabled by an error"}
MAX_LAG = timedelta(minutes=6)
HELP = "start a worker, rota tick --loop or rota.start_ticker()"


def status(arguments: argparse.Namespace) -> None:
    """Show version, queues, what is paused, what is due, the ticker and workers."""
    with connected(arguments) as connection:
        overview = {
            "database": connection.info.dbname,
            "version": Client(connection).version(),
            "client": __version__,
        }
        parts = {name: connection.execute(part).fetchall() for name, part in PARTS.items()}
    if arguments.json:
        print_json({**overview, **parts})
        return
    print_record(overview)
    for name, rows in parts.items():
        if rows or name not in ("paused", "disabled_schedules"):
            print(f"\n{TITLES.get(name, name.replace('_', ' '))}")
            print_table(rows)
        if name == "ticker" and rows[0]["last_tick_at"] is None:
            print(f"nobody has ticked yet: {HELP}")
        elif name == "ticker" and rows[0]["lag"] > MAX_LAG:
            print(f"nobody has ticked for {span(rows[0]['lag'])}: {HELP}")
