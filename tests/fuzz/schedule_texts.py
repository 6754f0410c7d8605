"""Throw random strings at the reader of schedule texts, with cronsim as the oracle.

    schedule_texts.py [--strings N] [--seed N] [--processes N]

A string must be accepted exactly when cronsim accepts it, but for the differences named in
`explained`; nothing may take more than 50 ms or raise anything but RT006 or 22023.  Exits with
1 if one did.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import random
import re
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import psycopg
from cronsim import CronSim, CronSimError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.cron_oracle import play_in_processes, random_text, without_step

AFTER = datetime(2026, 1, 1, tzinfo=UTC)
LONGEST_MS = 50.0
CHARACTERS = "0123456789*/,-#L \t" + "LWMONJAFESUTHRIDC@?." + "0159*/,-  "
ANYTHING = (
    CHARACTERS + "\n\r\f\v\x1c\x85\u00a0\u3000é٣\u017f\u0131Ω漢😀'\"\\%$;{}()[]|&^~`!=+<>_:xyz"
)
PIECES = """
* */ 0 1 5 7 8 23 24 31 32 59 60 99999999999999999999 007 - , / # L LW W 5L 7L 8L MON MON# #2
#6 JAN SUN SAT-SUN @daily @hourly @reboot @ every after minute minutes hours 90 second seconds
week -1 1-5 5-1 */0 */1 *-5 1/2/3 1-2-3 ,, ,1 1, 29 30 31 2 feb * * * ? H
""".split()  # noqa: SIM905 -- one a line otherwise
NUMBERS = ("", "0", "1", "90", "007", "3155760000", "3155760001", "9" * 30, "-1", "1.5")
UNITS = ("second", "seconds", "MINUTES", "hour", "day", "weeks", "month", "")
OURS = re.compile(
    r"[ \t\n\r\f\v]*(@(yearly|annually|monthly|weekly|daily|midnight|hourly)"
    r"|(every|after)[ \t\n\r\f\v]+(0*([1-9][0-9]*)[ \t\n\r\f\v]+)?"
    r"(second|minute|hour|day|week)s?)[ \t\n\r\f\v]*",
    re.IGNORECASE | re.ASCII,
)
SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
CENTURY = 36525 * 86400


def random_string(dice: random.Random) -> str:
    kind = dice.random()
    if kind < 0.25:
        return random_text(dice)
    if kind < 0.6:
        return mutated(dice, random_text(dice))
    if kind < 0.65:
        words = (dice.choice(("every", "after")), dice.choice(NUMBERS), dice.choice(UNITS))
        return mutated(dice, " ".join(words)) if dice.random() < 0.5 else " ".join(words)
    if kind < 0.8:
        glue = dice.choice((" ", " ", ""))
        return glue.join(dice.choice(PIECES) for _ in range(dice.randint(1, 9)))
    if kind < 0.9:
        words = (f"{dice.choice('0123456789*')}" for _ in range(dice.randint(4, 7)))
        return " ".join(words) + dice.choice(("", "", *PIECES))
    length = dice.choice((3, 10, 20, 60, 300))
    return "".join(dice.choice(ANYTHING) for _ in range(dice.randint(0, length)))


def mutated(dice: random.Random, text: str) -> str:
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        at = dice.randint(0, len(text))
        piece = dice.choice(PIECES) if dice.random() < 0.3 else dice.choice(ANYTHING)
        text = text[:at] + dice.choice((piece, "")) + text[at + dice.choice((0, 1)) :]
    return text


def oracle_accepts(text: str) -> bool | None:
    """Return what cronsim says; None if it says nothing sensible."""
    try:
        CronSim(text, AFTER)
    except CronSimError:
        return False
    except Exception:  # whatever it stumbles over
        return None
    return True


def never_runs(text: str) -> bool:
    try:
        next(CronSim(text, AFTER))
    except (StopIteration, RuntimeError):
        return True
    return False


def is_ours(text: str) -> bool:
    """Return whether the text is one that only rota has."""
    found = OURS.fullmatch(text)
    if not found or len(text) > 255:
        return False
    unit = found[6]
    return unit is None or int(found[5] or 1) * SECONDS[unit.lower()] <= CENTURY


def explained(text: str, *, ours: bool, theirs: bool | None) -> str | None:
    """Name the difference; None if it has no name."""
    if theirs is None and not ours:
        return "the oracle stumbles"
    if ours and not theirs and is_ours(text):
        return "@daily, every, after: not known to the oracle"
    if theirs and not ours:
        if len(text) > 255:
            return "longer than 255 characters"
        if not text.isascii() or re.search(r"[\x1c-\x1f]", text):
            return "white space and capitals beyond ASCII"
        if re.search(r"(^|[\s,])LW?/", text, re.IGNORECASE):
            return "a step of L or LW, which means nothing"
        if never_runs(without_step(text)):
            return "a day that never comes, found late by the oracle"
    return None


def play(
    url: str, strings: int, seed: int
) -> tuple[Counter[str], list[str], tuple[float, str]]:
    dice = random.Random(seed)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    longest = (0.0, "")
    with psycopg.connect(url, autocommit=True) as connection:
        for _ in range(0, strings, 1000):
            batch = [random_string(dice) for _ in range(1000)]
            verdicts = connection.execute(
                """
                select (rota_fuzz.verdict(c.text)).*
                from unnest(%s::text[]) with ordinality as c (text, ordinal)
                order by c.ordinal
                """,
                [batch],
            ).fetchall()
            for text, (state, milliseconds) in zip(batch, verdicts, strict=True):
                counts["strings"] += 1
                if milliseconds > LONGEST_MS:  # the machine may have been elsewhere
                    milliseconds = min(
                        connection.execute(
                            "select milliseconds from rota_fuzz.verdict(%s)", [text]
                        ).fetchone()[0]  # type: ignore[index]
                        for _ in range(5)
                    )
                longest = max(longest, (milliseconds, text))
                ours, theirs = state == "00000", oracle_accepts(text)
                counts["accepted"] += ours
                if state not in ("00000", "RT006", "22023"):
                    counts["WRONG: " + state] += 1
                    wrong.append(f"{state} {text!r}")
                elif not ours and is_ours(text):
                    counts["WRONG: not accepted"] += 1
                    wrong.append(f"not accepted: {text!r}")
                elif ours != theirs:
                    name = explained(text, ours=ours, theirs=theirs)
                    counts[name or "WRONG: accepted by one"] += 1
                    if name is None:
                        wrong.append(f"ours {ours}, theirs {theirs}: {text!r}")
    return counts, wrong[:20], longest


def main() -> int:
    started = time.monotonic()
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    longest = (0.0, "")
    for some, bad, slow in play_in_processes(__doc__, "--strings", play):
        counts += some
        wrong += bad
        longest = max(longest, slow)
    for what, count in sorted(counts.items()):
        print(f"{count:>9}  {what}")
    for case in wrong:
        print("wrong:", case)
    print(f"the slowest took {longest[0]:.1f} ms: {longest[1]!r}")
    print(f"{time.monotonic() - started:.0f} s")
    return 1 if wrong or longest[0] > LONGEST_MS else 0


if __name__ == "__main__":
    sys.exit(main())
