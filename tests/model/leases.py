"""What rota promises, as a plain program: leases, outcomes, failures.

The model is asked after the database has answered, and says what the answer and the tables
must be.  `Seen` is what the database shows; from it the model takes nothing but what it is
free to choose: the ids of new jobs, a delay within the jitter of its backoff, and which of two
leases that end together is swept first.

Beside this module stand keys (how jobs come in), operators, effects and the timetable.

Times and durations are whole microseconds.  A method named like a function of rota returns
the rows of its answer, or raises `Refused`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model.keys import Keys
from model.rows import ENDED, SECOND, Job, Queue, Ref, Refused, Rows, delays

MINUTE = 60 * SECOND


KEPT = (  # what a run that follows another has of it
    *("queue", "job_type", "max_attempts", "lease", "backoff", "lease_token"),
    *("idempotency_key", "ordering_key", "skip_dead", "limit_key"),
)


class Model(Keys):
    """The model with what workers do."""

    # At most one live lease per job.  A claim gives due jobs of open queues, by priority,
    # run_at and id, each with an attempt counted and a token that it never had.

    def claim_jobs(
        self, worker: str, queues: Sequence[str] = ("default",), max_jobs: int = 1,
        lease: int | None = None, job_types: Sequence[str] | None = None,
    ) -> Rows:  # fmt: skip
        due = [
            job
            for job in self.jobs.values()
            if job.status in ("queued", "failed") and job.run_at <= self.now
            and job.queue in queues and (job_types is None or job.job_type in job_types)
            and not self.pauses.keys() & {job.queue, None}
        ]  # fmt: skip
        due.sort(key=lambda job: (job.priority, job.run_at, job.id))
        chosen = self._choose(due, max_jobs)
        for job in chosen:
            job.status, job.locked_by, job.attempts = "running", worker, job.attempts + 1
            job.lease_token = max(job.lease_token + 1, self.now)
            job.started_at = self.now
            job.locked_until = self.now + (job.lease or lease or self._queue_lease(job))
            job.progress_percent = job.progress_message = None
        return [
            [
                j.id, j.lease_token, j.queue, j.job_type, j.payload, j.priority, j.attempts,
                j.max_attempts, j.run_at, j.locked_until, (j.locked_until or 0) - self.now,
                j.idempotency_key, j.created_at, j.definition, j.scheduled_for, j.pipeline,
                j.stage, j.stage_input,
            ]
            for j in chosen
        ]  # fmt: skip

    def _choose(self, due: list[Job], max_jobs: int) -> list[Job]:
        raise NotImplementedError

    def _queue_lease(self, job: Job) -> int:
        return (self.queues.get(job.queue) or Queue("")).lease or MINUTE

    # Whoever does not hold the lease is refused, whatever he says, and told why.

    def _held(self, job_id: int, lease_token: int) -> Job:
        job = self.jobs.get(job_id)
        if job is None:
            raise Refused("RT001")
        if job.lease_token != lease_token or job.status not in ("running", *ENDED):
            raise Refused("RT002")
        if job.status != "running":
            raise Refused("RT003")
        return job

    def holds(self, job_id: int, lease_token: int) -> bool:
        """Whether a lease is live."""
        job = self.jobs.get(job_id)
        return job is not None and (job.status, job.lease_token) == ("running", lease_token)

    def _owned(self, refs: Sequence[Ref]) -> list[tuple[Ref, Job | None]]:
        """Of several leases of a job only the live one counts."""
        return [(ref, self.jobs[ref[0]] if self.holds(*ref) else None) for ref in refs]

    # Exactly one accepted outcome, and one run more if somebody asked for it meanwhile.

    def finish_job(
        self, job_id: int, lease_token: int, result: Any = None, next_stage: str | None = None
    ) -> Rows:
        self._check_next((job_id, lease_token), next_stage)
        if self._has_succeeded((job_id, lease_token)):
            return [["already_finished"]]
        self._end(self._held(job_id, lease_token), "succeeded", result, next_stage)
        return [["finished"]]

    def finish_jobs(
        self, refs: Sequence[Ref], results: Any = None, next_stages: Any = None
    ) -> Rows:
        wanted = next_stages or [None] * len(refs)
        for ref, next_stage in zip(refs, wanted, strict=True):
            self._check_next(ref, next_stage)
        held, rows = self._owned(refs), []
        for n, (ref, job) in enumerate(held):
            if job and job.status == "running":
                self._end(job, "succeeded", results and results[n], wanted[n])
            was_before = "already_finished" if self._has_succeeded(ref) else "lost"
            rows.append([ref[0], "finished" if job else was_before])
        return rows

    def finish_and_claim(
        self, worker: str, refs: Sequence[Ref], kept: Sequence[Ref], **claim: Any
    ) -> Rows:
        finished = zip(refs, self.finish_jobs(refs), strict=True)
        rows = [["lost", *ref] for ref, (_, outcome) in finished if outcome == "lost"]
        for ref, row in zip(kept, self.heartbeat_jobs(kept, claim.get("lease")), strict=True):
            if row[2] or row[3]:
                rows.append(["lost" if row[2] else "cancel_requested", *ref])
        return rows + [["claimed", *row[:2]] for row in self.claim_jobs(worker, **claim)]

    def _has_succeeded(self, ref: Ref) -> bool:
        job, stage = self.jobs.get(ref[0]), self.stage_runs.get(ref)
        if stage is not None and stage[2] == "succeeded":
            return True
        return job is not None and (job.status, job.lease_token) == ("succeeded", ref[1])

    def _check_next(self, ref: Ref, next_stage: str | None) -> None:
        raise NotImplementedError

    def _leave_stage(
        self, job: Job, status: str, result: Any, next_stage: str | None
    ) -> str | None:
        raise NotImplementedError

    def _end(
        self, job: Job, status: str, result: Any = None, next_stage: str | None = None
    ) -> None:
        if job.pipeline:
            its_end = self._leave_stage(job, status, result, next_stage)
            if its_end is None:
                return
            status, result = its_end, result if its_end == "succeeded" else None
        job.status, job.finished_at, job.locked_until = status, self.now, None
        job.result, rerun, job.rerun = result, job.rerun, None
        if rerun:
            kept = {name: getattr(job, name) for name in KEPT}
            self._put(
                **kept, payload=rerun[0], run_at=rerun[1], priority=rerun[2], is_new=False
            )
        self._leave_line(job)
        self._tell_children(job)

    # A failed attempt is tried again after its delay, until there is none left; a job whose
    # cancel was requested, a fatal failure and the last attempt end it.

    def fail_job(
        self, job_id: int, lease_token: int, error: str, error_type: str | None = None,
        retry_in: int | None = None, fatal: bool = False,
    ) -> Rows:  # fmt: skip
        job = self.jobs.get(job_id)
        if job is None or not self._was_told(job, lease_token, error):
            job = self._held(job_id, lease_token)
            self._fail(job, error, error_type, retry_in, fatal)
        return [[job.status, job.run_at if job.status == "failed" else None]]

    def _was_told(self, job: Job, lease_token: int, error: str) -> bool:
        """Whether this very report was taken before, and its answer may have been lost."""
        if job.lease_token != lease_token or job.status not in ("failed", "dead", "cancelled"):
            return False
        if self._has_succeeded((job.id, lease_token)):
            return False
        was_asked = job.status == "cancelled" and job.cancel_requested_at is not None
        return was_asked or self.errors.get((job.id, lease_token), [None])[-1] == error

    def _fail(
        self, job: Job, error: str, error_type: str | None, retry_in: Any, fatal: bool
    ) -> None:
        if job.cancel_requested_at is not None:
            return self._end(job, "cancelled")
        self.errors[job.id, job.lease_token] = [
            job.attempts, job.locked_by, job.started_at, self.now, error_type, error,
        ]  # fmt: skip
        # Where a lease ended, and not twice in a row, the next try comes soon.
        is_soon = error_type == "lease_expired" and job.error_type != error_type
        job.last_error, job.error_type, job.failed_at = error, error_type, self.now
        if fatal or job.attempts >= job.max_attempts:
            return self._end(job, "dead")
        if retry_in is not None:
            job.run_at = self.now + retry_in
        else:
            its = self.queues.get(job.queue) or Queue(job.queue)
            low, high = delays(job.backoff or its.backoff, job.attempts)
            if is_soon:
                rule = {
                    **(job.backoff or its.backoff or {}),
                    "kind": "fixed",
                    "base_seconds": 1,
                }
                low, high = map(min, zip((low, high), delays(rule, 1), strict=True))
            shown = self.seen.get(job.id, "run_at") or self.now
            job.run_at = min(max(shown, self.now + low), self.now + high)
        self._wait(job, "failed")
        return None

    def _wait(self, job: Job, status: str) -> None:
        job.status, job.locked_by, job.locked_until = status, None, None
        if job.rerun:  # the next try is also the run that somebody asked for
            job.payload, when, job.priority, _ = job.rerun
            job.run_at = max(job.run_at, when)
            job.rerun, job.attempts = None, 0

    # Each ending of a batch is answered by itself.

    def end_jobs(self, refs: Sequence[Ref], kinds: Sequence[dict[str, Any]]) -> Rows:
        answers: dict[Ref, list[Any]] = {}
        asked = dict(zip(refs, kinds, strict=True))
        for ref, kind in asked.items():
            if kind["outcome"] == "succeeded":
                result = [kind["result"]] if "result" in kind else None
                ((_, answer),) = self.finish_jobs([ref], result)
                answers[ref] = [answer, None]
        for ref in sorted(asked, key=lambda ref: (self._rank(ref, asked[ref]), ref)):
            if ref not in answers:
                answers[ref] = self._end_otherwise(ref, asked[ref])
        return [[*ref, *answers[ref]] for ref in refs]

    def _rank(self, ref: Ref, kind: dict[str, Any]) -> int:
        """The order in which the ends of a batch come, and so the jobs that they lead to."""
        if not self.holds(*ref):
            return 0
        job, is_failed = self.jobs[ref[0]], kind["outcome"] == "failed"
        if job.cancel_requested_at is not None:
            return 3 if is_failed else 4
        is_last = kind.get("fatal") or job.attempts >= job.max_attempts
        return (2 if is_last else 1) if is_failed else 5

    def _end_otherwise(self, ref: Ref, kind: dict[str, Any]) -> list[Any]:
        outcome = kind["outcome"]
        if (outcome == "failed" and "error" not in kind) or kind.get("delay", 0) < 0:
            return ["refused", None]
        try:
            if outcome == "failed":
                retry_in = kind["retry_in"] * 1_000_000 if "retry_in" in kind else None
                ((status, run_at),) = self.fail_job(
                    *ref, kind["error"], None, retry_in, kind.get("fatal", False)
                )
                return [status, run_at]
            job = self._held(*ref)
        except Refused:
            return ["lost", None]
        delay = kind["delay"] * 1_000_000 if outcome == "snoozed" else None
        self._give_back(job, job.run_at if delay is None else self.now + delay)
        return [outcome, job.run_at] if job.is_live else ["cancelled", None]

    # What is given back has used no attempt.

    def snooze_job(self, job_id: int, lease_token: int, delay: int) -> Rows:
        job = self._held(job_id, lease_token)
        self._give_back(job, self.now + delay)
        return [[job.run_at if job.is_live else None]]

    def release_jobs(self, refs: Sequence[Ref]) -> Rows:
        held = self._owned(refs)
        for _, job in held:
            if job and job.status == "running":
                self._give_back(job, job.run_at)
        return [[ref[0], job is not None] for ref, job in held]

    def _give_back(self, job: Job, run_at: int) -> None:
        if job.cancel_requested_at is not None:
            return self._end(job, "cancelled")
        job.run_at, job.attempts = run_at, job.attempts - 1
        return self._wait(job, "queued")

    # A lease lasts until it is over and somebody has looked; until then it can be kept.

    def heartbeat(self, job_id: int, lease_token: int, lease: int | None = None) -> Rows:
        job = self._held(job_id, lease_token)
        job.locked_until = self.now + (lease or job.lease or self._queue_lease(job))
        return [[job.locked_until, job.cancel_requested_at is not None]]

    def heartbeat_jobs(self, refs: Sequence[Ref], lease: int | None = None) -> Rows:
        return [
            [ref[0], *self.heartbeat(*ref, lease)[0][:1], False, bool(job.cancel_requested_at)]
            if job
            else [ref[0], None, True, False]
            for ref, job in self._owned(refs)
        ]

    def set_progress(
        self, job_id: int, lease_token: int, percent: int, message: str | None = None
    ) -> Rows:
        job = self._held(job_id, lease_token)
        job.progress_percent, job.progress_message = percent, message
        return [[None]]

    def sweep_stale_leases(self, max_jobs: int = 1000) -> Rows:
        stale = [j for j in self.jobs.values() if j.locked_until and j.locked_until < self.now]
        stale.sort(key=lambda j: (j.locked_until, self._still_runs(j), j.id))
        for job in stale[:max_jobs]:
            error = f"lease expired: worker '{job.locked_by}'"
            self._fail(job, error, "lease_expired", None, False)
        return [[min(len(stale), max_jobs)]]

    def _still_runs(self, job: Job) -> bool:
        shown = [self.seen.get(job.id, name) for name in ("status", "lease_token")]
        return shown == ["running", job.lease_token]
