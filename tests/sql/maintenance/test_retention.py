"""Partitions ahead, and purging behind."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from psycopg.types.json import Jsonb

from sql.helpers import (
    Db,
    claim,
    enqueue,
    one,
    owner,
    rows,
    run,
    running,
    scalar,
    settle,
    value,
)

pytestmark = pytest.mark.slow

AHEAD = 7 + 2
"""So many days of the history and weeks of failed attempts have a partition ahead."""


def end(db: Db, status: str, queue: str = "default") -> int:
    """Bring a new job to this end; return its id."""
    job = running(db, queue=queue)
    if status == "succeeded":
        value(db, "finish_job", **owner(job))
    else:
        if status == "cancelled":
            value(db, "cancel_job", job_id=job.job_id)
        one(db, "fail_job", **owner(job), error="e", fatal=True)
    assert run(db, job.job_id).status == status
    return job.job_id


def is_there(db: Db, job_id: int) -> bool:
    return scalar(db, "select exists (select from rota.finished_jobs where id = %s)", job_id)


def tick_until_done(db: Db, clock) -> int:
    """Tick until nothing is left to do; return how many rows were deleted."""
    deleted = 0
    while True:
        clock.advance("11 s")
        did = one(db, "tick")
        deleted += did.jobs_deleted
        if not (any(did[3:11]) or did.has_more):
            return deleted


def partitions(db: Db, parent: str = "finished_jobs_done") -> list[str]:
    return [
        name
        for (name,) in rows(
            db,
            "select inhrelid::regclass::text from pg_inherits"
            " where inhparent = cast('rota.' || %s as regclass)"
            " and inhrelid::regclass::text ~ '[0-9]{8}$' order by 1",
            parent,
        )
    ]


def names(moment: datetime, days: range) -> list[str]:
    days = [moment + timedelta(days=n) for n in days]
    return [f"rota.finished_jobs_done_{day:%Y%m%d}" for day in days]


@pytest.mark.parametrize(
    ("status", "kept", "gone"),
    [
        ("succeeded", "6 days 23 hours", "8 days 1 hour"),
        ("cancelled", "6 days 23 hours", "8 days 1 hour"),
        ("dead", "89 days 23 hours", "90 days 1 hour"),
    ],
)
def test_retain_purges_each_ended_job_in_its_time(db, clock, status, kept, gone):
    start = clock.now()
    job_id = end(db, status)
    queued = running(db)

    clock.set(start)
    clock.advance(kept)
    tick_until_done(db, clock)
    assert is_there(db, job_id)

    clock.set(start)
    clock.advance(gone)
    tick_until_done(db, clock)
    assert not is_there(db, job_id)
    assert run(db, queued.job_id)


def test_retain_keeps_a_parent_for_a_child_that_nobody_sees_yet(db, connect, clock):
    """A parent ends, and is due to go, while the transaction that depends on it is open."""
    value(db, "set_queue", queue="short", keep_finished="0")
    parent = running(db, queue="short")
    producer = connect()
    with producer.transaction():
        child = enqueue(producer, depends_on=[parent.job_id])
        value(db, "finish_job", **owner(parent))
        later = end(db, "succeeded", "short")
        tick_until_done(db, clock)
        assert is_there(db, parent.job_id)
        clock.advance("1 hour")
        tick_until_done(db, clock)
        assert is_there(db, parent.job_id)

    tick_until_done(db, clock)
    assert run(db, child).status == "queued"
    # Nor is anything kept longer than that.
    tick_until_done(db, clock)
    assert [is_there(db, x) for x in (parent.job_id, later)] == [False, False]


def test_retain_keeps_parents_for_a_batch_that_nobody_sees_yet(db, connect, clock):
    value(db, "set_queue", queue="short", keep_finished="0")
    parent = running(db, queue="short")
    producer = connect()
    with producer.transaction(), producer.transaction():
        jobs = [{"job_type": "t", "depends_on": [parent.job_id]}] * 2
        children = rows(producer, "select job_id from rota.enqueue_many(%s)", Jsonb(jobs))
        value(db, "finish_job", **owner(parent))
        tick_until_done(db, clock)

    tick_until_done(db, clock)
    assert {run(db, child).status for (child,) in children} == {"queued"}


@pytest.mark.parametrize("status", ["succeeded", "cancelled", "dead"])
def test_retain_keeps_a_queue_as_long_as_it_says(db, clock, status):
    start = clock.now()
    setting = "keep_dead" if status == "dead" else "keep_finished"
    value(db, "set_queue", queue="short", **{setting: "1 hour"})
    value(db, "set_queue", queue="long", **{setting: "200 days"})
    short, usual, long = (end(db, status, queue) for queue in ("short", "default", "long"))

    clock.advance("2 hours")
    tick_until_done(db, clock)
    assert [is_there(db, x) for x in (short, usual, long)] == [False, True, True]

    clock.set(start + timedelta(days=91))
    tick_until_done(db, clock)
    assert [is_there(db, x) for x in (short, usual, long)] == [False, False, True]

    clock.set(start + timedelta(days=202))
    tick_until_done(db, clock)
    assert not is_there(db, long)


@pytest.mark.parametrize(
    ("keep", "other", "began", "ends"),
    [
        ("1 year", "362 days", "2026-01-10 12:00+00", "2027-01-10 11:00+00"),
        ("1 day", "30 days", "2026-03-28 12:00+00", "2026-03-29 11:30+00"),
        ("1 month -29 days", "30 days", "2026-03-01 12:00+00", "2026-03-01 13:00+00"),
    ],
)
def test_retain_keeps_what_a_queue_says_in_seconds(db, clock, keep, other, began, ends):
    """A year is 360 days to compare, a day has 23 hours, a month the days of February."""
    db.execute("set timezone = 'Europe/Warsaw'")
    clock.set(began)
    value(db, "set_queue", queue="q", keep_finished=keep)
    value(db, "set_queue", queue="other", keep_finished=other)
    job_id = end(db, "succeeded", "q")

    clock.set(ends)
    tick_until_done(db, clock)

    assert is_there(db, job_id)


def test_retain_purges_errors_and_workers(db, clock):
    start = clock.now()
    end(db, "dead")
    value(db, "report_worker", worker="w", host="h", pid=1, version="1", queues=["q"])

    clock.advance("23 hours")
    one(db, "tick")
    assert scalar(db, "select count(*) from rota.workers") == 1
    clock.advance("2 hours")
    one(db, "tick")
    assert scalar(db, "select count(*) from rota.workers") == 0
    assert scalar(db, "select count(*) from rota.job_errors") == 1
    clock.set(start + timedelta(days=89))
    one(db, "tick")
    assert scalar(db, "select count(*) from rota.job_errors") == 1
    clock.set(start + timedelta(days=98))
    one(db, "tick")
    assert scalar(db, "select count(*) from rota.job_errors") == 0


def test_retain_makes_partitions_ahead_and_drops_those_behind(db, clock):
    now = clock.set("2031-03-01 12:00+00")
    made = partitions(db) + partitions(db, "job_errors")

    did = one(db, "tick")
    assert did.partitions_created == AHEAD  # not today's: somebody may just be on the other way
    assert did.partitions_dropped == len(made)
    assert partitions(db) == names(now, range(1, 8))

    now = clock.advance("1 day")
    did = one(db, "tick")
    assert (did.partitions_created, did.partitions_dropped) == (1, 0)

    now = clock.advance("7 days")
    tick_until_done(db, clock)
    assert partitions(db) == names(now, range(-7, 8))
    now = clock.advance("1 day")
    tick_until_done(db, clock)
    assert partitions(db) == names(now, range(-7, 8))


def test_retain_routes_a_job_to_the_partition_of_its_day(db, clock):
    clock.set("2031-02-28 12:00+00")
    one(db, "tick")
    clock.set("2031-03-01 23:59:59.999999+00")
    last = end(db, "succeeded")
    clock.advance("1 microsecond")
    first = end(db, "cancelled")

    where = "select tableoid::regclass::text from rota.finished_jobs where id = %s"
    assert scalar(db, where, last) == "rota.finished_jobs_done_20310301"
    assert scalar(db, where, first) == "rota.finished_jobs_done_20310302"


def test_retain_makes_the_same_partitions_whatever_style_a_session_has(db, clock):
    """IST would be written for Kolkata, and be read as the time of Israel."""
    now = clock.set("2031-03-01 12:00+00")
    bound = "select pg_get_expr(relpartbound, oid) from pg_class where oid = %s::regclass"
    db.execute("set datestyle = 'SQL, DMY'; set timezone = 'Asia/Kolkata'")
    assert one(db, "tick").partitions_created == AHEAD

    db.execute("set datestyle = 'ISO'; set timezone = 'UTC'")
    (tomorrow,) = names(now, range(1, 2))
    assert scalar(db, bound, tomorrow) == (
        "FOR VALUES FROM ('2031-03-02 00:00:00+00') TO ('2031-03-03 00:00:00+00')"
    )


def test_retain_keeps_a_dead_job_as_long_as_somebody_waits_for_its_retry(db, clock):
    value(db, "set_queue", queue="default", keep_dead="0", keep_finished="0")
    dead = running(db)
    child = enqueue(db, depends_on=[dead.job_id], if_parent_dead="wait")
    one(db, "fail_job", **owner(dead), error="e", fatal=True)
    stuck = running(db, ordering_key="k")
    one(db, "fail_job", **owner(stuck), error="e", fatal=True)

    tick_until_done(db, clock)
    assert [is_there(db, job.job_id) for job in (dead, stuck)] == [True, True]
    value(db, "cancel_job", job_id=child)
    value(db, "resume_ordering_key", ordering_key="k")
    # The child, then its edge, then the parent.
    for _ in range(3):
        tick_until_done(db, clock)
    assert [is_there(db, job.job_id) for job in (dead, stuck)] == [False, False]


@pytest.mark.parametrize("has_partition", [True, False])
@pytest.mark.parametrize("is_alone", [True, False])
def test_retain_keeps_a_cancelled_job_as_long_as_one_waits_for_its_retry(
    db, clock, has_partition, is_alone
):
    clock.set("2031-03-01 12:00+00")
    if has_partition:
        one(db, "tick")
        clock.advance("1 day")
    ended, parent = end(db, "succeeded"), enqueue(db)
    child = enqueue(db, depends_on=[parent], if_parent_dead="wait")
    dependant = enqueue(db, depends_on=[parent])
    value(db, "cancel_job", job_id=parent)
    settle(db)
    assert run(db, dependant).status == "cancelled"

    for _ in range(14):
        clock.advance("1 day")
        if is_alone:
            one(db, "tick")
        else:
            # With a parameter it is several messages, as in a transaction.
            db.execute("select * from rota.tick() where %s", (True,))

    found = [is_there(db, job_id) for job_id in (parent, ended, dependant)]
    assert found == [True, False, False]
    value(db, "retry_job", job_id=parent)
    (job,) = claim(db)
    value(db, "finish_job", **owner(job))
    settle(db)
    assert [job.job_id for job in claim(db)] == [child]


@pytest.mark.own_session
def test_retain_takes_no_parent_from_those_that_a_snapshot_could_not_tell(db, connect, clock):
    value(db, "set_queue", queue="default", keep_finished="0")
    parent = running(db)
    child = enqueue(db, depends_on=[parent.job_id])
    one(db, "tick")
    other = connect()
    other.execute("set default_transaction_isolation = 'repeatable read'")
    value(other, "finish_job", **owner(parent))
    clock.advance("1 minute")
    one(other, "tick")
    assert is_there(db, parent.job_id)

    db.execute("delete from rota.finished_jobs")  # as the drop of its day would
    settle(db)
    assert [job.job_id for job in claim(db)] == [child]


def test_retain_makes_no_partition_for_a_day_that_is_about_to_begin(db, clock):
    now = clock.set("2031-03-01 23:59:30+00").astimezone(UTC)

    assert one(db, "tick").partitions_created == AHEAD
    assert partitions(db)[-7:] == names(now, range(2, 9))


def test_a_new_installation_has_a_partition_for_today_and_a_week(db):
    """That of this test may be of yesterday."""
    today = scalar(db, "select now() at time zone 'UTC'")

    assert partitions(db) in (names(today, range(8)), names(today, range(-1, 7)))


def test_retain_never_refuses_a_job_whose_partition_is_missing(db, clock):
    start = clock.advance("1000 days")
    jobs = [end(db, status) for status in ("succeeded", "cancelled", "dead")]
    assert scalar(db, "select count(*) from rota.finished_jobs_done_default") == 2

    did = one(db, "tick")
    assert did.partitions_created == AHEAD
    jobs.append(end(db, "succeeded"))
    clock.set(start + timedelta(days=6))
    tick_until_done(db, clock)
    assert all(is_there(db, job_id) for job_id in jobs)

    clock.set(start + timedelta(days=9))
    tick_until_done(db, clock)
    assert [is_there(db, job_id) for job_id in jobs] == [False, False, True, False]


def test_retain_deletes_a_bounded_amount(db, clock):
    clock.set("2031-03-01 12:00+00")
    end(db, "dead")
    columns = ", ".join(
        f"f.{name}" if name != "id" else "1000 + n"
        for (name,) in rows(
            db,
            "select attname::text from pg_attribute where attnum > 0"
            " and attrelid = 'rota.finished_jobs'::regclass order by attnum",
        )
    )
    db.execute(
        f"insert into rota.finished_jobs select {columns} from rota.finished_jobs as f"
        " cross join generate_series(1, 6999) as g (n)"
    )
    clock.advance("91 days")

    ticks = [one(db, "tick") for _ in range(8)]

    assert [(did.jobs_deleted, did.has_more) for did in ticks] == [
        *([(1001, True)] * 6),
        (994, False),
        (0, False),
    ]


def test_retain_runs_at_most_once_in_ten_seconds(db, clock):
    clock.set("2031-03-01 12:00+00")
    assert one(db, "tick").partitions_created == AHEAD
    value(db, "set_queue", queue="default", keep_dead="0")
    end(db, "dead")

    clock.advance("9 s")
    assert one(db, "tick").jobs_deleted == 0
    clock.advance("2 s")
    assert one(db, "tick").jobs_deleted == 1


def test_retain_works_again_after_the_clock_stepped_back(db, clock):
    clock.set("2031-03-01 12:00+00")
    one(db, "tick")

    now = clock.set("2030-03-01 12:00+00")

    assert one(db, "tick").partitions_created == AHEAD
    assert names(now, range(1, 8))[0] in partitions(db)


def test_retain_of_other_sessions_time_zones_makes_the_same_days(db, clock):
    now = clock.set("2031-03-01 12:00+00")
    for zone in ("Pacific/Kiritimati", "America/New_York", "Australia/Lord_Howe"):
        db.execute(f"set timezone = '{zone}'")
        one(db, "tick")
        clock.advance("11 s")

    assert partitions(db)[-7:] == names(now, range(1, 8))


@pytest.mark.parametrize(
    "hindrance",
    [
        "create view public.mine as select * from rota.{}",
        "alter table rota.{} owner to postgres",
    ],
    ids=["a view", "another owner"],
)
def test_retain_goes_on_where_a_partition_cannot_be_dropped(db, clock, hindrance):
    start = clock.now().astimezone(UTC)
    day = f"finished_jobs_done_{start:%Y%m%d}"
    db.execute(hindrance.format(day))
    dead = end(db, "dead")

    clock.advance("91 days")
    tick_until_done(db, clock)

    assert partitions(db)[0] == f"rota.{day}"
    assert partitions(db)[1:] == names(clock.now().astimezone(UTC), range(1, 8))
    assert not is_there(db, dead)
    clock.advance("7 days")
    tick_until_done(db, clock)
    assert not scalar(db, "select exists (select from rota.job_errors)")


def test_retain_drops_partitions_where_it_can_make_none(db, clock):
    name = f"finished_jobs_done_{clock.now().astimezone(UTC):%Y%m%d}"
    db.execute("create function public.no() returns event_trigger language plpgsql"
               " as $$ begin raise 'no tables today'; end $$")  # fmt: skip
    db.execute("create event trigger no on ddl_command_start when tag in ('CREATE TABLE')"
               " execute function public.no()")  # fmt: skip

    clock.advance("9 days")
    tick_until_done(db, clock)

    assert f"rota.{name}" not in partitions(db)


@pytest.mark.parametrize("keeps", [False, True], ids=["", "of one queue"])
def test_retain_goes_on_behind_rows_that_cannot_be_deleted(db, clock, keeps):
    stuck = [end(db, "dead", "a") for _ in range(120)]
    clock.advance("1 s")
    gone = [end(db, "dead", "a"), end(db, "dead", "b")]
    if keeps:
        value(db, "set_queue", queue="a", keep_dead="90 days")
    db.execute(
        "create function public.no() returns trigger language plpgsql as"
        " $$ begin raise 'never'; end $$"
    )
    db.execute(
        "create trigger no before delete on rota.finished_jobs_dead for each row"
        f" when (old.id <= {stuck[-1]}) execute function public.no()"
    )
    db.execute("alter table rota.finished_jobs_dead enable always trigger no")

    clock.advance("91 days")
    tick_until_done(db, clock)

    assert [is_there(db, job_id) for job_id in stuck + gone] == [True] * 120 + [False] * 2
    assert partitions(db) == names(clock.now().astimezone(UTC), range(1, 8))


def test_retain_goes_on_behind_a_row_of_a_partition_that_stays(db, clock):
    day = f"finished_jobs_done_{clock.now().astimezone(UTC):%Y%m%d}"
    ids = [end(db, "succeeded") for _ in range(3)]
    db.execute(f"create view public.mine as select * from rota.{day}")
    db.execute(
        "create function public.no() returns trigger language plpgsql as"
        " $$ begin raise 'never'; end $$"
    )
    db.execute(
        f"create trigger no before delete on rota.{day} for each row"
        f" when (old.id = {ids[1]}) execute function public.no()"
    )
    db.execute(f"alter table rota.{day} enable always trigger no")

    clock.advance("10 days")
    tick_until_done(db, clock)

    assert [is_there(db, job_id) for job_id in ids] == [False, True, False]


@pytest.mark.parametrize("when", ["", "deferrable initially deferred"])
@pytest.mark.parametrize("kind", ["keys", "effects"])
def test_retain_goes_on_where_a_table_of_a_user_refers_to_a_row(db, clock, kind, when):
    db.execute(EXPIRED[kind], [5])
    table, keys = {
        "keys": ("idempotency_keys", "idempotency_key, key_scope"),
        "effects": ("effects", "scope, key"),
    }[kind]
    db.execute(f"create table public.mine as select {keys} from rota.{table} limit 1")
    db.execute(
        f"alter table public.mine add foreign key ({keys}) references rota.{table} {when}"
    )

    for _ in range(2):
        clock.advance("1 hour")
        tick_until_done(db, clock)

    assert scalar(db, f"select count(*) from rota.{table}") == 1


def test_retain_waits_for_no_row_of_a_worker(db, connect, clock):
    value(db, "report_worker", worker="w", host="h", pid=1, version="1", queues=["a"])
    dead = end(db, "dead")
    clock.advance("91 days")
    other = connect()

    with other.transaction():
        other.execute("select from rota.workers for update")
        tick_until_done(db, clock)

    assert not is_there(db, dead)
    assert partitions(db) == names(clock.now().astimezone(UTC), range(1, 8))


EXPIRED = {
    "keys": """
        insert into rota.idempotency_keys (idempotency_key, key_scope, expires_at)
        select n::text, 'x', rota.now() - interval '1 hour' + n * interval '1 second'
        from generate_series(1, %s) as n
        """,
    "effects": """
        insert into rota.effects (scope, key, job_id, lease_token, expires_at)
        select 's', n::text, 1, 1, rota.now() - interval '1 hour' + n * interval '1 second'
        from generate_series(1, %s) as n
        """,
    "errors": """
        insert into rota.job_errors (
            job_id, lease_token, attempt, queue, job_type, worker, started_at, failed_at,
            message
        )
        select 1, n, 1, 'q', 'x', 'w', t.at, t.at, 'm'
        from generate_series(1, %s) as n
        cross join lateral (
            select rota.now() - interval '98 days' + n * interval '1 second'
        ) as t (at)
        """,
    "occurrences": """
        insert into rota.occurrences (definition, scheduled_for, outcome, recorded_at)
        select 's', t.at, 'missed', t.at
        from generate_series(1, %s) as n
        cross join lateral (
            select rota.now() - interval '91 days' + n * interval '1 second'
        ) as t (at)
        """,
}


@pytest.mark.parametrize("kind", EXPIRED)
def test_tick_says_of_each_kind_what_it_deleted_and_whether_there_is_more(db, clock, kind):
    clock.set("2031-03-01 12:00+00")
    one(db, "tick")
    db.execute(EXPIRED[kind], (2002,))
    clock.advance("11 s")

    ticks = [one(db, "tick") for _ in range(3)]

    assert [getattr(did, f"{kind}_deleted") for did in ticks] == [1001, 1001, 0]
    assert [did.has_more for did in ticks] == [True, True, False]
    assert {did.jobs_deleted + did.others_deleted for did in ticks} == {0}


def test_tick_does_not_go_on_because_there_are_many_queues_to_look_at(db):
    """Without a stopped clock: it is by the time that a kind takes."""
    db.execute(
        "insert into rota.queues (queue, keep_finished, keep_dead)"
        " select 'q' || n, '1 day', '1 day' from generate_series(1, 2000) as n"
    )
    for _ in range(5):
        db.execute("update rota.maintenance set done_at = '-infinity' where task = 'tick'")

        assert not one(db, "tick").has_more


def test_tick_that_just_reached_its_bound_says_that_there_is_no_more(db, clock):
    clock.set("2031-03-01 12:00+00")
    one(db, "tick")
    db.execute(EXPIRED["keys"], (1000,))
    clock.advance("11 s")

    did = one(db, "tick")

    assert (did.keys_deleted, did.has_more) == (1000, False)


def test_retain_goes_on_at_once_in_whatever_session(db, connect, clock):
    clock.set("2031-03-01 12:00+00")
    one(db, "tick")
    db.execute(EXPIRED["keys"], (2500,))
    clock.advance("11 s")
    assert one(db, "tick").has_more

    did = one(connect(), "tick")
    assert (did.keys_deleted, did.has_more) == (1001, True)
    did = one(connect(), "tick")
    assert (did.keys_deleted, did.has_more) == (498, False)
    db.execute(EXPIRED["keys"], (1,))
    assert one(db, "tick").keys_deleted == 0  # until ten seconds have passed


def test_retain_leaves_what_others_hold_and_does_not_say_that_it_is_more(db, connect, clock):
    clock.set("2031-03-01 12:00+00")
    one(db, "tick")
    db.execute(EXPIRED["keys"], (3,))
    clock.advance("11 s")
    other = connect(autocommit=False)
    other.execute("select from rota.idempotency_keys where idempotency_key = '2' for update")

    did = one(db, "tick")

    assert (did.keys_deleted, did.has_more) == (2, False)
    other.rollback()
    clock.advance("11 s")
    assert one(db, "tick").keys_deleted == 1


def test_retain_is_not_kept_from_its_work_by_a_tick_that_stays_open(db, connect, clock):
    """A ticks in a transaction and forgets it; B ticks on, soon with less thrift."""
    clock.set("2031-03-01 12:00+00")
    one(db, "tick")
    db.execute(EXPIRED["keys"], (10,))
    clock.advance("31 s")
    forgetful = connect(autocommit=False)
    forgetful.execute("select 1")
    assert one(forgetful, "tick").keys_deleted == 10

    clock.advance("6 minutes")
    for key in ("a", "b", "c"):
        db.execute(
            "insert into rota.idempotency_keys (idempotency_key, key_scope, expires_at)"
            " values (%s, 'x', rota.now() - interval '1 s')",
            (key,),
        )
        assert one(db, "tick").keys_deleted == 1
    forgetful.rollback()
    clock.advance("11 s")
    assert one(db, "tick").keys_deleted == 10


def test_rows_of_partitions_go_also_where_no_tick_is_alone(db, clock):
    clock.set("2031-03-01 12:00+00")
    one(db, "tick")
    clock.advance("1 day")
    in_partition = end(db, "succeeded")
    error = running(db)
    one(db, "fail_job", **owner(error), error="e", fatal=True)
    db.execute("update rota.job_errors set failed_at = failed_at - interval '1 hour'")
    clock.advance("30 days")
    in_default = end(db, "succeeded")
    made = partitions(db) + partitions(db, "job_errors")

    for _ in range(4):
        clock.advance("26 days")
        db.execute("select * from rota.tick() where %s", (True,))

    assert partitions(db) + partitions(db, "job_errors") == made
    assert [is_there(db, job_id) for job_id in (in_partition, in_default)] == [False, False]
    assert scalar(db, "select count(*) from rota.job_errors") == 0


def scanned(db, begun, reached):
    """Let a session have scanned all keys from then until now, as far as that time."""
    db.execute(
        "select rota._end_scan(row('idempotency_keys', null, '1 hour', rota.now(), null,"
        f" rota._micros({begun})), rota._micros({reached}))"
    )


def test_a_purge_begins_where_the_last_one_ended(db):
    db.execute(EXPIRED["keys"], (10,))
    scanned(db, "rota.now() - interval '1 s'", "rota.now() - interval '1 hour' + '5.5 s'")

    value(db, "_purge", kind="keys", max_rows=1000)

    left = rows(db, "select idempotency_key::int from rota.idempotency_keys order by 1")
    assert [key for (key,) in left] == [1, 2, 3, 4, 5]


def test_a_purge_that_has_no_room_left_remembers_no_place(db, clock):
    """Each tick but the last spends its rows on a queue that keeps nothing."""
    clock.set("2031-03-01 12:00+00")
    old = end(db, "succeeded")  # in the default partition
    value(db, "set_queue", queue="short", keep_finished="0")
    clock.advance("9 days")
    db.execute(
        "insert into rota.finished_jobs (id, queue, job_type, payload, priority, max_attempts,"
        " status, run_at, attempts, lease_token, created_at, updated_at, finished_at)"
        " select 1000 + n, 'short', 'x', '{}', 0, 1, 'succeeded', m.at, 1, 1, m.at, m.at, m.at"
        " from generate_series(1, 2500) as n, (select rota.now() - interval '1 hour') as m (at)"
    )

    # A scan that went over many rows, so that the next begins behind them.
    db.execute(
        "select rota._end_scan(row('finished_jobs_done_default', null, '1 hour', rota.now(),"
        " null, 0), rota._micros('epoch'))"
    )
    assert tick_until_done(db, clock) >= 2501
    assert not is_there(db, old)


def test_a_purge_finds_what_lies_behind_its_start_in_time(db, clock):
    now = clock.now()
    db.execute(EXPIRED["keys"], (10,))
    clock.set(now)
    scanned(db, "rota.now() - interval '1 s'", "rota.now()")

    assert value(db, "_purge", kind="keys", max_rows=1000) == 0
    clock.set(now + timedelta(seconds=21))
    assert value(db, "_purge", kind="keys", max_rows=1000) == 10


def test_a_purge_starts_over_when_the_clock_was_set_back(db, clock):
    now = clock.now()
    scanned(db, "rota.now() - interval '1 s'", "rota.now()")
    clock.set(now - timedelta(days=1))
    db.execute(EXPIRED["keys"], (10,))

    assert value(db, "_purge", kind="keys", max_rows=1000) == 10


def test_queues_that_keep_less_are_purged_among_those_that_keep_long(db, clock):
    start = clock.set("2031-03-01 12:00+00")
    value(db, "set_queue", queue="long", keep_finished="30 days")
    value(db, "set_queue", queue="short", keep_finished="1 hour")
    one(db, "tick")
    jobs = [end(db, "succeeded", queue) for queue in ("default", "long", "other", "short")]

    there = []
    for passed in (timedelta(hours=2), timedelta(days=8), timedelta(days=33)):
        clock.set(start + passed)
        tick_until_done(db, clock)
        there.append([is_there(db, job_id) for job_id in jobs])

    assert there == [
        [True, True, True, False],
        [False, True, False, False],
        [False, False, False, False],
    ]


ENDED_IN = """
    insert into rota.finished_jobs (id, queue, job_type, payload, priority, max_attempts,
        status, run_at, attempts, lease_token, created_at, updated_at, finished_at)
    select coalesce((select max(f.id) from rota.finished_jobs as f), 0) + n, q.queue, 'x', '{}',
        0, 1, 'succeeded', m.at, 1, 1, m.at, m.at, m.at
    from unnest(%s::text[]) with ordinality as q (queue, n),
        (select rota.now() - %s::interval as at) as m
