"""What rota promises of pipelines: a job passes through stages, and is in one at a time.

It enters the next at the moment it succeeds in this one, with the result; how it fared in each
stage stays on record.
"""

from __future__ import annotations

from typing import Any

from model.operators import Operated
from model.rows import Job, Queue, Ref, Refused, Rows, Stage

CLEARED = (  # what a job leaves behind in each stage
    *("locked_by", "locked_until", "started_at", "progress_percent", "progress_message"),
)


class Pipelines(Operated):
    """The model with its pipelines."""

    def define_pipeline(self, pipeline: str, stages: list[dict[str, Any]]) -> Rows:
        """Runs under way go on by the names of their stages, past those that are left out."""
        its = self.pipelines.setdefault(pipeline, {})
        names = [stage["stage"] for stage in stages]
        ways = {name: self._way(its, name, names) for name in its}
        for name, stage in its.items():
            stage.ordinal, stage.next_stage = None, ways[name]
        following = [*names[1:], None]
        for number, (given, then) in enumerate(zip(stages, following, strict=True), 1):
            row: dict[str, Any] = dict.fromkeys(Stage.__dataclass_fields__) | given
            row |= {"ordinal": number, "next_stage": then, "queue": row["queue"] or "default"}
            its[row["stage"]] = Stage(**row)
        return [[None]]

    def _way(self, its: dict[str, Stage], name: str, names: list[str]) -> str | None:
        passed: set[str] = set()
        way = its[name].next_stage
        while way is not None and way not in names and way not in passed:
            passed.add(way)
            way = its[way].next_stage
        return way if way in names else None

    def drop_pipeline(self, pipeline: str) -> Rows:
        self._stage(pipeline)
        for stage in self.pipelines[pipeline].values():
            stage.ordinal = None
        return [[None]]

    def _stage(self, pipeline: str, name: str | None = None) -> Stage:
        """A stage by its name, or the first."""
        for stage in self.pipelines.get(pipeline, {}).values():
            if stage.ordinal == 1 if name is None else stage.ordinal and stage.stage == name:
                return stage
        raise Refused("22023")

    def start_pipeline(self, pipeline: str, stage: str | None = None, **job: Any) -> Rows:
        its = self._stage(pipeline, stage)
        job |= self._given(its, job.get("priority", 0)) | {"pipeline": pipeline}
        return [self._enqueue(**job)[:1]]

    def _given(self, its: Stage, priority: int) -> dict[str, Any]:
        """What a stage says of its jobs."""
        return {
            "stage": its.stage, "job_type": its.job_type, "queue": its.queue,
            "priority": priority if its.priority is None else its.priority,
            "max_attempts": its.max_attempts, "lease": its.lease, "backoff": its.backoff,
        }  # fmt: skip

    def _check_next(self, ref: Ref, next_stage: str | None) -> None:
        if next_stage is None or not self.holds(*ref):
            return
        if self.jobs[ref[0]].pipeline is None:
            raise Refused("22023")
        its = self.pipelines.get(self.jobs[ref[0]].pipeline or "", {})
        is_dropped = not any(stage.ordinal for stage in its.values())
        if next_stage != "end" and not (is_dropped and next_stage in its):
            self._stage(self.jobs[ref[0]].pipeline or "", next_stage)

    def _leave_stage(
        self, job: Job, status: str, result: Any, next_stage: str | None
    ) -> str | None:
        """Write down what became of the stage; how the job ends, None if it goes on."""
        self.stage_runs[job.id, job.lease_token] = [
            job.pipeline, job.stage, status, job.queue, job.job_type, job.attempts,
            job.locked_by, job.stage_queued_at, job.started_at, self.now, job.stage_input,
            result,
        ]  # fmt: skip
        its = self.pipelines.get(job.pipeline or "", {})
        here = its.get(job.stage or "")
        then = its.get(next_stage or (here and here.next_stage) or "")
        if status == "succeeded" and then and job.cancel_requested_at is None:
            self._change_stage(job, then, result)
            vars(job).update(dict.fromkeys(CLEARED), status="queued", attempts=0)
            job.run_at = job.stage_queued_at = self.now
            job.lease_token += 1
            return None
        job.stage_queued_at = None
        return "cancelled" if status == "succeeded" and then else status

    def _change_stage(self, job: Job, then: Stage, stage_input: Any) -> None:
        vars(job).update(self._given(then, job.priority), stage_input=stage_input)
        its = self.queues.get(job.queue) or Queue(job.queue)
        job.max_attempts = then.max_attempts or its.max_attempts or 10
        job.last_error = job.error_type = job.failed_at = None

    def restart_pipeline(self, job_id: int, stage: str) -> Rows:
        job = self.jobs.get(job_id)
        if job is None:
            raise Refused("RT001")
        if job.pipeline is None:
            raise Refused("22023")
        self._stage(job.pipeline)
        if job.is_live:
            raise Refused("RT014")
        then = self._stage(job.pipeline, stage)
        self._check_free(job)
        self._change_stage(job, then, self._input_of(job, then))
        self.retry_job(job_id)
        return [[job_id]]

    def _input_of(self, job: Job, then: Stage) -> Any:
        """The latest result of a stage before it, or what it was given itself."""
        if job.stage == then.stage:
            return job.stage_input
        its = self.pipelines[job.pipeline or ""]
        found: dict[int, Any] = {}
        for (job_id, token), (_, stage, status, *_, given, result) in self.stage_runs.items():
            place = its[stage].ordinal
            if job_id == job.id and stage == then.stage:
                found[token] = given
            elif (job_id, status) == (job.id, "succeeded") and 0 < (place or 0) < (
                then.ordinal or 0
            ):
                found[token] = result
        return found[max(found)] if found else None
