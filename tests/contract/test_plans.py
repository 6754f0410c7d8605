"""Hot statements stay on their indexes, whatever the planner believes of the tables.

The plans are those that really ran inside of the functions, as auto_explain reports them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import namedtuple_row

pytestmark = [pytest.mark.plain_session, pytest.mark.own_session, pytest.mark.slow]

Db = psycopg.Connection[Any]

READY = """
    insert into rota.jobs (queue, job_type, payload, priority, max_attempts, status, run_at)
    select (array['a', 'b'])[1 + n %% 2], 'x', '{}', 0, 10, 'queued',
        rota.now() - interval '1 hour'
    from generate_series(1, %s::integer) as g (n)
"""
# What is not due yet, in front of what is.
FUTURE = """
    insert into rota.jobs (queue, job_type, payload, priority, max_attempts, status, run_at)
    select 'a', 'x', '{}', -1, 10, 'queued', rota.now() + interval '30 days'
    from generate_series(1, %s::integer) as g (n)
"""
FINISHED = """
    insert into rota.finished_jobs (
        id, queue, job_type, payload, priority, max_attempts, status, run_at, attempts,
        lease_token, created_at, updated_at, finished_at
    )
    select n, 'a', 'x', '{}', 0, 10, 'succeeded', rota.now(), 1, 1, rota.now(), rota.now(),
        rota.now()
    -- Above all that the sequence gives, also where ids are 1024 apart.
    from generate_series(1000000000001, 1000000000000 + %s::bigint) as g (n)
