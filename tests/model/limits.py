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
            # Who came while there was one has a line apart from who comes now.
            self.parted.add(given.get("job_type", ""))
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
            most = limit.max_running if is_counted else None
            if most is not None and self._running(name) >= most:
                return False
            ahead = self._paid_until(name, limit) - self.now
            if limit.max_starts is not None and ahead > (limit.most - 1) * limit.gap:
                return False
        return True

    def _running(self, name: str) -> int:
        running = (job for job in self.jobs.values() if job.status == "running")
        return sum(name in self._limits_of(job) for job in running)

    def _paid_until(self, name: str, limit: Limit) -> int:
        """No start is paid for later than a burst from now, so that a clock may go back."""
        paid = self.paid_until.get(name, 0)
        if paid > self.now + limit.most * limit.gap:
            return self.now + (limit.most - 1) * limit.gap
        return max(self.now, paid)

    def _use(self, job: Job) -> None:
        for name, limit in self._limits_of(job).items():
            if limit.max_starts is not None:
                self.paid_until[name] = self._paid_until(name, limit) + limit.gap

    def _strays(self, due: list[Job]) -> dict[int, tuple[int, int, int]]:
        """Return who may be in a line without the limit of his type.

        A claim that finds such a job puts it into the right line instead of starting it, or
        another that has room when it has none; but for each once.
        """
        keys = {
            job.id: (job.id, job.lease_token, self.times_set[job.job_type])
            for job in due if f"type {job.job_type}" in self.limits
        }  # fmt: skip
        return {job_id: key for job_id, key in keys.items() if key not in self.strays}

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
            if job.job_type not in self.parted:
                passed += [its for its in ahead if its.line == job.line and its not in chosen]
            self._use(job)
            job.status = "running"
            left.remove(job)
        strays = self._strays(left)
        passed = [its for its in passed if its.id not in strays]
        # What waits for a time waits too long while the clock is behind.
        if self.now >= self.latest and len(chosen) < max_jobs:
            late = [its for its in left if self._has_room(its)]
            if late and strays:
                self.strays.add(min(strays.values()))
            else:
                passed += late
        if passed:
            raise Divergence(f"{[its.id for its in passed]} were passed over")
        return chosen
