"""What rota promises of jobs that wait for jobs.

The jobs of an ordering key go one at a time, in the order of their ids; a dead one stops its
key.  A job that depends on others is free when they have succeeded; of one that is dead or
was cancelled its own rule says what becomes of it.

Who makes a job free opens it.  Ticks find the others by the checks that were left for them, but
not by those of their own transaction.
"""

from __future__ import annotations

from typing import Any

from model.rows import Job, Limit, Queue, Refused, Rows, Schedule, Seen, Stage

ENDS = {"dead": "is dead", "cancelled": "was cancelled"}


class Waiting:
    """All that rota knows, at one moment of its clock, and who waits for whom."""

    def __init__(self, now: int) -> None:
        self.now = self.latest = now
        self.seen = Seen([])
        self.jobs: dict[int, Job] = {}
        self.errors: dict[tuple[int, int], list[Any]] = {}
        self.queues: dict[str, Queue] = {}
        self.pauses: dict[str | None, list[Any]] = {}  # of a queue, or of all: since when, why
        # Of a key and what it belongs to: job, unique_until, newest version.
        self.memory: dict[Any, list[Any]] = {}
        self.halted: dict[str, list[Any]] = {}  # of an ordering key: its dead job, since when
        self.parents: dict[int, set[int]] = {}  # of a job: those that have not succeeded
        self.if_parent_dead: dict[int, str] = {}
        self.checks: set[tuple[str, str, int]] = set()  # what to look at, and who left it
        self.coming: list[Job] | None = None
        self.transaction = 0
        self.effects: dict[tuple[str, str], list[Any]] = {}
        self.limits: dict[str, Limit] = {}
        self.limited: set[str] = set()  # all that there ever were
        self.unsettled: set[str] = set()  # changed since ticks were done with them
        self.starts: dict[str, list[int]] = {}  # under a limit, since its last change
        self.all_starts: dict[str, list[int]] = {}  # whatever has changed since
        self.fair: set[str] = set()  # queues where keys take turns
        self.late: list[Job] = []  # who had room when the last claim left him
        self.pipelines: dict[str, dict[str, Stage]] = {}
        self.stage_runs: dict[tuple[int, int], list[Any]] = {}  # of leases that ended a stage
        self.schedules: dict[str, Schedule] = {}
        self.occurrences: dict[tuple[str, int], list[Any]] = {}

    def _line_up(self, job: Job, depends_on: list[int] | None, if_parent_dead: str) -> None:
        """Let a new job wait for what it has to."""
        if job.ordering_key:
            job.skip_dead = bool(job.skip_dead)
        job.status = "queued" if job.ordering_key is None and depends_on is None else "blocked"
        if job.status == "queued":
            return
        self.if_parent_dead[job.id] = if_parent_dead
        self.parents[job.id] = {
            parent for parent in depends_on or () if self.jobs[parent].status != "succeeded"
        }
        if self.coming is None:
            self._come_in(job)
        else:  # when all of the batch are there
            self.coming.append(job)

    def _come_in(self, job: Job) -> None:
        if self.parents.get(job.id):
            self._check("job", job.id)
        if job.ordering_key is None:
            job.status = "blocked" if self.parents.get(job.id) else "queued"
            return
        line = self._line(job.ordering_key)
        is_free = job.ordering_key not in self.halted and line[0] is job
        if is_free and not self.parents.get(job.id) and {j.status for j in line} == {"blocked"}:
            job.status = "queued"
        else:
            self._check("order", job.ordering_key)

    def _check(self, kind: str, subject: Any) -> None:
        self.checks.add((kind, str(subject), self.transaction))

    def _line(self, key: str) -> list[Job]:
        line = [job for job in self.jobs.values() if job.ordering_key == key and job.is_live]
        return sorted(line, key=lambda job: job.id)

    def _wait_before(self, blocks: int, job: Job, is_new: bool) -> None:
        """Let a blocked job wait for one more, which waits for nothing."""
        is_ordered = job.ordering_key is not None and job.status != "succeeded"
        if not is_new and (is_ordered or job.status in ("blocked", "dead", "cancelled")):
            raise Refused("22023")
        waiting = self.jobs.get(blocks)
        if waiting is None or not waiting.is_live:
            raise Refused("RT003" if waiting else "RT001")
        if waiting.status != "blocked":
            raise Refused("RT013")
        if job.status != "succeeded":
            self.parents.setdefault(blocks, set()).add(job.id)
        if not is_new:
            self._check("job", blocks)

    def _tell_children(self, job: Job) -> None:
        """A job has ended: those that wait for it start, if it succeeded, or hear of it."""
        children = [child for child, parents in self.parents.items() if job.id in parents]
        if job.status == "succeeded":
            self._free(job.id, children)
        elif children:
            self._check("parent", job.id)

    def _free(self, parent: int, children: list[int]) -> None:
        for child in children:
            self.parents[child].discard(parent)
        for child in children:
            self._open(self.jobs[child])

    def _open(self, job: Job) -> None:
        """Start a job that waits for nothing any more, or for its turn only."""
        parents = self.parents.get(job.id)
        if job.status != "blocked":
            return
        if parents and not self.jobs[max(parents)].is_live:
            self._check("job", job.id)
        elif not parents and job.ordering_key:
            self._open_head(job.ordering_key)
        elif not parents:
            job.status = "queued"

    def _open_head(self, key: str) -> None:
        line = self._line(key)
        if key in self.halted or {job.status for job in line} != {"blocked"}:
            return
        parents = self.parents.get(line[0].id)
        if not parents:
            line[0].status = "queued"
        elif not self.jobs[max(parents)].is_live:
            self._check("job", line[0].id)

    def _leave_line(self, job: Job) -> None:
        if job.ordering_key and job.status == "dead" and not job.skip_dead:
            self.halted.setdefault(job.ordering_key, [job.id, self.now])
        elif job.ordering_key:
            self._open_head(job.ordering_key)

    def _do_checks(self) -> None:
        """Do the checks that other transactions have left."""
        due = {check for check in self.checks if check[2] != self.transaction}
        self.checks -= due
        for kind, subject in sorted({check[:2] for check in due}):
            if kind == "order":
                self._open_head(subject)
            elif kind == "job":
                self._check_job(self.jobs[int(subject)])
            else:
                self._check_parent(self.jobs[int(subject)])

    def _check_job(self, job: Job) -> None:
        if job.status != "blocked":
            return
        rule, parents = self.if_parent_dead[job.id], self.parents.get(job.id, set())
        ended = {parent for parent in parents if not self.jobs[parent].is_live}
        dead = {parent for parent in ended if self.jobs[parent].status != "succeeded"}
        if dead and rule == "cancel":
            self._cancel_children([job], self.jobs[min(dead)])
            return
        parents -= ended if rule == "run" else ended - dead
        if not parents:
            self._open(job)

    def _check_parent(self, parent: Job) -> None:
        if parent.is_live:
            return
        children = [self.jobs[i] for i in self.parents if parent.id in self.parents[i]]
        rules = {job.id: self.if_parent_dead[job.id] for job in children}
        self._cancel_children(
            [j for j in children if j.status == "blocked" and rules[j.id] == "cancel"],
            parent,
        )
        self._free(parent.id, [j.id for j in children if j.is_live and rules[j.id] == "run"])

    def _cancel_children(self, children: list[Job], parent: Job) -> None:
        """Cancel jobs because of a parent; all have ended before anything follows from it."""
        for job in children:
            job.cancel_reason = f"parent {parent.id} {ENDS[parent.status]}"
            job.status, job.finished_at = "cancelled", self.now
        for job in children:
            self._leave_line(job)
        for job in children:
            self._tell_children(job)

    def _end(
        self, job: Job, status: str, result: Any = None, next_stage: str | None = None
    ) -> None:
        raise NotImplementedError

    def resume_ordering_key(self, ordering_key: str) -> Rows:
        if ordering_key not in self.halted:
            raise Refused("RT012")
        halted = self.halted.pop(ordering_key)[:1]
        self._open_head(ordering_key)
        return [halted]
