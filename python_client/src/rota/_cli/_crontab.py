"""Read a file of schedules: lines as in a crontab, with a job type where that has a command."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .._client import Client

ZONE = re.compile(r"(?:CRON_)?TZ\s*=\s*(.*)")
VARIABLE = re.compile(r"[A-Za-z_]\w*\s*=")
# A payload takes the rest of the line; in a value, blanks are within quotes.
WORD = re.compile(r"""\s*(\{.*|(?:[^\s'"]|'[^']*'|"[^"]*")+)""")
FORM = "a line is SCHEDULE JOB_TYPE [KEY=VALUE ...] [JSON PAYLOAD]"
KEYS = [
    name
    for name in inspect.signature(Client.schedule_job).parameters
    if name not in ("self", "schedule", "job_type", "payload")
]


@dataclass(frozen=True)
class Entry:
    """What one line says: the arguments of `schedule_job`."""

    line: int
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the schedule."""
        return str(self.arguments["name"])


class BadLineError(Exception):
    """A line that cannot be understood."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


def read(lines: Iterable[str], time_zone: str) -> list[Entry]:
    """Return what the lines say; *time_zone* is for those before the first that sets one."""
    entries: dict[str, Entry] = {}
    for number, raw in enumerate(lines, 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        try:
            if found := ZONE.fullmatch(line):
                time_zone = "".join(shlex.split(found[1]))
                continue
            entry = Entry(number, _arguments(line, time_zone))
        except ValueError as error:
            raise BadLineError(number, str(error)) from None
        if entry.name in entries:
            first = entries[entry.name].line
            reason = f"the name {entry.name} is that of line {first} already: say name=OTHER"
            raise BadLineError(number, reason)
        entries[entry.name] = entry
    return list(entries.values())


def _arguments(line: str, time_zone: str) -> dict[str, Any]:
    if VARIABLE.match(line):
        raise ValueError("only TZ and CRON_TZ can be set")
    words = _words(line)
    bare = [word for word in words if "=" not in word and not word.startswith("{")]
    if words[: len(bare)] != bare:
        raise ValueError(f"{FORM}, in this order")
    if len(bare) < 2 or bare[-1].startswith("*"):
        raise ValueError(f"{FORM}; there is no job type")

    said: dict[str, Any] = {}
    for word in words[len(bare) :]:
        if word.startswith("{"):
            said["payload"] = _json("the payload", word)
            continue
        key, _, value = word.partition("=")
        if key not in KEYS:
            raise ValueError(f"there is no key {key!r}; there are: {', '.join(KEYS)}")
        if key in said:
            raise ValueError(f"{key} is there twice")
        text = "".join(shlex.split(value))
        said[key] = _json(key, text) if key == "backoff" else text
    schedule, job_type = " ".join(bare[:-1]), bare[-1]
    given = {"name": job_type, "schedule": schedule, "job_type": job_type}
    return given | {"time_zone": time_zone} | said


def _words(line: str) -> list[str]:
    words = []
    end = 0
    while end < len(line):
        found = WORD.match(line, end)
        if found is None:
            raise ValueError("a quote is not closed")
        words.append(found[1])
        end = found.end()
    return words


def _json(what: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{what} is not JSON: {error}") from None
