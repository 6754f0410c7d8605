"""What order and dependencies cost however much waits: `make bench-waiting`.

Each figure is a function of one server on which a tree of rota is installed.  With --against
PATH each is taken of that tree as well, in the same run, and both stand side by side.
"""

# ruff: noqa: T201 -- a command talks to its user

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psycopg
from psycopg.types.json import Jsonb

from bench.measured_server import SETTINGS
from rota.testing import EmbeddedPostgres, find_binaries

Db = psycopg.Connection[Any]
TREE = Path(__file__).resolve().parents[2]
JOB = "insert into rota.jobs (queue, job_type, payload, priority, max_attempts, ordering_key,"
JOB += " skip_dead, if_parent_dead, status, run_at) select"


class Place:
    """A database with one tree's rota in it."""

    def __init__(self, server: EmbeddedPostgres, name: str, tree: Path, many: int) -> None:
        self.many = many
        self._dsn = server.url(name)
        with psycopg.connect(server.url("template1"), autocommit=True) as admin:
            admin.execute(f"create database {name}".encode())
        subprocess.run(
            ["psql", "-X", "-q", "-d", self._dsn, "-f", tree / "sql" / "install.sql"],
            check=True,
        )
        self.db = self.connect()

    def connect(self) -> Db:
        db = psycopg.connect(self._dsn, autocommit=True, prepare_threshold=0)
        db.execute("set synchronous_commit = off")
        db.execute("set client_min_messages = error")
        return db

    def empty(self) -> None:
        rows = self.db.execute(
            "select relname from pg_class where relnamespace = 'rota'::regnamespace and relname"
            " in ('jobs', 'finished_jobs', 'dependencies', 'rechecks', 'pending_checks',"
            " 'halted_keys')"
        ).fetchall()
        self.db.execute(f"truncate rota.{', rota.'.join(row[0] for row in rows)}".encode())

    def tick(self) -> None:
        for _ in range(100_000):
            row = self.db.execute("select has_more from rota.tick()", prepare=False).fetchone()
            if row == (False,):
                return

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold an old snapshot."""
        with self.connect() as holder:
            holder.execute("begin isolation level repeatable read")
            holder.execute("select count(*) from rota.jobs")
            yield


def median_ms(what: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        what()
        taken.append((time.perf_counter() - begun) * 1000)
    return statistics.median(taken)


OLD_WORDS = {"depends_on": "after", "blocks": "before", "fatal": "is_fatal"}


@cache
def is_old(db: Db) -> bool:
    """Whether its tree has the names of 0.1.0."""
    query = "select 'after' = any(proargnames) from pg_proc where oid = 'rota.enqueue'::regproc"
    return db.execute(query).fetchone() == (True,)


def word(db: Db, name: str) -> str:
    """Return how the tree calls this argument."""
    return OLD_WORDS.get(name, name) if is_old(db) else name


def enqueue(db: Db, **arguments: Any) -> int:
    names = ", ".join(f"{word(db, name)} => %({name})s" for name in arguments)
    comma = ", " if names else ""
    query = f"select rota.enqueue('t'{comma}{names})".encode()
    row = db.execute(query, arguments).fetchone()
    assert row is not None
    return int(row[0])


def claim_one(db: Db, queue: str = "default") -> tuple[int, int]:
    row = db.execute(
        "select c.job_id, c.lease_token from rota.claim_jobs('w', array[%s]) as c",
        [queue],
    ).fetchone()
    assert row is not None
    return row


def finish(db: Db, job: tuple[int, int]) -> None:
    db.execute("select rota.finish_job(%s, %s)", job)


def enqueue_behind_many(place: Place) -> Iterator[tuple[str, float]]:
    """A job of a key with many in front, with each argument, against one with none."""
    parent = enqueue(place.db, queue="other")
    place.db.execute(
        f"{JOB} 'default', 't', '{{}}', 0, 10, 'full', false, 'cancel', case when n = 1 then"
        " 'queued' else 'blocked' end, rota.now() from generate_series(1, %s) as n".encode(),
        [place.many],
    )
    place.db.execute("vacuum analyze rota.jobs")
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "depends_on": {"depends_on": [parent]},
        "delay": {"delay": "1 hour"},
        "skip_dead": {"skip_dead": True},
    }
    for name, arguments in cases.items():
        number = iter(range(10**6))
        costs: dict[str, list[float]] = {"full": [], "empty": []}
        for _ in range(400):
            for key, its in costs.items():
                its_key = key if key == "full" else f"{name}{next(number)}"
                its.append(
                    median_ms(
                        lambda k=its_key, a=arguments: enqueue(place.db, ordering_key=k, **a),
                        1,
                    )
                )
        ratio = statistics.median(costs["full"]) / statistics.median(costs["empty"])
        yield f"enqueue({name}) with {place.many} in front / with none", ratio


def ends_with_many_dependants(place: Place) -> Iterator[tuple[str, float]]:
    """The end and the retry of a job with many dependants, and their release by maintenance."""
    rehearsed: set[str] = set()
    for how in ("finish", "fail", "cancel", "finish", "fail", "cancel"):
        is_rehearsal = not rehearsed.issuperset([how])
        rehearsed.add(how)
        place.empty()
        parent = enqueue(place.db, queue=how)
        children(place, parent, 100 if is_rehearsal else place.many)
        job = claim_one(place.db, how) if how != "cancel" else (parent, 0)
        fatal = word(place.db, "fatal")
        call = {
            "finish": "select rota.finish_job(%s, %s)",
            "fail": f"select status from rota.fail_job(%s, %s, 'e', {fatal} => true)",
            "cancel": "select rota.cancel_job(%s)",
        }[how]
        given = job if how != "cancel" else job[:1]
        ended = median_ms(lambda c=call, g=given: place.db.execute(c.encode(), g), 1)
        if how != "finish":
            retried = median_ms(
                lambda p=parent: place.db.execute("select rota.retry_job(%s)", [p]), 1
            )
        if is_rehearsal:
            place.tick()
            continue
        yield f"{how} of a job with {place.many} dependants, ms", ended
        if how != "finish":
            yield f"its retry after {how}, ms", retried
            continue
        begun = time.perf_counter()
        other = enqueue_and_finish(place)
        for _ in range(100_000):
            tick = place.db.execute("select has_more from rota.tick()", prepare=False)
            if tick.fetchone() == (False,):
                break
        seconds = time.perf_counter() - begun
        yield "dependants released by maintenance, per s", place.many / seconds
        yield "plain enqueue, claim and finish before it, ms", other


def enqueue_and_finish(place: Place) -> float:
    def once() -> None:
        enqueue(place.db, queue="plain")
        finish(place.db, claim_one(place.db, "plain"))

    return median_ms(once, 100)


def children(place: Place, parent: int, many: int) -> None:
    place.db.execute(
        f"with new as ({JOB} 'far', 't', '{{}}', 0, 10, null, null, 'cancel', 'blocked',"
        " rota.now() from generate_series(1, %s) returning id) insert into rota.dependencies"
        " (parent_id, job_id) select %s, id from new".encode(),
        [many, parent],
    )
    place.db.execute("vacuum analyze rota.jobs, rota.dependencies")


def cancel_of_a_fan_in(place: Place) -> Iterator[tuple[str, float]]:
    """The cancel of a job with many parents, and a claim after it."""
    last = enqueue(place.db, depends_on=[enqueue(place.db, queue="other")])
    place.db.execute(
        f"with new as ({JOB} 'far', 't', '{{}}', 0, 10, null, null, 'cancel', 'queued',"
        " rota.now() from generate_series(1, %s) returning id) insert into rota.dependencies"
        " (parent_id, job_id) select id, %s from new".encode(),
        [place.many, last],
    )
    place.db.execute("vacuum analyze rota.jobs, rota.dependencies")
    for _ in range(10):
        finish(place.db, claim_one(place.db, "far"))
    yield (
        f"finish of one of {place.many} parents, ms",
        median_ms(lambda: finish(place.db, claim_one(place.db, "far")), 50),
    )
    few = [enqueue(place.db, depends_on=[enqueue(place.db, queue="other")]) for _ in range(5)]
    median_ms(lambda: place.db.execute("select rota.cancel_job(%s)", [few.pop()]), 5)
    yield (
        f"cancel of a job with {place.many} parents, ms",
        median_ms(lambda: place.db.execute("select rota.cancel_job(%s)", [last]), 1),
    )
    yield (
        "the claim of another queue after it, ms",
        median_ms(lambda: place.db.execute("select from rota.claim_jobs('w', '{none}')"), 1),
    )


def claims_under_a_held_snapshot(place: Place) -> Iterator[tuple[str, float]]:
    """A plain claim, and ordered ones, after many ordered jobs under an old snapshot."""
    keys, jobs = 1000, min(place.many // 10, 20_000)

    def plain() -> float:
        return enqueue_and_finish(place)

    def ordered(number: int) -> float:
        taken = []
        for turn in range(number):
            begun = time.perf_counter()
            enqueue(place.db, queue="o", ordering_key=f"k{turn % keys}")
            finish(place.db, claim_one(place.db, "o"))
            taken.append((time.perf_counter() - begun) * 1000)
        return statistics.median(taken[-200:])

    place.db.execute("vacuum analyze rota.jobs")
    free, free_ordered = plain(), ordered(300)
    with place.held():
        before, before_ordered = plain(), ordered(300)
        after_ordered = ordered(jobs)
        after = plain()
    yield "plain enqueue, claim and finish, ms, without a held snapshot", free
    yield (
        f"the same, after {jobs} ordered jobs under a held snapshot / before",
        after / before,
    )
    yield "ordered enqueue, claim and finish, ms, without a held snapshot", free_ordered
    yield (
        f"the same, after {jobs} of them under a held snapshot / before",
        (after_ordered / before_ordered),
    )


def held_up_by_strangers(place: Place) -> Iterator[tuple[str, float]]:
    """Whether an open transaction holds up others; 1 for yes."""
    stranger = place.connect()
    other = place.connect()
    other.execute("set statement_timeout = '1s'")

    def is_held_up(what: Callable[[], object]) -> float:
        try:
            what()
        except psycopg.errors.QueryCanceled:
            return 1.0
        except AssertionError:
            return 1.0
        return 0.0

    parent = enqueue(place.db)
    job = claim_one(place.db)
    with suppress(psycopg.Error), stranger.transaction():
        enqueue(stranger, depends_on=[parent])
        yield (
            "finish of a parent, beside an open enqueue(depends_on)",
            is_held_up(lambda: finish(other, job)),
        )
    place.empty()
    for queue in ("qa", "qb", "qb"):
        enqueue(place.db, queue=queue, ordering_key=queue)
    with stranger.transaction():
        claim_one(stranger, "qa")
        yield (
            "next ordered job of qb, beside an open claim of qa",
            is_held_up(lambda: [finish(other, claim_one(other, "qb")) for _ in range(2)]),
        )
    place.empty()
    waiting = [
        enqueue(place.db, depends_on=[enqueue(place.db, queue="other")]) for _ in range(2)
    ]
    blocks = word(place.db, "blocks")
    jobs = [{"job_type": "t", blocks: b, "idempotency_key": str(b)} for b in waiting]
    with stranger.transaction():
        stranger.execute("select from rota.enqueue_many(%s)", [Jsonb(jobs[:1])])
        yield (
            "enqueue(blocks, key) of another job, beside an open one",
            is_held_up(
                lambda: other.execute("select from rota.enqueue_many(%s)", [Jsonb(jobs[1:])])
            ),
        )
    stranger.close()
    other.close()


FIGURES = [
    held_up_by_strangers,
    enqueue_behind_many,
    ends_with_many_dependants,
    cancel_of_a_fan_in,
    claims_under_a_held_snapshot,
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--many", type=int, default=1_000_000, help="how many are many")
    parser.add_argument("--against", type=Path, help="another tree to measure as well")
    parser.add_argument("--only", action="append", help="the name of a figure's function")
    arguments = parser.parse_args()
    trees = {"this": TREE}
    if arguments.against:
        trees["against"] = arguments.against
    bindir, _ = find_binaries(None)
    with EmbeddedPostgres(bindir=bindir, settings=SETTINGS) as server:
        places = {
            name: Place(server, name, tree, arguments.many) for name, tree in trees.items()
        }
        for figure in FIGURES:
            if arguments.only and figure.__name__ not in arguments.only:
                continue
            found: dict[str, dict[str, float]] = {}
            for name, place in places.items():
                place.empty()
                for what, value in figure(place):
                    found.setdefault(what, {})[name] = value
            for what, values in found.items():
                told = "  ".join(f"{name} {value:10.2f}" for name, value in values.items())
                print(f"{what:75} {told}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
