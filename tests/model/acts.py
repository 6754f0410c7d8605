"""What the machine may do, how often, and with what arguments.

Each act is a method of `machine.Machine`.  Jobs and leases are picked by numbers, the newest
first, so that an example stays one when steps before it are left out.

A history is of one kind, and most of its calls are.  A call is two draws, whatever it is: its
act, and a number that stands for all of its arguments.  For Hypothesis a draw costs about as
much as a call of the database.
"""

from __future__ import annotations

import random
from typing import Any

from model.rows import SECOND
from model.timetable import TEXTS

START = 1_767_225_600 * SECOND  # 2026-01-01
SECONDS = [n * SECOND for n in (1, 5, 30, 60, 61, 600)]
MAYBE = [*[None] * 6, *SECONDS]
PICKS = [*range(16)]
QUEUES = ["default", "mail"]
NAMES = ["s", "t"]
ERRORS = ["no", "bad"]
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
    {"idempotency_key": ["a"], "unique_for": [60 * SECOND, 600 * SECOND]},
    {"limit_key": ["c:1", "c:2", "k"]},
    {"limit_key": ["c:1"], "ordering_key": ["o", "p"]},
]
CROWD: list[dict[str, Any]] = [
    {"job_type": "t", "limit_key": "c:1"},
    {"job_type": "u", "limit_key": "c:1", "priority": -1},
    {"job_type": "t", "limit_key": "c:2", "queue": "mail"},
    {"job_type": "t", "limit_key": "k", "delay": 10 * SECOND},
    {"job_type": "u"},
]
WHOSE = [
    *({"queue": queue} for queue in ("default", "mail")),
    *({"limit_key": key} for key in ("c:1", "c:*", "c:2", "k", "c:*")),
    *({"job_type": job_type} for job_type in ("t", "u")),
]
BOUNDS: list[dict[str, Any]] = [
    *({"max_running": n} for n in (1, 2, 0, 3)),
    *({"max_starts": n, "per": 10 * SECOND} for n in (1, 3)),
    {"max_starts": 1, "per": 30 * SECOND, "burst": 2},
    {"max_running": 1, "max_starts": 2},
    *({"reset": True}, {"reset": True, "max_running": 2}),
]


def shapes(
    first: dict[str, Any], plain: dict[str, list[Any]], rules: list[dict[str, list[Any]]]
) -> list[dict[str, Any]]:
    """Return 400 things to make, always the same and the plainest first: one draw is enough."""
    chance, count = random.Random(1), 400
    found = []
    for number in range(count):
        thing = {**first}
        for name, values in {**plain, **rules[number % len(rules)]}.items():
            if name not in plain or chance.random() < number / count:
                thing[name] = chance.choice(values)
        found.append(thing)
    return found


def lists(values: list[Any], least: int, most: int, count: int) -> list[list[Any]]:
    """Return so many lists of values, always the same, with the short ones first."""
    chance = random.Random(2)
    found = [chance.choices(values, k=chance.randint(least, most)) for _ in range(count)]
    return sorted(found, key=len)


