"""Kill movers again and again while a queue moves, and look for each job at its end.

    move_kill.py [--runs N] [--jobs N] [--kills N] [--crashes N] [--seed N]

A queue with keys, jobs that fail and come again, and live producers moves to a database whose
sequence is far behind, while workers run in both, and two forwarders at a time, each killed
with -9 and followed by another.  In the end each committed job has to have succeeded once, in
one of the two, those of a key one at a time and in the order in which they were committed, and
calls for a job that went have to be told where it is.

With --crashes the two databases are on servers of their own, of which now one and now the other
is killed with -9 and started again, so often while the queue moves.
"""

# ruff: noqa: T201 -- a command talks to its user

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg

from faults.forward_kill import ask, databases, forwarding
from rota.testing.server import memory
from support.server import Server

KEYS = 6
PATIENCE = 120.0
CRASH_SECONDS = 3.0
"""About how long it takes from one death of a server to the next."""
LOST = ("RT002", "RT003", "RT001", "RT016")
PROBLEMS = ("lost", "ghosts", "doubled", "out of order", "overlapping", "untold")


@dataclass
class Attempt:
    """One attempt of a job, as its worker saw it."""

    began: float
    ended: float
    has_succeeded: bool
    """As far as it was told: the server may have fallen in between."""


@dataclass
class Play:
    """What a run is about, and what it has found."""

    urls: list[str]
    dice: random.Random
    sent: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    attempts: dict[tuple[int, int], list[Attempt]] = field(
        default_factory=lambda: defaultdict(list)
    )
    lease: str = "2 minutes"
    unknown: set[tuple[int, int]] = field(default_factory=set)
    """Jobs whose commit got no answer."""
    committed: int = 0
    kills: int = 0
    crashes: Counter[str] = field(default_factory=Counter)
    late: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    stopping: threading.Event = field(default_factory=threading.Event)

    def __str__(self) -> str:
        found = ", ".join(f"{name} {self.problems[name]}" for name in PROBLEMS)
        told = f"{self.committed} committed, {len(self.unknown)} unknown, {self.late} late"
        if self.crashes:
            counts = (f"{count} of {name}" for name, count in self.crashes.items())
            told += f", crashes while it moved: {' and '.join(counts)}"
        return f"{told}, {self.kills} kills: {found}"


def play(
    urls: list[str],
    jobs: int,
    kills: int,
    seed: int,
    pause: float = 0.3,
    servers: Sequence[Server] = (),
    crashes: int = 0,
) -> Play:
    """Let a queue of so many jobs move, and kill so many movers meanwhile.

    Of *servers*, that of the source and that of the target, so many are killed as well.
    """
    game = Play(urls, random.Random(seed))
    seconds = max(kills / 2 * (pause + 0.15), crashes * CRASH_SECONDS)
    if crashes:
        game.lease = "3 seconds"  # who works when a server falls leaves jobs behind
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
    # Here, since a server does not outlive the thread that has started it.
    _crash_again_and_again(game, servers, crashes, random.Random(seed))
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
    with forwarding(urls, max_jobs=lambda: 20):
        for thread in (*producers, *killers):
            thread.join()
    with forwarding(urls, max_jobs=lambda: 500):
        _wait_until_done(game)
    game.stopping.set()
    for thread in workers:
        thread.join()
    _judge(game)
    return game


def _produce(
    game: Play, key: int, jobs: int, dice: random.Random, *, pause: float, is_late: bool = False
) -> None:
    while is_late and _state(game) == "moving":
        time.sleep(0.02)
    db = _connect(game.urls[0])
    for number in range(jobs):
        time.sleep(dice.uniform(0, 2) * pause)
        # A third of the jobs of a producer are in no line, and some have a key.
        line = f"line {key}" if number % 3 else None
        once = f"once {key} {number}" if number % 5 == 0 else None
        try:
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
        except psycopg.OperationalError:
            game.unknown.add((key, number))
            db = _connect(game.urls[0])
    db.close()


