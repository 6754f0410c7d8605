"""Histories with a lease, a token or an attempt that is wrong, in as few lines as show it."""

from __future__ import annotations

from typing import Any

from faults.history.hand import Scroll, breaks, moment


@breaks("I1")
def a_second_grant_while_the_first_lasts(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.claim(1, 200, 20, attempt=2)
    s.finish(1, 200, 30)
    s.ended(1, 200, attempts=2)


@breaks("I1")
def a_grant_before_the_end_that_a_heartbeat_moved(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10, until=60)
    s.beat(1, 100, 50, until=150)
    s.claim(1, 200, 100, attempt=2)
    s.ended(1, 200, attempts=2)


@breaks("I1")
def a_lease_that_is_swept_before_its_end(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10, until=60)
    s.error(1, 100, 40, error_type="lease_expired")
    s.live(1, 100, "failed", attempts=1, run_at=moment(140))


@breaks("I1")
def a_lease_of_which_nobody_heard_beside_another(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10, until=60)
    s.call("claim_jobs", at=20, lost=True, worker="x")
    s.error(1, 200, 90, attempt=2, worker="x", started_at=moment(21))
    s.live(1, 200, "failed", attempts=2)


@breaks("I2")
def a_token_that_is_lower_than_an_earlier_one(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 200, 10)
    s.fail(1, 200, 20)
    s.claim(1, 100, 200, attempt=2, run_at=120.5)
    s.finish(1, 100, 210)
    s.ended(1, 200, attempts=2)


@breaks("I2")
def a_token_that_is_given_out_twice(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.release(1, 100, 20)
    s.claim(1, 100, 30)
    s.finish(1, 100, 40)
    s.ended(1, 100)


@breaks("I2")
def a_row_whose_token_went_back(s: Scroll) -> None:
    s.enqueue(1)
    s.live(1, 300)
    s.dump()
    s.live(1, 200)


@breaks("I3")
def a_finish_after_the_job_was_given_to_another(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.error(1, 100, 70, error_type="lease_expired")
    s.claim(1, 200, 200, attempt=2, run_at=170)
    s.finish(1, 100, 210)
    s.ended(1, 200, attempts=2)


@breaks("I3")
def a_heartbeat_after_the_release(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.release(1, 100, 20)
    s.beat(1, 100, 30, until=80)
    s.live(1, 100)


@breaks("I3")
def a_heartbeat_after_the_sweep(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10, until=60)
    s.error(1, 100, 70, error_type="lease_expired")
    s.beat(1, 100, 80, until=130.5, lease=0.05)
    s.live(1, 100, "failed", attempts=1)


@breaks("I3")
def a_record_of_an_effect_after_the_finish(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.finish(1, 100, 20)
    names: dict[str, Any] = {"scope": "mail", "key": "k", "job_id": 1, "lease_token": 100}
    s.call("record_effect", True, at=30, **names)
    s.ended(1, 100)


@breaks("I3")
def a_finish_and_a_release_of_one_claim(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.finish(1, 100, 20, took=10)
    s.release(1, 100, 21, took=10)
    s.ended(1, 100)


@breaks("I3")
def a_finish_that_was_and_is_told_to_one_who_never_asked(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.finish(1, 100, 20, answer="already_finished")
    s.ended(1, 100)


@breaks("I6")
def an_attempt_more_than_max_attempts(s: Scroll) -> None:
    s.enqueue(1)
    for attempt in (1, 2, 3, 4):
        s.claim(1, attempt, attempt * 200, attempt=attempt)
        s.fail(1, attempt, attempt * 200 + 10, attempt=attempt)
    s.live(1, 4, "failed", attempts=4)


@breaks("I6")
def a_release_that_counts(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.release(1, 100, 20)
    s.claim(1, 200, 30, attempt=2)
    s.finish(1, 200, 40)
    s.ended(1, 200, attempts=2)


@breaks("I6")
def an_attempt_that_is_over_and_nobody_said_how(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.claim(1, 200, 100, attempt=2)
    s.finish(1, 200, 110)
    s.ended(1, 200, attempts=2)


@breaks("I6")
def a_lease_that_nobody_asked_for(s: Scroll) -> None:
    s.enqueue(1)
    s.error(1, 100, 60, error_type="lease_expired", worker="nobody")
    s.live(1, 100, "failed", attempts=1)


@breaks("I6")
def a_last_attempt_that_is_told_to_be_tried_again(s: Scroll) -> None:
    s.enqueue(1)
    for attempt in (1, 2, 3):
        due = 0 if attempt == 1 else attempt * 200 - 89.5
        s.claim(1, attempt, attempt * 200, attempt=attempt, run_at=due)
        s.fail(1, attempt, attempt * 200 + 10, attempt=attempt)
    s.live(1, 3, "failed", attempts=3, run_at=moment(710.5))


@breaks("I8")
def a_failure_that_left_a_job_running(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.fail(1, 100, 20)
    s.live(1, 100, "running", attempts=1, locked_by="w", locked_until=moment(60))


@breaks("I12")
def a_finish_that_is_refused_while_the_lease_lasts(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.finish(1, 100, 20, error="RT002")
    s.finish(1, 100, 30)
    s.ended(1, 100)
