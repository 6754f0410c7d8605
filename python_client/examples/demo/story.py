"""What the demo plays, and how each job has to end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

QUEUE = "rota_demo"
SCOPE = "rota_demo"
"""Of the records of the reports in rota's ledger."""
WORKERS = ("worker-1", "worker-2", "worker-3")
LEASE = 5
"""Seconds after which a job is taken from a worker that is silent."""

BACKOFF = {"kind": "exponential", "base_seconds": 1, "cap_seconds": 10, "jitter": 0.2}
"""Wait one second after the first failure, then two, four, …, a fifth more or less."""

USERS = {"ada": 1, "ben": 2, "chloe": 3, "dan": 4, "eva": 5, "finn": 6}
SILENCES = Counter({"ben": 1, "dan": 2})
"""How many times the provider does not answer when a mail is for somebody."""

VICTIM = "chloe"
"""When the mail of this user has arrived, the worker that sent it is killed."""

TIMED_OUT, KILLED, REFUSED = "MailTimeoutError", "lease_expired", "ConnectionRefusedError"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One job of the story: what is enqueued, and the error type of each failed attempt."""

    key: str
    job_type: str
    about: str
    payload: dict[str, Any]
    errors: list[str] = field(default_factory=list)
    status: str = "succeeded"
    max_attempts: int = 5
    priority: int = 0
    sends_mail: bool = False

    @property
    def attempts(self) -> int:
        """How many attempts it takes."""
        return len(self.errors) + (self.status == "succeeded")

    @property
    def job(self) -> dict[str, Any]:
        """The arguments of ``enqueue``."""
        return {
            "job_type": self.job_type,
            "payload": self.payload,
            "queue": QUEUE,
            "priority": self.priority,
            "max_attempts": self.max_attempts,
            "backoff": BACKOFF,
            "idempotency_key": self.key,
        }


def nightly(today: str, week_start: str, closed_port: int) -> list[Part]:
    """Return what cron enqueues in the night to a Monday."""
    return [
        Part(
            key=f"cleanup_nightly:{today}",
            job_type="cleanup_nightly",
            about="old sessions",
            payload={},
        ),
        *(_report(user, week_start) for user in ("ada", "ben", "chloe", "dan", "eva")),
        Part(
            key="deliver_webhook:evt_812",
            job_type="deliver_webhook",
            about="host is down",
            payload={"event_id": "evt_812", "port": closed_port},
            errors=[REFUSED] * 3,
            status="dead",
            max_attempts=3,
        ),
    ]


def export(week_start: str) -> Part:
    """Return what is enqueued when finn clicks on *export*: before all that waits."""
    return _report("finn", week_start, about="export", priority=-10)


def _report(user: str, week_start: str, about: str = "", priority: int = 0) -> Part:
    payload: dict[str, Any] = {"user_id": USERS[user], "week_start": week_start}
    errors = [TIMED_OUT] * SILENCES[user]
    if user == VICTIM:
        payload["linger_seconds"] = 10
        errors = [KILLED]
    return Part(
        key=f"weekly_report:{user}:{week_start}",
        job_type="send_weekly_report",
        about=about or user,
        payload=payload,
        errors=errors,
        priority=priority,
        sends_mail=True,
    )
