"""Functions without one of their guards: a game must not come out as if there were all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from races.bench import Bench
from races.games import GAMES
from races.instrument import instrument
from support.mutation import mutate

pytestmark = pytest.mark.slow
Connect = Callable[..., psycopg.Connection[Any]]


@pytest.mark.parametrize(
    ("game", "function", "old", "new", "state", "first", "second"),
    [
        (
            "runs", "define_pipeline",
            "perform rota._lock_pipeline(define_pipeline.pipeline, true)", "null",
            "none", "define more", "define less",
        ),
        (
            "lines", "_job_comes_in",
            "perform rota._add_checks('job', array[format('%s all', job_id)])", "null",
            "running", "enqueue after", "finish",
        ),
        (
            "world", "sweep_stale_leases", "'sweep', max_jobs)", "'sweep', max_jobs / 0)",
            "a lease is over", "enqueue", "tick",
        ),
        (
            "schedules", "_hold_definition", "for update;", ";",
            "due, skip", "run now", "tick",
        ),
        (
            "schedules", "_put_definition", "new.name for update;", "new.name;",
            "due since long, all", "schedule later", "disable",
        ),
        (
            "schedules", "_enqueue_due_schedules", "for update skip locked", "",
            "due since long, one", "tick", "schedule later",
        ),
        (
            "schedules", "_enqueue_due", "and m.kind = 'after'", "and false",
            "after, due, its job retried", "tick", "finish",
        ),
        (
            "schedules", "_change_definition",
            "perform rota._add_checks('schedule', array[new.name])",
            "null",
            "waiting, its job running", "schedule after", "finish",
        ),
    ],
)  # fmt: skip
@pytest.mark.long
def test_a_guard_that_is_missing_is_found(
    connect: Connect,
    game: str,
    function: str,
    old: str,
    new: str,
    state: str,
    first: str,
    second: str,
) -> None:
    mutate(connect(), function, old, new)

    assert_is_noticed(connect, game, state, first, second)


@pytest.mark.parametrize(
    ("function", "lock", "state", "first", "second"),
    [
        ("cancel_job", "for update;", "waiting", "cancel", "claim"),
        ("retry_job", "for update;\n        if found", "failed", "retry", "claim"),
        ("_fail_running", "for update\n", "running", "fail", "cancel"),
    ],
)
def test_a_lock_that_is_missing_is_found(
    connect: Connect, function: str, lock: str, state: str, first: str, second: str
) -> None:
    mutate(connect(), function, lock, lock.removeprefix("for update"))

    assert_is_noticed(connect, "pairs", state, first, second)


def assert_is_noticed(connect: Connect, name: str, state: str, first: str, second: str) -> None:
    """Play two operations, each stopped at its statements, and see that something is wrong."""
    instrument(connect())
    game = replace(GAMES[name], states={state: GAMES[name].states[state]})

    with closing(Bench(connect, game)) as bench:
        assert any(run.problems for run in bench.play_pair(state, first, second))