"""

SCENARIOS: dict[str, list[tuple[str, int] | str]] = {
    "no statistics": [(FUTURE, 5_000), (READY, 20_000)],
    "statistics of an empty table": ["analyze", (FUTURE, 5_000), (READY, 20_000)],
    "statistics of one row": [(READY, 1), "analyze", (FUTURE, 5_000), (READY, 20_000)],
    "many finished": [(FINISHED, 100_000), (READY, 20_000), "analyze"],
    "many ready": [(FUTURE, 20_000), (READY, 60_000), "analyze"],
    "a million finished": [(FINISHED, 1_000_000), (READY, 20_000), "analyze"],
    "a million ready": [(FUTURE, 200_000), (READY, 800_000), "analyze"],
}
PARAMS = [
    pytest.param(name, marks=[pytest.mark.long] if "million" in name else [])
    for name in SCENARIOS
]


@pytest.fixture(scope="module", params=PARAMS)
def scenario(
    request: pytest.FixtureRequest, server: Any, admin: Db, template: str
) -> Iterator[str]:
    """The DSN of a database with these rows and these statistics."""
    name = "plans"
    database = sql.Identifier(name)
    admin.execute(
        sql.SQL("create database {} template {}").format(database, sql.Identifier(template))
    )
    with psycopg.connect(server.url(name), autocommit=True) as db:
        for (table,) in db.execute(
            "select oid::regclass::text from pg_class"
            " where relnamespace = 'rota'::regnamespace and relkind = 'r'"
        ).fetchall():
            db.execute(f"alter table {table} set (autovacuum_enabled = false)")
        for step in SCENARIOS[request.param]:
            if isinstance(step, str):
                db.execute("analyze rota.jobs, rota.finished_jobs, rota.queues")
            else:
                db.execute(step[0], (step[1],))
    yield server.url(name)
    admin.execute(sql.SQL("drop database {} with (force)").format(database))


class Session:
    """A connection that keeps the plans of all that ran in its last call."""

    def __init__(self, connection: Db, mode: str) -> None:
        self.connection = connection
        self.plans: list[dict[str, Any]] = []
        # The sixth time runs what a session runs for the rest of its life; a plan that is
        # forced is so from the first, but first the catalog is read.
        self.rounds = 6 if mode == "auto" else 4
        connection.add_notice_handler(self._keep)
        for setting in (
            f"set plan_cache_mode = {mode}",
            "load 'auto_explain'",
            "set auto_explain.log_min_duration = 0",
            "set auto_explain.log_nested_statements = on",
            "set auto_explain.log_analyze = on",
            "set auto_explain.log_timing = off",
            "set auto_explain.log_buffers = on",
            "set auto_explain.log_format = json",
            "set client_min_messages = log",
        ):
            connection.execute(setting)

    def _keep(self, diagnostic: Any) -> None:
        _, found, plan = (diagnostic.message_primary or "").partition("plan:\n")
        if found:
            self.plans.append(json.loads(plan))

    def prepare(self, statements: str, *parameters: Any) -> None:
        """Bring about what is measured then: to be told of its plans would take long."""
        self.connection.execute("set auto_explain.log_min_duration = -1")
        self.connection.execute(statements.encode(), parameters or None, prepare=False)
        self.connection.execute("set auto_explain.log_min_duration = 0")

    def call(self, query: str, *parameters: Any) -> list[Any]:
        self.plans.clear()
        with self.connection.cursor(row_factory=namedtuple_row) as cursor:
            return cursor.execute(query, parameters).fetchall()  # type: ignore[arg-type]

    def nodes(self) -> Iterator[dict[str, Any]]:
        """Give every node of every plan of the last call."""
        stack = [plan["Plan"] for plan in self.plans]
        while stack:
            node = stack.pop()
            stack += node.get("Plans", [])
            yield node

    def blocks(self) -> int:
        """Return how many pages the last call touched; its own plan comes last."""
        top = self.plans[-1]["Plan"]
        return int(top["Shared Hit Blocks"] + top["Shared Read Blocks"])


# The first five plans of a statement are custom ones where nothing is forced.
MODES = ["auto", "force_generic_plan"]


@pytest.fixture(params=MODES)
def session(request: pytest.FixtureRequest, scenario: str) -> Iterator[Session]:
    with psycopg.connect(scenario, autocommit=True) as connection:
        try:
            yield Session(connection, request.param)
        except psycopg.errors.UndefinedFile:
            pytest.skip("the server has no auto_explain")


def is_small(node: dict[str, Any]) -> bool:
    """Whether PostgreSQL 18 reads settings into a hash, since there are few by its statistics.

    It takes no account there of what is disabled, and plans again when they become many.
    """
    settings = ("fair_queues", "limits", "pauses", "queues")
    return node.get("Disabled") is True and node.get("Relation Name") in settings


def check(session: Session, round_number: int, jobs: int, name: str) -> None:
    """Hold the plans of the last call against what so many jobs may cost.

    The first rounds also read the catalog.
    """
    assert len(session.plans) > 1, name
    for node in session.nodes():
        kind, relation = node["Node Type"], node.get("Relation Name")
        # The list of names that something is set for is short, see base/configured.sql, and so
        # are the grants.  And the progress of the statistics is one row.
        is_list = relation in ("configured_names", "queue_grants", "stats_progress")
        is_whole = kind == "Seq Scan" and relation and not is_small(node)
        assert not is_whole or is_list, (name, relation)
        if kind == "Sort":
            assert node["Actual Rows"] <= 2 * (jobs + 20), (name, node)
        if relation == "jobs":
            removed = node.get("Rows Removed by Filter", 0)
            removed += node.get("Rows Removed by Index Recheck", 0)
            assert removed <= 20 + jobs, (
                name,
                node["Index Name"],
                removed,
                node.get("Index Cond"),
                node.get("Filter"),
            )
    if round_number > 2:
        assert session.blocks() <= 200 + 40 * jobs, (name, session.blocks())


CLAIM = "select * from rota.claim_jobs('w', %s::text[], %s, job_types => %s::text[])"


@pytest.mark.slow
def test_plans_of_every_hot_call_stay_on_their_indexes(session: Session) -> None:
    for n in range(session.rounds):
        for queues, types in [(["a"], None), (["a", "b"], None), (["a", "b"], ["x", "y"])]:
            for max_jobs in (1, 50):
                jobs = session.call(CLAIM, queues, max_jobs, types)
                assert len(jobs) == max_jobs
                check(session, n, max_jobs, "claim")

        ids = [[job.job_id for job in jobs[m : m + 10]] for m in (0, 10, 20)]
        tokens = [[job.lease_token for job in jobs[m : m + 10]] for m in (0, 10, 20)]
        for query, parameters, count in [
            ("select * from rota.heartbeat_jobs(%s, %s)", (ids[0], tokens[0]), 10),
            ("select * from rota.finish_jobs(%s, %s)", (ids[0], tokens[0]), 10),
            ("select * from rota.finish_jobs(%s, %s)", (ids[0], tokens[0]), 10),  # again
            ("select * from rota.release_jobs(%s, %s)", (ids[1], tokens[1]), 10),
        ]:
            session.call(query, *parameters)
            check(session, n, count, query)
        for query, m in [
            ("select * from rota.heartbeat(%s, %s)", 30),
            ("select rota.set_progress(%s, %s, 5)", 30),
            ("select rota.finish_job(%s, %s)", 30),
            ("select rota.finish_job(%s, %s)", 30),  # again
            ("select * from rota.fail_job(%s, %s, 'e')", 31),
            ("select * from rota.fail_job(%s, %s, 'e')", 31),  # again
            ("select rota.snooze_job(%s, %s, '1 s')", 32),
        ]:
            session.call(query, jobs[m].job_id, jobs[m].lease_token)
            check(session, n, 1, query)
        for query, m in [
            ("select rota.retry_job(%s)", 31),
            ("select rota.set_priority(%s, 5)", 31),
            ("select rota.reschedule_job(%s, delay => '1 day')", 31),
            ("select rota.cancel_job(%s)", 31),
            ("select rota.retry_job(%s)", 31),
        ]:
            session.call(query, jobs[m].job_id)
            check(session, n, 1, query)


def test_plans_of_enqueue_stay_on_their_indexes(session: Session) -> None:
    key: Callable[[int], str] = lambda n: f"{session.connection.info.backend_pid}-{n}"  # noqa: E731
    for n in range(session.rounds):
        session.call("select rota.enqueue('x', idempotency_key => %s)", key(n))
        session.call("select rota.enqueue('x', idempotency_key => %s)", key(n))
        check(session, n, 1, "enqueue")
        batch = [{"job_type": "x", "idempotency_key": key(n + m)} for m in range(10)]
        session.call("select * from rota.enqueue_many(%s)", json.dumps(batch))
        check(session, n, 10, "enqueue_many")


@pytest.mark.slow
def test_plans_of_the_sweep_stay_on_their_indexes(session: Session) -> None:
    for n in range(session.rounds):
        jobs = session.call(CLAIM, ["b"], 5, None)
        session.connection.execute(
            "update rota.jobs set locked_until = rota.now() where id = any(%s)",
            [[job.job_id for job in jobs]],
        )

        ((swept,),) = session.call("select rota.sweep_stale_leases()")

        assert swept == 5
        check(session, n, 5, "sweep")
    session.call("select rota.sweep_stale_leases()")
    check(session, session.rounds, 0, "sweep of nothing")


@pytest.mark.slow
def test_plans_of_stages_stay_on_their_indexes(session: Session) -> None:
    stages = [{"stage": s, "job_type": s, "queue": "p"} for s in "abc"]
    session.call("select rota.define_pipeline('p', %s)", json.dumps(stages))
    for n in range(session.rounds):
        session.call("select rota.start_pipeline('p') from generate_series(1, 12)")
        jobs = session.call(CLAIM, ["p"], 12, None)
        ids, tokens = [j.job_id for j in jobs[:10]], [j.lease_token for j in jobs[:10]]
        for _ in range(2):  # the second time it asks again
            session.call("select * from rota.finish_jobs(%s, %s)", ids, tokens)
            check(session, n, 10, "finish_jobs of stages")
        for job in jobs[10:]:
            for _ in range(2):
                session.call("select rota.finish_job(%s, %s)", job.job_id, job.lease_token)
                check(session, n, 1, "finish_job of a stage")
        for job in session.call(CLAIM, ["p"], 12, None):
            session.call(
                "select rota.finish_job(%s, %s, next_stage => 'end')",
                job.job_id,
                job.lease_token,
            )
            check(session, n, 1, "finish_job of the last stage")
        session.call("select rota.restart_pipeline(%s, 'b')", ids[0])
        check(session, n, 1, "restart_pipeline")
        session.call("select rota.cancel_job(%s)", ids[0])
        check(session, n, 1, "cancel_job in a stage")


# Jobs behind limits, as enqueue() leaves them.
LIMITED = """
    select rota.enqueue_many(jsonb_agg(jsonb_build_object(
        'queue', %s::text, 'job_type', %s::text, 'run_at', rota.now() - interval '1 hour',
        'limit_key', nullif(%s::text, '') || n %% %s
    )))
    from generate_series(1, 5000) as g (n)
