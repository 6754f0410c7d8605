"""Kill movers again and again while a queue moves, and look for each job at its end.

    move_kill.py [--runs N] [--jobs N] [--kills N] [--seed N]

A queue with keys, jobs that fail and come again, and live producers moves to a database whose
sequence is far behind, while workers run in both, and two forwarders at a time, each killed
with -9 and followed by another.  In the end each committed job has to have succeeded once, in
one of the two, those of a key one at a time and in the order in which they were committed, and
calls for a job that went have to be told where it is.
"""

# ruff: noqa: T201 -- a command talks to its user

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.process import BaseProcess

import psycopg

from faults.forward_kill import ask, databases
from rota.cli.forward import run_forwarder
from rota.worker import mover

KEYS = 6
PATIENCE = 120.0
PROBLEMS = ("lost", "ghosts", "doubled", "out of order", "overlapping", "untold")
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["rota.cli.forward"])


@dataclass
class Attempt:
    """One attempt of a job, as its worker saw it."""

    began: float
    ended: float
    has_succeeded: bool


@dataclass
class Play:
    """What a run is about, and what it has found."""

    urls: list[str]
    dice: random.Random
    sent: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    attempts: dict[tuple[int, int], list[Attempt]] = field(
        default_factory=lambda: defaultdict(list)
    )
    committed: int = 0
    kills: int = 0
    late: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    stopping: threading.Event = field(default_factory=threading.Event)

    def __str__(self) -> str:
        found = ", ".join(f"{name} {self.problems[name]}" for name in PROBLEMS)
        return f"{self.committed} committed, {self.late} late, {self.kills} kills: {found}"


