"""What rota promises of pipelines: a run is in one stage at a time until it is over.

Each stage is a job.  The next one is there at the moment this one succeeds, and has its place,
its key and its result.
"""

from __future__ import annotations

from typing import Any

from model.operators import Operated
from model.rows import Job, Ref, Refused, Rows, Stage

KEPT = (  # what the job of the next stage has of the one before
    *("payload", "idempotency_key", "ordering_key", "skip_dead", "limit_key"),
    *("pipeline", "first_job_id"),
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
        if next_stage != "end":
            self._stage(self.jobs[ref[0]].pipeline or "", next_stage)

    def _go_on(self, job: Job, next_stage: str | None) -> bool:
        """Make the job of the next stage; whether there is one."""
        its = self.pipelines.get(job.pipeline or "", {})
        here = its.get(job.stage or "")
        then = its.get(next_stage or (here and here.next_stage) or "")
        if then is None:
            return False
        new = self._put_stage(job, then, job.result)
        if job.cancel_requested_at is not None:
            new.cancel_reason = job.cancel_reason
            self._end(new, "cancelled")
        return True

    def _put_stage(self, job: Job, then: Stage, stage_input: Any) -> Job:
        kept = {name: getattr(job, name) for name in KEPT}
        new = self._put(
            **kept, **self._given(then, job.priority), stage_input=stage_input, run_at=self.now
        )
        new.status = "queued"
        return new

    def rerun_from(self, job_id: int, stage: str) -> Rows:
        old = self.jobs.get(job_id)
        if old is None:
            raise Refused("RT001")
        if old.pipeline is None:
            raise Refused("22023")
        self._stage(old.pipeline)
        if self._status_of_run(old) == "live":
            raise Refused("RT014")
        then = self._stage(old.pipeline, stage)
        self._check_free(old)
        new = self._put_stage(old, then, self._input_of(old, then))
        if old.ordering_key and not self._takes_place(old):
            new.status = "blocked"
            self._come_in(new)
        return [[new.id]]

    def _takes_place(self, old: Job) -> bool:
        """Whether the run has a dead job that holds up its ordering key, and goes on there."""
        dead = self.jobs.get(self.stuck.get(old.ordering_key or "", [0])[0])
        if dead is None or dead.run != old.run:
            return False
        del self.stuck[old.ordering_key or ""]
        return True

    def _input_of(self, old: Job, then: Stage) -> Any:
        """The latest result of a stage before it, or what it was given itself."""
        its = self.pipelines[old.pipeline or ""]
        found: list[tuple[int, int, Any]] = []
        for job_id, job in self.jobs.items():
            place = its[job.stage or ""].ordinal if job.run == old.run else None
            if job.run == old.run and job.stage == then.stage:
                found.append((job.created_at, job_id, job.stage_input))
            elif job.status == "succeeded" and place and place < (then.ordinal or 0):
                found.append((job.finished_at or 0, job_id, job.result))
        return max(found, key=lambda it: it[:2])[2] if found else None
