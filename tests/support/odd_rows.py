"""Rows with values that only a hand can have written, each beside one as it should be."""

from __future__ import annotations

from typing import Any

import psycopg

import rota

MOMENTS = ["infinity", "-infinity", "4713-01-01 BC", "294276-12-31"]
"""Times that Python cannot hold."""


def add_odd_and_good(db: psycopg.Connection[Any], moment: str) -> int:
    """Add a row of each kind of the names odd and good; return the id of a waiting good job."""
    client = rota.Client(db)
    for name in ("odd", "good"):
        waiting = client.enqueue(name, queue=name).job_id
        client.enqueue(name, queue="busy")
        client.claim_jobs(name, ["busy"])
        client.report_worker(name, host="h", pid=1, version="9", queues=[name])
        client.enqueue(name, queue="ended")
        (job,) = client.claim_jobs(name, ["ended"])
        client.record_effect("s", name, job.job_id, job.lease_token)
        client.fail_job(job.job_id, job.lease_token, error=f"{name} error", fatal=True)
        client.schedule_job(name, "@daily", name)
        client.set_priority(waiting, 1)
    db.execute(
        f"""
        update rota.jobs set run_at = '{moment}', created_at = '{moment}',
            updated_at = '{moment}', started_at = '{moment}', time_limit = '2000000000 days'
        where job_type = 'odd';
        update rota.finished_jobs set run_at = '{moment}', created_at = '{moment}',
            started_at = '{moment}' where job_type = 'odd';
        update rota.workers set started_at = '{moment}', last_seen_at = '{moment}'
        where worker = 'odd';
        update rota.job_errors set started_at = '{moment}', failed_at = '{moment}'
        where job_type = 'odd';
        update rota.effects set recorded_at = '{moment}' where key = 'odd';
        update rota.job_definitions set created_at = '{moment}', last_run_at = '-infinity'
        where name = 'odd';
        update rota.audit_log set acted_at = '{moment}',
            before = (repeat('[', 3000) || repeat(']', 3000))::jsonb
        where after ->> 'name' = 'odd';
        """
    )
    return waiting
