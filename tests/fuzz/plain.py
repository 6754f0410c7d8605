"""Values that callers do send, by the names of arguments; they speak of what the world has.

A name has a meaning: a schedule is not any text, and a lease token goes with its job (which
calls.py sees to).  The members of jobs and stages are JSON texts.
"""

from __future__ import annotations

from fuzz.hostile import SCHEDULES, ZONES, quoted


def texts(*values: str) -> list[str]:
    return [quoted(value) for value in values]


def jsons(*values: str) -> list[str]:
    return [quoted(value, "jsonb") for value in values]


def spans(*values: str) -> list[str]:
    return [quoted(value, "interval") for value in values]


def numbers(*values: int) -> list[str]:
    return [str(value) for value in values]


def moments(*values: str) -> list[str]:
    return [quoted(value, "timestamptz") for value in values]


QUEUES = ("default", "mail", "build", "paused", "slow", "new")
BACKOFFS = (
    '{"kind": "fixed", "base_seconds": 60}',
    '{"kind": "linear", "base_seconds": 300, "jitter": 0}',
    '{"kind": "exponential", "base_seconds": 60, "cap_seconds": 1800, "jitter": 0.9}',
    '{"kind": "list", "delay_seconds": [60, 300]}',
)
SOON = (
    "2026-01-12 09:00+00",
    "2026-01-12 10:00+00",
    "2026-01-12 11:00+00",
    "2027-01-01 00:00+00",
)
PLAIN: dict[str, list[str]] = {
    "access": texts("producer", "worker", "operator", "observer"),
    "act": texts(
        *("retry", "cancel", "discard", "reschedule", "set_priority", "move", "purge", "erase")
    ),
    "after_id": numbers(0, 5, 1000),
    "arguments": jsons(
        *(
            "{}",
            '{"reason": "because"}',
            '{"merge": {"a": 2}}',
            '{"keep_run_at": true, "with_dependants": true}',
            '{"delay": "1 hour", "spread": "1 hour"}',
            '{"max_attempts": 3}',
        ),
        *('{"payload": [1]}', '{"priority": 7}', '{"queue": "slow"}', '{"delay": "1 hour"}'),
        *('{"run_at": "2026-01-12T10:00:00Z"}', '{"delay": "1"}', '{"priority": 1e400}'),
        *('{"merge": {"a": "\\ud83d\\ude00"}}', '{"max_attempts": "3"}', '{"queue": null}'),
    ),
    "filter": jsons(
        *(
            '{"all": true}',
            '{"ids": [1, 2, 3, 7, 14]}',
            '{"queue": "mail"}',
            '{"status": "dead"}',
        ),
        *('{"job_type": "x"}', '{"error": "it broke"}', '{"payload": {"a": 1}}'),
        *(
            '{"older_than": "0", "status": ["failed", "dead"]}',
            '{"ids": [1e400]}',
            '{"ids": 1}',
        ),
        *('{"newer_than": "99999999999 years"}', '{"status": [null]}', '{"ids": [0]}'),
        *('{"idempotency_key": "k", "headers": {"a": "b"}}', '{"status": {"a": 1}}'),
    ),
    "ageing": spans("1 minute"),
    "backoff": jsons(*BACKOFFS),
    "burst": numbers(1, 20),
    "catch_up": texts("one", "skip", "all"),
    "catch_up_max": numbers(1, 100),
    "catch_up_window": spans("1 hour"),
    "delay": spans("0", "5 seconds", "1 hour"),
    "duration": spans("1 ms", "20 ms"),
    "ends_at": moments("2027-01-01 00:00+00"),
    "error": texts("it broke"),
    "error_type": texts("ValueError"),
    "every": spans("1 second"),
    "host": texts("box"),
    "idempotency_key": texts("k", "k:running", "k:later", "k:ended", "k:run"),
    "if_parent_dead": texts("cancel", "run", "wait"),
    "headers": jsons("{}", '{"a": "b"}'),
    "expires_at": moments(*SOON),
    "if_unknown": texts("skip", "again"),
    "jitter": spans("0", "1 minute"),
    "job_type": texts("x", "charge", "send"),
    "keep": spans("1 day"),
    "keep_dead": spans("90 days"),
    "keep_finished": spans("2 days"),
    "key": texts("open", "done", "unknown", "free"),
    "lease": spans("1 minute", "1 hour"),
    "limit_key": texts("shop:1", "shop:2", "other"),
    "max_attempts": numbers(1, 3, 20),
    "max_jobs": numbers(1, 10, 1000),
    "max_rows": numbers(1, 10, 1000),
    "max_running": numbers(0, 1, 50),
    "max_runs": numbers(1, 10),
    "max_starts": numbers(1, 100),
    "max_wait": spans("1 minute"),
    "message": texts("half way"),
    "name": texts("nightly", "often", "chain", "off", "new"),
    "next_stage": texts("end", "ship", "charge"),
    "on_conflict": texts("keep", "replace", "rerun"),
    "ordering_key": texts("o", "stuck", "account:7"),
    "overlap": texts("allow", "skip", "queue"),
    "payload": jsons("{}", '{"a": 1}'),
    "per": spans("1 second", "1 minute"),
    "percent": ["50", "0.01", "100"],
    "concurrency": numbers(4),
    "pid": numbers(4711),
    "poll_interval": spans("1 second", "10 seconds"),
    "pipeline": texts("order"),
    "priority": numbers(-5, 0, 10),
    "queue": texts(*QUEUES),
    "reason": texts("because"),
    "result": jsons("{}", '{"ok": true}'),
    "retry_in": spans("0", "1 minute"),
    "role": ["current_user", "'pg_monitor'::name"],
    "run_at": moments(*SOON),
    "schedule": SCHEDULES[:5],
    "scope": texts("mail"),
    "stack": texts("in f"),
    "stage": texts("check", "charge", "ship"),
    "starts_at": moments(*SOON),
    "expires_after": spans("1 second", "1 hour"),
    "time_limit": spans("1 second", "1 hour"),
    "time_zone": ZONES[:5],
    "unique_for": spans("1 day"),
    "updated_at": moments(*SOON),
    "version": texts("1.0"),
    "weight": numbers(1, 3),
    "worker": texts("w1", "builder"),
}

