"""The backend: a Task of Django is a job of rota, enqueued over Django's own connection.

The commit of the surrounding transaction enqueues it.  All are jobs of one type, with the path
of the function in the payload: a worker need not know beforehand which Tasks there are, as
long as their modules belong to an installed app or are imported.
"""

from __future__ import annotations

import builtins
import json
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from datetime import datetime
from typing import Any

from django.apps import apps
from django.core import checks
from django.db import connections
from django.utils import timezone
from django.utils.module_loading import import_string

from ...client.sync_client import Client
from ...job import Job
from ...tasks import TaskOptions
from .tasks import (
    BaseTaskBackend,
    Task,
    TaskError,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_enqueued,
)

JOB_TYPE = "django_task"
OPTIONS = set(TaskOptions.__annotations__) - {"queue", "priority"}  # which a Task has itself
STATUSES = {
    "running": TaskResultStatus.RUNNING,
    "succeeded": TaskResultStatus.SUCCESSFUL,
    "dead": TaskResultStatus.FAILED,
    "cancelled": TaskResultStatus.FAILED,
}
"""Of the others, also one that waits for another attempt, Django says that it is ready."""
JOB = """
    select r.status, r.queue, r.priority, r.run_at, r.payload::text, r.result::text,
        r.created_at, r.started_at, r.finished_at, r.locked_by, r.attempts
    from rota.job_runs as r where r.id = %s and r.job_type = %s
    """
ERRORS = """
    select e.attempt, e.worker, e.started_at, e.error_type, e.stack from rota.job_errors as e
    where e.job_id = %s order by e.attempt, e.failed_at
    """

MAY_READ = """
    select has_table_privilege('rota.job_runs', 'select')
        and has_table_privilege('rota.job_errors', 'select')
    """
UNKNOWN_WORKER = "unknown"


