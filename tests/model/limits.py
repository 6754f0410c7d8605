"""What rota promises of limits: of whom they are for no more run, or start, than they say.

Which of several lines gets the room is a matter of turns, and of those who may start the model
takes whoever did.  But nobody starts without room, nor before another of the same line, and as
long as somebody may start a claim that wants more gives him.

The rate of a limit is one time: when the starts so far are paid for.
"""

from __future__ import annotations

from typing import Any

from model.model import Model
from model.rows import Divergence, Job, Limit, Rows

NAMES = {"queue": "queue", "job_type": "type", "limit_key": "key"}


class Limits(Model):
    """The model with its limits."""

    def set_limit(self, is_reset: bool = False, **given: Any) -> Rows:
        (whose,) = NAMES.keys() & given.keys()
        name = f"{NAMES[whose]} {given[whose]}"
        known = Limit(name) if is_reset else self.limits.get(name) or Limit(name)
        for field in ("max_running", "max_starts", "per", "burst", "weight"):
            if given.get(field) is not None:
                setattr(known, field, given[field])
        self.limits[name] = known
        self.limited_at = max(self.limited_at, self.now)
        self.times_set[given.get("job_type", "")] += 1
        if known.max_running is known.max_starts is known.weight is None:
            del self.limits[name]
        return [[None]]

    def _limits_of(self, job: Job) -> dict[str, Limit]:
        """The limits that a job counts for, each with the name that it is counted under."""
        found = {f"queue {job.queue}": f"queue {job.queue}"}
        found[f"type {job.job_type}"] = f"type {job.job_type}"
        if key := job.limit_key:
            its_class = f"key {key.split(':')[0]}:*" if ":" in key else ""
            found[f"key {key}"] = f"key {key}" if f"key {key}" in self.limits else its_class
        return {name: self.limits[its] for name, its in found.items() if its in self.limits}

    def _has_room(self, job: Job) -> bool:
        # What runs when a limit is set counts as soon as somebody looks, which is by the clock.
        is_counted = self.now >= self.limited_at
        for name, limit in self._limits_of(job).items():
            if (
                is_counted
                and limit.max_running is not None
                and limit.max_running
                <= sum(
                    its.status == "running" and name in self._limits_of(its)
                    for its in self.jobs.values()
                )
            ):
                return False
            if limit.max_starts is not None:
                paid = max(self.now, self._paid_until(name, limit))
                if paid - (limit.most - 1) * limit.gap > self.now:
                    return False
        return True

    def _paid_until(self, name: str, limit: Limit) -> int:
        """No start is paid for later than a burst from now, so that a clock may go back."""
        paid = self.paid_until.get(name, 0)
        if paid > self.now + limit.most * limit.gap:
            return self.now + (limit.most - 1) * limit.gap
        return paid

    def _use(self, job: Job) -> None:
        for name, limit in self._limits_of(job).items():
            if limit.max_starts is not None:
                paid = max(self.now, self._paid_until(name, limit))
                self.paid_until[name] = paid + limit.gap

    def _has_strays(self, passed: list[Job]) -> bool:
        """Whether a claim may have found one in a line without the limit of its type.

        It puts such a job into the right line instead of starting it, or another; but once.
        """
        strays = {
            (job.id, job.lease_token, self.times_set[job.job_type])
            for job in passed if f"type {job.job_type}" in self.limits
        }  # fmt: skip
        are_new = not strays <= self.strays
        self.strays |= strays
        return are_new

    def _choose(self, due: list[Job], max_jobs: int) -> list[Job]:
        """Those of the due jobs, best first, that a claim gives."""
        if not self.limits and not any(job.limit_key for job in due):
            return due[:max_jobs]
        chosen = [self.jobs[job_id] for job_id in self.seen.claimed]
        left, passed = [*due], []
        for job in chosen:
            if job not in left or not self._has_room(job):
                raise Divergence(f"{job.id} has no room")
            ahead = left[: left.index(job)]
            passed += [its for its in ahead if its.line == job.line and its not in chosen]
            self._use(job)
            job.status = "running"
            left.remove(job)
        # What waits for a time waits too long while the clock is behind.
        if self.now >= self.latest and len(chosen) < max_jobs:
            passed += [its for its in left if self._has_room(its)]
        if passed and not self._has_strays(passed):
            raise Divergence(f"{[its.id for its in passed]} were passed over")
        return chosen
