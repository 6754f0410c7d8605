"""The list of names that something is set for."""

from __future__ import annotations

from sql.helpers import enqueue, one, rows, scalar

RECOUNT = """
    select queue, 'queues' from rota.queues
    union select coalesce(queue, limit_name), 'limits' from rota.limits where limit_key is null
    union select queue, 'fair_queues' from rota.fair_queues
    union select 'access ' || access, 'queue_grants ' || role || ' ' || queue
        from rota.queue_grants
    union select coalesce(queue, 'access worker'), 'pauses ' || pause_name from rota.pauses
    order by 1, 2
"""
LISTED = "select name, source from rota.configured_names order by 1, 2"


def test_what_is_set_is_listed_until_it_is_not_set_any_more(db):
    lengths = []

    for function, arguments in [
        ("set_queue", {"queue": "mail", "max_attempts": 3}),
        ("set_queue", {"queue": "mail", "ageing": "1 minute"}),
        ("set_limit", {"queue": "mail", "max_running": 3}),
        ("set_limit", {"job_type": "charge", "max_running": 3}),
        ("set_limit", {"job_type": "charge", "max_running": 5}),
        ("set_limit", {"limit_key": "customer:*", "max_running": 1}),
        ("grant_queue", {"role": "postgres", "queue": "mail", "access": "worker"}),
        ("set_queue", {"queue": "other", "max_attempts": 1}),
        ("pause_queue", {"queue": "other"}),
        ("pause_type", {"job_type": "charge", "queue": "other"}),
        ("pause_type", {"job_type": "charge"}),
        ("resume_queue", {"queue": "other"}),
        ("resume_type", {"job_type": "charge"}),
        ("resume_type", {"job_type": "charge", "queue": "other"}),
        ("set_limit", {"job_type": "charge", "reset": True}),
        ("set_limit", {"queue": "mail", "reset": True}),
        ("revoke_queue", {"role": "postgres", "queue": "mail", "access": "worker"}),
    ]:
        one(db, function, **arguments)
        lengths.append(len(rows(db, LISTED)))
        assert rows(db, LISTED) == rows(db, RECOUNT)

    assert lengths[:10] == [1, 1, 2, 3, 3, 3, 4, 5, 6, 7]
    assert lengths[-1] == 3


def test_of_many_grants_some_are_listed_and_one_that_stands_for_the_others(
    db, dsn, psql, sql_dir
):
    one(db, "pause_all")
    for number in range(20):
        one(db, "grant_queue", role="postgres", queue=f"q{number}", access="worker")
    listed = "select count(*), count(*) - count(role) as roleless from rota.configured_names"
    listed += " where name = 'access worker' and source ^@ 'queue_grants '"

    assert rows(db, listed) == [(16, 1)]
    one(db, "resume_all")
    assert rows(db, listed) == [(16, 1)]
    assert len(rows(db, LISTED)) == 16
    db.execute("delete from rota.configured_names")
    psql(dsn, "-f", sql_dir / "tables/rows.sql")
    assert rows(db, listed) == [(16, 1)]
    assert rows(db, "select from rota._unlisted()") == []


def test_a_setting_that_is_rolled_back_is_not_listed(db):
    db.execute("begin")
    one(db, "set_limit", job_type="charge", max_running=3)
    db.execute("rollback")

    assert rows(db, LISTED) == []


def test_an_enqueue_does_not_read_a_long_list(db):
    db.execute("select rota.pause_type('t' || n) from generate_series(1, 2000) as n")
    db.execute("analyze rota.configured_names")
    read = "select pg_stat_get_xact_tuples_returned('rota.configured_names'::regclass)"

    with db.transaction():
        before = scalar(db, read)
        enqueue(db)

        assert scalar(db, read) == before
