"""I1, I2, I3: leases do not overlap, tokens grow, and an older one is worth nothing.

When a lease was granted is known to the microsecond, on the clock of the database: its end less
its length.  So whether the one before had ended then is no question of how long calls took.
What was accepted is compared by calls instead: one that began after another was answered came
after it.
"""

from __future__ import annotations

from collections.abc import Callable

from faults.history.context import Context, Problems
from faults.history.events import Event
from faults.history.story import ENDS, FAR, Lease, Story


def check(story: Story, context: Context) -> Problems:
    """Yield what is wrong with the leases of a job."""
    yield from _rows_growth(story)
    if not story.said and not story.leases:
        return
    context.looked["I2"] += len(story.leases)
    yield from _growth(story)
    for number, lease in enumerate(story.leases):
        following = story.leases[number + 1] if number + 1 < len(story.leases) else None
        context.looked["I1"] += 1
        yield from _overlap(story, lease, following)
    for token in story.said:
        context.looked["I3"] += len(story.said[token])
        yield from _stale(story, token)
        yield from _two_ends(story, token)


def _growth(story: Story) -> Problems:
    """Grants in the order of their tokens must be possible in that order."""
    begun = 0
    for token in sorted(story.said):
        grants = [e for e in story.said[token] if e.act == "grant" and e.outcome == "ok"]
        if len(grants) > 1:
            yield "I2", f"token {token} was given out {len(grants)} times"
        for grant in grants:
            if grant.ended is not None and grant.ended < begun:
                yield "I2", f"token {token} was answered before a lower one was asked for"
            begun = max(begun, grant.began)


def _rows_growth(story: Story) -> Problems:
    last = 0
    for number, _, row in story.rows:
        if row["lease_token"] < last:
            yield "I2", f"the row of dump {number} has a lower token than before"
        last = row["lease_token"]
    if story.final and story.leases and story.leases[-1].token > last:
        yield "I2", f"the row has token {last}, but {story.leases[-1].token} was given out"


def lasts_until(story: Story, lease: Lease, before: int) -> int:
    """Return until when a lease lasted at least, as far as was asked for before a moment."""
    if lease.grant is None:
        return 0
    facts = lease.grant.facts
    beats = [
        event
        for event in story.said[lease.token]
        if event.act == "heartbeat"
        and event.outcome in ("ok", "unknown")
        and event.began < before
    ]
    if not beats:
        return int(facts["locked_until"])
    sure = [beat.began for beat in beats if beat.outcome == "ok"]
    # Of those that overlap any may have been the last, and one may also make a lease shorter.
    last = max(sure, default=0)
    ends = [facts["locked_until"]] if not sure else []
    for beat in beats:
        if beat.ended is None or beat.ended >= last:
            least = facts["moment"] + round((beat.facts.get("lease") or 0) * 1_000_000)
            ends.append(beat.facts.get("until", least))
    return int(min(ends))


def _granted_at(lease: Lease) -> int:
    if lease.grant:
        return int(lease.grant.facts["moment"])
    return int(lease.error["started_at"]) if lease.error else 0


def _overlap(story: Story, lease: Lease, following: Lease | None) -> Problems:
    if following and (moment := _granted_at(following)):
        grant = following.grant
        before = grant.ended if grant and grant.outcome == "ok" and grant.ended else FAR
        early = lasts_until(story, lease, before) - moment
        if early > 0 and not story.may_have_ended(lease.token, before):
            yield "I1", f"token {following.token} was granted {early} us before the lease ended"
    if lease.error and lease.error.get("error_type") == "lease_expired":
        # A heartbeat that nobody was refused was before the sweep, so all of them count.
        early = lasts_until(story, lease, FAR) - lease.error["failed_at"]
        if early > 0:
            yield "I1", f"the lease {lease.token} was taken back {early} us before its end"


def _is_new_end(event: Event) -> bool:
    """Whether a call has ended the claim, and not only heard that it had been ended."""
    return event.act in ENDS and event.facts.get("answer") != "already_finished"


def _is_repeat(event: Event, said: list[Event]) -> bool:
    """Whether a call may be the second of its kind, which is told the same again."""
    answer = event.facts.get("answer")
    if event.act == "effect":
        return bool(answer == "already_completed")
    if event.act not in ("finish", "fail") or answer == "finished":
        return False
    return any(
        other is not event
        and other.act == event.act
        and other.outcome in ("ok", "unknown")
        and (event.ended is None or other.began < event.ended)
        and (event.act == "finish" or other.facts.get("answer", answer) == answer)
        for other in said
    )


def _stale(story: Story, token: int) -> Problems:
    """What was accepted for a token must not have been asked after the token was over."""
    accepted = story.accepted(token)
    if not accepted:
        return
    over = _over_since(story, token)
    for event in accepted:
        said = story.said[token]
        if event.facts.get("answer") == "already_finished" and not _is_repeat(event, said):
            yield "I3", f"token {token} is said to have finished, and never was"
        ended, why = over(event)
        if event.began > ended and not _is_repeat(event, said):
            yield "I3", f"{event.act} of token {token} was accepted after {why}"
    error = story.errors.get(token)
    if not error:
        return
    is_swept = error.get("error_type") == "lease_expired"
    for event in accepted:
        if event.act in ENDS and (event.act != "fail" or is_swept):
            yield "I3", f"{event.act} of token {token} was accepted, and the attempt failed"
        length = round((event.facts.get("lease") or 0) * 1_000_000)
        if length and event.facts.get("until", 0) - length > error["failed_at"]:
            yield "I3", f"a heartbeat of token {token} was accepted after it had failed"


def _over_since(story: Story, token: int) -> Callable[[Event], tuple[int, str]]:
    """Return a function that says since when a token was over for a call, and why."""
    later = [
        (grant.ended, f"token {grant.token} was granted")
        for lease in story.leases
        if lease.token > token
        and (grant := lease.grant)
        and grant.outcome == "ok"
        and grant.ended is not None
    ]
    ends = [
        (event, (event.ended, f"its {event.act}"))
        for event in story.accepted(token)
        if _is_new_end(event) and event.ended is not None
    ]

    def over(event: Event) -> tuple[int, str]:
        found = [*later, *(end for other, end in ends if other is not event)]
        return min(found, default=(FAR, ""))

    return over


def _two_ends(story: Story, token: int) -> Problems:
    """Of all that would end a claim one thing was accepted."""
    ends = [e for e in story.accepted(token) if _is_new_end(e)]
    kinds = {(e.act, str(e.facts.get("answer")) if e.act == "fail" else "") for e in ends}
    if len(kinds) > 1:
        told = ", ".join(sorted(act for act, _ in kinds))
        yield "I3", f"of token {token} more than one end was accepted: {told}"
    elif len(ends) > 1 and ends[0].act in ("snooze", "release"):
        yield "I3", f"token {token} was given back {len(ends)} times"
    elif len([e for e in ends if e.facts.get("answer") == "finished"]) > 1:
        yield "I3", f"token {token} has finished twice"
