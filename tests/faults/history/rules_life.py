"""I4, I6, I8: a job that was taken in ends once, with its attempts counted, and stays so."""

from __future__ import annotations

from typing import Any

from faults.history.context import Context, Problems
from faults.history.story import ENDED, GIVES_BACK, Lease, Row, Story

# What may change in a row that has ended is nothing; these tell which job it is.
NO_ROW: Row = {}


def check(story: Story, context: Context) -> Problems:
    """Yield what is wrong with the life of a job."""
    yield from _attempts(story, context)
    if not context.last_dump:
        return
    yield from check_place(story, context)
    yield from _end(story, context)
    yield from _changes(story, context)


def _is_born(story: Story) -> bool:
    """Whether the job is known to have been there."""
    told = [*story.enqueues, *story.other]
    return bool(story.leases) or any(event.outcome == "ok" for event in told)


def check_place(story: Story, context: Context) -> Problems:
    """Yield in what a job is not in one place, as it was told."""
    context.looked["I4"] += 1
    made = [e for e in story.enqueues if e.facts["is_new"]]
    if len(story.final) > 1:
        yield "I4", f"it has {len(story.final)} rows: {[place for place, _ in story.final]}"
    if len([e for e in made if e.outcome == "ok"]) > 1:
        yield "I4", "two enqueues were told that it is new"
    if made and all(e.outcome == "undone" for e in made):
        if story.final or story.leases:
            yield "I4", "its enqueue was rolled back, and it was there all the same"
    elif not story.final and _is_born(story):
        yield "I4", "it was taken in, and is gone without a trace"
    elif not made and story.final and not story.other:
        _note_hidden(story.final[0][1], context)
    if context.is_drained and any(place == "jobs" for place, _ in story.final):
        yield "I4", f"it has not ended: {story.final[0][1]['status']}"


def _note_hidden(row: dict[str, Any], context: Context) -> None:
    """Remember a job that nobody was told of, unless a schedule, a run or a rerun made it."""
    key = row.get("idempotency_key") or ""
    if not (row.get("definition") or row.get("pipeline") or key in context.changed_keys):
        context.hidden_jobs[row["job_type"], key] += 1


def _end(story: Story, context: Context) -> Problems:
    """Every end that was told is the one that stands."""
    told = _told_ends(story)
    context.looked["I8"] += len(told)
    if story.is_retried:
        return
    row = story.last_row or NO_ROW
    if row.get("pipeline"):
        yield from _stages(story, told)
        # What is left is the end of the job; a last stage is held against both.
        left = [t for t, stage in story.stages.items() if stage["status"] == "succeeded"]
        told = [end for end in told if end[0] not in left or end == _end_of(row)]
    if len({token for token, _ in told if token}) > 1:
        yield "I4", f"it has ended more than once: {told}"
    for token, status in told:
        if row.get("status") != status:
            yield "I8", f"it ended as {status}, and is {row.get('status', 'gone')} now"
        elif token and row["lease_token"] != token:
            yield "I8", f"token {token} ended it, and its row has {row['lease_token']}"
        if later := [lease.token for lease in story.leases if token and lease.token > token]:
            yield "I8", f"token {token} ended it as {status}, and {later[0]} was granted"
    is_over = row.get("status") == "succeeded"
    if is_over and not any(
        e.act == "finish" and e.outcome in ("ok", "unknown")
        for e in story.said.get(row["lease_token"], ())
    ):
        yield "I4", f"it has succeeded, and token {row['lease_token']} never said so"


def _end_of(row: Row) -> tuple[int, str]:
    return row["lease_token"], row["status"]


def _stages(story: Story, told: list[tuple[int, str]]) -> Problems:
    """Every finish that was told is the end of a stage, and each such end was asked for."""
    for token, status in told:
        if status == "succeeded" and story.stages.get(token, NO_ROW).get("status") != status:
            yield "I8", f"token {token} finished a stage, of which there is no record"
    for token, stage in story.stages.items():
        if stage["status"] == "succeeded" and not any(
            e.act == "finish" and e.outcome in ("ok", "unknown")
            for e in story.said.get(token, ())
        ):
            yield "I4", f"a stage has succeeded, and token {token} never said so"


def _told_ends(story: Story) -> list[tuple[int, str]]:
    """Return the ends that somebody was told of: token and status."""
    found: list[tuple[int, str]] = []
    for token in story.said:
        for event in story.accepted(token):
            answer = event.facts.get("answer")
            if event.act == "finish":
                found.append((token, "succeeded"))
            elif event.act == "fail" and answer and answer["status"] in ENDED:
                found.append((token, answer["status"]))
            elif event.act == "snooze" and answer is None:
                found.append((token, "cancelled"))
    if any(a.outcome == "ok" and a.facts["answer"] == "cancelled" for a in story.acts):
        found.append((0, "cancelled"))
    return found


def _changes(story: Story, context: Context) -> Problems:
    """A row that had ended in one dump is the same in each later one."""
    if story.is_retried or len(story.rows) < 2:
        return
    before: tuple[int, Row] | None = None
    for number, place, row in story.rows:
        if before and number > before[0]:
            context.looked["I8"] += 1
            if before[1] != row:
                changed = [k for k in {*row, *before[1]} if row.get(k) != before[1].get(k)]
                yield "I8", f"it had ended by dump {before[0]}, and has changed: {changed}"
        if place == "finished_jobs":
            before = (number, row)


def _given_back(story: Story, lease: Lease) -> bool:
    """Whether a claim that is over was given back: who says so, unless it failed."""
    return lease.error is None and any(
        e.act in GIVES_BACK and e.outcome in ("ok", "unknown")
        for e in story.said.get(lease.token, ())
    )


def _attempts(story: Story, context: Context) -> Problems:
    """Each claim is one attempt more, unless the one before was given back."""
    limit = story.last_row["max_attempts"] if story.last_row else None
    if story.stages:  # each stage has a limit of its own
        limit = None
    expected = 1
    for number, lease in enumerate(story.leases):
        context.looked["I6"] += 1
        if lease.grant is None and context.last_dump:
            _note_claim(story, lease, context)
        most = lease.grant.facts["max_attempts"] if lease.grant else limit
        if lease.attempt is not None and most is not None and lease.attempt > most:
            yield "I6", f"token {lease.token} was attempt {lease.attempt} of {most}"
        if story.is_touched or not context.last_dump:
            continue
        if lease.attempt is not None and lease.attempt != expected:
            yield "I6", f"token {lease.token} was attempt {lease.attempt} and not {expected}"
        if lease.token in story.stages and not _is_final(story, lease):
            expected = 1
            continue
        is_last = number == len(story.leases) - 1
        if _given_back(story, lease) and not _is_final(story, lease):
            continue
        if not is_last and lease.error is None:
            yield "I6", f"the attempt of token {lease.token} neither failed nor was given back"
        expected = (lease.attempt or expected) + 1
    row = story.last_row
    if row and not story.is_touched and row["attempts"] != expected - 1:
        yield "I6", f"it has {row['attempts']} attempts, and there were {expected - 1}"
    if row and row["attempts"] > row["max_attempts"]:
        yield "I6", f"it has {row['attempts']} attempts of {row['max_attempts']}"


def _is_final(story: Story, lease: Lease) -> bool:
    """Whether this claim runs still, or is the one that ended the job."""
    row = story.last_row or NO_ROW
    return row.get("lease_token") == lease.token and row.get("locked_by") is not None


def _note_claim(story: Story, lease: Lease, context: Context) -> None:
    row = lease.error or story.last_row or NO_ROW
    context.hidden_claims[str(row.get("worker") or row.get("locked_by"))] += 1
