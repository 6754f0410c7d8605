"""Each job's history as a path through the protocol of leases that `model/` explores.

Lease by lease, what was accepted must be possible there, with the same answer: a grant, what
its holder says, its end, the next grant.  Where calls overlap they are put in the order that
suits them best: who keeps a lease spoke as he began, and an end came when it was answered.  Of
an end that nobody was told the rows tell, or what may have been.  And nobody who surely held a
lease may be told that he had lost it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from faults.history.context import TOLERANCE, Context, Problems
from faults.history.events import Event
from faults.history.rules_lease import lasts_until
from faults.history.story import ENDS, FAR, GIVES_BACK, Lease, Row, Story
from model.protocol import (
    CANCELLED,
    DEAD,
    FAILED,
    IDLE,
    NOBODY,
    RUNNING,
    SUCCEEDED,
    WAITING,
    Job,
    Protocol,
    State,
    Wrong,
)  # fmt: skip

STATUS = {"running": RUNNING, "succeeded": SUCCEEDED, "dead": DEAD, "cancelled": CANCELLED}
WORDS = {"finish": "finishes", "fail": "fails", "snooze": "releases", "release": "releases"}
HEARD = frozenset({"finish", "fail", "snooze", "heartbeat"})
LOST = ("RT001", "RT002", "RT003", "RT016")
ENDLESS = 1 << 30


@cache
def _protocol(attempts: int) -> Protocol:
    return Protocol(1, 1, attempts=attempts, claims=ENDLESS, operations=ENDLESS)


class Replay:
    """One job, and the steps that the protocol lets it take."""

    def __init__(self, attempts: int) -> None:
        self._protocol, self._fatal = _protocol(attempts), _protocol(0)
        self._state = State(0, NOBODY, 0, (Job(),), (IDLE,), (), 1)
        self._claims: dict[int, int] = {}

    @property
    def job(self) -> Job:
        """Return the job as the protocol has it."""
        return self._state.jobs[0]

    def know(self, **known: int) -> None:
        """Take over what the protocol does not decide."""
        self._state = self._state._replace(jobs=(self.job._replace(**known),))

    def limit(self, attempts: int) -> None:
        """Let it have so many attempts from now on."""
        self._protocol = _protocol(attempts)

    def grant(self, token: int) -> bool:
        """Grant it; the protocol's clock is that of the tokens."""
        self._state = self._state._replace(now=token)
        word = f"job 0 is claimed with token {token}"
        is_granted = self._step(self._protocol.claim(self._state, 0, 0), word)
        self._claims[token] = self.job.claims
        return is_granted

    def say(self, token: int, word: str, *, fatal: bool = False) -> bool:
        """Let the holder of a token say something."""
        self.know(deadline=-1)  # so that to keep it is a step
        lease = (0, token, self._claims[token])
        protocol = self._fatal if fatal else self._protocol
        return self._step(protocol.report(self._state, 0, lease), f"token {token} {word} job 0")

    def sweep(self, until: int, moment: int) -> bool:
        """Take the job back at a moment."""
        self.know(deadline=until)
        self._state = self._state._replace(now=moment)
        return all(
            self._step(self._protocol.sweep(self._state), word)
            for word in ("a sweep sees job 0", "job 0 is swept")
        )

    def operate(self, word: str) -> bool:
        """Let an operator do something."""
        return self._step(self._protocol.operate(self._state, 0, self.job), f"job 0 is {word}")

    def _step(self, possible: Iterable[tuple[str, State]], word: str) -> bool:
        found = next((state for other, state in possible if other == word), None)
        self._state = found or self._state
        return found is not None


def check(story: Story, context: Context) -> Problems:
    """Yield where the history of a job first leaves the protocol; then nothing is known."""
    if not story.leases or not context.last_dump:
        return
    row = story.last_row or {}
    told = (lease.grant.facts["max_attempts"] for lease in story.leases if lease.grant)
    replay = Replay(next(told, row.get("max_attempts", ENDLESS)))
    try:
        for lease in story.leases:
            context.counts["replayed"] += 1 + len(story.accepted(lease.token))
            problem = _grant(replay, story, lease) or _speak(replay, story, lease)
            if problem:
                yield problem
                return
            yield from _refusals(story, lease, context)
        yield from _row(replay, story, row)
    except Wrong as wrong:
        yield "I6" if "attempt" in str(wrong) else "I3", f"the protocol forbids that {wrong}"


def _grant(replay: Replay, story: Story, lease: Lease) -> tuple[str, str] | None:
    # A job that has left a stage begins anew, like one that is retried.
    before = max((its.token for its in story.leases if its.token < lease.token), default=0)
    if replay.job.status not in WAITING and (story.is_retried or before in story.stages):
        replay.operate("retried")
    if story.stages and lease.grant:
        replay.limit(lease.grant.facts["max_attempts"])
    if story.is_touched and lease.attempt is not None:
        replay.know(attempts=lease.attempt - 1)
    if not replay.grant(lease.token):
        return "I1", f"the protocol has no grant of token {lease.token} then"
    if lease.attempt not in (None, replay.job.attempts):
        told = f"attempt {lease.attempt}, in the protocol {replay.job.attempts}"
        return "I6", f"token {lease.token} was {told}"
    return None


