"""Check the histories of many databases: each by itself, and all of them together.

A folder has one for each database, of its name, and perhaps one of a front.  Each job has a
header ``uid`` that is its producer's name and a number that grows, so a job is known in
whichever database it is.  What went through a front is told to the database that it came to;
a front commits each call at once, so a transaction there that was rolled back changes nothing.

The jobs of queues that move are judged by what all databases know of each: one life, whichever
ids it had and wherever it ran, is held against the promise of one database (`moves.py`).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from faults.history import checker
from faults.history.context import TOLERANCE, Context
from faults.history.events import CARRIER
from faults.history.moves import Moves
from faults.history.reading import Operation, Reader
from faults.history.story import FAR, Row

SENTENCES = {
    "M1": "an id is given once over all databases, and its number or a move tells which",
    "M2": "what a producer was told of is there once, in one database",
    "M3": "what was rolled back or refused is nowhere, unless a front had been told",
    "M4": "a call without an answer did all that it was for once, or nothing",
    "M5": "what was carried has one receipt, where it went and is what was sent",
    "M6": "jobs of an ordering key came and ran in the order in which they were sent",
    "M7": "a key has one job in all databases",
    "M8": "what moved came once, in place of what left, and who asks there is told where it is",
}
NUMBERS = 1023
MOVING = "queues that move"
ANYWHERE = 0
"""Instead of the number of a database, for the ordering keys of queues that move."""
UNDONE, UNKNOWN, HELD, TOLD = range(4)
"""What is known of a job from its calls; of several the last of these counts."""
STORIES = 3
# By these a front or a shard has refused a call before anything was written.
REFUSALS = ("0A000", "22023", "42501", "55000")


class Asked(NamedTuple):
    """What a producer knows of a job."""

    state: int
    told_id: int
    way: str
    key: str | None = None
    """If it is to have one job for some time."""
    live_key: str | None = None


NOBODY = Asked(UNKNOWN, 0, "")


class Run(NamedTuple):
    """A job of an ordering key."""

    job_id: int
    uid: str
    finished_at: int


class Together:
    """All jobs of all databases; each has its eyes, by `watch`."""

    def __init__(self, moves: Moves | None = None) -> None:
        self.moves = moves or Moves()
        self._moving_ids = self.moves.ids
        self._arrived = {(came.database, came.new_id) for came in self.moves.came.values()}
        self.looked: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self._asked: dict[str, Asked] = {}
        self._batches: list[list[str]] = []
        """The jobs of each call without an answer."""
        self._told: set[int] = set()
        self._sent: dict[int, tuple[str, int]] = {}
        """By the id of what carries it, which job goes where."""
        self._databases: dict[int, int] = {}
        """By the id of a job, where it is."""
        self._placed: dict[str, int] = {}
        self._uids: dict[int, str] = {}
        """Of the jobs that were sent from another database."""
        self._carried: dict[tuple[int, int], tuple[int, str]] = {}
        self._receipts: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self._lines: dict[tuple[int, str], list[Run]] = defaultdict(list)
        self._ordered: set[int] = set()
        self._grants: dict[int, int] = {}
        """When a worker was first told to run a job of an ordering key."""
        self._ends: dict[int, tuple[str, str | None]] = {}
        """Of the jobs of queues that move, how each ended, and its key."""
        self._keys: dict[str, set[int]] = defaultdict(set)

    def watch(self, number: int) -> Eyes:
        """Return what looks at the database of that number."""
        return Eyes(self, number)

    def note_call(self, operation: Operation, way: str) -> None:
        """Remember what a producer knows by a call."""
        outcome, rows = operation.outcome, operation.rows
        state = {"ok": TOLD, "unknown": UNKNOWN}.get(outcome, UNDONE)
        if operation.function == "enqueue_to":
            job_id = rows[0] if rows else 0
            job = {"headers": operation.arguments.get("headers")}
            self._note_asked(job, state, job_id, "to")
            if job_id:
                uid = job["headers"]["uid"] if job["headers"] else ""
                self._sent[job_id] = (uid, operation.arguments["database"])
            return
        if operation.function != "enqueue_many":
            return
        jobs = operation.arguments["jobs"]
        for job, row in zip(jobs, rows or [{}] * len(jobs), strict=True):
            is_held = state == TOLD and not row["is_new"]
            job_id = row.get("job_id", 0) if state == TOLD else 0
            self._note_asked(job, HELD if is_held else state, job_id, way)
        if state == UNKNOWN and not any(job.get("idempotency_key") for job in jobs):
            self._batches.append([job["headers"]["uid"] for job in jobs])

    def _note_asked(self, job: Mapping[str, Any], state: int, job_id: int, way: str) -> None:
        headers = job.get("headers")
        if not headers:
            return
        uid = headers["uid"]
        key = job.get("idempotency_key") if job.get("unique_for") else None
        before = self._asked.get(uid)
        asked = Asked(state, job_id, way, key, job.get("idempotency_key"))
        if before and TOLD in (before.state, state) and before.told_id and job_id:
            self.look("M7", before.told_id == job_id, uid, "two calls told of different jobs")
        self._asked[uid] = max(asked, before or asked)
        if job_id and state >= HELD:
            self._told.add(job_id)

    def note_grants(self, operation: Operation) -> None:
        """Remember when jobs of ordering keys began."""
        for row in operation.rows or ():
            job_id = row["job_id"]
            is_of_use = job_id in self._ordered or job_id in self._moving_ids
            if is_of_use and row.get("locked_until"):
                began = self._grants.get(job_id, FAR)
                self._grants[job_id] = min(began, operation.ended or FAR)

    def note_row(self, number: int, table: str, row: Row) -> None:
        """Remember where a job is."""
        if table == "receipts" and not row["move_id"]:
            source = (row["source_job_id"], row["source_created_at"])
            self._receipts[source].append((number, row["job_id"]))
        elif table in ("jobs", "finished_jobs"):
            self._note_job(number, row)

    def _note_job(self, number: int, row: Row) -> None:
        job_id = row["id"]
        other = self._databases.setdefault(job_id, number)
        self.look("M1", other == number, job_id, f"it is in the databases {other} and {number}")
        is_told = job_id & NUMBERS == number or (number, job_id) in self._arrived
        self.look("M1", is_told, job_id, f"it is in database {number}")
        if row["job_type"] == CARRIER:
            self._carried[job_id, row["created_at"]] = (number, row["status"])
            return
        self.counts[row["status"]] += 1
        uid = (row.get("headers") or {}).get("uid", "")
        before = self._placed.setdefault(uid, job_id)
        self.look("M2", before == job_id, uid, f"it is there as job {before} and job {job_id}")
        if key := row.get("idempotency_key"):
            self._keys[key].add(job_id)
        moves = row["queue"] in self.moves.queues
        if moves:
            self._ends[job_id] = (row["status"], row.get("idempotency_key"))
        if line := row.get("ordering_key"):
            self._ordered.add(job_id)
            self._lines[ANYWHERE if moves else number, line].append(
                Run(job_id, uid, row.get("finished_at", 0))
            )

    def look(self, rule: str, is_right: bool, of: int | str, problem: str) -> None:
        """Count that a rule was put to the test, and what broke it."""
        self.looked[rule] += 1
        if not is_right:
            self.broken[rule] += 1
            kind = f"{rule} {re.sub('[0-9]+', 'N', problem)}"
            self._kinds[kind] += 1
            if self._kinds[kind] <= STORIES:
                asked = f" {self._asked[of]}" if of in self._asked else ""
                self.problems.append(f"{rule}: {SENTENCES[rule]}: {of}: {problem}{asked}")

    def judge(self, skew: int = 0) -> None:
        """Look at all that can be known only of all of them.

        *skew* leads from the clock of the calls to that of the databases.
        """
        told = {
            asked.told_id: uid
            for uid, asked in self._asked.items()
            if asked.state == TOLD and asked.told_id and asked.way != "to"
        }
        self.moves.link(told)
        for uid, asked in self._asked.items():
            self._judge_asked(uid, asked)
        for uid, job_id in self._placed.items():
            self.look("M4", uid in self._asked, job_id, f"nobody has sent it: {uid!r}")
            if uid in self._asked and self._asked[uid].way == "to":
                self._uids[job_id] = uid
        for job_id in self._told:
            is_there = self.moves.find(job_id) in self._databases
            self.look("M2", is_there, job_id, "it was told, and is nowhere")
        for uids in self._batches:
            there = sum(uid in self._placed for uid in uids)
            self.look("M4", there in (0, len(uids)), uids[0], f"{there} of {len(uids)} came")
        self._judge_carried()
        self._judge_moved(told)
        for (number, line), runs in self._lines.items():
            is_anywhere = number == ANYWHERE
            runs.sort(key=_sent_at if is_anywhere else attrgetter("job_id"))
            where = "all databases" if is_anywhere else f"database {number}"
            for one, other in pairwise(runs):
                problem = self._disorder(one, other, skew)
                self.look("M6", not problem, f"key {line} of {where}", problem)

    def _disorder(self, one: Run, other: Run, skew: int) -> str:
        """Say in which way two jobs did not follow each other."""
        granted = self._grants.get(other.job_id, FAR)
        if granted < FAR and one.finished_at > granted // 1000 + skew + TOLERANCE:
            return f"job {other.job_id} ran before job {one.job_id} had ended"
        states = [self._asked.get(run.uid, NOBODY) for run in (one, other)]
        # A call to a front that got no answer may be done after the next one.
        is_late = any(each.state == UNKNOWN and each.way == "front" for each in states)
        if not is_late and _number(one.uid) > _number(other.uid):
            return f"{one.uid} has the lower id and was sent after {other.uid}"
        return ""

    def _judge_asked(self, uid: str, asked: Asked) -> None:
        job_id = self._placed.get(uid)
        if asked.state == TOLD and self.moves.is_merged(asked.told_id):
            live = self._ends.get(self.moves.find(asked.told_id), ("", None))
            is_right = job_id is None and asked.live_key == live[1] is not None
            self.look("M8", is_right, uid, f"it went into {live}, and is there as {job_id}")
        elif asked.state == TOLD:
            told = f"it was told, as job {asked.told_id}, and is nowhere"
            self.look("M2", job_id is not None, uid, told)
            last_id = self.moves.find(asked.told_id)
            is_same = asked.way == "to" or job_id in (None, last_id)
            self.look("M2", is_same, uid, f"it is there as job {job_id}")
        elif asked.state == UNDONE:
            self.look("M3", job_id is None, uid, f"it is there as job {job_id}")
        if asked.key and asked.state in (TOLD, HELD):
            found = self._keys[asked.key]
            self.look("M7", len(found) == 1, uid, f"key {asked.key} has the jobs {found}")
        names = {TOLD: "told", HELD: "told", UNKNOWN: "unknown", UNDONE: "undone"}
        self.counts[f"{names[asked.state]} {asked.way}"] += 1

    def _judge_carried(self) -> None:
        for (job_id, created_at), (number, status) in self._carried.items():
            if status == "succeeded":
                found = self._receipts.get((job_id, created_at), [])
                problem = f"{len(found)} receipts for what database {number} has sent"
                self.look("M5", len(found) == 1, job_id, problem)
                uid, target = self._sent.get(job_id, ("", 0))
                there = [(place, self._uid_of(there)) for place, there in found]
                is_right = not uid or there == [(target, uid)]
                self.look("M5", is_right, job_id, f"{uid} for {target} is {there}")
        came: set[int] = set()
        for source, found in self._receipts.items():
            self.look("M5", source in self._carried, source[0], "what nobody sent has come in")
            came.update(self.moves.find(job_id) for _, job_id in found)
        for job_id, uid in self._uids.items():
            self.look("M5", job_id in came, job_id, f"{uid} came without a receipt")

    def _uid_of(self, job_id: int) -> str | None:
        return self._uids.get(self.moves.find(job_id))

    def _judge_moved(self, told: Mapping[int, str]) -> None:
        moves = self.moves
        for (number, job_id), left in moves.left.items():
            came = moves.came.get((left.move_id, job_id))
            is_right = came and (came.database, came.new_id) == (left.database, left.new_id)
            self.look("M8", bool(is_right), job_id, f"it left {number}: {left}, and {came}")
        for (move_id, job_id), came in moves.came.items():
            source = move_id & NUMBERS
            has_left = (source, job_id) in moves.left or moves.was_back(source, job_id, came.at)
            self.look("M8", has_left, job_id, f"it came to {came.database}, and never left")
            self.counts["jobs that moved"] += 1
            self.counts["jobs that moved late"] += came.new_id != job_id
        for number, job_id in moves.stuck:
            self.look("M8", False, job_id, f"it is on its way from {number} still")
        for job_id in told:
            if job_id in self._moving_ids:
                number, last_id = job_id & NUMBERS, moves.find(job_id)
                place = moves.told_place(number, job_id, self._databases)
                problem = f"database {number} leads to {place}, and it is {last_id}"
                self.look("M8", place == last_id, job_id, problem)
        self.counts["jobs whose key was live where they came"] = len(moves.merged)


class Eyes:
    """What looks at one database for all of them."""

    def __init__(self, together: Together, number: int) -> None:
        self._together, self._number = together, number

    def see_operation(self, operation: Operation) -> None:
        """Look at a call; those through a front were looked at before."""
        if operation.function in ("claim_jobs", "finish_and_claim"):
            self._together.note_grants(operation)
        elif not operation.who.startswith("front "):
            self._together.note_call(operation, "direct")

    def see_row(self, table: str, row: Row) -> None:
        """Look at a row."""
        self._together.note_row(self._number, table, row)


def _sent_at(run: Run) -> int:
    return _number(run.uid)


def _number(uid: str) -> int:
    return int(uid.rpartition(":")[2] or 0)


def through_front(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield calls to a front as what they are for the database behind it."""
    for operation in operations:
        who = f"front {operation.who}"
        if operation.rows is not None:
            yield operation._replace(who=who, outcome="ok")
        elif operation.error.startswith(("RT", *REFUSALS)):
            yield operation._replace(who=who)
        else:
            yield operation._replace(who=who, outcome="unknown", error="")


