"""Which jobs a command is about: the same words for those that list and those that act.

What is chosen is a filter as `act_on_jobs()` takes it.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from .output import UsageError

STATUSES = ("blocked", "queued", "running", "failed", "succeeded", "dead", "cancelled")
KEYS = {
    "queue": "queue",
    "status": "status",
    "job_type": "job_type",
    "error": "error",
    "error_text": "error_text",
    "error_type": "error_type",
    "cancel_reason": "cancel_reason",
    "worker": "worker",
    "key": "idempotency_key",
    "ordering_key": "ordering_key",
    "limit_key": "limit_key",
    "schedule": "definition",
    "pipeline": "pipeline",
    "stage": "stage",
    "older_than": "older_than",
    "newer_than": "newer_than",
}
"""The options that say which jobs, and what they are called in a filter of act_on_jobs()."""


def add_filter(parser: argparse.ArgumentParser) -> Any:
    """Add the options; return their group."""
    which = parser.add_argument_group("which jobs")
    which.add_argument("--queue")
    which.add_argument("--status", action="append", choices=STATUSES, metavar="STATUS",
                       help=f"{', '.join(STATUSES)}; may be repeated")  # fmt: skip
    which.add_argument("--type", dest="job_type")
    what = (
        "with this last error, as `rota errors` shows it, with or without its type; numbers and"
        " ids may differ"
    )
    which.add_argument("--error", metavar="TEXT", help=what)
    what = "with this text in the last error"
    which.add_argument("--error-text", metavar="TEXT", help=what)
    which.add_argument("--error-type", metavar="TYPE")
    which.add_argument("--cancel-reason", metavar="TEXT", help="cancelled for exactly this")
    what = "whether `rota discard` was used on them"
    which.add_argument("--discarded", choices=("yes", "no"), help=what)
    what = "held by this worker, now or last"
    which.add_argument("--worker", metavar="NAME", help=what)
    what = "ended (live jobs: created) longer ago than this, such as '2 hours'"
    which.add_argument("--older-than", metavar="AGE", help=what)
    which.add_argument("--newer-than", metavar="AGE", help="the same, more recently")
    which.add_argument(
        "--payload", metavar="JSON", help="with this in the payload: '{\"user_id\": 7}'"
    )
    what = "with this header; may be repeated"
    which.add_argument("--header", action="append", metavar="NAME=VALUE", help=what)
    which.add_argument("--key", help="idempotency key")
    which.add_argument("--ordering-key", metavar="KEY")
    which.add_argument("--limit-key", metavar="KEY")
    which.add_argument("--schedule", metavar="NAME", help="made by this schedule")
    which.add_argument("--pipeline", metavar="NAME")
    which.add_argument("--stage", metavar="NAME", help="in this stage of a pipeline")
    return which


def chosen_filter(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what was chosen, as a filter of act_on_jobs()."""
    chosen = {
        key: getattr(arguments, option)
        for option, key in KEYS.items()
        if getattr(arguments, option) is not None
    }
    if getattr(arguments, "all", False):
        chosen["all"] = True
    if arguments.discarded:
        chosen["is_discarded"] = arguments.discarded == "yes"
    if arguments.payload is not None:
        chosen["payload"] = parse_json(arguments.payload)
    if arguments.header:
        chosen["headers"] = dict(pair(text, "--header") for text in arguments.header)
    return chosen


def parse_json(text: str, what: str = "payload") -> Any:
    """Return what a JSON text says."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"the {what} is not JSON: {error}") from None
    except RecursionError:
        raise UsageError(f"the {what} is nested too deeply") from None


def pair(text: str, option: str) -> tuple[str, str]:
    """Return name and value of a NAME=VALUE."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise UsageError(f"{option} is NAME=VALUE, got {text}")
    return name, value