"""


@pytest.fixture(scope="module")
def crowded(server: Any, admin: Db, template: str) -> Iterator[str]:
    """The name of a database with thousands of jobs behind limits, and with tenants."""
    name = "crowded_plans"
    database = sql.Identifier(name)
    admin.execute(
        sql.SQL("create database {} template {}").format(database, sql.Identifier(template))
    )
    with psycopg.connect(server.url(name), autocommit=True) as db:
        for (table,) in db.execute(
            "select oid::regclass::text from pg_class"
            " where relnamespace = 'rota'::regnamespace and relkind = 'r'"
        ).fetchall():
            db.execute(f"alter table {table} set (autovacuum_enabled = false)")
        db.execute("select rota.set_limit(job_type => 'slow', max_running => 3)")
        db.execute("select rota.set_limit(limit_key => 'shop:*', max_running => 1)")
        db.execute("select rota.set_limit(queue => 'b', max_running => 2)")
        for queue, kind, keys, modulus in [
            ("a", "slow", "", 1),
            ("a", "slow", "tenant:", 500),
            ("a", "x", "shop:", 500),
            ("t", "x", "tenant:", 5_000),
        ]:
            db.execute(LIMITED, (queue, kind, keys, modulus))
        while db.execute("select has_more from rota.tick()").fetchone() == (True,):
            pass
        for _ in range(15):
            db.execute("select from rota.claim_jobs('w', '{a}', 100)")
        db.execute(READY, (10_000,))
        db.execute("select from rota.claim_jobs('w', '{b}', 100)")
        db.execute("vacuum rota.jobs, rota.pending_checks")
    yield name
    admin.execute(sql.SQL("drop database {} with (force)").format(database))


@pytest.fixture(scope="module", params=["no statistics", "statistics"])
def limited(
    request: pytest.FixtureRequest, server: Any, admin: Db, crowded: str
) -> Iterator[str]:
    """The DSN of a copy of that database."""
    name = "limited_plans"
    database, model = sql.Identifier(name), sql.Identifier(crowded)
    admin.execute(sql.SQL("create database {} template {}").format(database, model))
    if request.param == "statistics":
        with psycopg.connect(server.url(name), autocommit=True) as db:
            db.execute("analyze rota.jobs, rota.limits, rota.limit_slots, rota.limit_parts")
    yield server.url(name)
    admin.execute(sql.SQL("drop database {} with (force)").format(database))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_plans_of_claims_do_not_see_what_stands_behind_limits(limited: str, mode: str) -> None:
    with psycopg.connect(limited, autocommit=True) as connection:
        try:
            session = Session(connection, mode)
        except psycopg.errors.UndefinedFile:
            pytest.skip("the server has no auto_explain")

        for n in range(session.rounds):
            for queues, expected, max_jobs in [
                (["a"], 1, 1),
                (["a"], 20, 20),
                (["a", "b"], 20, 20),
                (["b"], 0, 10),
                (["t"], 1, 1),
                (["t"], 10, 10),
                (["a", "b", "t"], 10, 10),
            ]:
                jobs = session.call(CLAIM, queues, max_jobs, None)
                assert len(jobs) == expected, queues
                for node in session.nodes():
                    relation = node.get("Relation Name")
                    is_whole = node["Node Type"] == "Seq Scan" and not is_small(node)
                    assert not (is_whole and relation), relation
                    if relation in ("jobs", "limit_slots", "limit_parts"):
                        removed = node.get("Rows Removed by Filter", 0)
                        assert removed <= 60 + max_jobs, json.dumps(node)
                if n > 2:
                    assert session.blocks() <= 400 + 200 * len(jobs), (queues, max_jobs)

            ids, tokens = [j.job_id for j in jobs], [j.lease_token for j in jobs]
            session.call("select * from rota.finish_jobs(%s, %s)", ids, tokens)
            for node in session.nodes():
                relation = node.get("Relation Name")
                is_whole = node["Node Type"] == "Seq Scan" and not is_small(node)
                assert not (is_whole and relation), relation


@pytest.fixture
def own_database(server: Any, admin: Db, template: str) -> Iterator[str]:
    """The DSN of a database of its own."""
    name = "many_things"
    database = sql.Identifier(name)
    admin.execute(
        sql.SQL("create database {} template {}").format(database, sql.Identifier(template))
    )
    yield server.url(name)
    admin.execute(sql.SQL("drop database {} with (force)").format(database))


@pytest.fixture
def own(own_database: str) -> Iterator[Session]:
    with psycopg.connect(own_database, autocommit=True) as connection:
        try:
            yield Session(connection, "auto")
        except psycopg.errors.UndefinedFile:
            pytest.skip("the server has no auto_explain")


def test_a_claim_asks_for_pauses_of_its_jobs_alone(own: Session) -> None:
    own.prepare("select rota.enqueue('x', queue => 'a') from generate_series(1, 100)")
    own.prepare("select rota.set_queue('q' || n) from generate_series(0, 300) as n")
    own.call("select rota.pause_type('other'), rota.pause_type('x', 'q0') as of_queue")
    for _ in range(own.rounds):
        own.call(CLAIM, ["a"], 5, None)
    usual = len(own.plans), own.blocks()
    own.prepare("select rota.pause_type('other' || n) from generate_series(1, 300) as n")
    own.prepare("select rota.pause_type('x', 'q' || n) from generate_series(1, 300) as n")

    jobs = own.call(CLAIM, ["a"], 5, None)

    assert len(jobs) == 5
    assert len(own.plans) <= usual[0] + 5
    assert own.blocks() <= usual[1] + 60


# Five thousand jobs with keys, as many that wait for limits, and as many schedules.
FULL = """
    insert into rota.jobs (queue, job_type, payload, priority, max_attempts, status, run_at,
        idempotency_key, limit_key, hold)
    select 'full', 'x', '{}', 0, 10, 'queued', rota.now() - interval '1 minute',
        case when n % 2 = 0 then 'key ' || n end,
        case when n % 2 = 1 then 'shop:' || n end, case when n % 2 = 1 then 'key shop:' || n end
    from generate_series(1, 10000) as n;
    select count(*) from generate_series(1, 5000) as n,
        lateral rota.schedule_job('full' || n, 'every 1 day', 'x') as s
