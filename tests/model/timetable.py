"""What rota promises of schedules, for those whose times a child could count.

Each planned time is dealt with once, for ever, whatever the clock does.  What a late tick makes
of several is in catch_up and overlap alone.
"""

from __future__ import annotations

from model.effects import Ledger
from model.leases import MINUTE
from model.rows import SECOND, Refused, Rows, Schedule

# How many seconds lie between two times, and whether they count from when the text was put in.
TEXTS = {
    "every 40 seconds": (40, True),
    "every 15 minutes": (900, True),
    "*/5 * * * *": (300, False),
    "@hourly": (3600, False),
}


class Timetable(Ledger):
    """The model with its schedules."""

    def schedule_job(
        self, name: str, schedule: str, job_type: str, catch_up: str, overlap: str
    ) -> Rows:
        said = [schedule, job_type, catch_up, overlap]
        its = self.schedules.get(name)
        if its is None:
            its = self.schedules[name] = Schedule(
                name, schedule, job_type, catch_up, overlap, self.now
            )
            its.next_run_at = self._next(its, self.now)
            return [["created", its.next_run_at]]
        if said == [its.schedule, its.job_type, its.catch_up, its.overlap]:
            return [["unchanged", its.next_run_at]]
        # What was due before the change is enqueued as it was.
        self._enqueue_due(its)
        has_new_times = its.schedule != schedule
        its.schedule, its.job_type, its.catch_up, its.overlap = said
        if has_new_times:
            its.anchored_at = self.now
        if has_new_times and its.is_enabled:
            its.next_run_at = self._next(its, self.now)
        return [["changed", its.next_run_at]]

    def unschedule_job(self, name: str) -> Rows:
        self._known_schedule(name)
        del self.schedules[name]
        return [[None]]

    def enable_schedule(self, name: str) -> Rows:
        its = self._known_schedule(name)
        if not its.is_enabled:
            its.is_enabled, its.next_run_at = True, self._next(its, self.now)
        return [[its.next_run_at]]

    def disable_schedule(self, name: str) -> Rows:
        its = self._known_schedule(name)
        its.is_enabled, its.next_run_at = False, None
        return [[None]]

    def run_schedule_now(self, name: str) -> Rows:
        its = self._known_schedule(name)
        if self._is_in_the_way(its):
            raise Refused("RT014")
        moment = self.now
        # A run by hand takes no planned time, and none that is taken.
        while (name, moment) in self.occurrences or moment in (
            its.next_run_at, self._next(its, moment - 1, is_new=False),
        ):  # fmt: skip
            moment += 1
        self._make(its, moment, self.now)
        return [[its.last_job_id]]

    def tick(self) -> Rows:
        swept = self.sweep_stale_leases()[0][0]
        due = [its for its in self.schedules.values() if its.next_run_at is not None]
        enqueued = sum(map(self._enqueue_due, due))
        self._do_checks()
        return [[enqueued, swept]]

    def _known_schedule(self, name: str) -> Schedule:
        if name not in self.schedules:
            raise Refused("RT005")
        return self.schedules[name]

    def _next(self, its: Schedule, after: int, is_new: bool = True) -> int:
        """Return the first time later than *after* and, for a new one, than the last."""
        period, is_anchored = TEXTS[its.schedule]
        begin = its.anchored_at if is_anchored else 0
        if is_new and its.last_run_at is not None:
            after = max(after, its.last_run_at)
        # Nothing is planned before the anchor, should the clock go back.
        periods = max((after - begin) // (period * SECOND) + 1, 0)
        return begin + periods * period * SECOND

    def _is_in_the_way(self, its: Schedule) -> bool:
        return its.overlap == "skip" and any(
            job.is_live and job.definition == its.name for job in self.jobs.values()
        )

    def _enqueue_due(self, its: Schedule) -> int:
        """Deal with all times until now; return how many jobs that made."""
        first = its.next_run_at
        if first is None or first > self.now:
            return 0
        times = [first]
        while (time := self._next(its, times[-1], is_new=False)) <= self.now:
            times.append(time)
        wanted = times[-100 if its.catch_up == "all" else -1 :]
        if its.catch_up == "skip":
            wanted = [time for time in wanted if time >= self.now - MINUTE]
        if first not in wanted:
            self.occurrences.setdefault((its.name, first), ["missed", None, self.now])
        enqueued, is_blocked = 0, self._is_in_the_way(its)
        for time in wanted:
            if (its.name, time) not in self.occurrences:
                if is_blocked:
                    self.occurrences[its.name, time] = ["skipped", None, self.now]
                else:
                    self._make(its, time, time)
                    enqueued += 1
            is_blocked = is_blocked or its.overlap == "skip"
        its.last_run_at = wanted[-1] if wanted else first
        its.next_run_at = self._next(its, self.now, is_new=False)
        return enqueued

    def _make(self, its: Schedule, scheduled_for: int, run_at: int) -> None:
        is_queued = its.overlap == "queue"
        job = self._put(
            ordering_key=f"schedule:{its.name}" if is_queued else None,
            skip_dead=is_queued or None, job_type=its.job_type, definition=its.name,
            scheduled_for=scheduled_for, run_at=run_at,
        )  # fmt: skip
        its.last_job_id = job.id
        self.occurrences[its.name, scheduled_for] = ["enqueued", job.id, self.now]
