"""Compare next_run() with cronsim, which was written to agree with Debian's cron.

    cron_oracle.py [--cases N] [--seed N] [--processes N]

A case is a random text, a zone and an instant; at least half of the instants lie within two
days of a change of the zone's clock.  Where the two disagree a referee decides, and each
difference must be one of the oracle's own, under its name.  Exits with 1 if the SQL was wrong
once.

What is known of the oracle, and how it is allowed for:

  a-a/n          is read as a/n: it is given the text without the step
  six fields     with fixed minute and hour: it follows the wall clock, as cron has no seconds;
                 it is asked without a zone, and its answer is put into the zone here
  midnight       it makes new days of 00:00, which is skipped or comes twice where a clock is
                 moved to or from midnight
  part of an     it goes in whole hours, past times where a clock is moved by half an
  hour           hour, or at a quarter to
  no answer      a few of these send it round and round: it is given three seconds, and then
                 what the SQL says is checked against every instant before it
  second half    started in the second half of a doubled hour it gives times of the first half
                 again: they are passed over
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
from cronsim import CronSim

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.referee import SECOND, Referee, change_near, first_instant, wall
from rota.schema import run_script
from rota.testing import EmbeddedPostgres

ZONES = """
Africa/Cairo Africa/Casablanca Africa/El_Aaiun Africa/Juba Africa/Tunis Africa/Windhoek
America/Adak America/Asuncion America/Bahia America/Bogota America/Campo_Grande America/Cancun
America/Caracas America/Chicago America/Denver America/Grand_Turk America/Halifax
America/Havana America/Indiana/Indianapolis America/Los_Angeles America/Mexico_City
America/Miquelon America/Montevideo America/New_York America/Noronha America/Nuuk
America/Port-au-Prince America/Regina America/Santiago America/Sao_Paulo America/St_Johns
Antarctica/Casey Antarctica/Macquarie Antarctica/Troll Asia/Amman Asia/Baku Asia/Beirut
Asia/Damascus Asia/Dhaka Asia/Gaza Asia/Hovd Asia/Jerusalem Asia/Kathmandu Asia/Kolkata
Asia/Pyongyang Asia/Tehran Asia/Tokyo Asia/Ulaanbaatar Asia/Yerevan Atlantic/Azores
Atlantic/Stanley Australia/Adelaide Australia/Brisbane Australia/Eucla Australia/Lord_Howe
Australia/Perth Australia/Sydney Europe/Chisinau Europe/Dublin Europe/Istanbul Europe/Kyiv
Europe/Lisbon Europe/London Europe/Minsk Europe/Moscow Europe/Paris Europe/Samara
Europe/Volgograd Europe/Warsaw Indian/Mauritius Pacific/Apia Pacific/Auckland
Pacific/Bougainville Pacific/Chatham Pacific/Easter Pacific/Fiji Pacific/Kiritimati
Pacific/Norfolk Pacific/Tongatapu UTC
""".split()  # noqa: SIM905 -- eighty lines otherwise

HELPERS = """
create schema rota_fuzz;

create function rota_fuzz.is_possible(schedule text)
    returns boolean
    language plpgsql
as $$
begin
    perform rota._parse_schedule(schedule);
    return true;
exception
    when sqlstate 'RT006' then
        return false;
end;
$$;

create function rota_fuzz.verdict(schedule text, out state text, out milliseconds float8)
    language plpgsql
as $$
declare
    v_began constant timestamptz := clock_timestamp();
begin
    state := '00000';
    begin
        perform rota.next_run(schedule, 'Europe/Warsaw', '2026-01-01 00:00+00');
    exception
        when others then
            state := sqlstate;
    end;
    milliseconds := 1000 * extract(epoch from clock_timestamp() - v_began);
