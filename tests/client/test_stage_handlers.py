"""Handlers of a pipeline's stages: what they see, and where they send the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import rota
from rota import AsyncClient, AsyncJob, Client, Job, Registry

pytestmark = pytest.mark.slow

Drain = Callable[..., None]
BaseJob = Job | AsyncJob

STAGES = [{"stage": name, "job_type": name} for name in ("one", "two", "three")]


@pytest.fixture
def runs(db: psycopg.Connection[Any], client: Client) -> Callable[[], list[Any]]:
    """Return the stages that each run has been in, and the status of its job."""
    client.define_pipeline("p", STAGES)

    def read() -> list[Any]:
        return db.execute(
            "select array(select s.stage from rota.stage_runs as s where s.job_id = r.id"
            " order by s.lease_token) || case when r.finished_at is null"
            " then array[r.stage] else '{}' end, r.status"
            " from rota.job_runs as r where r.pipeline = 'p' order by r.id"
        ).fetchall()

    return read


def registry_of(handler: Callable[[BaseJob], object], kind: str) -> Registry:
    """Register one function for all stages, as a plain or as an async handler."""
    registry = Registry()
    for name in ("one", "two", "three"):
        if kind == "plain":

            def plain(job: Job) -> object:
                return handler(job)

            registry.handler(name)(plain)
        else:

            async def in_loop(job: AsyncJob) -> object:
                return handler(job)

            registry.handler(name)(in_loop)
    return registry


every_kind = pytest.mark.parametrize("kind", ["plain", "async"])


@every_kind
def test_handlers_see_their_stage_and_the_result_before(
    client: Client, drain: Drain, runs: Any, kind: str
) -> None:
    seen: list[Any] = []

    def handler(job: BaseJob) -> object:
        seen.append((job.pipeline, job.stage, job.job_type, job.stage_input, job.payload))
        return {"from": job.stage}

    client.start_pipeline("p", {"n": 1}, idempotency_key="k")

    drain(registry_of(handler, kind))

    assert seen == [
        ("p", "one", "one", None, {"n": 1}),
        ("p", "two", "two", {"from": "one"}, {"n": 1}),
        ("p", "three", "three", {"from": "two"}, {"n": 1}),
    ]
    assert runs() == [(["one", "two", "three"], "succeeded")]


@every_kind
@pytest.mark.parametrize(
    ("next_stage", "way"),
    [("three", ["one", "three"]), ("end", ["one"]), (None, ["one", "two", "three"])],
)
def test_a_handler_chooses_the_next_stage(
    client: Client, drain: Drain, runs: Any, kind: str, next_stage: str | None, way: list[str]
) -> None:
    def handler(job: BaseJob) -> None:
        if job.stage == "one":
            job.next_stage = next_stage

    for _ in range(3):
        client.start_pipeline("p")

    drain(registry_of(handler, kind))

    assert runs() == [(way, "succeeded")] * 3


def test_transaction_goes_on_to_the_stage_with_its_writes(
    client: Client, db: psycopg.Connection[Any], drain: Drain, runs: Any
) -> None:
    db.execute("create table public.written (stage text)")
    registry = Registry()

    @registry.handler("one")
    def one(job: Job) -> None:
        job.result, job.next_stage = {"n": 1}, "three"
        with job.transaction() as connection:
            connection.execute("insert into public.written values (%s)", [job.stage])

    @registry.handler("three")
    async def three(job: AsyncJob) -> None:
        job.next_stage = "nowhere" if job.attempt == 1 else None
        async with job.transaction() as connection:
            await connection.execute("insert into public.written values (%s)", [job.stage])

    client.start_pipeline("p")
    drain(registry)

    assert runs() == [(["one", "three"], "failed")]
    assert db.execute("select * from public.written").fetchall() == [("one",)]
    assert db.execute("select error_type from rota.job_errors").fetchall() == [
        ("rota.InvalidArgumentError",)
    ]
    db.execute("update rota.jobs set run_at = rota.now()")
    drain(registry)
    assert runs() == [(["one", "three"], "succeeded")]
    assert db.execute("select * from public.written").fetchall() == [("one",), ("three",)]


@every_kind
def test_a_stage_that_there_is_not_fails_its_job_and_no_other(
    client: Client, db: psycopg.Connection[Any], drain: Drain, runs: Any, kind: str
) -> None:
    wrong = ["nowhere", "", 5, "a\x00b", "\ud800", ["three"]]

    def handler(job: BaseJob) -> None:
        n = job.payload["n"]
        job.next_stage = wrong[n // 2] if n % 2 else "end"

    for n in range(2 * len(wrong)):
        client.start_pipeline("p", {"n": n})
    client.enqueue("plain")
    registry = registry_of(handler, kind)
    registry.handler("plain")(lambda job: None)

    drain(registry, concurrency=8)

    assert runs() == [(["one"], "succeeded"), (["one"], "failed")] * len(wrong)
    messages = db.execute("select message from rota.job_errors").fetchall()
    assert [message.startswith("next_stage") for (message,) in messages] == [True] * len(wrong)
    assert db.execute(
        "select status from rota.job_runs where job_type = 'plain'"
    ).fetchall() == [("succeeded",)]


def test_a_stage_for_a_job_in_no_pipeline_fails_it(
    client: Client, status: Callable[[int], str], drain: Drain
) -> None:
    registry = Registry()

    @registry.handler("lost")
    def lost(job: Job) -> None:
        job.next_stage = "end"

    job_id = client.enqueue("lost").job_id
    drain(registry)

    assert status(job_id) == "failed"


def test_a_stage_input_that_python_cannot_read_makes_its_job_dead(
    client: Client, db: psycopg.Connection[Any], drain: Drain, runs: Any
) -> None:
    client.start_pipeline("p")
    (job,) = client.claim_jobs("sql")
    db.execute(
        "select rota.finish_job(%s, %s, '{\"n\": 1e5000}')", (job.job_id, job.lease_token)
    )

    drain(registry_of(lambda job: None, "plain"))

    assert runs() == [(["one", "two"], "dead")]
    assert db.execute("select error_type from rota.job_errors").fetchall() == [("stage_input",)]


def test_client_drives_a_run_by_hand(client: Client) -> None:
    client.define_pipeline("p", [{**STAGES[0], "lease": timedelta(minutes=5)}, *STAGES[1:]])
    run_id = client.start_pipeline(
        "p", {"n": 1}, stage="two", delay=timedelta(0), depends_on=[]
    )
    (job,) = client.claim_jobs("w")
    assert (job.job_id, job.pipeline, job.stage) == (run_id, "p", "two")
    with pytest.raises(rota.RunInProgressError):
        client.restart_pipeline(run_id, "one")
    with pytest.raises(rota.InvalidArgumentError, match="next_stage"):
        client.finish_job(job.job_id, job.lease_token, next_stage="four")

    assert client.finish_job(job.job_id, job.lease_token, {"a": 1}, "end") == "finished"
    assert client.restart_pipeline(run_id, "three") == run_id
    (again,) = client.claim_jobs("w")
    assert (again.stage, again.stage_input, again.payload) == ("three", {"a": 1}, {"n": 1})
    (row,) = client.finish_jobs([again.job_id], [again.lease_token], [None], ["one"])
    assert row.outcome == "finished"
    (first,) = client.claim_jobs("w")
    assert (first.stage, first.locked_for) == ("one", timedelta(minutes=5))
    client.drop_pipeline("p")
    with pytest.raises(rota.InvalidArgumentError, match="pipeline"):
        client.start_pipeline("p")


def test_async_client_has_the_same(dsn: str, client: Client) -> None:
    async def drive() -> int:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            each = AsyncClient(connection)
            await each.define_pipeline("p", STAGES)
            return await each.start_pipeline("p", {"n": 1}, idempotency_key="k")

    run_id = asyncio.run(drive())

    assert client.claim_jobs("w")[0].job_id == run_id


def test_define_pipeline_refuses_what_is_no_list_of_stages(client: Client) -> None:
    with pytest.raises(rota.InvalidArgumentError, match=r"stages\[2\].stage"):
        client.define_pipeline("p", [STAGES[0], {"job_type": "two"}])
    with pytest.raises(rota.InvalidArgumentError):
        client.define_pipeline("p", [{"stage": "a\x00", "job_type": "a"}])
