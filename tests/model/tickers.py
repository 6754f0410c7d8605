"""Eight processes tick on one database; then each planned time is held against the rules.

    tickers.py [--rounds N] [--processes N] [--seed N]

The clock of the database is ours.  It goes on in small steps, now and then back, and stands
still for nobody: each look at it is off by up to half a second.  Between the steps all
processes tick at once until nothing is due, in every way there is to tick, and then jobs are
run.  In between nobody ticks for 3 minutes, 3 hours and 3 days, across changes of clocks.

For each schedule the planned times are known: from the text itself where it counts seconds,
and as the list of what rota._next_occurrence() says.  The checker goes through them beside
the rows of occurrences and wants exactly what catch_up and overlap say, for each tick by its
own time.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import subprocess
import sys
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain, pairwise, product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import psycopg
from psycopg.rows import namedtuple_row

TESTS = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))

from rota.testing import EmbeddedPostgres  # noqa: E402
from support.clock import now_is  # noqa: E402

Db = psycopg.Connection[Any]
# The night before clocks go forward in Warsaw; those of Lord Howe go back a week later.
START = datetime(2026, 3, 28, 23, 0, tzinfo=UTC)
STOPS = ("3 minutes", "3 hours", "3 days", "3 hours", "3 minutes", "3 days", "3 days")
CLOCK = """
create schema rota_test;
grant usage on schema rota_test to public;
create table rota_test.clock (stopped_at timestamptz not null, wobble interval not null);
grant select on rota_test.clock to public;
insert into rota_test.clock values (%s, '0');
"""
WOBBLY = now_is("(select c.stopped_at + c.wobble * (random() - 0.5) from rota_test.clock as c)")
# How one ticks; the sizes are small so that nobody does all of it.
WAYS = {
    "select rota._enqueue_due_schedules(1000)": 6,
    "select rota._enqueue_due_schedules(7)": 6,
    "select rota._enqueue_one_by_one(rota.now(), 5)": 3,
    "select t.jobs_enqueued from rota.tick() as t": 3,
}


class Planned(Protocol):
    """The planned times of one schedule."""

    def next(self, after: datetime) -> datetime: ...
    def newest(self, first: datetime, until: datetime, count: int) -> list[datetime]: ...


@dataclass(frozen=True)
class Beat:
    """Planned times at equal distances."""

    anchor: datetime
    period: timedelta

    def next(self, after: datetime) -> datetime:
        return self.anchor + ((after - self.anchor) // self.period + 1) * self.period

    def newest(self, first: datetime, until: datetime, count: int) -> list[datetime]:
        last = self.next(until) - self.period
        begin = max(first, last - (count - 1) * self.period)
        return [begin + n * self.period for n in range((last - begin) // self.period + 1)]


@dataclass(frozen=True)
class Listed:
    """Planned times as rota._next_occurrence() tells them one by one."""

    times: list[datetime]

    def next(self, after: datetime) -> datetime:
        return self.times[bisect_right(self.times, after)]

    def newest(self, first: datetime, until: datetime, count: int) -> list[datetime]:
        end = bisect_right(self.times, until)
        begin = bisect_right(self.times, first - timedelta(microseconds=1))
        return self.times[max(begin, end - count) : end]


@dataclass
class Schedule:
    """One definition, and what is known of it."""

    name: str
    text: str
    time_zone: str
    catch_up: str
    overlap: str
    window: timedelta | None = None
    count: int = 1000
    created_at: datetime = START
    # The round in which each planned time was dealt with, and in which each job ended.
    rounds: dict[datetime, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)


TEXTS = [
    ("* * * * * *", "UTC"),
    ("*/5 * * * * *", "UTC"),
    ("every 7 seconds", "UTC"),
    ("* * * * *", "Europe/Warsaw"),
    ("0,30 * * * *", "Australia/Lord_Howe"),
    ("30 2 * * *", "Europe/Warsaw"),
    ("15 */2 * * *", "Europe/Warsaw"),
]
POLICIES = [
    ("all", "allow", None, 1000),
    ("all", "allow", timedelta(minutes=10), 50),
    ("all", "queue", timedelta(minutes=2), 20),
    ("all", "skip", None, 5),
    ("one", "allow", None, 1),
    ("one", "skip", None, 1),
    ("one", "queue", timedelta(hours=1), 1),
    ("skip", "allow", None, 1),
    ("skip", "skip", timedelta(seconds=10), 1),
]


def make_schedules() -> list[Schedule]:
    """Return every text with every policy, and some that are planned by their ends."""
    found = [
        Schedule(f"{number}.{policy}", *text, catch_up, overlap, window, count)
        for (number, text), (policy, (catch_up, overlap, window, count)) in product(
            enumerate(TEXTS), enumerate(POLICIES)
        )
    ]
    return found + [
        Schedule(f"after.{n}", f"after {n} seconds", "UTC", "skip", "allow")
        for n in (1, 5, 60, 7200)
    ]


class Game:
    """One run: puts the schedules in, plays the rounds, keeps what only we know."""

    def __init__(self, url: str, seed: int, processes: int) -> None:
        self.db: Db = psycopg.connect(url, autocommit=True, row_factory=namedtuple_row)
        self.db.execute(psycopg.ClientCursor(self.db).mogrify(CLOCK, (START,)))
        self.db.execute(WOBBLY)
        self.random = random.Random(seed)
        self.schedules = {each.name: each for each in make_schedules()}
        self.round = 0
        self.problems: list[str] = []
        self._running: list[Any] = []
        self._last_of: dict[str, datetime] = {}
        for queue in ("bulk", "work"):
            self.db.execute("select rota.set_queue(%s, keep_finished => '1 year')", (queue,))
        for each in self.schedules.values():
            each.created_at = self.now()
            self.db.execute(
                "select from rota.schedule_job(%s, %s, 'x', queue => %s, time_zone => %s,"
                " catch_up => %s, overlap => %s, catch_up_window => %s, catch_up_max => %s)",
                (
                    *(each.name, each.text, "bulk" if each.overlap == "allow" else "work"),
                    *(each.time_zone, each.catch_up, each.overlap, each.window, each.count),
                ),
            )
            if each.text.startswith("after"):
                self.db.execute(
                    "select from rota.schedule_job(%s, %s, 'x', queue => 'work',"
                    " catch_up => 'skip')",
                    (each.name, each.text),
                )
            self.move("0.1 s")
        self._tickers = []
        for number in range(processes):
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(
                target=tick_on_demand, args=(url, seed * 100 + number, theirs), daemon=True
            )
            process.start()
            self._tickers.append((ours, process))

    def now(self) -> datetime:
        row = self.db.execute("select stopped_at from rota_test.clock").fetchone()
        assert row is not None
        return row[0]  # type: ignore[no-any-return]

    def move(self, by: str, wobble: str = "0") -> None:
        self.db.execute(
            "update rota_test.clock set stopped_at = stopped_at + %s::interval,"
            " wobble = %s::interval",
            (by, wobble),
        )

    def play_round(self, by: str, wobble: str = "1 s") -> None:
        """Move the clock, let all tick until nothing is due, then run some of the jobs."""
        self.round += 1
        self.move(by, wobble)
        for pipe, _ in self._tickers:
            pipe.send(True)
        for pipe, _ in self._tickers:
            self.problems += pipe.recv()
        self._note_occurrences()
        self._work()

    def close(self) -> None:
        """Send the processes home."""
        for pipe, process in self._tickers:
            pipe.send(False)
            process.join()
            pipe.close()
        self.db.close()

    def _note_occurrences(self) -> None:
        for row in self.db.execute("select definition, scheduled_for from rota.occurrences"):
            rounds = self.schedules[row.definition].rounds
            rounds.setdefault(row.scheduled_for, self.round)

    def _work(self) -> None:
        """Claim most of the jobs that are due, and end most of those that run."""
        self._running += self.db.execute(
            "select * from rota.claim_jobs('w', '{work}', 1000, lease => '30 days')"
        ).fetchall()
        for job in self._running:
            last = self._last_of.get(job.definition, START)
            if last > job.scheduled_for and self.schedules[job.definition].overlap == "queue":
                self.problems.append(f"{job.definition}: {job.scheduled_for} ran too late")
            self._last_of[job.definition] = job.scheduled_for
        alone = Counter(job.definition for job in self._running)
        for name, count in alone.items():
            if count > 1 and self.schedules[name].overlap != "allow":
                self.problems.append(f"{name}: {count} jobs run at once")
        self.random.shuffle(self._running)
        keep = self.random.choice([0, 0, len(self._running) // 3])
        for job in self._running[keep:]:
            self.db.execute("select rota.finish_job(%s, %s)", (job.job_id, job.lease_token))
            self.schedules[job.definition].ends[job.job_id] = self.round
        del self._running[keep:]


def tick_on_demand(url: str, seed: int, pipe: Connection) -> None:
    """What each of the processes does."""
    chance = random.Random(seed)
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("set client_min_messages = error")
        while pipe.recv():
            problems, idle = [], 0
            while idle < 2:
                way = chance.choices([*WAYS], [*WAYS.values()])[0]
                level = chance.choice(["read committed"] * 4 + ["repeatable read"])
                try:
                    with db.transaction():
                        db.execute(f"set transaction isolation level {level}")
                        row = db.execute(way).fetchone()
                        # A transaction that ends later than it could.
                        if chance.random() < 0.2:
                            time.sleep(0.005)
                    idle = 0 if row and row[0] else idle + 1
                except psycopg.errors.SerializationFailure:
                    continue
                except psycopg.Error as error:
                    problems.append(f"{way}: {error.sqlstate} {error.diag.message_primary}")
                    idle += 1
            pipe.send(problems)


def planned_times(db: Db, each: Schedule, until: datetime) -> Planned:
    """Return the planned times of a schedule, from its creation on."""
    midnight = each.created_at.replace(hour=0, minute=0, second=0, microsecond=0)
    if each.text == "* * * * * *":
        return Beat(midnight, timedelta(seconds=1))
    if each.text == "*/5 * * * * *":
        return Beat(midnight, timedelta(seconds=5))
    if each.text == "every 7 seconds":
        return Beat(each.created_at, timedelta(seconds=7))
    rows = db.execute(
        """
        with recursive parsed as materialized (select rota._parse_schedule(%s) as p),
        times (at) as (
            select rota._next_occurrence(p, %s, %s, null) from parsed
            union all
            select rota._next_occurrence(p, %s, t.at, null)
            from times as t, parsed where t.at <= %s
        )
        select at from times
        """,
        (each.text, each.time_zone, each.created_at, each.time_zone, until),
    )
    return Listed([row[0] for row in rows])


def check(game: Game) -> tuple[list[str], Counter[str]]:
    """Return what is wrong, and how many planned times there were of each kind."""
    problems, counts = list(game.problems), Counter[str]()
    occurrences: dict[str, list[Any]] = defaultdict(list)
    for row in game.db.execute(
        "select * from rota.occurrences order by definition, scheduled_for"
    ):
        occurrences[row.definition].append(row)
    jobs = game.db.execute(
        "select id, definition, scheduled_for, finished_at from rota.job_runs"
    ).fetchall()
    made = Counter((job.definition, job.scheduled_for) for job in jobs)
    counts["duplicates"] = sum(count - 1 for count in made.values())
    enqueued = {
        (f.definition, f.scheduled_for, f.job_id)
        for f in chain(*occurrences.values())
        if f.job_id
    }
    for wrong in enqueued ^ {(job.definition, job.scheduled_for, job.id) for job in jobs}:
        problems.append(f"{wrong[0]}: {wrong[1]}: the job and the row of occurrences disagree")
    ended = {job.id: job.finished_at for job in jobs}
    lists: dict[tuple[str, str], Planned] = {}
    for row in game.db.execute("select * from rota.job_definitions order by name"):
        each = game.schedules[row.name]
        if each.text.startswith("after"):
            problems += check_after(each, occurrences[each.name], ended, counts)
            continue
        key = (each.text, each.time_zone)
        if key not in lists or each.text.startswith("every"):
            lists[key] = planned_times(game.db, each, game.now() + timedelta(days=2))
        problems += check_times(each, occurrences[each.name], lists[key], row, counts)
    return problems, counts


def check_times(
    each: Schedule, occurrences: list[Any], planned: Planned, row: Any, counts: Counter[str]
) -> Iterator[str]:
    """Go through the ticks that dealt with a schedule, in the order of its planned times."""
    window = each.window or (timedelta(minutes=1) if each.catch_up == "skip" else None)
    first, last_job, begin = planned.next(each.created_at), None, 0
    while begin < len(occurrences):
        due = occurrences[begin].recorded_at
        end = begin
        while end < len(occurrences) and occurrences[end].recorded_at == due:
            end += 1
        wanted = planned.newest(first, due, each.count if each.catch_up == "all" else 1)
        counts["planned"] += len(planned.newest(first, due, 10**7))
        wanted = [at for at in wanted if window is None or at >= due - window]
        outcomes = {} if first in wanted else {first: "missed"}
        in_round = each.rounds[occurrences[begin].scheduled_for]
        is_live = last_job is not None and each.ends.get(last_job, in_round) >= in_round
        for number, at in enumerate(wanted):
            is_skipped = each.overlap == "skip" and (is_live or number > 0)
            outcomes[at] = "skipped" if is_skipped else "enqueued"
        found = {
            occurrence.scheduled_for: occurrence.outcome
            for occurrence in occurrences[begin:end]
        }
        if found != outcomes:
            yield f"{each.name}: at {due} found {found}, expected {outcomes}"
            counts["missing"] += len(outcomes.keys() - found.keys())
        counts.update(found.values())
        if each.catch_up == "all":
            counts["under all"] += len(wanted)
        last_job = (
            max((occurrence.job_id or 0 for occurrence in occurrences[begin:end]), default=0)
            or last_job
        )
        first, begin = planned.next(due), end
    if row.next_run_at != first:
        yield f"{each.name}: is planned for {row.next_run_at} and not for {first}"


def check_after(
    each: Schedule,
    occurrences: list[Any],
    ended: dict[int, datetime | None],
    counts: Counter[str],
) -> Iterator[str]:
    """Each planned time is the end of the last job and the period, if that is later."""
    period = timedelta(seconds=int(each.text.split()[1]))
    counts["planned"] += len(occurrences)
    counts.update(occurrence.outcome for occurrence in occurrences)
    for last, occurrence in pairwise(occurrences):
        end = ended[last.job_id]
        if end is None:
            at = occurrence.scheduled_for
            yield f"{each.name}: {at} came before job {last.job_id} had ended"
        elif occurrence.scheduled_for != max(
            end + period, last.scheduled_for + timedelta(microseconds=1)
        ):
            yield f"{each.name}: {occurrence.scheduled_for} does not follow the end at {end}"


def play(
    url: str, rounds: int, seed: int, processes: int = 8, stops: tuple[str, ...] = STOPS
) -> tuple[list[str], Counter[str]]:
    """Play so many rounds, with the stops spread over them; return what check() says."""
    with closing(Game(url, seed, processes)) as game:
        chance = game.random
        every = max(1, rounds // (len(stops) + 1))
        for number in range(rounds):
            if number % every == every - 1 and number // every < len(stops):
                game.play_round(stops[number // every])
            elif chance.random() < 0.2:
                game.play_round(f"-{3 * chance.random()} s")
            else:
                game.play_round(f"{chance.choice([0.3, 1, 1, 3, 10]) * chance.random()} s")
        game.play_round("1 s", "0")
        game.play_round("0", "0")
        problems, counts = check(game)
        counts["rounds"] = game.round
        return problems, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)

    settings = ["max_connections=100", "fsync=off", "synchronous_commit=off"]
    bindir = os.environ.get("ROTA_PG_BINDIR")
    with EmbeddedPostgres(bindir=bindir, settings=settings) as server:
        url = server.url("template1")
        install = ["psql", "-X", "-q", "-d", url, "-f", str(TESTS.parent / "sql/install.sql")]
        subprocess.run(install, check=True)
        began = time.monotonic()
        problems, counts = play(url, arguments.rounds, arguments.seed, arguments.processes)
    print(
        f"{arguments.processes} tickers, {len(make_schedules())} schedules, {counts['rounds']}"
        f" rounds, {time.monotonic() - began:.0f} s; stops of {', '.join(STOPS)}\n"
        f"{counts['planned']} planned times passed: {counts['enqueued']} enqueued,"
        f" {counts['skipped']} skipped, {counts['missed']} rows for those missed\n"
        f"{counts['under all']} due under all; {counts['duplicates']} duplicates,"
        f" {counts['missing']} missing, {len(problems)} differences"
    )
    for problem in problems[:10]:
        print(problem)
    return 1 if problems or counts["duplicates"] else 0


if __name__ == "__main__":
    sys.exit(main())
