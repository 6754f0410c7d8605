"""What the machine may do, how often, and with what arguments.

Each act is a method of `machine.Machine`.  Jobs and leases are picked by numbers, the newest
first, so that an example stays one when steps before it are left out.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

from model.rows import SECOND
from model.timetable import TEXTS

START = 1_767_225_600 * SECOND  # 2026-01-01
seconds = st.sampled_from([1, 5, 30, 60, 61, 600]).map(lambda n: n * SECOND)
maybe = st.none() | seconds
numbers = st.integers(0, 15)
queues = st.sampled_from(["default", "mail"])
names = st.sampled_from(["s", "t"])
errors = st.sampled_from(["no", "bad"])
BACKOFFS: list[Any] = [
    {"kind": "fixed", "base_seconds": 20},
    {"kind": "linear", "base_seconds": 7, "jitter": 0},
    {"kind": "quadratic", "base_seconds": 3, "jitter": 0.5, "cap_seconds": 20},
    {"kind": "exponential", "base_seconds": 10, "jitter": 0.9, "cap_seconds": 12},
    {"kind": "list", "delay_seconds": [1, 60], "jitter": 0},
]
PLAIN: dict[str, list[Any]] = {
    "queue": ["default", "mail"],
    "job_type": ["t", "u"],
    "payload": [{"n": 1}, {"n": 2}],
    "priority": [-1, 5],
    "delay": [0, 30 * SECOND],
    "max_attempts": [1, 2, 3],
    "lease": [5 * SECOND, 600 * SECOND],
    "backoff": BACKOFFS,
}
RULES: list[dict[str, list[Any]]] = [
    *({}, {}, {}),
    {"idempotency_key": ["a", "b"]},
    {"idempotency_key": ["a", "b"], "unique_for": [5 * SECOND, 60 * SECOND]},
    {
        "idempotency_key": ["a", "b"],
        "on_conflict": ["replace"],
        "max_wait": [None, 60 * SECOND],
    },
    {"idempotency_key": ["a", "b"], "on_conflict": ["rerun"], "max_wait": [None, 5 * SECOND]},
    {
        "idempotency_key": ["a", "b"],
        "on_conflict": ["rerun"],
        "updated_at": [START + n * SECOND for n in range(5)],
    },
    {"ordering_key": ["o"], "skip_dead": [False]},
    {"ordering_key": ["o"], "skip_dead": [False, True]},
    {"ordering_key": ["o"], "idempotency_key": ["a", "b"], "on_conflict": ["keep", "rerun"]},
]


def shapes(count: int) -> list[dict[str, Any]]:
    """Return so many new jobs, always the same and the plainest first: one draw is enough."""
    chance = random.Random(1)
    found = []
    for number in range(count):
        wanted = {**PLAIN, **RULES[number % len(RULES)]}
        job = {"job_type": "t"}
        for name, values in wanted.items():
            if name not in PLAIN or chance.random() < number / count:
                job[name] = chance.choice(values)
        found.append(job)
    return found


SHAPES = shapes(400)
new_jobs = st.integers(0, len(SHAPES) - 1).map(lambda n: SHAPES[n])
WRONG: list[dict[str, Any]] = [
    {"function": "enqueue", "job_type": None},
    {"function": "enqueue", "job_type": "t", "priority": 40000},
    {"function": "enqueue", "job_type": "t", "max_attempts": 0},
    {"function": "enqueue", "job_type": "t", "payload": [1]},
    {"function": "enqueue", "job_type": "t", "on_conflict": "rerun"},
    {"function": "enqueue_many", "jobs": [{"job_type": "t"}, {"job_type": "t", "x": 1}]},
    {"function": "claim_jobs", "worker": "w", "max_jobs": 0},
    {"function": "claim_jobs", "worker": None},
    {"function": "claim_jobs", "worker": "w", "queues": []},
    {"function": "finish_job", "job_id": None, "lease_token": 1},
    {"function": "finish_jobs", "job_ids": [1, 2], "lease_tokens": [1]},
    {"function": "release_jobs", "job_ids": [1], "lease_tokens": [None]},
    {"function": "heartbeat", "job_id": 1, "lease_token": None},
    {"function": "sweep_stale_leases", "max_jobs": 0},
    {"function": "retry_job", "job_id": 1, "is_forced": None},
    {"function": "cancel_job", "job_id": None},
    {"function": "set_queue", "queue": "", "lease": SECOND},
    {"function": "set_queue", "queue": "mail", "backoff": {"kind": "none"}},
]
CHANGES = [
    *({"priority": n} for n in (0, -1, 5)),
    *({"delay": n * SECOND} for n in (0, 10)),
    *({"run_at": START + n * SECOND} for n in (0, 100)),
]
SETTINGS: list[dict[str, Any]] = [
    {},
    *({"lease": n * SECOND} for n in (5, 90)),
    *({"max_attempts": n} for n in (1, 3)),
    *({"backoff": rule} for rule in BACKOFFS),
]
ACTS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "enqueue": {"job": new_jobs},
    "enqueue_many": {"jobs": st.lists(new_jobs, min_size=1, max_size=3)},
    "enqueue_after": {
        "picks": st.lists(numbers, max_size=2),
        "rule": st.sampled_from(["cancel", "run", "wait"]),
    },
    "claim": {
        "worker": st.sampled_from(["w1", "w2"]),
        "queues": st.sampled_from([["default", "mail"], ["default"], ["mail"]]),
        "max_jobs": st.sampled_from([10, 1, 2]),
        "lease": maybe,
        "job_types": st.sampled_from([None, None, None, ["t"], ["u"]]),
    },
    "finish": {"pick": numbers, "result": st.sampled_from([None, {"ok": 1}])},
    "finish_many": {"picks": st.lists(numbers, max_size=4), "has_results": st.booleans()},
    "finish_and_claim": {
        "picks": st.lists(numbers, max_size=3),
        "kept": st.lists(numbers, max_size=3),
        "lease": maybe,
    },
    "fail": {
        "pick": numbers,
        "error": errors,
        "retry_in": st.none() | maybe,
        "is_fatal": st.sampled_from([False, False, False, True]),
    },
    "snooze": {"pick": numbers, "delay": seconds},
    "release": {"picks": st.lists(numbers, max_size=3)},
    "heartbeat": {"pick": numbers, "lease": maybe},
    "heartbeat_many": {"picks": st.lists(numbers, max_size=4), "lease": maybe},
    "progress": {
        "pick": numbers,
        "percent": st.sampled_from([0, 50, 100]),
        "message": st.none() | errors,
    },
    "upkeep": {"max_jobs": st.sampled_from([None, None, None, 1000, 1, 2])},
    "retry": {"pick": numbers, "is_forced": st.booleans()},
    "cancel": {"pick": numbers, "reason": st.none() | errors},
    "change": {"pick": numbers, "change": st.sampled_from(CHANGES)},
    "brake": {
        "function": st.sampled_from(["resume_queue", "pause_queue"]),
        "queue": queues,
        "reason": st.none() | errors,
    },
    "set_queue": {
        "settings": st.sampled_from(SETTINGS),
        "queue": queues,
        "is_reset": st.booleans(),
    },
    "schedule": {
        "name": names,
        "schedule": st.sampled_from([*TEXTS]),
        "job_type": st.sampled_from(["t", "u"]),
        "catch_up": st.sampled_from(["one", "skip", "all"]),
        "overlap": st.sampled_from(["allow", "skip", "queue"]),
    },
    "operate_schedule": {
        "name": names,
        "function": st.sampled_from(
            ["run_schedule_now", "disable_schedule", "enable_schedule", "unschedule_job"]
        ),
    },
    "resume_key": {"ordering_key": st.sampled_from(["o", "schedule:s"])},
    "effect": {
        "function": st.sampled_from(
            ["record_effect", "record_effect", "complete_effect", "withdraw_effect"]
        ),
        "key": st.sampled_from(["k", "l"]),
        "pick": numbers,
        "word": st.sampled_from(["skip", "again"]),
    },
    "ask_wrongly": {"wrong": st.sampled_from(WRONG)},
    "let_time_pass": {"step": st.sampled_from([0.001, 1, 1, 10, 30, 61, 61, 400, 4000, -3])},
    "begin": {},
    "end": {"is_committed": st.booleans()},
}
REPORTS = {
    "finish", "finish_many", "finish_and_claim", "fail", "snooze", "release", "heartbeat",
    "heartbeat_many", "progress", "effect",
}  # fmt: skip
OPERATES = {"retry", "cancel", "change"}
WORK = (
    ["enqueue"] * 4 + ["enqueue_many"] * 2 + ["claim"] * 8 + ["finish"] * 3 + ["fail"] * 5
    + ["finish_many", "finish_and_claim", "snooze", "release", "heartbeat"] * 2
    + ["heartbeat_many", "progress", "resume_key", "brake", "set_queue", "begin"]
    + ["ask_wrongly", "enqueue_after"] + ["effect"] * 3
    + ["upkeep"] * 3 + ["let_time_pass"] * 7 + ["retry", "cancel", "change", "end"] * 3
)  # fmt: skip
PLAN = (
    ["schedule", "operate_schedule", "let_time_pass"] * 3 + ["upkeep"] * 4 + ["claim", "finish"]
)
CAUSE = ["effect"] * 5 + ["enqueue_many", "claim", "let_time_pass"] * 2 + ["finish", "upkeep"]
QUEUE_UP = ["enqueue_many", "claim", "fail", "let_time_pass"] * 2 + [
    "retry",
    "cancel",
    "finish",
    "resume_key",
    "upkeep",
    "snooze",
]


def calls_of(acts: list[str]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """Draw one of the acts with its arguments; what is there twice comes twice as often."""
    given = {act: st.tuples(st.just(act), st.fixed_dictionaries(ACTS[act])) for act in {*acts}}
    return st.sampled_from(acts).flatmap(lambda act: given[act])
