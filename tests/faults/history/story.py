"""All that is known of one job: its claims, what was said of each, and its rows.

A claim of which nobody was told still shows: by the failure that ended it in job_errors, or by
the token of the job's row.  So the leases of a job are all known, though not always by whom.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from faults.history.events import CARRIER, Event

Row = dict[str, Any]
ENDS = frozenset({"finish", "fail", "snooze", "release"})
GIVES_BACK = frozenset({"snooze", "release"})
OPERATES = frozenset({"retry", "reschedule"})
ENDED = frozenset({"succeeded", "dead", "cancelled"})
FAR = 1 << 62
# What a story tells of by other words, or not at all.
DULL = frozenset(
    {"id", "job_id", "lease_token", "queue", "backoff", "job_type", "moment", "locked_for"}
)
MOMENTS = frozenset(
    {"run_at", "created_at", "updated_at", "started_at", "failed_at", "finished_at"}
    | {"until", "locked_until"}
)


class Lease(NamedTuple):
    """One claim of a job; *grant* is None if nobody was told of it."""

    token: int
    attempt: int | None
    grant: Event | None
    error: Row | None


class Story:
    """One job's history, in the forms that the rules ask for."""

    __slots__ = (
        *("acts", "enqueues", "errors", "final", "is_touched", "job_id", "leases", "other"),
        *("rows", "said", "stages"),
    )

    def __init__(
        self,
        job_id: int,
        items: Iterable[tuple[str, Any]],
        last_dump: int = 1,
        changed_keys: Collection[str] = (),
    ) -> None:
        self.job_id = job_id
        self.said: dict[int, list[Event]] = {}
        """By token, what was said for it, the grant among it."""
        self.enqueues: list[Event] = []
        self.acts: list[Event] = []
        """What operators did."""
        self.errors: dict[int, Row] = {}
        self.stages: dict[int, Row] = {}
        """By token, the stages of its pipeline that it has left."""
        self.rows: list[tuple[int, str, Row]] = []
        self.other: list[Event] = []
        for kind, item in items:
            if kind == "event":
                self._add(Event._make(item))
            elif kind == "error":
                self.errors[item["lease_token"]] = item
            elif kind == "stage":
                self.stages[item["lease_token"]] = item
            else:
                self.rows.append(item)
        self.final = [(place, row) for number, place, row in self.rows if number == last_dump]
        self.leases = self._find_leases()
        self.is_touched: bool = self._find_touch(changed_keys)
        """Whether somebody may have changed its time, its attempts or its end from outside."""

    def _add(self, event: Event) -> None:
        if event.token:
            self.said.setdefault(event.token, []).append(event)
        elif event.act == "enqueue":
            self.enqueues.append(event)
        elif event.outcome != "refused":
            (self.other if event.act == "make" else self.acts).append(event)

    @property
    def last_row(self) -> Row | None:
        """Return its row in the last dump."""
        return self.final[-1][1] if self.final else None

    @property
    def is_retried(self) -> bool:
        """Whether an operator may have let it begin anew."""
        return any(act.act == "retry" and act.outcome != "undone" for act in self.acts)

    @property
    def is_carrier(self) -> bool:
        """Whether it carries a job to another database."""
        return bool(self.final) and self.final[-1][1].get("job_type") == CARRIER

    def accepted(self, token: int) -> list[Event]:
        """Return what was said for a token and taken for true, but the grant."""
        return [e for e in self.said.get(token, ()) if e.outcome == "ok" and e.act != "grant"]

    def may_have_ended(self, token: int, before: int) -> bool:
        """Whether somebody spoke an end for a token before a moment, and was not refused."""
        return any(
            e.act in ENDS and e.outcome in ("ok", "unknown") and e.began < before
            for e in self.said.get(token, ())
        ) or any(act.act == "retry" and act.outcome != "undone" for act in self.acts)

    def _find_touch(self, changed_keys: Collection[str]) -> bool:
        row = self.last_row or {}
        return (
            any(act.act in OPERATES and act.outcome != "undone" for act in self.acts)
            or any(e.facts.get("on_conflict", "keep") != "keep" for e in self.enqueues)
            or row.get("idempotency_key") in changed_keys
        )

    def _find_leases(self) -> list[Lease]:
        row = self.last_row or {}
        grants: dict[int, Event] = {}
        for token, events in self.said.items():
            if grant := next((e for e in events if e.act == "grant"), None):
                is_known = grant.outcome == "ok" or token in self.errors or token in self.stages
                if is_known or token == row.get("lease_token") or self.accepted(token):
                    grants[token] = grant
        tokens = {*grants, *self.errors}
        tokens |= {token for token, stage in self.stages.items() if stage.get("worker")}
        if (last := row.get("lease_token", 0)) and row.get("locked_by"):
            tokens.add(last)
        return [self._lease(token, grants.get(token), row) for token in sorted(tokens)]

    def _lease(self, token: int, grant: Event | None, row: Row) -> Lease:
        error = self.errors.get(token)
        attempt = None
        if grant:
            attempt = grant.facts["attempt"]
        elif error:
            attempt = error["attempt"]
        elif token in self.stages:
            attempt = self.stages[token]["attempts"]
        elif row.get("status") in ("running", "succeeded", "dead"):
            attempt = row["attempts"]
        return Lease(token, attempt, grant, error)

    def tell(self, skew: int) -> str:
        """Return all of it in the order of time, on one clock, a line for each."""
        lines: list[tuple[int, str]] = []
        told = [*self.enqueues, *self.acts, *self.other]
        for event in [*told, *(e for events in self.said.values() for e in events)]:
            took = "no answer"
            if event.ended is not None:
                took = f"{(event.ended - event.began) / 1e6:.3f} ms"
            token = f" token {event.token}" if event.token else ""
            line = f"[{event.who}] {event.act}{token} -> {event.outcome}, {took}"
            lines.append((event.began, f"{line}  {_brief(event.facts, skew)}"))
        for error in self.errors.values():
            line = f"failed, token {error['lease_token']}  {_brief(error, skew)}"
            lines.append(((error["failed_at"] - skew) * 1000, line))
        for number, place, row in self.rows:
            line = f"dump {number}: {place}, token {row['lease_token']}  {_brief(row, skew)}"
            lines.append((FAR, line))
        return "\n".join(
            f"    {'at the end' if at == FAR else f'{at / 1e9:.6f}':>16}  {line}"
            for at, line in sorted(lines)
        )


def _brief(facts: Row, skew: int) -> str:
    """Return facts without the dull ones, and moments in seconds on the clock of the calls."""
    return ", ".join(
        f"{name} {(value - skew) / 1e6:.6f}" if name in MOMENTS else f"{name} {value}"
        for name, value in facts.items()
        if value is not None and name not in DULL
    )
