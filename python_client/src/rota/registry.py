"""Which handler runs which type of job."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from datetime import datetime, timedelta
from typing import Any, Literal, Protocol, TypedDict, TypeVar, Unpack, cast, overload

from .client.values import check_name
from .codec import Codec
from .exceptions import kinds_of
from .job import AsyncJob, BaseJob, Job, JobEnd
from .tasks import Errors, Handler, Task, TaskDecorator, TaskOptions, check_kind_of_job

if sys.version_info >= (3, 14):
    from annotationlib import Format

Result = Mapping[Any, Any] | Sequence[Any] | float | str | Exception | None
"""What a plain handler may return: JSON, or an exception that counts as raised.

A type checker sees by it that an ``async def`` function with a `Job` is none.
"""
PlainHandler = TypeVar("PlainHandler", bound=Callable[[Job], Result])
AsyncHandler = TypeVar("AsyncHandler", bound=Callable[[AsyncJob], Awaitable[object]])
S = TypeVar("S")
Resources = Callable[[], AsyncIterator[Mapping[str, Any] | None]]
Middleware = Callable[[Any], Iterator[None]]
EndFunction = Callable[[Any, JobEnd], Any]
L = TypeVar("L", bound=Resources)
M = TypeVar("M", bound=Middleware)
E = TypeVar("E", bound=EndFunction)


class HandlerDecorator(Protocol):
    """What ``registry.handler(...)`` returns: it registers a function and returns it."""

    @overload
    def __call__(self, function: AsyncHandler, /) -> AsyncHandler: ...

    @overload
    def __call__(self, function: PlainHandler, /) -> PlainHandler: ...


class ScheduleOptions(TypedDict, total=False):
    """The arguments of ``schedule_job()`` that a schedule in the code can have."""

    time_zone: str
    queue: str
    priority: int
    max_attempts: int | None
    lease: timedelta | None
    time_limit: timedelta | None
    headers: Mapping[str, str] | None
    backoff: Mapping[str, Any] | None
    catch_up: Literal["skip", "one", "all"]
    catch_up_window: timedelta | None
    catch_up_max: int
    overlap: Literal["allow", "skip", "queue"]
    jitter: timedelta
    starts_at: datetime | None
    ends_at: datetime | None


_SCHEDULE_OPTIONS = set(ScheduleOptions.__annotations__)


class Registry:
    """The handlers of a worker, by job type.

        registry = Registry()

        @registry.handler("send_mail")
        def send_mail(job: rota.Job) -> None: ...

    A plain function runs in a thread and gets a `Job`, an ``async def`` function runs in the
    event loop and gets an `AsyncJob`.  *codec* turns the parameters of tasks into JSON and
    back.  In the database, *name* marks the schedules that this registry declares.
    """

    def __init__(self, name: str | None = None, *, codec: Codec | None = None) -> None:
        if name is not None:
            check_name("name", name)
        self.name = name
        self._codec = codec or Codec()
        self._handlers: dict[str, Handler] = {}
        self._schedules: dict[str, dict[str, Any]] = {}
        self._async_types: set[str] = set()
        self._lifespans: list[Resources] = []
        self._middlewares: list[Callable[[BaseJob], AbstractContextManager[None]]] = []
        self.end_functions: list[EndFunction] = []
        """The functions of `on_end`."""
        self.task_queues: set[str] = set()
        """Where its tasks are enqueued by default."""

    def handler(self, job_type: str) -> HandlerDecorator:
        """Register the decorated function for a job type."""
        if not isinstance(job_type, str):  # without a name the function would be lost silently
            raise TypeError('use @registry.handler("job_type")')

        def register(function: Any) -> Any:
            self.add(job_type, function)
            return function

        return register

    def task(
        self,
        job_type: str | None = None,
        *,
        aliases: Sequence[str] = (),
        retry_on: type[Exception] | Errors | None = None,
        give_up_on: type[Exception] | Errors = (),
        own_process: bool = False,
        **options: Unpack[TaskOptions],
    ) -> TaskDecorator:
        """Make a task of the decorated function, whose typed parameters are the payload.

            @registry.task(queue="mail", idempotency_key="receipt:{order_id}")
            def send_receipt(job: rota.Job, order_id: int) -> None: ...

            send_receipt.enqueue(client, order_id=7)

        The worker fills a first parameter that is a job.  The job type is the name of the
        function unless given; *aliases* are former ones, whose jobs it runs too.  With
        *retry_on* no other exception is retried, except those of rota; after one of
        *give_up_on* the job is dead.  Keys may name parameters in braces.  With *own_process*
        the function, which takes no job, runs in another process: use it for long
        computations; see `AsyncJob.run_in_process`.

        A function whose job is of the wrong kind, or that cannot go to a process, raises
        TypeError here, at its definition; type checkers report it where the task is used.
        """
        if not isinstance(job_type, str | None):
            raise TypeError("use @registry.task(), with parentheses")
        retried = None if retry_on is None else kinds_of("retry_on", retry_on)
        given_up = kinds_of("give_up_on", give_up_on)
        if both := [kind for kind in retried or () if kind in given_up]:
            raise ValueError(f"{both[0].__name__} is in both retry_on and give_up_on")
        if isinstance(aliases, str):
            raise TypeError(f"aliases is a list of job types, as [{aliases!r}], not a text")
        aliases = tuple(aliases)  # a generator gives them only once
        for alias in aliases:
            check_name("aliases", alias)

        def make(function: Any) -> Any:
            name = job_type or str(getattr(function, "__name__", ""))
            _check_runs(name, function)
            task: Task[..., ..., object] = Task(
                function, name, self._codec, retried, given_up, options, own_process=own_process
            )
            for each in (name, *aliases):
                self.add(each, task.handler)
            self.task_queues.add(options.get("queue") or "default")
            return task

        return make

    def schedule(
        self,
        schedule: str,
        *,
        name: str | None = None,
        payload: Mapping[str, Any] | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> Callable[[S], S]:
        """Let ``rota schedule sync`` add a schedule for the decorated task or handler.

            @registry.schedule("0 2 * * *", time_zone="Europe/Warsaw")
            @registry.task()
            def clean_up(days: int = 30) -> None: ...

        It stands above ``task`` or ``handler``, once for each schedule.  *payload* has the
        arguments of a task by their names, and *name* is the job type unless given.  *options*
        are the arguments of ``schedule_job()``; those that a task has too are its defaults.
        """
        if unknown := sorted(options.keys() - _SCHEDULE_OPTIONS):
            known = ", ".join(sorted(_SCHEDULE_OPTIONS))
            raise TypeError(
                f"{unknown[0]!r} is not an option of a schedule: it can have {known}"
            )

        def register(function: S) -> S:
            job = self._scheduled_job(function, payload or {})
            said = {"name": name or job["job_type"], "schedule": schedule, **job, **options}
            check_name("name", said["name"])
            if said["name"] in self._schedules:
                raise ValueError(
                    f"there is already a schedule {said['name']!r}: give each a name"
                )
            self._schedules[said["name"]] = said
            return function

        return register

    @property
    def schedules(self) -> list[dict[str, Any]]:
        """The arguments of ``schedule_job()`` for each schedule, by their names."""
        return [self._schedules[name] for name in sorted(self._schedules)]

    def _scheduled_job(self, function: object, payload: Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(function, Task):
            job: dict[str, Any] = cast(Any, function).job(**payload)
            if lost := sorted(job.keys() - _SCHEDULE_OPTIONS - {"job_type", "payload"}):
                raise ValueError(
                    f"jobs of a schedule cannot have {', '.join(lost)}, which the task "
                    f"{function.job_type} has: each planned time makes one job, and with "
                    "overlap='skip' none while the last is live; for more, schedule another "
                    "task, which enqueues this"
                )
            return job
        types = [name for name, each in self._handlers.items() if each is function]
        if len(types) != 1:
            raise TypeError(
                "put @registry.schedule(...) above the @registry.task() or "
                "@registry.handler(...) that it is for"
            )
        return {"job_type": types[0], "payload": dict(payload)}

    def lifespan(self, function: L) -> L:
        """Open what all jobs of a worker share, and close it when the worker stops.

            @registry.lifespan
            async def clients() -> AsyncIterator[dict[str, Any]]:
                async with httpx.AsyncClient() as http:
                    yield {"http": http}

        A handler finds it as ``job.resources["http"]``.  An exception before the yield keeps
        the worker from starting.
        """
        is_generator: bool = inspect.isasyncgenfunction(function)
        if not is_generator:
            raise TypeError("a lifespan is an async def function with one yield")
        self._lifespans.append(function)
        return function

    def middleware(self, function: M) -> M:
        """Run the decorated function around each handler, which runs where it yields.

            @registry.middleware
            def traced(job: rota.Job | rota.AsyncJob) -> Iterator[None]:
                with tracer.start_as_current_span(job.job_type):
                    yield

        An exception of the handler is raised at the yield.  The middleware may raise another
        in its place; if it swallows it, the attempt still fails.  The first that was
        registered is the outermost.  It runs in the thread of a plain handler, and in the
        event loop for an ``async def`` one, which it must not block.
        """
        is_generator: bool = inspect.isgeneratorfunction(function)
        if not is_generator:
            raise TypeError("a middleware is a plain function with one yield")
        self._middlewares.append(contextmanager(function))
        return function

    def on_end(self, function: E) -> E:
        """Call the decorated function when the database has stored how an attempt ended.

            @registry.on_end
            def tell(job: rota.Job | rota.AsyncJob, end: rota.JobEnd) -> None:
                if end.outcome == "dead":
                    page(job.job_type, job.job_id, end.exception)

        Plain functions run in a thread, ``async def`` ones in the event loop, one call after
        the other.  The worker logs what they raise.  A killed worker calls none.
        """
        self.end_functions.append(function)
        return function

    @asynccontextmanager
    async def open_resources(self) -> AsyncIterator[dict[str, Any]]:
        """Run the functions of `lifespan`, and return what they yield as one mapping."""
        async with AsyncExitStack() as stack:
            resources: dict[str, Any] = {}
            for function in self._lifespans:
                opened = await stack.enter_async_context(_lifespan(function))
                resources |= opened or {}
            yield resources

    def add(self, job_type: str, function: Handler) -> None:
        """Register a function for a job type; a second one for the same type is an error."""
        check_name("job_type", job_type)
        _check_takes_a_job(job_type, function)
        _check_kind_of_job(job_type, function)
        _check_runs(job_type, function)
        if job_type in self._handlers:
            raise ValueError(f"there is already a handler for {job_type!r}")
        self._handlers[job_type] = function
        if is_async(function):
            self._async_types.add(job_type)

    def include(self, other: Registry) -> None:
        """Register the handlers that another registry has now, and what runs around them."""
        for job_type, function in other._handlers.items():
            self.add(job_type, function)
        for name in other._schedules:
            if name in self._schedules:
                raise ValueError(f"there is already a schedule {name!r}")
        self._schedules |= other._schedules
        self._lifespans += other._lifespans
        self._middlewares += other._middlewares
        self.end_functions += other.end_functions
        self.task_queues |= other.task_queues

    @property
    def job_types(self) -> list[str]:
        """The types that have a handler."""
        return sorted(self._handlers)

    def is_async(self, job_type: str) -> bool:
        """Whether the handler of a type, which has one, is an ``async def`` function."""
        return job_type in self._async_types

    def __getitem__(self, job_type: str) -> Handler:
        if not self._middlewares:
            return self._handlers[job_type]
        handler: Any = self._handlers[job_type]

        def run(job: Job) -> object:
            with self._around(job):
                return _raise_if_error(handler(job))

        async def run_async(job: AsyncJob) -> object:
            with self._around(job):
                return _raise_if_error(await handler(job))

        return run_async if self.is_async(job_type) else run

    @contextmanager
    def _around(self, job: BaseJob) -> Iterator[None]:
        failure: BaseException | None = None
        with ExitStack() as stack:
            for middleware in self._middlewares:
                try:
                    stack.enter_context(middleware(job))
                except RuntimeError as error:
                    if str(error) == "generator didn't yield":  # what contextlib says
                        name = getattr(middleware, "__qualname__", repr(middleware))
                        raise RuntimeError(f"the middleware {name} has not yielded") from None
                    raise
            try:
                yield
            except BaseException as error:
                failure = error
                raise
        if failure is not None:  # what a middleware has swallowed is no success
            raise failure


def is_async(function: object) -> bool:
    """Whether calling a handler, or a function of `Registry.on_end`, gives a coroutine."""
    call = getattr(function, "__call__", None)  # noqa: B004 - an object may have an async one
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _raise_if_error(result: object) -> object:
    if isinstance(result, Exception):
        raise result  # which is what it means, and middleware shall see it
    return result


@asynccontextmanager
async def _lifespan(function: Resources) -> AsyncIterator[Any]:
    """Run a function of `lifespan`; say of it, and not of the worker, what goes wrong."""
    is_open = False
    try:
        async with asynccontextmanager(function)() as opened:
            if not isinstance(opened, Mapping | None):
                raise TypeError(
                    f"it must yield a mapping, such as {{'http': http}}: {opened!r}"
                )
            is_open = True
            yield opened
            is_open = False
    except (Exception, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        is_told = isinstance(error, asyncio.CancelledError) and task and task.cancelling()
        if is_open or is_told:
            raise
        name = getattr(function, "__qualname__", repr(function))
        said = f"{type(error).__name__}: {error}"
        raise RuntimeError(f"the lifespan {name} failed: {said}") from error


def _check_takes_a_job(job_type: str, function: Handler) -> None:
    try:
        _signature(function).bind(None)
    except ValueError:
        pass  # written in C, without a signature
    except TypeError as error:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"the handler of {job_type!r} is called with the job alone, "
            f"which {name} does not take: {error}"
        ) from None


def _signature(function: Handler) -> inspect.Signature:
    """Return the signature; a type in it may be imported for type checkers only."""
    options: Any = {}
    if sys.version_info >= (3, 14):  # which evaluates types where they are read
        options = {"annotation_format": Format.STRING}
    return inspect.signature(function, **options)


def _check_kind_of_job(job_type: str, function: Handler) -> None:
    try:
        parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    except Exception:  # a type that is imported for type checkers only, say
        return
    for parameter in parameters[:1]:
        what = f"the handler of {job_type!r}"
        check_kind_of_job(what, parameter.annotation, is_async=is_async(function))


def _check_runs(job_type: str, function: Handler) -> None:
    for call in (function, getattr(function, "__call__", None)):  # noqa: B004
        if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
            raise TypeError(
                f"the handler of {job_type!r} is a generator, and calling it would run none of "
                "its code: return a value instead"
            )
