"""From operations to events: what each call did, or may have done, to each of its jobs.

An event is a plain tuple, because there are millions: job, begin, end, act, outcome, token,
facts, who.  The outcome is that of the operation, but ``refused`` also where a batch says so of
one job, and ``busy`` where it says nothing happened for now.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from faults.history.reading import Operation

NO_JOB = 0
CARRIER = "rota.forward"
"""The type of the jobs that carry others to another database."""


class Event(NamedTuple):
    """What one call did to one job; *token* is 0 where it speaks for no lease."""

    job_id: int
    began: int
    ended: int | None
    act: str
    outcome: str
    token: int
    facts: dict[str, Any]
    who: str


SINGLE = {
    "finish_job": "finish",
    "fail_job": "fail",
    "snooze_job": "snooze",
    "heartbeat": "heartbeat",
    "set_progress": "progress",
    "record_effect": "effect",
    "complete_effect": "effect",
    "withdraw_effect": "effect",
}
OPERATOR = {
    "retry_job": "retry",
    "restart_pipeline": "retry",
    "cancel_job": "cancel",
    "reschedule_job": "reschedule",
}
ENDINGS = {
    "succeeded": "finish",
    "failed": "fail",
    "snoozed": "snooze",
    "released": "release",
}
# What makes a job whose id is the answer.
MAKERS = {"start_pipeline", "run_schedule_now"}


def events(operation: Operation) -> Iterator[Event]:
    """Yield what an operation did to its jobs; of an unknown claim nothing can be told."""
    function, arguments = operation.function, operation.arguments
    if act := SINGLE.get(function):
        yield _single(operation, act)
    elif function == "enqueue_many":
        yield from _enqueued(operation)
    elif function == "enqueue_to":
        yield _sent(operation)
    elif function == "receive_jobs":
        for row in operation.rows or ():
            if job_id := row.get("job_id"):
                yield _event(operation, job_id, "make", 0, {"function": function})
    elif function == "claim_jobs":
        for row in operation.rows or ():
            yield _event(
                operation, row["job_id"], "grant", row["lease_token"], _grant(row, operation)
            )
    elif function == "finish_and_claim":
        yield from _round_trip(operation)
    elif function == "finish_jobs":
        yield from _batch(operation, "finish", _finished)
    elif function == "end_jobs":
        yield from _ended(operation)
    elif function == "heartbeat_jobs":
        yield from _batch(operation, "heartbeat", _beaten)
    elif function == "release_jobs":
        yield from _batch(operation, "release", _released)
    elif act := OPERATOR.get(function):
        facts = {**arguments, "answer": operation.rows[0] if operation.rows else None}
        yield _event(operation, arguments["job_id"], act, 0, facts)
    elif function in MAKERS and operation.rows:
        yield _event(operation, operation.rows[0], "make", 0, {"function": function})


def _event(
    operation: Operation,
    job_id: int,
    act: str,
    token: int,
    facts: dict[str, Any],
    outcome: str = "",
) -> Event:
    if operation.error:
        facts["error"] = operation.error
    return Event(
        job_id,
        operation.began,
        operation.ended,
        act,
        outcome or operation.outcome,
        token,
        facts,
        operation.who,
    )


def _single(operation: Operation, act: str) -> Event:
    arguments = operation.arguments
    facts: dict[str, Any] = {"function": operation.function}
    if operation.rows:
        answer = operation.rows[0]
        facts["answer"] = answer
        if act == "heartbeat":
            facts["until"] = answer["locked_until"]
    if act == "fail":
        facts["retry_in"] = arguments.get("retry_in")
        facts["fatal"] = arguments.get("fatal")
    elif act == "heartbeat":
        facts["lease"] = arguments.get("lease")
    return _event(operation, arguments["job_id"], act, arguments["lease_token"], facts)


def _enqueued(operation: Operation) -> Iterator[Event]:
    # One row for each job, or something is wrong, which is not for here to tell.
    for job, row in zip(operation.arguments["jobs"], operation.rows or (), strict=False):
        yield _event(
            operation, row["job_id"] or NO_JOB, "enqueue", 0, {**job, "is_new": row["is_new"]}
        )


def _sent(operation: Operation) -> Event:
    """Return the event of the job that carries another one."""
    job_id = operation.rows[0] if operation.rows else NO_JOB
    return _event(operation, job_id, "enqueue", 0, {"job_type": CARRIER, "is_new": True})


def _grant(row: dict[str, Any], operation: Operation) -> dict[str, Any]:
    row["worker"] = operation.arguments["worker"]
    row["moment"] = row["locked_until"] - round(row["locked_for"] * 1_000_000)
    return row


def _batch(operation: Operation, act: str, told: Any) -> Iterator[Event]:
    """Yield an event for each (id, token) of a batch; *told* says what its row means."""
    arguments = operation.arguments
    rows = operation.rows or [None] * len(arguments["job_ids"])
    for job_id, token, row in zip(
        arguments["job_ids"], arguments["lease_tokens"], rows, strict=True
    ):
        outcome, facts = told(row) if row is not None else ("", {})
        if operation.outcome != "ok" and outcome != "refused":
            outcome = operation.outcome
        facts["function"] = operation.function
        if act == "heartbeat":
            facts["lease"] = arguments.get("lease")
        yield _event(operation, job_id, act, token, facts, outcome)


def _ended(operation: Operation) -> Iterator[Event]:
    """Yield an event for each ending, with the facts of the simple form of its kind."""
    endings = operation.arguments["endings"]
    for ending, row in zip(endings, operation.rows or [None] * len(endings), strict=True):
        act, facts = ENDINGS[ending["outcome"]], {"function": operation.function}
        outcome = ""
        if row is not None:
            outcome = {"lost": "refused", "refused": "refused", "busy": "busy"}.get(
                row["answer"], "ok"
            )
            moment = row.get("run_at")
            facts["answer"] = {
                "fail": {"status": row["answer"], "run_at": moment},
                "snooze": moment,
            }.get(act, row["answer"])
        if operation.outcome != "ok" and outcome != "refused":
            outcome = operation.outcome
        if act == "fail":
            facts |= {"retry_in": ending.get("retry_in"), "fatal": ending.get("fatal")}
        yield _event(operation, ending["job_id"], act, ending["lease_token"], facts, outcome)


def _finished(row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    answer = row["outcome"]
    outcome = {"lost": "refused", "busy": "busy"}.get(answer, "ok")
    return outcome, {"answer": answer}


def _beaten(row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if (until := row.get("locked_until")) is None:
        return ("refused" if row["is_lost"] else "busy"), {}
    return "ok", {"until": until}


def _released(row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    outcome = {True: "ok", False: "refused", None: "busy"}[row["is_released"]]
    return outcome, {}


def _round_trip(operation: Operation) -> Iterator[Event]:
    """Yield finishes, heartbeats and grants; what went as asked is not in the answer."""
    arguments, odd = operation.arguments, {}
    for row in operation.rows or ():
        if row["outcome"] != "claimed":
            odd[row["job_id"], row["lease_token"]] = row["outcome"]
    known = operation.outcome
    for act, prefix in (("finish", ""), ("heartbeat", "kept_")):
        ids = arguments.get(f"{prefix}job_ids") or ()
        tokens = arguments.get(f"{prefix}lease_tokens") or ()
        for job_id, token in zip(ids, tokens, strict=True):
            told = odd.get((job_id, token))
            outcome = {"lost": "refused", "busy": "busy"}.get(told or "", known)
            facts = {"function": operation.function, "lease": arguments.get("lease")}
            yield _event(operation, job_id, act, token, facts, outcome)
    for row in operation.rows or ():
        if row["outcome"] == "claimed":
            yield _event(
                operation, row["job_id"], "grant", row["lease_token"], _grant(row, operation)
            )
