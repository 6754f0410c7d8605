"""A million jobs going through while something old keeps vacuum from its work.

Producers keep the queue at a level while the jobs go through: were they all put in first, a
claim would never come to where dead entries lie.  Of every hundred jobs two fail once and come
back after a second, and five are scheduled for two seconds later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from bench import holders
from bench.contenders import connect
from bench.figures import Figure, Missing, Ratio, Reading, Series
from bench.measure import PgbenchProcess
from bench.measured_server import BenchServer, Db, one

NUMBER = 6
BATCHES = """
select
    count(*) as found,
    coalesce((array_agg(job_id))[case when count(*) = 100 then 3 else 1 end:], '{}') as ids,
    coalesce((array_agg(lease_token))[case when count(*) = 100 then 3 else 1 end:], '{}')
        as tokens,
    coalesce((array_agg(job_id))[1], 0) as id_1,
    coalesce((array_agg(lease_token))[1], 0) as token_1,
    coalesce((array_agg(job_id))[2], 0) as id_2,
    coalesce((array_agg(lease_token))[2], 0) as token_2
from rota.claim_jobs('bench', max_jobs => 100) \\gset
\\if :found = 0
\\sleep 5 ms
\\else
\\if :found = 100
select count(*) from rota.fail_job(:id_1, :token_1, 'no luck', retry_in => '1 second');
select count(*) from rota.fail_job(:id_2, :token_2, 'no luck', retry_in => '1 second');
\\endif
select count(*) as busy from rota.finish_jobs(:ids, :tokens) where outcome = 'busy' \\gset
\\if :busy > 0
select count(*) from rota.finish_jobs(:ids, :tokens);
\\endif
\\endif
"""
SINGLY = """
\\set dice random(1, 100)
select
    count(*) as found,
    coalesce(max(job_id), 0) as id,
    coalesce(max(lease_token), 0) as token
from rota.claim_jobs('bench') \\gset
\\if :found = 0
\\sleep 5 ms
\\elif :dice <= 2
select count(*) from rota.fail_job(:id, :token, 'no luck', retry_in => '1 second');
\\else
select rota.finish_job(:id, :token);
\\endif
"""
BARE_BATCHES = """
select count(*) as found, coalesce(array_agg(task_id), '{}') as ids
from bare.claim_tasks(100) \\gset
\\if :found = 0
\\sleep 5 ms
\\else
select count(*) from bare.finish_tasks(:ids);
\\endif
"""
CALL = 2_000
ENQUEUE = f"""
    select count(*)
    from rota.enqueue_many((
        select jsonb_agg(jsonb_build_object(
            'job_type', 'noop', 'payload', jsonb_build_object('n', n),
            'delay', case when n % 20 = 0 then '2 seconds' end))
        from generate_series(1, {CALL}) as g (n)
    ))
"""
BARE_ENQUEUE = f"""
    select count(*)
    from bare.enqueue_tasks((
        select jsonb_agg(jsonb_build_object(
            'task_type', 'noop', 'payload', jsonb_build_object('n', n)))
        from generate_series(1, {CALL}) as g (n)
    ))
"""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """How a queue is filled, and what it says of itself."""

    enqueue: str
    tick: str
    # What is done, from the statistics: counting rows would get slower with every dead one.
    done: str
    # The one time of each job that is done, in order.
    ends: str
    heap: str
    indexes: str


ROTA = Queue(
    enqueue=ENQUEUE,
    tick="select from rota.tick()",
    done="""
        select coalesce(sum(pg_stat_get_tuples_inserted(relid)), 0)::bigint
        from pg_partition_tree('rota.finished_jobs')
    """,
    ends="select extract(epoch from finished_at)::float8 as t from rota.finished_jobs",
    heap="select pg_table_size('rota.jobs')",
    indexes="select pg_indexes_size('rota.jobs')",
)
BARE = Queue(
    enqueue=BARE_ENQUEUE,
    tick="select",
    done="select coalesce(pg_stat_get_tuples_updated('bare.tasks'::regclass), 0) / 2",
    ends="""
        select extract(epoch from end_time)::float8 as t from bare.tasks where status = 'done'
    """,
    heap="select pg_table_size('bare.tasks')",
    indexes="select pg_indexes_size('bare.tasks')",
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: who works how, and what is held meanwhile."""

    name: str
    workers: int
    hold: holders.Holder
    script: str = BATCHES
    queue: Queue = ROTA
    level: int = 30_000
    goal: float | None = 0.9
    jobs: int = 1_000_000
    limit: float = 120
    after: float = 0


