"""Texts in a database of encoding SQL_ASCII, which takes any bytes and counts them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from sql.helpers import call, owner, raises, rows, scalar, value

LONG = "a" + "ж€🦀" * 5000
BAD = b"Zo\xeb"
"""A name in LATIN1."""


@pytest.fixture
def utf8(of_bytes: str) -> Iterator[psycopg.Connection[Any]]:
    """Who reads UTF-8, as nearly all clients do."""
    with psycopg.connect(of_bytes, autocommit=True, client_encoding="utf8") as connection:
        yield connection


@pytest.fixture
def raw(of_bytes: str) -> Iterator[psycopg.Connection[Any]]:
    """Who sends whatever he has."""
    with psycopg.connect(of_bytes, autocommit=True, client_encoding="sql_ascii") as connection:
        yield connection


def test_no_text_is_cut_within_a_character(utf8):
    for length in range(20):
        cut = scalar(utf8, "select rota._cut(%s, %s)", LONG, length)

        assert LONG.startswith(cut)
        assert length - 4 <= len(cut.encode()) <= length


def test_what_is_short_enough_is_not_cut(utf8, read_only_db):
    assert scalar(utf8, "select rota._cut('aж', 3)") == "aж"
    assert scalar(read_only_db, "select rota._cut('abc', 2)") == "ab"


def test_long_errors_can_be_read(utf8):
    job_id = value(utf8, "enqueue", job_type="breaks", queue="breaks", max_attempts=1)
    (job,) = call(utf8, "claim_jobs", worker="w", queues=["breaks"])
    call(utf8, "fail_job", **owner(job), error=LONG, error_type=LONG, stack=LONG)

    # Other tests have left their own in the database that they share.
    ours = "where job_type = 'breaks'"
    (dead,) = rows(utf8, f"select last_error, error_type from rota.dead_jobs {ours}")
    (error,) = rows(utf8, f"select message, stack from rota.job_errors {ours}")
    assert all(LONG.startswith(text) for text in (*dead, *error))
    (group,) = rows(utf8, f"select message from rota.error_groups {ours}")
    assert LONG.startswith(group.message)
    assert "a" + "ж€🦀" * 5 in call(utf8, "explain_job", job_id=job_id)[0].explanation
    assert "dead_jobs" in [row.finding for row in call(utf8, "doctor")]


def test_a_long_name_is_refused_as_one(utf8):
    """Its beginning is in the message, and half a character would make that another error."""
    for name in ("a" * n + "🦀" * 30 for n in range(4)):
        with raises("22023"):
            call(utf8, "enqueue", job_type=name)
        with raises("22023"):
            call(utf8, "enqueue", job_type="a", on_conflict=name)


def test_a_long_actor_is_recorded(utf8):
    for name in ("a" * n + "🦀" * 100 for n in range(4)):
        utf8.execute("select set_config('rota.actor', %s, false)", (name,))
        call(utf8, "pause_all")

        [(actor,)] = rows(utf8, "select actor from rota.audit_log order by id desc limit 1")
        assert name.startswith(actor)
        call(utf8, "resume_all")


@pytest.mark.parametrize(
    "statement",
    [
        b"select rota.enqueue('a', '{\"name\": \"%s\"}', queue => 'bytes')",
        b"select rota.enqueue('a', queue => 'bytes', idempotency_key => '%s')",
        b"select rota.enqueue('a', queue => 'bytes', ordering_key => '%s')",
        b"select rota.enqueue('a', queue => 'bytes', headers => '{\"a\": \"%s\"}')",
        b'select rota.enqueue_many(\'[{"job_type": "a", "payload": {"a": "%s"}}]\')',
        b"select rota.schedule_job('s', '@daily', 'a', payload => '{\"a\": \"%s\"}')",
        b"select rota.report_worker('%s', null, null, null, '{bytes}')",
        b"select rota.set_limit(limit_key => '%s', max_running => 1)",
        b"select rota.pause_all('%s')",
    ],
)
def test_bytes_that_are_no_utf_8_are_refused(raw, utf8, statement):
    """One such job, and nobody who reads UTF-8 could claim from its queue any more."""
    with raises("22021"):
        raw.execute(statement % BAD)

    assert call(utf8, "claim_jobs", worker="w", queues=["bytes"]) == []


def test_a_result_of_other_bytes_is_refused(raw, utf8):
    value(utf8, "enqueue", job_type="a", queue="results")
    (job,) = call(utf8, "claim_jobs", worker="w", queues=["results"])
    finish = b"select rota.finish_job(%d, %d, '\"%s\"')"

    with raises("22021"):
        raw.execute(finish % (job.job_id, job.lease_token, BAD))
    raw.execute(finish % (job.job_id, job.lease_token, "Zoë".encode()))

    done = f"select result from rota.job_runs where id = {job.job_id}"
    assert scalar(utf8, done) == "Zoë"


def test_no_other_database_pays_for_it(db):
    guards = scalar(db, "select count(*) from pg_trigger where tgname = 'check_bytes'")

    assert (guards > 0) == (db.info.parameter_status("server_encoding") == "SQL_ASCII")


def test_to_install_again_changes_no_guard(utf8, of_bytes, psql, sql_dir):
    guards = "select count(*), max(oid) from pg_trigger where tgname = 'check_bytes'"
    before = rows(utf8, guards)

    psql(of_bytes, "-f", sql_dir / "install.sql")

    assert rows(utf8, guards) == before
    assert ("ok", "drift") in [(row.severity, row.finding) for row in call(utf8, "doctor")]


def test_a_terminal_is_shown_every_character(utf8):
    """Whose bytes may be those of controls in an encoding that has one byte for each."""
    assert scalar(utf8, "select rota._printable(E'Åж€🦀 \\x1b')") == "Åж€🦀 ?"
    assert scalar(utf8, "select rota._literal('Åж€🦀')") == "'Åж€🦀'"
