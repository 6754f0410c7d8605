"""Two operations at once on a run of a pipeline: it is in one stage, and goes on once.

What A does stays open until B has settled; then A commits, or rolls back.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from invariants import check_invariants
from races.harness import Session, call, keeping, restoring
from races.instrument import ARM, DISARM, GATE, instrument
from support.clock import Clock
from support.mutation import some_of

STAGES = [{"stage": name, "job_type": name} for name in ("one", "two", "three")]
OPERATIONS = {
    "finish": "select rota.finish_job(%(job_id)s, %(token)s)",
    "finish to three": "select rota.finish_job(%(job_id)s, %(token)s, next_stage => 'three')",
    "finish batch": "select outcome from rota.finish_jobs("
    "array[%(job_id)s::bigint], array[%(token)s::bigint])",
    "fail": "select f.status from rota.fail_job(%(job_id)s, %(token)s, 'no') as f",
    "fail for good": "select f.status from rota.fail_job(%(job_id)s, %(token)s, 'no',"
    " fatal => true) as f",
    "snooze": "select rota.snooze_job(%(job_id)s, %(token)s, '1 hour') is null",
    "release": "select r.is_released from rota.release_jobs(array[%(job_id)s::bigint], "
    "array[%(token)s::bigint]) as r",
    "sweep": "select rota.sweep_stale_leases()",
    "cancel": "select rota.cancel_job(%(job_id)s)",
    "retry": "select rota.retry_job(%(job_id)s, true)",
    "restart": "select rota.restart_pipeline(%(job_id)s, 'one') > 0",
    "finish earlier": "select rota.finish_job(%(job_id)s, %(first_token)s)",
    "heartbeat earlier": "select rota.heartbeat(%(job_id)s, %(first_token)s) is null",
    "start": "select rota.start_pipeline('p', idempotency_key => 'k') > 0",
    "define": 'select rota.define_pipeline(\'p\', \'[{"stage": "three", "job_type": "x"}]\')',
}
# What an operation changes of a run.
TABLES = ("jobs", "finished_jobs", "stage_runs", "job_errors")
COUNTS = """
    select (select count(*) from rota.job_runs where id = %s),
        (select count(*) from rota.jobs where idempotency_key = 'k')
