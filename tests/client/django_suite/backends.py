"""Rota's backend as each of the two that come with Django, for the cases about those."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from django.db import connections

from rota import Worker
from rota.contrib.django.backend import RotaBackend


class QueuedBackend(RotaBackend):
    """What is enqueued stays so: no worker runs."""

    @property
    def results(self) -> list[Any]:
        with connections[self.database].cursor() as cursor:
            cursor.execute("select id from rota.job_runs order by id")
            return [self.get_result(str(job_id)) for (job_id,) in cursor.fetchall()]

    def clear(self) -> None:
        with connections[self.database].cursor() as cursor:
            cursor.execute("delete from rota.jobs")
            cursor.execute("delete from rota.finished_jobs")


class RunBackend(RotaBackend):
    """A worker runs what is enqueued at once, in a single attempt."""

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self._job_options["max_attempts"] = 1

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        from rota.contrib.django.jobs import registry  # once Django is set up

        result = super().enqueue(task, args, kwargs)
        worker = Worker(os.environ["DATABASE_URL"], registry, poll_interval=0.05)
        thread = threading.Thread(target=worker.run, kwargs={"drain": True})
        thread.start()
        thread.join()
        return self.get_result(result.id)
