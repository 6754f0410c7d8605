"""How schedule texts are read."""

from __future__ import annotations

import psycopg
import pytest

from sql.helpers import call, refused, scalar, value

ACCEPTED = """
* * * * *
0 2 * * *
*/5 0-23/2 1,15 JAN-MAR mon-fri
59 23 31 12 7
0 0 1 1 0
007 00 01 1 00
5/15 * * * *
5-5 * * * *
*/999999999999999999999 * * * *
0 0 L * *
0 0 LW,15 * *
0 0 * * 5L
0 0 * * 7L,0#1,MON#2,sat#05
0 0 29 2 *
0 0 31 2 MON
0 0 30 2 1-5
30 0 2 * * *
*/10 * * * * *
@hourly
@DAILY
@midnight
@weekly
@monthly
@yearly
@annually
every second
every 90 seconds
EVERY 1 Minute
every 007 hours
every 36525 days
after 10 minutes
after week
""".strip().split("\n")

REFUSED = {
    "": "five fields",
    "   ": "five fields",
    "* * * *": "words: 4",
    "* * * * * * *": "words: 7",
    "@reboot": "five fields",
    "@ daily": "five fields",
    "60 * * * *": "minute '60' is not *, 0 to 59",
    "60 * * * * *": "second '60' is not *, 0 to 59",
    "* 24 * * *": "hour '24' is not *, 0 to 23",
    "* * 0 * *": "day '0' is not *, 1 to 31, L or LW",
    "* * 32 * *": "day '32'",
    "* * * 13 *": "month '13' is not *, 1 to 12, JAN to DEC",
    "* * * 0 *": "month '0'",
    "* * * * 8": "weekday '8' is not *, 0 to 7, SUN to SAT, 5L or MON#2",
    "JAN * * * *": "minute 'JAN'",
    "* * * MON *": "month 'MON'",
    "* * * * JAN": "weekday 'JAN'",
    "* * * * MONDAY": "weekday 'MONDAY'",
    "5-1 * * * *": "minute '5-1'",
    "* * * * SAT-SUN": "weekday 'SAT-SUN'",
    "1-2-3 * * * *": "minute '1-2-3'",
    "*-5 * * * *": "minute '*-5'",
    "*/0 * * * *": "minute '*/0'",
    "*/00 * * * *": "minute '*/00'",
    "1//2 * * * *": "minute '1//2'",
    "/2 * * * *": "minute '/2'",
    "1,,2 * * * *": "minute ''",
    ",1 * * * *": "minute ''",
    "1, * * * *": "minute ''",
    "-1 * * * *": "minute '-1'",
    "+1 * * * *": "minute '+1'",
    "1.5 * * * *": "minute '1.5'",
    "1e1 * * * *": "minute '1E1'",
    "99999999999999999999 * * * *": "minute '99999999999999999999'",
    "* * ? * *": "day '?'",
    "* * 15W * *": "day '15W'",
    "* * L/2 * *": "day 'L/2'",
    "* * WL * *": "day 'WL'",
    "* L * * *": "hour 'L'",
    "* * * * L": "weekday 'L'",
    "* * * * MONL": "weekday 'MONL'",
    "* * * * 8L": "weekday '8L'",
    "* * * * MON#0": "weekday 'MON#0'",
    "* * * * MON#6": "weekday 'MON#6'",
    "* * * * 1-3#2": "weekday '1-3#2'",
    "* * MON#2 * *": "day 'MON#2'",
    "0 0 31 2 *": "none of its months",
    "0 0 30,31 2 *": "none of its months",
    "0 0 31 4,6,9,11 *": "none of its months",
    "0 0 */31 * MON#2": "none of its months",
    "every": "'' must be a whole number",
    "every 0 minutes": "'0 minutes' must be",
    "every -5 minutes": "'-5 minutes' must be",
    "every 1.5 hours": "'1.5 hours' must be",
    "every 5 months": "'5 months' must be",
    "every 5": "'5' must be",
    "every 5 minutes please": "must be",
    "every 36526 days": "at most 100 years",
    "every 99999999999 seconds": "must be",
    "after": "'' must be",
    "after the last one": "must be",
    "0 0 * * MON\u00a0": "weekday",
    "* " * 200: "at most 255",
}