"""


def test_plans_made_on_empty_tables_read_few_rows_when_these_are_full(own: Session) -> None:
    """A session keeps its plans until the table is analyzed, which is minutes later."""
    own.prepare(
        "alter table rota.jobs set (autovacuum_enabled = false);"
        " alter table rota.job_definitions set (autovacuum_enabled = false);"
        " select rota.set_limit(limit_key => 'shop:*', max_running => 2);"
        " select rota.schedule_job('own', 'every 1 hour', 'x', queue => 'schedules')"
    )

    def finish_in_a_line() -> None:
        for _ in range(2):
            own.call("select rota.enqueue('x', queue => 'lines', ordering_key => 'o')")
        for _ in range(2):
            (job,) = own.call(CLAIM, ["lines"], 1, None)
            own.call("select rota.finish_job(%s, %s)", job.job_id, job.lease_token)

    batch = json.dumps([{"job_type": "x", "idempotency_key": k} for k in ("known", "also")])
    calls: list[Callable[[], object]] = [
        lambda: own.call("select * from rota.enqueue_many(%s)", batch),
        finish_in_a_line,
        lambda: own.call("select rota.run_schedule_now('own')"),
        lambda: own.call("select count(*) from rota.doctor()"),
    ]
    for _ in range(8):
        for call in calls:
            call()
    own.prepare(FULL)

    for call in calls:
        call()

        # The doctor looks at all schedules; and a table of a few megabytes is counted whole.
        tables = ("jobs",) if call is calls[-1] else ("jobs", "job_definitions")
        for plan in own.plans:
            is_count = "j.status, j.run_at <= c_now, count(*)" in plan["Query Text"]
            nodes = [] if is_count else [plan["Plan"]]
            for node in nodes:
                nodes += node.get("Plans", [])
                read = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
                is_watched = node.get("Relation Name") in tables
                assert not is_watched or read * node["Actual Loops"] <= 2500, plan["Query Text"]


# Queues of each day of the last forty, of which one keeps its jobs for that long.
KEPT_LONG = """
    select rota.set_queue('q1', keep_finished => '60 days');
    select rota._create_partition('finished_jobs_done', 'finished_at', current_date - n, 1)
    from generate_series(0, 40) as n;
    insert into rota.finished_jobs (
        id, queue, job_type, payload, priority, max_attempts, status, run_at, attempts,
        lease_token, created_at, updated_at, finished_at
    )
    select 1000 * d + q, 'q' || q, 'x', '{}', 0, 10, 'succeeded', t.at, 1, 1, t.at, t.at, t.at
    from generate_series(0, 40) as d, generate_series(1, 200) as q,
        (select rota.now() as now) as n,
        lateral (select n.now - d * interval '1 day' - interval '10 s' as at) as t;
    update rota.stats_progress
    set counted_until = rota.now() - interval '1 minute',
        complete_until = rota.now() - interval '1 minute',
        sampled_at = rota.now() - interval '1 minute';
