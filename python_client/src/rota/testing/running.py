"""Run jobs in a test: one handler with `run_job`, or all that is due with `drain`.

Jobs run one by one, as a worker would run them, but on the session of the test and in its
transaction: `drain` claims a job, runs its handler behind a savepoint, and reports its end.
What a handler has written before it raises stays, as it does where each statement is a
transaction; only if its error has broken the transaction of the test, all that it has
written is undone, and the next job runs.

A plain function runs in the thread of the test, where Django's connection is, or a session of
SQLAlchemy that the test has put in its place.  Within an event loop, with the ``_async`` forms,
it runs in another thread, as in a worker.  Each handler has a copy of the test's context.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, cast

from psycopg.rows import scalar_row

from ..client.values import check_json, check_known, check_stage, storable, to_array
from ..exceptions import (
    InvalidArgumentError,
    JobFinishedError,
    JobNotFoundError,
    LeaseLostError,
)
from ..job import AsyncJob, BaseJob, Job, JobContext
from ..registry import Registry
from ..rows import ClaimedJob
from ..tasks import Task
from ..worker.completer import NOT_COMMITTED
from ..worker.connection import ConnectionState
from ..worker.events import Outcome, failure, run_async, run_sync
from ..worker.lending import Pool
from ..worker.own_process import (
    Processes,
    check_can_be_found,
    packed,
    portable,
    question_of,
)
from ..worker.process import is_in_loop
from .session import NoDatabase, NoDatabaseError, Session, session_of

T = TypeVar("T")
Steps = Generator[BaseJob, Outcome, T]

WORKER = "rota.testing"
MAX_ATTEMPTS = 10
_FIELDS = set(ClaimedJob._fields) - {"job_id", "lease_token", "job_type", "payload", "attempt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """How one run of a job ended."""

    job_id: int
    """Without a database it is 1."""
    job_type: str
    payload: Any
    attempt: int
    status: str
    """``succeeded``, ``failed`` (and to be tried again), ``dead``, ``snoozed``, ``cancelled``
    or ``lost``."""
    result: Any = None
    """What the handler returned, or set as ``job.result``."""
    error: BaseException | None = None
    """What the handler raised to fail, `RetryIn` as well."""
    delay: timedelta | None = None
    """How long the handler wants to wait, by `Snooze` or `RetryIn`."""
    run_at: datetime | None = None
    """When the job runs next; only a database knows."""
    next_stage: str | None = None
    """The stage that the handler has sent its run to."""


def run_job(
    registry: Registry,
    job: str | Task[..., ..., Any] | Mapping[str, Any],
    payload: Mapping[str, Any] | None = None,
    *,
    attempt: int = 1,
    connection: object = None,
    resources: Mapping[str, Any] | None = None,
    raise_errors: bool = True,
    **fields: Any,
) -> JobOutcome:
    """Run the handler of one job, and return how the job ended.

    *job* is a type, a task, or what ``task.job(...)`` returns.  *fields* are further ones of
    the job, such as ``max_attempts`` or ``stage_input``.  With a *connection* the job is in
    the database, so that ``job.transaction()`` and ``job.effect()`` work; other jobs there do
    not matter.  *resources* stand for those of `Registry.lifespan`.  It raises an exception
    of the handler, unless that asks for another run, or *raise_errors* is false.
    """
    way = _Way(registry, resources or {}, raise_errors)
    with _one_job(way, job, payload, attempt, connection, fields) as steps:
        return _drive(registry, steps)


async def run_job_async(
    registry: Registry,
    job: str | Task[..., ..., Any] | Mapping[str, Any],
    payload: Mapping[str, Any] | None = None,
    *,
    attempt: int = 1,
    connection: object = None,
    resources: Mapping[str, Any] | None = None,
    raise_errors: bool = True,
    **fields: Any,
) -> JobOutcome:
    """Run the handler of one job like `run_job`, in the event loop of the test."""
    way = _Way(registry, resources or {}, raise_errors, in_loop=True)
    with _one_job(way, job, payload, attempt, connection, fields) as steps:
        return await _drive_async(registry, steps)


def drain(
    connection: object,
    registry: Registry,
    *,
    queues: Sequence[str] | None = None,
    with_later: bool = False,
    raise_errors: bool = True,
    max_jobs: int = 1000,
    resources: Mapping[str, Any] | None = None,
) -> list[JobOutcome]:
    """Run all jobs that are due, and those that they enqueue, if the registry has handlers.

    *connection* is the test's own, and everything happens in its transaction; or it is the URL
    of a database, where `drain` commits.  *with_later* also runs jobs that are due later, in
    their order, and so retries a job until it has ended.  `drain` raises the exception of a
    handler when its job has failed, unless that asks for another run, or *raise_errors* is
    false.  After *max_jobs* runs it raises RuntimeError.  *resources* stand for those of
    `Registry.lifespan`.  Functions of `Registry.on_end` are not called.
    """
    with session_of(connection) as session:
        runner = _Runner(session, _Way(registry, resources or {}, raise_errors))
        return _drive(registry, runner.run_all(queues, with_later, max_jobs))


async def drain_async(
    connection: object,
    registry: Registry,
    *,
    queues: Sequence[str] | None = None,
    with_later: bool = False,
    raise_errors: bool = True,
    max_jobs: int = 1000,
    resources: Mapping[str, Any] | None = None,
) -> list[JobOutcome]:
    """Run all jobs that are due like `drain`, in the event loop of the test."""
    with session_of(connection) as session:
        runner = _Runner(session, _Way(registry, resources or {}, raise_errors, in_loop=True))
        return await _drive_async(registry, runner.run_all(queues, with_later, max_jobs))


@dataclass(frozen=True, slots=True)
class _Way:
    """How jobs are run."""

    registry: Registry
    resources: Mapping[str, Any]
    raise_errors: bool
    in_loop: bool = False
    """Whether the test has an event loop, so that plain functions run in threads."""


class _NoProcesses(Processes):
    """Calls here what a worker calls in another process.

    That would not find what the test has not committed or has patched, and with Django not
    even the database of the test.
    """

    def __init__(self, *, in_loop: bool) -> None:
        super().__init__()
        self._in_loop = in_loop

    async def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call *function*, where any plain handler would be called."""
        check_can_be_found(function)
        question_of(function, args, kwargs)  # which raises for what cannot be sent
        try:
            result = await self._call(function, args, kwargs)
        except BaseException as error:
            if isinstance(text := portable(error), RuntimeError) and text is not error:
                raise text from error  # as which it arrives, whatever a task retries
            raise
        packed(result)
        return result

    async def _call(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if self._in_loop:
            return await asyncio.to_thread(function, *args, **kwargs)
        # In the other process there is no loop: Django refuses its connections where one is.
        loop = asyncio.get_running_loop()
        asyncio._set_running_loop(None)
        try:
            return function(*args, **kwargs)
        finally:
            asyncio._set_running_loop(loop)


class _Context(JobContext):
    """What a job uses of the test that runs it."""

    def __init__(self, way: _Way, pool: Pool) -> None:
        super().__init__(WORKER, pool, pool, ConnectionState())
        self.resources = dict(way.resources)
        self.processes = _NoProcesses(in_loop=way.in_loop)


class _Runner:
    """Takes jobs from claim to end: it yields each when its handler is to run."""

    def __init__(self, session: Session, way: _Way) -> None:
        self._session = session
        self._way = way
        self._registry = way.registry
        self._context = _Context(way, session)

    def run_all(
        self, queues: Sequence[str] | None, with_later: bool, max_jobs: int
    ) -> Steps[list[JobOutcome]]:
        """Run what is due, and with *with_later* what is due later."""
        ended: list[JobOutcome] = []
        is_more = True
        while is_more:
            claim = self._claim(queues)
            if claim is None:
                is_more = with_later and self._make_due(queues)
                continue
            if len(ended) == max_jobs:
                raise RuntimeError(
                    f"{max_jobs} jobs have run and there are more, the next a "
                    f"{claim.job_type} with {claim.payload}: does a job never end? "
                    "max_jobs=... lets more run"
                )
            ended.append((yield from self.run(claim)))
        return ended

    def run(self, claim: ClaimedJob) -> Steps[JobOutcome]:
        """Run one job and report its end."""
        job = _job_of(self._registry, claim, self._context)
        what = f"the handler of {job.job_type}"
        with self._session.savepoint(what):
            outcome = yield job
            if self._session.is_broken and outcome.kind == "succeeded":
                raise RuntimeError(
                    f"{what} has caught an error of the database that has broken the "
                    "transaction of the test: let it put a savepoint around the statement"
                )
            if self._session.is_broken and job.is_finished:
                raise RuntimeError(
                    f"{what} has broken the transaction of the test after job.transaction(), "
                    "so the end of its job is undone, which it would not be in a worker: let "
                    "it put a savepoint around the statement"
                ) from outcome.exception
        return _told(self._end(job, outcome), outcome, self._way.raise_errors)

    def start(self, request: Mapping[str, Any], attempt: int) -> ClaimedJob:
        """Put one job in the database, and claim it for that attempt."""
        client = self._session.client
        kept = {"job_type", "payload", "max_attempts", "backoff", "lease"}
        queue = f"{WORKER}.{secrets.token_hex(8)}"
        client.enqueue(**{n: v for n, v in request.items() if n in kept}, queue=queue)
        while claims := client.claim_jobs(WORKER, [queue]):
            if claims[0].attempt == attempt:
                return claims[0]
            client.fail_job(
                claims[0].job_id, claims[0].lease_token, "an attempt before the test",
                retry_in=timedelta(0),
            )  # fmt: skip
        raise RuntimeError(
            f"the job cannot be run at attempt {attempt}: it has max_attempts, or a limit"
        )

    def _claim(self, queues: Sequence[str] | None) -> ClaimedJob | None:
        chosen, job_types = self._queues(queues), self._registry.job_types
        has_ticked = False
        while True:
            if chosen and job_types:
                claims = self._session.client.claim_jobs(WORKER, chosen, 1, job_types=job_types)
                if claims:
                    return claims[0]
            # What a schedule makes, or waits for others, comes by a tick.
            if not self._take_checks() and has_ticked:
                return None
            self._session.client.tick()
            has_ticked = True
            chosen = self._queues(queues)

    def _take_checks(self) -> bool:
        """Let a tick do the due checks of the test's own transaction; say if there are any.

        Else they would be left for after its commit, by which others can have come in.
        """
        if not self._ask("select has_table_privilege('rota.pending_checks', 'update')")[0]:
            return False
        return bool(
            self._ask(
                """
                update rota.pending_checks set made_by = '0'
                where made_by = pg_current_xact_id_if_assigned() and due_at <= rota.now()
                returning id
                """
            )
        )

    def _queues(self, queues: Sequence[str] | None) -> list[str]:
        if queues is not None:
            return list(to_array("queues", queues))
        return self._ask(
            "select distinct queue from rota.job_runs where status in ('queued', 'failed')"
        )

    def _make_due(self, queues: Sequence[str] | None) -> bool:
        """Make the next of the later jobs due; say whether there was one."""
        later = self._ask(
            """
            select id from rota.job_runs
            where status in ('queued', 'failed')
              and run_at > rota.now()
              and job_type = any (%(job_types)s)
              and (%(queues)s::text[] is null or queue = any (%(queues)s))
            order by run_at, priority, id
            limit 1
            """,
            job_types=self._registry.job_types,
            queues=None if queues is None else list(queues),
        )
        for job_id in later:
            self._session.client.reschedule_job(job_id, delay=timedelta(0))
        return bool(later)

    def _ask(self, question: str, **values: Any) -> list[Any]:
        with self._session.connection.cursor(row_factory=scalar_row) as cursor:
            return cursor.execute(question.encode(), values).fetchall()

    def _end(self, job: BaseJob, outcome: Outcome) -> JobOutcome:
        """Report the end of a job, and say what became of it."""
        if job.is_finished:
            return _outcome_of(job, "succeeded", result=job.result)
        ids, client = (job.job_id, job.lease_token), self._session.client
        try:
            match outcome:
                case Outcome("succeeded") if job.is_in_doubt:
                    if client.finish_job(*ids) == "finished":
                        raise RuntimeError(f"{job.job_type}: {NOT_COMMITTED.error}")
                    return _outcome_of(job, "succeeded", result=job.result)
                case Outcome("succeeded", result):
                    try:
                        check_stage(job.next_stage)
                        with self._session.connection.transaction():
                            client.finish_job(
                                *ids, storable(result, f"job {ids[0]}"), job.next_stage
                            )
                    except (InvalidArgumentError, TypeError) as error:
                        if self._way.raise_errors:
                            raise
                        return self._end(job, failure(error))
                    return _outcome_of(job, "succeeded", result=result)
                case Outcome("failed", _, error, error_type, stack, retry_in, fatal):
                    ended = client.fail_job(*ids, error, error_type, stack, retry_in, fatal)
                    told = {"error": outcome.exception, "delay": retry_in}
                    return _outcome_of(job, ended.status, **told, run_at=ended.run_at)
                case Outcome("snoozed", delay=timedelta() as delay):
                    run_at = client.snooze_job(*ids, delay)
                    status = "cancelled" if run_at is None else "snoozed"
                    return _outcome_of(job, status, delay=delay, run_at=run_at)
        except JobFinishedError:
            if not job.is_in_doubt:
                raise
            return _outcome_of(job, "succeeded", result=job.result)
        except (LeaseLostError, JobNotFoundError) as error:
            raise RuntimeError(
                f"the handler of {job.job_type} has rolled back what was there before it, and "
                "with that its own job: commit what the test has done on the same session"
            ) from error
        return _outcome_of(job, "lost")


@contextmanager
def _one_job(
    way: _Way,
    job: str | Task[..., ..., Any] | Mapping[str, Any],
    payload: Mapping[str, Any] | None,
    attempt: int,
    connection: object,
    fields: Mapping[str, Any],
) -> Iterator[Steps[JobOutcome]]:
    for name in fields:
        if name not in _FIELDS:
            raise TypeError(f"{name!r} is no field of a job: it has {', '.join(_FIELDS)}")
    request = {**request_of(job, payload), **fields}
    limit = request.get("time_limit")
    if isinstance(limit, int | float):
        request["time_limit"] = timedelta(seconds=limit)
    elif isinstance(limit, str):  # that only a database can read, and only a worker enforces
        del request["time_limit"]
    if attempt < 1:
        raise ValueError(f"attempt must be at least 1, got {attempt}")
    if connection is None:
        yield _run_alone(way, request, attempt)
        return
    with session_of(connection) as session:
        runner = _Runner(session, way)
        told = {name: value for name, value in request.items() if name in _FIELDS}
        claim = runner.start(request, attempt)._replace(**{"queue": "default", **told})
        yield runner.run(claim)


def _run_alone(way: _Way, request: Mapping[str, Any], attempt: int) -> Steps[JobOutcome]:
    """Run a job that is in no database."""
    now = datetime.now(UTC)
    fields: dict[str, Any] = dict.fromkeys(ClaimedJob._fields)
    fields |= dict.fromkeys(("job_id", "lease_token"), 1) | {"queue": "default", "priority": 0}
    fields |= {"max_attempts": max(MAX_ATTEMPTS, attempt), "locked_for": timedelta(minutes=1)}
    fields |= {"run_at": now, "created_at": now, "locked_until": now + timedelta(minutes=1)}
    fields |= {name: value for name, value in request.items() if name in fields}
    claim = ClaimedJob(**{**fields, "attempt": attempt})
    job = _job_of(way.registry, claim, _Context(way, NoDatabase()))
    outcome = yield job
    match outcome:
        case Outcome("succeeded", result):
            check_stage(job.next_stage)
            ended = _outcome_of(job, "succeeded", result=result)
        case Outcome("failed", fatal=fatal, retry_in=retry_in, exception=error):
            status = "dead" if fatal or attempt >= job.max_attempts else "failed"
            ended = _outcome_of(job, status, error=error, delay=retry_in)
        case Outcome("snoozed", delay=delay):
            ended = _outcome_of(job, "snoozed", delay=delay)
        case _:
            ended = _outcome_of(job, "lost")
    return _told(ended, outcome, way.raise_errors)


def request_of(
    job: str | Task[..., ..., Any] | Mapping[str, Any], payload: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return a job as ``enqueue`` takes it, with the payload that a worker would get."""
    if isinstance(job, Mapping):
        if payload is not None:
            raise TypeError("a job that task.job(...) has made brings its payload")
        request = dict(job)
    elif isinstance(job, Task):
        request = job.job(**(payload or {}))
    else:
        request = {"job_type": job, "payload": payload or {}}
    check_json("payload", request["payload"])
    try:
        request["payload"] = json.loads(json.dumps(request["payload"]))
    except TypeError:
        check_known("payload", request["payload"])
        raise
    return request


def _job_of(registry: Registry, claim: ClaimedJob, context: JobContext) -> BaseJob:
    if claim.job_type not in registry.job_types:
        raise LookupError(
            f"the registry has no handler for {claim.job_type!r}; it has "
            f"{', '.join(registry.job_types) or 'none'}"
        )
    kind = AsyncJob if registry.is_async(claim.job_type) else Job
    job = kind(claim, context, time.monotonic())
    job.confirmed_at = math.inf  # nobody else is there, however long a debugger stops it
    job.began_at = time.monotonic()
    return job


def _outcome_of(job: BaseJob, status: str, **told: Any) -> JobOutcome:
    return JobOutcome(
        job_id=job.job_id, job_type=job.job_type, payload=job.payload, attempt=job.attempt,
        status=status, next_stage=job.next_stage if status == "succeeded" else None, **told,
    )  # fmt: skip


def _told(ended: JobOutcome, outcome: Outcome, raise_errors: bool) -> JobOutcome:
    """Raise what the handler did not mean to tell the worker."""
    error = outcome.exception
    is_ours = isinstance(error, NoDatabaseError) or not isinstance(error, Exception)
    raises = raise_errors and not outcome.is_asked_for
    if error is not None and (raises or is_ours):
        raise error
    return ended


def _drive(registry: Registry, steps: Steps[T]) -> T:
    """Run the handlers here, and async ones in a loop that is made for them."""
    with ExitStack() as stack:
        stack.enter_context(closing(steps))  # else it ends when the session is gone
        loop: asyncio.Runner | None = None
        try:
            job = next(steps)
            while True:
                handler = registry[job.job_type]
                if isinstance(job, AsyncJob):
                    if loop is None:
                        if is_in_loop():
                            text = "await drain_async() or run_job_async()"
                            raise RuntimeError(f"an event loop runs here: {text}")
                        loop = stack.enter_context(asyncio.Runner())
                    running = run_async(cast(Any, handler), job)
                    outcome = loop.run(running, context=copy_context())
                else:
                    outcome = copy_context().run(run_sync, cast(Any, handler), cast(Job, job))
                job = steps.send(outcome)
        except StopIteration as stop:
            return cast(T, stop.value)


async def _drive_async(registry: Registry, steps: Steps[T]) -> T:
    """Run async handlers in this loop, and the others in threads."""
    try:
        job = next(steps)
        while True:
            handler = registry[job.job_type]
            if isinstance(job, AsyncJob):
                # In a task, which has a context of its own, as a thread has here.
                outcome = await asyncio.create_task(run_async(cast(Any, handler), job))
            else:
                call = cast(Callable[[Job], object], handler)
                outcome = await asyncio.to_thread(run_sync, call, cast(Job, job))
            job = steps.send(outcome)
    except StopIteration as stop:
        return cast(T, stop.value)
