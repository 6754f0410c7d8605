"""Django: a backend for its Tasks, and ``manage.py rota_worker``.

    INSTALLED_APPS = [..., "rota.contrib.django"]
    TASKS = {"default": {"BACKEND": "rota.contrib.django.backend.RotaBackend"}}

The backend is for ``django.tasks`` where Django has it, else for the package django-tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from asgiref.sync import SyncToAsync
from django.db import close_old_connections, connections

from ...job import AsyncJob, Job

__all__ = ["fresh_connections"]


def fresh_connections(job: Job | AsyncJob) -> Iterator[None]:
    """Close Django's connections in this thread that are broken or too old.

    As a middleware it does for a job what Django does for a request.  Of async handlers, whose
    calls of Django share one thread, it closes only the broken ones.
    """
    if job.worker == "rota.testing":  # a test needs its own
        yield
    elif isinstance(job, AsyncJob):
        try:
            yield
        finally:
            executor = SyncToAsync.single_thread_executor
            asyncio.get_running_loop().run_in_executor(executor, _close_broken)
    else:
        close_old_connections()
        try:
            yield
        finally:
            close_old_connections()


def _close_broken() -> None:
    """Close what has failed in the thread that async handlers share, and so its connections."""
    for connection in connections.all(initialized_only=True):
        if connection.errors_occurred:
            connection.close_if_unusable_or_obsolete()
