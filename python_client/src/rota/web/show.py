"""How values are shown: lengths of time, numbers, moments, and JSON without what is masked.

`WORDS` are the words of the page, which are all in one file: words.toml.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlencode

from markupsafe import Markup, escape

from ..client.values import span as two_units

WORDS: dict[str, str] = tomllib.loads(Path(__file__).with_name("words.toml").read_text())

Payloads = Literal["hide", "mask", "show"]

MASKED_KEYS = (
    "password", "passwd", "secret", "token", "api_key", "apikey", "authorization", "cookie",
    "private_key", "credit_card", "card_number", "cvc", "iban", "ssn",
)  # fmt: skip
NOISE = frozenset((
    "anchored_at", "created_at", "updated_at", "kind",
    "limit_name", "pause_name", "paused_at", "paused_by", "next_run_at", "disabled_at",
    "tag", "queue_of", "priority_of", "run_at_of",
))  # fmt: skip
"""What the database notes with each change of a setting, and is no news."""
MASK = "••••••"
MAX_JSON = 200_000
MAX_INDENT = 20
"""Deeper, a line for each of very many values would be nothing but blanks, in megabytes."""


def span(length: timedelta | None) -> str:
    """Return a length of time by its two largest units."""
    if length is None:
        return ""
    seconds = abs(length.total_seconds())
    return two_units(length) if seconds >= 1 else f"{round(seconds * 1000)} ms"


def number(value: float | None) -> str:
    """Return a count with thin spaces between thousands."""
    return "?" if value is None else f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def moment(value: datetime | None, now: datetime | None = None) -> Markup:
    """Return a time: how far from now if that is given, else in full; the rest in its title."""
    if value is None:
        return Markup("")
    utc = value.astimezone(UTC)
    full = f"{utc:%Y-%m-%d %H:%M:%S} UTC"
    if now is None:
        return Markup('<time datetime="{}" title="{}" data-full>{}</time>').format(
            utc.isoformat(), full, full
        )
    away = now - value
    told = WORDS["time_in" if away < timedelta(0) else "time_ago"].format(span(away))
    if abs(away) < timedelta(seconds=1):
        told = WORDS["time_now"]
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        utc.isoformat(), full, told
    )


def short(value: datetime) -> Markup:
    """Return a time for the edge of a plot."""
    utc = value.astimezone(UTC)
    return Markup('<time datetime="{}" data-full="short">{}</time>').format(
        utc.isoformat(), f"{utc:%m-%d %H:%M} UTC"
    )


class Number(str):
    """A number as it was written: it may be larger than those of any language."""

    __slots__ = ()


class Json:
    """Shows JSON: indented, escaped, its numbers as they are, and without what is masked."""

    def __init__(self, payloads: Payloads, masked_keys: Collection[str]) -> None:
        self.payloads = payloads
        self._masked = tuple(key.lower() for key in masked_keys)

    def is_masked(self, key: str) -> bool:
        """Whether the value of a key is not shown."""
        return self.payloads != "show" and any(word in key.lower() for word in self._masked)

    def parsed(self, text: str) -> Any:
        """Return the value of a text, each number in it as it was written."""
        return json.loads(text, parse_float=Number, parse_int=Number)

    def pretty(self, text: str | None) -> Markup:
        """Return JSON for reading."""
        if text is None:
            return Markup("")
        if self.payloads == "hide":
            return Markup('<span class="quiet">{}</span>').format("hidden")
        if len(text) > MAX_JSON:
            return Markup('<span class="quiet">{}</span>').format(
                f"{len(text):,} characters: too long to be shown here"
            )
        try:
            return Markup("").join(self._lines(self.parsed(text), 0))
        except (RecursionError, ValueError):
            # Too deep to look for what has to be masked.
            told = text if self.payloads == "show" else "nested too deeply to be shown"
            return escape(told)

    def editable(self, text: str) -> str | None:
        """Return JSON to be edited, each number as it is; None where not all may be seen."""
        if self.payloads == "hide" or len(text) > MAX_JSON:
            return None
        try:
            value = self.parsed(text)
            return None if self._has_masked(value) else "".join(self._edited(value, "\n"))
        except (RecursionError, ValueError):
            return None

    def _has_masked(self, value: Any) -> bool:
        if isinstance(value, dict):
            return any(self.is_masked(k) or self._has_masked(v) for k, v in value.items())
        return isinstance(value, list) and any(map(self._has_masked, value))

    def _edited(self, value: Any, newline: str) -> Iterator[str]:
        inner = newline + "  " if len(newline) < 2 * MAX_INDENT else newline
        if isinstance(value, dict) and value:
            for place, (key, one) in enumerate(value.items()):
                yield f"{',' if place else '{'}{inner}{json.dumps(key, ensure_ascii=False)}: "
                yield from self._edited(one, inner)
            yield newline + "}"
        elif isinstance(value, list) and value:
            for place, one in enumerate(value):
                yield f"{',' if place else '['}{inner}"
                yield from self._edited(one, inner)
            yield newline + "]"
        elif isinstance(value, Number):
            yield value
        else:
            yield json.dumps(value, ensure_ascii=False)

    def line(self, text: str | None, length: int = 120) -> str:
        """Return JSON in one short line."""
        if text is None or self.payloads == "hide":
            return ""
        try:
            told = "".join(self._plain(self.parsed(text)))
        except (RecursionError, ValueError):
            return "…"
        return told if len(told) <= length else f"{told[: length - 1]}…"

    def told(self, value: Any, length: int = 60) -> str:
        """Return a value in a few words."""
        try:
            text = value if isinstance(value, str) else "".join(self._plain(value))
        except RecursionError:
            return "…"
        return text if len(text) <= length else f"{text[: length - 1]}…"

    def changes(self, before: str | None, after: str | None) -> list[tuple[str, str, str]]:
        """Return the names whose values an act has changed, each with both values."""
        try:
            had, has = (self.parsed(text) if text else {} for text in (before, after))
        except (RecursionError, ValueError):
            return []
        if not isinstance(had, dict) or not isinstance(has, dict):
            return []
        return [
            (name, *(self._value(name, row) for row in (had, has)))
            for name in dict.fromkeys([*had, *has])
            if name not in NOISE and had.get(name) != has.get(name)
        ]

    def _value(self, name: str, row: dict[str, Any]) -> str:
        if name not in row:
            return ""
        is_hidden = self.payloads == "hide" and name in ("payload", "merge", "headers")
        return MASK if is_hidden or self.is_masked(name) else self.told(row[name], 200)

    def _plain(self, value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield "{"
            for place, (key, inner) in enumerate(value.items()):
                yield f"{', ' if place else ''}{json.dumps(key, ensure_ascii=False)}: "
                if self.is_masked(key):
                    yield MASK
                else:
                    yield from self._plain(inner)
            yield "}"
        elif isinstance(value, list):
            yield "["
            for place, inner in enumerate(value):
                yield ", " if place else ""
                yield from self._plain(inner)
            yield "]"
        else:
            yield _scalar(value)

    def _lines(self, value: Any, depth: int) -> Iterator[Markup]:
        inside, outside = ("\n" + "  " * min(n, MAX_INDENT) for n in (depth + 1, depth))
        if isinstance(value, dict) and value:
            yield Markup("{")
            for place, (key, inner) in enumerate(value.items()):
                name = json.dumps(key, ensure_ascii=False)
                yield Markup('{}{}<span class="k">{}</span>: ').format(
                    "," if place else "", inside, name
                )
                if self.is_masked(key):
                    yield Markup('<span class="quiet">{}</span>').format(MASK)
                else:
                    yield from self._lines(inner, depth + 1)
            yield Markup("{}").format(outside + "}")
        elif isinstance(value, list) and value:
            yield Markup("[")
            for place, inner in enumerate(value):
                yield Markup("{}").format(("," if place else "") + inside)
                yield from self._lines(inner, depth + 1)
            yield Markup("{}").format(outside + "]")
        else:
            kind = "n" if isinstance(value, Number) else "s" if isinstance(value, str) else "b"
            yield Markup('<span class="{}">{}</span>').format(kind, _scalar(value))


def _scalar(value: Any) -> str:
    return value if isinstance(value, Number) else json.dumps(value, ensure_ascii=False)


def spark(counts: Collection[int], width: int = 96, height: int = 18) -> Markup:
    """Return bars for some counts, as a picture that needs no script."""
    most = max(counts, default=0)
    if most == 0:
        return Markup("")
    step = width / len(counts)
    bars = Markup("").join(
        Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
            place * step, height - max(count / most * height, 1.5), step - 1,
            max(count / most * height, 1.5),
        )
        for place, count in enumerate(counts)
        if count
    )  # fmt: skip
    return Markup(
        '<svg class="spark" viewBox="0 0 {0} {1}" width="{0}" height="{1}" aria-hidden="true">'
        "{2}</svg>"
    ).format(width, height, bars)


def schedule_path(name: str) -> str:
    """Return where a schedule is shown; in a path browsers and proxies shorten // and /.. ."""
    is_kept = "//" not in name and "/." not in name
    return (
        f"/schedules/{quote(name)}" if is_kept else f"/schedules/?{urlencode({'name': name})}"
    )


FILTERS: dict[str, Callable[..., Any]] = {
    "span": span,
    "number": number,
    "moment": moment,
    "short": short,
    "spark": spark,
    "schedule_path": schedule_path,
}
