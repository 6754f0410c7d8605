"""The filters of the list of jobs: what the address says, as chips, as words and as values.

The address contains all of them, so that users can share a list, and return to it.  The search
field is parsed into the same filters, such as
``dead queue:mail "bad currency"``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from .show import WORDS, Json

STATUSES = ("queued", "running", "failed", "blocked", "dead", "succeeded", "cancelled")
LIVE = frozenset(STATUSES[:4])
KEYS = {
    "id": "ids", "queue": "queue", "status": "status", "type": "job_type", "group": "error",
    "error_type": "error_type", "error": "error_text", "reason": "cancel_reason",
    "due": "is_due", "discarded": "is_discarded",
    "key": "key", "schedule": "definition", "pipeline": "pipeline", "stage": "stage",
    "worker": "worker", "older": "older_than", "newer": "newer_than", "payload": "payload",
    "header": "headers",
}  # fmt: skip
"""What the filters of an address are called in one of act_on_jobs()."""
MANY = ("id", "status", "payload", "header")
MAX_LENGTH = 1000
MAX_CHIPS = 20
COLUMNS = (
    "queue", "type", "status", "tries", "when", "error", "created", "priority", "key", "worker",
    "schedule", "progress",
)  # fmt: skip
SHOWN = ("queue", "type", "status", "tries", "when", "error")

_QUOTED = r"""(?:"([^"]*)"|'([^']*)')"""
_WORD = re.compile(rf"([A-Za-z_]+(?:\.[^\s:=]+)?)[:=](?:{_QUOTED}|(\S+))|{_QUOTED}|(\S+)")
_ID = re.compile(r"#?\d+")
_AGE = re.compile(
    r"\s*(\d{1,6})\s*(s|sec|min|m|h|d|w|seconds?|minutes?|hours?|days?|weeks?)\s*"
)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


class BadFilterError(ValueError):
    """A filter cannot be understood."""


@dataclass(frozen=True)
class Filter:
    """What is wanted of jobs; no value means all."""

    values: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]]) -> Filter:
        """Return what the parameters of an address say; others are left out."""
        values: dict[str, list[str]] = {}
        for name, value in pairs:
            value = value.replace("\0", "").strip()[:MAX_LENGTH]
            if name not in KEYS or not value:
                continue
            if name not in MANY:
                values[name] = [value]
            elif value not in values.setdefault(name, []):
                values[name].append(value)
        return cls(values)

    def with_words(self, text: str) -> Filter:
        """Return this with what was typed added to it."""
        pairs = [(name, value) for name, found in self.values.items() for value in found]
        return Filter.of([*pairs, *_typed(text)])

    def get(self, name: str) -> str:
        """Return the one value of a filter, or nothing."""
        return next(iter(self.values.get(name, ())), "")

    def address(self, **more: str | int | list[str] | None) -> str:
        """Return the parameters of the address."""
        given = {name: value for name, value in more.items() if value is not None}
        return urlencode({**self.values, **given}, doseq=True)

    def chips(self) -> list[tuple[str, str, str]]:
        """Return each filter as its name, its value, and the address without it."""
        found = []
        for name, values in self.values.items():
            if len(values) > MAX_CHIPS:  # each would have all others in its address
                rest = {other: had for other, had in self.values.items() if other != name}
                told = WORDS["many_values"].format(len(values))
                found.append((name, told, Filter(rest).address()))
                continue
            for value in values:
                rest = {
                    other: [v for v in had if (other, v) != (name, value)]
                    for other, had in self.values.items()
                }
                found.append((name, value, Filter(rest).address()))
        return found

    def toggled(self, status: str) -> str:
        """Return the address with one more status, or one less; dead without discarded jobs."""
        have = list(self.values.get("status", ()))
        is_less = status in have
        have = [s for s in have if s != status] if is_less else [*have, status]
        more = {"discarded": [] if is_less else ["no"]} if status == "dead" else {}
        return Filter({**self.values, "status": have, **more}).address()

    def asked(self) -> dict[str, Any]:
        """Return it as a filter of act_on_jobs(), JSON as texts; raise BadFilterError."""
        return {KEYS[name]: _asked(name, found) for name, found in self.values.items()}


def _asked(name: str, found: Sequence[str]) -> Any:
    match name:
        case "older" | "newer":
            return age(found[0])
        case "due" | "discarded" if found[0] in ("yes", "no"):
            return found[0] == "yes"
        case "due" | "discarded":
            raise BadFilterError(WORDS[f"{name}_wrong"])
        case "id":
            return [_job_id(text) for text in found]
        case "status":
            if wrong := [status for status in found if status not in STATUSES]:
                raise BadFilterError(f"there is no status {wrong[0]}")
            return list(found)
        case "payload" | "header":
            return [contained(text, is_text=name == "header") for text in found]
    return found[0]


