"""Metrics of a worker for Prometheus (extra ``prometheus``).

``rota worker --health`` uses it by itself; elsewhere call `instrument` once and export
prometheus_client's registry as you always do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..job import AsyncJob, Job, JobEnd
    from ..registry import Registry
    from ..worker.worker import Worker

BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

ENDS = Counter(
    "rota_jobs", "Attempts that have ended, by outcome", ["queue", "job_type", "outcome"]
)
SECONDS = Histogram(
    "rota_job_seconds", "Seconds that handlers ran", ["queue", "job_type"], buckets=BUCKETS
)
RUNNING = Gauge("rota_running_jobs", "Handlers that run, or whose end is being stored")
PLACES = Gauge("rota_places", "How many handlers may run at a time")
IS_READY = Gauge("rota_is_ready", "1 while the workers reach the database and ask for jobs")


async def count_end(job: Job | AsyncJob, end: JobEnd) -> None:
    """Count how an attempt ended."""
    ENDS.labels(job.queue, job.job_type, end.outcome).inc()
    if end.outcome != "released":
        SECONDS.labels(job.queue, job.job_type).observe(end.duration)


def instrument(registry: Registry, workers: Sequence[Worker] = ()) -> None:
    """Count the ends of a registry's jobs, and the running jobs of these workers."""
    if count_end not in registry.end_functions:
        registry.on_end(count_end)
    RUNNING.set_function(lambda: sum(worker.running for worker in workers))
    PLACES.set_function(lambda: sum(worker.concurrency for worker in workers))
    IS_READY.set_function(
        lambda: float(bool(workers) and all(worker.is_ready for worker in workers))
    )


def exposition() -> tuple[str, str]:
    """Return the content type and the text of all figures."""
    return CONTENT_TYPE_LATEST, generate_latest().decode()
