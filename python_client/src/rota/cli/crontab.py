"""Read a file of schedules: lines as in a crontab, with a job type where that has a command."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ..client.sync_client import Client

ZONE = re.compile(r"(?:CRON_)?TZ\s*=\s*(.*?)(?:(?<=\s)#.*)?")
VARIABLE = re.compile(r"[A-Za-z_]\w*\s*=")
# In a value, blanks are within quotes; a comment begins after a blank.
WORD = re.compile(r"""\s*((?:[^\s'"]|'[^']*'|"[^"]*")+)""")
COMMENT = re.compile(r"\s*(?:#.*)?")
_DAY = "SUN|MON|TUE|WED|THU|FRI|SAT"
FIELD = re.compile(rf"(?:[*?\d]|{_DAY})(?:[\d*,/#?L-]|{_DAY})*", re.IGNORECASE)
UNIT = re.compile(r"(?:second|minute|hour|day|week)s?", re.IGNORECASE)
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


@dataclass
class Crontab:
    """What a file says: zones by line, schedules, and what is wrong with which line."""

    zones: list[tuple[int, str]]
    entries: list[Entry]
    problems: dict[int, str]


def read(lines: Iterable[str], time_zone: str) -> Crontab:
    """Return what the lines say; *time_zone* is for those before the first that sets one."""
    crontab = Crontab([(0, time_zone)], [], {})
    entries: dict[str, Entry] = {}
    for number, raw in enumerate(lines, 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        try:
            if found := ZONE.fullmatch(line):
                time_zone = "".join(shlex.split(found[1]))
                crontab.zones.append((number, time_zone))
                continue
            entry = Entry(number, _arguments(line, time_zone))
            if entry.name in entries:
                first = f"already that of line {entries[entry.name].line}"
                raise ValueError(f"the name {entry.name} is {first}: use name=OTHER")
            entries[entry.name] = entry
        except ValueError as error:
            crontab.problems[number] = str(error)
    crontab.entries.extend(entries.values())
    return crontab


def _arguments(line: str, time_zone: str) -> dict[str, Any]:
    if VARIABLE.match(line):
        raise ValueError("only TZ and CRON_TZ can be set")
    words, payload = _words(line)
    bare = list(takewhile(lambda word: "=" not in word, words))
    given = words[len(bare) :]
    if any("=" not in word for word in given):
        raise ValueError(f"{FORM}, in this order")
    _check_job_type(bare)

    said: dict[str, Any] = {}
    for word in given:
        key, _, value = word.partition("=")
        if key not in KEYS:
            raise ValueError(f"unknown key {key!r}; known are: {', '.join(KEYS)}")
        if key in said:
            raise ValueError(f"{key} is given twice")
        text = value if value.startswith("{") else "".join(shlex.split(value))
        said[key] = _json(key, text) if key == "backoff" else text
    schedule, job_type = " ".join(bare[:-1]), bare[-1]
    job = {"name": job_type, "schedule": schedule, "job_type": job_type, "time_zone": time_zone}
    return job | said | payload


def _check_job_type(bare: list[str]) -> None:
    """Refuse what is a schedule and no more, and what cron has besides."""
    first, last = (bare[0].lower(), bare[-1]) if bare else ("", "")
    fields = 1 if first.startswith("@") else 5 if FIELD.fullmatch(first) else 0
    is_period = first in ("every", "after") and UNIT.fullmatch(last)
    if len(bare) < 2 or is_period or (fields == 5 and FIELD.fullmatch(last)):
        raise ValueError(f"{FORM}; there is no job type after the schedule")
    if fields and len(bare) > fields + 1 and not FIELD.fullmatch(bare[fields]):
        reason = "only a job type follows the schedule, no user and no command"
        raise ValueError(f"{reason}: {bare[fields]!r}")


def _words(line: str) -> tuple[list[str], dict[str, Any]]:
    """Return the words before a payload, and that, if there is one, by its name."""
    words: list[str] = []
    end = 0
    while not COMMENT.fullmatch(line, end):
        rest = line[end:].lstrip()
        if rest[0] in '{["':
            return words, {"payload": _payload(rest)}
        found = WORD.match(line, end)
        if found is None:
            raise ValueError("a quote is not closed")
        words.append(found[1])
        end = found.end()
    return words, {}


def _payload(text: str) -> Any:
    try:
        payload, end = json.JSONDecoder().raw_decode(text)
    except ValueError as error:
        raise ValueError(f"the payload is not JSON: {error}") from None
    if not isinstance(payload, dict):
        raise ValueError("the payload must be an object: {...}")
    if not COMMENT.fullmatch(text, end):
        raise ValueError("the payload is not JSON: more follows its end")
    return payload


def _json(what: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{what} is not JSON: {error}") from None
