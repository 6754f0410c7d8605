"""The command ``rota effects``: what may have happened outside of the database, or not."""

from __future__ import annotations

import argparse

from .output import connected, print_json, print_table

# While its lease runs, the job that has recorded an effect is still at it.
UNKNOWN = """
    select e.scope, e.key, e.recorded_at, e.job_id, r.job_type, r.status
    from rota.effects as e
    left join rota.job_runs as r on r.id = e.job_id
    where e.completed_at is null
      and not exists (
          select from rota.jobs as j
          where j.id = e.job_id
            and j.lease_token = e.lease_token
            and j.status = 'running'
      )
    order by e.recorded_at desc
    limit %s
    """


def effects(arguments: argparse.Namespace) -> None:
    """List the effects of which nobody knows whether they happened, the newest first."""
    with connected(arguments) as connection:
        rows = connection.execute(UNKNOWN, [arguments.limit]).fetchall()
    (print_json if arguments.json else print_table)(rows)
