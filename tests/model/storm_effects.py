"""Effects: recorded, done, completed or withdrawn, by workers of which some vanish.

To do an effect is here to write down that one did.  The model is the life of one record, told
by its changes in their order: who holds it, by which lease, and whether it is completed.  What
must be true:

1. A record is made, or taken over, by who was told true, and only those may do the effect.
2. It is taken over only with again, and only when the holder's lease is lost.
3. It is completed or withdrawn only by its holder, while that lease is held; then for good.
4. An effect that is always to be skipped when in doubt is done at most once, unless withdrawn.
5. RT010 is told only where another lease may have been held at that time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import psycopg

from model import storm_work
from model.storm import Call, Change, History, Player, Violation
from model.storm_work import BACKOFF

KEYS = 4
STEPS_OF_A_KEY = 100
CALLS = {"record_effect", "complete_effect", "withdraw_effect"}


class Effects:
    """The feature; see the form in storm.py."""

    name = "effects"
    places = ("jobs", "finished_jobs", "effects")

    def setup(self, db: psycopg.Connection[Any]) -> None:
        pass

    def step(self, player: Player) -> None:
        steps = [enqueue, storm_work.claim, record, settle, storm_work.end, storm_work.sweep]
        player.random.choices(steps, [20, 20, 30, 15, 10, 5])[0](player)

    def drain(self, player: Player) -> bool:
        return storm_work.drain(player)

    def check(self, history: History) -> list[Violation]:
        lives: dict[str, list[Change]] = defaultdict(list)
        for change in history.changes:
            if change.place == "effects":
                lives[(change.new or change.old or {})["key"]].append(change)
        calls: dict[str, list[Call]] = defaultdict(list)
        for call in history.calls.values():
            if call.function in CALLS:
                calls[call.arguments["key"]].append(call)
        losses = find_losses(history)
        return [
            *storm_work.check_jobs(history),
            *(
                found
                for key in calls
                for found in (
                    *check_life(history, key, lives[key], losses),
                    *check_answers(history, key, lives[key], calls[key]),
                )
            ),
        ]


FEATURE = Effects()


def enqueue(player: Player) -> None:
    player.call("enqueue", job_type="t", max_attempts=3, backoff=BACKOFF)


def record(player: Player) -> None:
    """Record an effect for a running job, and if told true, do it: remember that we did."""
    held = player.memory.get("held", [])
    if not held:
        return storm_work.claim(player)
    job_id, token = player.random.choice(held)
    key = player.random.randrange(KEYS)
    name = f"{'skip' if key % 2 else 'any'}{key}.{player.steps // STEPS_OF_A_KEY}"
    call = player.call(
        "record_effect",
        scope="mail",
        key=name,
        job_id=job_id,
        lease_token=token,
        if_unknown="skip" if key % 2 else player.random.choice(["skip", "again"]),
    )
    if call.rows and call.rows[0]["record_effect"]:
        player.memory.setdefault("recorded", []).append((name, job_id, token))
        del player.memory["recorded"][:-5]
    return None


def settle(player: Player) -> None:
    """Complete or withdraw one of the last records; now and then one that is none of ours."""
    recorded = player.memory.get("recorded", [])
    if not recorded:
        return record(player)
    name, job_id, token = player.random.choice(recorded[-2:])
    if player.chance(0.1) and player.memory.get("held"):
        job_id, token = player.random.choice(player.memory["held"])
    function = player.random.choice(["complete_effect", "complete_effect", "withdraw_effect"])
    player.call(function, scope="mail", key=name, job_id=job_id, lease_token=token)
    return None


def find_losses(history: History) -> dict[tuple[int, int], int]:
    """Return for each lease the number of the change by which it was lost."""
    losses = {}
    for step in history.steps:
        before, after = step.before or {}, step.after or {}
        if before.get("status") == "running" and (
            after.get("status") != "running" or after["lease_token"] != before["lease_token"]
        ):
            losses[step.job_id, before["lease_token"]] = step.number
    return losses


def check_life(
    history: History, key: str, life: list[Change], losses: dict[tuple[int, int], int]
) -> Iterator[Violation]:
    """Every change of the record is one that its caller may make."""
    last: dict[str, Any] | None = None
    done = 0
    for change in life:
        call = history.calls.get(change.call)
        problem = ""
        if call is None:
            problem = "was changed by nobody"
        elif change.old != last:
            problem = f"was left as {last} and found as {change.old}"
        else:
            problem = _problem_of(call, change, losses)
            done += call.function == "record_effect"
            done -= call.function == "withdraw_effect"
            if key.startswith("skip") and done > 1:
                problem = "was done twice, although it is to be skipped"
        if problem:
            yield Violation(problem, key, change.call)
            return
        last = change.new


def _problem_of(call: Call, change: Change, losses: dict[tuple[int, int], int]) -> str:
    mine = (call.arguments["job_id"], call.arguments["lease_token"])
    old, new, never = change.old, change.new, change.number + 1
    if losses.get(mine, never) < change.number:
        return f"was changed by {mine}, a lease that was lost"
    if old and old["completed_at"]:
        return "was changed after it was completed"
    if call.function == "record_effect":
        if not call.rows or not call.rows[0]["record_effect"]:
            return "was taken by one who was not told so"
        if not new or (new["job_id"], new["lease_token"]) != mine or new["completed_at"]:
            return f"was recorded as {new}"
        if old is None:
            return ""
        holder = (old["job_id"], old["lease_token"])
        if call.arguments["if_unknown"] != "again":
            return "was taken over by one who skips"
        if holder != mine and losses.get(holder, never) > change.number:
            return f"was taken over from {holder}, which held its lease"
        return ""
    if not old or (old["job_id"], old["lease_token"]) != mine:
        return f"was ended by {mine}, which did not hold it"
    is_completed = new is not None and new["completed_at"] is not None
    if is_completed != (call.function == "complete_effect"):
        return f"became {new} by {call.function}"
    return ""


def check_answers(
    history: History, key: str, life: list[Change], calls: list[Call]
) -> Iterator[Violation]:
    """Who was told that something changed has changed it, and a refusal has its reason."""
    for call in calls:
        told = next(iter(call.rows[0].values())) if call.rows else None
        has_changed = any(
            c.place == "effects" for c in history.changes_by_call.get(call.name, [])
        )
        is_told = call.is_done and (
            call.function == "withdraw_effect" or told in (True, "completed")
        )
        if is_told != has_changed:
            yield Violation(f"was told {told or call.error}, {has_changed=}", key, call.name)
        elif call.error == "RT010" and not _may_be_held(history, life, call):
            yield Violation("was told RT010, but no lease was held", key, call.name)
        elif call.is_done and told is False and not _has_record(history, life, call):
            yield Violation("was told to skip what is not recorded", key, call.name)


def _records(history: History, life: list[Change], call: Call) -> Iterator[dict[str, Any]]:
    """Yield what the record may have been during the call."""
    ends = [*(history.calls[change.call].ended for change in life[1:]), call.ended]
    for change, until in zip(life, ends, strict=False):
        if (
            history.calls[change.call].began <= call.ended
            and call.began <= until
            and change.new
        ):
            yield change.new


def _has_record(history: History, life: list[Change], call: Call) -> bool:
    return any(True for _ in _records(history, life, call))


def _may_be_held(history: History, life: list[Change], call: Call) -> bool:
    mine = (call.arguments["job_id"], call.arguments["lease_token"])

    def is_held(record: dict[str, Any]) -> bool:
        holder = (record["job_id"], record["lease_token"])
        return holder != mine and history.might_see(
            call,
            holder[0],
            lambda job: (job["status"], job["lease_token"]) == ("running", holder[1]),
        )

    return any(not r["completed_at"] and is_held(r) for r in _records(history, life, call))