"""
REFUSALS = {"RT001", "RT002", "RT003", "RT007", "RT008", "RT014"}


@pytest.fixture(autouse=True)
def _pipeline(db: psycopg.Connection[Any]) -> None:
    db.execute(*call("define_pipeline", pipeline="p", stages=Jsonb(STAGES)))


def begin(session: Session, **arguments: Any) -> int:
    return int(session.fetch(*call("start_pipeline", pipeline="p", **arguments))[0][0])


def claim(session: Session) -> tuple[int, int]:
    job_id, token = session.fetch(*call("claim_jobs", worker="w"))[0][:2]
    return job_id, token


def stages(session: Session, job_id: int) -> list[tuple[str, str]]:
    """Return the stages that a job has left, and how, and the one that it is in."""
    left = session.fetch(
        "select stage, status from rota.stage_runs where job_id = %s order by lease_token",
        [job_id],
    )
    return left + session.fetch("select stage, status from rota.jobs where id = %s", [job_id])


def answer_of(action: Any) -> Any:
    try:
        return action()
    except psycopg.Error as error:
        if error.sqlstate not in REFUSALS:
            raise
        return error.sqlstate


def test_a_run_that_is_forgotten_while_a_job_comes_after_it(
    a: Session, b: Session, db: psycopg.Connection[Any]
) -> None:
    """A enqueues after a run that was cancelled, and stops at each statement; B forgets it."""
    instrument(db)
    a.fetch("set statement_timeout = '10s'")
    answers = set()

    for stop in itertools.count(1):
        run_id = begin(b)
        b.fetch(*call("cancel_job", job_id=run_id))
        db.execute("select pg_advisory_lock(%s)", [GATE])
        a.fetch(ARM, [stop])
        pending = a.start(*call("enqueue", job_type="t", depends_on=[run_id]))
        is_stopped = pending.wait_settled()
        b.fetch("delete from rota.finished_jobs")
        db.execute("select pg_advisory_unlock(%s)", [GATE])
        answer = answer_of(pending.result)
        answers.add(answer if answer == "RT001" else "a job")
        a.fetch(DISARM)
        if not is_stopped:
            break

    assert answers == {"RT001", "a job"}
    assert stop > 5


@pytest.mark.slow
@pytest.mark.parametrize("state", ["running", "dead", "cancelled"])
@pytest.mark.parametrize("first", some_of(OPERATIONS, every=2))
def test_a_run_is_in_one_stage_whatever_is_done_to_it_at_once(
    a: Session, b: Session, clock: Clock, first: str, state: str
) -> None:
    """A does *first* and stays open; B does each of the others; A commits, or rolls back."""
    clock.set("2026-03-01 12:00:00+00")
    run_id = begin(b, idempotency_key="k")
    job_id, first_token = claim(b)
    b.fetch(*call("finish_job", job_id=job_id, lease_token=first_token))
    job_id, token = claim(b)
    job = {"job_id": job_id, "token": token, "first_token": first_token}
    if state != "running":
        kind = {"error": "no", "fatal": True}
        if state == "cancelled":
            b.fetch(*call("cancel_job", job_id=job_id))
        b.fetch(*call("fail_job", job_id=job_id, lease_token=token, **kind))
    b.fetch(keeping(*TABLES))
    clock.advance("1 hour")

    for second, is_committed in itertools.product(OPERATIONS, (True, False)):
        b.fetch(restoring(*TABLES))
        if "define" in (first, second):
            b.fetch(*call("define_pipeline", pipeline="p", stages=Jsonb(STAGES)))

        a.fetch("begin")
        told = answer_of(lambda first=first, job=job: a.fetch(OPERATIONS[first], job))
        pending = b.start(OPERATIONS[second], job)
        pending.wait_settled()
        a.fetch("commit" if is_committed else "rollback")
        answers = [told] if is_committed else []
        answers.append(answer_of(pending.result))

        what = f"{first} / {second}, {is_committed=}"
        check_invariants(a.connection)
        ((rows, keyed),) = a.fetch(COUNTS, [run_id])
        finished = sum(answer == [("finished",)] for answer in answers)
        ways = stages(a, run_id)
        passed = [stage for stage, status in ways if status == "succeeded"]
        assert rows == 1, what
        assert keyed <= 1, what
        assert finished <= 1, what
        assert passed == ["one", "two"][: 1 + finished], what
        for operation, answer in zip((first, second)[-len(answers) :], answers, strict=True):
            if operation == "finish earlier":
                assert answer == [("already_finished",)], what
            elif operation == "heartbeat earlier":
                assert answer == "RT002", what
        if finished:
            # A job whose cancel was requested before the finish goes no further.
            is_over = first == "cancel" and is_committed
            followers = [stage for stage, _ in ways[2:]]
            assert followers == ([] if is_over else ["three"]), what


def test_restart_waits_for_an_open_retry_and_is_refused(a: Session, b: Session) -> None:
    """A retries the dead stage and stays open; B restarts elsewhere and waits; A commits."""
    run_id = begin(a)
    job_id, token = claim(a)
    a.fetch(*call("fail_job", job_id=job_id, lease_token=token, error="no", fatal=True))

    with a.transaction():
        a.fetch(*call("retry_job", job_id=job_id))
        pending = b.start(*call("restart_pipeline", job_id=job_id, stage="two"))
        pending.wait_blocked(by=a)

    assert answer_of(pending.result) == "RT014"
    assert stages(a, run_id) == [("one", "dead"), ("one", "queued")]


def test_retry_waits_for_an_open_restart_and_leaves_the_stage(a: Session, b: Session) -> None:
    """A restarts a dead job elsewhere and stays open; B retries it and waits; A commits."""
    run_id = begin(a)
    job_id, token = claim(a)
    a.fetch(*call("fail_job", job_id=job_id, lease_token=token, error="no", fatal=True))

    with a.transaction():
        a.fetch(*call("restart_pipeline", job_id=job_id, stage="two"))
        pending = b.start(*call("retry_job", job_id=job_id))
        pending.wait_blocked(by=a)

    assert pending.result() == [("queued",)]
    assert stages(a, run_id) == [("one", "dead"), ("two", "queued")]


def test_a_job_that_ends_again_while_a_restart_waits_is_restarted(
    a: Session, b: Session
) -> None:
    """A restarts an ended job and cancels it again; B restarts it and waits; A commits."""
    run_id = begin(a)
    a.fetch(*call("cancel_job", job_id=run_id))

    with a.transaction():
        a.fetch(*call("restart_pipeline", job_id=run_id, stage="two"))
        a.fetch(*call("cancel_job", job_id=run_id))
        pending = b.start(*call("restart_pipeline", job_id=run_id, stage="three"))
        pending.wait_blocked(by=a)

    assert pending.result() == [(run_id,)]
    ways = [("one", "cancelled"), ("two", "cancelled"), ("three", "queued")]
    assert stages(a, run_id) == ways


def test_two_restarts_at_once_bring_the_job_back_once(a: Session, b: Session) -> None:
    """A lets an ended run go on and stays open; B does and waits; A commits; B is refused."""
    run_id = begin(a)
    a.fetch(*call("cancel_job", job_id=run_id))

    with a.transaction():
        a.fetch(*call("restart_pipeline", job_id=run_id, stage="two"))
        pending = b.start(*call("restart_pipeline", job_id=run_id, stage="three"))
        pending.wait_blocked(by=a)

    assert answer_of(pending.result) == "RT014"
    assert stages(a, run_id) == [("one", "cancelled"), ("two", "queued")]


def test_a_run_cannot_be_begun_between_two_stages_of_its_key(a: Session, b: Session) -> None:
    """A finishes a stage and stays open; B starts with its key and is told the run."""
    run_id = begin(a, idempotency_key="k")
    job_id, token = claim(a)
    b.fetch("set statement_timeout = '5s'")

    with a.transaction():
        a.fetch(*call("finish_job", job_id=job_id, lease_token=token))
        again = b.fetch(*call("start_pipeline", pipeline="p", idempotency_key="k"))

    assert again == [(run_id,)]
    assert stages(a, run_id) == [("one", "succeeded"), ("two", "queued")]


def test_a_repeated_finish_waits_for_an_open_one_and_is_told(a: Session, b: Session) -> None:
    """A finishes a stage and stays open; B asks the same and waits; A commits, or not."""
    for is_committed in (False, True):
        run_id = begin(a)
        job_id, token = claim(a)
        finish = call("finish_job", job_id=job_id, lease_token=token)

        a.fetch("begin")
        a.fetch(*finish)
        pending = b.start(*finish)
        pending.wait_blocked(by=a)
        a.fetch("commit" if is_committed else "rollback")

        assert pending.result() == [("already_finished" if is_committed else "finished",)]
        assert stages(a, run_id) == [("one", "succeeded"), ("two", "queued")]
        a.fetch(*call("cancel_job", job_id=run_id))


def test_a_batch_goes_past_a_job_that_another_finishes(a: Session, b: Session) -> None:
    """A finishes a stage of one job and stays open; B finishes both in a batch; A commits."""
    begin(a), begin(a)
    (one, its_token), (two, token) = claim(a), claim(a)

    with a.transaction():
        a.fetch(*call("finish_job", job_id=one, lease_token=its_token))
        both = call("finish_jobs", job_ids=[one, two], lease_tokens=[its_token, token])
        assert b.fetch(*both) == [(one, "busy"), (two, "finished")]

    assert b.fetch(*both) == [(one, "already_finished"), (two, "already_finished")]


def test_a_cancel_is_requested_while_a_stage_ends(a: Session, b: Session) -> None:
    """A requests the cancel and stays open; B finishes the stage and waits; A commits."""
    run_id = begin(a)
    job_id, token = claim(a)

    with a.transaction():
        a.fetch(*call("cancel_job", job_id=run_id))
        pending = b.start(*call("finish_job", job_id=job_id, lease_token=token))
        pending.wait_blocked(by=a)

    assert pending.result() == [("finished",)]
    assert stages(a, run_id) == [("one", "succeeded")]
    assert a.fetch("select status from rota.finished_jobs") == [("cancelled",)]


@pytest.mark.parametrize("is_last", [True, False])
def test_a_child_that_comes_while_a_stage_ends_waits_for_the_run(
    a: Session, b: Session, is_last: bool
) -> None:
    """A finishes a stage and stays open; B enqueues a child; A commits; a tick comes."""
    run_id = begin(a)
    a.fetch(*call("finish_job", **dict(zip(("job_id", "lease_token"), claim(a), strict=True))))
    job_id, token = claim(a)
    finish = {"next_stage": "end"} if is_last else {}

    with a.transaction():
        a.fetch(*call("finish_job", job_id=job_id, lease_token=token, **finish))
        pending = b.start(*call("enqueue", job_type="child", depends_on=[run_id]))
        pending.wait_settled()

    child = pending.result()[0][0]
    if not is_last:
        job_id, token = claim(b)
        a.fetch(*call("finish_job", job_id=job_id, lease_token=token))
    a.fetch(*call("tick"))
    assert claim(b)[0] == child


def test_a_stage_that_ends_while_a_child_comes_finds_it(a: Session, b: Session) -> None:
    """A enqueues a child and stays open; B ends the run; A commits; a tick comes."""
    begin(a, stage="three")
    job_id, token = claim(a)

    with a.transaction():
        ((child,),) = a.fetch(*call("enqueue", job_type="child", depends_on=[job_id]))
        pending = b.start(*call("finish_job", job_id=job_id, lease_token=token))
        assert pending.result() == [("finished",)]

    a.fetch(*call("tick"))
    assert claim(b)[0] == child


def test_a_pipeline_is_defined_while_a_run_moves(a: Session, b: Session) -> None:
    """A finishes a stage and stays open; B leaves the next stage out at once; A commits."""
    run_id = begin(a)
    job_id, token = claim(a)

    with a.transaction():
        a.fetch(*call("finish_job", job_id=job_id, lease_token=token))
        b.fetch(*call("define_pipeline", pipeline="p", stages=Jsonb(STAGES[2:])))

    for _ in range(2):
        job_id, token = claim(b)
        b.fetch(*call("finish_job", job_id=job_id, lease_token=token))
    assert [stage for stage, _ in stages(b, run_id)] == ["one", "two", "three"]


def test_define_holds_up_nobody_but_its_like(a: Session, b: Session) -> None:
    """A defines a pipeline and stays open; B starts, claims, finishes and defines another."""
    b.fetch("set statement_timeout = '5s'")
    with a.transaction():
        a.fetch(*call("define_pipeline", pipeline="p", stages=Jsonb(STAGES[2:])))
        run_id = begin(b)
        for _ in STAGES:
            job_id, token = claim(b)
            b.fetch(*call("finish_job", job_id=job_id, lease_token=token))
        b.fetch(*call("restart_pipeline", job_id=run_id, stage="two"))
        b.fetch(*call("define_pipeline", pipeline="q", stages=Jsonb(STAGES)))
        b.fetch(*call("drop_pipeline", pipeline="q"))

    assert [stage for stage, _ in stages(b, run_id)] == ["one", "two", "three", "two"]


def test_a_pipeline_that_is_dropped_while_it_is_defined_is_dropped(
    a: Session, b: Session
) -> None:
    """A defines more stages and stays open; B drops the pipeline and waits; A commits."""
    with a.transaction():
        new = [*STAGES, {"stage": "four", "job_type": "four"}]
        a.fetch(*call("define_pipeline", pipeline="p", stages=Jsonb(new)))
        pending = b.start(*call("drop_pipeline", pipeline="p"))
        pending.wait_blocked(by=a)
    pending.result()

    assert a.fetch("select from rota.pipeline_stages where ordinal is not null") == []


def test_two_definitions_at_once_do_not_mix(a: Session, b: Session) -> None:
    """A leaves out all stages but one and stays open; B defines another; A commits."""
    with a.transaction():
        a.fetch(*call("define_pipeline", pipeline="p", stages=Jsonb(STAGES[:1])))
        pending = b.start(*call("define_pipeline", pipeline="p", stages=Jsonb(STAGES[1:])))
        pending.wait_blocked(by=a)
    pending.result()

    found = a.fetch(
        "select stage, next_stage from rota.pipeline_stages"
        " where ordinal is not null order by ordinal"
    )
    assert found == [("two", "three"), ("three", None)]


@pytest.mark.parametrize("is_known", [False, True])
def test_two_first_definitions_at_once_do_not_mix(
    a: Session, b: Session, is_known: bool
) -> None:
    """A defines a new pipeline, or adds a stage, and stays open; B defines another stage."""
    if is_known:
        a.fetch(*call("define_pipeline", pipeline="new", stages=Jsonb(STAGES[:1])))
    with a.transaction():
        a.fetch(*call("define_pipeline", pipeline="new", stages=Jsonb(STAGES[:2])))
        pending = b.start(*call("define_pipeline", pipeline="new", stages=Jsonb(STAGES[2:])))
        pending.wait_blocked(by=a)
    pending.result()

    found = a.fetch(
        "select stage, next_stage from rota.pipeline_stages"
        " where pipeline = 'new' and ordinal is not null"
    )
    assert found == [("three", None)]


class Crashing:
    """A worker that takes jobs in batches and often does not live to tell how they went."""

    def __init__(self, session: Session, seed: str) -> None:
        self.session, self.random = session, random.Random(seed)
        self.errors: list[BaseException] = []

    def work(self) -> None:
        try:
            while self.session.fetch("select 1 from rota.jobs limit 1"):
                self.step()
        except BaseException as error:
            self.errors.append(error)

    def step(self) -> None:
        jobs = self.session.fetch(*call("claim_jobs", worker="w", max_jobs=7, lease="1 ms"))
        how = self.random.choice(["finish", "finish", "finish", "die", "half", "fail", "late"])
        ids, tokens = [job[0] for job in jobs], [job[1] for job in jobs]
        if how == "late":  # somebody else may have the jobs by now
            self.session.fetch(*call("sweep_stale_leases"))
            how = "finish"
        if how in ("finish", "half"):
            finish = call("finish_jobs", job_ids=ids, lease_tokens=tokens)
            self.session.fetch("begin")
            self.session.fetch(*finish)
            self.session.fetch("rollback" if how == "half" else "commit")
            if self.random.random() < 0.3:  # the answer was lost
                self.session.fetch(*finish)
        elif how == "fail":
            for job_id, token in zip(ids, tokens, strict=True):
                error = {"error": "no", "retry_in": "0"}
                fail = call("fail_job", job_id=job_id, lease_token=token, **error)
                answer_of(lambda fail=fail: self.session.fetch(*fail))
        self.session.fetch(*call("tick"))
        self.session.fetch(
            "update rota.jobs set run_at = rota.now() where id = any(array("
            "select j.id from rota.jobs as j where j.status = 'failed' for update skip locked))"
        )


@pytest.mark.slow
def test_every_run_passes_each_stage_once_and_in_order(
    session: Callable[[], Session], db: psycopg.Connection[Any]
) -> None:
    """Four workers that crash, come late and say things twice take 60 runs to their end."""
    letters = "abcdef"
    stages = [{"stage": s, "job_type": s, "max_attempts": 1000} for s in letters]
    db.execute(*call("define_pipeline", pipeline="p", stages=Jsonb(stages)))
    db.execute(
        "select rota.start_pipeline('p', idempotency_key => 'k' || n,"
        " ordering_key => case when n % 3 = 0 then 'o' || n % 5 end)"
        " from generate_series(1, 60) as n"
    )
    workers = [Crashing(session(), f"worker {n}") for n in range(4)]

    threads = [threading.Thread(target=worker.work) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)

    assert [error for worker in workers for error in worker.errors] == []
    runs = db.execute(
        "select string_agg(s.stage, '' order by s.lease_token),"
        " count(*) filter (where 'succeeded' not in (s.status, f.status)), sum(s.attempts)"
        " from rota.finished_jobs as f join rota.stage_runs as s on s.job_id = f.id"
        " group by f.id"
    ).fetchall()
    assert [(way, bad) for way, bad, _ in runs] == [(letters, 0)] * 60
    assert sum(attempts for _, _, attempts in runs) > 60 * len(letters), "nobody crashed"
    check_invariants(db)
