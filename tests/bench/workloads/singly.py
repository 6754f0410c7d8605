"""What jobs cost one at a time, and one round trip for all against an update by key."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator

from bench.contenders import CONTENDERS, ROTA, VACUUM, connect, drain_singly
from bench.figures import Figure, Missing, Ratio, Reading
from bench.measure import Meter, Pgbench, pgbench
from bench.measured_server import BenchServer, one

NUMBER = 2
CONNECTIONS = (1, 4, 8)
NAME = "rota.finish_and_claim"
# What one call claims the next one finishes; the first has nothing to finish.
NOTHING = {"ids": "{}", "tokens": "{}"}
ONE_TRIP = """
select
    coalesce(array_agg(job_id), '{}') as ids,
    coalesce(array_agg(lease_token), '{}') as tokens
from rota.finish_and_claim('bench', :ids, :tokens) \\gset
"""
TWO_TRIPS = """
select coalesce(max(job_id), 0) as job_id, coalesce(max(lease_token), 0) as lease_token
from rota.claim_jobs('bench') \\gset
select rota.finish_job(:job_id, :lease_token);
"""
ROWS = 100_000
UPDATE = f"""
\\set id random(1, {ROWS})
update bare.rows set value = value + 1 where id = :id;
"""
TABLE = f"""
    create table bare.rows (id bigint primary key, value bigint not null, filler text);
    insert into bare.rows select n, 0, repeat('x', 80) from generate_series(1, {ROWS}) as g (n);
    vacuum analyze bare.rows;
"""


def run(server: BenchServer, rounds: int, is_quick: bool) -> Iterator[Figure]:
    yield from alone(server, rounds, 300 if is_quick else 3_000)
    yield from against_update(server, rounds, 1 if is_quick else 5)


def alone(server: BenchServer, rounds: int, jobs: int) -> Iterator[Figure]:
    """Claim and finish in one connection, by two calls."""
    db = connect(server.fresh("singly"))
    values = defaultdict(list)
    for turn in range(rounds + 1):
        for queue in random.sample(CONTENDERS, len(CONTENDERS)):
            db.execute(queue.fill, (jobs + 50,))
            for table in queue.tables:
                db.execute(f"analyze {table}")
            drain_singly(db, queue, 50)
            meter = Meter(db)
            meter.start()
            done = drain_singly(db, queue, jobs)
            meter.stop()
            if done < jobs:
                raise RuntimeError(f"{queue.name}: {done} of {jobs} jobs")
            db.execute(VACUUM)
            if turn:
                values[queue.name].append(meter.cpu / done * 1e6)
    db.close()
    server.drop("singly")
    name = "claim + finish singly: cpu"
    yield Ratio(
        number=NUMBER,
        name=name,
        unit="us/job",
        ours=values["rota"],
        theirs=values["bare"],
        yardstick="bare",
        goal=1.1,
        is_cost=True,
        note="CPU of the backend, two calls",
    )
    yield Reading(number=NUMBER, name=f"{name} of lean", unit="us/job", values=values["lean"])


def against_update(server: BenchServer, rounds: int, seconds: int) -> Iterator[Figure]:
    """Jobs in a second through one call each, against updates of a row by its key."""
    dsn = server.fresh("trips")
    db = connect(dsn, is_quiet=False)
    for statement in TABLE.split(";"):
        if statement.strip():
            db.execute(statement)
    has_call = one(db, f"select to_regproc('{NAME}') is not null")
    scripts = {"update": UPDATE, "two calls": TWO_TRIPS}
    if has_call:
        scripts["one call"] = ONE_TRIP
    else:
        yield Missing(number=NUMBER, name="one round trip", reason=f"there is no {NAME}()")

    runs: defaultdict[tuple[str, int], list[Pgbench]] = defaultdict(list)
    for _ in range(rounds):
        for clients in CONNECTIONS:
            for name in random.sample(list(scripts), len(scripts)):
                waiting = one(db, "select count(*) from rota.jobs")
                db.execute(ROTA.fill, (max(0, seconds * 20_000 - waiting),))
                done = pgbench(
                    server,
                    dsn,
                    scripts[name],
                    clients=clients,
                    seconds=seconds,
                    variables=NOTHING,
                )
                runs[name, clients].append(done)
    db.close()
    server.drop("trips")

    for clients in CONNECTIONS:
        plain = runs["update", clients]
        for name in ("one call", "two calls"):
            if not (ours := runs[name, clients]):
                continue
            say = f"jobs singly by {name}, {clients} connection{'s' * (clients > 1)}"
            if name == "one call":
                yield Ratio(
                    number=NUMBER,
                    name=say,
                    unit="jobs/s",
                    ours=[each.rate for each in ours],
                    theirs=[each.rate for each in plain],
                    yardstick="update by key",
                    goal=0.8,
                )
            else:
                rates = [each.rate for each in ours]
                yield Reading(number=NUMBER, name=say, unit="jobs/s", values=rates)
            yield Reading(
                number=NUMBER,
                name=f"{say}: cpu of the server",
                unit="us/job",
                values=[each.server_cpu / each.transactions * 1e6 for each in ours],
                note="all server processes",
            )
        yield Reading(
            number=NUMBER,
            name=f"update by key, {clients} connection{'s' * (clients > 1)}: cpu of the server",
            unit="us/update",
            values=[each.server_cpu / each.transactions * 1e6 for each in plain],
            note="all server processes",
        )
