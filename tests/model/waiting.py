"""What rota promises of jobs that wait for jobs.

The jobs of an ordering key go one at a time, in the order of their ids; a dead one stops its
key.  A job that comes after others is free when they have succeeded; of one that is dead or
was cancelled its own rule says what becomes of it.

Who is free is found by claims and ticks, which go by the notes that everybody else leaves.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from model.rows import Job, Limit, Queue, Refused, Rows, Schedule, Seen, Stage

CANCELLED = "a job that it waited for is dead or was cancelled"


class Waiting:
    """All that rota knows, at one moment of its clock, and who waits for whom."""

    def __init__(self, now: int) -> None:
        self.now = self.latest = self.limited_at = now
        self.seen = Seen([])
        self.jobs: dict[int, Job] = {}
        self.errors: dict[tuple[int, int], list[Any]] = {}
        self.queues: dict[str, Queue] = {}
        # Of a key and what it belongs to: job, unique_until, newest version.
        self.memory: dict[Any, list[Any]] = {}
        self.stuck: dict[str, list[Any]] = {}  # of an ordering key: its dead job, since when
        self.parents: dict[int, dict[int, bool]] = {}  # of a job: runs, and whether dead
        self.if_parent_dead: dict[int, str] = {}
        self.notes: list[list[Any]] = []  # when to look at what again, by whom made, if seen
        self.transaction = 0
        self.effects: dict[tuple[str, str], list[Any]] = {}
        self.limits: dict[str, Limit] = {}
        self.paid_until: dict[str, int] = {}  # what was started under a limit
        self.times_set: Counter[str] = Counter()  # the limit of a type
        self.strays: set[tuple[int, int, int]] = set()  # that a claim has seen
        self.parted: set[str] = set()  # types that have lost their limit
        self.pipelines: dict[str, dict[str, Stage]] = {}
        self.schedules: dict[str, Schedule] = {}
        self.fires: dict[tuple[str, int], list[Any]] = {}

    def _line_up(self, job: Job, after: list[int] | None, if_parent_dead: str) -> None:
        """Let a new job wait for what it has to."""
        if job.ordering_key:
            job.skip_dead = bool(job.skip_dead)
        job.status = "queued" if job.ordering_key is None and after is None else "blocked"
        if job.status == "queued":
            return
        self.if_parent_dead[job.id] = if_parent_dead
        waits = self.parents[job.id] = {}
        for parent in after or ():
            self._depend(job.id, self.jobs[parent])
        if job.ordering_key:
            self._note("order", job.ordering_key)
        if waits or job.ordering_key is None:
            self._note("job", job.id)

    def _note(self, kind: str, subject: Any) -> None:
        note = [self.now, kind, str(subject), self.transaction, False]
        if note not in self.notes:
            self.notes.append(note)

    def _depend(self, job_id: int, parent: Job) -> None:
        """Let a job wait for another, or for the run that this is a stage of."""
        status = self._status_of_run(parent)
        if status != "succeeded":
            self.parents.setdefault(job_id, {})[parent.run] = status != "live"

    def _status_of_run(self, job: Job) -> str:
        stages = [its for its in self.jobs.values() if its.run == job.run]
        if any(its.is_live for its in stages):
            return "live"
        return max(stages, key=lambda its: (its.finished_at or 0, its.id)).status

    def _wait_before(self, before: int, job: Job) -> None:
        """Let a blocked job wait for one more, if that does not wait for it."""
        waiting = self.jobs.get(before)
        if before == job.id:
            raise Refused("22023")
        if waiting is None or not waiting.is_live:
            raise Refused("RT003" if waiting else "RT001")
        if waiting.status != "blocked":
            raise Refused("RT013")
        self._depend(before, job)
        if self._waits_for(job.run, waiting.run):
            raise Refused("22023")

    def _waits_for(self, run: int, other: int) -> bool:
        """Whether a run comes after another, over parents and in the lines of ordering keys."""
        live = {job.run: job for job in self.jobs.values() if job.is_live}
        found, ahead = {run}, [run]
        while ahead:
            job = live.get(ahead.pop())
            runs = {*self.parents.get(job.id, ())} if job else set()
            if job and job.ordering_key:
                line = (its for its in live.values() if its.ordering_key == job.ordering_key)
                runs |= {its.run for its in line if its.run < job.run}
            ahead += runs - found
            found |= runs
        return other in found

    def _tell_children(self, job: Job) -> None:
        """A job has ended, and its run: those that wait for it are to be looked at."""
        for child, parents in self.parents.items():
            if job.run in parents:
                self._note("job", child)
                parents[job.run] = True
                if job.status == "succeeded":
                    del parents[job.run]

    def _look_again(self, most: int) -> None:
        """Take up to so many notes that are due, and those to which that leads."""
        while most > 0:
            mine = [self.transaction, True]
            due = [note for note in self.notes if note[0] <= self.now and note[3:] != mine]
            if not due:
                return
            due = sorted(due)[:most]
            most -= len(due)
            for note in due:
                self.notes.remove(note)
                if note[3] == self.transaction:
                    # What it has made itself is for others to look at when it is done.
                    self.notes.append([*note[:4], True])
            for kind, subject in sorted({(note[1], note[2]) for note in due}):
                if kind == "order":
                    self._look_at_key(subject)
                else:
                    self._look_at_job(int(subject))

    def _look_at_key(self, key: str) -> None:
        line = [job for job in self.jobs.values() if job.ordering_key == key and job.is_live]
        line.sort(key=lambda job: job.run)
        is_free = key not in self.stuck and {job.status for job in line} == {"blocked"}
        if is_free and not self.parents.get(line[0].id):
            line[0].status = "queued"

    def _look_at_job(self, job_id: int) -> None:
        job, parents = self.jobs[job_id], self.parents.get(job_id, {})
        if not job.is_live:
            parents.clear()
        if job.status != "blocked":
            return
        rule, dead = (
            self.if_parent_dead[job_id],
            [i for i, is_dead in parents.items() if is_dead],
        )
        if rule != "wait":
            for parent in dead:
                del parents[parent]
        if dead and rule == "cancel":
            job.cancel_reason = CANCELLED
            self._end(job, "cancelled")
            self._note("job", job_id)
        elif not parents and job.ordering_key:
            self._look_at_key(job.ordering_key)
        elif not parents:
            job.status = "queued"

    def _end(
        self, job: Job, status: str, result: Any = None, next_stage: str | None = None
    ) -> None:
        raise NotImplementedError

    def resume_key(self, ordering_key: str) -> Rows:
        if ordering_key not in self.stuck:
            raise Refused("RT012")
        self._note("order", ordering_key)
        return [self.stuck.pop(ordering_key)[:1]]
