"""What is known of queues that moved from one database to another: which job went where.

A job that moves keeps its id, or gets a new one if it came late to the queue that it left.  Or
it is not needed there, since its key has a live job: it is *merged* into that.  So one job may
have several ids, one after the other; the first is its *root*.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

NUMBERS = 1023
TABLES = ("moved_jobs", "receipts")


class Left(NamedTuple):
    """What the database that a job left says of it."""

    move_id: int
    database: int
    new_id: int


class Came(NamedTuple):
    """What the database to which a job came says of it."""

    database: int
    new_id: int
    at: int


class Moves:
    """All that went and came, of the jobs of all databases."""

    def __init__(self, queues: Collection[str] = ()) -> None:
        self.queues = frozenset(queues)
        self.left: dict[tuple[int, int], Left] = {}
        """By the database that it left and its id there."""
        self.came: dict[tuple[int, int], Came] = {}
        """By the move and the id that it had before."""
        self.stuck: list[tuple[int, int]] = []
        """Where it is on its way still, and its id."""
        self.uids: dict[int, str] = {}
        """Of the rows of jobs in these queues."""
        self.roots: dict[int, int] = {}
        """Of all ids of these queues, in which life each is."""
        self.merged: dict[int, int] = {}
        """Jobs whose key had a live one, and that."""
        self._next: dict[int, int] = {}
        self._back: dict[tuple[int, int], int] = {}
        """When an id came into a database for the last time."""

    def read(self, folder: Path, number: int) -> None:
        """Take over what the last dump of a database says."""
        for table, row in _rows(folder, self.queues):
            if table == "moved_jobs" and row["new_job_id"] is None:
                self.stuck.append((number, row["job_id"]))
            elif table == "moved_jobs":
                left = Left(row["move_id"], row["database"], row["new_job_id"])
                self.left[number, row["job_id"]] = left
            elif table == "receipts":
                if row["move_id"] <= 0:  # it was sent alone, or is the end of a move
                    continue
                came = Came(number, row["job_id"], row["received_at"])
                self.came[row["move_id"], row["source_job_id"]] = came
                place = number, came.new_id
                self._back[place] = max(came.at, self._back.get(place, 0))
            else:
                self.uids[row["id"]] = (row.get("headers") or {}).get("uid", "")

    @property
    def ids(self) -> set[int]:
        """All ids that jobs of these queues have or had."""
        return {
            *self.uids,
            *(job_id for _, job_id in (*self.came, *self.left, *self.stuck)),
            *(came.new_id for came in self.came.values()),
        }

    def link(self, told: Mapping[int, str]) -> None:
        """Find out which ids are of one job; *told* are the jobs that producers know by id."""
        self._next = {
            job_id: came.new_id
            for (_, job_id), came in self.came.items()
            if came.new_id != job_id
        }
        comers = Counter(self._next.values())
        before = {new: old for old, new in self._next.items()}
        for job_id, new_id in self._next.items():
            known = job_id
            while known not in told and known in before:
                known = before[known]
            uid = self.uids.get(self.find(new_id))
            # It is the job there, unless that one is known to be another.
            is_same = told[known] == uid if known in told else new_id not in told
            if not is_same or (known not in told and comers[new_id] > 1):
                self.merged[job_id] = new_id
        before = {new: old for old, new in self._next.items() if old not in self.merged}
        for job_id in self.ids:
            root = job_id
            while root in before:
                root = before[root]
            self.roots[job_id] = root

    def find(self, job_id: int) -> int:
        """Return the last id of a job, or of that into which it was merged."""
        seen = {job_id}
        while (job_id := self._next.get(job_id, job_id)) not in seen:
            seen.add(job_id)
        return job_id

    def is_merged(self, job_id: int) -> bool:
        """Whether a job went into another, under this id or one that it got."""
        while job_id not in self.merged:
            if job_id not in self._next:
                return False
            job_id = self._next[job_id]
        return True

    def arrived_at(self) -> dict[int, int]:
        """Return by root since when a job that came late has been where it is."""
        found: dict[int, int] = {}
        for (_, job_id), came in self.came.items():
            if came.new_id != job_id and job_id not in self.merged:
                root = self.roots[job_id]
                found[root] = max(came.at, found.get(root, 0))
        return found

    def was_back(self, database: int, job_id: int, after: int) -> bool:
        """Whether a job came into a database later, which then does not say that it left."""
        return after < self._back.get((database, job_id), 0)

    def told_place(self, database: int, job_id: int, places: Mapping[int, int]) -> int | None:
        """Return the job to which a late caller comes who goes where he is told."""
        seen = set()
        while places.get(job_id) != database:
            left = self.left.get((database, job_id))
            if left is None or (database, job_id) in seen:
                return None
            seen.add((database, job_id))
            database, job_id = left.database, left.new_id
        return job_id


def _rows(folder: Path, queues: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows about moves and of queues that move, and read no others."""
    wanted = tuple(f'{{"table": "{table}"' for table in TABLES)
    names = tuple(f'"queue": "{queue}"' for queue in queues)
    paths = sorted(folder.glob("rows-*.ndjson"))
    if not paths:
        return
    with paths[-1].open(encoding="utf-8") as file:
        for text in file:
            is_job = text.startswith(('{"table": "jobs"', '{"table": "finished_jobs"'))
            if text.startswith(wanted) or (is_job and any(name in text for name in names)):
                line = json.loads(text)
                if not is_job or line["row"]["queue"] in queues:
                    yield line["table"], line["row"]