@pytest.mark.parametrize("schedule", ACCEPTED)
def test_a_schedule_is_accepted(read_only_db, schedule):
    assert value(read_only_db, "next_run", schedule=schedule) is not None
    assert value(read_only_db, "next_run", schedule=f"\t {schedule}\n") is not None


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(s, marks=[] if s.isascii() else pytest.mark.of_utf8) for s in REFUSED],
)
def test_a_bad_schedule_is_refused_with_the_text_the_field_and_what_was_expected(
    read_only_db, schedule
):
    with pytest.raises(psycopg.Error) as caught:
        call(read_only_db, "next_run", schedule=schedule)

    assert caught.value.sqlstate == "RT006"
    message = caught.value.diag.message_primary
    assert repr(schedule[:20])[:-1].strip("'\"").split("\\")[0] in message
    assert REFUSED[schedule] in message
    assert "0 2 * * *" in caught.value.diag.message_hint


def test_a_schedule_is_required(read_only_db):
    with refused("schedule"):
        call(read_only_db, "next_run", schedule=None)


def test_a_schedule_of_ten_megabytes_is_refused_and_not_repeated(read_only_db):
    with pytest.raises(psycopg.Error) as caught:
        call(read_only_db, "next_run", schedule="1," * 5_000_000)

    assert caught.value.sqlstate == "RT006"
    assert len(caught.value.diag.message_primary) < 200


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("@hourly", "0 * * * *"),
        ("@daily", "0 0 * * *"),
        ("@midnight", "0 0 * * *"),
        ("@weekly", "0 0 * * 0"),
        ("@monthly", "0 0 1 * *"),
        ("@yearly", "0 0 1 1 *"),
        ("@annually", "0 0 1 1 *"),
        ("0 0 * * 7", "0 0 * * SUN"),
        ("0 0 * * 5-7", "0 0 * * 5,6,0"),
        ("0 0 * * 5/2", "0 0 * * 5,0"),
        ("0 0 * * 7L", "0 0 * * 0L"),
        ("0 0 * * sun#2", "0 0 * * 7#2"),
        ("0 0 1 JAN *", "0 0 1 01 *"),
        ("5/15 0 * * *", "5-59/15 0 * * *"),
        ("17-17/5 0 * * *", "17 0 * * *"),
        ("1-10/3 0 * * *", "1,4,7,10 0 * * *"),
        ("0 30 2 * * *", "30 2 * * *"),
        ("every minute", "every 60 seconds"),
        ("after 2 weeks", "after 14 days"),
    ],
)
def test_two_ways_to_write_one_schedule(read_only_db, one, other):
    assert scalar(
        read_only_db, "select rota._parse_schedule(%s) = rota._parse_schedule(%s)", one, other
    )


def test_a_day_must_match_both_fields_if_one_begins_with_a_star_else_either(read_only_db):
    def days(schedule):
        found = call(
            read_only_db, "upcoming_runs", schedule=schedule, after="2026-01-01 00:00+00"
        )
        return [run.local_time.strftime("%d") for run in found if run.local_time.month == 1]

    # 2026-01-05, 12, 19 and 26 are Mondays.
    assert days("0 12 13 * MON") == ["05", "12", "13", "19", "26"]
    assert days("0 12 */13 * MON") == []
    assert days("0 12 */11 * MON") == ["12"]
    assert days("0 12 13 * *") == ["13"]
    assert days("0 12 * * MON") == ["05", "12", "19", "26"]
    assert days("0 12 5-13 * */6") == ["10", "11"]


def test_a_schedule_is_read_the_same_where_strings_are_old(db):
    db.execute("set escape_string_warning = off; set standard_conforming_strings = off")

    found = call(db, "upcoming_runs", schedule="*/5 * * * *", max_runs=2)

    assert len(found) == 2
