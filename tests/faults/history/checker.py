"""Check a recorded history against the promise of rota.

In one pass the calls and the rows are dealt out to their jobs, in a second one each job's story
is held against the rules, and in a third one each key and each planned time.  Time is linear in
the length of the history, and memory is that of a small part of it.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from faults.history import (
    replay,
    rules_keys,
    rules_lease,
    rules_life,
    rules_time,
    rules_whole,
)
from faults.history.context import Context, Problem
from faults.history.events import events
from faults.history.moves import Moves
from faults.history.promise import ELSEWHERE, PROMISE, Violation
from faults.history.reading import Operation, Reader
from faults.history.sorting import Sorter
from faults.history.story import Row, Story

STORIES = 3
"""So many stories are told for each promise; more of the same help nobody."""


Deal = Callable[[int, Any], None]


class Watcher(Protocol):
    """Who wants to see what is read, too."""

    def see_operation(self, operation: Operation) -> None:
        """Look at a call."""

    def see_row(self, table: str, row: Row) -> None:
        """Look at a row of the last dump."""


def check(
    folder: Path | str,
    *,
    general: frozenset[str] = frozenset(),
    stories: int = STORIES,
    also: Sequence[Operation] = (),
    watcher: Watcher | None = None,
    apart: Apart | None = None,
) -> Context:
    """Return what is wrong with the history in a folder, and how much was looked at.

    *general* are errors that any call may have met besides the usual ones, for what was done to
    the server; so many *stories* are told for each promise.  *also* are calls that came another
    way than those in the folder.  The jobs of *apart* are left to `check_apart`.
    """
    began = time.monotonic()
    reader = Reader(Path(folder))
    context = Context(general=rules_whole.GENERAL | general, stories=stories)
    context.last_dump = len(list(Path(folder).glob("rows-*.ndjson")))
    with tempfile.TemporaryDirectory() as work, _uncollected():
        jobs, things = Sorter(Path(work), "jobs"), Sorter(Path(work), "things")
        deal = apart.deal(jobs) if apart else jobs.add
        _deal_rows(reader, context, deal, things, watcher)
        _deal_operations(chain(reader.operations(), also), context, deal, watcher)
        context.skew = reader.skew
        context.calm = next((m for m in reader.marks if m["mark"] == "calm"), None)
        for job_id, items in jobs.groups():
            context.counts["jobs"] += 1
            story = Story(job_id, items, context.last_dump, context.changed_keys)
            _check_story(story, context, things)
        for name, items in things.groups():
            _note(context, rules_keys.check(name, items, context), name, lambda: "")
    _note(context, rules_whole.check_hidden(context), "all jobs", lambda: "")
    _note(context, rules_whole.check_statistics(context), "all jobs", lambda: "")
    context.counts["milliseconds"] = round((time.monotonic() - began) * 1000)
    return context


class Apart:
    """The jobs that are not of one database alone, to be judged once all have been read."""

    def __init__(self, job_ids: Container[int], folder: Path) -> None:
        self._job_ids, self.folder = job_ids, folder
        self._items = Sorter(folder, "apart")

    def deal(self, jobs: Sorter) -> Deal:
        """Return what deals out the items of a database, its own ones to *jobs*."""

        def add(job_id: int, item: Any) -> None:
            (self._items if job_id in self._job_ids else jobs).add(job_id, item)

        return add

    def lives(self, roots: Mapping[int, int]) -> Iterator[tuple[int, list[Any]]]:
        """Yield the items of each job, whatever ids it had."""
        jobs = Sorter(self.folder, "lives")
        for job_id, items in self._items.groups():
            for item in items:
                jobs.add(roots[job_id], item)
        yield from jobs.groups()


def check_apart(apart: Apart, moves: Moves, contexts: Sequence[Context]) -> Context:
    """Return what is wrong with the jobs of *apart*, by what was seen in all databases.

    A job is known by its root, and has one life, in whichever databases that was; one that was
    merged into another has none.
    """
    first = contexts[0]
    context = Context(general=first.general, stories=first.stories, last_dump=first.last_dump)
    context.is_drained = all(each.is_drained for each in contexts)
    context.skew, context.dumped_at = first.skew, max(each.dumped_at for each in contexts)
    context.tables, context.queues, context.calm = first.tables, first.queues, first.calm
    context.changed_keys = set().union(*(each.changed_keys for each in contexts))
    context.has_producers = any(each.has_producers for each in contexts)
    context.arrived = moves.arrived_at()
    with _uncollected():
        things = Sorter(apart.folder, "things apart")
        for job_id, items in apart.lives(moves.roots):
            context.counts["jobs"] += 1
            if not moves.is_merged(job_id):
                story = Story(job_id, items, context.last_dump, context.changed_keys)
                _check_story(story, context, things)
        for name, items in things.groups():
            _note(context, rules_keys.check(name, items, context), name, lambda: "")
    # Who was not told of one may have made it in any of them.
    for each in contexts:
        context.unknown.claims.update(each.unknown.claims)
        context.unknown.jobs.update(each.unknown.jobs)
        context.hidden_claims.update(each.hidden_claims)
        context.hidden_jobs.update(each.hidden_jobs)
    _note(context, rules_whole.check_hidden(context), "all jobs", lambda: "")
    return context


@contextmanager
def _uncollected() -> Iterator[None]:
    """Spare the collector: millions of rows come and go here, and none refers to itself."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _deal_rows(
    reader: Reader, context: Context, deal: Deal, things: Sorter, watcher: Watcher | None
) -> None:
    for number, table, row in reader.rows():
        is_last = number == context.last_dump
        if watcher and is_last:
            watcher.see_row(table, row)
        if table in ("jobs", "finished_jobs"):
            deal(row["id"], ("row", (number, table, row)))
        elif table == "job_errors" and is_last:
            deal(row["job_id"], ("error", row))
            context.counts["run out"] += row.get("error_type") == "lease_expired"
        elif table == "stage_runs" and is_last:
            deal(row["job_id"], ("stage", row))
        elif table == "occurrences" and is_last:
            name = f"occurrence {row['definition']} at {row['scheduled_for']}"
            things.add(name, ("occurrence", row.get("job_id")))
        elif table == "queues":
            context.queues[row["queue"]] = row
        if is_last:
            rules_whole.note_row(table, row, context)
    context.documented = reader.documented
    if reader.dumps:
        context.tables = set(reader.dumps[-1]["tables"])
        context.is_drained = reader.dumps[-1]["is_drained"]
        context.dumped_at = reader.dumps[-1]["wall"]


