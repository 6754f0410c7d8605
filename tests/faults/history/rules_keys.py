"""I5, I9: what may be there once is there once, of a key or of a planned time.

A job is surely there from the moment that somebody was answered so, and surely still there when
its end is written down.  Two jobs of a key for which these overlap were there together.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from faults.history.context import TOLERANCE, Context, Problems
from faults.history.sorting import Sorter
from faults.history.story import FAR, Story


class Presence(NamedTuple):
    """From when to when a job was there at least, on the clock of the database."""

    since: int
    until: int
    job_id: int
    unique_for: float
    created_at: int


def note(story: Story, context: Context, sorter: Sorter) -> Problems:
    """Deal out a job to its key and its planned time, and see that its key is the one asked."""
    row = story.last_row
    if row is None:
        return
    key = row.get("idempotency_key")
    for event in story.enqueues:
        asked = event.facts.get("idempotency_key")
        if event.outcome == "ok" and asked is not None:
            context.looked["I5"] += 1
            if asked != key:
                yield "I5", f"it was the answer for the key {asked!r}, and has {key!r}"
    if key is not None and (presence := _presence(story, row, context)):
        owner = row.get("pipeline") or row.get("job_type")
        sorter.add(f"key {key} of {owner}", tuple(presence))
    if row.get("definition"):
        name = f"occurrence {row['definition']} at {row.get('scheduled_for')}"
        sorter.add(name, ("job", story.job_id))


def _presence(story: Story, row: dict[str, Any], context: Context) -> Presence | None:
    # A job that came back was away in between.
    if story.is_retried:
        return None
    made = next((e for e in story.enqueues if e.facts["is_new"] and e.outcome == "ok"), None)
    signs = [context.wall(made.ended)] if made and made.ended is not None else []
    signs += [lease.grant.facts["moment"] for lease in story.leases[:1] if lease.grant]
    signs += [row["finished_at"]] if row.get("finished_at") else [context.dumped_at]
    unique_for = made.facts.get("unique_for") if made else None
    return Presence(
        max(min(signs), context.arrived.get(story.job_id, 0)),
        row.get("finished_at") or FAR,
        story.job_id,
        unique_for if isinstance(unique_for, int | float) else 0,
        row["created_at"],
    )


def check(name: str, items: list[Any], context: Context) -> Problems:
    """Yield what is wrong with a key, or with a planned time."""
    kind = name.partition(" ")[0]
    if kind == "key":
        yield from _check_key([Presence._make(item) for item in items], context)
    else:
        context.looked["I9"] += 1
        yield from _check_occurrences(items)


def _check_key(jobs: list[Presence], context: Context) -> Problems:
    jobs.sort()
    context.looked["I5"] += len(jobs)
    last: Presence | None = None
    for job in jobs:
        if last and job.since + TOLERANCE < min(last.until, job.until):
            yield "I5", f"jobs {last.job_id} and {job.job_id} were live at once"
        if not last or job.until > last.until:
            last = job
    ruled = sorted((j for j in jobs if j.unique_for), key=lambda j: j.created_at)
    for one, other in pairwise(ruled):
        soon = one.created_at + one.unique_for * 1_000_000 - other.created_at
        if soon > TOLERANCE:
            yield "I5", f"job {other.job_id} came {soon:.0f} us before {one.job_id} allowed it"


def _check_occurrences(items: list[Any]) -> Problems:
    jobs = {job_id for kind, job_id in items if kind == "job"}
    occurrences = [job_id for kind, job_id in items if kind == "occurrence"]
    if len(jobs) > 1:
        yield "I9", f"it has the jobs {sorted(jobs)}"
    if len(occurrences) > 1:
        yield "I9", f"it was dealt with {len(occurrences)} times"
    if occurrences and jobs and not jobs <= set(occurrences):
        yield "I9", f"its occurrences are {occurrences}, and the jobs are {sorted(jobs)}"