class RotaBackend(BaseTaskBackend):  # type: ignore[misc]  # untyped in Django
    """Enqueues Tasks as jobs; OPTIONS may name a database, and defaults for ``enqueue()``.

    "OPTIONS": {"database": "default", "max_attempts": 3, "lease": timedelta(minutes=5)}

    A failed attempt is tried again by the backoff until its last, as for any job.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self._job_options = dict(self.options)
        self.database: str = self._job_options.pop("database", "default")

    def enqueue(self, task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskResult:
        """Add a job in the transaction of Django's connection."""
        self.validate_task(task)
        enqueued_at = timezone.now()
        result = self._result(task, "", args, kwargs, enqueued_at=enqueued_at)
        job = Client(connections[self.database]).enqueue(
            JOB_TYPE,
            {
                "task": task.module_path,
                "args": result.args,
                "kwargs": result.kwargs,
                "backend": self.alias,
                "enqueued_at": enqueued_at.isoformat(),
            },
            queue=task.queue_name,
            priority=-task.priority,  # of rota's, the lower runs first
            run_at=_aware(task.run_after),
            **self._job_options,
        )
        object.__setattr__(result, "id", str(job.job_id))
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> TaskResult:
        """Return what is known of a job; the role needs the rights of an observer."""
        if not re.fullmatch("[0-9]{1,18}", str(result_id)):
            raise TaskResultDoesNotExist(result_id)
        with connections[self.database].cursor() as cursor:
            cursor.execute(JOB, [result_id, JOB_TYPE])
            row = cursor.fetchone()
            if row is None:
                raise TaskResultDoesNotExist(result_id)
            job = dict(zip([column[0] for column in cursor.description], row, strict=True))
            cursor.execute(ERRORS, [result_id])
            errors = cursor.fetchall()
        result = self._of_job(
            result_id,
            job["queue"],
            job["priority"],
            json.loads(job["payload"]),
            status=STATUSES.get(job["status"], TaskResultStatus.READY),
            created_at=job["created_at"],
            started_at=errors[0][2] if errors else job["started_at"],
            last_attempted_at=job["started_at"],
            finished_at=job["finished_at"],
            errors=[stored_error(error_type, stack) for *_, error_type, stack in errors],
            worker_ids=[worker for _, worker, _, _, _ in errors],
        )
        if job["attempts"] > len(errors) and job["locked_by"] is not None:
            result.worker_ids.append(job["locked_by"])
        if job["result"] is not None:
            object.__setattr__(result, "_return_value", json.loads(job["result"]))
        return result

    def may_get_result(self) -> bool:
        """Whether the role has the rights of an observer."""
        with connections[self.database].cursor() as cursor:
            cursor.execute(MAY_READ)
            return bool(cursor.fetchone()[0])

    def started(self, job: Job) -> TaskResult:
        """Return what is known of a job when an attempt begins, without asking the database."""
        now = timezone.now()
        return self._of_job(
            str(job.job_id),
            job.queue,
            job.priority,
            job.payload,
            status=TaskResultStatus.RUNNING,
            created_at=job.created_at,
            started_at=now,
            last_attempted_at=now,
            # As many as there are attempts: from these a Task knows which one it is.
            worker_ids=[*[UNKNOWN_WORKER] * (job.attempt - 1), job.worker],
        )

    def check(self, **kwargs: Any) -> Iterable[checks.CheckMessage]:
        """Find what is wrong with the settings."""
        yield from super().check(**kwargs)
        if unknown := sorted(self._job_options.keys() - OPTIONS):
            known = ", ".join(sorted({"database", *OPTIONS}))
            yield checks.Error(
                f"TASKS[{self.alias!r}] has the unknown OPTIONS {', '.join(unknown)}.",
                hint=f"There are: {known}.",
                id="rota.E001",
            )
        if self.database not in connections:
            yield checks.Error(
                f"TASKS[{self.alias!r}] names the database {self.database!r}, which is not in "
                "DATABASES.",
                id="rota.E002",
            )
        elif connections[self.database].vendor != "postgresql":
            yield checks.Error(
                f"TASKS[{self.alias!r}] needs a database of PostgreSQL.", id="rota.E003"
            )

    def _of_job(
        self,
        result_id: str,
        queue: str,
        priority: int,
        payload: Any,
        created_at: datetime,
        **known: Any,
    ) -> TaskResult:
        # By the clock of the producer, so that each result of a Task has the same time.
        said = payload.get("enqueued_at")
        known["enqueued_at"] = datetime.fromisoformat(said) if said else created_at
        task = copy(_task(payload["task"]))
        # Not by using(), which refuses what an operator may have given the job since.
        told = {"priority": -priority, "queue_name": queue, "backend": self.alias}
        for name, value in told.items():
            object.__setattr__(task, name, value)
        return self._result(task, result_id, payload["args"], payload["kwargs"], **known)

    def _result(
        self,
        task: Task,
        result_id: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        **known: Any,
    ) -> TaskResult:
        empty = {"status": TaskResultStatus.READY, "started_at": None, "finished_at": None}
        empty |= {"last_attempted_at": None, "errors": [], "worker_ids": []}
        fields = {**empty, **known}
        return TaskResult(
            task=task, id=result_id, args=args, kwargs=kwargs, backend=self.alias, **fields
        )


def task_error(error: BaseException) -> TaskError:
    """Return an exception as Django stores it."""
    kind = type(error)
    path = f"{kind.__module__}.{kind.__qualname__}"
    stack = "".join(traceback.format_exception(error))
    return TaskError(exception_class_path=path, traceback=stack)


def stored_error(error_type: str | None, stack: str | None) -> TaskError:
    """Return what rota has stored of an exception as Django stores it."""
    path = error_type or "Exception"
    if "." not in path:  # built in, or no exception but what became of the worker
        path = f"builtins.{path}" if hasattr(builtins, path) else "rota.LeaseLostError"
    return TaskError(exception_class_path=path, traceback=stack or "")


def _task(path: str) -> Task:
    """Return a Task by the path in a payload, for which not every module is imported.

    A producer may write any path, and importing a module runs it.
    """
    module, _, _ = path.rpartition(".")
    if module not in sys.modules and apps.get_containing_app_config(module) is None:
        raise ImportError(f"{path} is not imported, and in no app of INSTALLED_APPS")
    task = import_string(path)
    if not isinstance(task, Task):
        raise TypeError(f"{path} is no Task")
    return task


def _aware(moment: datetime | None) -> datetime | None:
    return timezone.make_aware(moment) if moment and timezone.is_naive(moment) else moment
