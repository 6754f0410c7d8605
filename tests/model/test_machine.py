"""The machine in small."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis.errors import Flaky

from model.acts import RULES
from model.database import Database, opened
from model.machine import machine_on, play
from model.rows import SECOND, Divergence
from model.timetable import Timetable

PARTS = [n if n <= 1 else pytest.param(n, marks=pytest.mark.long) for n in range(1, 11)]
"""Always the same histories: `make prove` plays all, and new ones ten times as long."""
EXAMPLES, STEPS = 200, 5
# What writes and is not played: it has a storm, or tells sessions and people something.
LEFT_OUT = {
    *("report_worker", "deregister_worker", "wait_for_jobs", "stop_waiting"),
    *("start_ticker", "stop_ticker", "tick_loop", "grant_queue", "revoke_queue"),
    *("set_database_number", "enqueue_to", "take_forwards", "end_forwards", "receive_jobs"),
    *("begin_queue_move", "end_queue_move"),
    *("take_moves", "receive_moves", "end_moves"),
    # They have tests of races, and what they do to one job is played by the functions for one.
    *("act_on_jobs", "retry_with_dependants", "pause_type", "resume_type", "wait_for_result"),
    *("set_retry_rule", "set_breaker", "set_type", "set_archive"),
}


@pytest.fixture
def database(dsn: str) -> Iterator[Database]:
    with opened(dsn) as database:
        yield database


@pytest.mark.slow
@pytest.mark.parametrize("number", PARTS)
def test_whatever_is_called_the_answers_and_rows_are_those_of_the_model(
    database: Database, number: int
) -> None:
    play(database, number, EXAMPLES, STEPS)

    assert database.calls > 2 * EXAMPLES


@pytest.mark.slow
def test_in_long_histories_the_answers_and_rows_are_those_of_the_model(
    database: Database,
) -> None:
    play(database, 1, examples=20)

    assert database.calls > 400


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: " ".join(rule) or "plain")
def test_a_rule_meets_a_waiting_a_running_and_a_failed_job_like_itself(
    database: Database, rule: dict[str, list[Any]]
) -> None:
    """Histories at random may not come to all of this, and so not see a model that is wrong."""
    machine = machine_on(database)()
    job = {"job_type": "t"} | {name: values[-1] for name, values in rule.items()}

    for end in ("fail", "finish"):
        for _ in range(2):
            machine.enqueue(job)
            machine.let_time_pass(1)
        machine.claim(worker="w1", queues=["default"], max_jobs=1)
        for _ in range(2):
            machine.let_time_pass(1)
            machine.enqueue(job)
        if end == "fail":
            machine.fail(0, "no", 30 * SECOND, fatal=False)
        else:
            machine.finish(0, None, None)
        machine.enqueue(job)
        machine.let_time_pass(60)
    machine.settle()


def test_every_function_that_writes_is_played_or_left_out(db: psycopg.Connection[Any]) -> None:
    writing = db.execute(
        """
        select p.proname
        from pg_proc as p
        where p.pronamespace = 'rota'::regnamespace
          and p.proname !~ '^_'
          and p.provolatile = 'v'
          and p.prorettype <> 'trigger'::regtype
        """
    ).fetchall()

    assert {name for (name,) in writing if not hasattr(Timetable, name)} == LEFT_OUT


@pytest.mark.slow
def test_a_number_always_plays_the_same_calls(database: Database) -> None:
    played = []
    for _ in range(2):
        before = database.calls
        play(database, 7, examples=5)
        played.append(database.calls - before)

    assert played[0] == played[1] > 50


def test_a_divergence_that_comes_only_once_is_told_with_its_steps(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(function: str, **given: Any) -> tuple[str, Any]:
        if database.calls == 20:
            database.calls += 1
            raise Divergence("once")
        return Database.call(database, function, **given)

    monkeypatch.setattr(database, "call", call)
    with pytest.raises(Flaky) as raised:
        play(database, 7, examples=5)

    assert "It came once, after these:\nenqueue" in raised.value.__notes__[-1]
