"""Histories of jobs that come, wait or end as they should not, in as few lines as show it."""

from __future__ import annotations

from faults.history.hand import WALL, Scroll, breaks, moment


@breaks("I4")
def an_enqueue_that_is_lost(s: Scroll) -> None:
    s.enqueue(1)


@breaks("I4")
def a_job_that_never_ends(s: Scroll) -> None:
    s.enqueue(1)
    s.live(1)
    s.is_drained = True


@breaks("I4")
def a_job_that_ended_twice(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.finish(1, 100, 20)
    s.ended(1, 100)
    s.ended(1, 100, "dead")


@breaks("I8")
def a_finished_stage_that_left_no_record(s: Scroll) -> None:
    s.call("start_pipeline", 1, at=0, pipeline="p")
    s.claim(1, 100, 10)
    s.finish(1, 100, 20)
    s.claim(1, 200, 30, run_at=21)
    s.finish(1, 200, 40)
    s.stage(1, 200)
    s.ended(1, 200, pipeline="p")


@breaks("I4")
def a_stage_that_nobody_finished(s: Scroll) -> None:
    s.call("start_pipeline", 1, at=0, pipeline="p")
    s.claim(1, 100, 10)
    s.stage(1, 100)
    s.claim(1, 200, 30, run_at=21)
    s.finish(1, 200, 40)
    s.stage(1, 200)
    s.ended(1, 200, pipeline="p")


@breaks("I6")
def a_stage_that_begins_with_its_second_attempt(s: Scroll) -> None:
    s.call("start_pipeline", 1, at=0, pipeline="p")
    s.claim(1, 100, 10)
    s.finish(1, 100, 20)
    s.stage(1, 100)
    s.claim(1, 200, 30, attempt=2, run_at=21)
    s.finish(1, 200, 40)
    s.stage(1, 200, attempts=2)
    s.ended(1, 200, attempts=2, pipeline="p")


@breaks("I4")
def a_job_of_a_transaction_that_was_rolled_back(s: Scroll) -> None:
    s.enqueue(1, transaction=1)
    s.end(1, 5, "rollback")
    s.claim(1, 100, 10)
    s.finish(1, 100, 20)
    s.ended(1, 100)


@breaks("I4")
def a_job_that_nobody_made(s: Scroll) -> None:
    s.enqueue(1)
    s.ended(1, status="cancelled", attempts=0, locked_by=None)
    s.ended(2, status="cancelled", attempts=0, locked_by=None)


@breaks("I4")
def a_success_that_nobody_reported(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.ended(1, 100)


@breaks("I5")
def two_live_jobs_of_a_key(s: Scroll) -> None:
    for job_id in (1, 2):
        s.enqueue(job_id, at=job_id, idempotency_key="k")
        s.claim(job_id, 100, 100 + job_id)
        s.finish(job_id, 100, 120)
        s.ended(job_id, 100, idempotency_key="k", finished_at=moment(120.5))


@breaks("I5")
def an_answer_with_the_job_of_another_key(s: Scroll) -> None:
    s.enqueue(1, idempotency_key="k")
    s.enqueue(1, at=5, is_new=False, idempotency_key="other")
    s.live(1, idempotency_key="k")


@breaks("I5")
def a_new_job_of_a_key_that_was_unique_for_longer(s: Scroll) -> None:
    for job_id, at in ((1, 0), (2, 500)):
        s.enqueue(job_id, at=at, idempotency_key="k", unique_for=10.0)
        ends = {"finished_at": moment(at + 9), "created_at": moment(at)}
        s.call("cancel_job", "cancelled", at=at + 8, job_id=job_id)
        s.ended(job_id, 0, "cancelled", idempotency_key="k", attempts=0, locked_by=None, **ends)


@breaks("I7")
def a_grant_before_its_time(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10, run_at=500)
    s.finish(1, 100, 20)
    s.ended(1, 100)


@breaks("I7")
def a_delay_that_is_forgotten(s: Scroll) -> None:
    s.enqueue(1, delay=5)
    s.claim(1, 100, 10)
    s.finish(1, 100, 20)
    s.ended(1, 100)


@breaks("I7")
def a_retry_that_does_not_wait(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.fail(1, 100, 20)
    s.claim(1, 200, 30, attempt=2, run_at=21)
    s.finish(1, 200, 40)
    s.ended(1, 200, attempts=2)


@breaks("I7")
def a_retry_that_comes_at_another_time_than_was_asked(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.fail(1, 100, 20, retry_in=60)
    s.claim(1, 200, 200, attempt=2, run_at=120.5)
    s.finish(1, 200, 210)
    s.ended(1, 200, attempts=2)


@breaks("I8")
def a_grant_after_the_finish(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.finish(1, 100, 20)
    s.claim(1, 200, 100, attempt=2)
    s.ended(1, 200, attempts=2)


@breaks("I8")
def a_death_that_became_a_success(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.fail(1, 100, 20, status="dead")
    s.ended(1, 100, "succeeded")


@breaks("I8")
def a_row_that_changed_after_its_end(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.finish(1, 100, 20)
    s.ended(1, 100)
    s.dump()
    s.ended(1, 100, priority=7)


@breaks("I9")
def two_jobs_of_a_planned_time(s: Scroll) -> None:
    for job_id in (1, 2):
        s.live(job_id, definition="nightly", scheduled_for=WALL)
    s.table(
        "occurrences", definition="nightly", scheduled_for=WALL, job_id=1, outcome="enqueued"
    )


@breaks("I9")
def a_planned_time_with_another_job_than_it_says(s: Scroll) -> None:
    s.live(2, definition="nightly", scheduled_for=WALL)
    s.table(
        "occurrences", definition="nightly", scheduled_for=WALL, job_id=1, outcome="enqueued"
    )


@breaks("I10")
def a_job_that_is_due_and_waits(s: Scroll) -> None:
    s.write(mark="calm", at=0, wall=WALL, lease=0.5, sweep=0.5)
    s.enqueue(1)
    s.live(1)


@breaks("I10")
def a_grant_that_comes_late(s: Scroll) -> None:
    s.write(mark="calm", at=0, wall=WALL, lease=0.5, sweep=0.5)
    s.enqueue(1)
    s.claim(1, 100, 4000)
    s.finish(1, 100, 4010)
    s.ended(1, 100)


@breaks("I10")
def a_lease_that_is_over_and_nobody_sweeps(s: Scroll) -> None:
    s.write(mark="calm", at=0, wall=WALL, lease=0.5, sweep=0.5)
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.live(1, 100, "running", attempts=1, locked_by="w", locked_until=moment(60))


@breaks("I11")
def statistics_with_a_success_too_many(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.finish(1, 100, 20)
    s.ended(1, 100)
    hour = moment(1000) // 3_600_000_000 * 3_600_000_000
    told = {"queue": "default", "job_type": "t", "dead": 0, "cancelled": 0}
    s.table("hourly_stats", hour=hour, succeeded=2, **told)


@breaks("I12")
def an_error_that_no_document_names(s: Scroll) -> None:
    s.call("finish_job", at=10, error="XX000", job_id=1, lease_token=1)


@breaks("I4")
def a_job_that_is_new_to_two(s: Scroll) -> None:
    s.enqueue(1, idempotency_key="k")
    s.enqueue(1, at=5, idempotency_key="k")
    s.live(1, idempotency_key="k")
