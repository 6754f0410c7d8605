"""The commands that answer questions: explain, doctor, verify."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from ..client.sync_client import Client
from .output import asking, connected, print_findings, print_json


def explain(arguments: argparse.Namespace) -> None:
    """Say why a job does not run, or how it runs or ended; what decides comes first."""
    with asking(arguments) as connection:
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


def doctor(arguments: argparse.Namespace) -> int:
    """Say what is wrong, the worst first; the exit code says how bad it is."""
    with connected(arguments) as connection:
        found = Client(connection).doctor()
    wrong = [row for row in found if row.severity != "ok"]
    worst = wrong[0].severity if wrong else "ok"
    if arguments.json and arguments.check:
        first = asdict(wrong[0]) if wrong else dict.fromkeys(("finding", "evidence", "remedy"))
        print_json({**first, "severity": worst, "wrong": len(wrong)})
    elif arguments.json:
        print_json([asdict(row) for row in found])
    elif arguments.check:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        said = f"{wrong[0].finding}: {wrong[0].evidence}" if wrong else "all is well"
        print(f"{worst.upper()} {said}{more}")
    else:
        shown = found if arguments.all else wrong
        print_findings(
            [(f"{row.severity} {row.finding}", row.evidence, row.remedy) for row in shown]
        )
        in_order = len({row.finding for row in found if row.severity == "ok"})
        if not arguments.all:
            print(f"{in_order} of {len({row.finding for row in found})} checks found nothing")
    return ("ok", "warning", "critical").index(worst)


def verify(arguments: argparse.Namespace) -> int:
    """Count the promises again; return 1 if one of them is broken."""
    with asking(arguments) as connection:
        verdicts = Client(connection).verify(arguments.max_rows)
    if arguments.json:
        print_json([asdict(row) for row in verdicts])
    else:
        print_findings(
            [
                (
                    "BROKEN" if row.violations else "kept",
                    f"{row.promise}: {row.violations} of {row.examined}"
                    + (f", such as: {row.example}" if row.example else ""),
                    None,
                )
                for row in verdicts
            ]
        )
    return int(any(row.violations for row in verdicts))
