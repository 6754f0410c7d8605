"""Kill workers between an effect and its finish, and compare the ledger with the mailbox.

    effects_kill.py [--kills N] [--workers N] [--seed N]

Jobs send mails to a real server.  Their workers kill themselves, most often when the mail has
been sent and the job is not yet finished, and take along what else they hold.  Half of
the jobs skip what is unknown, half do it again.  At the end every job must have succeeded with
one record; of those that skip none may have sent two mails, of those that do it again none may
have sent none, nor more than attempts were cut off between record and completion, plus one.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from rota.testing import EmbeddedPostgres

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "python_client/examples"
sys.path[:0] = [str(HERE.parent), str(EXAMPLES)]

from demo.mail import message_id  # noqa: E402
from faults import effects_worker  # noqa: E402
from invariants import BROKEN  # noqa: E402
from support.supervisor import Supervisor  # noqa: E402

BACKOFF = {"kind": "fixed", "base_seconds": 0.1, "jitter": 0.5}
BATCH = 100
IN_WINDOW = ("killed-sent", "killed-completed")


class Workers(Supervisor):
    """Worker processes, of which one that has killed itself is replaced."""

    def __init__(self, count: int, *arguments: Any) -> None:
        # A server that has everything imported forks them: so they start at once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rota", "rota.testing", "demo.mail"])

        def start(number: int) -> Any:
            process = context.Process(target=effects_worker.run, args=arguments)
            process.start()
            return process

        super().__init__(start, count)


class Notes:
    """What the workers wrote down, read bit by bit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.of_key: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
        """For each key its steps: what, the token of the attempt, the process."""

    def read(self) -> None:
        for path in self._folder.iterdir():
            if path.stat().st_size > self._read[path.name]:
                lines = path.read_bytes()[self._read[path.name] :]
                self._read[path.name] += len(lines)
                for line in lines.decode().splitlines():
                    step, key, token = line.split()
                    self.steps[step] += 1
                    self.of_key[key].append((step, int(token), int(path.name)))

    @property
    def kills(self) -> int:
        """How many killed themselves between the effect and the finish."""
        return sum(self.steps[step] for step in IN_WINDOW)


@contextmanager
def mail_server(maildir: Path) -> Iterator[int]:
    """Run a mail provider that keeps its mails there; yield its port."""
    command = [sys.executable, "-m", "demo.mail_server", str(maildir.resolve())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=EXAMPLES) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def play(url: str, folder: Path, kills: int, workers: int, seed: int) -> dict[str, int]:
    """Let so many kills happen and all jobs end; print the table, return what is wrong."""
    (folder / "notes").mkdir()
    notes = Notes(folder / "notes")
    began = time.monotonic()
    with psycopg.connect(url, autocommit=True) as db, mail_server(folder / "mails") as port:
        crew = Workers(workers, url, folder, port, seed)
        try:
            jobs = _play(db, folder, notes, crew, kills)
        finally:
            crew.stop()
        notes.read()
        mails = _count_mails(folder / "mails")
        seconds = time.monotonic() - began
        print(f"\nseed {seed}, {workers} workers, {seconds:.0f} s")
        return _report(db, notes, crew, mails, jobs, kills)


def _play(
    db: psycopg.Connection[Any], folder: Path, notes: Notes, crew: Workers, kills: int
) -> int:
    jobs, began = 0, time.monotonic()
    shown = began
    deadline = began + 60 + kills
    while time.monotonic() < deadline:
        time.sleep(0.02)
        crew.look()
        notes.read()
        if notes.kills >= kills:
            (folder / "enough").touch()
        left = db.execute("select count(*) from rota.jobs").fetchone()[0]
        if time.monotonic() >= shown:
            shown += 1 if sys.stderr.isatty() else 10
            _show(began, notes.kills, kills, left)
        if left < BATCH and notes.kills < kills:
            _enqueue(db, range(jobs, jobs + BATCH))
            jobs += BATCH
        elif not left:
            break
    return jobs


def _enqueue(db: psycopg.Connection[Any], numbers: range) -> None:
    jobs = [
        {
            "job_type": "send",
            "payload": {
                "key": f"mail:{number}",
                "if_unknown": "again" if number % 2 else "skip",
            },
            "lease": effects_worker.LEASE,
            "backoff": BACKOFF,
            "max_attempts": 100,
        }
        for number in numbers
    ]
    db.execute("select from rota.enqueue_many(%s)", [Jsonb(jobs)])


def _count_mails(maildir: Path) -> Counter[str]:
    mails: Counter[str] = Counter()
    for path in (maildir / "new").iterdir():
        with path.open("rb") as file:
            mails[BytesHeaderParser().parse(file)["Message-ID"]] += 1
    return mails


