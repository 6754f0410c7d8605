"""Which handler runs which type of job."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

from .client.values import check_name
from .job import AsyncJob, Job

Handler = Callable[[Job], object] | Callable[[AsyncJob], object]
H = TypeVar("H", bound=Handler)


class Registry:
    """The handlers of a worker, by job type.

        registry = Registry()

        @registry.handler("send_mail")
        def send_mail(job: rota.Job) -> None: ...

    A plain function runs in a thread and gets a `Job`, an ``async def`` function runs in the
    event loop and gets an `AsyncJob`.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._async_types: set[str] = set()

    def handler(self, job_type: str) -> Callable[[H], H]:
        """Register the decorated function for a job type."""
        if not isinstance(job_type, str):  # without a name the function would be lost silently
            raise TypeError('use @registry.handler("job_type")')

        def register(function: H) -> H:
            self.add(job_type, function)
            return function

        return register

    def add(self, job_type: str, function: Handler) -> None:
        """Register a function for a job type; a second one for the same type is an error."""
        check_name("job_type", job_type)
        _check_takes_a_job(job_type, function)
        _check_runs(job_type, function)
        if job_type in self._handlers:
            raise ValueError(f"there is a handler for {job_type!r} already")
        self._handlers[job_type] = function
        if is_async(function):
            self._async_types.add(job_type)

    def include(self, other: Registry) -> None:
        """Register all handlers of another registry."""
        for job_type, function in other._handlers.items():
            self.add(job_type, function)

    @property
    def job_types(self) -> list[str]:
        """The types that have a handler."""
        return sorted(self._handlers)

    def is_async(self, job_type: str) -> bool:
        """Whether the handler of a type, which has one, is an ``async def`` function."""
        return job_type in self._async_types

    def __getitem__(self, job_type: str) -> Handler:
        return self._handlers[job_type]

    def __len__(self) -> int:
        return len(self._handlers)


def is_async(handler: Handler) -> bool:
    """Whether calling a handler gives a coroutine."""
    call = getattr(handler, "__call__", None)  # noqa: B004 - an object may have an async one
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)


def _check_takes_a_job(job_type: str, function: Handler) -> None:
    try:
        inspect.signature(function).bind(None)
    except ValueError:
        pass  # written in C, without a signature
    except TypeError as error:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"the handler of {job_type!r} is called with the job alone, "
            f"which {name} does not take: {error}"
        ) from None


def _check_runs(job_type: str, function: Handler) -> None:
    for call in (function, getattr(function, "__call__", None)):  # noqa: B004
        if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
            raise TypeError(
                f"the handler of {job_type!r} is a generator, of which a call runs no line: "
                "return a value instead"
            )