def _connect(url: str, *, autocommit: bool = False) -> psycopg.Connection[Any]:
    """Connect as soon as the server is there."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return psycopg.connect(url, autocommit=autocommit)
        except psycopg.OperationalError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def _state(game: Play) -> str:
    """How far the move is, or nothing if that cannot be asked for now."""
    with suppress(psycopg.OperationalError), psycopg.connect(game.urls[0]) as db:
        return str(ask(db, "select state from rota.queue_moves"))
    return ""


def _work(game: Play, url: str, dice: random.Random) -> None:
    """Run jobs; who is told to fail does so at its first attempt."""
    while not game.stopping.is_set():
        with suppress(psycopg.OperationalError), _connect(url, autocommit=True) as db:
            while not game.stopping.is_set():
                claimed = db.execute(
                    "select job_id, lease_token, payload, attempt"
                    " from rota.claim_jobs(%s, '{q}', 2, lease => %s)",
                    (f"w{threading.get_ident()}", game.lease),
                ).fetchall()
                for job in claimed:
                    _run(game, db, dice, *job)
                if not claimed:
                    db.execute("select rota.tick()")
                    time.sleep(0.04)


def _run(
    game: Play, db: psycopg.Connection[Any], dice: random.Random,
    job_id: int, token: int, payload: dict[str, int], attempt: int,
) -> None:  # fmt: skip
    began = time.monotonic()
    time.sleep(dice.uniform(0, 0.004))
    fails = payload["fails"] and attempt == 1
    done = Attempt(began, time.monotonic(), False)
    game.attempts[payload["key"], payload["n"]].append(done)
    try:
        if fails:
            query = "select rota.fail_job(%s, %s, 'no', retry_in => '50 ms')"
        else:
            query = "select rota.finish_job(%s, %s)"
        db.execute(query.encode(), (job_id, token))
    except psycopg.OperationalError:
        raise
    except psycopg.Error as error:
        if error.sqlstate not in LOST or not game.crashes:
            raise
        return  # it took longer than its lease, on a machine that has much to do
    done.has_succeeded = not fails


def _crash_again_and_again(
    game: Play, servers: Sequence[Server], times: int, dice: random.Random
) -> None:
    """Kill the servers in turn while the queue moves, and start them again."""
    for number in range(times):
        time.sleep(dice.uniform(0.2, 0.8) * CRASH_SECONDS)
        moves = _state(game) == "moving"
        server = servers[number % 2]
        server.stop(signal.SIGKILL)
        time.sleep(dice.uniform(0.0, 0.2) * CRASH_SECONDS)
        until = time.monotonic() + PATIENCE
        while not server.is_running:
            try:
                server.start()
            except RuntimeError:  # its processes are still about to leave
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        if moves:
            game.crashes["the target" if number % 2 else "the source"] += 1


def _kill_again_and_again(game: Play, kills: int, pause: float, dice: random.Random) -> None:
    with forwarding(game.urls, max_jobs=lambda: dice.choice((1, 5, 20))) as mover:
        for _ in range(kills):
            time.sleep(dice.uniform(0.3, 1.7) * pause)
            mover.kill(0)
    game.kills += mover.counts["killed"]


def _wait_until_done(game: Play) -> None:
    until = time.monotonic() + PATIENCE
    with (
        psycopg.connect(game.urls[0], autocommit=True) as here,
        psycopg.connect(game.urls[1], autocommit=True) as there,
    ):
        while time.monotonic() < until:
            left = ask(here, "select count(*) from rota.jobs")
            left += ask(here, "select count(*) from rota.moved_jobs where job is not null")
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
    game.problems["ghosts"] = len(ends.keys() - sent - game.unknown)
    game.problems["doubled"] = sum(times - 1 for times in ends.values())
    game.problems["doubled"] += sum(
        sum(a.has_succeeded for a in attempts) > 1 or (len(attempts) > 2 and not game.crashes)
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


@contextmanager
def two_servers() -> Iterator[list[Server]]:
    """Make two servers, whose databases have the numbers 1 and 2."""
    folder = Path(tempfile.mkdtemp(dir=memory()))
    folder.chmod(0o711)  # the servers are another user's
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        (folder / "1").mkdir()
        first = Server.create(folder / "1")
        stack.callback(first.destroy)
        first.stop()
        second = first.twin(folder / "2")
        stack.callback(second.destroy)
        first.start()
        servers = [first, second]
        for number, server in enumerate(servers, 1):
            with psycopg.connect(server.url(), autocommit=True) as db:
                db.execute("select rota.set_database_number(%s)", (number,))
        yield servers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=4000)
    parser.add_argument("--kills", type=int, default=76)
    parser.add_argument("--crashes", type=int, default=0, help="of the two servers in turn")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    has_problems = False
    for run in range(arguments.runs):
        with ExitStack() as stack:
            servers: list[Server] = []
            if arguments.crashes:
                servers = stack.enter_context(two_servers())
                urls = [server.url() for server in servers]
            else:
                urls = stack.enter_context(databases())
            with psycopg.connect(urls[0], autocommit=True) as db:
                # So that the other one's sequence is behind.
                db.execute("select nextval('rota.jobs_id_seq') from generate_series(1, 100000)")
            game = play(urls, arguments.jobs, arguments.kills, arguments.seed + 100 * run,
                        servers=servers, crashes=arguments.crashes)  # fmt: skip
        print(game, flush=True)
        has_problems |= any(game.problems.values())
    sys.exit(1 if has_problems else 0)


if __name__ == "__main__":
    main()
