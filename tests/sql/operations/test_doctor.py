"""What is wrong with the queue or its database: each finding, and that its remedy works."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psycopg
import pytest
from psycopg.types.json import Jsonb

from sql.helpers import (
    call,
    claim,
    enqueue,
    last_tick,
    one,
    owner,
    raises,
    refused,
    rows,
    run,
    running,
    scalar,
    settle,
    value,
)
from sql.operations.test_explain import ME, die, owner_sees_sessions
from support.clock import now_is
from support.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _ticked(db):
    settle(db)
    # Tests set the clock back, and nothing has ended yet.
    db.execute(
        "update rota.stats_progress set counted_until = 'epoch', complete_until = 'epoch'"
    )


def doctor(db):
    """Return what is wrong; the clock of a test is not as it was installed."""
    return [
        row
        for row in call(db, "doctor")
        if row.severity != "ok" and row.evidence.split(":")[0] != "function now() was changed"
    ]


def only(db):
    (row,) = doctor(db)
    return row


def cure(db):
    db.execute(only(db).remedy)
    settle(db)


def test_a_sound_database_says_so_for_each_check(db):
    found = call(db, "doctor")

    assert {row.severity for row in found} == {"ok"}
    assert len(found) == 24
    assert len({row.finding for row in found}) == 24


def test_the_worst_comes_first(db, clock):
    enqueue(db)
    value(db, "pause_queue", queue="default")
    clock.advance("1 hour")

    severities = [row.severity for row in call(db, "doctor")]

    assert severities[0] == "critical"
    assert severities == sorted(severities, key=["critical", "warning", "ok"].index)


def test_a_check_that_fails_stops_no_other(db):
    db.execute("drop table rota.effects cascade")

    rows_found = call(db, "doctor")
    found = {row.finding: row for row in rows_found}

    assert found["effects"].severity == "warning"
    assert found["effects"].evidence.startswith("this could not be examined: relation")
    assert found["ticker"].severity == "ok"
    assert any(row.evidence.startswith("table effects is missing") for row in rows_found)


@pytest.mark.own_session
@pytest.mark.parametrize("is_reader", [False, True])
def test_a_change_of_a_table_that_all_others_wait_behind(db, connect, is_reader):
    """A enqueues and stays open; B, which may not even do it, waits for A, and C for B."""
    a, b, c = connect(autocommit=False), connect(), connect()
    pid = b.info.backend_pid
    enqueue(a)
    change = "create temp table t partition of rota.jobs default" if is_reader else (
        "create trigger t before insert on rota.jobs for each row"
        " execute function suppress_redundant_updates_trigger()")  # fmt: skip
    b.execute("begin; grant usage on schema rota to pg_signal_backend; commit")
    b.execute("set role pg_signal_backend")
    with ThreadPoolExecutor(2) as pool:
        changing = pool.submit(b.execute, change)
        wait_until(lambda: rows(db, "select where pg_blocking_pids(%s) <> '{}'", pid))
        waiting = pool.submit(enqueue, c)
        try:
            told = wait_until(lambda: [row for row in doctor(db) if row.finding == "locks"])
            stopped = [row.evidence for row in doctor(db) if "locked just now" in row.evidence]
        finally:
            db.execute("select pg_terminate_backend(%s)", (pid,))
        with pytest.raises(psycopg.OperationalError):
            changing.result()
        waiting.result()

    assert len(told) == 1
    assert re.match(rf"pid {pid} .*role .* itself waits for the \w+ExclusiveLock of rota.jobs, "
        r"and \d+ others? waits? for it, the first for ", told[0].evidence)  # fmt: skip
    assert told[0].remedy == f"select pg_terminate_backend({pid});"
    assert stopped == []


def test_nobody_ticks(db, clock):
    clock.set(last_tick(db))
    clock.advance("5 minutes")
    assert doctor(db) == []
    clock.advance("55 minutes")

    row = only(db)

    assert (row.severity, row.finding) == ("critical", "ticker")
    assert row.evidence.startswith("no tick has run for 1 h:")
    cure(db)
    assert doctor(db) == []


def test_nobody_ticks_since_the_clock_went_back(db, clock):
    clock.set(last_tick(db))
    clock.advance("-3 days")

    row = only(db)

    assert (row.severity, row.finding) == ("critical", "ticker")
    assert row.evidence.startswith("no tick has run for 3 d:")
    cure(db)
    assert doctor(db) == []


def test_nobody_has_ever_ticked(db, clock):
    clock.set(scalar(db, "select applied_at from rota.upgrade_log where id = 0"))
    db.execute("update rota.maintenance set done_at = '-infinity' where task = 'tick'")
    clock.advance("5 minutes")
    assert "ticker" not in {row.finding for row in doctor(db)}
    clock.advance("2 minutes")

    row = next(row for row in doctor(db) if row.finding == "ticker")

    assert row.severity == "critical"
    assert row.evidence.startswith("no tick has run since the install, 7 min ago: expired")
    db.execute(row.remedy)
    assert "ticker" not in {row.finding for row in doctor(db)}


def test_a_lease_that_nobody_takes_back(db, clock):
    job = running(db, lease="1 s")
    clock.advance("31 s")

    row = only(db)

    assert (row.severity, row.finding) == ("critical", "leases")
    assert f"30 s ago: job {job.job_id} of w" in row.evidence
    cure(db)
    assert doctor(db) == []


@pytest.mark.own_session
def test_a_worker_that_was_killed(db, connect):
    other = connect()
    session = other.info.backend_pid
    call(other, "report_worker", **ME, backend_pid=session)
    for _ in range(2):
        running(db, lease="1 hour")
    assert only_versions(db)
    call(other, "report_worker", **{**ME, "version": version(db)}, backend_pid=session)
    assert doctor(db) == []

    db.execute("select pg_terminate_backend(%s, 10000)", (session,))

    row = only(db)
    assert (row.severity, row.finding) == ("warning", "workers")
    assert "worker w (pid 7 on h) is no longer connected, but holds 2 jobs" in row.evidence
    value(db, "finish_job", **owner(running(db, lease="1 hour")))
    cure(db)
    assert scalar(db, "select count(*) from rota.jobs where status = 'queued'") == 2
    assert scalar(db, "select count(*) from rota.finished_jobs") == 1


@pytest.mark.own_session
def test_what_a_killed_worker_was_to_stop_is_not_run_again(db, connect):
    other = connect()
    session = other.info.backend_pid
    call(other, "report_worker", **{**ME, "version": version(db)}, backend_pid=session)
    jobs = [running(db, lease="1 hour") for _ in range(3)]
    value(db, "cancel_job", job_id=jobs[0].job_id, reason="wrong file")
    value(db, "cancel_job", job_id=jobs[1].job_id)

    db.execute("select pg_terminate_backend(%s, 10000)", (session,))

    assert "but holds 3 jobs, 2 of them to be cancelled, until" in only(db).evidence
    cure(db)
    assert "but holds 2 jobs, 2 of them to be cancelled, until" in only(db).evidence
    assert only(db).remedy == f"select * from rota.explain_job({jobs[0].job_id});"
    for job in jobs[:2]:
        db.execute(call(db, "explain_job", job_id=job.job_id)[0].remedy)
    assert rows(db, "select status, cancel_reason from rota.job_runs order by id") == [
        ("cancelled", "wrong file"),
        ("cancelled", None),
        ("queued", None),
    ]
    assert doctor(db) == []


@pytest.mark.own_session
def test_a_session_that_waits_for_no_worker(db, connect):
    """As each of a pool through which a worker waits: it is notified, and nobody hears."""
    pool = [connect() for _ in range(3)]
    call(pool[0], "report_worker", **{**ME, "version": version(db)})
    call(pool[0], "wait_for_jobs")
    assert doctor(db) == []

    for each in pool[1:]:
        call(each, "wait_for_jobs")

    row = only(db)
    assert (row.severity, row.finding) == ("warning", "workers")
    assert row.evidence.startswith("3 sessions wait for jobs, but only 1 worker is live: ")
    assert all(str(each.info.backend_pid) in row.evidence for each in pool)
    for each in pool[1:]:
        call(each, "stop_waiting")
    assert doctor(db) == []


def only_versions(db):
    return [row.finding for row in doctor(db)] == ["versions"]


def test_a_worker_of_another_version(db):
    call(db, "report_worker", **{**ME, "version": "0.0.7"})

    row = only(db)

    assert (row.severity, row.finding) == ("warning", "versions")
    assert "worker w (pid 7 on h) has version 0.0.7" in row.evidence


def test_a_worker_in_another_language_has_no_version(db):
    call(db, "report_worker", **{**ME, "version": None})

    assert doctor(db) == []


def test_a_type_that_no_live_worker_takes(db):
    call(db, "report_worker", **{**ME, "version": version(db), "job_types": ["mail"]})
    enqueue(db, "mail", run_at=ago(db, "20 s"))
    assert doctor(db) == []
    first = enqueue(db, "charge", run_at=ago(db, "20 s"))
    enqueue(db, "charge", priority=5, run_at=ago(db, "15 s"))

    row = only(db)

    assert (row.severity, row.finding) == ("warning", "job_types")
    assert "no live worker takes charge in queue default: 2 jobs are due" in row.evidence
    assert row.remedy == f"select * from rota.explain_job({first});"
    enqueue(db, "charge", run_at=ago(db, "6 min"))
    assert only(db).severity == "critical"


def test_a_queue_that_nobody_takes_is_found_among_very_many(db, clock):
    queues = [f"a{n}" for n in range(1300)]
    value(db, "report_worker", worker="w", host="h", pid=1, version=None, queues=queues[:300])
    enqueue(db, queue="z")
    clock.advance("1 minute")
    one(db, "tick")
    later = [{"job_type": "x", "queue": queue, "delay": "1 day"} for queue in queues[300:]]
    now = [{"job_type": "x", "queue": queue} for queue in queues[:300]]
    call(db, "enqueue_many", jobs=Jsonb(later + now))

    row = only(db)

    assert (row.severity, row.finding) == ("warning", "job_types")
    assert row.evidence.startswith("no live worker takes x in queue z: 1 job is due there")


def test_a_queue_that_moves_away_needs_no_worker_here(db):
    call(db, "set_database_number", number=5)
    enqueue(db, queue="q", run_at=ago(db, "6 min"))
    value(db, "begin_queue_move", queue="q", database=6)

    assert "job_types" not in {row.finding for row in doctor(db)}


def test_a_job_that_a_hand_has_put_before_all_others_stops_no_check(db):
    enqueue(db, "mail", run_at=ago(db, "20 s"))
    first = enqueue(db, "mail")
    db.execute("update rota.jobs set run_at = '-infinity' where id = %s", [first])

    row = only(db)

    assert (row.severity, row.finding) == ("warning", "job_types")
    assert "the first for 20 s" in row.evidence


@pytest.mark.parametrize("moment", ["infinity", "-infinity"])
def test_times_that_a_hand_has_made_infinite_stop_no_check(db, moment):
    call(db, "report_worker", **ME)
    enqueue(db, ordering_key="o")
    one(db, "fail_job", **owner(claim(db)[0]), error="e", fatal=True)
    for job in (running(db), running(db, time_limit="1 min")):
        db.execute("update rota.jobs set started_at = %s where id = %s", [moment, job.job_id])
    call(db, "pause_all")
    for change in (
        *("rota.jobs set locked_until", "rota.jobs set overdue_at", "rota.jobs set created_at"),
        *("rota.workers set last_seen_at", "rota.halted_keys set halted_since"),
        *("rota.pauses set paused_at", "rota.finished_jobs set finished_at"),
    ):
        found = db.execute(f"update {change} = '{moment}'")
        assert found.rowcount
        told = [row.evidence for row in call(db, "doctor")]
        assert not [text for text in told if "could not be examined" in text]


def test_untaken_jobs_tells_of_the_queues_that_it_is_asked_for(db):
    call(db, "report_worker", **{**ME, "version": version(db), "job_types": ["mail"]})
    first = enqueue(db, "charge", run_at=ago(db, "20 s"))
    enqueue(db, "charge", priority=5, run_at=ago(db, "15 s"))
    enqueue(db, "mail", run_at=ago(db, "20 s"))
    enqueue(db, "refund", run_at=ago(db, "5 s"))
    enqueue(db, "charge", queue="other", run_at=ago(db, "20 s"))

    (found,) = call(db, "untaken_jobs", queues=["default", "empty"])

    assert (found.queue, found.job_type, found.due_jobs) == ("default", "charge", 2)
    assert found.job_id == first
    assert len(call(db, "untaken_jobs", queues=["default", "other"])) == 2


@pytest.mark.parametrize("bad", [None, [], ["a", None]])
def test_untaken_jobs_refuses_bad_queues(db, bad):
    with refused("queues"):
        call(db, "untaken_jobs", queues=bad)


def version(db):
    return scalar(db, "select rota.version()")


def ago(db, span):
    return scalar(db, "select rota.now() - %s::interval", span)


def test_a_paused_queue(db):
    value(db, "set_queue", queue="mail")
    value(db, "pause_queue", queue="mail", reason="the server moves")

    row = only(db)

    assert (row.severity, row.finding) == ("warning", "queues")
    assert "queue mail was paused by role postgres" in row.evidence
    assert "the server moves" in row.evidence
    cure(db)
    assert doctor(db) == []


def test_a_pause_without_an_end_that_a_hand_has_set(db):
    value(db, "pause_all")
    db.execute("update rota.pauses set until = 'infinity'")

    row = only(db)

    assert row.evidence.endswith("ago, without a reason")


@pytest.mark.parametrize("what", ["queue", "all"])
def test_retries_of_what_is_paused_wait_for_no_budget(db, clock, what):
    call(db, "set_queue", queue="default", retry_budget={"per_minute": 1})
    one(db, "fail_job", **owner(running(db)), error="bad", retry_in="10 s")
    call(db, f"pause_{what}", **({"queue": "default"} if what == "queue" else {}))
    clock.advance("1 minute")
    settle(db)

    assert only(db).remedy.startswith("select rota.resume_")


def test_a_queue_that_is_still_coming(db):
    """As in a database that was restored, and has forgotten that it has settled."""
    value(db, "set_database_number", number=5)
    arrival = {"move_id": 6, "from_database": 6, "queue": "mail", "jobs": "[]"}
    call(db, "receive_moves", **arrival)

    row = only(db)

    assert (row.severity, row.finding) == ("warning", "queues")
    assert "queue mail has been coming from database 6 for" in row.evidence
    db.execute(row.remedy)
    call(db, "receive_moves", **arrival, settle_above=0)
    assert doctor(db) == []


@pytest.mark.own_session
def test_a_queue_that_is_late_tells_what_keeps_it(db, connect):
    call(db, "report_worker", **{**ME, "version": version(db)})
    job_id = enqueue(db, run_at=ago(db, "7 min"))
    enqueue(db, run_at=ago(db, "1 min"))
    other = connect(autocommit=False)
    other.execute("select from rota.jobs where id = %s for update", (job_id,))

    row = only(db)

    assert (row.severity, row.finding) == ("warning", "queues")
    assert f"job {job_id}" in row.evidence
    assert "its row is locked by pid" in row.evidence
    assert row.remedy == f"select pg_terminate_backend({other.info.backend_pid});"
    db.execute(row.remedy)
    wait_until(lambda: "its row is locked" not in only(db).evidence, "the end of the session")
    assert job_id in {job.job_id for job in claim(db, max_jobs=2)}


def test_a_queue_is_late_behind_a_type_that_nobody_takes(db):
    call(db, "report_worker", **{**ME, "version": version(db)}, job_types=["x"])
    enqueue(db, "forgotten", run_at=ago(db, "1 day"))
    job_id = enqueue(db, run_at=ago(db, "7 min"))
    enqueue(db, run_at=ago(db, "6 min"))

    untaken, late = doctor(db)

    assert (untaken.finding, late.finding) == ("job_types", "queues")
    assert f"queue default is late: job {job_id}, " in late.evidence


def test_a_queue_is_late_behind_a_type_that_is_paused(db):
    call(db, "report_worker", **{**ME, "version": version(db)})
    enqueue(db, "paused", run_at=ago(db, "1 day"))
    value(db, "pause_type", job_type="paused")
    settle(db)
    only(db)
    job_id = enqueue(db, run_at=ago(db, "7 min"))

    paused, late = doctor(db)

    assert paused.remedy == "select rota.resume_type('paused');"
    assert f"queue default is late: job {job_id}, " in late.evidence


@pytest.mark.parametrize(
    "limit",
    [
        {"job_type": "x", "max_starts": 1, "per": "1 hour"},
        {"queue": "default", "max_running": 1},
        {"limit_key": "shop", "max_running": 1},
    ],
)
def test_a_queue_is_late_behind_a_limit(db, clock, limit):
    clock.set("2026-01-12 12:00+00")
    call(db, "report_worker", **{**ME, "version": version(db)})
    value(db, "set_limit", **limit)
    first, job_id, *_ = (enqueue(db, limit_key="shop") for _ in range(4))
    assert [job.job_id for job in claim(db, max_jobs=4, lease="1 hour")] == [first]
    clock.advance("4 minutes")
    settle(db)
    assert [row for row in doctor(db) if row.finding == "queues"] == []
    clock.advance("2 minutes")
    call(db, "report_worker", **{**ME, "version": version(db)})
    settle(db)

    (row,) = [row for row in doctor(db) if row.finding == "queues"]

    assert row.severity == "warning"
    assert f"queue default is late: job {job_id}, " in row.evidence
    assert "been due for 6 min. The first reason: limit " in row.evidence
    db.execute(row.remedy)
    settle(db)
    assert [job.job_id for job in claim(db, max_jobs=4)] == [job_id]


@pytest.mark.parametrize("option", ["depends_on", "ordering_key"])
def test_a_job_is_late_behind_its_key_and_not_behind_what_it_depends_on(db, clock, option):
    clock.set("2026-01-12 12:00+00")
    first = enqueue(db, queue="other", ordering_key="k")
    enqueue(db, **{option: [first] if option == "depends_on" else "k"})
    (job,) = claim(db, queues=["other"])
    clock.advance("2 hours")
    value(db, "finish_job", **owner(job))
    call(db, "report_worker", **{**ME, "version": version(db)})

    late = [row.evidence for row in doctor(db) if "is late" in row.evidence]
    ages = rows(db, "select oldest_ready_age from rota.queue_stats where queue = 'default'")

    waited = timedelta(hours=2) if option == "ordering_key" else timedelta(0)
    assert ages == [(waited,)]
    assert len(late) == (option == "ordering_key")


def test_a_limit_of_nothing(db):
    for subject in ({"queue": "q'1"}, {"job_type": "t"}, {"limit_key": "c:*"}):
        subject = {name: text.replace("'", "-") for name, text in subject.items()}
        value(db, "set_limit", **subject, max_running=0)
        settle(db)

        row = only(db)

        assert (row.severity, row.finding) == ("warning", "limits")
        assert row.evidence.startswith("limit ")
        cure(db)
        assert doctor(db) == []


def test_a_halted_key(db):
    dead = die(db, ordering_key="k'1")
    db.execute("update rota.finished_jobs set finished_at = finished_at - interval '2 hours'")

    row = only(db)

    assert (row.severity, row.finding) == ("warning", "ordering_keys")
    assert row.evidence.endswith(
        f"by job {dead}, which is dead: ValueError: bad currency;"
        " resume_ordering_key() lets the jobs behind it run without it"
    )
    cure(db)
    assert doctor(db) == []


def test_dead_jobs_of_one_error(db):
    for n in range(3):
        die(db, f"row {n} of 'file {n}' has no price", queue="in")
    other = die(db, "no price for 'tea'")

    first, second = doctor(db)

    assert (first.severity, first.finding) == ("warning", "dead_jobs")
    assert "3 jobs of type x in queue in died in the last hour with ValueError: row N of" in (
        first.evidence
    )
    assert "ValueError: no price for 'tea', the last" in second.evidence  # as it was
    assert f"such as job {other}" in second.evidence
    assert second.remedy == f"select rota.retry_job({other});"
    db.execute(first.remedy)
    assert [row.id for row in rows(db, "select id from rota.dead_jobs")] == [other]
    assert only(db).evidence.split(", the last")[0] == second.evidence.split(", the last")[0]


def test_a_dead_job_that_may_have_killed_its_workers_is_not_run_again_unseen(db, clock):
    clock.set("2026-01-01 00:00:00+00")
    job = running(db, max_attempts=1)
    clock.advance("1 hour")
    settle(db)

    (row,) = [row for row in doctor(db) if row.finding == "dead_jobs"]

    assert "may have killed its workers, and would again" in row.evidence
    assert row.remedy == f"select * from rota.explain_job({job.job_id});"


def test_a_dead_job_that_cannot_just_be_retried(db):
    replaced = die(db, "two", idempotency_key="k")
    newer = enqueue(db, idempotency_key="k")

    (row,) = [row for row in doctor(db) if row.finding == "dead_jobs"]

    assert f"its idempotency key is taken by job {newer}" in row.evidence
    db.execute(row.remedy)
    assert {row.id for row in rows(db, "select id from rota.jobs")} == {replaced}


@pytest.mark.parametrize("how_many", [1, 2])
def test_dead_jobs_that_were_erased_need_no_attention(db, how_many):
    ids = [die(db, "one") for _ in range(how_many)]

    value(db, "act_on_jobs", act="erase", filter={"ids": ids})

    assert [row for row in doctor(db) if row.finding == "dead_jobs"] == []
    db.execute(call(db, "explain_job", job_id=ids[0])[0].remedy)
    assert [row.id for row in rows(db, "select id from rota.jobs")] == ids[:1]


def end_all(db, queue, error):
    """Let all jobs of a queue fail with this error."""
    while claimed := claim(db, queues=[queue], max_jobs=1000):
        endings = [
            {**owner(job), "outcome": "failed", "error": error, "error_type": "ValueError"}
            for job in claimed
        ]
        call(db, "end_jobs", endings=Jsonb(endings))


@pytest.mark.of_utf8
@pytest.mark.parametrize(("how_many", "others"), [(5, 0), (5, 5000), (1003, 0)])
def test_the_remedy_of_dead_jobs_is_of_that_group_and_stops_at_none(db, how_many, others):
    error = "row 1 of $do$ 'a\\b' \x1b[31m\nwas \x9b bad"
    value(db, "set_queue", queue="in", max_attempts=1)
    for _ in range(2):  # looked at first
        die(db, "another", queue="in")
    db.execute(
        "select count(rota.enqueue('y', queue => 'in')) from generate_series(1, %s)", [others]
    )
    end_all(db, "in", "another")
    taken = die(db, error, queue="in", idempotency_key="k")
    holder = enqueue(db, queue="out", idempotency_key="k")
    of_no_type = running(db, queue="in")
    one(db, "fail_job", **owner(of_no_type), error=error, fatal=True)
    seen = die(db, error, queue="in")
    value(db, "act_on_jobs", act="discard", filter={"ids": [seen]})
    db.execute(
        "select rota.enqueue('x', queue => 'in') from generate_series(1, %s)", [how_many]
    )
    end_all(db, "in", error)

    row = next(r for r in doctor(db) if f"{how_many + 1} jobs of type x in" in r.evidence)

    assert row.finding == "dead_jobs"
    assert row.evidence.startswith("at least ") == bool(others)  # no more are looked at
    assert row.remedy.startswith("select") == (how_many < 1000 and not others)
    assert ("commit" in row.remedy) == ("spread" in row.remedy) == (how_many > 1000)
    assert row.evidence.isprintable()
    assert row.remedy.isprintable()
    db.execute(row.remedy)
    assert scalar(db, "select count(*) from rota.jobs where queue = 'in'") == how_many
    left = rows(db, "select id from rota.dead_jobs where id >= %s order by id", taken)
    assert [row.id for row in left] == [taken, of_no_type.job_id, seen]
    assert run(db, holder).status == "queued"


def test_a_halted_key_whose_job_is_gone(db):
    dead, key = die(db, ordering_key="k'\x1b\\1"), "k'\x1b\\1"
    behind = enqueue(db, ordering_key=key)
    db.execute("delete from rota.finished_jobs where id = %s", [dead])
    settle(db)

    row = next(row for row in doctor(db) if row.finding == "ordering_keys")

    assert row.evidence.endswith(
        f"by job {dead}, which retention has removed: the jobs behind it can only"
        " continue without it"
    )
    assert row.remedy.isprintable()
    db.execute(row.remedy)
    settle(db)
    assert "ordering_keys" not in {row.finding for row in doctor(db)}
    assert run(db, behind).status == "queued"


def test_a_halted_key_whose_job_cannot_come_back(db):
    dead = die(db, ordering_key="o", idempotency_key="k")
    holder = enqueue(db, idempotency_key="k", delay="1 hour")

    row = next(row for row in doctor(db) if row.finding == "ordering_keys")

    assert f"its idempotency key is taken by job {holder} (queued)" in row.evidence
    db.execute(row.remedy)
    settle(db)
    assert "ordering_keys" not in {row.finding for row in doctor(db)}
    assert (run(db, dead).status, run(db, holder).status) == ("queued", "cancelled")


def test_no_worker_is_there_at_all(db):
    for job_type in ("mail", "charge"):
        enqueue(db, job_type, run_at=ago(db, "6 min"))

    row = only(db)

    assert (row.severity, row.finding) == ("critical", "job_types")
    assert row.evidence.startswith(
        "no worker is running, but jobs of mail in queue default, charge in queue default are"
        " due, the first for 6 min, such as job "
    )
    assert row.evidence.endswith("--queue default")


@pytest.mark.parametrize("what", ["queue", "type", "all"])
def test_what_is_paused_needs_no_worker(db, what):
    enqueue(db, "mail", run_at=ago(db, "6 min"))
    arguments = {"queue": {"queue": "default"}, "type": {"job_type": "mail"}, "all": {}}[what]

    call(db, f"pause_{what}", **arguments, reason="the provider moves")

    row = only(db)
    assert (row.severity, row.finding) == ("warning", "queues")
    db.execute(row.remedy)
    assert only(db).evidence.startswith("no worker is running")


def test_a_queue_that_lets_nothing_run_needs_no_worker(db):
    call(db, "set_limit", queue="default", max_running=0)
    enqueue(db, run_at="1990-01-01")
    settle(db)

    assert only(db).finding == "limits"

    cure(db)
    assert only(db).finding == "job_types"


def test_dead_rows_that_nobody_vacuums_and_statistics_that_are_stale(db):
    def change_many() -> None:
        db.execute(
            "insert into rota.workers (worker, host, pid, version, queues, last_seen_at) select"
            " 'w' || n, 'h', 1, rota.version(), '{q}', now() - interval '1 day'"
            " from generate_series(1, 60000) as n on conflict do nothing"
        )
        db.execute("update rota.workers set pid = 2")
        db.execute("delete from rota.workers where worker <> 'w1'")
        is_new = db.info.server_version > 150000
        db.execute("select pg_stat_force_next_flush()" if is_new else "")

    db.execute("alter table rota.workers set (autovacuum_enabled = off)")
    change_many()

    def found():
        wanted = "table rota.workers has", "statistics of table rota.workers are stale"
        return [row for row in doctor(db) if row.evidence.startswith(wanted)]

    wait_until(lambda: len(found()) == 2, "statistics of the server")
    dead, stale = found()

    assert (dead.severity, dead.finding) == ("warning", "vacuum")
    assert "dead rows and 1 live ones, and was never vacuumed" in dead.evidence
    assert dead.remedy == "vacuum (analyze) rota.workers;"
    db.execute(stale.remedy)
    wait_until(lambda: len(found()) == 1, "the analyze in the statistics of the server")
    db.execute(dead.remedy)
    wait_until(lambda: not found(), "the vacuum in the statistics of the server")

    change_many()
    dead = "select pg_stat_get_dead_tuples('rota.workers'::regclass) > 60000"
    wait_until(lambda: scalar(db, dead), "statistics of the server")
    assert found() == []  # the next round of autovacuum takes it
    db.execute(now_is("clock_timestamp() + interval '6 minutes'"))
    assert ["was vacuumed 6 min" in row.evidence for row in found()] == [True, False]


def test_an_effect_of_which_nobody_knows(db):
    job = running(db)
    call(db, "record_effect", scope="mail", key="k", **owner(job))
    assert doctor(db) == []
    one(db, "fail_job", **owner(job), error="e", retry_in="0")

    row = only(db)

    assert (row.severity, row.finding) == ("warning", "effects")
    assert f"mail k of job {job.job_id}" in row.evidence
    ((scope, key, *_),) = rows(db, row.remedy)
    assert (scope, key) == ("mail", "k")


@pytest.mark.usefixtures("utc")
def test_schedules_that_a_clock_was_ahead_of(db, clock):
    clock.set("2026-01-10 12:00+00")
    for name, schedule in (("hourly", "0 * * * *"), ("every", "every 7 minutes")):
        one(db, "schedule_job", name=name, schedule=schedule, job_type="x")
    clock.set("2027-01-10 12:30+00")
    one(db, "tick")
    clock.set("2026-01-10 12:20+00")
    one(db, "tick")

    (found,) = [row for row in doctor(db) if row.finding == "schedules"]

    assert found.severity == "critical"
    assert "until the clock of the server shows 2027-01-10 12:30:00" in found.evidence
    assert "2 of them, such as every" in found.evidence
    db.execute(found.remedy)
    assert "schedules" not in {row.finding for row in doctor(db)}
    planned = (
        "select name, to_char(next_run_at, 'HH24:MI') from rota.job_definitions order by 1"
    )
    assert rows(db, planned) == [("every", "12:21"), ("hourly", "13:00")]
    clock.set("2026-01-10 13:00+00")
    assert one(db, "tick").jobs_enqueued == 2


@pytest.mark.usefixtures("utc")
def test_jobs_that_were_enqueued_while_a_clock_was_ahead(db, clock):
    clock.set("2027-01-10 12:30+00")
    ids = [enqueue(db, queue="q") for _ in range(2)]
    later = enqueue(db, queue="q", delay="1 hour")
    clock.set("2026-01-10 12:20+00")
    settle(db)
    assert claim(db, queues=["q"]) == []

    row = only(db)

    assert (row.severity, row.finding) == ("critical", "queues")
    assert row.evidence == (
        "2 jobs were enqueued or failed while the clock of the server was ahead, such as job "
        f"{ids[1]}, and are due only when it shows 2027-01-10 12:30:00 UTC again"
    )
    db.execute(row.remedy)
    assert [job.job_id for job in claim(db, queues=["q"], max_jobs=5)] == ids
    assert later not in ids


@pytest.mark.parametrize("how", ["retried", "released", "planned", "next stage"])
def test_jobs_that_were_due_while_a_clock_was_ahead(db, clock, how):
    call(db, "define_pipeline", pipeline="p", stages=Jsonb([{"stage": "a"}, {"stage": "b"}]))
    clock.set("2026-01-10 12:00+00")
    if how == "planned":
        call(db, "schedule_job", name="s", schedule="0 * * * *", job_type="x")
    job = running(db) if how == "retried" else None
    if job:
        call(db, "fail_job", **owner(job), error="e", fatal=True)
    later = enqueue(db, queue="q", run_at="2026-01-10 16:00+00")
    clock.set("2026-01-10 20:00:10+00")
    value(db, "set_priority", job_id=later, priority=1)
    if job:
        value(db, "retry_job", job_id=job.job_id)
    elif how == "planned":
        assert one(db, "tick").jobs_enqueued == 1
    else:
        if how == "released":
            enqueue(db)
        else:
            value(db, "start_pipeline", pipeline="p")
        (job,) = claim(db)
        clock.advance("10 s")
        if how == "released":
            call(db, "release_jobs", job_ids=[job.job_id], lease_tokens=[job.lease_token])
        else:
            value(db, "finish_job", **owner(job))
    clock.set("2026-01-10 12:10+00")
    settle(db)
    assert claim(db) == []

    (row,) = [row for row in doctor(db) if row.finding == "queues"]

    assert row.evidence.startswith("1 job was enqueued or failed while the clock of the server")
    db.execute(row.remedy)
    assert len(claim(db, queues=["default", "q"], max_jobs=5)) == 1
    assert run(db, later).status == "queued"


@pytest.mark.usefixtures("utc")
def test_jobs_that_failed_while_a_clock_was_ahead(db, clock):
    clock.set("2026-01-10 12:00+00")
    job = running(db, queue="q")
    clock.set("2026-01-10 20:00+00")
    one(db, "fail_job", **owner(job), error="e", retry_in="5 minutes")
    clock.set("2026-01-10 12:10+00")
    settle(db)
    assert claim(db, queues=["q"]) == []

    (row,) = [row for row in doctor(db) if row.finding == "queues"]

    assert row.severity == "critical"
    assert row.evidence.startswith("1 job was enqueued or failed while the clock of the server")
    assert row.evidence.endswith("is due only when it shows 2026-01-10 20:05:00 UTC again")
    db.execute(row.remedy)
    assert [again.job_id for again in claim(db, queues=["q"])] == [job.job_id]


@pytest.mark.usefixtures("utc")
def test_statistics_that_a_clock_was_ahead_of(db, clock):
    def total():
        clock.advance("31 s")
        settle(db)
        return [
            sum(
                row.succeeded
                for row in call(db, "job_stats", since="2026-01-10 00:00+00", step=step)
            )
            for step in ("minute", "hour", "day", "total")
        ]

    for moment, ends in (("12:00:30", 2), ("17:20", 1), ("12:01", 3)):
        clock.set(f"2026-01-10 {moment}+00")
        for _ in range(ends):
            one(db, "finish_job", **owner(running(db)))
        total()

    (found,) = [row for row in doctor(db) if row.finding == "statistics"]
    assert found.severity == "warning"
    assert "until the clock of the server shows 2026-01-10 17:20:30" in found.evidence
    db.execute(found.remedy)

    assert "statistics" not in {row.finding for row in doctor(db)}
    assert total() == [5, 5, 5, 5]
    clock.set("2026-01-10 17:25+00")
    assert total() == [6, 6, 6, 6]
    clock.set("2026-01-11 01:25+00")
    assert total() == [6, 6, 6, 6]


@pytest.mark.usefixtures("utc")
def test_schedules_that_were_planned_while_a_clock_was_ahead(db, clock):
    clock.set("2026-01-10 12:00+00")
    call(db, "schedule_job", name="pause", schedule="after 5 minutes", job_type="x")
    call(
        db, "schedule_job", name="ends", schedule="0 * * * *", job_type="y",
        ends_at="2026-01-10 14:00+00",
    )  # fmt: skip
    clock.set("2027-01-10 12:30+00")
    settle(db)
    call(db, "schedule_job", name="new", schedule="0 2 * * *", job_type="x")
    call(db, "schedule_job", name="tock", schedule="every 10 minutes", job_type="x")
    job = one(db, "claim_jobs", worker="w", job_types=["x"])
    call(db, "finish_job", **owner(job))
    settle(db)
    clock.set("2026-01-10 12:20+00")

    (found,) = [row for row in doctor(db) if row.finding == "schedules"]

    assert "4 of them, such as ends" in found.evidence
    db.execute(found.remedy)
    assert "schedules" not in {row.finding for row in doctor(db)}
    planned = (
        "select name, to_char(next_run_at, 'DD HH24:MI') from rota.job_definitions order by 1"
    )
    assert dict(rows(db, planned)) == {
        "ends": "10 13:00", "new": "11 02:00", "pause": "10 12:25", "tock": "10 12:30",
    }  # fmt: skip
    clock.set("2026-01-10 12:30+00")
    assert one(db, "tick").jobs_enqueued == 2
    assert rows(db, planned)[-1] == ("tock", "10 12:40")


@pytest.mark.usefixtures("utc")
def test_a_schedule_that_was_planned_by_other_rules(db, clock):
    clock.set("2026-03-01 00:00:00+00")
    for name, schedule in (("moved", "0 2 1 * *"), ("well", "0 2 * * *")):
        call(db, "schedule_job", name=name, schedule=schedule, job_type="x",
             time_zone="Europe/Warsaw")  # fmt: skip
    settle(db)
    assert "schedules" not in {row.finding for row in doctor(db)}
    planned = "select next_run_at::text from rota.job_definitions where name = 'moved'"
    by_present_rules = scalar(db, planned)
    db.execute(
        "update rota.job_definitions set next_run_at = next_run_at + interval '1 hour'"
        " where name = 'moved'"
    )

    (found,) = [row for row in doctor(db) if row.finding == "schedules"]

    assert found.severity == "warning"
    assert "schedule moved is planned for 2026-03-01 02:00:00 UTC, but by the" in found.evidence
    assert "rules of Europe/Warsaw it is due at 2026-03-01 01:00:00 UTC" in found.evidence
    db.execute(found.remedy)
    assert scalar(db, planned) == by_present_rules
    assert "schedules" not in {row.finding for row in doctor(db)}


@pytest.mark.usefixtures("utc")
@pytest.mark.parametrize("wrong", ["schedule = '0 25 * * *'", "time_zone = 'Gone/Zone'"])
def test_a_schedule_that_was_broken_by_hand(db, clock, wrong):
    """Found before the time that it misses, and no remedy is told that fails."""
    clock.set("2026-01-01 00:00:00+00")
    settle(db)
    for name in ("broken", "well"):
        call(db, "schedule_job", name=name, schedule="0 2 * * *", job_type="x")
    db.execute(f"update rota.job_definitions set {wrong} where name = 'broken'")

    row = only(db)

    assert (row.severity, row.finding, row.remedy) == ("critical", "schedules", None)
    assert row.evidence.startswith("schedule broken will make no job at 2026-01-01 02:00:00")
    assert "Correct it with schedule_job() or rota schedule add broken" in row.evidence
    clock.set("2026-01-01 02:00:01+00")
    settle(db)
    (row,) = [row for row in doctor(db) if row.finding == "schedules"]
    assert (row.severity, row.remedy) == ("warning", None)
    assert row.evidence.startswith("schedule broken was disabled 0 s ago by an error: ")
    assert "Correct it with schedule_job() or rota schedule add broken" in row.evidence
    call(db, "schedule_job", name="broken", schedule="0 3 * * *", job_type="x")
    assert "schedules" not in {row.finding for row in doctor(db)}


def test_schedules_that_are_late_or_disabled_by_an_error(db, clock):
    clock.set("2026-01-01 00:00:00+00")
    settle(db)
    for name in ("late", "broken"):
        call(db, "schedule_job", name=name, schedule="* * * * *", job_type="x")
    db.execute(
        "update rota.job_definitions set is_enabled = false, disabled_at = rota.now(),"
        " next_run_at = null, last_error = 'no such zone' where name = 'broken'"
    )
    clock.advance("3 min")

    late, broken = doctor(db)

    assert (late.severity, late.finding) == ("critical", "schedules")
    assert "late should have made a job 2 min ago, and no tick has run since" in late.evidence
    db.execute("update rota.maintenance set done_at = rota.now() where task = 'tick'")
    assert doctor(db)[0].evidence == "schedule late should have made a job 2 min ago"
    assert (broken.severity, broken.finding) == ("warning", "schedules")
    assert "by an error: no such zone" in broken.evidence
    db.execute(late.remedy)
    db.execute(broken.remedy)
    settle(db)
    assert "schedules" not in {row.finding for row in doctor(db)}


def test_jobs_that_wait_for_a_dead_one_are_told_for_as_long_as_they_wait(db, clock):
    parent = running(db)
    waits, other = (
        enqueue(db, depends_on=[parent.job_id], if_parent_dead=option)
        for option in ("wait", "cancel")
    )
    one(db, "fail_job", **owner(parent), error="bad", error_type="E", fatal=True)
    settle(db)
    clock.advance("2 hours")
    settle(db)

    row = only(db)

    assert (row.severity, row.finding) == ("warning", "dead_jobs")
    assert row.evidence == (
        f"1 job is waiting for a retry of job {parent.job_id} of type x in queue default,"
        " which died 2 h ago with E: bad"
    )
    db.execute(row.remedy)
    settle(db)
    (again,) = claim(db)
    value(db, "finish_job", **owner(again))
    settle(db)
    assert {job.job_id for job in claim(db, max_jobs=3)} == {waits, other}
    assert doctor(db) == []


def test_jobs_that_all_expired_because_nobody_was_there(db, clock):
    ids = [enqueue(db, expires_after="10 minutes") for _ in range(3)]
    one(db, "fail_job", **owner(claim(db)[0]), error="down", retry_in="1 hour")
    other = enqueue(db, "other", expires_after="10 minutes")
    value(db, "cancel_job", job_id=other)
    clock.advance("20 minutes")
    settle(db)
    clock.advance("2 minutes")
    settle(db)

    row = only(db)

    assert (row.severity, row.finding) == ("warning", "dead_jobs")
    assert row.evidence.startswith(
        "no job of type x in queue default succeeded in the last hour, and 3 expired, 2 of them"
        " before a worker began them, the last 2 min ago, such as job "
    )
    db.execute(row.remedy)
    assert {job.job_id for job in claim(db, max_jobs=9)} == set(ids)


@pytest.mark.parametrize("how", ["dead", "expired"])
def test_the_remedy_of_many_restores_what_was_cancelled_because_of_them(db, clock, how):
    parents = [enqueue(db, max_attempts=1, expires_after="10 minutes") for _ in range(2)]
    child = enqueue(db, "y", queue="next", depends_on=parents[:1])
    if how == "dead":
        end_all(db, "default", "down")
    clock.advance("20 minutes")
    settle(db)
    clock.advance("2 minutes")
    settle(db)
    assert run(db, child).status == "cancelled"

    cure(db)
    settle(db)

    assert [run(db, job_id).status for job_id in (*parents, child)] == ["queued"] * 2 + [
        "blocked"
    ]


@pytest.mark.parametrize("how", ["succeeded", "long ago"])
def test_jobs_that_expire_beside_others_may_be_meant(db, clock, how):
    enqueue(db, expires_after="10 minutes")
    clock.advance("20 minutes")
    settle(db)
    if how == "succeeded":
        value(db, "finish_job", **owner(running(db)))
    else:
        clock.advance("1 hour")
    clock.advance("2 minutes")
    settle(db)

    assert doctor(db) == []


def test_a_schedule_whose_last_job_was_deleted_by_hand(db, clock):
    clock.set("2026-01-12 12:00+00")
    call(db, "schedule_job", name="inbox", schedule="after 10 minutes", job_type="x")
    settle(db)
    (job,) = claim(db)
    assert doctor(db) == []
    db.execute("delete from rota.jobs")
    settle(db)

    row = only(db)

    assert (row.severity, row.finding) == ("warning", "schedules")
    assert row.evidence == (
        f"schedule inbox makes no job until job {job.job_id} ends, which is gone"
    )
    cure(db)
    clock.advance("10 minutes")
    settle(db)
    assert len(claim(db)) == 1


def test_a_schedule_that_has_ended_misses_no_job(db, clock):
    clock.set("2026-01-12 12:00+00")
    ends_at = "2026-01-12 12:05+00"
    call(db, "schedule_job", name="x", schedule="after 1 hour", job_type="x", ends_at=ends_at)
    db.execute("select rota.set_queue('default', keep_finished => '0')")
    settle(db)
    (job,) = claim(db)
    value(db, "finish_job", **owner(job))
    clock.advance("10 days")
    settle(db)

    assert rows(db, "select id from rota.job_runs") == []
    assert doctor(db) == []


@pytest.mark.own_session
def test_a_forgotten_transaction(db, connect, clock):
    other = connect(autocommit=False, application_name="report")
    other.execute("set transaction isolation level repeatable read")
    other.execute("select from rota.jobs")
    clock.advance(timedelta(minutes=10))
    db.execute("select * from rota.tick()")

    with owner_sees_sessions(db):
        row = only(db)

        assert (row.severity, row.finding) == ("warning", "horizon")
        assert (
            f"pid {other.info.backend_pid} (role postgres, application report" in row.evidence
        )
        assert "transaction open for 10 min" in row.evidence
        assert "dead rows of rota's tables cannot be removed" in row.evidence
        db.execute(row.remedy)
        wait_until_gone(db, other)
        assert doctor(db) == []


def wait_until_gone(db, other):
    db.execute("select pg_terminate_backend(%s, 10000)", (other.info.backend_pid,))


def test_rows_without_a_partition(db):
    job = running(db)
    value(db, "finish_job", **owner(job))
    db.execute("update rota.finished_jobs_done set finished_at = '2001-01-01 00:00+00'")

    row = only(db)

    assert (row.severity, row.finding) == ("warning", "partitions")
    assert "rota.finished_jobs_done_default" in row.evidence
    cure(db)


@pytest.mark.slow
def test_a_history_of_so_many_partitions_that_a_look_up_takes_too_many_locks(db):
    sessions = int(scalar(db, "show max_connections"))
    value(db, "set_queue", queue="q", keep_finished="2 years")
    db.execute(
        "select rota._create_partition('finished_jobs_done', 'finished_at',"
        " current_date - n, 1) from generate_series(1, %s) as n",
        (64 * sessions // 20 // 2,),
    )

    (row,) = (row for row in doctor(db) if row.finding == "partitions")

    with db.transaction():
        db.execute("select from rota.finished_jobs where id = 1")
        locks = scalar(
            db,
            "select count(*) from pg_locks where locktype = 'relation'"
            " and pid = pg_backend_pid() and relation <> 'pg_locks'::regclass",
        )
    told = int(row.evidence.removeprefix("to look up a job by its id takes ").split()[0])
    assert abs(told - locks) <= 10
    assert row.severity == "warning"
    assert row.remedy == (
        f"alter system set max_locks_per_transaction = {-(-20 * told // sessions)};"
    )


# The second is what an interrupted detach concurrently leaves behind.
@pytest.mark.parametrize("is_pending", [False, True], ids=["detached", "pending"])
def test_a_partition_that_is_detached_is_attached_with_the_rows_that_came_since(db, is_pending):
    before, after = running(db), running(db)
    value(db, "finish_job", **owner(before))
    partition = scalar(db, "select tableoid::regclass::text from rota.finished_jobs")
    if is_pending:
        db.execute(
            "update pg_inherits set inhdetachpending = true where inhrelid = %s::regclass",
            (partition,),
        )
    else:
        db.execute(f"alter table rota.finished_jobs_done detach partition {partition}")
        value(db, "finish_job", **owner(after))
        settle(db)

    row = next(row for row in doctor(db) if row.severity == "critical")

    assert (row.finding, row.evidence.split(":")[0]) == (
        "partitions",
        f"table {partition} is detached",
    )
    db.execute(row.remedy)
    assert doctor(db) == []
    assert scalar(db, "select count(*) from rota.finished_jobs") == 2 - is_pending


@pytest.mark.own_session
def test_a_listener_that_does_not_read(db, connect):
    listener = connect(autocommit=False)
    listener.execute("listen deaf")
    listener.commit()
    listener.execute("select 1")
    with connect(autocommit=False) as other:
        other.execute(
            "select pg_notify('deaf', rpad(n::text, 7900, 'x'))"
            " from generate_series(1, 14000) as n"
        )

    blind = only(db)
    assert blind.evidence.endswith("finds the oldest transaction in pg_stat_activity")
    assert blind.remedy is None
    with owner_sees_sessions(db):
        row = only(db)

        assert (row.severity, row.finding) == ("warning", "notifications")
        assert row.remedy == f"select pg_terminate_backend({listener.info.backend_pid});"
        db.execute(row.remedy)
        wait_until_gone(db, listener)
        # Whoever listens next makes room.
        db.execute("listen deaf")
        db.execute("notify deaf")
        assert doctor(db) == []


def test_a_table_that_a_session_has_locked(db, connect):
    other = connect()
    other.autocommit = False
    other.execute("lock table rota.jobs in access exclusive mode")

    found = [row for row in call(db, "doctor") if row.severity != "ok"]

    assert {row.severity for row in found} == {"critical"}
    assert {"leases", "queues"} <= {row.finding for row in found}
    assert {row.remedy for row in found} == {
        f"select pg_terminate_backend({other.info.backend_pid});"
    }
    db.execute(found[0].remedy)
    wait_until(lambda: [row for row in call(db, "doctor") if row.severity != "ok"] == [])


def test_a_sequence_near_its_end(db):
    db.execute("select setval('rota.jobs_id_seq', 5e18::bigint)")

    row = only(db)

    assert (row.severity, row.finding) == ("critical", "sequences")
    assert "jobs_id_seq" in row.evidence


@pytest.mark.parametrize("number", [None, 5])
def test_a_sequence_behind_its_rows(db, number):
    """As where a replication has left it out."""
    if number is not None:
        value(db, "set_database_number", number=number)
    for _ in range(3):
        value(db, "cancel_job", job_id=enqueue(db))
    db.execute("select setval('rota.jobs_id_seq', min(id), false) from rota.finished_jobs")
    db.execute("select setval('rota.audit_log_id_seq', 1, false)")
    last = scalar(db, "select max(id) from rota.finished_jobs")

    (found,) = [row for row in call(db, "doctor") if row.finding == "sequences"]

    assert found.severity == "critical"
    assert "jobs_id_seq is behind" in found.evidence
    db.execute(found.remedy)
    assert [row.severity for row in call(db, "doctor") if row.finding == "sequences"] == ["ok"]
    assert enqueue(db) == last + (1 if number is None else 1024)
    # The log of acts goes past what is taken.
    value(db, "pause_queue", queue="default")


def test_the_sequences_of_slots_and_of_keys_behind_their_rows(db):
    """Else no job under a limit can end, and a key is searched from where it once began."""
    value(db, "set_limit", job_type="x", max_running=3)
    settle(db)
    job = running(db)
    db.execute("insert into rota.key_starts (ordering_key, first_id) values ('k', 1), ('k', 2)")
    for name in ("limit_slots_version_seq", "key_starts_id_seq"):
        db.execute(f"select setval('rota.{name}', 1)")

    found = [row for row in call(db, "doctor") if row.finding == "sequences"]

    told = [row.evidence.split(",")[0] for row in found]
    assert sorted(told) == [
        "sequence rota.key_starts_id_seq is behind",
        "sequence rota.limit_slots_version_seq is behind",
    ]
    for row in found:
        db.execute(row.remedy)
    assert [row.severity for row in call(db, "doctor") if row.finding == "sequences"] == ["ok"]
    assert value(db, "finish_job", job_id=job.job_id, lease_token=job.lease_token) == "finished"


def test_each_sequence_of_ids_is_compared_with_its_rows(db):
    two = {
        "key_starts": "(ordering_key, first_id) select 'k', n",
        "lane_starts": "(call, start) select n, '{1}'",
        "limit_slots": "(limit_name) select 'type x'",
        "pending_checks": "(kind, subject) select 'job', '1'",
        "reruns": "(job_id, run_at, job)"
        " select n, rota.now(), jsonb_build_object('idempotency_key', 'k', 'job_type', 'x')",
    }
    ids = rows(
        db,
        "select c.relname, pg_get_serial_sequence('rota.' || c.relname, a.attname)"
        " from pg_attribute as a join pg_class as c on c.oid = a.attrelid"
        " where c.relnamespace = 'rota'::regnamespace and a.attidentity <> ''"
        # The log of acts goes past what is taken by itself.
        " and c.relname not in ('jobs', 'audit_log')",
    )
    for table, sequence in ids:
        db.execute(f"insert into rota.{table} {two[table]} from generate_series(1, 2) as n")
        db.execute("select setval(%s, 1)", (sequence,))

    found = [row.evidence for row in call(db, "doctor") if row.finding == "sequences"]

    told = sorted(evidence.split(" is behind")[0] for evidence in found)
    assert told == sorted(f"sequence {sequence}" for _, sequence in ids)


def test_jobs_of_other_databases_are_not_behind(db):
    value(db, "set_database_number", number=5)
    value(db, "cancel_job", job_id=enqueue(db))
    db.execute("update rota.finished_jobs set id = id + 4096 * 1024 + 1")

    assert [row.severity for row in call(db, "doctor") if row.finding == "sequences"] == ["ok"]


def test_doctor_writes_nothing(db):
    die(db, ordering_key="k")
    enqueue(db, run_at=ago(db, "10 min"))
    claim(db, lease="1 ms")
    db.execute("set default_transaction_read_only = on")

    assert not [row for row in call(db, "doctor") if "could not be examined" in row.evidence]


def test_errors_are_folded_by_what_differs_from_job_to_job(db):
    texts = {
        "row 17 has 1.5 of 2026-01-01": "row N has N of N-N-N",
        "no user 'ann' in \"shop\"": "no user '...' in '...'",
        "can't find the user's file": "can't find the user's file",
        "job 550e8400-e29b-41d4-a716-446655440000": "job ID",
        "at 0x7f12ab, commit deadbeef01": "at ID, commit ID",
        "deadbeef is a word": "deadbeef is a word",
        "no answer\r\n\tof  them\n": "no answer of them",
    }
    for text, folded in texts.items():
        assert value(db, "fold_error", message=text) == folded
    assert value(db, "fold_error", message=None) is None


def test_an_attempt_is_over_its_time_limit(db, clock):
    job = running(db, time_limit="1 minute", lease="10 minutes")
    clock.advance("70 s")

    row = only(db)

    assert (row.severity, row.finding) == ("warning", "running_jobs")
    assert "its time limit expired 10 s ago, its worker has been told to stop" in row.evidence
    told = call(db, "explain_job", job_id=job.job_id)
    assert [reason.reason for reason in told] == ["overdue", "running"]
    assert told[0].remedy == row.remedy
    db.execute(row.remedy)
    assert "running_jobs" not in {found.finding for found in doctor(db)}


def test_an_attempt_that_was_to_stop_and_does_not_is_not_run_again(db, clock):
    job = running(db, time_limit="1 minute", lease="10 minutes")
    value(db, "cancel_job", job_id=job.job_id, reason="wrong file")
    clock.advance("70 s")

    assert "its time limit expired 10 s ago" in only(db).evidence

    cure(db)
    assert run(db, job.job_id).status == "cancelled"


def test_an_index_is_much_larger_than_what_is_in_it(db):
    db.execute(
        "insert into rota.idempotency_keys (idempotency_key, key_scope, expires_at)"
        " select md5(n::text) || repeat(md5((-n)::text), 6), 'x', 'now' from"
        " generate_series(1, 150000) as n"
    )
    assert not [row for row in doctor(db) if row.finding == "indexes"]  # nothing is counted yet
    db.execute("delete from rota.idempotency_keys where idempotency_key > '01'")
    db.execute("vacuum analyze rota.idempotency_keys")

    found = [row for row in doctor(db) if row.finding == "indexes"]

    assert "index rota.idempotency_keys_pkey takes" in found[0].evidence
    db.execute(found[0].remedy)
    assert not [row for row in doctor(db) if row.finding == "indexes"]


def test_of_what_is_more_than_twenty_it_says_how_many_more(db):
    for n in range(25):
        value(db, "set_queue", queue=f"q{n}")
        value(db, "pause_queue", queue=f"q{n}")

    found = [row for row in doctor(db) if row.finding == "queues"]

    assert [row.evidence.split()[1] for row in found[:20]] == [f"q{n}" for n in range(20)]
    assert (found[20].evidence, found[20].remedy) == ("and 5 more like these", None)
    assert len(found) == 21


@pytest.mark.own_session
def test_a_database_that_only_lets_sessions_read_is_told(db, connect):
    """As some providers set it when the disk is nearly full."""
    name = scalar(db, "select quote_ident(current_database())")
    db.execute(f"alter database {name} set default_transaction_read_only = on")
    reader = connect()
    with raises("25006"):
        enqueue(reader)

    row = only(reader)

    assert (row.severity, row.finding) == ("critical", "ticker")
    assert row.evidence.startswith("this database lets its sessions only read")
    reader.execute(row.remedy)
    enqueue(connect())
    assert doctor(connect()) == []
    # A session that wants to read only is no trouble of others.
    reader.execute("set default_transaction_read_only = on")
    assert doctor(reader) == []


@pytest.mark.own_session
def test_a_role_that_may_only_read_is_told(db, connect):
    db.execute("alter role postgres set default_transaction_read_only = on")
    try:
        row = only(connect())
        with connect() as reader:
            reader.execute(row.remedy)
        enqueue(connect())
    finally:
        db.execute("alter role postgres reset default_transaction_read_only")

    assert row.evidence.startswith("role postgres lets its sessions only read")


def test_what_is_asked_stays_with_what_is_shown(db):
    """Of very many late queues, long jobs and schedules only so many are looked at."""
    queues = [f"q{n}" for n in range(40)]
    call(db, "report_worker", **{**ME, "version": version(db), "queues": queues})
    for n, queue in enumerate(queues):
        running(db, queue=queue, job_type=f"t{n % 3}")
        enqueue(db, queue=queue, run_at=ago(db, "1 hour"))
    db.execute("update rota.jobs set queue = 'q0', started_at = rota.now() - interval '6 min'"
        " where status = 'running'")  # fmt: skip
    for n in range(120):
        call(db, "schedule_job", name=f"s{n}", schedule="0 2 * * *", job_type="x")

    with db.transaction():
        db.execute("set local track_functions = 'all'")
        found = doctor(db)
        asked = dict(rows(db, "select funcname, calls from pg_stat_xact_user_functions"))

    assert len([row for row in found if "is late" in row.evidence]) == 20
    assert (asked["explain_job"], asked["_hung_words"], asked["_schedule_plan"]) == (20, 3, 100)
