"""A mail server is down for a while: attempts made with a breaker, and without one.

    outage.py [--mails N] [--seconds N]

Two databases of one server, with a worker each, live through the same outage, in which the
mails come in one after the other.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import subprocess
import threading
import time
from pathlib import Path

import psycopg

from rota import Job, Registry, Worker
from rota.testing import EmbeddedPostgres

INSTALL = Path(__file__).resolve().parents[2] / "sql" / "install.sql"
BACKOFF = '{"kind": "exponential", "base_seconds": 1, "cap_seconds": 10}'
BREAKER = "select rota.set_breaker('send', max_failures => 5, pause_for => '2 seconds')"


def live(url: str, mails: int, seconds: float) -> tuple[int, float]:
    """Return how often a mail was tried, and how long after the outage all were sent."""
    ends = time.monotonic() + seconds
    registry = Registry()

    def send(job: Job) -> None:
        if time.monotonic() < ends:
            raise ConnectionRefusedError("no route to the mail server")

    registry.add("send", send)
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(
            "select rota.enqueue('send', max_attempts => 1000, backoff => %s,"
            " delay => n * make_interval(secs => %s)) from generate_series(1, %s) as n",
            (BACKOFF, seconds / mails, mails),
        )
        worker = Worker(url, registry)
        thread = threading.Thread(target=worker.run)
        thread.start()
        while db.execute("select exists (select from rota.jobs)").fetchone() == (True,):
            time.sleep(0.1)
        late = time.monotonic() - ends
        worker.stop()
        thread.join()
        row = db.execute("select sum(attempts) from rota.finished_jobs").fetchone()
    assert row is not None
    return int(row[0]), late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mails", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=45)
    arguments = parser.parse_args()
    with EmbeddedPostgres() as server:
        told: dict[str, tuple[int, float]] = {}
        threads = []
        for name in ("without", "with"):
            with psycopg.connect(server.url("postgres"), autocommit=True) as admin:
                admin.execute(f"create database {name}_breaker".encode())
            url = server.url(f"{name}_breaker")
            subprocess.run(["psql", "-X", "-q", "-d", url, "-f", INSTALL], check=True)
            if name == "with":
                with psycopg.connect(url, autocommit=True) as db:
                    db.execute(BREAKER)

            def play(name: str = name, url: str = url) -> None:
                told[name] = live(url, arguments.mails, arguments.seconds)

            threads.append(threading.Thread(target=play))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for name, (attempts, late) in told.items():
        print(
            f"{name} a breaker: {attempts} attempts for {arguments.mails} mails,"
            f" all sent {late:.1f} s after the outage"
        )


if __name__ == "__main__":
    main()
