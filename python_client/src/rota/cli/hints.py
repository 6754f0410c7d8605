"""What helps against an error, in the words of the command line."""

from __future__ import annotations

import argparse

from ..exceptions import (
    BadScheduleError,
    JobFinishedError,
    JobNotFoundError,
    JobRunningError,
    RotaError,
    UnknownQueueError,
    UnknownScheduleError,
)

_HINTS: dict[type[RotaError], str] = {
    JobNotFoundError: "It never existed, or retention has removed it.",
    JobFinishedError: "To run it again: rota retry {job_id}",
    JobRunningError: "Wait, or take it from its worker: rota retry {job_id} --force",
    UnknownQueueError: "To see those that are known: rota status",
    UnknownScheduleError: "To see those that there are: rota schedule list",
}


def hint_for(error: RotaError, arguments: argparse.Namespace) -> str | None:
    """Return a hint that names commands where that of the database names functions."""
    name = getattr(arguments, "name", None)
    if (
        isinstance(error, BadScheduleError)
        and name
        and not getattr(arguments, "schedule", None)
    ):
        return f"Put it right with: rota schedule add {name} ..."
    hint = _HINTS.get(type(error))
    return hint.format(job_id=getattr(arguments, "job_id", "ID")) if hint else error.hint