"""


def probes_of_history(plans: list[dict[str, Any]]) -> int:
    """Return how often these plans looked into a partition of what ended."""
    nodes, probes = [*plans], 0
    for node in nodes:
        nodes += node.get("Plans", [])
        if node.get("Relation Name", "").startswith("finished_jobs_done"):
            probes += node["Actual Loops"]
    return probes


def test_maintenance_looks_for_queues_on_few_days_of_a_long_history(own: Session) -> None:
    own.prepare(KEPT_LONG)

    own.call("select * from rota.tick()")

    looks = [p["Plan"] for p in own.plans if "with recursive found" in p["Query Text"]]
    probes = probes_of_history(looks)
    # Forty days have 8,000.
    assert 0 < probes <= 5_000, probes
    assert own.call("select count(*) from rota.job_stats where step = 'minute'") == [(200,)]


def test_a_plan_to_move_a_queue_looks_up_no_job_of_keys_of_others(own: Session) -> None:
    own.prepare(KEPT_LONG)
    own.prepare(
        "insert into rota.idempotency_keys (idempotency_key, key_scope, job_id, queue,"
        " unique_until, expires_at) select f.id::text, 'x', f.id, f.queue, m.at, m.at"
        " from rota.finished_jobs as f, (select rota.now() + interval '1 day' as at) as m"
    )

    found = own.call("select finding from rota.plan_queue_move('none', 3)")

    assert "idempotency_keys" not in {row.finding for row in found}
    assert probes_of_history([plan["Plan"] for plan in own.plans]) <= 500


def test_a_plan_to_move_a_queue_compares_no_job_of_a_key_with_all_others(own: Session) -> None:
    """Analyzed or not, and a queue may be one long line."""
    own.prepare(
        "alter table rota.jobs set (autovacuum_enabled = false);"
        " insert into rota.jobs (queue, job_type, payload, priority, max_attempts, status,"
        " run_at, ordering_key, skip_dead, if_parent_dead) select 'q', 'x', '{}', 0, 10,"
        " 'blocked', rota.now(), 'k', false, 'cancel' from generate_series(1, 1000)"
    )
    own.prepare("select rota.set_database_number(5)")
    for _ in range(2):
        own.call("select * from rota.plan_queue_move('q', 6)")

        rows = max(node["Actual Rows"] * node["Actual Loops"] for node in own.nodes())
        removed = max(node.get("Rows Removed by Filter", 0) for node in own.nodes())
        assert max(rows, removed) <= 2000
        own.prepare("analyze rota.jobs")


def test_how_far_a_queue_has_moved_is_told_without_its_history(own: Session) -> None:
    """The command asks each second, and a queue may have had millions of jobs."""
    own.prepare(KEPT_LONG)
    own.prepare("select rota.set_database_number(5), rota.begin_queue_move('q1', 6)")
    own.prepare(
        "insert into rota.dependencies (job_id, parent_id)"
        " select rota.enqueue('x', queue => 'q2'), f.id from rota.finished_jobs as f"
        " where f.queue = 'q1'"
    )

    (status,) = own.call("select state from rota.queue_move_status('q1')")

    assert status.state == "moving"
    assert probes_of_history([plan["Plan"] for plan in own.plans]) == 0


def test_how_far_a_queue_has_come_is_told_without_other_moves(own: Session) -> None:
    own.prepare(
        "insert into rota.receipts (move_id, source_job_id, source_created_at, job_id)"
        " select case when n > 50000 then 2 else 1 end, n, rota.now(), n"
        " from generate_series(1, 50010) as n; analyze rota.receipts;"
        " insert into rota.queue_moves (move_id, queue, direction, database)"
        " values (2, 'q', 'in', 6)"
    )

    own.call("select moved from rota.queue_move_status('q')")
    (status,) = own.call("select moved from rota.queue_move_status('q')")

    assert status.moved == 10
    assert own.blocks() < 100, own.blocks()


def test_a_plan_to_move_on_a_queue_that_has_just_come_reads_no_receipt_twice(
    own: Session,
) -> None:
    """Nothing has analyzed what has come; each of its jobs has a receipt."""
    own.prepare(
        "alter table rota.receipts set (autovacuum_enabled = false);"
        " alter table rota.jobs set (autovacuum_enabled = false)"
    )
    ids = "from generate_series(1, 8000) as n, lateral (select n * 1024 + 3 as id) as j"
    own.prepare(
        "insert into rota.receipts (move_id, source_job_id, source_created_at, job_id)"
        f" select 1, id, rota.now(), id {ids}"
    )
    own.prepare(
        "insert into rota.jobs (id, queue, job_type, payload, priority, max_attempts, status,"
        " run_at) overriding system value"
        f" select id, 'q', 'x', '{{}}', 0, 10, 'queued', rota.now() {ids}"
    )
    own.prepare("select rota.set_database_number(5)")

    found = own.call("select finding from rota.plan_queue_move('q', 6)")

    assert found == []
    assert own.blocks() < 80_000, own.blocks()


def test_the_list_of_limits_reads_no_table_for_each_key(own: Session) -> None:
    own.call("select rota.set_limit(limit_key => 'shop:*', max_running => 2)")
    own.prepare(
        "insert into rota.limit_parts (limit_name, part, max_running, slots)"
        " select 'key shop:' || n, 0, 2, 2 from generate_series(1, 5000) as n"
    )
    hold_all(own, "key shop:1")
    own.prepare("analyze rota.limit_parts, rota.limits")

    found = own.call("select * from rota.limit_stats order by waiting desc limit 50")

    assert len(found) == 50
    for node in own.nodes():
        if node.get("Relation Name") in ("jobs", "limits", "limit_starts"):
            looks_up = node.get("Index Name") == "jobs_hold_idx"
            assert looks_up or node["Actual Loops"] <= 10, node


def hold_all(own: Session, limit_name: str) -> None:
    """Let 3000 jobs wait for one limit, and the planner know of no other."""
    own.prepare(
        "insert into rota.jobs (queue, job_type, payload, priority, max_attempts, status,"
        " run_at, hold) select 'a', 'x', '{}', 0, 10, 'queued', rota.now(), %s"
        " from generate_series(1, 3000)",
        limit_name,
    )
    own.prepare("analyze rota.jobs")


def test_who_asks_for_one_limit_reads_the_jobs_of_no_other(own: Session) -> None:
    own.call("select rota.set_limit(limit_key => 'shop', max_running => 2)")
    hold_all(own, "key other")
    own.prepare("update rota.jobs set hold = 'key ' || id")

    for _ in range(2):
        (found,) = own.call("select * from rota.limit_stats where limit_name = 'key shop'")

    assert found.waiting == 0
    assert own.blocks() <= 1000


def test_a_check_of_a_class_reads_no_key_of_others(own: Session) -> None:
    own.call("select rota.set_limit(limit_key => 'shop:*', max_running => 2)")
    own.prepare(
        "insert into rota.limit_parts (limit_name, part, max_running, slots)"
        " select 'key shop:' || n, 0, 2, 2 from generate_series(1, 5000) as n"
    )
    while own.call("select has_more from rota.tick()") == [(True,)]:
        pass
    own.call("select rota.set_limit(limit_key => 'other:*', max_running => 2)")

    ((done,),) = own.call("select checks_done from rota.tick()")

    assert done >= 1  # one that was deferred may be among them
    for node in own.nodes():
        if node.get("Relation Name") == "limit_parts":
            assert "limit_name" in node.get("Index Cond", ""), node
            assert node["Actual Rows"] + node.get("Rows Removed by Filter", 0) <= 100, node


# Three thousand rows of each kind that a tick has nothing to do with.
NOT_DUE = """
    insert into rota.jobs (queue, job_type, payload, priority, max_attempts, status, run_at,
        definition, hold, expires_at)
    select 'a', 'x', '{}', 0, 10, 'queued', rota.now() + interval '1 day', 's' || n,
        case when n % 2 = 0 then 'time' end, rota.now() + interval '2 days'
    from generate_series(1, 3000) as n;
    select count(*) from generate_series(1, 3000) as n,
        lateral rota.schedule_job('s' || n, 'every 1 day', 'x', overlap => 'skip') as s;
    insert into rota.pending_checks (kind, subject, due_at)
    select 'pause', 'type x' || n, rota.now() + interval '1 day'
    from generate_series(1, 3000) as n;
    insert into rota.idempotency_keys (idempotency_key, key_scope, expires_at)
    select n::text, 'x', rota.now() + interval '1 day' from generate_series(1, 3000) as n;
    insert into rota.effects (scope, key, job_id, lease_token, expires_at)
    select 's', n::text, 1, 1, rota.now() + interval '1 day' from generate_series(1, 3000) as n;
    insert into rota.occurrences (definition, scheduled_for, outcome, recorded_at)
    select 's', rota.now() - n * interval '1 second', 'missed', rota.now()
    from generate_series(1, 3000) as n;
    insert into rota.audit_log (act) select 'retry' from generate_series(1, 3000);
    insert into rota.receipts (move_id, source_job_id, source_created_at, job_id)
    select 0, n, rota.now(), n from generate_series(1, 3000) as n;
    insert into rota.moved_jobs (job_id, move_id, database, new_job_id, moved_at)
    select n, 1, 1, n, rota.now() from generate_series(1, 3000) as n;
    insert into rota.limit_starts (limit_name, cell, starts, purge_at)
    select 'key k', n, 1, rota.now() + interval '1 day' from generate_series(1, 3000) as n;
    insert into rota.limit_parts (limit_name, part, max_running, slots)
    select 'key k:' || n, 0, 1, 1 from generate_series(1, 3000) as n;
    insert into rota.key_starts (ordering_key, first_id)
    select 'k' || n, 1 from generate_series(1, 3000) as n;
    insert into rota.job_errors (job_id, lease_token, attempt, queue, job_type, worker,
        started_at, failed_at, message)
    select 1, n, 1, 'q', 'x', 'w', d.day, d.day, 'm'
    from generate_series(1, 3000) as n, (select rota.now() - interval '8 days' as day) as d;
    select rota.define_pipeline('p', '[{"stage": "s", "queue": "q"}]');
    insert into rota.restored_ends (queue, job_type, status, finished_at, ended_by)
    select 'q', 'x', 'dead', rota.now() + interval '1 hour', pg_current_xact_id()::xid
    from generate_series(1, 3000);
    update rota.stats_progress set is_behind = true;
    insert into rota.stage_runs (job_id, lease_token, pipeline, stage, status, queue, job_type,
        attempts, queued_at, finished_at)
    select n, 1, 'p', 's', 'succeeded', 'q', 'x', 1, d.day, d.day
    from generate_series(1, 3000) as n, (select rota.now() - interval '2 days' as day) as d;
