"""What rota promises to operators: anything may be done to a job and a queue, at any time.

But nobody is in two minds with a worker: of a running job the lease is taken away, or the
worker is asked to stop, or the operator is refused.
"""

from __future__ import annotations

from typing import Any

from model.limits import Limits
from model.rows import Job, Queue, Refused, Rows


class Operated(Limits):
    """The model with what operators do to jobs and queues."""

    def _live(self, job_id: int) -> Job:
        job = self.jobs.get(job_id)
        if job is None or not job.is_live:
            raise Refused("RT001" if job is None else "RT003")
        return job

    def retry_job(self, job_id: int, force: bool = False) -> Rows:
        job = self.jobs.get(job_id)
        if job is None:
            raise Refused("RT001")
        if job.status == "running" and not force:
            raise Refused("RT008")
        if not job.is_live:
            self._check_free(job)
            job.attempts, job.run_at, job.started_at = 0, self.now, None
            job.progress_percent = job.progress_message = None
            job.finished_at = job.result = None
            self._come_back(job)
            if job.pipeline:  # it comes to its stage once more
                job.lease_token, job.stage_queued_at = job.lease_token + 1, self.now
        job.lease_token += job.status == "running"
        job.attempts = min(job.attempts, job.max_attempts - 1)
        run_at = min(job.run_at, self.now)
        job.cancel_requested_at = job.cancel_reason = None
        self._wait(job, "blocked" if job.status == "blocked" else "queued")
        job.run_at = run_at
        return [[job.status]]

    def _check_free(self, job: Job) -> None:
        """Refuse to bring back a job whose key has another."""
        if self._find(job.idempotency_key, job.pipeline, job.job_type):
            raise Refused("RT007")

    def _come_back(self, job: Job) -> None:
        """Wait again for those that have not succeeded, and for the others of the key."""
        self.if_parent_dead[job.id] = "wait" if self.parents.get(job.id) else "cancel"
        job.status = "blocked"
        if job.ordering_key and self.halted.get(job.ordering_key, [0])[0] == job.id:
            del self.halted[job.ordering_key]
            self._open_head(job.ordering_key)
        else:
            self._come_in(job)

    def cancel_job(self, job_id: int, reason: str | None = None) -> Rows:
        job = self.jobs.get(job_id)
        if job and job.status == "cancelled":
            return [["cancelled"]]
        job = self._live(job_id)
        job.cancel_reason, job.rerun = reason or job.cancel_reason, None
        if job.status == "running":
            job.cancel_requested_at = job.cancel_requested_at or self.now
        else:
            self._end(job, "cancelled")
        return [[job.status]]

    def set_priority(self, job_id: int, priority: int) -> Rows:
        self._live(job_id).priority = priority
        return [[None]]

    def reschedule_job(self, job_id: int, run_at: Any = None, delay: Any = None) -> Rows:
        job = self._live(job_id)
        if job.status == "running":
            raise Refused("RT008")
        job.run_at = self.now + delay if run_at is None else run_at
        return [[job.run_at]]

    def set_queue(self, queue: str, reset: bool = False, **given: Any) -> Rows:
        its = self.queues.setdefault(queue, Queue(queue))
        for name in ("lease", "max_attempts", "backoff"):
            kept = None if reset else getattr(its, name)
            setattr(its, name, given[name] if given.get(name) is not None else kept)
        return [[None]]

    def pause_queue(self, queue: str, reason: str | None = None) -> Rows:
        self._check_known(queue)
        return self._pause(queue, reason)

    def resume_queue(self, queue: str) -> Rows:
        self._check_known(queue)
        self.pauses.pop(queue, None)
        return [[None]]

    def pause_all(self, reason: str | None = None) -> Rows:
        return self._pause(None, reason)

    def resume_all(self) -> Rows:
        self.pauses.pop(None, None)
        return [[None]]

    def _pause(self, queue: str | None, reason: str | None) -> Rows:
        since, old_reason = self.pauses.get(queue, [self.now, None])
        self.pauses[queue] = [since, reason or old_reason]
        return [[None]]

    def _check_known(self, queue: str) -> None:
        known = {*self.queues, *self.pauses, *(job.queue for job in self.jobs.values())}
        known |= {name.removeprefix("queue ") for name in self.limits}
        known |= {stage.queue for its in self.pipelines.values() for stage in its.values()}
        known |= {"default" for _ in self.schedules}
        if queue not in known:
            raise Refused("RT004")