# The members of jobs, stages and rules of backoff, as JSON texts.
MEMBERS: dict[str, tuple[str, ...]] = {
    "depends_on": ("[1]", "[6, 14]", "[]"),
    "backoff": BACKOFFS,
    "base_seconds": ("60", "0.001"),
    "blocks": ("20",),
    "cap_seconds": ("3600",),
    "delay": ("5", '"5 minutes"'),
    "delay_seconds": ("[60, 300]", "[1]"),
    "expires_at": ('"2026-01-12T10:00:00Z"', '"2126-01-12 11:00+01"'),
    "headers": ("{}", '{"a": "b"}'),
    "idempotency_key": ('"k"', '"k:run"', '"k:running"', '"n1"', '"n2"'),
    "if_parent_dead": ('"cancel"', '"run"', '"wait"'),
    "jitter": ("0", "0.2", "0.9"),
    "job_type": ('"x"', '"charge"'),
    "kind": ('"fixed"', '"linear"', '"exponential"', '"quadratic"', '"list"'),
    "lease": ("60", '"1 minute"'),
    "limit_key": ('"shop:1"', '"other"'),
    "max_attempts": ("3",),
    "max_wait": ("60", '"1 minute"'),
    "on_conflict": ('"keep"', '"replace"', '"rerun"'),
    "ordering_key": ('"o"', '"account:7"'),
    "payload": ("{}", '{"a": 1}'),
    "priority": ("0", "-5", "32767"),
    "queue": tuple(f'"{queue}"' for queue in QUEUES),
    "run_at": ('"2026-01-12T10:00:00Z"', '"2026-01-12 11:00+01"'),
    "skip_dead": ("false", "true"),
    "expires_after": ("5", '"1 minute"'),
    "time_limit": ("5", '"1 minute"'),
    "stage": ('"check"', '"charge"', '"ship"', '"pack"'),
    "unique_for": ("3600", '"1 day"'),
    "updated_at": ('"2026-01-12T09:00:00Z"',),
}
JOB = ("job_type",)
STAGE = ("stage", "job_type")
RULE = ("kind",)
MAY_HAVE: dict[tuple[str, ...], tuple[str, ...]] = {
    STAGE: ("queue", "priority", "max_attempts", "lease", "time_limit", "backoff"),
    RULE: ("base_seconds", "cap_seconds", "jitter", "delay_seconds"),
    JOB: (
        *(
            "payload",
            "queue",
            "run_at",
            "delay",
            "priority",
            "max_attempts",
            "lease",
            "backoff",
        ),
        *("idempotency_key", "unique_for", "on_conflict", "updated_at", "max_wait"),
        *("ordering_key", "skip_dead", "depends_on", "blocks", "if_parent_dead", "limit_key"),
        *("time_limit", "expires_at", "headers", "expires_after"),
    ),
}

ENDINGS: list[dict[str, str]] = [
    {"outcome": '"succeeded"'},
    {"outcome": '"succeeded"', "result": '{"ok": true}'},
    {"outcome": '"succeeded"', "next_stage": '"ship"'},
    {"outcome": '"failed"', "error": '"it broke"', "error_type": '"E"', "stack": '"in f"'},
    {"outcome": '"failed"', "error": '"it broke"', "retry_in": "5", "fatal": "false"},
    {"outcome": '"failed"', "error": '"it broke"', "fatal": "true"},
    {"outcome": '"snoozed"', "delay": '"1 minute"'},
    {"outcome": '"released"'},
]
MAY_END = (
    *("job_id", "lease_token", "outcome", "result", "next_stage", "error", "error_type"),
    *("stack", "retry_in", "fatal", "delay", "oddity"),
)
