"""The commands that answer questions: explain."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from ..client.sync_client import Client
from .output import connected, print_findings, print_json


def explain(arguments: argparse.Namespace) -> None:
    """Say why a job does not run, or how it runs or ended; what decides comes first."""
    with connected(arguments) as connection:
        reasons = Client(connection).explain_job(arguments.job_id)
        job = connection.execute(
            "select job_type, queue, status from rota.job_runs where id = %s",
            [arguments.job_id],
        ).fetchone()
    if arguments.json:
        print_json([asdict(reason) for reason in reasons])
        return
    if job:
        print(
            f"job {arguments.job_id}, {job['job_type']} in queue {job['queue']},"
            f" is {job['status']}\n"
        )
    print_findings([(row.reason, row.explanation, row.remedy) for row in reasons])
