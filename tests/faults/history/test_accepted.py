"""Histories that are right although nobody was told all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults.history import synthetic
from faults.history.checker import check
from faults.history.hand import Scroll, moment

Tale = Callable[[Scroll], None]
RIGHT: list[Tale] = []


def right(tale: Tale) -> Tale:
    """Note a tale that breaks nothing."""
    RIGHT.append(tale)
    return tale


@right
def a_finish_without_an_answer_that_happened(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.finish(1, 100, 20, lost=True)
    s.ended(1, 100)


@right
def a_finish_without_an_answer_that_did_not_happen(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.finish(1, 100, 20, lost=True)
    s.error(1, 100, 61, error_type="lease_expired")
    s.claim(1, 200, 200, attempt=2, run_at=161)
    s.finish(1, 200, 210)
    s.ended(1, 200, attempts=2)


@right
def a_finish_that_is_asked_for_again(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.finish(1, 100, 20, lost=True)
    s.finish(1, 100, 30, answer="already_finished")
    s.ended(1, 100)


@right
def a_job_that_passes_through_stages(s: Scroll) -> None:
    s.call("start_pipeline", 1, at=0, pipeline="p")
    s.claim(1, 100, 10)
    s.error(1, 100, 61, error_type="lease_expired")
    s.claim(1, 200, 200, attempt=2, run_at=161)
    s.finish(1, 200, 210)
    s.stage(1, 200, attempts=2)
    s.claim(1, 300, 220, run_at=211)
    s.finish(1, 200, 225, answer="already_finished")
    s.finish(1, 300, 230, lost=True)
    s.stage(1, 300)
    s.claim(1, 400, 240, run_at=231)
    s.finish(1, 400, 250)
    s.stage(1, 400)
    s.ended(1, 400, pipeline="p")


@right
def a_job_that_is_cancelled_after_its_stage(s: Scroll) -> None:
    s.call("start_pipeline", 1, at=0, pipeline="p")
    s.claim(1, 100, 10)
    s.call("cancel_job", "running", at=20, job_id=1)
    s.finish(1, 100, 30)
    s.stage(1, 100)
    s.ended(1, 100, "cancelled", pipeline="p")


@right
def a_job_that_waits_in_its_second_stage(s: Scroll) -> None:
    s.call("start_pipeline", 1, at=0, pipeline="p")
    s.claim(1, 100, 10)
    s.finish(1, 100, 20)
    s.stage(1, 100)
    s.live(1, 101, attempts=0, pipeline="p")


@right
def a_failure_that_is_reported_again(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.fail(1, 100, 20, lost=True)
    answer = {"status": "failed", "run_at": moment(120.5)}
    s.call("fail_job", answer, at=30, job_id=1, lease_token=100)
    s.live(1, 100, "failed", attempts=1, run_at=moment(120.5))


@right
def a_release_without_an_answer_that_happened(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.release(1, 100, 20, lost=True)
    s.claim(1, 200, 30)
    s.finish(1, 200, 40)
    s.ended(1, 200)


@right
def a_release_without_an_answer_that_did_not_happen(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.release(1, 100, 20, lost=True)
    s.error(1, 100, 61, error_type="lease_expired")
    s.claim(1, 200, 200, attempt=2, run_at=161)
    s.finish(1, 200, 210)
    s.ended(1, 200, attempts=2)


@right
def a_claim_without_an_answer_that_shows_by_its_end(s: Scroll) -> None:
    s.enqueue(1)
    s.call("claim_jobs", at=10, lost=True, worker="w")
    s.error(1, 100, 61, error_type="lease_expired")
    s.claim(1, 200, 200, attempt=2, run_at=161)
    s.finish(1, 200, 210)
    s.ended(1, 200, attempts=2)


@right
def a_claim_without_an_answer_that_still_lasts(s: Scroll) -> None:
    s.enqueue(1)
    s.call("claim_jobs", at=10, lost=True, worker="w")
    s.live(1, 100, "running", attempts=1, locked_by="w", locked_until=moment(9000))


@right
def a_heartbeat_without_an_answer_that_made_the_lease_shorter(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10, until=500)
    s.beat(1, 100, 20, until=0, lost=True, lease=0.01)
    s.error(1, 100, 40, error_type="lease_expired")
    s.claim(1, 200, 200, attempt=2, run_at=140)
    s.finish(1, 200, 210)
    s.ended(1, 200, attempts=2)


@right
def an_enqueue_without_an_answer(s: Scroll) -> None:
    for at in (0, 5):  # one of them happened
        s.enqueue(1, at=at, lost=True)
    s.claim(1, 100, 10)
    s.finish(1, 100, 20)
    s.ended(1, 100)


@right
def a_commit_without_an_answer_that_happened(s: Scroll) -> None:
    s.enqueue(1, transaction=1)
    s.end(1, 5, "lost")
    s.claim(1, 100, 10)
    s.finish(1, 100, 20, transaction=2)
    s.end(2, 25, "lost")
    s.ended(1, 100)


@right
def a_commit_without_an_answer_that_did_not_happen(s: Scroll) -> None:
    s.enqueue(1, transaction=1)
    s.end(1, 5, "lost")


@right
def a_transaction_of_a_process_that_was_killed_in_it(s: Scroll) -> None:
    s.enqueue(1, transaction=1)
    s.enqueue(2, at=5, transaction=1, lost=True)


@right
def a_finish_that_was_rolled_back(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.finish(1, 100, 20, transaction=1)
    s.end(1, 25, "rollback")
    s.finish(1, 100, 30)
    s.ended(1, 100)


@right
def an_enqueue_that_a_savepoint_took_back(s: Scroll) -> None:
    s.enqueue(1, transaction=1)
    s.enqueue(2, at=5, transaction=1)
    s.write(undone=[2])
    s.end(1, 8, "commit")
    s.claim(1, 100, 10)
    s.finish(1, 100, 20)
    s.ended(1, 100)


@right
def a_stale_worker_that_is_refused(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.error(1, 100, 61, error_type="lease_expired")
    s.claim(1, 200, 200, attempt=2, run_at=161)
    s.finish(1, 100, 205, error="RT002")
    s.finish(1, 200, 210)
    s.ended(1, 200, attempts=2)


@right
def batches_that_are_cut_off(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    ref: dict[str, Any] = {"job_ids": [1], "lease_tokens": [100]}
    for at, function in enumerate(("heartbeat_jobs", "finish_jobs", "release_jobs"), 20):
        s.call(function, at=at, error="57014", **ref)
    s.call("finish_and_claim", at=24, error="55P03", worker="w", **ref)
    s.finish(1, 100, 30)
    s.ended(1, 100)


@right
def an_operator_who_takes_a_job_away_and_runs_it_again(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10, until=900)
    s.call("retry_job", "queued", at=20, job_id=1, force=True)
    s.claim(1, 200, 30, attempt=2)
    s.finish(1, 200, 40)
    s.call("retry_job", "queued", at=50, job_id=1)
    s.claim(1, 300, 60)
    s.finish(1, 300, 70)
    s.ended(1, 300)


@right
def a_cancel_of_a_job_that_waits(s: Scroll) -> None:
    s.enqueue(1)
    s.claim(1, 100, 10)
    s.release(1, 100, 20)
    s.call("cancel_job", "cancelled", at=30, job_id=1)
    s.ended(1, 100, "cancelled", attempts=0, locked_by=None)


@right
def a_key_that_is_used_again_when_its_job_has_ended(s: Scroll) -> None:
    for job_id, at in ((1, 0), (2, 100)):
        s.enqueue(job_id, at=at, idempotency_key="k")
        s.claim(job_id, 100 + at, at + 10)
        s.finish(job_id, 100 + at, at + 20)
        s.ended(job_id, 100 + at, idempotency_key="k", finished_at=moment(at + 20.5))


@right
def a_round_trip(s: Scroll) -> None:
    s.enqueue(1)
    s.enqueue(2, at=5)
    s.claim(1, 100, 10)
    granted = {"lease_token": 200, "attempt": 1, "max_attempts": 3, "run_at": moment(0)}
    ends = {"created_at": moment(0), "locked_until": moment(90.5), "locked_for": 0.07}
    row = {"outcome": "claimed", "job_id": 2, **granted, **ends}
    s.call("finish_and_claim", row, at=20, worker="w", job_ids=[1], lease_tokens=[100])
    s.finish(2, 200, 30)
    s.ended(1, 100)
    s.ended(2, 200)


@pytest.mark.parametrize("tale", RIGHT, ids=[tale.__name__ for tale in RIGHT])
def test_history_is_accepted(tmp_path: Path, tale: Tale) -> None:
    scroll = Scroll(tmp_path)
    tale(scroll)

    context = scroll.check()

    assert [f"{each}\n{each.story}" for each in context.violations] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_long_history_with_calls_without_answer_is_accepted(tmp_path: Path, seed: int) -> None:
    synthetic.write(tmp_path, 3000, seed)

    context = check(tmp_path)

    assert [f"{each}\n{each.story}" for each in context.violations] == []
    assert context.counts["unknown"] > 10


def test_last_line_of_a_process_that_died_in_it_is_left_out(tmp_path: Path) -> None:
    scroll = Scroll(tmp_path)
    scroll.enqueue(1)
    scroll.live(1)
    scroll.check()
    with (tmp_path / "calls-1-1.ndjson").open("a") as file:
        file.write('{"call": 2, "func')

    assert check(tmp_path).violations == []
