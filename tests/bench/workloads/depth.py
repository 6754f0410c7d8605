"""Draining jobs with a million others in the same queue, against an empty one."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator

from bench.contenders import ROTA, VACUUM, connect, drain
from bench.figures import Figure, Ratio
from bench.measure import Meter
from bench.measured_server import BenchServer, Db

NUMBER = 5
BATCH = 100
TURN = 5
OTHERS = """
    insert into rota.jobs (
        queue, job_type, payload, priority, max_attempts,
        status, run_at, attempts, lease_token, failed_at, last_error)
    select 'default', 'noop', '{"n": 1}', 0, 10,
        case when %(attempts)s > 0 then 'failed' else 'queued' end,
        clock_timestamp() + %(due)s::interval + n * interval '10 microseconds',
        %(attempts)s, %(attempts)s,
        case when %(attempts)s > 0 then clock_timestamp() end,
        case when %(attempts)s > 0 then 'no luck' end
    from generate_series(1, %(count)s) as g (n)
"""
# The jobs that are drained are all due for an hour.
SCENARIOS: dict[str, dict[str, object] | None] = {
    "none": None,
    "waiting behind them": {"due": "-30 minutes", "attempts": 0},
    "scheduled for later": {"due": "1 day", "attempts": 0},
    "waiting for a retry": {"due": "1 hour", "attempts": 1},
}


def run(server: BenchServer, rounds: int, is_quick: bool) -> Iterator[Figure]:
    others, jobs = (50_000, 1_000) if is_quick else (1_000_000, 10_000)
    dbs: dict[str, Db] = {}
    for name, those in SCENARIOS.items():
        dbs[name] = connect(server.fresh(f"depth_{len(dbs)}"))
        if those is not None:
            dbs[name].execute(OTHERS, {**those, "count": others})
        dbs[name].execute("vacuum (freeze, analyze) rota.jobs")

    walls, cpus = defaultdict(list), defaultdict(list)
    for turn in range(rounds + 1):
        meters = {name: Meter(db) for name, db in dbs.items()}
        for db in dbs.values():
            db.execute(ROTA.fill, (jobs,))
        # Some here, some there: what disturbs the machine disturbs all alike.
        for _ in range(jobs // BATCH // TURN):
            for name in random.sample(list(dbs), len(dbs)):
                meters[name].start()
                done = drain(dbs[name], ROTA, TURN, BATCH)
                meters[name].stop()
                if done != TURN * BATCH:
                    raise RuntimeError(f"{name}: {done} jobs instead of {TURN * BATCH}")
        for name, db in dbs.items():
            db.execute(VACUUM)
            if turn:
                walls[name].append(jobs / meters[name].wall)
                cpus[name].append(meters[name].cpu / jobs * 1e6)
    for n, db in enumerate(dbs.values()):
        db.close()
        server.drop(f"depth_{n}")

    for name in list(SCENARIOS)[1:]:
        for values, what, unit, goal in (
            (walls, "", "jobs/s", 0.97),
            (cpus, ": cpu", "us/job", 1.03),
        ):
            yield Ratio(
                number=NUMBER,
                name=f"drain with {others:,} {name}{what}",
                unit=unit,
                ours=values[name],
                theirs=values["none"],
                yardstick="without them",
                goal=goal,
                is_cost=bool(what),
            )