CELLS = [
    Cell(name="nothing, batches, 8 workers", workers=8, hold=holders.nobody, goal=None),
    Cell(name="a snapshot, batches, 8 workers", workers=8, hold=holders.snapshot, after=150),
    Cell(name="a snapshot, batches, 1 worker", workers=1, hold=holders.snapshot),
    Cell(name="a writer, batches, 8 workers", workers=8, hold=holders.writer),
    Cell(name="pg_dump, batches, 8 workers", workers=8, hold=holders.dump),
    Cell(name="a slot, batches, 8 workers", workers=8, hold=holders.slot),
    Cell(
        name="a snapshot, singly, 1 worker",
        workers=1,
        hold=holders.snapshot,
        script=SINGLY,
        limit=90,
        level=6_000,
    ),
    Cell(
        name="a snapshot, singly, 8 workers",
        workers=8,
        hold=holders.snapshot,
        script=SINGLY,
        limit=90,
        level=12_000,
    ),
    Cell(
        name="bare: a snapshot, batches, 8 workers",
        workers=8,
        hold=holders.snapshot,
        script=BARE_BATCHES,
        queue=BARE,
        goal=None,
        limit=60,
    ),
]


@dataclass(kw_only=True)
class Outcome:
    """What was seen: the times by the clock, and the sizes of heap and indexes."""

    began: float = 0
    released: float = 0
    ended: float = 0
    before: tuple[int, int] = (0, 0)
    sizes: list[tuple[float, int, int]] = field(default_factory=list)
    tenths: list[float] = field(default_factory=list)
    rates: list[tuple[float, float]] = field(default_factory=list)
    jobs: int = 0
    lowest: int = 2**31


def run(server: BenchServer, rounds: int, is_quick: bool) -> Iterator[Figure]:
    for cell in CELLS[:3] if is_quick else CELLS:
        limit, after, warm = cell.limit, cell.after, 5.0
        if is_quick:
            limit, after, warm = 1.5, min(after, 2), 0.3
        try:
            outcome = one_cell(server, cell, limit, after, warm)
        except Exception as error:  # the other cells are measured all the same
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            yield Missing(number=NUMBER, name=f"held by {cell.name}", reason=reason)
        else:
            yield from figures(cell, outcome)


def one_cell(
    server: BenchServer, cell: Cell, limit: float, after: float, warm: float
) -> Outcome:
    dsn = server.fresh("held")
    server.admin.execute("checkpoint")
    db = connect(dsn, is_quiet=False)
    feeder = Feeder(db, cell)
    feeder.fill(cell.level)
    db.execute("analyze rota.jobs")
    db.execute("analyze bare.tasks")
    found = Outcome()
    workers = PgbenchProcess(server, dsn, cell.script, clients=cell.workers, seconds=3600)
    try:
        feeder.go_on(workers, found, time.time() + warm)
        found.before = (one(db, cell.queue.heap), one(db, cell.queue.indexes))
        with cell.hold(server, dsn):
            if holders.is_held(db) != (cell.hold is not holders.nobody):
                raise RuntimeError("what should hold back vacuum does not, or something else")
            feeder.go_on(workers, found, time.time() + warm / 2)
            found.began, found.lowest = time.time(), cell.level
            feeder.go_on(workers, found, found.began + limit, feeder.done() + cell.jobs)
            found.released = time.time()
        feeder.go_on(workers, found, time.time() + after)
        found.ended = time.time()
    finally:
        workers.stop()
    read_rates(db, cell, found)
    db.close()
    server.drop("held")
    return found


