"""Schedules in words."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import psycopg
import pytest

Db = psycopg.Connection[Any]

WORDS = {
    "* * * * *": "every minute",
    "*/5 * * * *": "every 5 minutes",
    "0-59/5 * * * *": "every 5 minutes",
    "5/15 * * * *": "every 15 minutes from 00:05 to 23:50 every day",
    "0 * * * *": "every hour",
    "@hourly": "every hour",
    "15 * * * *": "at minute 15 of every hour",
    "*/7 * * * *": "at minutes 0, 7, 14, 21, 28, 35, 42, 49 and 56 of every hour",
    "1,2,3,7,30,31 * * * *": "at minutes 1 to 3, 7, 30 and 31 of every hour",
    "0 2 * * *": "at 02:00 every day",
    "@midnight": "at 00:00 every day",
    "0 */12 * * *": "at 00:00 and 12:00 every day",
    "0 */2 * * *": "every 2 hours",
    "15 */2 * * *": "every 2 hours from 00:15 to 22:15 every day",
    "0 */5 * * *": "every 5 hours from 00:00 to 20:00 every day",
    "*/15 9-17 * * *": "every 15 minutes from 09:00 to 17:45 every day",
    "0-30/10 9 * * *": "every 10 minutes from 09:00 to 09:30 every day",
    "* 9-17 * * *": "every minute from 09:00 to 17:59 every day",
    "*/5 9-11,14-16 * * *": "every 5 minutes of the hours 9 to 11 and 14 to 16 every day",
    "0 9-11,14-18 * * *": "at minute 0 of the hours 9 to 11 and 14 to 18 every day",
    "0,10,25 4,9 * * *": "at 04:00, 04:10, 04:25, 09:00, 09:10 and 09:25 every day",
    "0 9 * * MON-FRI": "at 09:00 on Monday to Friday",
    "0 9 * * 1-5": "at 09:00 on Monday to Friday",
    "0 9 * * 6,0": "at 09:00 on Saturday and Sunday",
    "0 9 * * 5-7": "at 09:00 on Friday to Sunday",
    "*/5 * * * mon,wed,fri": "every 5 minutes on Monday, Wednesday and Friday",
    "@weekly": "at 00:00 on Sunday",
    "@monthly": "at 00:00 on day 1 of the month",
    "0 0 1-7,15 * *": "at 00:00 on days 1 to 7 and 15 of the month",
    "0 0 L * *": "at 00:00 on the last day of the month",
    "0 0 LW * *": "at 00:00 on the last working day (Monday to Friday) of the month",
    "0 0 1,15,L * *": "at 00:00 on days 1 and 15 and on the last day of the month",
    "0 0 * * 5L": "at 00:00 on the last Friday of the month",
    "0 9 * * 2,5L": "at 09:00 on Tuesday and on the last Friday of the month",
    "0 0 * * MON#1,MON#3,5L": (
        "at 00:00 on the first and third Monday and the last Friday of the month"
    ),
    "0 10,22 * 1-3 MON#2": (
        "at 10:00 and 22:00 on the second Monday of the month, in January to March"
    ),
    "@yearly": "at 00:00 on 1 January",
    "0 0 29 2 *": "at 00:00 on 29 February",
    "0 0 1 1,7 *": "at 00:00 on day 1 of the month, in January and July",
    "0 0 L 2 *": "at 00:00 on the last day of February",
    "0 0 * 1 5L": "at 00:00 on the last Friday of January",
    "0 0 * 1 2,5L": "at 00:00 on Tuesday and on the last Friday of the month, in January",
    "0 2 * 1-3 *": "at 02:00 every day in January to March",
    "0 2 * 5 1-5": "at 02:00 on Monday to Friday in May",
    "*/5 * * 1 *": "every 5 minutes in January",
    # Either is enough, both must match: the star decides.
    "0 0 1 * 5": "at 00:00 on day 1 of the month or on Friday",
    "0 0 1-7 * */5": "at 00:00 on Friday and Sunday, if it is day 1 to 7 of the month",
    "0 0 */15 * 5": "at 00:00 on Friday, if it is day 1, 16 or 31 of the month",
    "0 0 13 6 5": "at 00:00 on day 13 of the month or on Friday, in June",
    "0 2 1-31 * 5": "at 02:00 every day",
    "0 2 */1 * 5": "at 02:00 on Friday",
    "* * * * * *": "every second",
    "*/10 * * * * *": "every 10 seconds",
    "30 * * * * *": "at second 30 of every minute",
    "30 0 2 * * *": "at 02:00:30 every day",
    "30 */5 * * * *": "every 5 minutes from 00:00:30 to 23:55:30 every day",
    "*/10 * 9-17 * * *": "every 10 seconds from 09:00:00 to 17:59:50 every day",
    "1,7 * 9,12 * * *": ("at seconds 1 and 7 of every minute of the hours 9 and 12 every day"),
    "* */20 * * * *": "every second of minutes 0, 20 and 40 of every hour",
    "every 90 seconds": "every 90 seconds, counted from its start",
    "every 60 minutes": "every hour, counted from its start",
    "every day": "every 24 hours, counted from its start",
    "every 2 weeks": "every 14 days of 24 hours, counted from its start",
    "after 10 minutes": "10 minutes after the last run has ended",
    "after hour": "1 hour after the last run has ended",
}


def test_describe_schedule_says_it_as_a_person_would(db: Db) -> None:
    assert dict(zip(WORDS, describe(db, list(WORDS)), strict=True)) == WORDS


@pytest.mark.slow
def test_describe_schedule_has_words_for_every_schedule(db: Db) -> None:
    schedules = make_schedules(db)

    words = describe(db, schedules)

    assert len(set(schedules)) > 600
    assert all(words)
    assert [w for w in words if "  " in w or w != w.strip() or not w.isascii()] == []


@pytest.mark.slow
def test_describe_schedule_tells_different_times_apart(db: Db) -> None:
    """Equal sets have equal words, and different sets with equal words have equal times."""
    schedules = make_schedules(db)
    columns = "p.kind, p.period, p.hours, p.minutes, p.seconds, p.days, p.months, p.weekdays"
    sets = ask(db, f"{columns}, p.is_both", schedules)
    by_words = defaultdict(set)
    by_sets = defaultdict(set)
    for schedule, found, words in zip(schedules, sets, describe(db, schedules), strict=True):
        by_words[words].add((found, schedule))
        by_sets[found].add(words)

    assert [words for words in by_sets.values() if len(words) > 1] == []
    alike = [found for found in by_words.values() if len({sets for sets, _ in found}) > 1]
    assert len(alike) > 10
    for found in alike:
        calendars = ask(
            db,
            # With all months, so that each form that a month can have is looked at.
            "p.hours, p.minutes, p.seconds, p.months, array(select"
            " rota._next_day(jsonb_populate_record(p, '{\"months\": 8190}'), m::date + d)"
            " from generate_series(0, 30) d, (select distinct on (extract(dow from n),"
            " n + interval '1 month' - n) n from generate_series('2000-01-01'::timestamp,"
            " '2027-12-01', '1 month') n) m (m) order by m, d)::text",
            [schedule for _, schedule in found],
        )
        assert len(set(calendars)) == 1, found


def test_describe_schedule_refuses_what_is_no_schedule(db: Db) -> None:
    for schedule, sqlstate in (("0 2 * *", "RT006"), ("0 0 31 2 *", "RT006"), (None, "22023")):
        with pytest.raises(psycopg.Error) as refused:
            db.execute("select rota.describe_schedule(%s)", [schedule])
        assert refused.value.sqlstate == sqlstate


def describe(db: Db, schedules: list[str]) -> list[str]:
    return [words for (words,) in ask(db, "rota.describe_schedule(s)", schedules)]


def ask(
    db: Db, what: str, schedules: list[str], of: str = "rota._parse_schedule(s)"
) -> list[Any]:
    query = (
        f"select {what} from unnest(%s::text[]) with ordinality as u (s, i), {of} as p"
        " order by i"
    )
    return db.execute(query.encode(), [schedules]).fetchall()


_made: list[str] = []


def make_schedules(db: Db) -> list[str]:
    """Return texts of every kind, always the same; some are spellings of one schedule."""
    if _made:
        return _made
    number = 800
    chance = random.Random(38)
    fields = {
        "second": (0, 59, []),
        "minute": (0, 59, []),
        "hour": (0, 23, []),
        "day": (1, 28, ["L", "LW", "1-31", "*/15"]),
        "month": (1, 12, ["jan", "1-12", "MAR-MAY"]),
        "weekday": (0, 7, ["5L", "MON#2", "0-6", "7L", "1#5", "mon-fri"]),
    }

    def term(low: int, high: int, special: list[str]) -> str:
        start = chance.randint(low, high)
        step = chance.choice([1, 2, 5, 7, 10, 15, 30])
        choices = ["*", "*", "*", f"*/{step}", f"{low}-{high}", f"{low}-{high}/{step}"]
        choices += [str(start), f"{start}-{chance.randint(start, high)}", f"{start}/{step}"]
        return chance.choice(choices + special)

    def schedule() -> str:
        if chance.random() < 0.05:
            unit = chance.choice(["second", "minutes", "hour", "days", "weeks"])
            return f"{chance.choice(['every', 'after'])} {chance.randint(1, 200)} {unit}"
        chosen = list(fields.values())[chance.choice([0, 1, 1, 1]) :]
        return " ".join(
            ",".join(term(*field) for _ in range(chance.choice([1, 1, 1, 2])))
            for field in chosen
        )

    db.execute(
        """
        create or replace function pg_temp.is_possible(schedule text) returns boolean
        language plpgsql as $$
        begin
            perform rota._parse_schedule(schedule);
            return true;
        exception
            when sqlstate 'RT006' then
                return false;
        end;
        $$
        """
    )
    made = [schedule() for _ in range(2 * number)]
    possible = ask(db, "pg_temp.is_possible(s)", made, of="generate_series(1, 1)")
    _made.extend([text for text, (good,) in zip(made, possible, strict=True) if good][:number])
    return _made
