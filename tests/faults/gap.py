"""What an asynchronous promotion lost: the rows of the old primary beside those of the new one.

The old primary is looked at where nobody can reach it, and the new one before anybody can
write.  The jobs that differ are the gap.  If a client had been told of what is missing, then
its history cannot be true any more, and the checker must say so of just these jobs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from faults.history.context import Context
from faults.history.events import events
from faults.history.reading import Reader
from faults.history.story import ENDS, GIVES_BACK, Row

SUBJECT = re.compile(r"job (\d+)")


class Difference(NamedTuple):
    """A job whose row was another before, or is gone."""

    job_id: int
    before: Row
    after: Row | None


def differences(before: Path, after: Path) -> list[Difference]:
    """Compare two folders with a dump each."""
    old, new = _rows(before), _rows(after)
    return [Difference(i, row, new.get(i)) for i, row in old.items() if row != new.get(i)]


def _rows(folder: Path) -> dict[int, Row]:
    return {
        row["id"]: {"place": table, **row}
        for _, table, row in Reader(folder).rows()
        if table in ("jobs", "finished_jobs")
    }


class Told:
    """What clients were told of each job, in a whole history."""

    def __init__(self, folder: Path) -> None:
        self.enqueued: set[int] = set()
        self.granted: defaultdict[int, set[int]] = defaultdict(set)
        self.ended: defaultdict[int, set[int]] = defaultdict(set)
        self.given_back: defaultdict[int, set[int]] = defaultdict(set)
        """Tokens, as far as it is possible that they were given back."""
        for operation in Reader(folder).operations():
            for event in events(operation):
                if event.outcome == "ok":
                    if event.act == "enqueue" and event.facts["is_new"]:
                        self.enqueued.add(event.job_id)
                    elif event.act == "grant":
                        self.granted[event.job_id].add(event.token)
                    elif event.act in ENDS:
                        self.ended[event.job_id].add(event.token)
                if event.act in GIVES_BACK and event.outcome in ("ok", "unknown"):
                    self.given_back[event.job_id].add(event.token)

    def has_lost(self, difference: Difference) -> bool:
        """Whether somebody was told what is not true any more."""
        job_id, before, after = difference
        if after is None:
            return job_id in self.enqueued
        old, new = before["lease_token"], after["lease_token"]
        lost = {token for token in self.granted[job_id] if new < token <= old}
        if lost - self.given_back[job_id]:
            return True
        is_undone = before["status"] != after["status"] == "running"
        return is_undone and old == new and old in self.ended[job_id]


def judge_gap(
    found: list[Difference], history: Path, context: Context
) -> tuple[set[int], list[str]]:
    """Return the jobs that lost what was told, and which were not found, or which else were."""
    told = Told(history)
    lost = {each.job_id for each in found if told.has_lost(each)}
    excused = {each.job_id for each in found}
    subjects = [SUBJECT.fullmatch(violation.subject) for violation in context.violations]
    named = {int(match[1]) for match in subjects if match}
    problems = [f"job {job_id} lost what was told, unseen" for job_id in sorted(lost - named)]
    problems += [
        f"{each} ({each.subject})\n{each.story}"
        for each, match in zip(context.violations, subjects, strict=True)
        if not match or int(match[1]) not in excused
    ]
    return lost, problems if lost else [*problems, "nothing was lost, so nothing was shown"]