class Feeder:
    """Keeps the queue at its level, ticks, and notes the sizes."""

    def __init__(self, db: Db, cell: Cell) -> None:
        self._db = db
        self._cell = cell
        self._fed = 0

    def done(self) -> int:
        return int(one(self._db, self._cell.queue.done))

    def fill(self, jobs: int) -> None:
        """Enqueue at least so many."""
        for _ in range(0, jobs, CALL):
            self._db.execute(self._cell.queue.enqueue)
            self._fed += CALL

    def go_on(
        self, workers: PgbenchProcess, found: Outcome, until: float, jobs: int | None = None
    ) -> None:
        """Feed until this time, or until so many jobs are done."""
        queue, next_look = self._cell.queue, 0.0
        while (now := time.time()) < until:
            done = self.done()
            if jobs is not None and done >= jobs:
                break
            level = self._fed - done
            found.lowest = min(found.lowest, level)
            self.fill(max(0, self._cell.level - level))
            if now >= next_look:
                next_look = now + 1
                self._db.execute(queue.tick)
                sizes = one(self._db, queue.heap), one(self._db, queue.indexes)
                found.sizes.append((now, *sizes))
            if workers.process.poll() is not None:
                workers.wait()
                raise RuntimeError("pgbench ended before it should")
            time.sleep(0.05)


def read_rates(db: Db, cell: Cell, found: Outcome) -> None:
    """Read from the finished jobs themselves how many ended when."""
    bounds: list[float] = one(
        db,
        "select percentile_disc(%s::float8[]) within group (order by t)"
        f" from ({cell.queue.ends}) as e where t between %s and %s",
        ([n / 10 for n in range(11)], found.began, found.released),
    )
    ends = (found.began, found.released)
    counted = f"select count(*) from ({cell.queue.ends}) as e where t between %s and %s"
    found.jobs = one(db, counted, ends)
    if not bounds or found.jobs < 1_000:
        raise RuntimeError(f"only {found.jobs} jobs were done")
    found.tenths = [found.jobs / 10 / (high - low) for low, high in pairwise(bounds)]
    step = max(0.5, (found.ended - found.began) / 60)
    rows = db.execute(
        f"select floor((t - %(began)s) / %(step)s)::integer as n, count(*) / %(step)s"
        f" from ({cell.queue.ends}) as e where t between %(began)s and %(ended)s"
        " group by n order by n",
        {"began": found.began, "step": step, "ended": found.ended},
    ).fetchall()
    found.rates = [(n * step, float(rate)) for n, rate in rows[:-1]]


def figures(cell: Cell, found: Outcome) -> Iterator[Figure]:
    name = f"held by {cell.name}"
    note = f"{found.jobs:,} jobs in {found.released - found.began:.0f} s"
    note += f", never fewer than {found.lowest:,} waiting"
    if found.jobs < cell.jobs * 0.99:
        note += f" of the {cell.jobs:,} meant, for want of time"
    first, last = found.tenths[0], found.tenths[-1]
    if cell.goal is None:
        values = [last / first]
        share = "share of the first tenth"
        yield Reading(
            number=NUMBER, name=f"{name}: last tenth", unit=share, values=values, note=note
        )
    else:
        yield Ratio(
            number=NUMBER,
            name=f"{name}: last tenth",
            unit="jobs/s",
            ours=[last],
            theirs=[first],
            yardstick="the first tenth",
            goal=cell.goal,
            note=note,
        )
    yield Reading(
        number=NUMBER,
        name=f"{name}: all of it",
        unit="jobs/s",
        values=[found.jobs / (found.released - found.began)],
    )
    plot = "Rate while held, singly" if cell.script == SINGLY else "Rate while held, batches"
    yield Series(plot=plot, name=cell.name, unit="jobs/s", points=found.rates)
    if cell.after:
        yield from shrinking(name, found)


def shrinking(name: str, found: Outcome) -> Iterator[Figure]:
    """How big table and indexes grew, and what became of them after the release."""
    for column, what in ((1, "table"), (2, "indexes")):
        before = found.before[column - 1]
        later = [size for size in found.sizes if size[0] >= found.released]
        most = max(size[column] for size in found.sizes)
        small = [size[0] - found.released for size in later if size[column] <= 2 * before]
        yield Ratio(
            number=NUMBER,
            name=f"{name}: {what} after the release",
            unit="MB",
            ours=[later[-1][column] / 1e6],
            theirs=[before / 1e6],
            yardstick="before",
            goal=2,
            is_cost=True,
            note=f"{most / 1e6:.0f} MB at its biggest, "
            + (
                f"at most twice as before {small[0]:.0f} s after"
                if small
                else "never less than"
            )
            + ("" if small else f" twice as before in {later[-1][0] - found.released:.0f} s"),
        )
        yield Series(
            plot="Size under a snapshot and after it",
            name=f"{what}, released at {found.released - found.began:.0f} s",
            unit="MB",
            points=[(size[0] - found.began, size[column] / 1e6) for size in found.sizes],
        )