"""


def test_a_tick_reads_no_rows_that_are_not_due(own: Session) -> None:
    own.prepare("select rota.tick()")
    own.prepare(NOT_DUE)
    own.call("select rota.schedule_job('due', 'every 1 hour', 'x', overlap => 'skip')")
    own.prepare("update rota.job_definitions set next_run_at = rota.now() where name = 'due'")
    own.prepare("update rota.maintenance set done_at = '-infinity'")

    own.call("select * from rota.tick()")

    nodes = list(own.nodes())
    assert own.call("select count(*) from rota.jobs") == [(3001,)]
    for node in nodes:
        read = sum(
            node.get(name, 0)
            for name in (
                "Actual Rows",
                "Rows Removed by Filter",
                "Rows Removed by Index Recheck",
            )
        )
        is_table = node.get("Relation Name", "configured_names") != "configured_names"
        assert not is_table or read * node["Actual Loops"] <= 1000, json.dumps(node)


def test_a_dependant_of_live_jobs_reads_no_history(own: Session) -> None:
    own.prepare(KEPT_LONG)
    ((parent,),) = own.call("select rota.enqueue('x')")
    for _ in range(own.rounds):
        own.call("select rota.enqueue('y', depends_on => array[%s])", parent)

    assert own.blocks() <= 100
    for node in own.nodes():
        if node.get("Relation Name", "").startswith("finished_jobs"):
            assert node["Shared Hit Blocks"] + node["Shared Read Blocks"] == 0, node


def read(own: Session, *relations: str) -> int:
    """Return how many rows of these tables the last call has read."""
    return sum(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in own.nodes()
        if node.get("Relation Name") in relations
    )


def test_the_place_of_a_key_is_found_without_the_jobs_of_others(own: Session) -> None:
    own.call("select rota.set_limit(limit_key => 'small', weight => 2)")
    few = "select rota.enqueue('x', limit_key => 'small') from generate_series(1, 3)"
    own.call(few)
    own.prepare("select rota.enqueue('x', limit_key => 'big') from generate_series(1, 3000)")
    own.prepare("analyze rota.jobs")
    for _ in range(own.rounds):
        own.call(few)

    assert 0 < read(own, "jobs") <= 300


def test_a_check_for_later_is_left_without_a_look_at_those_of_other_limits(
    own: Session,
) -> None:
    own.prepare(
        "insert into rota.pending_checks (kind, subject, due_at)"
        " select 'limit', 'key k' || n, rota.now() + interval '1 minute'"
        " from generate_series(1, 3000) as n"
    )

    for _ in range(2):
        own.call("select rota._check_later('type x', rota.now() + interval '1 hour')")

    assert own.call("select count(*) from rota.pending_checks") == [(3001,)]
    own.call("select rota._check_later('type x', rota.now() + interval '1 hour')")
    assert read(own, "pending_checks") <= 10


@pytest.mark.parametrize("kind", ["queue", "slots"])
def test_a_check_that_waits_for_transactions_is_found_among_those_for_later(
    own: Session, kind: str
) -> None:
    own.prepare(
        "insert into rota.pending_checks (kind, subject, due_at, deferrals)"
        " select %s, 'key k' || n, rota.now() + interval '1 minute', 1"
        " from generate_series(1, 3000) as n",
        kind,
    )
    own.prepare("set plan_cache_mode = force_generic_plan")  # as tick() does

    ((is_over,),) = own.call("select rota._has_outlasted_others(%s, 'key k2000')", kind)

    assert is_over
    assert read(own, "pending_checks") <= 10


def test_a_claim_reads_few_parts_of_a_large_limit(own: Session) -> None:
    own.call("select rota.set_limit(job_type => 'x', max_running => 1000000)")
    own.call("select rota.enqueue('x') from generate_series(1, 10)")
    while own.call("select has_more from rota.tick()") == [(True,)]:
        pass
    own.prepare(
        "insert into rota.limit_slots (limit_name)"
        " select 'type x' from generate_series(1, 100);"
        "insert into rota.limit_parts (limit_name, part, max_running, slots)"
        " select 'type x', n, 1000000, 256 from generate_series(0, 3000) as n"
    )

    jobs = own.call(CLAIM, ["default"], 10, None)

    assert len(jobs) == 10
    assert read(own, "limit_parts") <= 10


def test_effects_of_unknown_outcome_are_found_without_the_others(own: Session) -> None:
    own.prepare(
        "insert into rota.effects (scope, key, job_id, lease_token, expires_at, completed_at)"
        " select 's', n::text, 1, 1, rota.now() + interval '1 day',"
        " case when n > 1 then rota.now() end"
        " from generate_series(1, 3000) as n"
    )

    found = own.call("select * from rota.unknown_effects")

    assert [row.key for row in found] == ["1"]
    assert read(own, "effects") <= 10


@pytest.mark.parametrize("edges", ["-1, n", "n, 1000000"])
def test_an_end_reads_no_edges_of_other_jobs(own: Session, edges: str) -> None:
    """Most jobs wait for one, or one waits for most, and the planner knows."""
    own.prepare("select rota.enqueue('x') from generate_series(1, 100)")
    own.prepare("select rota.enqueue('x', ordering_key => 'k') from generate_series(1, 20)")
    own.prepare(
        "insert into rota.dependencies (parent_id, job_id)"
        f" select {edges} from generate_series(1001, 101000) as n"
    )
    own.prepare("analyze rota.dependencies")

    for _ in range(own.rounds):
        own.prepare("update rota.jobs set priority = -1 where ordering_key = 'k'")
        (head,) = own.call(CLAIM, ["default"], 1, None)
        jobs = own.call(CLAIM, ["default"], 4, None)
        ids, tokens = [job.job_id for job in jobs], [job.lease_token for job in jobs]
        for query, parameters in [
            ("select rota.finish_job(%s, %s)", (head.job_id, head.lease_token)),
            ("select rota.finish_job(%s, %s)", (ids[0], tokens[0])),
            ("select rota.finish_jobs(%s, %s)", (ids[1:2], tokens[1:2])),
            ("select rota.release_jobs(%s, %s)", (ids[2:3], tokens[2:3])),
            ("select rota.fail_job(%s, %s, 'e', fatal => true)", (ids[3], tokens[3])),
            ("select rota.retry_with_dependants(%s)", ids[3:]),
            ("select rota.cancel_job(%s)", ids[3:]),
        ]:
            own.call(query, *parameters)
            blocks = sum(
                node["Shared Hit Blocks"] + node["Shared Read Blocks"]
                for node in own.nodes()
                if node.get("Relation Name") == "dependencies"
            )
            # What an index scan passes over by its second column is counted nowhere else.
            assert blocks <= 60, query


def test_set_limit_reads_no_waiting_jobs(own: Session) -> None:
    """As of a backlog that has come since the statistics were made."""
    own.prepare(READY, 3000)

    own.call("select rota.set_limit(job_type => 'x', max_running => 1)")

    assert read(own, "jobs") <= 10


@pytest.mark.parametrize("subject", ["'key ' || n", "'type y'"])
def test_the_next_job_of_a_limit_is_found_without_those_that_others_hold(
    own: Session, subject: str
) -> None:
    """Another limit holds very many, or this one very many of other queues."""
    own.prepare(READY, 3000)
    own.prepare("analyze rota.jobs")  # when none was held
    own.prepare(
        "insert into rota.pending_checks (kind, subject, due_at)"
        f" select 'limit', {subject}, rota.now() + interval '30 s'"
        " from generate_series(1, 50) as n"
    )
    own.prepare("update rota.jobs set hold = 'type y'")

    own.call("select rota._next_let_in_at('{q}', rota.now(), rota.now() + interval '1 minute')")

    assert read(own, "jobs") <= 10


def test_a_queue_that_ages_has_its_jobs_placed_without_those_that_others_hold(
    own: Session,
) -> None:
    own.prepare(READY, 3000)
    own.prepare("analyze rota.jobs")  # when none was held
    own.prepare("update rota.jobs set hold = 'type x' where queue = 'b' or id % 500 = 0")
    own.prepare("select rota.set_queue('a', ageing => '1 hour')")

    own.call("select rota._check_queue('a')")

    assert "jobs_hold_idx" not in {node.get("Index Name") for node in own.nodes()}


def test_a_front_reads_no_keys_that_others_remember(own: Session) -> None:
    own.prepare(
        "insert into rota.idempotency_keys (idempotency_key, key_scope, expires_at)"
        " select n::text, 'x', rota.now() + interval '1 day' from generate_series(1, 3000) as n"
    )
    own.prepare(
        "insert into rota.halted_keys (ordering_key, job_id)"
        " select n::text, n from generate_series(1, 3000) as n"
    )
    own.prepare("analyze rota.idempotency_keys, rota.halted_keys")

    for key in ("idempotency_key", "ordering_key"):
        found = own.call(
            "select rota.find_live_keys(jsonb_build_array(jsonb_build_object("
            "'job_type', 'x', %s::text, k))) as places from unnest('{7,none}'::text[]) as k",
            key,
        )

        assert [row.places for row in found] == [[1], []]
        assert read(own, "idempotency_keys", "halted_keys") <= 10


@pytest.mark.parametrize("job_id", ["-n", "-1"])
def test_an_end_reads_no_runs_that_follow_other_jobs(own: Session, job_id: str) -> None:
    """There may be one of each job, or all of one, and the planner knows."""
    own.prepare(
        "insert into rota.reruns (job_id, run_at, job)"
        f" select {job_id}, rota.now(), jsonb_build_object('idempotency_key', {job_id},"
        " 'job_type', 'x') from generate_series(1, 30000) as n"
    )
    own.prepare("analyze rota.reruns")

    for _ in range(own.rounds):
        own.call("select rota.enqueue('x', idempotency_key => 'k')")
        (job,) = own.call(CLAIM, ["default"], 1, None)
        own.call("select rota.enqueue('x', idempotency_key => 'k', on_conflict => 'rerun')")
        own.call("select rota.finish_job(%s, %s)", job.job_id, job.lease_token)
        assert read(own, "reruns") <= 10
        (job,) = own.call(CLAIM, ["default"], 1, None)
        own.call("select rota.finish_job(%s, %s)", job.job_id, job.lease_token)


@pytest.mark.parametrize(
    "stop", ["pause_type('x')", "set_limit(job_type => 'x', max_running => 0)"]
)
def test_a_claim_that_holds_jobs_reads_none_that_other_limits_let_in(
    own: Session, stop: str
) -> None:
    let_in = (
        "insert into rota.jobs (queue, job_type, payload, priority, max_attempts, status,"
        " run_at, opened_for) select 'other', 'y', '{}', 0, 10, 'queued', rota.now(),"
        " 'key shop:' || n from generate_series(1, %s) as n"
    )
    own.prepare(READY, 100_000)
    own.prepare(f"select rota.{stop}")
    own.prepare(let_in, 100)
    own.prepare("vacuum analyze rota.jobs")
    while own.call("select has_more from rota.tick()") == [(True,)]:
        pass
    own.prepare(let_in, 5000)

    for _ in range(own.rounds):
        assert own.call(CLAIM, ["a"], 10, None) == []
        for node in own.nodes():
            if node.get("Index Name") == "jobs_opened_for_idx":
                assert node["Actual Rows"] + node.get("Rows Removed by Filter", 0) <= 100, node


def test_a_run_that_follows_is_compared_with_no_other_that_waits(own: Session) -> None:
    call = "select rota.enqueue('x', idempotency_key => 'k', on_conflict => 'rerun')"
    own.call(call)
    ((job,),) = own.call("select array[job_id, lease_token] from rota.claim_jobs('w')")
    own.prepare(f"{call} from generate_series(1, 300)")

    own.call("select rota.finish_job(%s, %s)", *job)

    assert read(own, "reruns") <= 3000
