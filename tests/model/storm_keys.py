"""Idempotency keys: kept, replaced, rerun, versioned, unique for a time, in batches.

The model is one key's life, told by the changes in their order.  `owed` is the payload that
its next claim must carry, `noted` those of all runs that were asked for while one was running:
rows that lock no job, so their order among its changes is not told.  After each of them the key
is claimed once more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from model import storm_work
from model.storm import Call, History, Player, Step, Violation
from model.storm_work import BACKOFF, LIVE

KEYS = 6
STEPS_OF_A_KEY = 100
ASKING = {"enqueue", "enqueue_many"}
RULES = {"on_conflict", "updated_at", "unique_for"}


class Keys:
    """The feature; see the form in storm.py."""

    name = "keys"
    places = ("jobs", "finished_jobs", "idempotency_keys", "reruns")

    def setup(self, db: psycopg.Connection[Any]) -> None:
        pass

    def step(self, player: Player) -> None:
        steps = [ask, ask_many, storm_work.claim, storm_work.end]
        steps += [storm_work.sweep, storm_work.operate]
        player.random.choices(steps, [30, 10, 22, 26, 6, 6])[0](player)

    def drain(self, player: Player) -> bool:
        return storm_work.drain(player)

    def check(self, history: History) -> list[Violation]:
        by_key: dict[str, list[Step]] = defaultdict(list)
        for step in history.steps:
            by_key[history.keys[step.job_id]].append(step)
        return [
            *storm_work.check_jobs(history),
            *(
                found
                for key, steps in by_key.items()
                for found in check_life(key, steps, list(_requests(history, key)))
            ),
            *(
                found
                for call in history.calls.values()
                for found in check_answer(history, call)
            ),
            *check_memory(history),
        ]


FEATURE = Keys()


def new_job(player: Player) -> dict[str, Any]:
    """Return the arguments of a new job for one of the keys of these days."""
    number = player.memory["asked"] = player.memory.get("asked", 0) + 1
    key = player.random.randrange(KEYS)
    job: dict[str, Any] = {
        "job_type": "t",
        "idempotency_key": f"k{key}.{player.steps // STEPS_OF_A_KEY}",
        "payload": {"n": f"{player.name}.{number}"},
        "max_attempts": 3,
        "backoff": BACKOFF,
    }
    # A key is unique for a time or versioned, not both.
    special = "unique" if key % 2 else "versioned"
    rule = player.random.choice(["keep", "replace", "rerun", special])
    if rule == "unique":
        job["unique_for"] = f"{player.random.randint(1, 200)} ms"
    elif rule == "versioned":
        moment = datetime.now(UTC) + timedelta(seconds=player.random.uniform(-0.05, 0.05))
        job |= {"on_conflict": "rerun", "updated_at": moment.isoformat()}
    else:
        job["on_conflict"] = rule
    return job


def ask(player: Player) -> None:
    with player.transaction(is_committed=player.chance(0.8)):
        player.call("enqueue", **new_job(player))


def ask_many(player: Player) -> None:
    jobs = [new_job(player) for _ in range(player.random.randint(1, 6))]
    if player.chance(0.3):
        jobs = [{k: v for k, v in job.items() if k not in RULES} for job in jobs]
    with player.transaction(is_committed=player.chance(0.8)):
        player.call("enqueue_many", jobs=jobs)


def asked(call: Call) -> list[dict[str, Any]]:
    """Return the jobs that a call asked for."""
    if call.function == "enqueue":
        return [call.arguments]
    return call.arguments["jobs"] if call.function == "enqueue_many" else []


def _requests(history: History, key: str) -> Iterator[tuple[Call, Any]]:
    """Yield the calls that asked for a run after one of the key, and the payloads."""
    for change in history.changes:
        if change.place != "reruns" or change.old or not change.new or change.new["seen"]:
            continue
        if change.new["job"]["idempotency_key"] == key:
            yield history.calls[change.call], change.new["job"]["payload"]


def check_life(
    key: str, steps: list[Step], requests: list[tuple[Call, Any]]
) -> Iterator[Violation]:
    """One live job at a time; each claim has the newest payload; no noted run is lost."""
    noted = [payload for _, payload in requests]
    live: int | None = None
    owed: Any = None
    for step in steps:
        call, before, after = step.call, step.before or {}, step.after or {}
        was_live, is_live = before.get("status") in LIVE, after.get("status") in LIVE
        payloads = [job["payload"] for job in asked(call) if job["idempotency_key"] == key]
        problem = ""
        if is_live and not was_live:
            if live is not None:
                problem = f"got job {step.job_id} beside job {live}"
            elif not before and after["payload"] not in payloads + noted:
                problem = f"got job {step.job_id}, which nobody asked for"
            live, owed = step.job_id, after["payload"]
        elif live != step.job_id:
            problem = f"had its job {step.job_id} changed, but {live} was the live one"
        elif call.function == "claim_jobs" and after["payload"] != owed:
            problem = f"was owed a run with {owed} and got one with {after['payload']}"
        elif call.function in ASKING and before["status"] == "running":
            problem = "had its running job changed by a producer"
        elif call.function in ASKING:
            owed = after["payload"]
            problem = "" if owed in payloads else f"took {owed}, which was not asked for"
        elif is_live and after["payload"] in noted:
            owed = after["payload"]
        if is_live and not problem and after["payload"] != owed:
            problem = f"waits with {after['payload']} and not with {owed}"
        live = live if is_live or not was_live else None
        if problem:
            yield Violation(problem, key, call.name)
            return
    if live:
        yield Violation(f"is left with job {live}", key)
    for call, payload in requests:
        if call.is_done and not any(
            step.call.function in ("claim_jobs", "cancel_job") and step.call.ended > call.began
            for step in steps
        ):
            yield Violation(f"never ran after {payload} was asked for", key, call.name)


def check_answer(history: History, call: Call) -> Iterator[Violation]:
    """Each asker was told of the job that its rule leads to."""
    jobs = asked(call)
    if not call.is_done or not jobs:
        return
    if len(jobs) != len(call.rows):
        yield Violation(f"was told of {len(call.rows)} jobs and not {len(jobs)}", "", call.name)
    for job, row in zip(jobs, call.rows, strict=False):
        problem = _problem_of(history, call, job, row)
        if problem:
            yield Violation(problem, job["idempotency_key"], call.name)


def _problem_of(history: History, call: Call, job: dict[str, Any], row: dict[str, Any]) -> str:
    key, rule = job["idempotency_key"], job.get("on_conflict", "keep")
    job_id = row["enqueue"] if call.function == "enqueue" else row["job_id"]
    step = next((s for s in history.steps_by_call[call.name] if s.job_id == job_id), None)
    is_new = step is not None and step.before is None
    if history.keys.get(job_id) != key:
        return f"was told of job {job_id}, which is not of this key"
    if row.get("is_new") and not is_new:
        return f"was told that job {job_id} is new"
    if is_new:
        return ""
    if step is not None:
        payloads = [j["payload"] for j in asked(call) if j["idempotency_key"] == key]
        after = step.after or {}
        taken = after["payload"]
        return "" if taken in payloads else f"changed job {job_id} to {taken}"
    if rule == "rerun" and any(noted is call for noted, _ in _requests(history, key)):
        return ""
    if "updated_at" in job:
        return "" if _has_seen(history, call, job) else "was ignored, but is the newest"
    if "unique_for" in job and _was_unique(history, call, key):
        return ""
    if rule == "rerun":
        return "asked for another run, and none was made or noted"
    statuses = {"running"} if rule == "replace" else LIVE
    if not history.might_see(call, job_id, lambda found: found["status"] in statuses):
        return f"was told of job {job_id}, which was not {' or '.join(sorted(statuses))}"
    return ""


def _key_rows(history: History, call: Call, key: str) -> Iterator[dict[str, Any]]:
    """Yield what the memory of the key may have been until the call ended."""
    for change in history.memory[key]:
        if history.calls[change.call].began > call.ended:
            return
        yield change.new or {}


def _has_seen(history: History, call: Call, job: dict[str, Any]) -> bool:
    mine = datetime.fromisoformat(job["updated_at"])
    seen = (
        row["source_updated_at"] for row in _key_rows(history, call, job["idempotency_key"])
    )
    return any(version and datetime.fromisoformat(version) >= mine for version in seen)


def _was_unique(history: History, call: Call, key: str) -> bool:
    began = datetime.fromtimestamp(call.began_at, UTC)
    until = (row["unique_until"] for row in _key_rows(history, call, key))
    return any(end and datetime.fromisoformat(end) >= began for end in until)


def check_memory(history: History) -> Iterator[Violation]:
    """Versions only grow, and a time for which a key is unique ends before the next begins."""
    version: dict[str, datetime] = {}
    until: dict[str, datetime] = {}
    for change in history.changes:
        row, old = change.new, change.old or {}
        if change.place != "idempotency_keys" or row is None:
            continue
        key = row["idempotency_key"]
        if row["source_updated_at"] != old.get("source_updated_at"):
            mine = datetime.fromisoformat(row["source_updated_at"])
            if key in version and mine <= version[key]:
                yield Violation(f"took version {mine} after {version[key]}", key, change.call)
            version[key] = mine
        if row["unique_until"] and row["unique_until"] != old.get("unique_until"):
            if key in until and change.made_at < until[key]:
                yield Violation(f"made an event before {until[key]}", key, change.call)
            until[key] = datetime.fromisoformat(row["unique_until"])
