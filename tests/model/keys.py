"""What rota promises of idempotency keys.

A key of a job type has at most one live job, and a new job never takes the id of another.
"""

from __future__ import annotations

from typing import Any

from model.rows import Job, Queue, Refused, Rows
from model.waits import Waiting


class Keys(Waiting):
    """The model with how jobs come in."""

    def enqueue(self, **job: Any) -> Rows:
        return [self._enqueue(**job)[:1]]

    def enqueue_many(self, jobs: list[dict[str, Any]]) -> Rows:
        coming: list[Job] = []
        self.coming = coming
        try:
            rows = [[n, *self._enqueue(**job)] for n, job in enumerate(jobs, 1)]
        finally:
            self.coming = None
        for job in sorted(coming, key=lambda job: job.id):
            self._come_in(job)
        return rows

    def _enqueue(self, blocks: int | None = None, **job: Any) -> list[Any]:
        """Return the id of the job, and whether it is a new one."""
        waits = job.get("depends_on") is not None or job.get("ordering_key") is not None
        if blocks is not None and waits:
            raise Refused("22023")
        its, is_new = self._take_in(**job)
        if blocks is not None:
            self._wait_before(blocks, its, is_new)
        return [its.id, is_new]

    def _take_in(
        self, job_type: str, unique_for: int | None = None, on_conflict: str = "keep",
        updated_at: int | None = None, max_wait: int | None = None,
        depends_on: list[int] | None = None, if_parent_dead: str = "cancel", **job: Any,
    ) -> tuple[Job, bool]:  # fmt: skip
        key: Any = job.get("idempotency_key")
        scope = (job.get("pipeline"), None if job.get("pipeline") else job_type)
        live, has_memory = self._find(key, *scope), bool(unique_for or updated_at)
        known, until, version = self.memory.get((key, *scope), [None, None, None])
        if (
            until
            and self.now < until <= self.latest
            and self.seen.has_new(self.jobs, key, *scope)
        ):
            until = None  # It was over, and is forgotten, though the clock was set back.
        if not self._may_be_new(unique_for, until, updated_at, version):
            return live or self.jobs[known], False
        delay, run_at = job.pop("delay", None), job.pop("run_at", None)
        when = self.now + (delay or 0) if run_at is None else run_at
        if max_wait is not None:
            when = min(when, self.now + max_wait)
        its = live or self._put(
            depends_on, if_parent_dead, **job, job_type=job_type, run_at=when
        )
        if live and on_conflict != "keep":
            has_time = delay is not None or run_at is not None
            self._renew(live, on_conflict, when, has_time, max_wait, job)
        if has_memory:
            until = self.now + unique_for if unique_for else until
            self.memory[key, *scope] = [its.id, until, updated_at or version]
        return its, live is None

    def _may_be_new(self, unique_for: Any, until: Any, updated_at: Any, version: Any) -> bool:
        """Tell whether a key is not unique for a time, and has not seen this version."""
        is_free = unique_for is None or until is None or until <= self.now
        return is_free and (updated_at is None or version is None or version < updated_at)

    def _renew(
        self,
        live: Job,
        rule: str,
        when: int,
        has_time: bool,
        max_wait: int | None,
        job: Any,
    ) -> None:
        """A waiting job takes what is new; after a running one it runs, if rerun is said."""
        payload, priority = job.get("payload", {}), job.get("priority", 0)
        if live.status == "running":
            if rule == "rerun":
                first = live.rerun[3] if live.rerun else self.now
                when = when if max_wait is None else min(when, first + max_wait)
                live.rerun = [payload, when, priority, first]
            return
        if live.status != "failed" or has_time or rule == "replace":
            since = max(live.created_at, live.started_at or 0, live.failed_at or 0)
            live.run_at = when if max_wait is None else min(when, since + max_wait)
        live.payload, live.priority, live.attempts = payload, priority, 0

    def _put(
        self, depends_on: list[int] | None = None, if_parent_dead: str = "cancel",
        is_new: bool = True, **given: Any,
    ) -> Job:  # fmt: skip
        queue = given.get("queue", "default")
        its = self.queues.get(queue) or Queue(queue)
        values: dict[str, Any] = dict.fromkeys(Job.__dataclass_fields__) | {
            "queue": queue, "payload": {}, "priority": 0, "attempts": 0, "lease_token": 0,
            "created_at": self.now, **given,
        }  # fmt: skip
        job = Job(**values)
        job.max_attempts = job.max_attempts or its.max_attempts or 10
        job.id = self.seen.new_id(self.jobs, job)
        if job.pipeline:
            job.stage_queued_at = self.now
        self.jobs[job.id] = job
        self.if_parent_dead[job.id] = if_parent_dead
        if is_new:
            self._line_up(job, depends_on, if_parent_dead)
        else:
            job.status = "blocked" if job.ordering_key else "queued"
        return job

    def _find(self, key: str | None, pipeline: str | None, job_type: str | None) -> Job | None:
        """Return the live job of a key, which belongs to the pipeline or else to the type."""
        live = (job for job in self.jobs.values() if job.is_live and job.idempotency_key == key)
        its = (
            j for j in live if j.pipeline == pipeline and (pipeline or j.job_type == job_type)
        )
        return next(its, None) if key else None
