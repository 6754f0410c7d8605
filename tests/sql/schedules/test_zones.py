"""Which names of time zones are taken."""

from __future__ import annotations

import psycopg
import pytest

from sql.helpers import call, refused, rows, value

ACCEPTED = [
    "UTC",
    "GMT",
    "Europe/Warsaw",
    "America/Argentina/Buenos_Aires",
    "America/Port-au-Prince",
    "Asia/Kathmandu",
    "Etc/UTC",
    "Etc/GMT+12",
    "Etc/GMT-14",
    "Japan",
    "Poland",
    "Australia/Lord_Howe",
    "europe/warsaw",
]
REFUSED = [
    None, "", " ", "UTC ", "Mars/Olympus", "Europe/Nowhere", "CET", "EST", "CEST", "PST", "MSK",
    "EST5EDT", "UTC+3", "+03:00", "03", "FOO+3", "Europe/Foo+5", "X/Y+3", "Etc/GMT+13",
    "Etc/GMT-15", "localtime",
    "posixrules", "right/UTC", "posix/Europe/Paris", "Right/UTC",
    "Europe/Warsaw;", "../etc/passwd", "Europe/../Europe/Paris",
    "interval", "x" * 1000, "Zürich",
]  # fmt: skip


@pytest.mark.parametrize("time_zone", ACCEPTED)
def test_a_time_zone_is_accepted(read_only_db, time_zone):
    assert value(read_only_db, "next_run", schedule="@daily", time_zone=time_zone) is not None


@pytest.mark.parametrize("time_zone", REFUSED)
def test_what_is_no_name_of_a_time_zone_is_refused(read_only_db, time_zone):
    with refused("time_zone"):
        call(read_only_db, "next_run", schedule="@daily", time_zone=time_zone)


def test_abbreviations_are_refused_where_the_capital_letters_are_turkish(turkish):
    """There the capital of i is none of an abbreviation, and the small letter of I no word."""
    with psycopg.connect(turkish, autocommit=True) as db:
        with refused("time_zone"):
            call(db, "next_run", schedule="@daily", time_zone="ist")
        with pytest.raises(psycopg.Error, match="'0 minutes' must be"):
            call(db, "next_run", schedule="every 0 minutes")
        value(db, "next_run", schedule="EVERY 5 MINUTES")


def test_all_names_with_a_slash_that_the_server_knows_are_accepted(read_only_db):
    refused_names = rows(
        read_only_db,
        """
        select n.name
        from pg_timezone_names as n
        cross join lateral (select rota._check_time_zone(n.name)) as c
        where n.name like '%/%' and n.name !~ '^(posix|right)/'
        and n.name not in ('Etc/GMT0', 'Etc/GMT+0', 'Etc/GMT-0')
        """,
    )
    assert len(refused_names) > 300


@pytest.mark.slow
def test_the_first_instant_of_each_wall_time_is_what_a_search_finds(read_only_db):
    """Every half hour of two days around the changes of nine zones, against all instants."""
    differing = rows(
        read_only_db,
        """
        with zones (time_zone, day) as (
            values
                ('Europe/Warsaw', '2026-03-29'), ('Europe/Warsaw', '2026-10-25'),
                ('America/Havana', '2026-03-08'), ('America/Havana', '2026-11-01'),
                ('Australia/Lord_Howe', '2026-04-05'), ('Australia/Lord_Howe', '2026-10-04'),
                ('Antarctica/Troll', '2026-03-29'), ('Antarctica/Troll', '2026-10-25'),
                ('Pacific/Apia', '2011-12-30'), ('Asia/Tokyo', '2026-01-01'),
                ('Africa/Casablanca', '2026-02-15'), ('Africa/Casablanca', '2026-03-22')
        ),
        walls as (
            select z.time_zone, z.day::timestamp + n * interval '30 minutes' as wall
            from zones as z
            cross join generate_series(-48, 96) as n
        ),
        instants as (
            select z.time_zone, i.instant, i.instant at time zone z.time_zone as wall
            from zones as z
            cross join generate_series(
                z.day::timestamptz - interval '5 days', z.day::timestamptz + interval '6 days',
                '15 minutes') as i (instant)
        )
        select w.time_zone, w.wall, f.instant, rota._first_instant(w.time_zone, w.wall)
        from walls as w
        cross join lateral (
            select min(i.instant) as instant
            from instants as i
            where i.time_zone = w.time_zone and i.wall >= w.wall
        ) as f
        where f.instant <> rota._first_instant(w.time_zone, w.wall)
        """,
    )
    assert differing == []
