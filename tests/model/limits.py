"""What rota promises of limits: of whom they are for no more run, or start, than they say.

Jobs of a queue where keys take turns have places that the model does not know, and jobs may
be held: for a limit, or for their time where there are places.  Who is held the model sees,
and asks whether he may be; ticks have to let him go.  Of the others none is passed over that
has room, by one of a higher number, or where nobody takes turns by a later one.

Of a rate the model knows when jobs started: in any time no more than the rate gives in it,
rounded up, and a burst more.  Whoever comes when fewer than a burst started in the time of a
burst has room.
"""

from __future__ import annotations

from typing import Any

from model.leases import Model
from model.rows import Divergence, Job, Limit, Rows

NAMES = {"queue": "queue", "job_type": "type", "limit_key": "key"}
PATIENCE = 4  # claims in a row, each after ticks, that may leave a job that has room


class Limits(Model):
    """The model with its limits."""

    def set_limit(self, reset: bool = False, **given: Any) -> Rows:
        (whose,) = NAMES.keys() & given.keys()
        name = f"{NAMES[whose]} {given[whose]}"
        is_new = name not in self.limits
        known = Limit(name) if reset else self.limits.get(name) or Limit(name)
        for field in ("max_running", "max_starts", "per", "burst", "weight"):
            if given.get(field) is not None:
                setattr(known, field, given[field])
        self.limits[name] = known
        if known.max_running is known.max_starts is known.weight is None:
            del self.limits[name]
        self.limited.add(name)
        self.unsettled.add(name)
        if is_new or reset or given.keys() & {"max_starts", "per", "burst"}:
            # A rate counts from its last change, that of a class not for keys with their own.
            self.starts = {
                its: at
                for its, at in self.starts.items()
                if not _is_meant(name, its) or (its != name and its in self.limits)
            }
        return [[None]]

    def _limits_of(self, job: Job) -> dict[str, Limit]:
        """The limits that a job counts for, each with the name that it is counted under."""
        found = {f"queue {job.queue}": f"queue {job.queue}"}
        found[f"type {job.job_type}"] = f"type {job.job_type}"
        if key := job.limit_key:
            its_class = f"key {key.split(':')[0]}:*" if ":" in key else ""
            found[f"key {key}"] = f"key {key}" if f"key {key}" in self.limits else its_class
        return {name: self.limits[its] for name, its in found.items() if its in self.limits}

    def _may_start(self, job: Job) -> bool:
        for name, limit in self._limits_of(job).items():
            most = limit.max_running
            if most is not None and self._running(name) >= most:
                return False
            if limit.max_starts is None:
                continue
            starts = sorted([*self.starts.get(name, []), self.now])
            for first, begin in enumerate(starts):
                for last, end in enumerate(starts[first:], 1):
                    if last > limit.most - (begin - end) // limit.gap:
                        return False
        return True

    def _has_room(self, job: Job) -> bool:
        """Tell whether a job may start for certain, if it is not held."""
        for name, limit in self._limits_of(job).items():
            lately = self.now - limit.most * limit.gap
            # Those before a change count on where it does not change how they are counted.
            starts = [at for at in self.all_starts.get(name, []) if at > lately]
            if limit.max_starts is not None and len(starts) >= limit.most:
                return False
        # What a queue has room for after a change is known to ticks first.
        return f"queue {job.queue}" not in self.unsettled and self._may_start(job)

    def _running(self, name: str) -> int:
        running = (job for job in self.jobs.values() if job.status == "running")
        return sum(name in self._limits_of(job) for job in running)

    def _use(self, job: Job) -> None:
        for name, limit in self._limits_of(job).items():
            if limit.max_starts is not None:
                for starts in (self.starts, self.all_starts):
                    starts.setdefault(name, []).append(self.now)

    def _may_be_held(self, job: Job) -> bool:
        return bool(
            job.limit_key or job.queue in self.fair or f"type {job.job_type}" in self.limited
        )

    def _choose(self, due: list[Job], max_jobs: int) -> list[Job]:
        """Those of the due jobs, best first, that a claim gives."""
        self.fair |= {job.queue for job in self.jobs.values() if job.limit_key}
        chosen = [self.jobs[job_id] for job_id in self.seen.claimed]
        left = [*due]
        for job in chosen:
            if job not in left or not self._may_start(job):
                raise Divergence(f"{job.id} has no room")
            self._use(job)
            job.status = "running"
            left.remove(job)
        self.late = (
            [job for job in left if self._has_room(job)] if len(chosen) < max_jobs else []
        )
        held = {job.id for job in left if self.seen.get_hold(job.id)}
        passed = [job for job in left if job.id in held and not self._may_be_held(job)]
        for job in left:
            is_late = len(chosen) < max_jobs or any(self._is_before(job, its) for its in chosen)
            if is_late and job.id not in held and self._has_room(job):
                passed.append(job)
        # What waits for a time waits too long while the clock is behind.
        if passed and self.now >= self.latest:
            raise Divergence(f"{[job.id for job in passed]} were passed over")
        return chosen

    def _is_before(self, one: Job, other: Job) -> bool:
        if {one.queue, other.queue} & self.fair:
            return one.priority < other.priority
        return (one.priority, one.run_at, one.id) < (other.priority, other.run_at, other.id)

    def settle(self) -> None:
        """Know that ticks have done all that there was to do."""
        for name, limit in self.limits.items():
            most = limit.max_running
            if most is None or self._running(name) <= most:
                self.unsettled.discard(name)


def _is_meant(limit_name: str, name: str) -> bool:
    """Tell whether what counts under a name may count for the limit."""
    return name == limit_name or (
        limit_name.endswith(":*") and name.startswith(limit_name[:-1])
    )