"""


def test_retain_finds_the_few_queues_to_purge_among_very_many_that_keep_long(db, clock):
    clock.set("2031-03-01 12:00+00")
    long = [f"k{n}" for n in range(1500)]
    db.execute(
        "insert into rota.queues (queue, keep_finished) select q, '30 days'"
        " from unnest(%s::text[]) as q",
        [long],
    )
    db.execute(ENDED_IN, (["a", *long, "z"], "8 days"))
    db.execute(ENDED_IN, (["before", "old"], "20 days"))
    for _ in range(3):
        clock.advance("11 s")
        one(db, "tick")

    ended = "select queue from rota.finished_jobs where queue <> all(%s) order by 1"
    assert rows(db, ended, long) == []
    assert scalar(db, "select count(*) from rota.finished_jobs") == len(long)


def test_retain_purges_very_many_queues_while_another_keeps_long(db, clock):
    clock.set("2031-03-01 12:00+00")
    value(db, "set_queue", queue="long", keep_finished="30 days")
    queues = [f"q{n}" for n in range(1500)]
    db.execute(ENDED_IN, (["long", *queues], "8 days"))
    db.execute(ENDED_IN, (queues[:100], "7 days 1 hour"))
    db.execute(ENDED_IN, (queues[:100], "6 days 23 hours"))

    tick_until_done(db, clock)

    assert scalar(db, "select count(*) from rota.finished_jobs") == 101


def test_failed_attempts_lie_in_the_partition_of_their_week(db, clock):
    clock.set("2031-02-26 12:00+00")  # a Wednesday
    one(db, "tick")
    assert partitions(db, "job_errors")[-2:] == [
        "rota.job_errors_20310303",
        "rota.job_errors_20310310",
    ]
    clock.set("2031-03-09 23:59:59.999999+00")
    last = end(db, "dead")
    clock.advance("1 microsecond")
    first = end(db, "dead")

    where = "select tableoid::regclass::text from rota.job_errors where job_id = %s"
    assert scalar(db, where, last) == "rota.job_errors_20310303"
    assert scalar(db, where, first) == "rota.job_errors_20310310"