def _report(
    db: psycopg.Connection[Any],
    notes: Notes,
    crew: Workers,
    mails: Counter[str],
    jobs: int,
    kills: int,
) -> dict[str, int]:
    figures: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    records = {
        row[0]: row[1:]
        for row in db.execute(
            "select e.key, e.completed_at is not null, e.lease_token from rota.effects as e"
        )
    }
    keys = db.execute(
        "select f.payload ->> 'key', f.payload ->> 'if_unknown' from rota.finished_jobs as f"
    ).fetchall()
    for key, policy in keys:
        sent = mails.pop(message_id(key), 0)
        is_done, token = records.pop(key, (None, None))
        steps = notes.of_key[key]
        due = {(t, pid) for step, t, pid in steps if step == "due"}
        accepted = {t for step, t, _ in steps if step == "sent"}
        completed = {t for step, t, _ in steps if step == "completed"}
        lost = {t for step, t, _ in steps if step == "lost"}
        cut = {t for t, _ in due if t not in completed}

        figures[f"{policy}: jobs"] += 1
        figures[f"{policy}: sent {min(sent, 3)}{' or more' if sent > 2 else ''}"] += 1
        figures[f"{policy}: records {'done' if is_done else 'unknown'}"] += 1
        figures["attempts cut off between record and completion"] += len(cut)
        figures["leases lost by living workers"] += len(lost)
        wrong["jobs without a record"] += is_done is None
        wrong["mails that no attempt was due to send"] += max(0, sent - len(due))
        wrong["mails accepted and not in the mailbox"] += max(0, len(accepted) - sent)
        wrong["done without a mail"] += bool(is_done) and not sent
        wrong["completed and not done"] += bool(completed) and not is_done
        wrong["completed more than once"] += len(completed) > 1
        wrong["done under another lease than that which completed it"] += bool(
            completed and token not in completed
        )
        wrong["cut off, but neither killed nor lost"] += any(
            t in cut and t not in lost and pid not in crew.killed for t, pid in due
        )
        if policy == "skip":
            wrong["skip: more than one mail"] += sent > 1
        else:
            wrong["again: no mail"] += sent == 0
            wrong["again: not done"] += not is_done
            wrong["again: more mails than attempts cut off allow"] += sent > 1 + len(cut)
    wrong["records of nothing"] += len(records)
    wrong["mails of nothing"] += sum(mails.values())
    return _print(db, notes, crew, figures, wrong, jobs, kills)


def _print(
    db: psycopg.Connection[Any],
    notes: Notes,
    crew: Workers,
    figures: Counter[str],
    wrong: Counter[str],
    jobs: int,
    kills: int,
) -> dict[str, int]:
    succeeded, attempts, live = db.execute(
        "select count(*) filter (where f.status = 'succeeded'), sum(f.attempts),"
        " (select count(*) from rota.jobs) from rota.finished_jobs as f"
    ).fetchone()
    wrong["jobs that did not succeed"] = jobs - succeeded + live
    wrong["jobs with broken invariants"] = db.execute(
        f"select count(*) from ({BROKEN}) as t"
    ).fetchone()[0]
    wrong["workers that ended by themselves"] = sum(
        count for code, count in crew.exits.items() if code not in (0, -9)
    )
    wrong["kills missing"] = max(0, kills - notes.kills)
    figures["jobs succeeded"], figures["attempts"] = succeeded, attempts or 0
    figures["workers killed"] = crew.exits[-9]
    for place in effects_worker.DEATHS:
        figures[f"  by themselves, {place}"] = notes.steps[f"killed-{place}"]
    for name, number in sorted(figures.items()):
        print(f"  {name:<58}{number:>8}")
    for name, number in wrong.items():
        print(f"  {name:<58}{number:>8}  {'ok' if number == 0 else 'WRONG'}")
    return {name: number for name, number in wrong.items() if number}


def _show(began: float, kills: int, total: int, left: int) -> None:
    width, is_terminal = 30, sys.stderr.isatty()
    bar = "#" * min(width, width * kills // total)
    line = f"[{bar:<{width}}] {kills:>5}/{total} kills  {time.monotonic() - began:5.1f} s"
    line += f"  {left:>4} jobs live"
    print(f"\r{line}" if is_terminal else line, end="" if is_terminal else "\n",
          file=sys.stderr, flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)

    with (
        EmbeddedPostgres(settings=["max_connections=200"]) as server,
        tempfile.TemporaryDirectory() as name,
    ):
        folder, url = Path(name), server.url("postgres")
        install = HERE.parents[1] / "sql/install.sql"
        subprocess.run(["psql", "-X", "-q", "-d", url, "-f", str(install)], check=True)
        wrong = play(url, folder, arguments.kills, arguments.workers, arguments.seed)
        if wrong and (folder / "log").exists():
            print((folder / "log").read_text()[-4000:])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