def _deal_operations(
    operations: Iterable[Operation], context: Context, deal: Deal, watcher: Watcher | None
) -> None:
    for operation in operations:
        if watcher:
            watcher.see_operation(operation)
        for promise, problem in rules_whole.note(operation, context):
            _add(context, promise, problem, f"call of {operation.who}", lambda: "")
        for event in events(operation):
            context.counts["stale"] += event.token > 0 and event.outcome == "refused"
            deal(event.job_id, ("event", tuple(event)))


def _check_story(story: Story, context: Context, things: Sorter) -> None:
    subject = f"job {story.job_id}"

    def tell() -> str:
        return story.tell(context.skew)

    if story.is_carrier:
        # Taken and ended in one transaction: many.py tells what that has to come to.
        _note(context, rules_life.check_place(story, context), subject, tell)
        return
    for rules in (rules_lease, rules_life, rules_time, replay):
        _note(context, rules.check(story, context), subject, tell)
    _note(context, rules_keys.note(story, context, things), subject, tell)


def _note(
    context: Context, problems: Iterable[Problem], subject: str, tell: Callable[[], str]
) -> None:
    for promise, problem in problems:
        _add(context, promise, problem, subject, tell)


def _add(
    context: Context, promise: str, problem: str, subject: str, tell: Callable[[], str]
) -> None:
    context.broken[promise] += 1
    if context.broken[promise] <= context.stories:
        context.violations.append(Violation(promise, problem, subject, tell()))


def summary(context: Context) -> list[str]:
    """Return the figures of a check, a line for each."""
    counts = context.counts
    seconds = counts["milliseconds"] / 1000
    names = ("ok", "refused", "undone", "unknown")
    lines = [
        f"{counts['operations']:,} operations on {counts['jobs']:,} jobs in {seconds:.1f} s",
        ", ".join(f"{counts[name]:,} {name}" for name in names),
        f"{counts['replayed']:,} grants and reports replayed through the protocol of leases",
    ]
    for promise, sentence in PROMISE.items():
        looked, broken = context.looked[promise], context.broken[promise]
        told = f"{looked:>12,} looked at  {f'{broken:,} BROKEN' if broken else 'ok'}"
        if promise in ELSEWHERE:
            told = ELSEWHERE[promise]
        elif not looked and not broken:
            told = f"{0:>12} looked at"
        lines.append(f"  {promise:<4}{sentence:<76}{told}")
    return lines
