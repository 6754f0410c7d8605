"""Play the machine 100,000 times and explore all states of a lease; what `make prove` does.

    prove.py [--examples N] [--processes N] [--seed N] [--part N]

The examples are played in parts of a hundred, each with a number that repeats it (--part).
Parts that are done are noted in a file of the temporary directory, so the same --seed goes on
where it was stopped.  Everything found is told with its shortest example, and ends in exit
status 1.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import psycopg

from rota.testing import EmbeddedPostgres

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from model.database import Database  # noqa: E402
from model.exploring import explore  # noqa: E402
from model.machine import STEPS, play  # noqa: E402
from model.protocol import Protocol  # noqa: E402
from support.bar import Bar  # noqa: E402

PART = 100
SETTINGS = ["max_connections=50", "fsync=off", "synchronous_commit=off", "full_page_writes=off"]
WORLDS = [
    (Protocol(jobs=1, workers=2, ticks=4, attempts=3, claims=4, operations=2), 99),
    (Protocol(jobs=1, workers=3), 99),
    (Protocol(jobs=2, workers=2), 12),
]
_databases: list[Database] = []


def open_database(urls: multiprocessing.Queue[str]) -> None:
    _databases.append(Database(urls.get()))


def play_part(number: int) -> tuple[int, str]:
    """Play one part; return its number and what was found."""
    try:
        play(_databases[0], number, PART)
    except Exception:
        # With the notes that tell the shortest example.
        return number, traceback.format_exc(limit=-1)
    return number, ""


def play_machine(parts: list[int], processes: int, journal: Path) -> list[str]:
    """Play those parts that the journal does not have; return what was found."""
    done = {int(line) for line in journal.read_text().split()} if journal.exists() else set()
    left = [number for number in parts if number not in done]
    bar = Bar("examples", PART * len(parts), PART * (len(parts) - len(left)))
    found = []
    with (
        EmbeddedPostgres(bindir=os.environ.get("ROTA_PG_BINDIR"), settings=SETTINGS) as server,
        multiprocessing.Pool(processes, open_database, [databases(server, processes)]) as pool,
    ):
        for played, (number, problem) in enumerate(pool.imap_unordered(play_part, left), 1):
            if problem:
                found.append(f"part {number}\n{problem}")
                print(f"\n{found[-1]}", flush=True)
            else:
                with journal.open("a") as file:
                    file.write(f"{number}\n")
            bar.show(PART * (len(parts) - len(left) + played))
    return found


def databases(server: EmbeddedPostgres, count: int) -> multiprocessing.Queue[str]:
    """Return the URLs of so many new databases with rota."""
    urls: multiprocessing.Queue[str] = multiprocessing.Queue()
    with psycopg.connect(server.url("template1"), autocommit=True) as db:
        db.execute("create database template_rota")
        install = ["psql", "-X", "-q", "-d", server.url("template_rota"), "-f"]
        subprocess.run([*install, str(TESTS.parent / "sql/install.sql")], check=True)
        for number in range(count):
            db.execute(f"create database model{number} template template_rota")
            urls.put(server.url(f"model{number}"))
    return urls


def explore_worlds() -> list[str]:
    found = []
    for protocol, depth in WORLDS:
        began = time.monotonic()
        explored = explore(protocol, depth)
        how_far = "all" if explored.is_complete else f"{explored.depth} events deep"
        print(f"{protocol}: {explored.states} states, {how_far},"
              f" {time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
        if explored.problem:
            found.append("\n".join((*explored.trace, explored.problem)))
            print(found[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--part", type=int, help="only this part, whatever the journal has")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, examples of {STEPS} steps", flush=True)

    if arguments.part is not None:
        found = play_machine([arguments.part], 1, Path(os.devnull))
    else:
        numbers = range(arguments.examples // PART)
        parts = [arguments.seed * 10**6 + number for number in numbers]
        journal = Path(tempfile.gettempdir(), f"rota-prove-{arguments.seed}")
        found = play_machine(parts, arguments.processes, journal) + explore_worlds()
    print(f"seed {arguments.seed}: {f'{len(found)} found' if found else 'all well'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
