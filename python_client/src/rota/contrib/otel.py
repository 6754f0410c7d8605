"""Traces by OpenTelemetry, from enqueuing a job to each of its attempts (extra ``otel``).

    registry = rota.Registry()
    rota.contrib.otel.instrument(registry)

Call it once in each process, with the registry of the worker, or without one in a process that
only enqueues.  Names and attributes are those of the semantic conventions for messaging.  A
call that adds jobs is a span of the kind producer, and its context goes into the ``headers``
of the jobs, as ``traceparent``; each attempt is a span of the kind consumer.  It needs only the
API of OpenTelemetry, and emits nothing until your program sets up an SDK.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from opentelemetry import context as contexts
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind, Status, StatusCode

from .. import __version__
from ..client.statement import HOOKS, Hook, Outgoing
from ..exceptions import RetryIn, text_of
from ..worker.events import outcome_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

    from ..job import AsyncJob, Job
    from ..registry import Registry

DEFAULT_QUEUE = "default"
MAX_BAGGAGE = 4096
"""Half of what a job's headers may have: no job is refused for its trace."""
_hooked: list[Hook] = []
_traced: WeakSet[Registry] = WeakSet()


def instrument(
    registry: Registry | None = None,
    *,
    linked: bool = False,
    tracer_provider: TracerProvider | None = None,
) -> None:
    """Make spans of the calls that add jobs, and of the attempts of a registry's handlers.

    An attempt belongs to the trace of the producer.  With *linked* it begins its own trace,
    with a link to the producer's: for jobs that run hours later or many times.  A second call
    for the same registry does nothing.
    """
    tracer = trace.get_tracer("rota", __version__, tracer_provider)

    @contextmanager
    def send(out: Outgoing) -> Iterator[None]:
        with tracer.start_as_current_span(
            _name("send", out.jobs), kind=SpanKind.PRODUCER, attributes=_sent(out)
        ) as span:
            headers: dict[str, str] = {}
            propagate.inject(headers)
            if len(headers.get("baggage", "")) > MAX_BAGGAGE:
                del headers["baggage"]
            out.add_headers(headers)
            yield
            if len(out.ids) == 1:
                span.set_attribute("messaging.message.id", str(out.ids[0]))

    def process(job: Job | AsyncJob) -> Iterator[None]:
        # Neither the trace nor the baggage of the worker itself: only what the job brings.
        context = propagate.extract(job.headers, Context())
        sender = trace.get_current_span(context).get_span_context()
        if linked:
            context = trace.set_span_in_context(trace.INVALID_SPAN, context)
        token = contexts.attach(context)
        try:
            with tracer.start_as_current_span(
                f"process {job.job_type}",
                kind=SpanKind.CONSUMER,
                attributes=_processed(job),
                links=[Link(sender)] if linked and sender.is_valid else None,
                record_exception=False,
                set_status_on_exception=False,
            ) as span:
                try:
                    yield
                except BaseException as error:
                    has_failed = outcome_of(job, error).kind in ("failed", "lost")
                    if has_failed and not job.is_cancel_requested:
                        _fail(span, error)
                    raise
        finally:
            contexts.detach(token)

    if not _hooked:
        HOOKS.append(send)
        _hooked.append(send)
    if registry is not None and registry not in _traced:
        registry.middleware(process)
        _traced.add(registry)


def uninstrument() -> None:
    """Make no more spans of the calls that add jobs."""
    while _hooked:
        HOOKS.remove(_hooked.pop())


def _name(operation: str, jobs: Sequence[Mapping[str, Any]]) -> str:
    types = {str(job.get("job_type")) for job in jobs}
    return f"{operation} {types.pop()}" if len(types) == 1 else f"{operation} jobs"


def _sent(out: Outgoing) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "messaging.system": "rota",
        "messaging.operation.name": "enqueue",
        "messaging.operation.type": "send",
    }
    queues = {str(job.get("queue", DEFAULT_QUEUE)) for job in out.jobs}
    if len(queues) == 1:
        attributes["messaging.destination.name"] = queues.pop()
    if len(out.jobs) != 1:
        attributes["messaging.batch.message_count"] = len(out.jobs)
    return attributes


def _processed(job: Job | AsyncJob) -> dict[str, Any]:
    return {
        "messaging.system": "rota",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": job.queue,
        "messaging.message.id": str(job.job_id),
        "messaging.client.id": job.worker,
        "rota.job_type": job.job_type,
        "rota.attempt": job.attempt,
        "rota.max_attempts": job.max_attempts,
    }


def _fail(span: Span, error: BaseException) -> None:
    cause = error.__cause__ if isinstance(error, RetryIn) and error.__cause__ else error
    with suppress(Exception):  # it asks for the text, which some do not give
        span.record_exception(cause)
    span.set_attribute("error.type", type(cause).__qualname__)
    span.set_status(Status(StatusCode.ERROR, f"{type(cause).__name__}: {text_of(cause)}"))
