"""Traces from whoever enqueues a job to each of its attempts, and what Sentry hears."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sentry_sdk
from opentelemetry import baggage, context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from sentry_sdk.transport import Transport

import rota
from rota import AsyncClient, AsyncJob, Client, Job, Registry
from rota.contrib import otel
from rota.testing import drain
from support.started_workers import BackgroundWorker
from support.waiting import wait_until

Db = psycopg.Connection[Any]
DOCS = Path(__file__).resolve().parents[2] / "python_client" / "docs" / "traces.md"


class Traces:
    """A provider whose spans are kept."""

    def __init__(self) -> None:
        self.kept = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.kept))
        self.tracer = self.provider.get_tracer("test")

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.kept.get_finished_spans() if span.name == name]


@pytest.fixture
def traces() -> Iterator[Traces]:
    otel.uninstrument()  # as somebody else in this process may have called it
    yield Traces()
    otel.uninstrument()


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def id_of(span: ReadableSpan) -> int:
    return span.context.span_id


def test_only_an_attempt_that_has_failed_is_an_error(
    client: Client, dsn: str, traces: Traces, db: Db, status: Callable[[int], str]
) -> None:
    """None that was stopped, or snoozed in a group: at each deployment there are some."""
    registry = Registry()
    otel.instrument(registry, tracer_provider=traces.provider)

    @registry.handler("waits")
    async def waits(job: AsyncJob) -> None:
        await asyncio.sleep(3600)

    @registry.handler("checks")
    def checks(job: Job) -> None:
        while True:
            job.check()
            time.sleep(0.01)

    @registry.handler("naps")
    def naps(job: Job) -> None:
        raise ExceptionGroup("of tasks", [rota.Snooze(3600)])

    client.enqueue("naps")
    released = [client.enqueue(job_type).job_id for job_type in ("waits", "checks")]
    cancelled = [client.enqueue(job_type).job_id for job_type in ("waits", "checks")]
    worker = BackgroundWorker(dsn, registry, grace_period=0, lease=6)
    wait_until(lambda: {status(each) for each in released + cancelled} == {"running"}, "jobs")
    for job_id in cancelled:
        client.cancel_job(job_id)
    wait_until(lambda: {status(each) for each in cancelled} == {"cancelled"}, "their end")
    worker.stop()

    assert {status(each) for each in released} == {"queued"}
    spans = [each for each in traces.kept.get_finished_spans() if "process" in each.name]
    assert len(spans) == 5
    assert [(each.name, each.events) for each in spans if each.status.status_code.value] == []


@pytest.mark.slow
def test_a_trace_leads_from_the_request_through_all_attempts(
    client: Client, dsn: str, traces: Traces, db: Db
) -> None:
    registry = Registry()
    otel.instrument(registry, tracer_provider=traces.provider)
    otel.instrument(registry, tracer_provider=traces.provider)

    @registry.handler("charge")
    def charge(job: Job) -> None:
        if job.attempt == 1:
            raise ConnectionError("the bank is down")
        with job.transaction() as connection:
            Client(connection).enqueue("mail")

    @registry.handler("mail")
    async def mail(job: AsyncJob) -> None: ...

    with traces.tracer.start_as_current_span("request") as request:
        job_id = client.enqueue(
            "charge", queue="shop", backoff={"kind": "fixed", "base_seconds": 0.001}
        ).job_id
    worker = BackgroundWorker(dsn, registry, queues=["shop", "default"])
    while not traces.named("process mail"):
        pass
    worker.stop()

    (sent,) = traces.named("send charge")
    first, second = traces.named("process charge")
    (next_sent,), (next_done,) = traces.named("send mail"), traces.named("process mail")
    assert parent_of(sent) == request.get_span_context().span_id
    assert (sent.kind, first.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert parent_of(first) == parent_of(second) == id_of(sent)
    assert parent_of(next_sent) == id_of(second)
    assert parent_of(next_done) == id_of(next_sent)
    assert first.status.status_code is StatusCode.ERROR
    assert "the bank is down" in str(first.status.description)
    assert [event.name for event in first.events] == ["exception"]
    assert second.status.status_code is StatusCode.UNSET
    told = dict(first.attributes or {})
    assert told["messaging.system"] == "rota"
    assert told["messaging.destination.name"] == "shop"
    assert told["messaging.message.id"] == str(job_id)
    assert (told["rota.job_type"], told["rota.attempt"]) == ("charge", 1)
    assert dict(sent.attributes or {})["messaging.message.id"] == str(job_id)
    (headers,) = db.execute(
        "select headers from rota.job_runs where id = %s", [job_id]
    ).fetchone() or ({},)
    assert headers["traceparent"].startswith(
        f"00-{sent.context.trace_id:032x}-{id_of(sent):016x}"
    )


def test_a_batch_is_one_span_and_own_headers_stay(
    client: Client, traces: Traces, db: Db
) -> None:
    otel.instrument(tracer_provider=traces.provider)

    client.enqueue_many([{"job_type": "a"}, {"job_type": "b", "headers": {"tenant": "7"}}])
    client.enqueue_many([])

    sent, _ = traces.named("send jobs")
    assert dict(sent.attributes or {})["messaging.batch.message_count"] == 2
    found = db.execute("select headers from rota.jobs order by id").fetchall()
    assert [sorted(headers) for (headers,) in found] == [
        ["traceparent"],
        ["tenant", "traceparent"],
    ]


def test_an_attempt_may_have_a_trace_of_its_own(
    client: Client, dsn: str, traces: Traces
) -> None:
    registry = Registry()
    otel.instrument(registry, linked=True, tracer_provider=traces.provider)
    registry.add("x", lambda job: None)
    registry.add("snoozes", _snooze)

    client.enqueue("x")
    client.enqueue("snoozes")
    client.enqueue("x", headers={"traceparent": "no trace at all"})
    drain(dsn, registry)

    sent = traces.named("send x")
    done = traces.named("process x")
    assert [parent_of(span) for span in done] == [None, None]
    assert [[link.context.span_id for link in span.links] for span in done] == [
        [id_of(sent[0])], [],
    ]  # fmt: skip
    (snoozed,) = traces.named("process snoozes")
    assert snoozed.status.status_code is StatusCode.UNSET
    assert not snoozed.events


@contextlib.contextmanager
def carrying(values: dict[str, str]) -> Iterator[None]:
    carried = context.get_current()
    for name, value in values.items():
        carried = baggage.set_baggage(name, value, carried)
    token = context.attach(carried)
    yield
    context.detach(token)


@pytest.mark.parametrize("linked", [True, False])
def test_a_job_has_the_baggage_of_its_producer_and_nothing_of_the_worker(
    client: Client, dsn: str, traces: Traces, linked: bool
) -> None:
    registry = Registry()
    otel.instrument(registry, linked=linked, tracer_provider=traces.provider)
    seen: list[dict[str, object]] = []

    def see(job: Job) -> None:
        seen.append(dict(baggage.get_all()))

    @registry.handler("async")
    async def see_too(job: AsyncJob) -> None:
        seen.append(dict(baggage.get_all()))

    registry.add("plain", see)

    with carrying({"tenant": "7"}):
        client.enqueue("plain")
        client.enqueue("async")
    client.enqueue("plain", headers={"traceparent": "no trace at all"})
    with carrying({"tenant": "of the worker"}):
        with traces.tracer.start_as_current_span("the worker") as own:
            drain(dsn, registry)
        assert baggage.get_all() == {"tenant": "of the worker"}

    assert seen == [{"tenant": "7"}, {"tenant": "7"}, {}]
    done = traces.named("process plain") + traces.named("process async")
    own_trace = own.get_span_context().trace_id
    assert own_trace not in [span.context.trace_id for span in done]


def test_no_job_is_refused_for_what_its_trace_carries(
    client: Client, traces: Traces, db: Db
) -> None:
    otel.instrument(tracer_provider=traces.provider)

    with carrying({str(number): "x" * 2700 for number in range(3)}):
        client.enqueue("x", headers={"tenant": "7" * 3000})
        client.enqueue("x", headers={"tenant": "7" * 8150})

    assert db.execute(
        "select headers ? 'baggage', headers ? 'traceparent' from rota.jobs order by id"
    ).fetchall() == [(False, True), (False, False)]


def test_a_wrong_argument_is_named_also_where_calls_are_traced(
    client: Client, traces: Traces
) -> None:
    otel.instrument(tracer_provider=traces.provider)
    wrong: list[dict[str, Any]] = [{"headers": "x"}, {"queue": ["x"]}, {"job_type": ["x"]}]

    for argument in wrong:
        with pytest.raises(rota.InvalidArgumentError, match=f"^{next(iter(argument))} must be"):
            client.enqueue(**{"job_type": "x", **argument})


def _snooze(job: Job) -> None:
    raise rota.Snooze(60)


def test_the_async_client_and_jobs_that_travel_are_traced(
    dsn: str, traces: Traces, db: Db
) -> None:
    otel.instrument(tracer_provider=traces.provider)
    db.execute("select rota.set_database_number(1)")
    stages = '[{"stage": "one", "job_type": "z"}]'
    db.execute("select rota.define_pipeline('p', %s)", [stages])

    async def enqueue() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            client = AsyncClient(connection)
            with traces.tracer.start_as_current_span("request"):
                await client.enqueue("x")
                await client.enqueue_to(2, "y")
                await client.start_pipeline("p")

    asyncio.run(enqueue())

    (x,), (y,) = traces.named("send x"), traces.named("send y")
    assert parent_of(x) == parent_of(y) is not None
    row = db.execute(
        "select payload -> 'headers' ->> 'traceparent' from rota.jobs where queue = 'forward:2'"
    ).fetchone()
    assert row is not None
    assert f"-{id_of(y):016x}-" in row[0]
    (run,) = traces.named("send p")
    row = db.execute(
        "select headers ->> 'traceparent' from rota.jobs where stage = 'one'"
    ).fetchone()
    assert row is not None
    assert f"-{id_of(run):016x}-" in row[0]


def test_a_call_that_is_refused_tells_so_in_its_span(client: Client, traces: Traces) -> None:
    otel.instrument(tracer_provider=traces.provider)

    with contextlib.suppress(rota.InvalidArgumentError):
        client.enqueue("x", priority=10**6)

    (sent,) = traces.named("send x")
    assert sent.status.status_code is StatusCode.ERROR


class Mute(Exception):
    def __str__(self) -> str:
        raise LookupError("no text")


def test_an_exception_without_a_text_stays_what_it_is(
    client: Client, dsn: str, traces: Traces
) -> None:
    registry = Registry()
    otel.instrument(registry, tracer_provider=traces.provider)

    @registry.handler("mute")
    def mute(job: Job) -> None:
        raise Mute

    client.enqueue("mute")
    (outcome,) = drain(dsn, registry, raise_errors=False)

    assert isinstance(outcome.error, Mute)
    (span,) = traces.named("process mute")
    assert span.status.description == "Mute: Mute, whose text cannot be had"


class Kept(Transport):
    """Keeps what Sentry would be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def capture_envelope(self, envelope: Any) -> None:
        self.events += [item.payload.json for item in envelope.items if item.type == "event"]


@pytest.mark.slow
def test_sentry_hears_of_failed_attempts_by_the_lines_of_the_docs(
    client: Client, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SENTRY_DSN", raising=False)
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[1:]:
        exec(compile(code, "traces.md", "exec"), names)
    kept = Kept()
    sentry_sdk.init("http://key@127.0.0.1:1/1", transport=kept, default_integrations=False)
    registry = names["registry"]

    @registry.handler("pay")
    def pay(job: Job) -> None:
        if job.payload["snooze"]:
            raise rota.Snooze(60)
        raise ValueError("no currency")

    try:
        client.enqueue("pay", {"snooze": True})
        job_id = client.enqueue("pay", {"snooze": False}, max_attempts=1).job_id
        drain(dsn, registry, raise_errors=False)
        sentry_sdk.flush()
    finally:
        sentry_sdk.init()

    (event,) = kept.events
    assert event["exception"]["values"][-1]["value"] == "no currency"
    assert event["transaction"] == "pay"
    assert event["tags"]["queue"] == "default"
    assert event["contexts"]["job"] == {"id": job_id, "attempt": 1}
