"""One handler, all that is due, and what waits, in the transaction of the test."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, date, datetime, timedelta
from pickle import PicklingError
from typing import Any
from unittest.mock import ANY
from uuid import UUID

import psycopg
import pytest

import rota
from client import computing
from rota import AsyncJob, Job, Registry, RetryIn, Snooze
from rota.testing import (
    assert_enqueued,
    assert_not_enqueued,
    drain,
    drain_async,
    run_job,
    run_job_async,
)

pytestmark = [pytest.mark.slow, pytest.mark.own_session]

TENANT: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="none")


@pytest.fixture
def own(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """The connection of a test that rolls back."""
    with psycopg.connect(dsn) as connection:
        connection.execute("create table letters (id int primary key)")
        yield connection
        connection.rollback()


@pytest.fixture
def registry() -> Registry:
    return Registry()


def letters(connection: psycopg.Connection[Any]) -> list[int]:
    return [row[0] for row in connection.execute("select id from letters order by id")]


# One handler, without a database


@pytest.mark.parametrize("what", ["argument", "result"])
def test_what_cannot_go_to_another_process_is_refused_here_too(
    registry: Registry, what: str
) -> None:
    @registry.handler("compute")
    async def compute(job: AsyncJob) -> None:
        if what == "argument":
            await job.run_in_process(computing.square, lambda: 2)  # type: ignore[arg-type]
        await job.run_in_process(computing.return_what_cannot_be_sent)

    with pytest.raises((AttributeError, PicklingError), match=r"(?i)pickle|local object"):
        run_job(registry, "compute")


def test_a_handler_runs_with_payload_and_attempt(registry: Registry) -> None:
    @registry.handler("send")
    def send(job: Job) -> object:
        return [job.payload["to"], job.attempt, job.max_attempts, job.queue]

    outcome = run_job(registry, "send", {"to": "ada"}, attempt=2, max_attempts=3, queue="mail")

    assert outcome.status == "succeeded"
    assert outcome.result == ["ada", 2, 3, "mail"]


def test_a_handler_that_returns_nothing_has_the_result_that_it_has_set(
    registry: Registry,
) -> None:
    @registry.handler("sets")
    def sets(job: Job) -> object:
        job.result = 1
        return job.payload.get("returned")

    assert run_job(registry, "sets").result == 1
    assert run_job(registry, "sets", {"returned": 2}).result == 2


def test_an_async_handler_runs_with_and_without_a_loop(registry: Registry) -> None:
    @registry.handler("fetch")
    async def fetch(job: AsyncJob) -> int:
        await asyncio.sleep(0)
        await job.set_progress(50)  # for nobody to see
        return job.attempt

    async def within() -> object:
        with pytest.raises(RuntimeError, match="await drain_async"):
            run_job(registry, "fetch")
        return (await run_job_async(registry, "fetch", attempt=4)).result

    assert run_job(registry, "fetch").result == 1
    assert asyncio.run(within()) == 4


def test_what_a_handler_sets_in_its_context_is_for_itself(registry: Registry) -> None:
    """What the test has set is seen by each."""

    @registry.handler("plain")
    def plain(job: Job) -> list[str]:
        before = TENANT.get()
        TENANT.set("plain")
        return [before, TENANT.get()]

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> list[str]:
        before = TENANT.get()
        TENANT.set("async")
        return [before, TENANT.get()]

    async def within() -> None:
        for job_type in ("plain", "async"):
            outcome = await run_job_async(registry, job_type)
            assert (outcome.result, TENANT.get()) == (["of the test", job_type], "of the test")

    token = TENANT.set("of the test")
    try:
        for job_type in ("plain", "async"):
            outcome = run_job(registry, job_type)
            assert (outcome.result, TENANT.get()) == (["of the test", job_type], "of the test")
        asyncio.run(within())
    finally:
        TENANT.reset(token)


def test_a_message_of_progress_that_is_no_text_is_refused_by_its_name(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    message: Any = 5
    registry.add("plain", lambda job: job.set_progress(50, message))

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> None:
        await job.set_progress(50, message)

    for job_type in ("plain", "async"):
        with pytest.raises(TypeError, match=r"^message must be a text, got 5$"):
            run_job(registry, job_type, connection=own)


def test_drain_gives_each_async_handler_a_context_of_its_own(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> str:
        before = TENANT.get()
        TENANT.set("async")
        return before

    rota.Client(own).enqueue_many([{"job_type": "async"}] * 2)

    assert [outcome.result for outcome in drain(own, registry)] == ["none", "none"]


@pytest.mark.parametrize(
    ("error", "status", "delay"),
    [
        (Snooze(60), "snoozed", timedelta(minutes=1)),
        (RetryIn(5), "failed", timedelta(seconds=5)),
        (RetryIn(5), "dead", timedelta(seconds=5)),
    ],
)
def test_what_a_handler_asks_for_is_told_and_not_raised(
    registry: Registry, error: Exception, status: str, delay: timedelta
) -> None:
    def ask(job: Job) -> None:
        raise error

    registry.add("ask", ask)

    outcome = run_job(registry, "ask", attempt=3, max_attempts=3 if status == "dead" else 10)

    assert (outcome.status, outcome.delay) == (status, delay)
    assert outcome.error is (None if status == "snoozed" else error)


def test_a_stage_is_named_only_where_the_run_has_gone_there(registry: Registry) -> None:
    @registry.handler("stage")
    def stage(job: Job) -> None:
        job.next_stage = "ship"
        if job.attempt == 1:
            raise Snooze(60)

    stages = [run_job(registry, "stage", attempt=n).next_stage for n in (1, 2)]

    assert stages == [None, "ship"]


@pytest.mark.parametrize(
    ("error", "status"), [(KeyError("x"), "failed"), (rota.FatalError("no"), "dead")]
)
def test_any_other_exception_is_raised_or_told(
    registry: Registry, error: Exception, status: str
) -> None:
    def fail(job: Job) -> None:
        raise error

    registry.add("fail", fail)

    with pytest.raises(type(error)):
        run_job(registry, "fail")
    outcome = run_job(registry, "fail", raise_errors=False)
    assert (outcome.status, outcome.error) == (status, error)


def test_what_cannot_leave_a_process_is_its_text_in_a_test_too(registry: Registry) -> None:
    """A worker sees no more of it, so that it is none that a task retries."""
    kind = computing.Unpicklable
    task = registry.task("odd", own_process=True, retry_on=kind)(computing.refuse_for_good)
    known = registry.task("known", own_process=True, retry_on=kind)(computing.refuse_oddly)

    odd = run_job(registry, task.job("odd"), raise_errors=False)
    outcome = run_job(registry, known.job("odd"), raise_errors=False)

    assert (odd.status, str(odd.error)) == ("dead", "client.computing.Unpicklable: odd")
    assert (outcome.status, type(outcome.error)) == ("failed", kind)


def test_a_task_runs_with_its_arguments(registry: Registry) -> None:
    @registry.task(queue="mail", give_up_on=LookupError)
    def send_receipt(job: Job, order_id: int, at: datetime) -> str:
        if order_id < 0:
            raise LookupError
        return f"{order_id} {at:%H:%M} {job.queue}"

    noon = datetime(2026, 1, 2, 12, tzinfo=UTC)

    assert run_job(registry, send_receipt.job(7, at=noon)).result == "7 12:00 mail"
    assert run_job(registry, send_receipt, {"order_id": 8, "at": noon}).result[0] == "8"
    lost = run_job(registry, send_receipt.job(-1, noon), raise_errors=False)
    assert lost.status == "dead"
    with pytest.raises(rota.InvalidArgumentError, match="order_id"):
        run_job(registry, "send_receipt", {"order_id": "x"})


@pytest.mark.parametrize(
    ("limit", "told"), [(60, "0:01:00"), ("1 minute", "None"), (None, "None")]
)
def test_a_time_limit_may_be_a_number_or_a_text(
    own: psycopg.Connection[Any], registry: Registry, limit: Any, told: str
) -> None:
    @registry.task("limited", time_limit=limit)
    def limited(job: Job) -> str:
        job.check()
        return str(job.time_limit)

    assert run_job(registry, limited.job()).result == told
    assert run_job(registry, limited.job(), connection=own).result == told


def test_a_payload_is_what_a_worker_would_get(registry: Registry) -> None:
    registry.add("echo", lambda job: job.payload)

    assert run_job(registry, "echo", {"pair": (1, 2)}).result == {"pair": [1, 2]}
    with pytest.raises(rota.InvalidArgumentError, match="payload"):
        run_job(registry, "echo", {"at": datetime.now(UTC)})


def test_what_is_misspelt_is_refused(registry: Registry) -> None:
    registry.add("echo", lambda job: job.payload)

    with pytest.raises(LookupError, match="no handler for 'ecco'; it has echo"):
        run_job(registry, "ecco")
    with pytest.raises(TypeError, match="'atempt' is no field"):
        run_job(registry, "echo", atempt=2)
    with pytest.raises(ValueError, match="at least 1"):
        run_job(registry, "echo", attempt=0)


def test_middleware_runs_and_resources_are_those_of_the_test(registry: Registry) -> None:
    around: list[str] = []

    @registry.lifespan
    async def open_them() -> AsyncIterator[dict[str, Any]]:
        raise NotImplementedError("not in a test")
        yield {}

    @registry.middleware
    def traced(job: Job | AsyncJob) -> Iterator[None]:
        around.append("before")
        yield
        around.append("after")

    registry.add("fetch", lambda job: job.resources["http"])

    assert run_job(registry, "fetch", resources={"http": "fake"}).result == "fake"
    assert around == ["before", "after"]


def test_a_call_that_is_not_awaited_is_told(registry: Registry) -> None:
    @registry.handler("forgetful")
    async def forgetful(job: AsyncJob) -> None:
        job.set_progress(50)  # type: ignore[unused-coroutine]

    with pytest.warns(RuntimeWarning, match="set_progress"):
        run_job(registry, "forgetful")


def test_a_plain_handler_within_a_loop_has_its_effects(
    registry: Registry, own: psycopg.Connection[Any]
) -> None:
    @registry.handler("once")
    def once(job: Job) -> bool:
        with job.effect("mail", "7") as effect:
            return effect.is_due

    async def test() -> object:
        return run_job(registry, "once", connection=own).result

    assert asyncio.run(test()) is True


def test_a_handler_that_needs_a_database_says_so(registry: Registry) -> None:
    @registry.handler("charge")
    def charge(job: Job) -> None:
        with job.effect("card", "7"):
            pass

    with pytest.raises(psycopg.OperationalError, match="connection="):
        run_job(registry, "charge", raise_errors=False)


# One handler, with a database


@pytest.mark.parametrize("is_committed", [False, True])
def test_transaction_and_effect_work_in_the_transaction_of_the_test(
    own: psycopg.Connection[Any], dsn: str, registry: Registry, is_committed: bool
) -> None:
    @registry.handler("charge")
    def charge(job: Job) -> None:
        with job.effect("card", "7") as effect:
            if effect.is_due:
                effect.result = "paid"
        job.result = [effect.result, job.attempt]
        with job.transaction() as connection:
            connection.execute("insert into letters values (7)")

    if is_committed:
        own.commit()

    outcome = run_job(
        registry, "charge", attempt=3, connection=dsn if is_committed else own, queue="cards"
    )

    assert outcome.status == "succeeded"
    assert outcome.result == ["paid", 3]
    assert letters(own) == [7]
    done = rota.Client(own).effect_result("card", "7")
    assert done is not None
    assert done.result == "paid"
    with psycopg.connect(dsn) as other:
        seen = other.execute("select count(*) from rota.job_runs").fetchone()
    assert seen == (int(is_committed),)


def test_the_last_attempt_ends_dead(own: psycopg.Connection[Any], registry: Registry) -> None:
    def fail(job: Job) -> None:
        raise ValueError("no")

    registry.add("fail", fail)

    outcome = run_job(
        registry, "fail", attempt=2, max_attempts=2, connection=own, raise_errors=False
    )

    assert outcome.status == "dead"
    with pytest.raises(RuntimeError, match="attempt 3"):
        run_job(registry, "fail", attempt=3, max_attempts=2, connection=own)


def test_an_async_handler_has_the_session_of_a_plain_test(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    @registry.handler("charge")
    async def charge(job: AsyncJob) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(once(job, number))
        async with job.transaction() as connection:
            await connection.execute("insert into letters values (8)")

    async def once(job: AsyncJob, number: int) -> None:
        async with job.effect("card", str(number)) as effect:
            assert effect.is_due

    run_job(registry, "charge", connection=own)

    assert letters(own) == [8]


@pytest.mark.parametrize("commits", [True, False])
def test_finish_in_works_with_a_transaction_of_the_handlers_own(
    own: psycopg.Connection[Any], registry: Registry, commits: bool
) -> None:
    @registry.handler("charge")
    def charge(job: Job) -> str:
        job.result = "paid"
        with own.transaction(force_rollback=not commits):
            own.execute("insert into letters values (7)")
            job.finish_in(own)
        return "late"

    rota.Client(own).enqueue("charge")

    if commits:
        (outcome,) = drain(own, registry)
        assert outcome.result == "paid"
        assert letters(own) == [7]
    else:
        with pytest.raises(RuntimeError, match="not committed"):
            drain(own, registry)


# All that is due


def test_drain_runs_what_is_due_and_what_comes_of_it(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    client = rota.Client(own)

    @registry.handler("parent")
    def parent(job: Job) -> None:
        with job.transaction() as connection:
            rota.Client(connection).enqueue("child", {"of": job.payload["n"]}, priority=-1)

    @registry.handler("child")
    async def child(job: AsyncJob) -> int:
        return int(job.payload["of"])

    first = client.enqueue("parent", {"n": 1})
    client.enqueue("parent", {"n": 2}, queue="other", depends_on=[first.job_id])
    client.enqueue("parent", {"n": 3}, delay=timedelta(days=1))
    client.enqueue("foreign")

    outcomes = drain(own, registry)

    told = [(o.job_type, o.status, o.result) for o in outcomes]
    assert told == [
        ("parent", "succeeded", None),
        ("child", "succeeded", 1),
        ("parent", "succeeded", None),
        ("child", "succeeded", 2),
    ]
    assert_enqueued(own, "foreign")
    assert_enqueued(own, "parent", {"n": 3}, delay=timedelta(days=1), count=1)
    assert drain(own, registry, queues=["nothing"]) == []


def test_drain_leaves_nothing_behind_a_rollback(dsn: str, registry: Registry) -> None:
    registry.add("job", lambda job: None)

    with psycopg.connect(dsn) as connection:
        rota.Client(connection).enqueue("job")
        drain(connection, registry)
        connection.rollback()

        left = connection.execute("select count(*) from rota.job_runs").fetchone()
    assert left == (0,)


def test_drain_of_an_address_commits(dsn: str, db: psycopg.Connection[Any]) -> None:
    registry = Registry()
    registry.add("job", lambda job: job.attempt)
    rota.Client(db).enqueue("job")

    drain(dsn, registry)

    assert_enqueued(db, "job", status="succeeded")


def test_drain_of_a_connection_in_autocommit_commits_each_job(
    db: psycopg.Connection[Any], registry: Registry
) -> None:
    @registry.handler("job")
    def job(job: Job) -> None:
        with job.transaction() as connection:
            connection.execute("insert into letters values (1)")

    @registry.handler("async")
    async def other(job: AsyncJob) -> None:
        async with job.effect("a", "b"):
            pass

    db.execute("create table letters (id int)")
    for kind in ("job", "async"):
        rota.Client(db).enqueue(kind)

    drain(db, registry)

    assert db.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert letters(db) == [1]


def test_drain_gives_no_handler_a_payload_that_python_cannot_read(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    registry.add("read", lambda job: pytest.fail("a handler has begun"))
    own.execute("""select rota.enqueue('read', '{"n":1e5000}')""")

    assert [job.status for job in drain(own, registry)] == ["dead"]


def test_drain_with_later_moves_the_time_from_job_to_job(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    seen: list[Any] = []

    @registry.handler("remind")
    def remind(job: Job) -> None:
        seen.append(job.payload["n"])
        if job.payload["n"] == 2 and seen.count(2) == 1:
            raise Snooze(timedelta(days=30))

    client = rota.Client(own)
    for day in (3, 1, 2):
        client.enqueue("remind", {"n": day}, delay=timedelta(days=day))

    assert drain(own, registry) == []
    outcomes = drain(own, registry, with_later=True)

    assert seen == [1, 2, 3, 2]
    assert [o.status for o in outcomes] == ["succeeded", "snoozed", "succeeded", "succeeded"]


def test_drain_with_later_retries_until_a_job_is_dead(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    def fail(job: Job) -> None:
        raise ValueError(f"attempt {job.attempt}")

    registry.add("fail", fail)
    rota.Client(own).enqueue("fail", max_attempts=3)

    outcomes = drain(own, registry, with_later=True, raise_errors=False)

    assert [o.status for o in outcomes] == ["failed", "failed", "dead"]
    assert [o.attempt for o in outcomes] == [1, 2, 3]


def test_drain_raises_what_a_handler_raises_after_it_has_failed(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    def fail(job: Job) -> None:
        raise LookupError("order 7")

    registry.add("fail", fail)
    rota.Client(own).enqueue("fail")

    with pytest.raises(LookupError, match="order 7"):
        drain(own, registry)

    assert_enqueued(own, "fail", status="failed", attempts=1)


def test_drain_undoes_only_what_broke_the_transaction(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    @registry.handler("write")
    def write(job: Job) -> None:
        own.execute("insert into letters values (%s)", [job.payload["n"]])
        if job.payload["n"] == 2:
            raise ValueError("after it has written")
        if job.payload["n"] == 3:
            own.execute("insert into letters values (1)")

    for number in (1, 2, 3, 4):
        rota.Client(own).enqueue("write", {"n": number})

    outcomes = drain(own, registry, raise_errors=False)

    assert [o.status for o in outcomes] == ["succeeded", "failed", "failed", "succeeded"]
    assert isinstance(outcomes[2].error, psycopg.errors.UniqueViolation)
    assert letters(own) == [1, 2, 4]


def test_drain_says_when_a_handler_leaves_the_transaction_broken(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    @registry.handler("careless")
    def careless(job: Job) -> None:
        with pytest.raises(psycopg.errors.UndefinedTable):
            own.execute("select from nothing")

    rota.Client(own).enqueue("careless")

    with pytest.raises(RuntimeError, match=r"handler of careless .* savepoint"):
        drain(own, registry)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_drain_says_when_a_handler_ends_the_transaction(
    own: psycopg.Connection[Any], registry: Registry, end: str
) -> None:
    registry.add("end", lambda job: getattr(own, end)())
    rota.Client(own).enqueue("end")

    with pytest.raises(RuntimeError, match="handler of end has ended the transaction"):
        drain(own, registry)


def test_drain_goes_on_when_a_handler_releases_an_older_savepoint(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    """As a session of SQLAlchemy does that the test and its handlers share."""
    registry.add("release", lambda job: own.execute("release outer_one") and None)
    own.execute("savepoint outer_one")
    rota.Client(own).enqueue("release")

    (outcome,) = drain(own, registry)

    assert outcome.status == "succeeded"


def test_drain_says_when_a_handler_rolls_its_own_job_back(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    registry.add("undo", lambda job: own.execute("rollback to outer_one") and None)
    own.execute("savepoint outer_one")
    rota.Client(own).enqueue("undo")

    with pytest.raises(RuntimeError, match="handler of undo has rolled back"):
        drain(own, registry)


def test_drain_of_a_job_without_end_ends(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    @registry.handler("again")
    def again(job: Job) -> None:
        rota.Client(own).enqueue("again")

    rota.Client(own).enqueue("again")

    with pytest.raises(RuntimeError, match="5 jobs have run"):
        drain(own, registry, max_jobs=5)


@pytest.mark.parametrize("raise_errors", [True, False])
def test_an_error_of_the_database_after_the_end_is_told(
    own: psycopg.Connection[Any], registry: Registry, raise_errors: bool
) -> None:
    """The job has not succeeded in the transaction of the test, and would in a worker."""

    @registry.handler("late")
    def late(job: Job) -> None:
        with job.transaction():
            pass
        own.execute("select 1 / 0")

    rota.Client(own).enqueue("late")

    with pytest.raises(RuntimeError, match=r"after job\.transaction") as caught:
        drain(own, registry, raise_errors=raise_errors)
    assert isinstance(caught.value.__cause__, psycopg.errors.DivisionByZero)


def test_drain_takes_a_pipeline_through_its_stages(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    client = rota.Client(own)
    client.define_pipeline(
        "order", [{"stage": n, "job_type": n} for n in ("charge", "pack", "ship")]
    )

    def charge(job: Job) -> str:
        job.next_stage = "ship"
        return "paid"

    registry.add("charge", charge)
    registry.add("pack", lambda job: None)
    registry.add("ship", lambda job: job.stage_input)
    client.start_pipeline("order", {"id": 7})

    outcomes = drain(own, registry)

    assert [(o.job_type, o.result) for o in outcomes] == [("charge", "paid"), ("ship", "paid")]
    assert outcomes[0].next_stage == "ship"


def test_drain_runs_jobs_of_one_key_and_of_a_full_limit_one_by_one(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    client = rota.Client(own)
    client.set_limit(limit_key="ada", max_running=1)
    registry.add("book", lambda job: job.payload["n"])
    for number in range(3):
        client.enqueue("book", {"n": number}, ordering_key="account", limit_key="ada")

    assert [outcome.result for outcome in drain(own, registry)] == [0, 1, 2]


@pytest.mark.parametrize(("rule", "others"), [("run", "succeeded"), ("cancel", "cancelled")])
def test_drain_does_for_dependants_what_their_rule_says(
    own: psycopg.Connection[Any], registry: Registry, rule: str, others: str
) -> None:
    @registry.handler("parent")
    def parent(job: Job) -> None:
        raise rota.FatalError("no")

    registry.add("child", lambda job: None)
    client = rota.Client(own)
    parent_id = client.enqueue("parent").job_id
    client.enqueue("child", depends_on=[parent_id], if_parent_dead=rule)

    drain(own, registry, raise_errors=False)

    assert_enqueued(own, "child", status=others)


def test_drain_runs_each_of_many_dependants(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    registry.add("job", lambda job: None)
    client = rota.Client(own)
    parent_id = client.enqueue("job").job_id
    client.enqueue_many([{"job_type": "job", "depends_on": [parent_id]}] * 25)

    assert len(drain(own, registry)) == 26


def test_drain_runs_what_a_schedule_has_made(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    client = rota.Client(own)
    registry.add("clean_up", lambda job: job.definition)
    client.schedule_job("nightly", "0 2 * * *", "clean_up")

    assert drain(own, registry, with_later=True) == []
    client.run_schedule_now("nightly")

    assert [outcome.result for outcome in drain(own, registry)] == ["nightly"]


def test_drain_async_runs_in_the_loop_of_the_test(dsn: str, registry: Registry) -> None:
    @registry.handler("plain")
    def plain(job: Job) -> str:
        with job.effect("mail", "7") as effect:
            pass
        with job.transaction() as connection:
            row = connection.execute("select pg_backend_pid()").fetchone()
            job.result = [effect.is_due, row and row[0]]
        return "after"

    @registry.handler("async")
    async def other(job: AsyncJob) -> None:
        async with job.effect("mail", "8"):
            pass
        async with job.transaction() as connection:
            rows = await connection.execute("select pg_backend_pid()")
            job.result = [asyncio.get_running_loop() is loop, (await rows.fetchone() or [0])[0]]

    async def test() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        async with await psycopg.AsyncConnection.connect(dsn) as own:
            client = rota.AsyncClient(own)
            await client.enqueue("plain")
            await client.enqueue("async")
            assert_enqueued(own, "async")
            pid = own.info.backend_pid

            outcomes = await drain_async(own, registry)

            assert [outcome.result for outcome in outcomes] == [[True, pid], [True, pid]]
            assert_not_enqueued(client, "async")
            await own.rollback()

    loop: asyncio.AbstractEventLoop
    asyncio.run(test())


def test_drain_leaves_the_connection_as_it_was(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    notices: list[object] = []
    own.add_notice_handler(notices.append)
    registry.add("job", lambda job: None)
    rota.Client(own).enqueue("job")

    drain(own, registry)
    for _ in range(10):  # it is prepared on the way
        own.execute("select 1")
    own.execute("do $$ begin raise notice 'hello'; end $$")

    assert len(notices) == 1


def test_drain_refuses_a_text_as_queues(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    with pytest.raises(TypeError, match=r"^queues must be a list, got the text 'mail'$"):
        drain(own, registry, queues="mail")


def test_drain_refuses_what_is_no_connection(registry: Registry) -> None:
    with pytest.raises(TypeError, match="Registry"):
        drain(registry, registry)


# What waits


def test_what_waits_is_found_by_type_payload_and_columns(own: psycopg.Connection[Any]) -> None:
    client = rota.Client(own)
    client.enqueue(
        "mail", {"to": {"id": 7, "name": "ada"}, "kinds": [1, 2]}, queue="slow",
        idempotency_key="welcome:7", delay=timedelta(minutes=5),
    )  # fmt: skip

    row = assert_enqueued(own, "mail", {"to": {"id": 7}}, queue="slow")
    assert row["idempotency_key"] == "welcome:7"
    for delay in (timedelta(minutes=5), 300):
        assert_enqueued(client, "mail", {"kinds": ANY}, delay=delay, count=1)
    assert_not_enqueued(own, "mail", {"to": {"id": 8}})
    assert_enqueued(own, "mail", {"kinds": (1, 2)})
    assert_not_enqueued(own, "mail", {"kinds": [1]})
    assert_not_enqueued(own, "mail", {"nobody": None})
    assert_not_enqueued(own, "mail", delay=None)
    assert_not_enqueued(own, "letter")
    with pytest.raises(TypeError, match="'que'"):
        assert_enqueued(own, "mail", que="slow")
    changed = {"job_type": "index", "idempotency_key": "7", "updated_at": datetime.now(UTC)}
    client.enqueue(**changed, on_conflict="rerun")
    assert_enqueued(own, changed)


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (UUID(int=7), str(UUID(int=7))),
        (date(2026, 1, 2), "2026-01-02"),
        (timedelta(minutes=1), 60),
        ([{"id": UUID(int=7)}, ANY], [{"id": str(UUID(int=7))}, 3]),
        ({7: UUID(int=7)}, {"7": str(UUID(int=7)), "8": 1}),
    ],
)
def test_what_json_has_not_is_compared_with_how_it_is_stored(
    own: psycopg.Connection[Any], value: Any, stored: Any
) -> None:
    rota.Client(own).enqueue("mail", {"about": stored})

    assert_enqueued(own, "mail", {"about": value})
    with pytest.raises(AssertionError):
        assert_not_enqueued(own, "mail", {"about": value})
    with pytest.raises(AssertionError):
        assert_not_enqueued(own, {"job_type": "mail", "payload": {"about": value}})


def test_what_is_asked_of_a_task_is_anything_but_of_its_parameters(
    own: psycopg.Connection[Any],
) -> None:
    @Registry().task()
    def greet(name: str, since: date) -> None: ...

    greet.enqueue(own, "ada", date(2026, 1, 2))

    assert_enqueued(own, greet, {"name": ANY, "since": date(2026, 1, 2)})
    with pytest.raises(TypeError, match=r"'nam' is no parameter of greet\(name: str, since"):
        assert_not_enqueued(own, greet, {"nam": "ada"})


def test_a_failure_lists_what_waits(own: psycopg.Connection[Any]) -> None:
    client = rota.Client(own)
    with pytest.raises(AssertionError, match="no job waits"):
        assert_enqueued(own, "mail")
    for number in range(25):
        client.enqueue("other", {"n": number})
    client.enqueue("mail", {"to": 8}, queue="slow")

    with pytest.raises(AssertionError) as failure:
        assert_enqueued(own, "mail", {"to": 7})
    lines = str(failure.value).splitlines()
    assert lines[0] == "no job has job_type='mail', payload={'to': 7}"
    assert "mail {'to': 8} queue='slow' status='queued'" in lines[2]
    assert lines[-1] == "  and 6 more"

    with pytest.raises(AssertionError, match="1 found with job_type='mail'"):
        assert_not_enqueued(own, "mail")
    with pytest.raises(AssertionError, match="1, not 2, found with job_type='mail'"):
        assert_enqueued(own, "mail", count=2)


def test_a_failure_shows_what_was_asked_for_as_it_is_compared(
    own: psycopg.Connection[Any],
) -> None:
    client = rota.Client(own)
    run_at = datetime(2100, 1, 1, 12, 0, 0, 250000, tzinfo=UTC)
    job_id = client.enqueue("mail", max_attempts=3, run_at=run_at).job_id

    with pytest.raises(AssertionError) as failure:
        assert_enqueued(own, "mail", max_attempts=5, run_at=run_at.replace(microsecond=0), id=1)
    shown = str(failure.value).splitlines()[-1]
    assert f" {job_id} mail " in shown
    assert "max_attempts=3" in shown
    assert "250000" in shown
    with pytest.raises(AssertionError, match="ordering_key=None"):
        assert_enqueued(own, "mail", ordering_key="account:7")


def test_tasks_are_found_by_their_arguments(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    @registry.task(queue="mail", idempotency_key="receipt:{order}")
    def send_receipt(job: Job, order: UUID, copies: int = 1) -> None: ...

    order = UUID(int=7)
    send_receipt.enqueue(own, order, copies=2)

    assert_enqueued(own, send_receipt)
    assert_enqueued(own, send_receipt, {"order": order})
    assert_enqueued(own, send_receipt.job(order, copies=2))
    assert_not_enqueued(own, send_receipt.job(order, copies=3))
    assert_not_enqueued(own, send_receipt.options(queue="fast").job(order, copies=2))
    with pytest.raises(TypeError, match="brings its payload"):
        assert_enqueued(own, send_receipt.job(UUID(int=8)), {"copies": 2})


def test_a_job_that_has_ended_waits_no_more(
    own: psycopg.Connection[Any], registry: Registry
) -> None:
    registry.add("job", lambda job: None)
    rota.Client(own).enqueue("job")

    drain(own, registry)

    assert_not_enqueued(own, "job")
    assert_enqueued(own, "job", status="succeeded", attempts=1)


def test_drain_that_is_refused_in_a_loop_leaves_nothing_behind(
    db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    registry = Registry()

    @registry.handler("a")
    async def run(job: AsyncJob) -> None: ...

    async def refused() -> None:
        with pytest.raises(RuntimeError, match="await drain_async"):
            drain(db, registry)

    with db.transaction(force_rollback=True):
        rota.Client(db).enqueue("a")
        asyncio.run(refused())
        gc.collect()
        assert unraisable == []