def play(urls: list[str], jobs: int, kills: int, seed: int, pause: float = 0.3) -> Play:
    """Let a queue of so many jobs move, and kill so many movers meanwhile."""
    game = Play(urls, random.Random(seed))
    seconds = kills / 2 * (pause + 0.15)
    each = jobs // (2 * KEYS)
    producers = [
        threading.Thread(
            target=_produce,
            args=(game, key, each, random.Random(seed + key)),
            # Half of them have a backlog before it begins, the others come all the time.
            kwargs={"pause": 0.0 if key < KEYS else seconds / each},
        )
        for key in range(2 * KEYS)
    ]
    workers = [
        threading.Thread(target=_work, args=(game, url, random.Random(seed + n)))
        for url in urls
        for n in range(3)
    ]
    for thread in producers[:KEYS]:
        thread.start()
    for thread in producers[:KEYS]:
        thread.join()
    for thread in (*workers, *producers[KEYS:]):
        thread.start()
    time.sleep(0.3)
    with psycopg.connect(urls[0], autocommit=True) as db:
        db.execute("select rota.begin_queue_move('q', 2)")
    killers = [
        threading.Thread(
            target=_kill_again_and_again,
            args=(game, kills // 2, pause, random.Random(game.dice.random())),
        )
        for _ in range(2)
    ]
    for thread in killers:
        thread.start()
    for thread in producers[KEYS:]:
        thread.join()
    # Two that have not heard that the queue is elsewhere.
    producers = [
        threading.Thread(
            target=_produce,
            args=(game, key, each // 2, random.Random(seed + key)),
            kwargs={"pause": 0.002, "is_late": True},
        )
        for key in (2 * KEYS, 2 * KEYS + 1)
    ]
    for thread in producers:
        thread.start()
    with moving(urls, max_jobs=20):
        for thread in (*producers, *killers):
            thread.join()
    with moving(urls, max_jobs=500):
        _wait_until_done(game)
    game.stopping.set()
    for thread in workers:
        thread.join()
    _judge(game)
    return game


def _produce(
    game: Play, key: int, jobs: int, dice: random.Random, *, pause: float, is_late: bool = False
) -> None:
    with psycopg.connect(game.urls[0]) as db:
        while is_late and ask(db, "select state = 'moving' from rota.queue_moves"):
            db.rollback()
            time.sleep(0.02)
        for number in range(jobs):
            time.sleep(dice.uniform(0, 2) * pause)
            # A third of the jobs of a producer are in no line, and some have a key.
            line = f"line {key}" if number % 3 else None
            once = f"once {key} {number}" if number % 5 == 0 else None
            db.execute(
                "select rota.enqueue('x', jsonb_build_object('key', %s::int, 'n', %s::int,"
                " 'fails', %s::int), 'q', ordering_key => %s, idempotency_key => %s)",
                (key, number, dice.random() < 0.1, line, once),
            )
            if dice.random() < 0.1:
                db.rollback()
            else:
                db.commit()
                game.sent[key].append(number)


def _work(game: Play, url: str, dice: random.Random) -> None:
    """Run jobs; who is told to fail does so at its first attempt."""
    with psycopg.connect(url, autocommit=True) as db:
        while not game.stopping.is_set():
            claimed = db.execute(
                "select job_id, lease_token, payload, attempt"
                " from rota.claim_jobs(%s, '{q}', 2)",
                (f"w{threading.get_ident()}",),
            ).fetchall()
            for job_id, token, payload, attempt in claimed:
                began = time.monotonic()
                time.sleep(dice.uniform(0, 0.004))
                fails = payload["fails"] and attempt == 1
                ended = time.monotonic()
                if fails:
                    db.execute(
                        "select rota.fail_job(%s, %s, 'no', retry_in => '50 ms')",
                        (job_id, token),
                    )
                else:
                    db.execute("select rota.finish_job(%s, %s)", (job_id, token))
                game.attempts[payload["key"], payload["n"]].append(
                    Attempt(began, ended, not fails)
                )
            if not claimed:
                db.execute("select rota.tick()")
                time.sleep(0.01)


def _kill_again_and_again(game: Play, kills: int, pause: float, dice: random.Random) -> None:
    for _ in range(kills):
        with moving(game.urls, max_jobs=dice.choice((1, 5, 20))) as process:
            time.sleep(dice.uniform(0.3, 1.7) * pause)
            os.kill(process.pid or 0, signal.SIGKILL)
            game.kills += 1


@contextmanager
def moving(urls: list[str], max_jobs: int) -> Iterator[BaseProcess]:
    """Run a forwarder, which is a mover too, and carries so many jobs at a time."""
    process = _processes.Process(target=_forward, args=(urls, max_jobs))
    process.start()
    try:
        yield process
    finally:
        process.terminate()
        process.join(20.0)
        if process.is_alive():
            process.kill()
            raise AssertionError("a mover did not end")


def _forward(urls: list[str], max_jobs: int) -> None:
    mover.MAX_JOBS = max_jobs
    run_forwarder(urls)


def _wait_until_done(game: Play) -> None:
    until = time.monotonic() + PATIENCE
    with (
        psycopg.connect(game.urls[0], autocommit=True) as here,
        psycopg.connect(game.urls[1], autocommit=True) as there,
    ):
        while time.monotonic() < until:
            left = ask(here, "select count(*) from rota.jobs")
            left += ask(here, "select count(*) from rota.outgoing_jobs")
            left += ask(there, "select count(*) from rota.jobs")
            state = ask(here, "select state from rota.queue_moves")
            if not left and state == "settled":
                return
            time.sleep(0.05)
        query = "select to_jsonb(m) from rota.queue_move_status('q') as m"
        raise AssertionError(f"{left} jobs are left after {PATIENCE:g} s: {ask(here, query)}")


def _judge(game: Play) -> None:
    ends: Counter[tuple[int, int]] = Counter()
    for url in game.urls:
        with psycopg.connect(url) as db:
            ends.update(
                (key, number)
                for key, number in db.execute(
                    "select (payload ->> 'key')::int, (payload ->> 'n')::int"
                    " from rota.finished_jobs where status = 'succeeded'"
                )
            )
    sent = {(key, number) for key, numbers in game.sent.items() for number in numbers}
    game.committed = len(sent)
    game.problems["lost"] = len(sent - ends.keys())
    game.problems["ghosts"] = len(ends.keys() - sent)
    game.problems["doubled"] = sum(times - 1 for times in ends.values())
    game.problems["doubled"] += sum(
        sum(a.has_succeeded for a in attempts) > 1 or len(attempts) > 2
        for attempts in game.attempts.values()
    )
    for key, numbers in game.sent.items():
        line = [number for number in numbers if number % 3]
        spans = [game.attempts[key, number] for number in line]
        for before, after in pairwise(spans):
            if not before or not after:
                continue  # lost, and told above
            first, last = min(a.began for a in after), max(a.ended for a in before)
            game.problems["out of order"] += first < min(a.began for a in before)
            game.problems["overlapping"] += first < last
    with psycopg.connect(game.urls[0], autocommit=True) as db:
        moved = db.execute(
            "select t.job_id, t.job_id <> t.new_job_id from rota.moved_jobs as t"
            " where not exists (select from rota.finished_jobs as f where f.id = t.job_id)"
        ).fetchall()
        game.late = sum(is_late for _, is_late in moved)
        for job_id, _ in random.Random(1).sample(moved, min(200, len(moved))):
            try:
                db.execute("select rota.cancel_job(%s)", (job_id,))
            except psycopg.Error as error:
                game.problems["untold"] += error.sqlstate != "RT016"
            else:
                game.problems["untold"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=4000)
    parser.add_argument("--kills", type=int, default=76)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    has_problems = False
    for run in range(arguments.runs):
        with databases() as urls:
            with psycopg.connect(urls[0], autocommit=True) as db:
                # So that the other one's sequence is behind.
                db.execute("select nextval('rota.jobs_id_seq') from generate_series(1, 100000)")
            game = play(urls, arguments.jobs, arguments.kills, arguments.seed + 100 * run)
        print(game, flush=True)
        has_problems |= any(game.problems.values())
    sys.exit(1 if has_problems else 0)


if __name__ == "__main__":
    main()
