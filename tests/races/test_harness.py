"""The harness itself: it must tell waiting from done, or no race test means anything."""

from __future__ import annotations

import psycopg
import pytest

from races.harness import Session


def test_wait_blocked_returns_once_the_server_reports_the_wait(a: Session, b: Session) -> None:
    """A holds a lock; B asks for it and waits; A commits; B gets it."""
    with a.transaction():
        a.fetch("select pg_advisory_xact_lock(1)")
        pending = b.start("select 7 from pg_advisory_xact_lock(1)")
        pending.wait_blocked(by=a)
        assert not pending.is_done

    assert pending.result() == [(7,)]


def test_wait_blocked_fails_when_nothing_is_in_the_way(b: Session) -> None:
    pending = b.start("select 1")

    with pytest.raises(AssertionError, match="did not wait"):
        pending.wait_blocked()


def test_result_raises_what_the_statement_raised(b: Session) -> None:
    pending = b.start("select 1 / 0")

    with pytest.raises(psycopg.errors.DivisionByZero):
        pending.result()


def test_close_ends_a_session_that_still_waits(a: Session, b: Session) -> None:
    a.fetch("select pg_advisory_lock(1)")
    pending = b.start("select pg_advisory_lock(1)")
    pending.wait_blocked()

    b.close()

    with pytest.raises(psycopg.errors.AdminShutdown):
        pending.result()
