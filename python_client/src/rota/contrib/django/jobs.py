"""The handler that runs the Tasks of Django, in the registry of ``manage.py rota_worker``.

A registry of one's own can `include` it, and then runs both: tasks of Django and of rota.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import django
from django.apps import apps
from django.db import close_old_connections
from django.utils import timezone

from ...job import AsyncJob, Job, JobEnd
from ...registry import Registry
from . import fresh_connections
from .tasks import (
    TaskContext,
    TaskResult,
    TaskResultStatus,
    normalize_json,
    task_backends,
    task_finished,
    task_started,
)

if not apps.ready:  # `rota worker` has started, and not manage.py
    django.setup()

from .backend import JOB_TYPE, task_error

registry = Registry()
registry.middleware(fresh_connections)
_results: WeakKeyDictionary[Any, TaskResult] = WeakKeyDictionary()


@registry.handler(JOB_TYPE)
def run_task(job: Job) -> Any:
    """Run a Task of Django."""
    result = _results[job] = _started(job)
    task = result.task
    task_started.send(type(task.get_backend()), task_result=result)
    context = (TaskContext(task_result=result),) if task.takes_context else ()
    value = task.call(*context, *result.args, **result.kwargs)
    try:
        value = normalize_json(value)
    except (TypeError, ValueError):
        job.is_given_up = True  # another attempt would return the like
        raise
    object.__setattr__(result, "_return_value", value)
    return value


@registry.on_end
def tell_django(job: Job | AsyncJob, end: JobEnd) -> None:
    """Send the signal that a Task is finished, once the database knows."""
    result = _results.get(job)
    if result is None or end.outcome not in ("succeeded", "dead", "cancelled"):
        return
    is_success = end.outcome == "succeeded"
    status = TaskResultStatus.SUCCESSFUL if is_success else TaskResultStatus.FAILED
    object.__setattr__(result, "status", status)
    object.__setattr__(result, "finished_at", timezone.now())
    if end.exception is not None:
        result.errors.append(task_error(end.exception))
    try:
        _send_finished(result, end.exception)
    finally:
        close_old_connections()  # this thread is none of those that run handlers


def _send_finished(result: TaskResult, error: BaseException | None) -> None:
    """Send the signal as Django does: while an exception is handled, which it then logs."""
    sender = type(result.task.get_backend())
    if error is None:
        task_finished.send(sender, task_result=result)
        return
    stack = error.__traceback__
    try:
        raise error
    except BaseException:
        task_finished.send(sender, task_result=result)
    finally:
        error.__traceback__ = stack


def _started(job: Job) -> TaskResult:
    backend = task_backends[job.payload["backend"]]
    # What earlier attempts came to is in the database, which a worker's role need not read.
    if job.attempt > 1 and backend.may_get_result():
        return backend.get_result(str(job.job_id))
    return backend.started(job)