SHAPES = shapes({"job_type": "t"}, PLAIN, RULES)
RUNS = shapes(
    {},
    {name: PLAIN[name] for name in ("payload", "priority", "delay")}
    | {"stage": ["a", "b", "m", "z"]},
    [{}, *[{"ordering_key": ["o"]}] * 4]
    + [rule for rule in RULES if not {"on_conflict", "updated_at"} & {*rule}],
)
NEXT = [*[None] * 12, "end", "b", "m", "z"]
A, B, M = ({"stage": stage, "job_type": "t"} for stage in "abm")
STAGES: list[list[dict[str, Any]]] = [
    *([A, B], [A, M, B], [B, A], [M], [B]),
    [A, {**M, "queue": "mail", "priority": -1, "max_attempts": 1}, B],
    [{**A, "lease": 5 * SECOND, "backoff": BACKOFFS[0]}, {**B, "job_type": "u"}],
]
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
    {"function": "retry_job", "job_id": 1, "force": None},
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
ENDINGS: list[dict[str, Any]] = [
    {"outcome": "succeeded"},
    {"outcome": "succeeded", "result": {"n": 1}},
    *({"outcome": "failed", "error": error} for error in ERRORS),
    {"outcome": "failed", "error": ERRORS[0], "retry_in": 5},
    {"outcome": "failed", "error": ERRORS[0], "fatal": True},
    *({"outcome": "snoozed", "delay": seconds} for seconds in (0, 30)),
    {"outcome": "released"},
    # One that is refused stops no other.
    {"outcome": "failed"},
    {"outcome": "snoozed", "delay": -1},
]
ACTS: dict[str, dict[str, list[Any]]] = {
    "enqueue": {"job": SHAPES},
    "enqueue_many": {"jobs": lists(SHAPES, 1, 3, 20_000)},
    "enqueue_after": {
        "picks": lists(PICKS, 0, 2, 200),
        "rule": ["cancel", "run", "wait"],
        "blocks": [None, None, *PICKS],
        "more": [{}, {}, {"ordering_key": "o"}, {"idempotency_key": "a"}],
        "is_batch": [False, True],
    },
    "claim": {
        "worker": ["w1", "w2"],
        "queues": [["default", "mail"], ["default"], ["mail"]],
        "max_jobs": [10, 1, 2],
        "lease": MAYBE,
        "job_types": [None, None, None, ["t"], ["u"]],
    },
    "finish": {"pick": PICKS, "result": [None, {"ok": 1}], "next_stage": NEXT},
    "finish_many": {
        "picks": lists(PICKS, 0, 4, 2000),
        "has_results": [False, True],
        "next_stages": lists(NEXT, 4, 4, 200),
    },
    "finish_and_claim": {
        "picks": lists(PICKS, 0, 3, 500),
        "kept": lists(PICKS, 0, 3, 500),
        "lease": MAYBE,
    },
    "end_many": {
        "picks": lists(PICKS, 0, 4, 2000),
        "kinds": lists(ENDINGS, 4, 4, 2000),
    },
    "fail": {
        "pick": PICKS,
        "error": ERRORS,
        "retry_in": [*[None] * 6, *MAYBE],
        "fatal": [False, False, False, True],
    },
    "snooze": {"pick": PICKS, "delay": SECONDS},
    "release": {"picks": lists(PICKS, 0, 3, 2000)},
    "heartbeat": {"pick": PICKS, "lease": MAYBE},
    "heartbeat_many": {"picks": lists(PICKS, 0, 4, 2000), "lease": MAYBE},
    "progress": {"pick": PICKS, "percent": [0, 50, 100], "message": [None, None, *ERRORS]},
    "maintenance": {"max_jobs": [None, None, None, 1000, 1, 2]},
    "retry": {"pick": PICKS, "force": [False, True]},
    "cancel": {"pick": PICKS, "reason": [None, None, *ERRORS]},
    "change": {"pick": PICKS, "change": CHANGES},
    "brake": {
        "function": ["resume_queue", "resume_all", "pause_queue", "pause_all"],
        "queue": QUEUES,
        "reason": [None, None, *ERRORS],
    },
    "set_queue": {"settings": SETTINGS, "queue": QUEUES, "reset": [False, True]},
    "schedule": {
        "name": NAMES,
        "schedule": [*TEXTS],
        "job_type": ["t", "u"],
        "catch_up": ["one", "skip", "all"],
        "overlap": ["allow", "skip", "queue"],
    },
    "operate_schedule": {
        "name": NAMES,
        "function": [
            "run_schedule_now",
            "disable_schedule",
            "enable_schedule",
            "unschedule_job",
        ],
    },
    "limit": {"whose": WHOSE, "bound": BOUNDS},
    "settle": {},
    "crowd_in": {"jobs": lists(CROWD, 1, 9, 1000)},
    "define": {"stages": STAGES},
    "drop": {},
    "start": {"given": RUNS},
    "restart_pipeline": {"pick": PICKS, "stage": ["b", "b", "a", "m", "z"]},
    "resume_ordering_key": {"ordering_key": ["o", "schedule:s"]},
    "effect": {
        "function": [
            "record_effect",
            "record_effect",
            "record_effect",
            "complete_effect",
            "withdraw_effect",
            "settle_effect",
        ],
        "key": ["k", "l"],
        "pick": PICKS,
        "word": ["skip", "again"],
    },
    "ask_wrongly": {"wrong": WRONG},
    "let_time_pass": {"step": [0.001, 1, 1, 10, 30, 61, 61, 400, 4000, -3]},
    "begin": {},
    "end": {"is_committed": [False, True]},
}
MOST = 2**24 - 1  # of larger numbers Hypothesis draws mostly the small ones
REPORTS = {
    "finish", "finish_many", "finish_and_claim", "end_many", "fail", "snooze", "release",
    "heartbeat", "heartbeat_many", "progress", "effect",
}  # fmt: skip
OPERATES = {"retry", "cancel", "change", "restart_pipeline"}
WORK = (
    ["enqueue"] * 4 + ["enqueue_many"] * 2 + ["claim"] * 8 + ["finish"] * 3 + ["fail"] * 5
    + ["finish_many", "finish_and_claim", "snooze", "release", "heartbeat"] * 2
    + ["end_many"] * 2
    + ["heartbeat_many", "progress", "resume_ordering_key", "brake", "set_queue", "begin"]
    + ["ask_wrongly", "enqueue_after"] + ["effect"] * 3
    + ["maintenance"] * 3 + ["let_time_pass"] * 7 + ["retry", "cancel", "change", "end"] * 3
)  # fmt: skip
PLAN = (
    ["schedule", "operate_schedule", "let_time_pass"] * 3
    + ["maintenance"] * 4
    + ["claim", "finish"]
)
CAUSE = (
    ["effect"] * 5 + ["enqueue_many", "claim", "let_time_pass"] * 2 + ["finish", "maintenance"]
)
PASS = (
    ["define"] * 2 + ["drop", "resume_ordering_key", "maintenance", "snooze", "finish_many"]
    + ["begin", "end"] + ["start", "claim", "finish"] * 5 + ["fail", "enqueue_after"] * 3
    + ["cancel", "retry", "restart_pipeline", "let_time_pass"] * 2 + ["limit", "settle"]
)  # fmt: skip
LIMIT = (
    ["limit", "finish", "let_time_pass", "crowd_in"] * 4 + ["settle"] * 3 + ["claim"] * 8
    + ["fail", "finish_many", "finish_and_claim", "maintenance", "retry", "cancel", "end"] * 2
    + ["snooze", "release", "begin", "brake", "change"]
)  # fmt: skip
QUEUE_UP = ["enqueue_many", "claim", "fail", "let_time_pass"] * 2 + [
    "retry",
    "cancel",
    "finish",
    "resume_ordering_key",
    "maintenance",
    "snooze",
]


KINDS = {
    "work": WORK, "plan": PLAN, "cause": CAUSE, "queue up": QUEUE_UP, "pass": PASS,
    "limit": LIMIT,
}  # fmt: skip
EVERYTHING = [act for kind in KINDS.values() for act in dict.fromkeys(kind)]


def call_of(kind: str, act: int, number: int) -> tuple[str, dict[str, Any]]:
    """Return an act, mostly of that kind, with the arguments that a number stands for.

    For 0 all are the first; what is there twice comes twice as often.
    """
    acts = EVERYTHING if act % 4 == 3 else KINDS[kind]
    name = acts[act // 4 % len(acts)]
    given = {}
    for argument, values in ACTS[name].items():
        number, which = divmod(number, len(values))
        given[argument] = values[which]
    return name, given
