"""Write what the commands show into the docs, from a small shop that is staged for it.

screens.py        write python_client/docs/screens.md
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg

from rota import __version__
from rota.testing.server import EmbeddedPostgres

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "python_client" / "docs" / "screens.md"
HEAD = """# What the commands show

Screens of a small shop: a mail server is down, a limit is full, and a payment has failed for
good. Lists fit the terminal, are whole in a pipe, and need no colour; `--json` prints the same
for a program.
`make screens` writes this page.
"""
COMMANDS = {
    "rota status": "One screen, with the verdict of the doctor first.",
    "rota top --once": "A live view until you press q, refreshed every two seconds; here once.",
    "rota job {dead}": "The history of a job.",
    "rota explain {waits}": "Why a job does not run: the first reason decides, and each\n"
    "names the statement that changes it.",
    "rota doctor": "What is wrong with the queue and the database under it, the worst first.",
    "rota errors": "Each error of a type once, in however many queues; numbers, ids and quotes "
    "are folded.",
    "rota jobs --status dead": "Jobs by any filter.",
    "rota retry --type charge --status dead --dry-run": "What an act would do.",
}


def stage(db: psycopg.Connection[Any]) -> dict[str, int]:
    """Fill the shop; return the ids of the jobs that the commands name."""

    def one(query: str, *values: Any) -> Any:
        row = db.execute(query, values).fetchone()  # type: ignore[arg-type]
        return None if row is None else row[0]

    def claim(queue: str, worker: str) -> tuple[int, int]:
        row = db.execute(
            "select job_id, lease_token from rota.claim_jobs(%s, array[%s], lease => '1 hour')",
            (worker, queue),
        ).fetchone()
        assert row is not None
        return row[0], row[1]

    db.execute("set application_name = 'rota worker'")
    for worker in ("web-1:811", "web-2:734"):
        db.execute(
            "select rota.report_worker(%s, split_part(%s, ':', 1), 811, %s,"
            " '{default,mail,payments}', '{charge,import,send_mail}', 4)",
            (worker, worker, __version__),
        )
    db.execute("select rota.set_limit(limit_key => 'bank', max_running => 1)")
    for _ in range(24):
        one("select rota.enqueue('send_mail', '{\"to\": \"ada@example.org\"}', 'mail')")
        db.execute("select rota.finish_job(%s, %s)", claim("mail", "web-1:811"))
    for number in (17, 18, 21):
        payload = f'{{"order": {number}}}'
        one("select rota.enqueue('charge', %s, 'payments', max_attempts => 2)", payload)
        for _ in range(2):
            job = claim("payments", "web-2:734")
            db.execute(
                "select rota.fail_job(%s, %s, %s, 'BadCurrency', 'Traceback (most recent call"
                ' last):\n  File "shop/jobs.py", line 41, in charge\nBadCurrency\','
                " retry_in => '0')",
                (*job, f"order {number} has no currency 'XX'"),
            )
        dead = job[0]
    for _ in range(3):
        one("select rota.enqueue('send_mail', '{}', 'mail')")
        db.execute(
            "select rota.fail_job(%s, %s, 'mail server: connection refused', 'OSError',"
            " retry_in => '10 minutes')",
            claim("mail", "web-1:811"),
        )
    one("select rota.enqueue('charge', '{\"order\": 22}', 'payments', limit_key => 'bank')")
    claim("payments", "web-2:734")
    waits = one(
        "select rota.enqueue('charge', '{\"order\": 23}', 'payments', limit_key => 'bank')"
    )
    db.execute(
        "update rota.jobs set run_at = run_at - interval '4 minutes',"
        " created_at = created_at - interval '4 minutes' where id = %s",
        [waits],
    )
    one("select rota.enqueue('import', '{}', delay => '3 hours')")
    one("select rota.schedule_job('nightly', '0 2 * * *', 'import')")
    db.execute("select rota.pause_type('send_mail', reason => 'the mail server is down')")
    for _ in range(3):
        db.execute("select rota.tick()")
    return {"dead": dead, "waits": waits}


def shown(url: str, ids: dict[str, int]) -> dict[str, str]:
    """Return what each command shows, as on a terminal of 80 columns without colour."""
    screens = {}
    for command in COMMANDS:
        text = command.format(**ids)
        done = subprocess.run(
            [sys.executable, "-m", "rota", *text.split()[1:], "-d", url],
            env={"PATH": "/usr/bin:/bin", "COLUMNS": "80", "NO_COLOR": "1",
                 "PYTHONPATH": str(ROOT / "python_client" / "src")},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not done.stderr, done.stderr
        screens[text] = "\n".join(line.rstrip() for line in done.stdout.rstrip().split("\n"))
    return screens


def page(screens: dict[str, str]) -> str:
    """Return the page of the docs."""
    parts = [HEAD]
    for about, (command, text) in zip(COMMANDS.values(), screens.items(), strict=True):
        parts.append(f"## `{command}`\n\n{about}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def folded(text: str) -> str:
    """Return a page without what differs from run to run: numbers, times and line breaks."""
    text = re.sub(r"\s+", " ", text)  # first, since a line may break before a unit
    text = re.sub(r"\d+(\.\d+)?( ?(us|ms|s|min|h))?\b", " ", text)
    return re.sub(r" +", " ", text)


def main() -> None:
    with EmbeddedPostgres() as server:
        url = server.url("shop")
        with psycopg.connect(server.url("postgres"), autocommit=True) as admin:
            admin.execute("create database shop")
        install = ["psql", "-X", "-q", "-d", url, "-f", str(ROOT / "sql" / "install.sql")]
        subprocess.run(install, check=True)
        with psycopg.connect(url, autocommit=True) as db:
            PAGE.write_text(page(shown(url, stage(db))))


if __name__ == "__main__":
    main()
