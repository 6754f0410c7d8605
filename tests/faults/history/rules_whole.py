"""I11, I12, and what is true only of all jobs together.

What nobody was told of, a claim that shows only by its failure or a job that shows only by its
row, must be the work of a call without an answer; there may be no more of it than of those.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from faults.history.context import Context, Problems
from faults.history.events import CARRIER
from faults.history.reading import Operation

# What any statement may meet by the caller's own doing, or the server's.
GENERAL = frozenset({"22023", "25006", "25P02", "42501", "53300", "55P03", "57014"})
HOUR = 3_600_000_000
LIVE_STATES = ("running", "blocked")


def note(operation: Operation, context: Context) -> Problems:
    """Remember what an operation may have done unseen; see that its error is documented."""
    function, arguments = operation.function, operation.arguments
    context.counts["operations"] += 1
    context.counts[operation.outcome] += 1
    if operation.error:
        context.looked["I12"] += 1
        known = context.general | context.documented.get(function, set())
        if "RT001" in known:
            known |= {"RT016"}  # of a job that has moved
        is_code = len(operation.error) == 5
        if is_code and operation.error not in known and context.documented:
            yield "I12", f"{function} was refused with {operation.error}"
    if function == "enqueue_many":
        _note_jobs(operation, context)
    if operation.outcome != "unknown" or operation.rows is not None:
        return
    if function in ("claim_jobs", "finish_and_claim"):
        context.unknown.claims[arguments["worker"]] += arguments.get("max_jobs", 1)
    elif function == "enqueue_many":
        for job in arguments["jobs"]:
            key = job.get("idempotency_key") or ""
            context.unknown.jobs[job["job_type"], key] += 1
    elif function == "enqueue_to":
        context.unknown.jobs[CARRIER, ""] += 1


def _note_jobs(operation: Operation, context: Context) -> None:
    context.has_producers = True
    if operation.outcome in ("refused", "undone"):
        return
    for job in operation.arguments["jobs"]:
        if job.get("on_conflict", "keep") != "keep":
            context.changed_keys.add(job["idempotency_key"])


def check_hidden(context: Context) -> Problems:
    """No more is unseen than what calls without an answer may have done."""
    for worker, number in context.hidden_claims.items():
        if number > (most := context.unknown.claims[worker]):
            told = f"{number} leases of {worker} were told to nobody"
            yield "I6", f"{told}, and its calls without an answer were for {most}"
    if not context.has_producers:
        return
    for kind, number in context.hidden_jobs.items():
        if number > (most := context.unknown.jobs[kind]):
            told = f"{number} jobs {kind} came from nobody"
            yield "I4", f"{told}, and calls without an answer were for {most}"


def note_row(table: str, row: dict[str, Any], context: Context) -> None:
    """Count a row of the last dump for the statistics that tell of it, or keep its figures."""
    counts = context.recount
    if table == "finished_jobs":
        hour = row["finished_at"] // HOUR * HOUR
        counts["hours"][hour, row["queue"], row["job_type"], row["status"]] += 1
        if row["status"] == "dead":
            counts["queues"][row["queue"], "dead"] += 1
    elif table == "jobs" and row["status"] in LIVE_STATES:
        counts["queues"][row["queue"], row["status"]] += 1
    elif table == "hourly_stats":
        for status in ("succeeded", "dead", "cancelled"):
            name = (row["hour"], row["queue"], row["job_type"], status)
            counts["told hours"][name] += row[status]
    elif table == "queue_stats":
        for state in ("dead", *LIVE_STATES):
            counts["told queues"][row["queue"], state] += row[state]


def check_statistics(context: Context) -> Problems:
    """What the statistics tell is what a count of the jobs gives."""
    for kind, table in (("hours", "hourly_stats"), ("queues", "queue_stats")):
        if table not in context.tables:
            continue
        counted, told = context.recount[kind], context.recount[f"told {kind}"]
        context.looked["I11"] += len({*counted, *told})
        for name in _differences(counted, told):
            yield "I11", f"{name}: {told[name]} are told, and there are {counted[name]}"


def _differences(one: Counter[Any], other: Counter[Any]) -> list[Any]:
    return [name for name in {*one, *other} if one[name] != other[name]]