def check(
    folder: Path, numbers: Mapping[str, int], front: str = "", moving: Collection[str] = ()
) -> tuple[Together, dict[str, Context]]:
    """Return what is wrong with all of them together, and with each.

    The jobs of the queues that are *moving* have a context of their own, `MOVING`.
    """
    moves = Moves(moving)
    for name, number in numbers.items():
        moves.read(folder / name, number)
    together, contexts = Together(moves), dict[str, Context]()
    passed: dict[int, list[Operation]] = defaultdict(list)
    if front:
        for operation in through_front(Reader(folder / front).operations()):
            together.note_call(operation, "front")
            together.counts["calls to the front"] += 1
            if operation.outcome == "ok" and operation.function == "enqueue_many":
                assert operation.rows is not None
                passed[operation.rows[0]["job_id"] & NUMBERS].append(operation)
            elif operation.outcome == "unknown":
                for number in numbers.values():
                    passed[number].append(operation)
    with TemporaryDirectory() as work:
        apart = checker.Apart(moves.ids, Path(work))
        for name, number in numbers.items():
            also, watcher = passed.pop(number, []), together.watch(number)
            contexts[name] = checker.check(
                folder / name, also=also, watcher=watcher, apart=apart
            )
        together.judge(next(iter(contexts.values())).skew)
        if moving:
            contexts[MOVING] = checker.check_apart(apart, moves, list(contexts.values()))
    return together, contexts


def summary(together: Together) -> list[str]:
    """Return the figures, a line for each."""
    lines = []
    for rule, sentence in SENTENCES.items():
        broken = together.broken[rule]
        told = f"{broken:,} BROKEN" if broken else "ok"
        lines.append(f"  {rule:<4}{sentence:<76}{together.looked[rule]:>12,} looked at  {told}")
    return lines
