"""I7, I10: nothing comes too early, and, once nothing is in the way, nothing too late.

The times compared are all of the database's clock: when a lease was granted, and the run_at
that the same answer tells.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from faults.history.context import TOLERANCE, Context, Problems
from faults.history.recorder import plain
from faults.history.story import FAR, Lease, Story

DEFAULT = {"kind": "exponential", "base_seconds": 60, "cap_seconds": 1800}
ROUNDING = 1000  # microseconds
SECOND = 1_000_000
SLACK = 2 * SECOND


def check(story: Story, context: Context) -> Problems:
    """Yield what is wrong with the times of a job."""
    before: Lease | None = None
    for lease in story.leases:
        if grant := lease.grant:
            context.looked["I7"] += 1
            early = grant.facts["run_at"] - grant.facts["moment"]
            if early > 0:
                yield "I7", f"token {lease.token} was granted {early} us before its run_at"
            if not story.is_touched:
                yield from _first(story, lease) if before is None else ()
                yield from _pause(story, before, lease, context) if before else ()
        before = lease
    if context.calm:
        yield from _late(story, context)


def _first(story: Story, lease: Lease) -> Problems:
    """The first run is when the enqueue said."""
    made = next((e for e in story.enqueues if e.facts["is_new"]), None)
    grant = lease.grant
    if not made or not grant or lease is not story.leases[0]:
        return
    run_at, created_at = grant.facts["run_at"], grant.facts["created_at"]
    if isinstance(delay := made.facts.get("delay"), int | float):
        if run_at + ROUNDING < created_at + delay * SECOND:
            yield "I7", f"its delay is {delay} s, and its run_at {run_at - created_at} us later"
    elif isinstance(text := made.facts.get("run_at"), str):
        asked = plain(datetime.fromisoformat(text))
        if run_at < asked:
            yield "I7", f"it was asked for at {asked}, and its run_at is {run_at}"


def _pause(story: Story, before: Lease, lease: Lease, context: Context) -> Problems:
    """Between a failure and the next try lies what the backoff says, or who failed it."""
    assert lease.grant is not None
    run_at = lease.grant.facts["run_at"]
    if before.error is None:
        answers = [
            e.facts.get("answer") for e in story.accepted(before.token) if e.act == "snooze"
        ]
        if answers and answers[0] is not None and run_at < answers[0]:
            yield (
                "I7",
                f"token {before.token} was put off to {answers[0]}, and ran for {run_at}",
            )
        return
    fails = [e for e in story.said.get(before.token, ()) if e.act == "fail"]
    fails = [e for e in fails if e.outcome in ("ok", "unknown")]
    wished = {e.facts.get("retry_in") for e in fails}
    pause = run_at - before.error["failed_at"]
    if before.error.get("error_type") == "lease_expired":
        wished = {None}
    if len(wished) > 1 or before.attempt is None:
        return
    asked = next(iter(wished), None)
    if asked is not None:
        if isinstance(asked, int | float) and abs(pause - asked * SECOND) > ROUNDING:
            yield "I7", f"the retry was asked for in {asked} s, and came after {pause} us"
        return
    low, high = bounds(_policy(story, context), before.attempt)
    if before.error.get("error_type") == "lease_expired":
        # The first in a row is followed by another try within two seconds.
        soon = bounds({**_policy(story, context), "kind": "fixed", "base_seconds": 1}, 1)
        if min(low, soon[0]) - ROUNDING <= pause <= min(high, soon[1]) + ROUNDING:
            return
    if not low - ROUNDING <= pause <= high + ROUNDING:
        yield "I7", f"the pause after attempt {before.attempt} was {pause} us: {low} to {high}"


def _policy(story: Story, context: Context) -> dict[str, Any]:
    row = story.last_row or {}
    queue = context.queues.get(row.get("queue", ""), {})
    policy: dict[str, Any] = row.get("backoff") or queue.get("backoff") or DEFAULT
    return policy


def bounds(policy: dict[str, Any], attempt: int) -> tuple[int, int]:
    """Return the shortest and the longest pause in microseconds that a backoff allows."""
    kind, base = policy.get("kind", "exponential"), policy.get("base_seconds", 60)
    jitter = policy.get("jitter", 0.2)
    if kind == "list":
        delays = policy["delay_seconds"]
        pause = delays[min(attempt, len(delays)) - 1]
    elif kind == "exponential":
        pause = base * 2.0 ** min(attempt - 1, 62)
    else:
        pause = base * attempt ** {"fixed": 0, "linear": 1, "quadratic": 2}[kind]
    if kind != "list" or "cap_seconds" in policy:
        pause = min(pause, policy.get("cap_seconds", 86400) / (1 + jitter))
    return int(pause * (1 - jitter) * SECOND), int(pause * (1 + jitter) * SECOND) + 1


def _late(story: Story, context: Context) -> Problems:
    """After the faults a job that is due is granted soon, and a lease that is over is seen.

    Only for jobs that wait for nobody else: no order, no limit, no other job.
    """
    assert context.calm is not None
    row = story.last_row or {}
    if any(
        row.get(name) for name in ("ordering_key", "limit_key", "if_parent_dead", "pipeline")
    ):
        return
    calm = context.calm["wall"]
    bound = round((context.calm["lease"] + context.calm["sweep"]) * SECOND) + SLACK
    for lease in story.leases:
        if lease.grant is None:
            continue
        context.looked["I10"] += 1
        facts = lease.grant.facts
        late = facts["moment"] - max(facts["run_at"], facts["created_at"], calm)
        if late > bound and not story.is_touched:
            yield "I10", f"token {lease.token} was granted {late} us after it was due"
        failed_at = lease.error["failed_at"] if lease.error else 0
        if failed_at - max(calm, _last_until(story, lease)) > bound:
            yield "I10", f"the lease {lease.token} was over and seen only at {failed_at}"
    due_at = row.get("locked_until") or row.get("run_at") or context.dumped_at
    is_waiting = row.get("status") in ("queued", "failed", "running")
    if is_waiting and max(due_at, calm) + bound + TOLERANCE < context.dumped_at:
        yield "I10", f"it is {row['status']} since {due_at}, and nobody takes it"


def _last_until(story: Story, lease: Lease) -> int:
    assert lease.grant is not None
    beats = [e for e in story.said[lease.token] if e.act == "heartbeat"]
    # Of a heartbeat without a figure nobody knows how far it went.
    ends = [e.facts.get("until", FAR) for e in beats if e.outcome in ("ok", "unknown")]
    return int(max(lease.grant.facts["locked_until"], *ends, 0))
