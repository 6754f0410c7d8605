"""Endings of every kind in one call, each answered by itself."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from sql.helpers import (
    Db,
    call,
    claim,
    enqueue,
    everything,
    owner,
    refused,
    rows,
    run,
    running,
    scalar,
    value,
)


def ending(job: Any, outcome: str = "succeeded", **more: Any) -> dict[str, Any]:
    return {**owner(job), "outcome": outcome, **more}


def end(db: Db, *endings: Any) -> list[Any]:
    return call(db, "end_jobs", endings=Jsonb(list(endings)))


def answers(db: Db, *endings: Any) -> list[str]:
    return [row.answer for row in end(db, *endings)]


def claimed(db: Db, count: int, **arguments: Any) -> list[Any]:
    call(db, "enqueue_many", jobs=Jsonb([{"job_type": "x", **arguments}] * count))
    return claim(db, max_jobs=count)


def refuse_some(db: Db, condition: str) -> None:
    """Let a trigger raise an error for jobs that end, where the condition holds."""
    db.execute(
        f"""
        create function public.refuse() returns trigger language plpgsql as $$
        begin
            if {condition} then raise 'not this one'; end if;
            return new;
        end $$;
        create trigger refuse before insert on rota.finished_jobs
            for each row execute function public.refuse();
        """  # type: ignore[arg-type]
    )


def test_end_jobs_does_of_each_kind_what_the_simple_form_does(db, clock):
    now = clock.set("2026-01-01 00:00+00")
    done, failed, fatal, late, back = claimed(db, 5)

    told = end(
        db,
        ending(back, "released"),
        ending(failed, "failed", error="no", error_type="T", stack="s", retry_in=5),
        ending(done, result={"n": 1}),
        ending(late, "snoozed", delay="1 hour"),
        ending(fatal, "failed", error="bad", fatal=True),
    )

    assert [(row.job_id, row.lease_token) for row in told] == [
        (job.job_id, job.lease_token) for job in (back, failed, done, late, fatal)
    ]
    assert [(row.answer, row.run_at) for row in told] == [
        ("released", now),
        ("failed", now + timedelta(seconds=5)),
        ("finished", None),
        ("snoozed", now + timedelta(hours=1)),
        ("dead", None),
    ]
    assert {(row.error_code, row.message) for row in told} == {(None, None)}
    jobs = (done, failed, fatal, late, back)
    assert [run(db, job.job_id).status for job in jobs] == [
        "succeeded", "failed", "dead", "queued", "queued"
    ]  # fmt: skip
    assert [run(db, job.job_id).attempts for job in jobs] == [1, 1, 1, 0, 0]
    assert run(db, done.job_id).result == {"n": 1}
    assert rows(db, "select message, error_type, stack from rota.job_errors order by 1") == [
        ("bad", None, None), ("no", "T", "s")
    ]  # fmt: skip


def test_end_jobs_ends_what_was_cancelled(db):
    jobs = claimed(db, 3)
    for job in jobs:
        value(db, "cancel_job", job_id=job.job_id)

    told = answers(
        db,
        ending(jobs[0], "failed", error="e"),
        ending(jobs[1], "snoozed", delay=1),
        ending(jobs[2], "released"),
    )

    assert told == ["cancelled"] * 3
    assert {run(db, job.job_id).status for job in jobs} == {"cancelled"}


def test_end_jobs_told_twice_changes_nothing(db, clock):
    clock.set("2026-01-01 00:00+00")
    done, failed, dead, late, back = claimed(db, 5)
    endings = [
        ending(done),
        ending(failed, "failed", error="e"),
        ending(dead, "failed", error="e", fatal=True),
        ending(late, "snoozed", delay=60),
        ending(back, "released"),
    ]
    first = end(db, *endings)
    before = everything(db)

    again = end(db, *endings)

    assert [row.answer for row in again] == [
        "already_finished", "failed", "dead", "lost", "lost"
    ]  # fmt: skip
    assert again[1].run_at == first[1].run_at
    assert everything(db) == before
    assert answers(db, ending(failed, "failed", error="another"), ending(dead)) == ["lost"] * 2


def test_end_jobs_accepts_only_the_pair_that_holds_the_job(db):
    old = running(db)
    call(db, "release_jobs", job_ids=[old.job_id], lease_tokens=[old.lease_token])
    (new,) = claim(db)

    told = answers(
        db, ending(old), ending(new, "failed", error="e"), ending(old, "snoozed", delay=1)
    )

    assert told == ["lost", "failed", "lost"]


@pytest.mark.parametrize(
    ("outcomes", "told"),
    [
        (["failed", "snoozed"], ["failed", "lost"]),
        (["snoozed", "failed"], ["lost", "failed"]),
        (["released", "failed"], ["lost", "failed"]),
        (["failed", "failed"], ["failed", "failed"]),
        (["succeeded", "failed"], ["finished", "lost"]),
        (["snoozed", "succeeded"], ["lost", "finished"]),
    ],
)
def test_end_jobs_does_one_of_two_things_with_a_job_that_is_given_twice(db, outcomes, told):
    job = running(db)
    others = {"failed": {"error": "e"}, "snoozed": {"delay": 1}}

    assert answers(db, *(ending(job, o, **others.get(o, {})) for o in outcomes)) == told


REFUSED = {
    "no object": 5,
    "nothing": {},
    "unknown outcome": {"outcome": "won"},
    "no job": {"job_id": None},
    "a text": {"job_id": "x"},
    "no token": {"lease_token": None},
    "unknown key": {"reslut": 1},
    "key of another": {"error": "e"},
    "large result": {"result": "a" * 1048576},
    "stage of none": {"next_stage": "a"},
    "no error": {"outcome": "failed"},
    "negative": {"outcome": "failed", "error": "e", "retry_in": -1},
    "no delay": {"outcome": "snoozed"},
    "long delay": {"outcome": "snoozed", "delay": "101 years"},
    "no interval": {"outcome": "snoozed", "delay": "soon"},
    "object as delay": {"outcome": "snoozed", "delay": {"minutes": 5}},
    "no boolean": {"outcome": "failed", "error": "e", "fatal": "maybe"},
}
NOT_READ = {"a text": "job_id", "no interval": "delay", "no boolean": "fatal"}


@pytest.mark.parametrize("bad", REFUSED)
def test_end_jobs_refuses_a_bad_ending_alone(db, bad):
    first, second, third = claimed(db, 3)
    wrong = REFUSED[bad]
    if isinstance(wrong, dict) and wrong:
        wrong = {**ending(second), **wrong}

    told = end(db, ending(first), wrong, ending(third, "failed", error="e"))

    assert [row.answer for row in told] == ["finished", "refused", "failed"]
    assert told[1].error_code == "22023"
    assert told[1].message.startswith(NOT_READ.get(bad, ""))
    if bad not in ("no object", "nothing", "no job", "a text"):
        assert told[1].job_id == second.job_id
    assert run(db, second.job_id).status == "running"


def test_end_jobs_stores_all_but_the_one_that_a_trigger_refuses(db):
    jobs = claimed(db, 40)
    refuse_some(db, f"new.id = {jobs[17].job_id}")

    told = end(db, *map(ending, jobs))

    assert [row.answer for row in told] == [
        "refused" if job is jobs[17] else "finished" for job in jobs
    ]
    assert (told[17].error_code, told[17].message) == ("P0001", "not this one")
    assert scalar(db, "select count(*) from rota.finished_jobs") == 39
    db.execute("drop trigger refuse on rota.finished_jobs")
    assert answers(db, ending(jobs[17])) == ["finished"]


def test_end_jobs_ends_as_a_whole_where_the_server_fails(db):
    jobs = claimed(db, 2)
    refuse_some(db, "false")
    db.execute(
        """
        create or replace function public.refuse() returns trigger language plpgsql as $$
        begin raise 'disk is full' using errcode = '53100'; end $$
        """
    )

    with pytest.raises(Exception, match="disk is full") as caught:
        end(db, *map(ending, jobs))

    assert getattr(caught.value, "sqlstate", None) == "53100"
    assert {run(db, job.job_id).status for job in jobs} == {"running"}


@pytest.mark.parametrize(
    "more",
    [
        {"outcome": "succeeded"},
        {"outcome": "failed", "error": "e"},
        {"outcome": "snoozed", "delay": 60},
        {"outcome": "released"},
    ],
    ids=lambda more: more["outcome"],
)
def test_end_jobs_goes_past_a_row_that_is_locked_and_says_so(db, connect, more):
    locked, failed, done = claimed(db, 3)
    endings = [
        {**owner(locked), **more},
        ending(failed, "failed", error="e"),
        ending(done),
    ]
    other = connect()
    db.execute("set statement_timeout = '20s'")

    with other.transaction():
        other.execute("select from rota.jobs where id = %s for update", [locked.job_id])
        told = answers(db, *endings)

    assert told == ["busy", "failed", "finished"]
    assert answers(db, endings[0])[0] not in ("busy", "lost")


@pytest.mark.slow
def test_end_jobs_waits_for_locked_rows_once_however_many_endings_are_refused(db, connect):
    """Each call for a part of the endings would try the rows that are held eleven times."""
    jobs = claimed(db, 120)
    refuse_some(db, "new.status = 'dead'")
    other = connect(autocommit=False)
    held = [job.job_id for job in jobs[::2]]
    other.execute("select from rota.jobs where id = any(%s) for update", (held,))
    endings = [
        ending(job) if n % 2 == 0 else ending(job, "failed", error="e", fatal=True)
        for n, job in enumerate(jobs)
    ]

    with db.transaction():
        db.execute("set local track_functions = 'all'")
        told = answers(db, *endings)
        asked = dict(rows(db, "select funcname, calls from pg_stat_xact_user_functions"))

    assert told == ["busy", "refused"] * 60
    # Once in each of up to 100 tries, in two calls for each part, and for each answer.
    assert asked["_is_leased"] < 1000
    assert "_is_finished" not in asked


def test_end_jobs_takes_a_thousand_and_no_more(db):
    jobs = claimed(db, 1000)
    endings = [ending(job, "failed", error="e") for job in jobs]

    with refused("endings"):
        end(db, *endings, endings[0])
    told = end(db, *reversed(endings))

    assert [row.job_id for row in told] == [job.job_id for job in reversed(jobs)]
    assert {row.answer for row in told} == {"failed"}
    assert scalar(db, "select count(*) from rota.job_errors") == 1000
    assert end(db) == []


def test_end_jobs_takes_null_as_a_key_left_out(db):
    """As most languages write an object of a class that has all keys."""
    keys = (
        "result",
        "next_stage",
        "error",
        "error_type",
        "stack",
        "retry_in",
        "fatal",
        "delay",
    )
    given = {
        "succeeded": {},
        "failed": {"error": "e"},
        "snoozed": {"delay": 5},
        "released": {},
    }
    jobs = claimed(db, len(given))

    told = answers(
        db,
        *(
            ending(job, outcome, **{**dict.fromkeys(keys), **more})
            for job, (outcome, more) in zip(jobs, given.items(), strict=True)
        ),
    )

    assert told == ["finished", "failed", "snoozed", "released"]


@pytest.mark.parametrize("endings", [None, {}, 5, "x"], ids=repr)
def test_end_jobs_refuses_what_is_no_list(db, endings):
    with refused("endings"):
        call(db, "end_jobs", endings=None if endings is None else Jsonb(endings))


def test_end_jobs_leads_a_pipeline_on(db):
    stages = [{"stage": stage, "job_type": "x"} for stage in "abc"]
    call(db, "define_pipeline", pipeline="p", stages=Jsonb(stages))
    for _ in range(2):
        value(db, "start_pipeline", pipeline="p")
    first, second = claim(db, max_jobs=2)
    other = running(db)

    told = end(
        db,
        ending(first, next_stage="c", result={"n": 1}),
        ending(second, next_stage="d"),
        ending(other, "released"),
    )

    assert [row.answer for row in told] == ["finished", "refused", "released"]
    assert told[1].message.startswith("next_stage ")
    assert run(db, second.job_id).status == "running"
    (again, *_) = [job for job in claim(db, max_jobs=9) if job.stage == "c"]
    assert again.stage_input == {"n": 1}


def test_finish_and_claim_takes_endings_and_tells_what_did_not_go_as_asked(db):
    done, failed, dead, gone = claimed(db, 4)
    value(db, "finish_job", **owner(gone))
    refuse_some(db, f"new.id = {done.job_id}")
    waiting = enqueue(db)

    told = call(
        db,
        "finish_and_claim",
        worker="w",
        endings=Jsonb([
            ending(done),
            ending(failed, "failed", error="e"),
            ending(dead, "failed", error="e", fatal=True),
            ending(gone, "snoozed", delay=1),
        ]),
    )  # fmt: skip

    assert [(row.outcome, row.job_id) for row in told] == [
        ("refused", done.job_id),
        ("dead", dead.job_id),
        ("lost", gone.job_id),
        ("claimed", waiting),
    ]
    assert run(db, failed.job_id).status == "failed"
