"""One odd job, or one locked row, costs its worker's other jobs nothing."""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import rota
from rota import Client, InvalidArgumentError, Job, Registry
from rota.client.connecting import connect_async
from rota.client.statement import seconds_of
from support.mutation import mutate
from support.started_workers import BackgroundWorker
from support.waiting import wait_until

pytestmark = pytest.mark.slow

Drain = Callable[..., None]
Status = Callable[[int], str]
Background = Callable[..., BackgroundWorker]


class SnoozeOfNothing(rota.Snooze):
    def __init__(self) -> None:
        pass


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    @property
    def __notes__(self) -> list[str]:
        raise RuntimeError("no notes")


class SnoozeOfWords(rota.Snooze):
    def __init__(self) -> None:
        self.delay = "tomorrow"  # type: ignore[assignment]


class RetryInNothing(rota.RetryIn):
    def __init__(self) -> None:
        Exception.__init__(self, "closed")
        self.delay = object()  # type: ignore[assignment]


class Nameless(type):
    def __getattribute__(cls, name: str) -> Any:
        if name == "__qualname__":
            raise SystemExit
        return super().__getattribute__(name)


class Liar(Exception, metaclass=Nameless):
    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no class")


class Endless(Mapping[str, int]):
    def __init__(self, error: type[BaseException] = RuntimeError) -> None:
        self.error = error

    def __getitem__(self, key: str) -> int:
        raise self.error("no items")

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        raise self.error("no keys")


READS_ALL = sys.version_info >= (3, 14)
TOO_DEEP = pytest.param(
    '{"a":' + "[" * 12000 + "]" * 12000 + "}",
    id="deep",
    marks=pytest.mark.skipif(READS_ALL, reason="Python 3.14 reads what Postgres takes"),
)


@pytest.mark.parametrize("payload", [pytest.param('{"n":1e5000}', id="long"), TOO_DEEP])
def test_a_payload_that_python_cannot_read_fails_its_own_job_only(
    client: Client, db: psycopg.Connection[Any], drain: Drain, status: Status, payload: str
) -> None:
    registry = Registry()
    registry.add("work", lambda job: None)
    good = [client.enqueue("work").job_id for _ in range(2)]
    row = db.execute("select rota.enqueue('work', %s::jsonb)", [payload]).fetchone()
    assert row is not None
    good.append(client.enqueue("work").job_id)

    drain(registry, batch=10)

    assert [status(job_id) for job_id in good] == ["succeeded"] * 3
    dead = db.execute(
        "select status, attempts, error_type from rota.job_runs where id = %s", row
    )
    assert dead.fetchall() == [("dead", 1, "payload")]


ODD: list[Callable[[], Exception]] = [
    SnoozeOfNothing,
    SnoozeOfWords,
    RetryInNothing,
    lambda: SyntaxError("b", ("f", 1, 1, 12345)),
    lambda: Mute("x"),
    Liar,
]


def test_an_exception_that_cannot_be_described_fails_its_job(
    client: Client, drain: Drain, status: Status
) -> None:
    registry = Registry()

    @registry.handler("plain")
    def plain(job: Job) -> None:
        raise ODD[job.payload["n"]]()

    @registry.handler("in_loop")
    async def in_loop(job: rota.AsyncJob) -> None:
        raise ODD[job.payload["n"]]()

    jobs = [
        client.enqueue(name, {"n": n}, max_attempts=1).job_id
        for name in registry.job_types
        for n in range(len(ODD))
    ]

    drain(registry)

    assert [status(job_id) for job_id in jobs] == ["dead"] * 2 * len(ODD)


