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

WORDS: dict[str, str] = tomllib.loads(
    Path(__file__).with_name("words.toml").read_text(encoding="utf-8")
)

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
        """Whether the value of a key is not shown, as of api_key, apiKey and API-Key."""
        told = key.lower()
        joined = "".join(filter(str.isalnum, told))
        return self.payloads != "show" and any(
            word in told or ("_" in word and word.replace("_", "") in joined)
            for word in self._masked
        )

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
            return Markup("").join(
                Markup('<span class="{}">{}</span>').format(kind, piece) if kind else piece
                for kind, piece in self._pieces(self.parsed(text), "\n")
            )
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
            return None if self._has_masked(value) else self._text(value, "\n")
        except (RecursionError, ValueError):
            return None

    def _has_masked(self, value: Any) -> bool:
        if isinstance(value, dict):
            return any(self.is_masked(k) or self._has_masked(v) for k, v in value.items())
        return isinstance(value, list) and any(map(self._has_masked, value))

    def line(self, text: str | None, length: int = 120) -> str:
        """Return JSON in one short line."""
        if text is None or self.payloads == "hide":
            return ""
        try:
            told = self._text(self.parsed(text))
        except (RecursionError, ValueError):
            return "…"
        return told if len(told) <= length else f"{told[: length - 1]}…"

    def told(self, value: Any, length: int = 60) -> str:
        """Return a value in a few words."""
        try:
            text = value if isinstance(value, str) else self._text(value)
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

    def _text(self, value: Any, newline: str | None = None) -> str:
        return "".join(text for _, text in self._pieces(value, newline))

    def _pieces(self, value: Any, newline: str | None) -> Iterator[tuple[str, str]]:
        """Yield JSON with what each piece of it is; without *newline* all in one line."""
        if not isinstance(value, dict | list) or not value:
            if isinstance(value, Number):
                yield "n", value
            else:
                text = json.dumps(value, ensure_ascii=False)
                yield "s" if isinstance(value, str) else "b", text
            return
        inner = newline
        if newline is not None and len(newline) < 2 * MAX_INDENT:
            inner = newline + "  "
        opening, closing = "{}" if isinstance(value, dict) else "[]"
        yield "", opening + (inner or "")
        named = value.items() if isinstance(value, dict) else ((None, one) for one in value)
        for place, (key, one) in enumerate(named):
            if place:
                yield "", ", " if inner is None else f",{inner}"
            if key is not None:
                yield "k", json.dumps(key, ensure_ascii=False)
                yield "", ": "
            if key is not None and self.is_masked(key):
                yield "quiet", MASK
            else:
                yield from self._pieces(one, inner)
        yield "", (newline or "") + closing


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
