"""``rota schedule``: what it prints, and what it refuses."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from rota.__main__ import main
from rota.cli import schedules
from rota.cli.schedules import KEYS
from support.clock import Clock

pytestmark = pytest.mark.slow

Run = Callable[..., str]
Db = psycopg.Connection[Any]
Capsys = pytest.CaptureFixture[str]

NIGHTLY = ("nightly", "30 2 * * *", "clean_up", '{"days": 30}', "--tz", "Europe/Warsaw")

FILE = """\
# a comment

TZ=Europe/Warsaw  # for all below
0 2 * * *         clean_up  # a comment
0 9 * * MON-FRI   send_report  name=report catch_up=all {"to": "board", "x": {"a": " {b="}}
every 10 minutes  warm_cache   jitter='30 seconds' backoff='{"kind": "fixed"}'
CRON_TZ = "UTC"
@daily            count        priority=-3 max_attempts=2 {}  # {"no": "payload"}
30 0 2 * * *      late         starts_at='2027-01-01 00:00'
"""


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch, run: Run) -> Run:
    """Import a text from the standard input."""

    def put(text: str, *words: str, code: int = 0) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return run("schedule", "import", "-", *words, code=code)

    return put


def test_next_marks_the_day_that_skips_its_time(run: Run, clock: Clock) -> None:
    clock.set("2026-03-27 12:00+00")

    printed = run("schedule", "next", "30 2 * * *", "--tz", "Europe/Warsaw", "-n", "3")

    assert printed == (
        "at 02:30 every day, in Europe/Warsaw\n"
        "\n"
        "Europe/Warsaw                UTC               from now\n"
        "Sat 2026-03-28 02:30 +01:00  2026-03-28 01:30  in 13 h 30 min\n"
        "--- clocks go forward, from +01:00 to +02:00\n"
        "Sun 2026-03-29 03:00 +02:00  2026-03-29 01:00  in 1 d 13 h     "
        "clocks go forward: 02:30 does not exist, runs at 03:00\n"
        "Mon 2026-03-30 02:30 +02:00  2026-03-30 00:30  in 2 d 12 h\n"
    )


def test_next_marks_the_times_that_come_twice(run: Run, clock: Clock) -> None:
    clock.set("2026-10-25 00:10+00")

    printed = run("schedule", "next", "*/30 * * * *", "--tz", "Europe/Warsaw", "-n", "4")

    assert printed == (
        "every 30 minutes, in Europe/Warsaw\n"
        "\n"
        "Europe/Warsaw                UTC               from now\n"
        "Sun 2026-10-25 02:30 +02:00  2026-10-25 00:30  in 20 min      first of two 02:30\n"
        "--- clocks go back, from +02:00 to +01:00\n"
        "Sun 2026-10-25 02:00 +01:00  2026-10-25 01:00  in 50 min      second of two 02:00\n"
        "Sun 2026-10-25 02:30 +01:00  2026-10-25 01:30  in 1 h 20 min  second of two 02:30\n"
        "Sun 2026-10-25 03:00 +01:00  2026-10-25 02:00  in 1 h 50 min\n"
    )


def test_next_says_that_its_zone_is_utc(run: Run, clock: Clock) -> None:
    clock.set("2026-01-01 00:00:10+00")

    assert run("schedule", "next", "every 90 seconds", "-n", "2") == (
        "every 90 seconds, counted from its start, in UTC\n"
        "(for another zone: --tz Europe/Warsaw)\n"
        "\n"
        "UTC                             from now\n"
        "Thu 2026-01-01 00:01:40 +00:00  in 1 min 30 s\n"
        "Thu 2026-01-01 00:03:10 +00:00  in 3 min\n"
        "(here counted from now; in a schedule from starts_at, or when it is added)\n"
    )
    run("schedule", "add", "poll", "after 1 hour", "poll")
    note = "(each later run is planned when the one before it has ended)\n"
    assert run("schedule", "next", "after 1 hour").endswith(
        f"\n(here counted from now; the first run is at once, or at starts_at)\n{note}"
    )
    named = run("schedule", "next", "--name", "poll")
    assert named.endswith(note)
    assert "counted from now" not in named


def test_next_reads_after_in_its_zone(run: Run, clock: Clock) -> None:
    clock.set("2026-05-01 00:00+00")

    after = ("--after", "2026-01-31 23:30", "-n", "1", "--json")
    said = json.loads(run("schedule", "next", "@daily", "--tz", "Asia/Tokyo", *after))

    assert said == {
        "schedule": "@daily",
        "time_zone": "Asia/Tokyo",
        "description": "at 00:00 every day",
        "runs": [
            {
                "run_at": "2026-02-01T00:00:00+09:00",
                "local_time": "2026-02-01T00:00:00",
                "utc_offset": 32400,
                "clock_change": None,
            }
        ],
    }
    assert "days ago" not in run("schedule", "next", "@daily", *after[:4])
    assert "d 23 h ago" in run("schedule", "next", "0 1 * * *", *after[:4])


def test_next_takes_a_schedule_by_its_name(run: Run) -> None:
    run("schedule", "add", *NIGHTLY)

    printed = run("schedule", "next", "--name", "nightly")

    assert printed.startswith("at 02:30 every day, in Europe/Warsaw\n\n")
    assert len(printed.splitlines()) >= 13


REFUSED = [
    ((), 2, "give a schedule in quotes"),
    (("@daily", "--name", "nightly"), 2, "give a schedule in quotes"),
    (
        ("--name", "nightly", "--tz", "UTC"),
        2,
        "--tz is for a schedule in quotes; an existing one has its own zone",
    ),
    (
        ("--name", "nightly"),
        1,
        "schedule 'nightly' not found (To list them: rota schedule list",
    ),
    (("61 * * * *",), 2, "schedule '61 * * * *': minute '61' is not *, 0 to 59"),
    (("@daily", "--tz", "Mars/Base"), 2, "--tz must be a name such as"),
    (("@daily", "-n", "0"), 2, "-n must be 1 to 1000, got 0"),
    (("@daily", "-n", "1001"), 2, "-n must be 1 to 1000, got 1001"),
    (("@daily", "--after", "soon"), 2, "--after: invalid input syntax for type timestamp"),
]


def test_next_refuses(run: Run) -> None:
    for words, code, message in REFUSED:
        assert run("schedule", "next", *words, code=code).startswith(f"rota: {message}")


def test_add_says_what_it_did_and_what_comes(run: Run, clock: Clock) -> None:
    clock.set("2026-03-27 12:00+00")
    rows = (
        "nightly: at 02:30 every day, in Europe/Warsaw\n"
        "Europe/Warsaw                UTC               from now\n"
        "Sat 2026-03-28 02:30 +01:00  2026-03-28 01:30  in 13 h 30 min\n"
        "--- clocks go forward, from +01:00 to +02:00\n"
        "Sun 2026-03-29 03:00 +02:00  2026-03-29 01:00  in 1 d 13 h     "
        "clocks go forward: 02:30 does not exist, runs at 03:00\n"
        "Mon 2026-03-30 02:30 +02:00  2026-03-30 00:30  in 2 d 12 h\n"
    )

    tried = run("schedule", "add", *NIGHTLY, "--dry-run")
    none = run("schedule", "list")
    first = run("schedule", "add", *NIGHTLY)
    second = run("schedule", "add", *NIGHTLY)
    third = json.loads(run("schedule", "add", *NIGHTLY, "--priority", "3", "--json"))

    assert tried == f"created {rows}(dry run: nothing was done)\n"
    assert none == "(none)\n"
    assert first == f"created {rows}"
    assert second == f"unchanged {rows}"
    assert third["outcome"] == "changed"
    assert third["description"] == "at 02:30 every day"
    assert len(third["runs"]) == 3


def test_add_tells_what_it_changes(run: Run) -> None:
    run("schedule", "add", *NIGHTLY, "--starts-at", "2030-06-01 12:00", "--lease", "5 minutes")

    tried = run("schedule", "add", *NIGHTLY[:3], "--dry-run")
    said = json.loads(run("schedule", "add", *NIGHTLY, "--jitter", "90 seconds", "--json"))

    assert tried.splitlines()[:6] == [
        "changed nightly: at 02:30 every day, in UTC",
        'payload: {"days": 30} -> {}',
        "time_zone: Europe/Warsaw -> UTC",
        "lease: 0:05:00 -> none",
        "starts_at: 2030-06-01 10:00:00+00:00 -> none",
        "UTC                          from now",
    ]
    assert said["changes"] == {
        "lease": ["0:05:00", "none"],
        "jitter": ["0:00:00", "0:01:30"],
        "starts_at": ["2030-06-01 12:00:00+02:00", "none"],
    }


def test_add_passes_every_option(run: Run, db: Db) -> None:
    run(
        "schedule", "add", "a", "every 5 minutes", "b", '{"c": 1}', "--tz", "Asia/Tokyo",
        "--queue", "q", "--priority", "-4", "--max-attempts", "3", "--lease", "7 minutes",
        "--catch-up", "all", "--catch-up-window", "3 hours", "--catch-up-max", "9",
        "--overlap", "skip", "--jitter", "4 seconds",
        "--starts-at", "2030-01-01", "--ends-at", "2031-01-01 00:00Z",
    )  # fmt: skip

    row = db.execute(
        "select schedule, job_type, payload, queue, time_zone, priority, max_attempts,"
        " extract(epoch from lease)::integer, catch_up,"
        " extract(epoch from catch_up_window)::integer, catch_up_max, overlap,"
        " extract(epoch from jitter)::integer,"
        " starts_at = '2029-12-31 15:00Z', ends_at = '2031-01-01 00:00Z'"
        " from rota.job_definitions where name = 'a'"
    ).fetchone()
    assert row == (
        "every 5 minutes", "b", {"c": 1}, "q", "Asia/Tokyo", -4, 3,
        420, "all", 10_800, 9, "skip", 4, True, True,
    )  # fmt: skip


def test_add_refuses(run: Run) -> None:
    assert "the payload is not JSON" in run("schedule", "add", "a", "@daily", "b", "{", code=2)
    assert "expected five fields" in run("schedule", "add", "a", "daily", "b", code=2)
    assert "job_type must be" in run("schedule", "add", "a", "@daily", "b c", code=2)
    with pytest.raises(SystemExit) as caught:
        main(["schedule", "add", "a", "@daily", "b", "--overlap", "never"])
    assert caught.value.code == 2


def test_list_tells_the_state_of_each(run: Run, db: Db, clock: Clock) -> None:
    clock.set("2026-03-27 12:00+00")
    run("schedule", "add", *NIGHTLY)
    run("schedule", "add", "poll", "after 5 minutes", "poll")
    run("schedule", "add", "off", "@hourly", "x")
    run("schedule", "add", "over", "@yearly", "x", "--ends-at", "2026-06-01")
    run("schedule", "disable", "off")
    run("schedule", "add", "bad", *NIGHTLY[1:])
    db.execute(
        "update rota.job_definitions set is_enabled = false, disabled_at = now(),"
        " last_error = rpad('broken', 90, '!'), next_run_at = null, time_zone = 'Gone/Zone'"
        " where name = 'bad'"
    )

    before = run("schedule", "list").splitlines()
    job_id = run("schedule", "run", "poll").strip()
    after = {row["name"]: row["state"] for row in json.loads(run("schedule", "list", "--json"))}

    assert " ".join(before[0].split()) == "name schedule job_type next run last state"
    assert before[2].startswith("nightly  30 2 * * *")
    assert before[2].endswith("  03-28 02:30 +0100        enabled")
    assert before[-1].endswith("due")
    assert max(map(len, before)) == 80
    assert after == {
        "bad": f"disabled: {'broken':!<90}",
        "nightly": "enabled",
        "off": f"disabled by {db.info.user}",
        "over": "ended",
        "poll": f"waits for the end of job {job_id}",
    }


def test_what_is_overdue_asks_who_ticks(run: Run, clock: Clock) -> None:
    clock.set("2026-03-27 12:00+00")
    run("schedule", "add", *NIGHTLY)

    clock.set("2026-03-28 01:31+00")
    due = run("schedule", "list")
    clock.set("2026-03-28 01:33+00")

    assert due.endswith("  due\n")
    assert "  overdue by 3 min: does …\n" in run("schedule", "list")
    shown = run("schedule", "show", "nightly")
    assert "state         overdue by 3 min: does anything tick?\n" in shown
    printed = run("schedule", "next", "--name", "nightly")
    assert printed.splitlines()[1] == "(overdue by 3 min: does anything tick?)"


def test_show_tells_all_of_one(run: Run, db: Db, clock: Clock) -> None:
    clock.set("2026-03-27 12:00+00")
    run("schedule", "add", *NIGHTLY)
    clock.set("2026-03-28 01:30:05+00")
    db.execute("select rota.tick()")

    shown = run("schedule", "show", "nightly")
    said = json.loads(run("schedule", "show", "nightly", "--json"))

    (job_id,) = db.execute("select id from rota.jobs").fetchone() or (0,)
    record, runs, occurrences = shown.split("\n\n")
    assert "description   at 02:30 every day\nstate         enabled\n" in record
    assert 'payload       {"days": 30}\n' in record
    assert len(runs.splitlines()) == 7  # two heads, five runs
    assert occurrences.splitlines() == [
        "last runs",
        "scheduled_for              late     outcome   job_id  status",
        f"2026-03-28 02:30:00+01:00  0:00:05  enqueued  {job_id:<6}  queued",
    ]
    assert "last_run      2026-03-28 02:30:00+01:00\nlast_status   queued" in record
    assert "created_at    2026-03-27 13:00:00+01:00\n" in record
    for left_out in ("anchored_at", "ends_at", "last_error", "last_run_at"):
        assert f"\n{left_out}" not in record
    assert "anchored_at" in said
    assert said["description"] == "at 02:30 every day"
    assert len(said["runs"]) == 5
    assert [occurrence["outcome"] for occurrence in said["occurrences"]] == ["enqueued"]


def test_show_tells_what_is_wrong_with_a_broken_text(run: Run, db: Db) -> None:
    run("schedule", "add", *NIGHTLY)
    db.execute(
        "update rota.job_definitions set schedule = 'nonsense', is_enabled = false,"
        " disabled_at = now(), last_error = %s, next_run_at = null",
        ["broken " * 20],
    )
    hint = "(correct it with: rota schedule add nightly ...)"

    shown = run("schedule", "show", "nightly")
    said = json.loads(run("schedule", "show", "nightly", "--json"))

    assert "description   schedule 'nonsense': expected five fields" in shown
    assert f"last_error    {'broken ' * 20}".rstrip() in shown
    assert f"\n{hint}\n\nlast runs\n(none)\n" in shown
    assert (said["description"], said["runs"]) == (None, [])
    assert said["problem"].startswith("schedule 'nonsense': expected five fields")
    assert "nonsense" in run("schedule", "list")
    for words in (["next", "--name"], ["enable"], ["run"]):
        assert hint[2:-1] in run("schedule", *words, "nightly", code=1)
    assert run("schedule", "add", *NIGHTLY).startswith("changed nightly: ")
    assert "correct it" not in run("schedule", "show", "nightly")


def test_show_tells_of_one_whose_zone_is_gone(run: Run, db: Db, capsys: Capsys) -> None:
    run("schedule", "add", *NIGHTLY)
    db.execute("update rota.job_definitions set time_zone = 'Gone/Zone'")

    shown = run("schedule", "show", "nightly")

    assert 'description   time zone "Gone/Zone" not recognized' in shown
    assert "(correct it with: rota schedule add nightly ...)" in shown
    run("schedule", "disable", "nightly")
    assert main(["schedule", "enable", "nightly"]) == 1
    assert capsys.readouterr().err == 'rota: time zone "Gone/Zone" not recognized\n'


def test_show_tells_the_start_that_every_counts_from(run: Run) -> None:
    run("schedule", "add", "poll", "Every 5 minutes", "poll")

    assert "\nanchored_at " in run("schedule", "show", "poll")


def test_list_tells_the_last_job_not_a_skipped_time(run: Run, db: Db, clock: Clock) -> None:
    clock.set("2026-03-27 12:00+00")
    run("schedule", "add", "poll", "@hourly", "poll", "--overlap", "skip")
    for moment in ("13:00:05", "14:00:05"):
        clock.set(f"2026-03-27 {moment}+00")
        db.execute("select rota.tick()")

    listed = run("schedule", "list")
    before = json.loads(run("schedule", "list", "--json"))[0]["last_run"]
    db.execute("delete from rota.jobs")
    forgotten = json.loads(run("schedule", "list", "--json"))

    assert "  queued  enabled" in listed
    assert before == "2026-03-27T13:00:00+00:00"
    assert (forgotten[0]["last_run"], forgotten[0]["last_status"]) == (None, None)


def test_disable_enable_remove(
    run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    clock.set("2026-03-27 12:00+00")
    run("schedule", "add", *NIGHTLY)

    assert "nightly is disabled" in run("schedule", "disable", "nightly")
    assert "next runs, if it were enabled" in run("schedule", "show", "nightly")
    assert "rota schedule enable nightly" in run("schedule", "add", *NIGHTLY)
    assert run("schedule", "enable", "nightly") == (
        "schedule nightly is enabled: it runs next at 2026-03-28 02:30:00+01:00\n"
    )
    assert "--yes" in run("schedule", "remove", "nightly", code=2)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda: "n")
    assert main(["schedule", "remove", "nightly"]) == 1
    asked = "remove the schedule nightly? [y/N] "
    assert capsys.readouterr().err == f"{asked}rota: nothing was done\n"
    monkeypatch.setattr("builtins.input", lambda: "y")
    assert main(["schedule", "remove", "nightly"]) == 0
    assert capsys.readouterr() == (
        "schedule nightly is removed; the jobs that it has made stay\n",
        asked,
    )
    assert run("schedule", "list").endswith("(none)\n")
    for words in (["remove", "x", "--yes"], ["enable", "x"], ["run", "x"], ["show", "x"]):
        assert "schedule 'x' not found" in run("schedule", *words, code=1)


def test_disable_and_enable_take_several_or_all(run: Run, capsys: Capsys) -> None:
    for name in ("a", "b", "c"):
        run("schedule", "add", name, "@daily", "x")

    stays = "is disabled; the jobs that it has made stay\n"
    assert run("schedule", "disable", "a", "b") == f"schedule a {stays}schedule b {stays}"
    assert run("schedule", "disable", "--all", "--yes") == f"schedule c {stays}"
    assert run("schedule", "disable", "--all") == "all schedules are disabled already\n"
    assert main(["schedule", "enable", "a", "nobody", "b"]) == 1
    printed = capsys.readouterr()
    assert "schedule a is enabled" in printed.out
    assert "schedule b is enabled" in printed.out
    assert printed.err.startswith("rota: schedule 'nobody' not found (To list")
    assert "schedule c is enabled" in run("schedule", "enable", "--all", "--yes")
    for words in ([], ["a", "--all"]):
        assert "give the names of schedules, or --all" in run(
            "schedule", "enable", *words, code=2
        )


@pytest.mark.parametrize(("verb", "others"), [("disable", "a, b"), ("enable", "c")])
def test_all_schedules_are_switched_only_after_a_question(
    run: Run, db: Db, monkeypatch: pytest.MonkeyPatch, capsys: Capsys, verb: str, others: str
) -> None:
    for name in ("a", "b", "c"):
        run("schedule", "add", name, "@daily", "x")
    run("schedule", "disable", "c")
    before = db.execute("select name, is_enabled from rota.job_definitions").fetchall()

    what = f"{verb} all schedules ({len(others.split())}: {others})"
    assert f"this would {what}: confirm" in run("schedule", verb, "--all", code=2)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda: "n")
    assert main(["schedule", verb, "--all"]) == 1
    assert capsys.readouterr().err == f"{what}? [y/N] rota: nothing was done\n"
    assert db.execute("select name, is_enabled from rota.job_definitions").fetchall() == before
    monkeypatch.setattr("builtins.input", lambda: "y")
    assert main(["schedule", verb, "--all"]) == 0
    assert f"schedule {others[0]} is {verb}d" in capsys.readouterr().out


def test_what_switches_and_removes_answers_in_json(run: Run, capsys: Capsys) -> None:
    run("schedule", "add", *NIGHTLY)

    (disabled,) = json.loads(run("schedule", "disable", "nightly", "--json"))
    assert disabled == {"name": "nightly", "is_enabled": False, "next_run_at": None}
    assert json.loads(run("schedule", "disable", "--all", "--json")) == []
    assert main(["schedule", "enable", "nobody", "nightly", "--json"]) == 1
    unknown, enabled = json.loads(capsys.readouterr().out)
    assert unknown["error"].startswith("schedule 'nobody' not found")
    assert (enabled["is_enabled"], enabled["next_run_at"] is None) == (True, False)
    assert json.loads(run("schedule", "remove", "nightly", "--yes", "--json")) == {
        "name": "nightly", "outcome": "removed",
    }  # fmt: skip


def test_import_answers_in_json(put: Run) -> None:
    created, again = (json.loads(put("@daily first\n", "--json")) for _ in range(2))

    assert [(row["name"], row["outcome"]) for row in created] == [("first", "created")]
    assert [(row["name"], row["outcome"]) for row in again] == [("first", "unchanged")]


def test_a_bad_text_that_was_given_is_exit_code_2(run: Run) -> None:
    for words in (["next", "daily"], ["add", "a", "0 0 31 2 *", "b"]):
        run("schedule", *words, code=2)


def test_run_prints_the_job(run: Run) -> None:
    run("schedule", "add", *NIGHTLY)

    job_id = run("schedule", "run", "nightly").strip()
    again = json.loads(run("schedule", "run", "nightly", "--json"))

    job = json.loads(run("job", job_id, "--json"))
    assert (job["job_type"], job["definition"]) == ("clean_up", "nightly")
    assert again["job_id"] > int(job_id)


def test_import_puts_in_every_line(run: Run, put: Run, db: Db, tmp_path: Path) -> None:
    (tmp_path / "jobs.cron").write_text(FILE)

    tried = run("schedule", "import", str(tmp_path / "jobs.cron"), "--dry-run")
    none = run("schedule", "list")
    first = run("schedule", "import", str(tmp_path / "jobs.cron"))
    second = put(FILE)
    third = put("0 3 * * * clean_up\n", "--tz", "Europe/Warsaw")

    assert tried.endswith("5 created, 0 changed, 0 unchanged (dry run: nothing was done)\n")
    assert none == "(none)\n"
    assert first.splitlines()[1].split(None, 3)[:2] == ["created", "clean_up"]
    assert first.splitlines()[2].endswith("Europe/Warsaw  at 09:00 on Monday to Friday")
    assert second.endswith("0 created, 0 changed, 5 unchanged\n")
    assert third.endswith("0 created, 1 changed, 0 unchanged\n")
    assert third.splitlines()[1:3] == [
        "changed  clean_up  0 3 * * *  Europe/Warsaw  at 03:00 every day",
        "    schedule: 0 2 * * * -> 0 3 * * *",
    ]
    rows = db.execute(
        "select name, schedule, job_type, payload, time_zone, catch_up,"
        " extract(epoch from jitter)::integer, backoff, priority, max_attempts,"
        " to_char(starts_at at time zone 'UTC', 'YYYY-MM-DD')"
        " from rota.job_definitions order by created_at, name"
    ).fetchall()
    assert rows == [
        ("clean_up", "0 3 * * *", "clean_up", {}, "Europe/Warsaw", "one", 0, None, 0,
         None, None),
        ("count", "@daily", "count", {}, "UTC", "one", 0, None, -3, 2, None),
        ("late", "30 0 2 * * *", "late", {}, "UTC", "one", 0, None, 0, None,
         "2027-01-01"),
        ("report", "0 9 * * MON-FRI", "send_report", {"to": "board", "x": {"a": " {b="}},
         "Europe/Warsaw", "all", 0, None, 0, None, None),
        ("warm_cache", "every 10 minutes", "warm_cache", {}, "Europe/Warsaw", "one",
         30, {"kind": "fixed"}, 0, None, None),
    ]  # fmt: skip


def test_import_ends_a_line_only_where_a_line_ends(put: Run, db: Db) -> None:
    """Editors of Windows begin a file with a mark; JSON may hold any separator as it is."""
    separators = "\x0b\x0c\x1c\x85\u2028\u2029"
    kept = '{"text": "a\x85\u2028\u2029b"}'

    said = put(f"\ufeff# see{separators}0 3 * * * other\r\n0 2 * * * first {kept}\r\n")

    assert said.endswith("1 created, 0 changed, 0 unchanged\n")
    row = db.execute("select name, payload from rota.job_definitions").fetchall()
    assert row == [("first", json.loads(kept))]


BAD_LINES = [
    ("0 2 * * *", "a line is SCHEDULE JOB_TYPE"),
    ("clean_up", "a line is SCHEDULE JOB_TYPE"),
    ("queue=a 0 2 * * * b", "only TZ and CRON_TZ can be set"),
    ("0 2 * * * b queue=a c", "a line is SCHEDULE JOB_TYPE"),
    ("SHELL=/bin/sh", "only TZ and CRON_TZ can be set"),
    ('TZ="Europe/Warsaw', "No closing quotation"),
    ("0 2 * * * a b=1", "unknown key 'b'; known are: name, queue,"),
    ("0 2 * * * a schedule=x", "unknown key 'schedule'"),
    ("0 2 * * * a queue=x queue=y", "queue is given twice"),
    ("0 2 * * * a queue='x", "a quote is not closed"),
    ("0 2 * * * a {", "the payload is not JSON: "),
    ("0 2 * * * a backoff=fixed", "backoff is not JSON: "),
    ("0 2 * * * a [1]", "the payload must be an object"),
    ('0 2 * * * a "x"', "the payload must be an object"),
    ("0 2 * * * a {} b", "the payload is not JSON: more follows its end"),
    ("0 2 * * * a.b!c", "name must be 1 to 63 of the characters"),
    ("0 2 * * * root clean_up", "only a job type follows the schedule, no user"),
    ("@daily root /usr/bin/clean -a", "only a job type follows the schedule, no user"),
    ("@daily # a comment", "a line is SCHEDULE JOB_TYPE"),
    ("every 5 minutes", "a line is SCHEDULE JOB_TYPE"),
    ("TZ=Mars/Base", "time_zone must be a name such as"),
    ("0 2 * * * first", "the name first is already that of line 1: use name=OTHER"),
    ("61 2 * * * a", "schedule '61 2 * * *': minute '61' is not *"),
    ("0 2 * * 1-5", "a line is SCHEDULE JOB_TYPE [KEY=VALUE ...] [JSON PAYLOAD]; there is no"),
    ("0 0 2 * * MON#1", "a line is SCHEDULE JOB_TYPE"),
    ("0 2 * * a", "schedule '0 2 * *': expected five fields"),
    ("@reboot a", "schedule '@reboot': expected five fields"),
    ("every 5 min a", "schedule 'every 5 min': '5 min' must be a whole number"),
    ("0 2 * * * a time_zone=Mars/Base", "time_zone must be a name such as"),
    ("0 2 * * * a priority=high", 'invalid input syntax for type integer: "high"'),
    ("0 2 * * * a jitter=5x", 'invalid input syntax for type interval: "5x"'),
    ("0 2 * * * a overlap=never", "overlap must be allow, skip or queue, got 'never'"),
]


def test_import_refuses_all_for_one_bad_line(put: Run, run: Run) -> None:
    for line, reason in BAD_LINES:
        printed = put(f"@daily first\n\n{line}\n", code=1)

        assert printed.startswith(f"rota: stdin:3: {reason}")
    assert run("schedule", "list") == "(none)\n"


def test_bad_lines_cannot_command_the_terminal(put: Run, run: Run) -> None:
    evil = "\x1b]0;x\x07\u202e"

    printed = put(f"@daily a{evil}\n@daily b\n@daily c name=b{evil}\nTZ={evil}\n", code=1)
    printed += run("schedule", "enable", f"no{evil}", code=1)

    assert "\\x1b]0;x" in printed
    assert printed.replace("\n", "").isprintable()


def test_import_tells_of_all_bad_lines_at_once(put: Run, run: Run) -> None:
    text = "TZ=Mars/Base\n@daily a\n@daily\n@daily b\n@daily b\n61 2 * * * c\n"

    printed = put(text, "--tz", "Venus", code=1).splitlines()

    assert [line.split(": ")[1] for line in printed[:-1]] == [
        "--tz", "stdin:1", "stdin:3", "stdin:5", "stdin:6"
    ]  # fmt: skip
    assert printed[-1] == "rota: 5 lines are wrong: no schedule was added"
    assert run("schedule", "list") == "(none)\n"


def test_all_bad_lines_are_one_document_in_json(
    dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "jobs.cron").write_text("@daily\n61 2 * * * c\n")

    code = main(["schedule", "import", str(tmp_path / "jobs.cron"), "--json", "-d", dsn])

    said = json.loads(capsys.readouterr().err)
    assert said["exit_code"] == code == 1
    assert said["error"] == "2 lines are wrong: no schedule was added"
    assert [line.split(":")[1] for line in said["hint"].splitlines()] == ["1", "2"]


def test_import_names_the_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "jobs.cron").write_text("nonsense\n")

    printed = run("schedule", "import", str(tmp_path / "jobs.cron"), code=1)

    assert printed.startswith(f"rota: {tmp_path}/jobs.cron:1: ")
    (tmp_path / "jobs.cron").write_bytes(b"\xff")
    for name, reason in (
        ("none.cron", "No such file or directory"),
        ("", "Is a directory"),
        ("jobs.cron", "it is not UTF-8 text"),
    ):
        path = tmp_path / name
        printed = run("schedule", "import", str(path), code=1)
        assert printed == f"rota: cannot read {path}: {reason}\n"


def test_import_knows_the_arguments_of_schedule_job(db: Db) -> None:
    row = db.execute(
        "select proargnames from pg_proc where oid = 'rota.schedule_job'::regproc"
    ).fetchone()

    assert row is not None
    assert set(KEYS) | {"schedule", "job_type", "payload"} == set(row[0]) - {
        "outcome", "next_run_at"
    }  # fmt: skip


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for words, taught in (
        ([], "rota schedule import jobs.cron --dry-run"),
        (["add"], "each deployment may repeat the command"),
        (["next"], "first instant after the gap"),
        (["import"], "TZ=Europe/Warsaw\n"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["schedule", *words, "--help"])
        assert caught.value.code == 0
        assert taught in capsys.readouterr().out


def test_readme_shows_what_is_printed(
    run: Run, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.set("2026-03-27 12:00+00")
    monkeypatch.chdir(tmp_path)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    shown = readme.partition("```console\n$ rota schedule ")[2].partition("```")[0]
    printed = []

    for step in f"rota schedule {shown}".split("\n$ "):
        command, _, output = step.partition("\n")
        program, *words = shlex.split(command)
        if program == "cat":
            (tmp_path / words[0]).write_text(output)
            printed.append(step)
        else:
            printed.append(f"{command}\n{run(*words)}".rstrip("\n"))

    assert "\n$ ".join(printed).split("\n") == f"rota schedule {shown}".rstrip("\n").split("\n")


def test_list_shows_so_many_and_says_that_there_may_be_more(run: Run) -> None:
    for number in range(3):
        run("schedule", "add", f"s{number}", "@daily", "x")

    two = run("schedule", "list", "--limit", "2").splitlines()

    assert [line.split()[0] for line in two[-3:-1]] == ["s0", "s1"]
    assert two[-1] == "there may be more: --limit"
    assert "more" not in run("schedule", "list")


def test_schedules_look_up_their_jobs_and_read_no_history(db: Db) -> None:
    values = {"name": "nightly", "limit": 10, "with_runs": True}
    for query in (schedules.OCCURRENCES, schedules.DEFINITIONS):
        lines = db.execute(f"explain {query}", values).fetchall()  # type: ignore[arg-type]
        plan = "\n".join(line for (line,) in lines)

        assert "Nested Loop Left Join" in plan
        assert "Hash Left Join" not in plan
        assert "Merge Left Join" not in plan
