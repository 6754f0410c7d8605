"""Histories written by hand: a few calls and rows, with times in milliseconds.

A call begins at *at* and takes one millisecond, unless it is said to take longer; the database
does it half-way.  One with ``lost=True`` gets no answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.history.checker import check
from faults.history.context import Context

WALL = 1_700_000_000_000_000
BACKOFF = {"kind": "fixed", "base_seconds": 0.1, "jitter": 0}
DEFAULTS: dict[str, Any] = {
    "queue": "default",
    "job_type": "t",
    "max_attempts": 3,
    "backoff": BACKOFF,
    "attempts": 0,
    "lease_token": 0,
    "run_at": WALL,
    "created_at": WALL,
}


def moment(at: float) -> int:
    """Return a time on the clock of the database."""
    return WALL + round(at * 1000)


class Scroll:
    """What one process wrote, and the rows that came of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: list[dict[str, Any]] = []
        self._dumps: list[list[dict[str, Any]]] = [[]]
        self._calls = self._transactions = 0
        self.is_drained = True

    def write(self, **line: Any) -> None:
        """Write a line as it is."""
        self._lines.append(line)

    def call(
        self,
        function: str,
        *rows: Any,
        at: float,
        took: float = 1,
        lost: bool = False,
        error: str = "",
        transaction: int = 0,
        **arguments: Any,
    ) -> None:
        """Write a call and its answer."""
        self._calls += 1
        began = {"call": self._calls, "function": function, "began": round(at * 1e6)}
        inside = {"transaction": transaction} if transaction else {}
        self.write(**began, arguments=arguments, **inside)
        if not lost:
            answer = {"error": error} if error else {"rows": list(rows)}
            self.write(call=self._calls, ended=round((at + took) * 1e6), **answer)

    def end(self, transaction: int, at: float, outcome: str) -> None:
        """End a transaction, perhaps without an answer to its commit."""
        if outcome != "rollback":
            self.write(transaction=transaction, commits=round(at * 1e6))
        if outcome != "lost":
            self.write(transaction=transaction, ended=round((at + 1) * 1e6), outcome=outcome)

    def enqueue(
        self, job_id: int, at: float = 0, *, is_new: bool = True, **options: Any
    ) -> None:
        """Enqueue a job; what is no option of `call` is said of the job."""
        ours = {name: options.pop(name) for name in ("lost", "transaction") if name in options}
        row = {"ordinal": 1, "job_id": job_id, "is_new": is_new}
        job = {"job_type": "t", "backoff": BACKOFF, **options}
        self.call("enqueue_many", row, at=at, jobs=[job], **ours)

    def claim(self, job_id: int, token: int, at: float, **options: Any) -> None:
        """Grant a job for 50 ms, or until another *until*."""
        granted = moment(at + options.get("took", 1) / 2)
        until = moment(options.pop("until", at + 50))
        row = {
            "job_id": job_id,
            "lease_token": token,
            "attempt": options.pop("attempt", 1),
            "max_attempts": 3,
            "run_at": moment(options.pop("run_at", 0)),
            "created_at": WALL,
            "locked_until": until,
            "locked_for": (until - granted) / 1e6,
        }
        self.call("claim_jobs", row, at=at, worker=options.pop("worker", "w"), **options)

    def finish(self, job_id: int, token: int, at: float, **options: Any) -> None:
        """Finish a job."""
        answer = options.pop("answer", "finished")
        self.call("finish_job", answer, at=at, job_id=job_id, lease_token=token, **options)

    def fail(self, job_id: int, token: int, at: float, **options: Any) -> None:
        """Fail an attempt; with its row in job_errors."""
        attempt, status = options.pop("attempt", 1), options.pop("status", "failed")
        run_at = moment(at + 100.5) if status == "failed" else None
        answer = {"status": status, "run_at": run_at}
        self.call("fail_job", answer, at=at, job_id=job_id, lease_token=token, **options)
        self.error(job_id, token, at + 0.5, attempt=attempt)

    def release(self, job_id: int, token: int, at: float, **options: Any) -> None:
        """Give a job back."""
        row = {"job_id": job_id, "is_released": True}
        self.call("release_jobs", row, at=at, job_ids=[job_id], lease_tokens=[token], **options)

    def beat(self, job_id: int, token: int, at: float, until: float, **options: Any) -> None:
        """Extend a lease."""
        row = {"locked_until": moment(until), "is_cancel_requested": False}
        self.call("heartbeat", row, at=at, job_id=job_id, lease_token=token, **options)

    def error(self, job_id: int, token: int, at: float, **row: Any) -> None:
        """Put a failure into job_errors; a lease_expired is one of the sweep."""
        known = {"attempt": 1, "worker": "w", "started_at": WALL, "failed_at": moment(at)}
        self.table("job_errors", job_id=job_id, lease_token=token, **{**known, **row})

    def stage(self, job_id: int, token: int, **row: Any) -> None:
        """Put a stage that a job has left into stage_runs."""
        known = {"stage": "a", "status": "succeeded", "attempts": 1, "worker": "w"}
        self.table("stage_runs", job_id=job_id, lease_token=token, **{**known, **row})

    def table(self, table: str, **row: Any) -> None:
        """Put a row into the dump."""
        self._dumps[-1].append({"table": table, "row": row})

    def ended(self, job_id: int, token: int = 0, status: str = "succeeded", **row: Any) -> None:
        """Put the job into the history."""
        known = {"finished_at": moment(1000), "attempts": 1, "locked_by": "w"}
        told = {
            **DEFAULTS,
            "id": job_id,
            "lease_token": token,
            "status": status,
            **known,
            **row,
        }
        self.table("finished_jobs", **{k: v for k, v in told.items() if v is not None})

    def live(self, job_id: int, token: int = 0, status: str = "queued", **row: Any) -> None:
        """Put the job into the live table."""
        self.is_drained = False
        told = {**DEFAULTS, "id": job_id, "lease_token": token, "status": status, **row}
        self.table("jobs", **told)

    def dump(self) -> None:
        """Begin another dump."""
        self._dumps.append([])

    def check(self) -> Context:
        """Return what the checker says."""
        self.save()
        return check(self._folder)

    def save(self) -> None:
        """Write all of it into the folder."""
        (self._folder / "calls-1-1.ndjson").write_text(_text(self._lines))
        documented = {"function": "finish_job", "documented": ["RT002", "RT003"]}
        for number, rows in enumerate(self._dumps, 1):
            tables = sorted({row["table"] for row in rows})
            end = {"dump": number, "tables": tables, "is_drained": self.is_drained}
            path = self._folder / f"rows-{number:03}.ndjson"
            path.write_text(
                _text([documented, *rows, {**end, "at": 5 * 10**9, "wall": moment(5000)}])
            )


Tale = Callable[[Scroll], None]
BROKEN: list[tuple[str, Tale]] = []


def breaks(promise: str) -> Callable[[Tale], Tale]:
    """Say which promise a tale breaks."""

    def note(tale: Tale) -> Tale:
        BROKEN.append((promise, tale))
        return tale

    return note


def _text(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)
