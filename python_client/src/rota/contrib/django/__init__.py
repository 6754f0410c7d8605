"""Django: a backend for its Tasks, and ``manage.py rota_worker``.

    INSTALLED_APPS = [..., "rota.contrib.django"]
    TASKS = {"default": {"BACKEND": "rota.contrib.django.backend.RotaBackend"}}

The backend is for ``django.tasks`` where Django has it, else for the package django-tasks.
"""

from __future__ import annotations

from collections.abc import Iterator

from django.db import close_old_connections

from ...job import AsyncJob, Job

__all__ = ["fresh_connections"]


def fresh_connections(job: Job | AsyncJob) -> Iterator[None]:
    """Close Django's connections in this thread that are broken or too old.

    As a middleware it does for a job what Django does for a request.
    """
    # An async handler has none: Django's are for threads.  A test needs its own.
    if isinstance(job, AsyncJob) or job.worker == "rota.testing":
        yield
        return
    close_old_connections()
    try:
        yield
    finally:
        close_old_connections()