end;
$$;
"""
FIRST, LAST = datetime(2000, 1, 1, tzinfo=UTC), datetime(2038, 1, 1, tzinfo=UTC)
BATCH = 500
NEAR = timedelta(days=2)
PATIENCE = 3.0
MONTHS = "JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC".split()  # noqa: SIM905
WEEKDAYS = "SUN MON TUE WED THU FRI SAT".split()  # noqa: SIM905
FIELDS = {
    "second": (0, 59),
    "minute": (0, 59),
    "hour": (0, 23),
    "day": (1, 31),
    "month": (1, 12),
    "weekday": (0, 7),
}


def changes(zone: str) -> list[datetime]:
    """Return the instants between FIRST and LAST at which the offset of *zone* changes."""
    info, found = ZoneInfo(zone), []
    at, offset = FIRST, FIRST.astimezone(ZoneInfo(zone)).utcoffset()
    while at < LAST:
        at += timedelta(hours=12)
        now = at.astimezone(info).utcoffset()
        if now != offset:
            found.append(at)
            offset = now
    return found


def random_term(dice: random.Random, field: str) -> str:
    low, high = FIELDS[field]
    # The hours at which clocks are changed.
    value = dice.randint(low, 4 if field == "hour" and dice.random() < 0.7 else high)
    kind = dice.random()
    if kind < 0.45:
        return name(dice, field, value)
    if kind < 0.65:
        end = dice.randint(value, high)
        step = f"/{dice.randint(1, 12)}" if dice.random() < 0.3 else ""
        return f"{name(dice, field, value)}-{name(dice, field, end)}{step}"
    if kind < 0.8:
        return f"*/{dice.choice((1, 2, 3, 5, 7, 10, 15, 20, 30, 45, 61))}"
    if kind < 0.88:
        return f"{value}/{dice.randint(1, 40)}"
    if field == "day":
        return dice.choice(("L", "LW"))
    if field == "weekday":
        return dice.choice((f"{value}L", f"{name(dice, field, value)}#{dice.randint(1, 5)}"))
    return str(value)


def name(dice: random.Random, field: str, value: int) -> str:
    if field == "month" and dice.random() < 0.3:
        return dice.choice((str.lower, str.upper))(MONTHS[value - 1])
    if field == "weekday" and value < 7 and dice.random() < 0.3:
        return WEEKDAYS[value]
    return str(value)


def random_text(dice: random.Random) -> str:
    stars = {"minute": 0.25, "hour": 0.35, "day": 0.6, "month": 0.75, "weekday": 0.6}
    fields = [
        "*"
        if dice.random() < stars[field]
        else ",".join(random_term(dice, field) for _ in range(dice.choice((1, 1, 1, 2, 3))))
        for field in stars
    ]
    if dice.random() < 0.15:
        fields.insert(0, dice.choice(("*", "0", "*/10", "30", "0-5", "7,59")))
    return " ".join(fields)


def random_instant(dice: random.Random, near: list[datetime]) -> datetime:
    if near and dice.random() < 0.75:
        at = dice.choice(near) + timedelta(seconds=dice.uniform(-1, 1) * NEAR.total_seconds())
    else:
        at = FIRST + timedelta(seconds=dice.random() * (LAST - FIRST).total_seconds())
    return at.replace(microsecond=0) if dice.random() < 0.8 else at


def without_step(text: str) -> str:
    """Take the step from a-a/n, which means a and which the oracle reads as a/n."""
    words = text.upper().split()
    words[-2] = re.sub("[A-Z]{3}", lambda found: str(MONTHS.index(found[0]) + 1), words[-2])
    words[-1] = re.sub("[A-Z]{3}", lambda found: str(WEEKDAYS.index(found[0])), words[-1])
    return re.sub(r"\b0*(\d+)-0*\1/\d+", r"\1", " ".join(words))


def expected(text: str, zone: ZoneInfo, after: datetime) -> datetime | None:
    """Return what the oracle says; None if it gives up."""
    words = text.split()
    is_fixed = not (words[-5].startswith("*") or words[-4].startswith("*"))
    try:
        if not is_fixed:
            return next(CronSim(text, after.astimezone(zone))).astimezone(UTC)
        if len(words) == 5:
            for found in CronSim(text, after.astimezone(zone)):
                if found.astimezone(UTC) > after:
                    return found.astimezone(UTC)
        for shown in CronSim(text, wall(after, zone)):
            found = first_instant(shown, zone)
            if found > after:
                return found
    except (StopIteration, RuntimeError):
        return None
    return None


def patiently(function: Callable[..., datetime | None], *arguments: Any) -> datetime | None:
    """Call the oracle, which in some cases goes round and round for ever."""

    def give_up(*_: object) -> None:
        raise StopIteration

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        return function(*arguments)
    except StopIteration:
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def verdict(
    text: str, zone: str, after: datetime, ours: datetime | None, theirs: datetime | None
) -> str:
    """Say whose the difference is."""
    referee = Referee(text, ZoneInfo(zone))
    words = text.split()
    is_fixed = not (words[-5].startswith("*") or words[-4].startswith("*"))
    runs_at = referee.is_fixed if is_fixed else referee.is_shown
    if ours is None:
        is_wrong = theirs is not None and runs_at(theirs)
        return "WRONG" if is_wrong else "oracle: runs in a gap what is named there alone"
    if not runs_at(ours) or ours <= after:
        return "WRONG"
    # Both agree that nothing comes long before: look at what lies between the answers.
    begin = after if theirs is None and ours - after < 40 * NEAR else min(ours, theirs or ours)
    # No offset of today has seconds, so where none are named whole minutes are enough.
    step = SECOND if len(words) == 6 else timedelta(minutes=1)
    at = max(after, begin - timedelta(hours=30)).replace(second=0, microsecond=0) + step
    while at < ours:
        if at > after and runs_at(at):
            return "WRONG"
        at += step
    if theirs is None:
        return "oracle: gave no answer"
    return oracle_quirk(ZoneInfo(zone), after, max(ours, theirs))


def oracle_quirk(zone: ZoneInfo, after: datetime, until: datetime) -> str:
    """Name what the oracle stumbled over; WRONG if nothing known is near."""
    at = after - NEAR
    while at < until + NEAR:
        change = change_near(at, zone, NEAR)
        if change is not None:
            left, entered = wall(change - SECOND, zone) + SECOND, wall(change, zone)
            low, high = sorted((left, entered))
            if (high - low) % timedelta(hours=1) or low.minute:
                return "oracle: a clock moved by or at a part of an hour"
            if low.date() != high.date() or not low.hour or not high.hour:
                return "oracle: a clock moved to or from midnight"
        at += NEAR
    return "WRONG"


def play(url: str, cases: int, seed: int) -> tuple[Counter[str], list[Any]]:
    """Compare so many cases, by whole batches, and return the counts and what was wrong."""
    dice = random.Random(seed)
    near = {zone: changes(zone) for zone in ZONES}
    counts: Counter[str] = Counter()
    wrong: list[tuple[Any, ...]] = []
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("set timezone = 'UTC'")
        for _ in range(0, cases, BATCH):
            batch = []
            while len(batch) < BATCH:
                text, zone = random_text(dice), dice.choice(ZONES)
                try:
                    CronSim(without_step(text), FIRST)
                except Exception:  # an impossible day
                    continue
                batch.append((text, zone, random_instant(dice, near[zone])))
            columns = [list(column) for column in zip(*batch, strict=True)]
            found = connection.execute(
                """
                select case when rota_fuzz.is_possible(c.text)
                    then rota.next_run(c.text, c.zone, c.after) end
                from unnest(%s::text[], %s::text[], %s::timestamptz[])
                    with ordinality as c (text, zone, after, ordinal)
                order by c.ordinal
                """,
                columns,
            ).fetchall()
            for (text, zone, after), (ours,) in zip(batch, found, strict=True):
                plain = without_step(text)
                theirs = patiently(expected, plain, ZoneInfo(zone), after)
                counts["compared"] += 1
                counts["near a change"] += any(abs(after - at) <= NEAR for at in near[zone])
                counts["a-a/n"] += plain.count("/") != text.count("/")
                if ours != theirs:
                    whose = verdict(plain, zone, after, ours, theirs)
                    counts[whose] += 1
                    if whose == "WRONG":
                        wrong.append((text, zone, after, ours, theirs))
    return counts, wrong[:20]


def main() -> int:
    started = time.monotonic()
    counts: Counter[str] = Counter()
    wrong: list[Any] = []
    for some, bad in play_in_processes(__doc__, "--cases", play):
        counts += some
        wrong += bad
    for what, count in sorted(counts.items()):
        print(f"{count:>9}  {what}")
    for case in wrong:
        print("wrong:", *case)
    print(f"{len(ZONES)} zones, {time.monotonic() - started:.0f} s")
    return 1 if counts["WRONG"] else 0


def play_in_processes(
    text: str, option: str, play: Callable[[str, int, int], Any]
) -> list[Any]:
    """Read the command line, play on a server of its own, and return what each player says."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument(option, dest="count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    share = arguments.count // arguments.processes
    with EmbeddedPostgres(settings=["fsync=off"]) as server:
        url = server.url("postgres")
        with psycopg.connect(url, autocommit=True) as connection:
            run_script(connection, "install.sql", {})
            connection.execute(HELPERS)
        with ProcessPoolExecutor(arguments.processes) as pool:
            seeds = range(arguments.seed * 1000, arguments.seed * 1000 + arguments.processes)
            return [
                player.result() for player in [pool.submit(play, url, share, s) for s in seeds]
            ]


if __name__ == "__main__":
    sys.exit(main())
