"""What workers and operators do at random, and what is true of jobs whatever the feature."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from model.storm import Call, History, Player, Step, Violation

BACKOFF = {"kind": "fixed", "base_seconds": 0.01, "jitter": 0}
LEASES = ("20 ms", "300 ms")
LIVE = {"queued", "failed", "running"}
ENDED = {"succeeded", "dead", "cancelled"}
# A job that waited for others starts, by the call that makes it possible or by maintenance.
OPENED = ("blocked", "queued")
ENQUEUED = {
    OPENED,
    ("none", "queued"),
    ("none", "blocked"),
    ("queued", "queued"),
    ("failed", "failed"),
    ("running", "running"),
}
RERUN = ("none", "queued")
# A job that waits already becomes the run that was asked for while another had it.
REWRITTEN = {("queued", "queued"), ("failed", "failed")}
FAILED = {("running", "failed"), ("running", "dead"), ("running", "cancelled"), RERUN, OPENED}
GIVEN_BACK = {("running", "queued"), ("running", "cancelled"), RERUN, OPENED}
# What a call may do to a job: its status before and after.
STEPS = {
    "enqueue": ENQUEUED,
    "enqueue_many": ENQUEUED,
    "claim_jobs": {(status, "running") for status in ("queued", "failed")},
    "finish_job": {("running", "succeeded"), RERUN, OPENED},
    "finish_jobs": {("running", "succeeded"), RERUN, OPENED},
    "fail_job": FAILED,
    "sweep_stale_leases": FAILED,
    "tick": FAILED | {("blocked", "cancelled")},
    "resume_ordering_key": {OPENED},
    "snooze_job": GIVEN_BACK,
    "release_jobs": GIVEN_BACK,
    "cancel_job": {(status, "cancelled") for status in ("blocked", "queued", "failed")}
    | {("running", "running"), OPENED},
    "retry_job": {(status, "queued") for status in LIVE | ENDED}
    | {(status, "blocked") for status in ENDED | {"blocked"}}
    | {OPENED},
}
LOST = {"RT002", "RT003"}
# What a call may be refused with; everything else, above all a deadlock, is a violation.
REFUSALS = {
    "finish_job": LOST,
    "fail_job": LOST,
    "snooze_job": LOST,
    "cancel_job": {"RT003"},
    "retry_job": {"RT007", "RT008"},
    "resume_ordering_key": {"RT012"},
    "record_effect": {*LOST, "RT010"},
    "complete_effect": {*LOST, "RT011"},
    "withdraw_effect": {*LOST, "RT011"},
}


def ask(
    player: Player,
    new_job: Callable[[Player], dict[str, Any]],
    most: int,
    end: Callable[[Player], None],
) -> None:
    """Enqueue a job; where more than so many are live, end some instead."""
    if _are_more(player, most):
        return end(player)
    with player.transaction(is_committed=player.chance(0.8)):
        player.call("enqueue", **new_job(player))
    return None


def ask_many(
    player: Player,
    new_job: Callable[[Player], dict[str, Any]],
    most: int,
    end: Callable[[Player], None],
) -> None:
    """Enqueue two to five jobs in one call; where more than so many are live, end some."""
    if _are_more(player, most):
        return end(player)
    jobs = [new_job(player) for _ in range(player.random.randint(2, 5))]
    with player.transaction(is_committed=player.chance(0.8)):
        player.call("enqueue_many", jobs=jobs)
    return None


def _are_more(player: Player, most: int) -> bool:
    row = player.connection.execute("select count(*) as jobs from rota.jobs").fetchone()
    return int((row or {})["jobs"]) > most


def claim(player: Player, **arguments: Any) -> None:
    """Take a few jobs, and remember them; more than five are forgotten, as by a crash."""
    call = player.call(
        "claim_jobs",
        worker=player.name,
        max_jobs=player.random.randint(1, 3),
        lease=player.random.choice(LEASES),
        **arguments,
    )
    held = player.memory.setdefault("held", [])
    held += [(row["job_id"], row["lease_token"]) for row in call.rows]
    player.memory.setdefault("seen", []).extend(row["job_id"] for row in call.rows)
    del held[:-5], player.memory["seen"][:-20]


def end(player: Player) -> None:
    """Speak for a job that was claimed, if it is still ours."""
    held = player.memory.get("held", [])
    if not held:
        return claim(player)
    job_id, token = held.pop(player.random.randrange(len(held)))
    if player.chance(0.1):
        held.append((job_id, token))  # and once more later
    one = {"job_id": job_id, "lease_token": token}
    many = {"job_ids": [job_id], "lease_tokens": [token]}
    how = player.random.choices(
        ["finish_job", "finish_jobs", "fail_job", "fatal", "release_jobs", "snooze_job"],
        [40, 15, 20, 5, 15, 5],
    )[0]
    if how in ("finish_job", "finish_jobs"):
        with player.transaction(is_committed=player.chance(0.95)):
            player.call(how, **(one if how == "finish_job" else many))
    elif how == "snooze_job":
        player.call(how, **one, delay="10 ms")
    elif how == "release_jobs":
        player.call(how, **many)
    else:
        player.call("fail_job", **one, error=how, fatal=how == "fatal")
    return None


def sweep(player: Player) -> None:
    player.call("sweep_stale_leases")


def operate(player: Player) -> None:
    """Cancel or retry a job that was seen."""
    seen = player.memory.get("seen", [])
    if not seen:
        return
    job_id = player.random.choice(seen)
    if player.chance(0.5):
        player.call("cancel_job", job_id=job_id)
    else:
        player.call("retry_job", job_id=job_id, force=player.chance(0.3))


def drain(player: Player, **arguments: Any) -> bool:
    """Finish what can be claimed; return whether there is more to come."""
    time.sleep(0.02)  # until leases and backoffs are over
    player.call("tick")
    last = player.call("claim_jobs", worker="last", max_jobs=100, lease="1 h", **arguments)
    for row in last.rows:
        player.call("finish_job", job_id=row["job_id"], lease_token=row["lease_token"])
    left = player.connection.execute(
        "select exists (select from rota.jobs) or exists (select from rota.reruns) as is_so"
    )
    return bool((left.fetchone() or {})["is_so"])


def is_start(step: Step) -> bool:
    """Whether a job that waited for others stopped to."""
    return step.statuses[0] == "blocked" and step.statuses[1] in LIVE


def check_jobs(history: History, refusals: dict[str, set[str]] = REFUSALS) -> list[Violation]:
    """What is true of every call and every job."""
    return [
        *_check_changes(history),
        *(
            found
            for call in history.calls.values()
            for found in _check_call(history, call, refusals)
        ),
        *(
            found
            for steps in history.steps_by_job.values()
            for found in _check_job(history, steps)
        ),
    ]


def _check_changes(history: History) -> Iterator[Violation]:
    for change in history.changes:
        call = history.calls.get(change.call)
        if call is None:
            yield Violation(f"change without a call: {change}")
        elif not call.is_done:
            yield Violation(f"refused or rolled back, and yet: {change}", call=call.name)


def _check_call(
    history: History, call: Call, refusals: dict[str, set[str]]
) -> Iterator[Violation]:
    steps = history.steps_by_call.get(call.name, [])
    if call.error and call.error not in refusals.get(call.function, set()):
        problem = f"unexpected error {call.error}: {call}\n{call.detail}"
        yield Violation(problem, call=call.name)
    if not call.is_done:
        return
    if call.function == "claim_jobs":
        told = {row["job_id"]: row["lease_token"] for row in call.rows}
        given = {
            step.job_id: step.after["lease_token"]
            for step in steps
            if step.after and step.after["status"] == "running"
        }
        if told != given:
            yield Violation(f"was told {told} and given {given}", call=call.name)
    elif call.function in ("finish_job", "finish_jobs"):
        accepted = "finished" in call.rows[0].values()
        if accepted != any(step.statuses == ("running", "succeeded") for step in steps):
            yield Violation(f"was told {call.rows} and did {steps}", call=call.name)
    token = (call.arguments.get("lease_tokens") or [call.arguments.get("lease_token")])[0]
    for step in steps:
        if not token or step.before is None or step.statuses == OPENED or _is_placed(step):
            continue
        if step.before["lease_token"] != token:
            yield Violation(
                f"ended job {step.job_id} with the lease of another",
                history.keys[step.job_id] or "",
                call.name,
            )


def _check_job(history: History, steps: list[Step]) -> Iterator[Violation]:
    last: dict[str, Any] | None = None
    for step in steps:
        problem = _problem_of(history, step, last)
        if problem:
            problem = f"job {step.job_id} {problem}"
            yield Violation(problem, history.keys[step.job_id] or "", step.call.name)
        last = step.after


PLACE = {"hold", "own_lane", "own_place", "opened_for"}


def _is_placed(step: Step) -> bool:
    """Whether a waiting job took another place, or was held or let in, and nothing else."""
    before, after = step.before or {}, step.after or {}
    changed = {column for column in before if before[column] != after.get(column)}
    return bool(before and after) and before["status"] != "running" and changed <= PLACE


def _was_asked_meanwhile(history: History, step: Step) -> bool:
    """Whether the run that a call began was asked for while that call went on."""
    return step.statuses == RERUN and any(
        change.place == "reruns"
        and change.new is not None
        and step.after is not None
        # A row that only says what was seen has none.
        and change.new["job"].get("payload") == step.after["payload"]
        and history.calls[change.call].ended > step.call.began
        for change in history.changes
    )


def _problem_of(history: History, step: Step, last: dict[str, Any] | None) -> str:
    before, after, function = step.before, step.after, step.call.function
    allowed = STEPS.get(function, set())
    if function == "tick" and before and after and before["payload"] != after["payload"]:
        allowed = allowed | REWRITTEN
    if function == "cancel_job" and _was_asked_meanwhile(history, step):
        allowed = allowed | {RERUN}  # it takes only what was asked for before it
    if not _is_placed(step) and step.statuses not in allowed:
        return f"went by {function} from {' to '.join(step.statuses)}"
    if _differs(before, last):
        return f"changed unseen: left as {last}, found as {before}"
    if not before or not after:
        return ""
    grows = after["lease_token"] - before["lease_token"]
    is_claim = function == "claim_jobs" and after["status"] == "running"
    if grows < 0 or (is_claim and grows == 0):
        return "got a token that is not newer"
    if is_claim and _time(before["run_at"]) > step.made_at:
        return "was claimed too early"
    is_swept = function in ("sweep_stale_leases", "tick") and before["status"] == "running"
    if is_swept and _time(before["locked_until"]) > step.made_at:
        return "was swept within its lease"
    return ""


def _differs(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    one, other = one or {}, other or {}
    return any(one[name] != other[name] for name in one.keys() & other.keys())


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
