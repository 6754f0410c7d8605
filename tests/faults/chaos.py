"""Kill and freeze workers at random for a minute, and look for lost jobs afterwards.

    chaos.py [--jobs N] [--workers N] [--seconds S] [--failing PERCENT] [--seed N]

Jobs come in all the time.  Every second one worker process is killed and started again under
its name, or frozen until its leases are over and then let go on.  Meanwhile a zombie keeps
reporting ends with tokens of earlier claims.  At the end every job must have ended once, with
as many attempts as there is evidence for, and no report of the zombie may have been accepted.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from rota.testing import EmbeddedPostgres

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from noting_handlers import TABLES  # noqa: E402

from invariants import BROKEN  # noqa: E402
from support.supervisor import Command, Supervisor  # noqa: E402

LEASE = 2.0
BACKOFF = {"kind": "fixed", "base_seconds": 0.2, "jitter": 0.5}
REFUSED = {"RT002"}


class Workers(Supervisor):
    """Worker processes."""

    def __init__(self, url: str, count: int, logs: Path) -> None:
        def start(number: int) -> Command:
            options = f"--name chaos-{number} --concurrency 4 --batch 8 --lease {LEASE}"
            options += " --poll-interval 0.1 --tick-interval 0.5 --log-level warning"
            command = [sys.executable, "-m", "rota", "worker", "noting_handlers:registry"]
            return Command(
                [*command, *options.split()],
                HERE,
                {"DATABASE_URL": url},
                logs / f"chaos-{number}.log",
            )

        super().__init__(start, count)


class Zombie(threading.Thread):
    """Speaks for jobs with the tokens of earlier claims, and expects to be refused.

    Most of these jobs run under a new token just now, or wait for their next try.
    """

    CALLS = (
        "select rota.finish_job(%(id)s, %(token)s)",
        "select rota.fail_job(%(id)s, %(token)s, 'from the grave')",
        "select rota.heartbeat(%(id)s, %(token)s)",
        "select rota.snooze_job(%(id)s, %(token)s, '1 hour')",
        "select rota.set_progress(%(id)s, %(token)s, 50)",
    )
    BATCHES = (
        "select outcome <> 'lost' from rota.finish_jobs(%(ids)s, %(tokens)s)",
        "select not is_lost from rota.heartbeat_jobs(%(ids)s, %(tokens)s)",
        "select is_released from rota.release_jobs(%(ids)s, %(tokens)s)",
    )

    def __init__(self, url: str, dice: random.Random) -> None:
        super().__init__(name="zombie", daemon=True)
        self._connection = psycopg.connect(url, autocommit=True)
        self._dice = dice
        self.is_stopping = False
        self.refused = 0
        self.accepted: list[str] = []
        self.other: Counter[str] = Counter()

    def run(self) -> None:
        while not self.is_stopping:
            stale = self._find_stale()
            for job_id, token in self._dice.sample(stale, min(20, len(stale))):
                self._try_one(job_id, token)
            if stale:
                self._try_many(self._dice.sample(stale, min(50, len(stale))))
            time.sleep(0.2)

    def _find_stale(self) -> list[tuple[int, int]]:
        return self._connection.execute(
            """
            select distinct e.job_id, e.lease_token
            from faults.executions as e
            join rota.jobs as j on j.id = e.job_id
            where j.lease_token > e.lease_token
               or j.status <> 'running'
            union all
            select e.job_id, min(e.lease_token)
            from faults.executions as e
            where e.job_id % 10 = 0
            group by e.job_id
            having count(*) > 1
            """
        ).fetchall()

    def _try_one(self, job_id: int, token: int) -> None:
        call = self._dice.choice(self.CALLS)
        try:
            answer = self._connection.execute(call, {"id": job_id, "token": token}).fetchone()
            self.accepted.append(f"{call} of job {job_id}, token {token}: {answer}")
        except psycopg.Error as error:
            if error.sqlstate in REFUSED:
                self.refused += 1
            else:
                self.other[f"{error.sqlstate} {error.diag.message_primary}"] += 1

    def _try_many(self, stale: list[tuple[int, int]]) -> None:
        ids, tokens = map(list, zip(*dict(stale).items(), strict=True))
        call = self._dice.choice(self.BATCHES)
        try:
            rows = self._connection.execute(call, {"ids": ids, "tokens": tokens}).fetchall()
        except psycopg.Error as error:
            self.other[f"{error.sqlstate} {error.diag.message_primary}"] += 1
            return
        self.refused += sum(not row[0] for row in rows)
        self.accepted += [f"{call} of job {ids[n]}" for n, row in enumerate(rows) if row[0]]


class Producer(threading.Thread):
    """Enqueues jobs in small batches, spread over the time given."""

    def __init__(self, url: str, arguments: argparse.Namespace, dice: random.Random) -> None:
        super().__init__(name="producer", daemon=True)
        self._connection = psycopg.connect(url, autocommit=True)
        self._arguments = arguments
        self._dice = dice
        self.produced = 0

    def run(self) -> None:
        began, seconds = time.monotonic(), self._arguments.seconds * 0.9
        while self.produced < self._arguments.jobs:
            due = int(self._arguments.jobs * min(1.0, (time.monotonic() - began) / seconds))
            if count := min(500, due - self.produced):
                jobs = [self._make_job(self.produced + number) for number in range(count)]
                self._connection.execute("select from rota.enqueue_many(%s)", (Jsonb(jobs),))
                self.produced += count
            time.sleep(0.1)

    def _make_job(self, number: int) -> dict[str, Any]:
        payload = {"failing": self._arguments.failing, "seed": self._arguments.seed}
        kind = self._dice.choices(["plain", "effect", "hopeless"], [80, 19, 1])[0]
        hopeless = {"max_attempts": 3} if kind == "hopeless" else {"max_attempts": 30}
        return {
            "job_type": kind,
            "payload": {**payload, "seconds": self._dice.choice([0, 0, 0, 0.05])},
            "idempotency_key": f"job {number}",
            "backoff": BACKOFF,
            **hopeless,
        }


VIOLATIONS = {
    "jobs that are not ended": "select count(*) from rota.jobs",
    "jobs that are missing": "select %(produced)s - count(*) from rota.finished_jobs",
    "jobs that ended twice": (
        "select count(*) from (select f.id from rota.finished_jobs as f "
        "group by f.id having count(*) > 1) as t"
    ),
    "jobs with broken invariants": f"select count(*) from ({BROKEN}) as t",
    "jobs above max_attempts": (
        "select count(*) from rota.finished_jobs as f where f.attempts > f.max_attempts"
    ),
    "succeeded jobs whose attempts are not one more than their failures": (
        "select count(*) from rota.finished_jobs as f where f.status = 'succeeded' and "
        "f.attempts <> 1 + (select count(*) from rota.job_errors as e where e.job_id = f.id)"
    ),
    "dead jobs whose attempts are not their failures": (
        "select count(*) from rota.finished_jobs as f where f.status = 'dead' and "
        "(f.attempts <> f.max_attempts or f.attempts <> "
        "(select count(*) from rota.job_errors as e where e.job_id = f.id))"
    ),
    "jobs that died without being hopeless, or lived in spite of it": (
        "select count(*) from rota.finished_jobs as f "
        "where (f.job_type = 'hopeless') <> (f.status = 'dead')"
    ),
    "claims that were run twice": (
        "select count(*) from (select from faults.executions as e "
        "group by e.job_id, e.lease_token having count(*) > 1) as t"
    ),
    "jobs run more often than they were claimed": (
        "select count(*) from rota.finished_jobs as f where f.attempts < "
        "(select count(*) from faults.executions as e where e.job_id = f.id)"
    ),
    "executions after the accepted end": (
        "select count(*) from faults.executions as e "
        "join rota.finished_jobs as f on f.id = e.job_id and e.lease_token > f.lease_token"
    ),
    "succeeded jobs that were not run under the accepted claim": (
        "select count(*) from rota.finished_jobs as f where f.status = 'succeeded' "
        "and not exists (select from faults.executions as e where e.job_id = f.id "
        "and e.lease_token = f.lease_token and e.attempt = f.attempts)"
    ),
    "effects that are not exactly one for each job": (
        "select count(*) from rota.finished_jobs as f where f.job_type = 'effect' and 1 <> "
        "(select count(*) from faults.effects as e where e.job_id = f.id "
        "and e.lease_token = f.lease_token)"
    ),
    "effects of refused claims": (
        "select count(*) - (select count(*) from rota.finished_jobs as f "
        "where f.job_type = 'effect') from faults.effects"
    ),
}

FIGURES = {
    "jobs ended": "select count(*) from rota.finished_jobs",
    "  succeeded": "select count(*) from rota.finished_jobs as f where f.status = 'succeeded'",
    "  dead": "select count(*) from rota.finished_jobs as f where f.status = 'dead'",
    "claims": "select sum(f.attempts) from rota.finished_jobs as f",
    "executions": "select count(*) from faults.executions",
    "failures reported": (
        "select count(*) from rota.job_errors as e where e.error_type <> 'lease_expired'"
    ),
    "leases swept": (
        "select count(*) from rota.job_errors as e where e.error_type = 'lease_expired'"
    ),
    "most attempts of a job": "select max(f.attempts) from rota.finished_jobs as f",
}


def show(began: float, ended: int, total: int, workers: Workers) -> None:
    width = 30
    bar = "#" * (width * ended // max(total, 1))
    line = f"[{bar:<{width}}] {ended:>6}/{total} jobs  {time.monotonic() - began:5.1f} s"
    line += f"  {workers.counts['killed']} killed, {workers.counts['frozen']} frozen"
    print(f"\r{line}" if sys.stderr.isatty() else line, end="" if sys.stderr.isatty() else "\n",
          file=sys.stderr, flush=True)  # fmt: skip


def play(url: str, arguments: argparse.Namespace, logs: Path) -> tuple[Workers, Zombie, float]:
    """Let it all happen; return when every job has ended, or too much time has passed."""
    dice = random.Random(arguments.seed)
    observer = psycopg.connect(url, autocommit=True)
    producer = Producer(url, arguments, random.Random(dice.random()))
    zombie = Zombie(url, random.Random(dice.random()))
    workers = Workers(url, arguments.workers, logs)
    producer.start()
    zombie.start()
    began = time.monotonic()
    next_hurt, next_show = began + 1, began
    try:
        while time.monotonic() < began + arguments.seconds * 2 + 60:
            time.sleep(0.05)
            now = time.monotonic()
            workers.look()
            if next_hurt <= now < began + arguments.seconds:
                next_hurt += 1
                workers.hurt(dice, 0.2, 1.5 * LEASE)
            if now >= next_show:
                next_show += 1 if sys.stderr.isatty() else 10
                ended = observer.execute("select count(*) from rota.finished_jobs").fetchone()[
                    0
                ]
                show(began, ended, arguments.jobs, workers)
            if not producer.is_alive() and now >= began + arguments.seconds:
                left = observer.execute("select count(*) from rota.jobs").fetchone()[0]
                if not left:
                    break
    finally:
        workers.stop()
        zombie.is_stopping = True
        zombie.join()
    return workers, zombie, time.monotonic() - began


def report(
    url: str, arguments: argparse.Namespace, workers: Workers, zombie: Zombie, seconds: float
) -> bool:
    """Print the table; return whether nothing is wrong."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("set jit = off")
        connection.execute("analyze")

        def count(query: str) -> int:
            query = query.replace("%(produced)s", str(arguments.jobs))
            return connection.execute(query).fetchone()[0] or 0

        figures = {name: count(query) for name, query in FIGURES.items()}
        wrong = {name: count(query) for name, query in VIOLATIONS.items()}
    figures |= {f"workers {name}": number for name, number in workers.counts.items()}
    figures["claims that never reached their handler"] = (
        figures["claims"] - figures["executions"]
    )
    figures["stale reports refused"] = zombie.refused
    wrong["stale reports accepted"] = len(zombie.accepted)
    wrong["other errors that the zombie got"] = sum(zombie.other.values())
    wrong["workers that ended by themselves"] = workers.counts["ended by themselves"]
    wrong["stale reports tried too few to tell"] = int(zombie.refused < 20)

    print(f"\nseed {arguments.seed}, {arguments.workers} workers, {seconds:.0f} s")
    for name, number in figures.items():
        print(f"  {name:<68}{number:>8}")
    for name, number in wrong.items():
        print(f"  {name:<68}{number:>8}  {'ok' if number == 0 else 'WRONG'}")
    for line in [*zombie.accepted[:10], *map(str, zombie.other.items())]:
        print(f"  {line}")
    return not any(wrong.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--failing", type=int, default=5, help="per cent of the attempts")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)

    with EmbeddedPostgres(settings=["max_connections=200"]) as server:
        url = server.url("chaos")
        with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
            connection.execute("create database chaos")
        install = [
            "psql",
            "-X",
            "-q",
            "-d",
            url,
            "-f",
            str(HERE.parents[1] / "sql/install.sql"),
        ]
        subprocess.run(install, check=True)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(TABLES)
        with tempfile.TemporaryDirectory() as logs:
            played = play(url, arguments, Path(logs))
            is_well = report(url, arguments, *played)
            if not is_well:
                for log in sorted(Path(logs).iterdir()):
                    print(f"--- {log.name}\n{log.read_text()[-2000:]}")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