def _speak(replay: Replay, story: Story, lease: Lease) -> tuple[str, str] | None:
    """Let the holder keep the lease, then let it end, then let those speak who came later."""
    accepted = [e for e in story.accepted(lease.token) if not _is_echo(e)]
    ends = [event for event in accepted if event.act in ENDS]
    end = min(ends, key=lambda event: event.ended or FAR) if ends else None
    over = (end.ended if end else None) or FAR
    keeps = sorted(event.began for event in accepted if event.act not in ENDS)
    for began in keeps:
        if began <= over and not replay.say(lease.token, "keeps"):
            return "I3", f"the protocol lets token {lease.token} keep nothing then"
    is_over = (
        _end(replay, story, lease, end) if end or lease.error else _fade(replay, story, lease)
    )
    if not is_over:
        return "I3", f"the protocol has no such end of token {lease.token}"
    if end and end.act == "fail":
        told = end.facts["answer"]["status"]
        if replay.job.status != STATUS.get(told, FAILED):
            return "I6", f"token {lease.token} was told {told}, and the protocol says otherwise"
    if keeps and keeps[-1] > over:
        return "I3", f"the protocol lets token {lease.token} keep nothing any more"
    return None


def _is_echo(event: Event) -> bool:
    """Whether it was told only what had been before."""
    return str(event.facts.get("answer")).startswith("already_")


def _end(replay: Replay, story: Story, lease: Lease, end: Event | None) -> bool:
    """End a lease as its holder was told, or as the row of its failure says."""
    if end is None and lease.error and lease.error.get("error_type") == "lease_expired":
        until = lasts_until(story, lease, FAR)
        return replay.sweep(until, lease.error["failed_at"])
    if end is None or end.act == "fail":
        status = end.facts["answer"]["status"] if end else _status(story, lease)
        is_asked = any(
            event.facts.get("fatal") and event.outcome != "refused"
            for event in story.said.get(lease.token, ())
        )
        if status == "cancelled":
            replay.know(is_cancelled=1)
        return replay.say(lease.token, "fails", fatal=status == "dead" and is_asked)
    if end.act == "snooze" and end.facts["answer"] is None:
        replay.know(is_cancelled=1)
    return replay.say(lease.token, WORDS[end.act])


def _fade(replay: Replay, story: Story, lease: Lease) -> bool:
    """End a lease whose end nobody was told as the row of the job says, or as may have been."""
    status = _status(story, lease)
    if status == "running":
        return True
    if status == "cancelled":
        replay.know(is_cancelled=1)
    if status in ("cancelled", "dead", "failed"):
        return replay.say(lease.token, "fails", fatal=status == "dead")
    if status == "succeeded":
        return replay.say(lease.token, "finishes")
    said = story.said.get(lease.token, ())
    if any(event.act in GIVES_BACK and event.outcome == "unknown" for event in said):
        return replay.say(lease.token, "releases")
    return story.is_retried and replay.operate("retried")


def _status(story: Story, lease: Lease) -> str:
    """Return what the row says of the job, if its last lease was this one."""
    if stage := story.stages.get(lease.token):
        return str(stage["status"])
    row = story.last_row or {}
    return str(row["status"]) if row.get("lease_token") == lease.token else ""


def _refusals(story: Story, lease: Lease, context: Context) -> Problems:
    """Yield who was told that a lease is lost while it surely was not."""
    said = story.said.get(lease.token, ())
    others = [e.began for e in said if e.act in ENDS and e.outcome != "refused"]
    over = min([FAR, *others, *(act.began for act in story.acts)])
    if lease.error:
        failed_at = lease.error["failed_at"] - context.skew - TOLERANCE
        over = min(over, failed_at * 1000)
    since = FAR
    if lease.grant and lease.grant.outcome == "ok":
        since = lease.grant.ended or FAR
    for event in said:
        is_told = event.outcome == "refused" and event.facts.get("error", LOST[1]) in LOST
        if is_told and event.act in HEARD and since < event.began < (event.ended or FAR) < over:
            yield "I12", f"{event.act} of token {lease.token} was refused, and it was live"


def _row(replay: Replay, story: Story, row: Row) -> Problems:
    """Yield in what the row is not what the protocol has come to."""
    ends = (_status(story, story.leases[-1]), row.get("status"))
    if ends == ("succeeded", "cancelled"):  # its stage, and the job
        return
    if row.get("lease_token") != story.leases[-1].token or story.is_retried:
        return
    wanted = STATUS.get(row["status"], WAITING[0])
    if wanted == CANCELLED and replay.job.status in WAITING:
        replay.operate("cancelled")
    status = WAITING[0] if replay.job.status in WAITING else replay.job.status
    if status != wanted:
        yield "I8", f"it is {row['status']} now, and the protocol says otherwise"