def acted(wanted: Filter) -> str:
    """Return a filter as act_on_jobs() takes it."""
    told = wanted.asked()
    for name, value in told.items():
        if name not in ("payload", "headers"):
            told[name] = json.dumps(value)
        else:
            told[name] = f"[{', '.join(value)}]" if len(value) > 1 else value[0]
    return json_object(told)


def asked_of(text: str) -> list[tuple[str, str]]:
    """Return the filters of the page for one of act_on_jobs(); raise BadFilterError."""
    ours = {theirs: own for own, theirs in KEYS.items()}
    pairs: list[tuple[str, str]] = []
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise BadFilterError(text) from None
    for name, value in found.items():
        many = value if isinstance(value, list) else [value]
        if name in ("ids", "status"):
            pairs += [(ours[name], str(one)) for one in many]
        elif name in ("payload", "headers"):
            pairs += [(ours[name], json.dumps(one)) for one in many]
        elif name in ("is_due", "is_discarded") and isinstance(value, bool):
            pairs.append((ours[name], "yes" if value else "no"))
        elif name in ours and isinstance(value, str) and value.strip():
            if name in ("older_than", "newer_than"):
                age(value)
            pairs.append((ours[name], value))
        else:
            raise BadFilterError(name)
    return pairs


def json_object(values: Mapping[str, str]) -> str:
    """Return an object of values that are JSON already."""
    return f"{{{', '.join(f'{json.dumps(name)}: {text}' for name, text in values.items())}}}"


def check_masked(shown: Json, wanted: Filter) -> None:
    """Refuse to search for what is not shown: the answer would tell it bit by bit."""
    payloads, headers = wanted.values.get("payload", ()), wanted.values.get("header", ())
    if (payloads or headers) and shown.payloads == "hide":
        raise BadFilterError(WORDS["payload_hidden"])
    asked = [contained(text) for text in payloads]
    asked += [contained(text, is_text=True) for text in headers]
    if any(shown.is_masked(key) for text in asked for key in _keys(text)):
        raise BadFilterError(WORDS["payload_masked"])


def _keys(text: str) -> list[str]:
    """Return all keys in JSON, however they are written, and those that are there twice."""
    keys: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        keys.extend(key for key, _ in pairs)

    json.loads(text, object_pairs_hook=note)
    return keys


def _typed(text: str) -> Iterable[tuple[str, str]]:
    """Tell what words in the field stand for: one is a type, several are text of an error."""
    found = list(_WORD.finditer(text[:MAX_LENGTH]))
    types = [m[7] for m in found if m[7] and not _ID.fullmatch(m[7]) and m[7] not in STATUSES]
    pasted: list[str] = []
    for match in found:
        name, word = match[1], match[7]
        value = match[2] or match[3] or match[4] or ""
        if name:
            head, _, path = name.partition(".")
            if head in ("payload", "header") and path:
                yield head, f"{path}={value}"
            elif name in KEYS:
                for part in value.split(",") if name in ("id", "status") else [value]:
                    yield name, part
            else:
                yield "payload", f"{name}={value}"
        elif len(types) > 1 and (pasted or word not in STATUSES):
            pasted.append(match[0])
        elif word is None:
            yield "error", match[5] or match[6] or ""
        elif _ID.fullmatch(word):
            yield "id", word.lstrip("#")
        elif word in STATUSES:
            yield "status", word
        else:
            yield "type", word
    if pasted:
        yield "error", " ".join(pasted)


def contained(text: str, *, is_text: bool = False) -> str:
    """Return the JSON that must be contained: ``customer.id=7``, or JSON as it is."""
    if text.lstrip().startswith("{"):
        return json_text(text)
    path, separator, value = text.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        raise BadFilterError(f"write a path and a value, such as customer.id=7: {text}")
    try:
        found = _quoted(value) if is_text else json_text(value)
    except BadFilterError:
        found = _quoted(value)
    for key in reversed(keys):
        found = f"{{{_quoted(key)}: {found}}}"
    return found


def _quoted(text: str) -> str:
    # A database of encoding SQL_ASCII takes no escapes of other characters.
    return json.dumps(text, ensure_ascii=False)


def json_text(text: str) -> str:
    """Return a text of JSON as it is: its numbers may be larger than those of Python.

    Raise BadFilterError if it is none.
    """
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise BadFilterError(f"this is no JSON: {text}") from None
    return text


def _no_constant(name: str) -> None:
    raise ValueError(name)


def age(text: str) -> str:
    """Return a length of time as the database reads it; raise BadFilterError."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise BadFilterError(f"write an age such as 30 min, 2 h or 7 d: {text}")
    return f"{match[1]} {_UNITS[match[2][0]]}"


def row_id(text: str) -> int | None:
    """Return the id that a text is, if it is one; of thousands of digits Python makes none."""
    found = int(text) if re.fullmatch(r"\d{1,19}", text) else 0
    return found if 0 < found < 1 << 63 else None


def _job_id(text: str) -> int:
    if (found := row_id(text)) is None:
        raise BadFilterError(f"there is no job {text}")
    return found
