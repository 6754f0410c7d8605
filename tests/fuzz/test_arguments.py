"""A little of the fuzzing of arguments, and proof that it would find what is wrong."""

from __future__ import annotations

import psycopg
import pytest

from fuzz import filled_database, hostile, judge
from fuzz.arena import refused_values
from fuzz.arguments import play
from fuzz.hostile import quoted
from fuzz.shrink import smaller_values
from sql.helpers import Db, enqueue, owner, raises, refused, rows, running, scalar, value
from support.mutation import some_of

# What of rota can be wrong, and what is to be said of it.
pytestmark = pytest.mark.plain_session

CANARIES = {
    "describe_schedule": (
        "begin return 1 / (255 - least(char_length(schedule), 255)); end",
        "raises 22012",
    ),
    "effect_result": (
        "begin perform pg_sleep(0.11) where key ~ '^é'; return; end",
        "slow",
    ),
    "deregister_worker": (
        "begin delete from rota.workers; perform rota._refuse('worker', 'is bad'); end",
        "writes before it refuses",
    ),
    "resume_ordering_key": (
        "begin perform rota._refuse('ordering_key', 'is not ' || ordering_key); end",
        "tells what it was given whole",
    ),
    "resume_queue": (
        "begin perform rota._refuse('it', 'is bad'); end",
        "refuses without naming an argument",
    ),
    "set_progress": (
        "begin update rota.jobs as j set attempts = 11 where j.id = job_id; end",
        "what it did stops others later with FZ001",
    ),
    "wait_for_jobs": (
        "begin perform pg_advisory_lock(7), rota._refuse('queues', 'is bad'); end",
        "leaves a lock of the session behind at 22023",
    ),
    "unschedule_job": (
        "begin raise exception using errcode = 'RT001'; end",
        "raises RT001",
    ),
}


@pytest.fixture
def arena(db: Db, dsn: str) -> str:
    """The URL of a database that has the world."""
    filled_database.build(db)
    return dsn


@pytest.mark.slow
def test_no_argument_does_what_none_may(db: Db, arena: str) -> None:
    tally = play(arena, 1000, 1, patience=10)

    assert not tally.findings, "\n\n".join(map(str, tally.findings.values()))
    assert len(tally.functions) == len(judge.functions(db))
    assert tally.outcomes["00000"] > 240


@pytest.mark.slow
@pytest.mark.parametrize("function", some_of(CANARIES, every=2))
def test_what_is_broken_is_found(db: Db, arena: str, function: str) -> None:
    body, problem = CANARIES[function]
    whole = scalar(db, "select pg_get_functiondef(%s::regproc)", f"rota.{function}")
    head = whole[: whole.index("$function$")]
    db.execute(f"{head}$function$\n#variable_conflict use_column\n{body}\n$function$")

    tally = play(arena, 200, 1, only=f"^{function}$")

    assert problem in {finding.problem for finding in tally.findings.values()}
    smallest = next(f for f in tally.findings.values() if f.problem == problem)
    assert len(smallest.calls) == 1


def test_shrink_takes_away_what_is_not_needed() -> None:
    value = quoted('[{"a": 1e400, "b": [2, {"c": "it\'s"}]}]', "jsonb")

    found = list(smaller_values(value))

    assert quoted('[{"b": [2, {"c": "it\'s"}]}]', "jsonb") in found
    assert quoted('[{"a": 1e400, "b": [{"c": "it\'s"}]}]', "jsonb") in found
    assert quoted('[{"a": 1e400, "b": [2, {}]}]', "jsonb") in found
    assert list(smaller_values("'[1]'::text")) == []


def test_the_server_refuses_no_more_than_known(read_only_db: Db) -> None:
    """Values that never reach rota: no text of jsonb, or of no version so far."""
    refused = {text for text in refused_values(read_only_db) if "repeat(" not in text}

    unknown = {quoted(text, "interval") for text in ("infinity", "-infinity")}
    assert refused - unknown == {
        quoted(text, "jsonb") for text in ('"\\u0000"', '"\\ud800"', '{"a": "\\udfff"}', "NaN")
    }


def test_tick_loop_refuses_or_ends(db: Db) -> None:
    """On its own, where it may commit; what would be a long loop ends by the time-out."""
    known = refused_values(db)
    db.execute("call rota.tick_loop('2 ms', '1 ms')")  # the first call of a session takes long
    db.execute("set statement_timeout = '60ms'")

    found = {
        failure(db, f"call rota.tick_loop({argument} => {span}, {other})")
        for span in hostile.INTERVALS
        if span not in known
        for argument, other in (
            ("duration", "every => '1 ms'"),
            ("every", "duration => '2 ms'"),
        )
    }

    assert found == {"", "57014", "22023 duration", "22023 every"}


def failure(db: Db, statement: str) -> str:
    """Return the SQLSTATE of a statement, and for a bad argument its name."""
    try:
        db.execute(statement)
    except psycopg.Error as error:
        name = f" {str(error).split()[0]}" if error.sqlstate == "22023" else ""
        return f"{error.sqlstate}{name}"
    return ""


@pytest.mark.parametrize("function", ["enqueue", "enqueue_many", "start_pipeline"])
def test_enqueue_documents_what_before_raises_when_it_has_ended(db: Db, function: str) -> None:
    job = running(db)
    value(db, "finish_job", **owner(job))
    with raises("RT003"):
        enqueue(db, blocks=job.job_id)

    comment = scalar(db, "select obj_description(%s::regproc)", f"rota.{function}")

    assert "RT003" in comment


def test_enqueue_many_refuses_a_list_in_quotes(db: Db) -> None:
    with refused("jobs[1].depends_on"):
        rows(db, """select rota.enqueue_many('[{"job_type": "x", "depends_on": "[1]"}]')""")
