"""Take acts back, by the rows of the audit that they left.

The row has the values that the act replaced.  Undo skips a job or a setting that a later act
has changed: it reverses this act, and no other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from psycopg import sql

from ..client.async_client import AsyncClient
from .database import Row
from .filters import row_id
from .queries import statement
from .show import Json

MAX_ROWS = 500
"""How many rows of the audit are taken back at once, of up to a thousand jobs each."""
OF_JOBS = {"set_priority": "priority", "move": "queue", "reschedule": "run_at"}
AS_JSON = ("payload", "headers", "backoff")
OF_SCHEDULE = list(signature(AsyncClient.schedule_job).parameters)[1:]
OF_LIMIT = ("max_running", "max_starts", "per", "burst", "weight")

Statement = tuple[str, dict[str, Any]]


@dataclass
class Undo:
    """A row of the audit, and what would take it back; nothing where that cannot be."""

    row: Row
    statements: list[Statement] = field(default_factory=list)

    @property
    def calls(self) -> list[sql.Composed]:
        """Return the statements to be shown and sent."""
        return [statement(function, given) for function, given in self.statements]


def undo_of(row: Row, shown: Json) -> Undo:
    """Return what takes back an act, as its row and what was done since allow."""
    before, after = _values(row["before"]), _values(row["after"])
    undo = Undo(row)
    if row["job_ids"] is not None:
        undo.statements = _of_jobs(row, before)
    elif not row["is_changed_since"]:
        undo.statements = _of_setting(row["act"], before, after, shown)
    return undo


def is_not_kept(row: Row) -> bool:
    """Whether an act replaced values of jobs, and the audit has not kept of which job which."""
    return row["act"] in OF_JOBS and not may_be_undone(row)


def may_be_undone(row: Row) -> bool:
    """Whether it is worth a look if an act can be taken back."""
    act, before = row["act"], _parsed(row["before"])
    if act == "cancel":
        return True
    if act in OF_JOBS:
        return bool(_values_of(act, before, []))
    if act in ("pause", "resume"):
        return _is_of_operator(act, before)
    return act in ("schedule", "unschedule", "set_limit")


def _is_of_operator(act: str, before: Mapping[str, Any]) -> bool:
    """Whether an operator can bring back what was: a breaker or a rule ends its own pause."""
    return (act == "pause" and not before) or before.get("set_by") == "operator"


def _of_jobs(row: Row, before: Mapping[str, Any]) -> list[Statement]:
    ids, act = row["left_ids"], row["act"]
    if not ids:
        return []
    call = {"act": act, "filter": json.dumps({"ids": ids})}
    if act == "cancel":
        # One that others have retried since may have succeeded.
        call |= {"act": "retry", "filter": json.dumps({"ids": ids, "status": "cancelled"})}
        how = '{"keep_run_at": true, "with_dependants": true}'
        return [("act_on_jobs", {**call, "arguments": how})]
    if act not in OF_JOBS:
        return []
    found: list[Statement] = []
    for value, given in _values_of(act, before, ids):
        more = {"filter": json.dumps({"ids": given}), "arguments": _argument(act, value)}
        found.append(("act_on_jobs", {**call, **more}))
    return found


def _argument(act: str, value: Any) -> str:
    name = OF_JOBS[act]
    return json.dumps({name: int(value) if name == "priority" else value})


def _values_of(
    act: str, before: Mapping[str, Any], ids: Sequence[int]
) -> list[tuple[Any, list[int]]]:
    """Return what was replaced, each value with those of the jobs that had it."""
    name = OF_JOBS[act]
    if (value := _only(before.get(name), name)) is not None:
        return [(value, list(ids))]
    wanted = set(ids)
    found = [
        (value, [one for one in had if one in wanted] if ids else had)
        for value, had in before.get(f"{name}_of", {}).items()
    ]
    return [(value, given) for value, given in found if given]


def _only(value: Any, name: str) -> Any:
    """Return the one value that all of the jobs had before, if it was one."""
    if not isinstance(value, dict):
        return value
    if name == "run_at":
        return value["first"] if value["first"] == value["last"] else None
    return next(iter(value)) if len(value) == 1 and "(others)" not in value else None


def _of_setting(
    act: str, before: Mapping[str, Any], after: Mapping[str, Any], shown: Json
) -> list[Statement]:
    match act:
        case "pause" | "resume" if _is_of_operator(act, before):
            row = before or after
            names = ("job_type", "queue") if "job_type" in row else ("queue",)
            about = {name: row[name] for name in names if name in row}
            what = "type" if "job_type" in row else "queue" if "queue" in row else "all"
            if act == "pause" and not before:
                return [(f"resume_{what}", about)]
            more = {name: before[name] for name in ("reason", "until") if name in before}
            return [(f"pause_{what}", {**about, **more})]
        case "schedule" if not before:
            return [("unschedule_job", {"name": after["name"]})]
        case "schedule" | "unschedule":
            return _schedule(before, after, shown)
        case "set_limit":
            row = before or after
            about = {n: row[n] for n in ("queue", "job_type", "limit_key") if n in row}
            had = {n: before[n] for n in OF_LIMIT if n in before}
            return [("set_limit", {**about, **had, "reset": True})]
    return []


def _schedule(
    before: Mapping[str, Any], after: Mapping[str, Any], shown: Json
) -> list[Statement]:
    """Return what makes a schedule again what it was, if all of it may be seen."""
    name = {"name": before["name"]}
    found: list[Statement] = []
    if not after or any(before.get(n) != after.get(n) for n in OF_SCHEDULE):
        if any(shown.editable(before[n]) is None for n in AS_JSON if n in before):
            return []
        found.append(("schedule_job", {n: before[n] for n in OF_SCHEDULE if n in before}))
    was_enabled, is_enabled = before.get("is_enabled"), after.get("is_enabled", True)
    if was_enabled != is_enabled:
        found.append(("enable_schedule" if was_enabled else "disable_schedule", name))
    return found


def _values(row: Mapping[str, str] | None) -> dict[str, Any]:
    """Return a row of values, each of which is JSON; what is JSON for us too stays a text."""
    return {
        name: text if name in AS_JSON else json.loads(text)
        for name, text in (row or {}).items()
    }


def _parsed(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except (RecursionError, ValueError):  # too deep, or with a number of too many digits
        return {}
    return found if isinstance(found, dict) else {}


def numbers(pairs: Iterable[tuple[str, str]]) -> list[int]:
    """Return the rows of the audit that are named in an address or a form."""
    told = [part for key, value in pairs if key == "audit" for part in value.split(",")]
    good = [found for part in told if (found := row_id(part)) is not None]
    return list(dict.fromkeys(good))[: MAX_ROWS + 1]  # one more than can be undone at once
