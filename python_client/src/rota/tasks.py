"""Tasks: functions whose typed parameters are the contract between producer and worker."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence, Set
from copy import copy
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta
from functools import partial
from math import inf
from string import Formatter
from types import SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from .client.adapters import AsyncCaller, Caller, is_async
from .client.async_client import AsyncClient
from .client.sync_client import Client
from .client.values import check_name, check_range
from .codec import Codec, decode, decode_object, hints_of, misread
from .exceptions import (
    InvalidArgumentError,
    JobCancelled,
    RetryIn,
    RotaError,
    Snooze,
    TimeLimitExceeded,
    only_of,
)
from .job import AsyncJob, BaseJob, Job
from .rows import EnqueuedJob
from .worker.own_process import check_can_be_found

if sys.version_info >= (3, 14):
    from annotationlib import Format, get_annotations

P = ParamSpec("P")
Call = ParamSpec("Call")
R = TypeVar("R")
Handler = Callable[[Job], object] | Callable[[AsyncJob], object]
Errors = tuple[type[Exception], ...]

_TEMPLATES = ("idempotency_key", "ordering_key", "limit_key")
_LEAST = {
    "delay": 0,
    "max_attempts": 1,
    "lease": 0.001,
    "unique_for": 0.001,
    "max_wait": 0,
    "time_limit": 0.001,
    "expires_after": 0.001,
}
"""The least that SQL takes, in seconds if it is a duration."""
_NEVER_GIVEN_UP = (RetryIn, Snooze, JobCancelled, RotaError, ChildProcessError)
"""What a task gives up on only if it lists that: no exception of its function.  The last is
what `run_in_process` raises where the process has died, as when memory is short."""


class TaskOptions(TypedDict, total=False):
    """The arguments of ``enqueue`` that a task can have as its defaults."""

    queue: str
    delay: timedelta | None
    priority: int
    max_attempts: int | None
    lease: timedelta | None
    backoff: Mapping[str, Any] | None
    idempotency_key: str | None
    unique_for: timedelta | None
    on_conflict: Literal["keep", "replace", "rerun"]
    max_wait: timedelta | None
    ordering_key: str | None
    skip_dead: bool
    limit_key: str | None
    if_parent_dead: Literal["cancel", "run", "wait"]
    time_limit: timedelta | None
    expires_after: timedelta | None
    headers: Mapping[str, str] | None


class CallOptions(TaskOptions, total=False):
    """The arguments of ``enqueue`` that one call can have."""

    run_at: datetime | None
    updated_at: datetime | None
    expires_at: datetime | None
    depends_on: Sequence[int] | None
    blocks: int | None


class Task(Generic[Call, P, R]):
    """A function that is enqueued with its own parameters; calling it just calls it.

    Options go through `options`, so that none can collide with a parameter of the function;
    beside ``**kwargs: P.kwargs`` type checkers allow no further keyword.
    """

    def __init__(
        self,
        function: Callable[Call, R],
        job_type: str,
        codec: Codec,
        retry_on: Errors | None,
        give_up_on: Errors,
        options: Mapping[str, Any],
        *,
        own_process: bool = False,
    ) -> None:
        if not inspect.isroutine(function):
            raise TypeError(
                f"a task is made from a function, got {function!r}; other names of a task are "
                "its aliases"
            )
        check_name("job_type", job_type)
        self.job_type = job_type
        self._function: Callable[..., R] = function
        self._codec = codec
        self._retry_on = retry_on
        self._give_up_on = give_up_on
        self._is_async = inspect.iscoroutinefunction(function)
        self._read_parameters()
        self._own_process = own_process
        if own_process and (self._is_async or self._job_name is not None):
            raise TypeError(
                f"{job_type}, of own_process, is a plain function without a job, which cannot "
                "go there: let an async one call job.run_in_process()"
            )
        if own_process:
            check_can_be_found(function)
        self._templates = {
            name: self._check_template(name, options[name])
            for name in _TEMPLATES
            if options.get(name) is not None
        }
        self._options = _check_options(TaskOptions, options)
        self._chosen: dict[str, Any] = {}
        # Without the attributes of the function, whose names are its own.
        functools.update_wrapper(self, function, updated=())

    def __call__(self, /, *args: Call.args, **kwargs: Call.kwargs) -> R:
        """Call the function, here and now."""
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<rota.Task {self.job_type!r}>"

    def options(self, **options: Unpack[CallOptions]) -> Task[Call, P, R]:
        """Return the task with these options instead of its own; None takes one away.

        Keys are taken as they are: braces in them mean nothing.
        """
        task = copy(self)
        task._chosen = {**self._chosen, **_check_options(CallOptions, options)}
        task._options = {**self._options, **task._chosen}
        task._templates = {
            name: text for name, text in self._templates.items() if name not in options
        }
        return task

    def job(self, /, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        """Return what `enqueue_many`, of the task or of the client, takes as one job."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            # A misspelt argument is the cause, and the missing one that bind() tells of is not.
            unknown = [name for name in kwargs if name not in self._signature.parameters]
            said = f"got an unexpected argument {unknown[0]!r}" if unknown else str(error)
            if unknown and unknown[0] in CallOptions.__optional_keys__:
                said += f"; as an option it goes into options({unknown[0]}=...)"
            raise TypeError(f"{self.job_type}{self._signature}: {said}") from None
        payload = {name: self._encode(name, item) for name, item in bound.arguments.items()}
        # What the worker could not read is refused here.  Keys are made of what it would read:
        # a value has one key, whether it is given as a UUID or as its text.
        arrived = self._decode(payload)
        self._check_arrives(bound.arguments, arrived)
        bound.arguments |= arrived
        bound.apply_defaults()
        # The order of a set is another one in each process.
        values = {
            name: self._codec.encode(value) if isinstance(value, Set) else value
            for name, value in bound.arguments.items()
        }
        keys = {name: self._key(name, values) for name in self._templates}
        options = {n: value for n, value in self._options.items() if value is not None}
        return {"job_type": self.job_type, "payload": payload, **options, **keys}

    @overload
    def enqueue(
        self, client: Client | Caller, /, *args: P.args, **kwargs: P.kwargs
    ) -> EnqueuedJob: ...

    @overload
    def enqueue(
        self, client: AsyncClient | AsyncCaller, /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, EnqueuedJob]: ...

    def enqueue(
        self,
        client: Client | Caller | AsyncClient | AsyncCaller,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> EnqueuedJob | Coroutine[Any, Any, EnqueuedJob]:
        """Add a job with these arguments in the transaction of a connection or session."""
        added: EnqueuedJob | Coroutine[Any, Any, EnqueuedJob]
        added = _client(client).enqueue(**self.job(*args, **kwargs))
        return added

    @overload
    def enqueue_many(
        self, client: Client | Caller, jobs: Iterable[Mapping[str, Any]]
    ) -> list[EnqueuedJob]: ...

    @overload
    def enqueue_many(
        self, client: AsyncClient | AsyncCaller, jobs: Iterable[Mapping[str, Any]]
    ) -> Coroutine[Any, Any, list[EnqueuedJob]]: ...

    def enqueue_many(
        self,
        client: Client | Caller | AsyncClient | AsyncCaller,
        jobs: Iterable[Mapping[str, Any]],
    ) -> list[EnqueuedJob] | Coroutine[Any, Any, list[EnqueuedJob]]:
        """Add many jobs in the caller's transaction, each made by `job`."""
        made = list(jobs)
        for job in made:
            if not isinstance(job, Mapping) or job.get("job_type") != self.job_type:
                raise TypeError(
                    f"enqueue_many() of {self.job_type} takes what its job(...) returns; use "
                    "enqueue_many() of the client for jobs of several tasks"
                )
            for name, value in self._chosen.items():
                if job.get(name) != value:
                    raise ValueError(
                        f"{name} of options() is {value!r}, and of a job {job.get(name)!r}: "
                        "job(...) of the task with these options has to make it"
                    )
        added: list[EnqueuedJob] | Coroutine[Any, Any, list[EnqueuedJob]]
        added = _client(client).enqueue_many(made)
        return added

    @property
    def handler(self) -> Handler:
        """The function as the handler of a worker, which gets the job alone."""

        def run(job: Job) -> object:
            args, kwargs = self._arguments(job)
            try:
                return self._result(self._function(*args, **kwargs))
            except Exception as error:
                job.is_given_up = self._gives_up(error)
                raise

        async def run_async(job: AsyncJob) -> object:
            args, kwargs = self._arguments(job)
            function: Callable[..., Any] = self._function
            if self._own_process:
                function = partial(job.run_in_process, function)
            try:
                return self._result(await function(*args, **kwargs))
            except Exception as error:
                job.is_given_up = self._gives_up(error)
                raise
            except asyncio.CancelledError:
                if job.is_overdue:  # what job.check() raises in a plain function
                    job.is_given_up = self._gives_up(TimeLimitExceeded())
                raise

        return run_async if self._is_async or self._own_process else run

    def _read_parameters(self) -> None:
        name = getattr(self._function, "__qualname__", repr(self._function))
        hints = _hints_of_parameters(self._function, name)
        self._function_signature = inspect.signature(self._function)
        parameters = list(self._function_signature.parameters.values())
        self._job_name: str | None = None
        if parameters and check_kind_of_job(
            name, hints.get(parameters[0].name), is_async=self._is_async
        ):
            self._job_name = parameters.pop(0).name
        self._decoders = {}
        for parameter in parameters:
            what = f"the parameter {parameter.name} of {name}"
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise TypeError(f"{what} has no fixed name: use a list or a mapping instead")
            if parameter.name not in hints and parameter.name in ("self", "cls"):
                raise TypeError(
                    f"{name} is a method, and a worker has no object for it: make a task of a "
                    "function"
                )
            if parameter.name not in hints:
                example = "rota.Job" if parameter.name == "job" else "int"
                raise TypeError(f"{what} needs a type, such as {parameter.name}: {example}")
            if _job_kinds(hints[parameter.name]):
                raise TypeError(f"{what} is the job: put it first")
            try:
                self._decoders[parameter.name] = self._codec.decoder(hints[parameter.name])
            except RecursionError:
                raise TypeError(f"{what} has a recursive type: use Any") from None
            except (TypeError, NameError) as error:
                raise TypeError(f"{what}: {error}") from None
        # A payload has names for all, also for those that the function takes by place only.
        by_place = [p for p in parameters if p.kind is p.POSITIONAL_ONLY]
        self._fillers = {p.name: p.default for p in by_place if p.default is not p.empty}
        self._signature = inspect.Signature(
            [
                p.replace(
                    annotation=hints[p.name],
                    kind=p.POSITIONAL_OR_KEYWORD if p in by_place else p.kind,
                )
                for p in parameters
            ]
        )
        self._required = {p.name for p in parameters if p.default is p.empty}

    def _check_template(self, option: str, text: str) -> str:
        try:
            fields = [field for _, field, _, _ in Formatter().parse(text)]
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{option} must be a text, which may name parameters in braces, got {text!r}: "
                f"{error}"
            ) from None
        for field in fields:
            root = (field or "").replace("[", ".").partition(".")[0]
            if field is not None and root not in self._decoders:
                raise ValueError(
                    f"{option} names {{{field}}}, which is no parameter of {self.job_type}"
                    f"{self._signature}; write a brace that is meant as one twice"
                )
        return text

    def _encode(self, name: str, value: Any) -> Any:
        try:
            found = self._codec.encode(value)
            if _has_asterisks(found) and _has_secret(value):
                raise TypeError(
                    "pydantic writes a secret as asterisks: pass the name by which the handler "
                    "finds it, or give the field a serializer"
                )
            return found
        except RecursionError:
            raise InvalidArgumentError(
                f"payload.{name} is nested too deeply, or in itself"
            ) from None
        except (TypeError, ValueError) as error:  # the latter of pydantic
            raise InvalidArgumentError(f"payload.{name}: {error}") from None

    def _check_arrives(self, sent: Mapping[str, Any], arrived: Mapping[str, Any]) -> None:
        """Raise InvalidArgumentError for what arrives as another value."""
        for name, value in sent.items():
            kind = self._signature.parameters[name].annotation
            if (found := misread(kind, value, arrived[name])) is not None:
                value, other = found
                was, becomes = type(value).__name__, type(other).__name__
                if isinstance(value, type(other)) and hasattr(value, "model_dump"):
                    cause = f": the model {becomes} does not read all that {was} writes"
                else:
                    cause = (
                        ", for nothing in JSON tells one from the other: put it into a "
                        f"dataclass with a field such as kind: Literal[{was!r}]"
                    )
                raise InvalidArgumentError(
                    f"payload.{name}: {value!r:.80} would arrive as {other!r:.80}{cause}"
                )

    def _key(self, option: str, values: Mapping[str, Any]) -> str:
        template = self._templates[option]
        try:
            return template.format_map(values)
        except Exception as error:  # a value may raise whatever it likes
            raise InvalidArgumentError(
                f"{option} {template!r} cannot be made: {type(error).__name__}: {error}"
            ) from error

    def _decode(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        decoder = partial(decode_object, dict, self._decoders, self._required)
        try:
            arguments: dict[str, Any] = decode("payload", decoder, payload)
        except ValueError as error:
            text = f"{error}; the task is {self.job_type}{self._signature}"
            raise InvalidArgumentError(text) from None
        return arguments

    def _arguments(self, job: BaseJob) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments = self._fillers | self._decode(job.payload)
        if self._job_name is not None:
            arguments[self._job_name] = job
        bound = inspect.BoundArguments(self._function_signature, arguments)
        return bound.args, bound.kwargs

    def _result(self, value: Any) -> Any:
        if isinstance(value, Exception):
            raise value  # which is what it means
        try:
            return self._codec.encode(value)
        except Exception:  # such as one of pydantic, or of a value that holds itself
            return value  # the worker says what becomes of it

    def _gives_up(self, raised: Exception) -> bool:
        error = only_of(raised)
        is_ours = isinstance(error, _NEVER_GIVEN_UP)
        # Who lists all exceptions means those of the function.
        if any(
            isinstance(error, kind) and not (is_ours and kind is Exception)
            for kind in self._give_up_on
        ):
            return True
        return not (self._retry_on is None or is_ours or isinstance(error, self._retry_on))


class AsyncFunctionNeedsAsyncJob:
    """What a type checker sees of an ``async def`` function with a `Job`."""


class PlainFunctionNeedsJob:
    """What a type checker sees of a plain function with an `AsyncJob`."""


class TaskDecorator(Protocol):
    """What ``registry.task(...)`` returns: it makes a task of a function and registers it."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[AsyncJob, P], Coroutine[Any, Any, R]]
    ) -> Task[Concatenate[AsyncJob, P], P, Coroutine[Any, Any, R]]: ...

    @overload
    def __call__(  # type: ignore[overload-overlap]  # the narrower one stands first
        self, function: Callable[Concatenate[Job, P], Coroutine[Any, Any, Any]]
    ) -> AsyncFunctionNeedsAsyncJob: ...

    @overload
    def __call__(  # what decorators often say that they return
        self, function: Callable[Concatenate[AsyncJob, P], Awaitable[R]]
    ) -> Task[Concatenate[AsyncJob, P], P, Awaitable[R]]: ...

    @overload
    def __call__(
        self, function: Callable[Concatenate[Job, P], R]
    ) -> Task[Concatenate[Job, P], P, R]: ...

    @overload
    def __call__(
        self, function: Callable[Concatenate[AsyncJob, P], Any]
    ) -> PlainFunctionNeedsJob: ...

    @overload
    def __call__(self, function: Callable[P, R]) -> Task[P, P, R]: ...


def _client(connection: Any) -> Any:
    if isinstance(connection, Client | AsyncClient):
        return connection
    return AsyncClient(connection) if is_async(connection) else Client(connection)


def _hints_of_parameters(function: Callable[..., object], name: str) -> dict[str, Any]:
    """Return the types of the parameters; that of the result need not be found."""
    if sys.version_info >= (3, 14):  # which evaluates types where they are read
        hints = get_annotations(function, format=Format.FORWARDREF)
    else:
        hints = dict(getattr(function, "__annotations__", {}))
    hints.pop("return", None)
    # Their names are looked up where the function is that others may have wrapped.
    found = SimpleNamespace(__annotations__=hints, __wrapped__=function)
    return hints_of(found, name)


def check_kind_of_job(what: str, annotation: Any, *, is_async: bool) -> bool:
    """Return whether a parameter is a job; raise TypeError if it is one of the other kind."""
    kinds = _job_kinds(annotation)
    wanted = AsyncJob if is_async else Job
    made = "an async function" if is_async else "a plain function, or its decorator is one"
    if kinds and not any(issubclass(wanted, kind) for kind in kinds):
        raise TypeError(
            f"{what} is {made}: let its job be of type rota.{wanted.__name__}, "
            f"not rota.{kinds[0].__name__}"
        )
    return bool(kinds)


def _job_kinds(kind: Any) -> list[type[BaseJob]]:
    """Return the classes of jobs among the types that a parameter can have."""
    is_union = get_origin(kind) in (Union, UnionType, Annotated)
    kinds = get_args(kind) if is_union else (kind,)
    return [k for k in kinds if isinstance(k, type) and issubclass(k, BaseJob)]


def _check_options(known: type, options: Mapping[str, Any]) -> dict[str, Any]:
    names = get_type_hints(known)
    for name in options:
        if name not in names:
            raise TypeError(
                f"{name!r} is not an option of a task: it can have {', '.join(names)}"
            )
    if isinstance(queue := options.get("queue"), str):
        check_name("queue", queue)
    for name, least in _LEAST.items():
        value = options.get(name)
        number = value.total_seconds() if isinstance(value, timedelta) else value
        if isinstance(number, int | float):  # of what else it is SQL tells
            check_range(name, number, least, inf)
    return dict(options)


def _has_asterisks(found: Any) -> bool:
    """Whether JSON has what pydantic writes for a SecretStr that is not empty."""
    if isinstance(found, dict):
        return any(map(_has_asterisks, found.values()))
    if isinstance(found, list):
        return any(map(_has_asterisks, found))
    return bool(found == "*" * 10)


def _has_secret(value: Any) -> bool:
    """Whether a value, which has a form in JSON, has a SecretStr or another secret in it."""
    if hasattr(value, "get_secret_value"):
        return True
    if hasattr(value, "model_dump"):
        items: Any = [value.model_dump()]
    elif is_dataclass(value):
        items = [getattr(value, field.name) for field in fields(value)]
    else:
        items = value.values() if isinstance(value, Mapping) else value
    is_plain = isinstance(items, str) or not isinstance(items, Iterable)
    return not is_plain and any(map(_has_secret, items))
