"""Tasks of Django, for tests of the backend."""

from __future__ import annotations

from typing import Any

from django_tasks import TaskContext, task

from client import own_connections  # noqa: F401 - which has the settings

SEEN: list[Any] = []


@task()
def add(a: int, b: int = 0) -> int:
    SEEN.append(a)
    return a + b


@task()
async def add_in_loop(a: int, b: int = 0) -> int:
    return a + b


@task()
def fail(text: str) -> None:
    raise ValueError(text)


@task(takes_context=True)
def succeed_at(context: TaskContext, attempt: int) -> int:
    if context.attempt < attempt:
        raise KeyError("too early")
    return context.attempt


@task()
def return_no_json() -> object:
    SEEN.append("run")
    return object()