def test_what_can_be_said_of_an_odd_exception_is_said(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()

    @registry.handler("odd")
    def odd(job: Job) -> None:
        raise SyntaxError("bad words", ("f", 1, 1, 12345))

    client.enqueue("odd")

    drain(registry)

    row = db.execute("select message, error_type, stack from rota.job_errors").fetchone()
    assert row is not None
    assert row[0].startswith("bad words")
    assert row[1] == "SyntaxError"
    assert "in odd" in row[2]


def test_a_thread_that_cannot_be_started_fails_its_job(
    client: Client, drain: Drain, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "rota-job":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    registry = Registry()
    registry.add("work", lambda job: None)
    job_id = client.enqueue("work").job_id

    drain(registry)

    assert status(job_id) == "failed"


@pytest.mark.parametrize("is_async", [False, True])
def test_what_took_all_memory_is_free_while_the_lack_is_reported(
    client: Client, drain: Drain, status: Status, *, is_async: bool
) -> None:
    """Else a worker of limited memory could not report it, and would keep it for ever."""
    registry = Registry()
    seen: list[Any] = []

    def fill(job: rota.BaseJob) -> None:
        taken = {bytes(8)}
        seen.append(weakref.ref(taken))
        raise MemoryError

    async def fill_in_loop(job: rota.AsyncJob) -> None:
        fill(job)

    registry.on_end(lambda job, end: seen.append(seen[0]()))
    registry.add("fill", fill_in_loop if is_async else fill)
    job_id = client.enqueue("fill").job_id

    drain(registry)

    assert status(job_id) == "failed"
    assert seen[1] is None


def test_a_name_that_is_looked_up_without_a_thread_is_an_outage(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def connect() -> None:
        await connect_async(make_conninfo(dsn, host="localhost"))

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with (
        asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner,
        pytest.raises(psycopg.OperationalError, match="can't start new thread"),
    ):
        runner.run(connect())


def test_an_end_that_cannot_be_put_down_keeps_no_lease(
    client: Client,
    background: Callable[..., BackgroundWorker],
    status: Status,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of the worker itself: its heartbeats leave the job to the next sweep."""

    def refuse(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("rota.worker.completer.Completer.put", refuse)
    registry = Registry()
    registry.add("work", lambda job: None)
    job_id = client.enqueue("work", max_attempts=1, lease=timedelta(seconds=1)).job_id

    background(registry)

    wait_until(lambda: status(job_id) == "dead", "the end of its lease")


def test_an_answer_that_the_worker_does_not_know_keeps_no_lease_and_holds_up_no_end(
    client: Client,
    db: psycopg.Connection[Any],
    background: Callable[..., BackgroundWorker],
    status: Status,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mutate(
        db,
        "finish_jobs",
        "rota._finish_listed(finish_jobs.job_ids, finish_jobs.lease_tokens,"
        " finish_jobs.results, finish_jobs.next_stages)",
        "array_fill('odd'::text, array[cardinality(finish_jobs.job_ids)])",
    )
    registry = Registry()
    registry.add("work", lambda job: None)
    registry.add("fail", lambda job: 1 / 0)
    job_id = client.enqueue("work", max_attempts=1, lease=timedelta(seconds=1)).job_id
    background(registry)

    said = "ends could not be reported; their leases will expire"
    wait_until(lambda: said in caplog.text, "an error")
    other = client.enqueue("fail", max_attempts=1).job_id
    for each in (other, job_id):
        wait_until(lambda each=each: status(each) == "dead", "an end")


class Fickle(Mapping[str, int]):
    """Can be listed once."""

    def __init__(self) -> None:
        self.times = 0

    def __getitem__(self, key: str) -> int:
        return 1

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        self.times += 1
        if self.times > 1:
            raise RuntimeError("not again")
        return iter(["a"])


def test_a_result_that_changes_meanwhile_is_stored_as_it_was(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()
    registry.add("odd", lambda job: Fickle())
    client.enqueue_many([{"job_type": "odd"}] * 3)

    drain(registry)

    rows = db.execute("select status, result from rota.job_runs").fetchall()
    assert rows == [("succeeded", {"a": 1})] * 3


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_a_result_that_cannot_be_listed_is_dropped(
    client: Client, drain: Drain, status: Status, error: type[BaseException]
) -> None:
    registry = Registry()
    registry.add("odd", lambda job: Endless(error))
    job_id = client.enqueue("odd").job_id

    drain(registry)

    assert status(job_id) == "succeeded"


def test_a_result_that_is_too_much_for_the_server_is_dropped_and_holds_up_no_other(
    client: Client, db: psycopg.Connection[Any], background: Background, status: Status
) -> None:
    _let_the_server_read_little(db)
    registry, at_once = Registry(), threading.Barrier(2)

    @registry.handler("nested")
    def nested(job: Job) -> list[Any]:
        at_once.wait(30)
        return _nested(job.payload["times"])

    job_ids = [client.enqueue("nested", {"times": times}).job_id for times in (1, 900)]
    background(registry)

    wait_until(lambda: {status(job_id) for job_id in job_ids} == {"succeeded"})
    results = "select result is null from rota.job_runs order by id"
    assert db.execute(results).fetchall() == [(False,), (True,)]


def test_a_result_of_an_effect_that_is_too_much_for_the_server_fails_the_attempt(
    client: Client, db: psycopg.Connection[Any], background: Background, status: Status
) -> None:
    _let_the_server_read_little(db)
    registry = Registry()

    @registry.handler("nested")
    def nested(job: Job) -> None:
        with job.effect("nested", "one") as effect:
            effect.result = _nested(900)

    job_id = client.enqueue("nested", max_attempts=1).job_id
    background(registry)

    wait_until(lambda: status(job_id) == "dead")
    errors = "select error_type from rota.job_runs"
    assert db.execute(errors).fetchall() == [("psycopg.errors.StatementTooComplex",)]


def _let_the_server_read_little(db: psycopg.Connection[Any]) -> None:
    setting = "alter database {} set max_stack_depth = '100kB'"
    db.execute(psycopg.sql.SQL(setting).format(psycopg.sql.Identifier(db.info.dbname)))


def _nested(times: int) -> list[Any]:
    result: list[Any] = []
    for _ in range(times):
        result = [result]
    return result


def test_a_locked_row_holds_up_neither_heartbeats_nor_endings(
    client: Client,
    db: psycopg.Connection[Any],
    connect: Callable[..., psycopg.Connection[Any]],
    background: Background,
    status: Status,
) -> None:
    """An operator cancels a job and forgets to commit, for longer than all leases."""
    registry = Registry()
    go_on = threading.Event()
    registry.add("waits", lambda job: go_on.wait(20))
    registry.add("quick", lambda job: None)
    lease = timedelta(seconds=1)
    stuck, *others = [client.enqueue("waits", lease=lease).job_id for _ in range(3)]
    background(registry, concurrency=5)
    wait_until(lambda: [status(job_id) for job_id in others] == ["running"] * 2)
    wait_until(lambda: status(stuck) == "running")

    operator = connect()
    with operator.transaction(force_rollback=True):
        operator.execute("select rota.cancel_job(%s)", [stuck])
        start = db.execute("select clock_timestamp()").fetchone()
        assert start is not None
        wait_until(
            lambda: (
                db.execute(
                    "select clock_timestamp() > %s::timestamptz + interval '3 s'", start
                ).fetchone()
                == (True,)
            )
        )
        quick = client.enqueue("quick").job_id
        wait_until(lambda: status(quick) == "succeeded")
        attempts = db.execute(
            "select status, attempts from rota.job_runs where id = any(%s)", [others]
        ).fetchall()
        go_on.set()
        wait_until(lambda: [status(job_id) for job_id in others] == ["succeeded"] * 2)

    assert attempts == [("running", 1)] * 2
    wait_until(lambda: status(stuck) in ("succeeded", "failed"))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (float("nan"), r"^payload\['a'\]\[1\] must be a finite number"),
        (float("-inf"), r"^payload\['a'\]\[1\] must be a finite number"),
        ("\x00", r"^payload\['a'\]\[1\] has a NUL character or a lone surrogate"),
        ("\ud800", r"^payload\['a'\]\[1\] has a NUL character or a lone surrogate"),
        ({"\x00": 1}, r"^payload\['a'\]\[1\] has a NUL character"),
        (10**5000, r"^payload\['a'\]\[1\] has more digits"),
    ],
    ids=["nan", "inf", "nul", "lone", "key", "digits"],
)
def test_enqueue_refuses_what_jsonb_has_not(
    connect: Callable[..., psycopg.Connection[Any]], value: Any, told: str
) -> None:
    connection = connect(autocommit=False)

    with pytest.raises(InvalidArgumentError, match=told):
        Client(connection).enqueue("x", {"a": [0, value]})

    assert Client(connection).enqueue("x").is_new  # the transaction goes on


def test_enqueue_refuses_what_is_nested_in_itself(client: Client) -> None:
    endless: list[Any] = []
    endless.append(endless)

    with pytest.raises(InvalidArgumentError, match=r"^payload is nested"):
        client.enqueue("x", {"a": endless})


def test_refusals_name_other_arguments_too(client: Client) -> None:
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("idempotency_key", lambda: client.enqueue("x", idempotency_key="\x00")),
        ("queue", lambda: client.enqueue("x", queue="\ud800")),
        ("backoff", lambda: client.enqueue("x", backoff={"base_seconds": float("nan")})),
        ("backoff", lambda: client.set_queue("x", backoff={"base_seconds": float("nan")})),
        ("worker", lambda: client.claim_jobs("\x00")),
    ]

    for name, call in calls:
        with pytest.raises(InvalidArgumentError, match=f"^{name}"):
            call()


def test_a_claim_of_the_client_survives_an_unreadable_payload(
    client: Client, db: psycopg.Connection[Any]
) -> None:
    client.enqueue("a")
    db.execute("""select rota.enqueue('b', '{"n": 1e5000}')""")

    good, bad = client.claim_jobs("w", max_jobs=2)

    assert good.payload == {}
    assert isinstance(bad.payload, rota.Unreadable)
    assert "ValueError" in bad.payload.reason


@pytest.mark.parametrize("setting", ["datestyle = 'German'", "intervalstyle = 'iso_8601'"])
def test_a_worker_reads_jobs_whatever_the_styles_of_the_database(
    client: Client, db: psycopg.Connection[Any], drain: Drain, status: Status, setting: str
) -> None:
    db.execute(f'alter database "{db.info.dbname}" set {setting}')
    registry = Registry()
    registry.add("work", lambda job: str(job.run_at))
    job_id = client.enqueue("work").job_id

    drain(registry)

    assert status(job_id) == "succeeded"


@pytest.mark.parametrize("style", ["sql_standard", "iso_8601", "postgres_verbose"])
def test_a_tick_is_read_in_whatever_style_the_database_writes_intervals(
    client: Client, db: psycopg.Connection[Any], style: str
) -> None:
    client.schedule_job("often", "every 2 seconds", "work")
    db.execute("update rota.job_definitions set next_run_at = rota.now()")
    db.execute(f"set intervalstyle = {style}")  # type: ignore[arg-type]

    report = Client(db).tick()

    assert report.jobs_enqueued == 1
    assert report.look_again_in is not None
    assert timedelta(0) < report.look_again_in <= timedelta(seconds=2)


@pytest.mark.parametrize("style", ["sql_standard", "postgres_verbose", "iso_8601"])
@pytest.mark.parametrize("seconds", [-1.5, 0, 1, 59.999999])
def test_less_than_a_minute_is_read_in_any_style(
    db: psycopg.Connection[Any], style: str, seconds: float
) -> None:
    db.execute(f"set intervalstyle = {style}")  # type: ignore[arg-type]
    row = db.execute("select make_interval(secs => %s)::text", [seconds]).fetchone()

    assert row is not None
    assert seconds_of(row[0].encode(), NotImplementedError()) == timedelta(seconds=seconds)
    with pytest.raises(NotImplementedError):
        seconds_of(b"P1DT1S", NotImplementedError())


def test_a_moment_that_python_has_not_costs_no_job(
    client: Client, db: psycopg.Connection[Any], drain: Drain, status: Status
) -> None:
    registry = Registry()
    seen = []
    registry.add("work", lambda job: seen.append(job.run_at.year))
    ids = [client.enqueue("work").job_id for _ in range(3)]
    db.execute("update rota.jobs set run_at = '0044-03-15 BC' where id = %s", ids[:1])
    db.execute("update rota.jobs set created_at = '20000-01-01' where id = %s", ids[1:2])

    drain(registry, batch=10)

    assert [status(job_id) for job_id in ids] == ["succeeded"] * 3
    assert seen[0] == 1


def test_a_lost_lease_of_another_job_is_a_failure_of_this_one(
    client: Client, dsn: str, db: psycopg.Connection[Any], background: Background
) -> None:
    """The handler speaks for another job, whose lease is lost: its own is not."""
    registry = Registry()
    other = client.enqueue("other", queue="elsewhere").job_id

    @registry.handler("meddles")
    def meddles(job: Job) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            Client(connection).heartbeat(other, 1)

    job_id = client.enqueue("meddles", max_attempts=1).job_id
    background(registry)

    query = "select status, error_type from rota.job_runs where id = %s"
    wait_until(
        lambda: db.execute(query, [job_id]).fetchone() == ("dead", "rota.LeaseLostError")
    )
