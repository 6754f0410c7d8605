"""What jobs carry is told to those who may read it, and to nobody by the way.

A secret is in every payload, result, error and progress, and another in every key.  Good calls
and bad ones are made with them, and then the log of the server is read at its defaults, and the
texts of the errors, the messages of channels, and what others see of a session.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from security.good_calls import CALLS
from security.leaks import BAD_CALLS, DEFAULTS, KEY, SECRET, ServerLog, mistaken
from sql.helpers import call, enqueue, scalar

pytestmark = pytest.mark.own_session

Db = psycopg.Connection[Any]


def texts(error: psycopg.Error) -> str:
    told = error.diag
    parts = [told.message_primary, told.message_detail, told.message_hint, told.context]
    return " ".join(part for part in [str(error), *parts] if part)


def attempts(scene: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield what is wrong, a call, and its arguments."""
    for name, query in BAD_CALLS.items():
        yield name, query, scene
    for mistake, arguments in mistaken(scene).items():
        changed = {f"%({word})s" for word in scene if arguments[word] is not scene[word]}
        for name, query in CALLS.items():
            if any(word in query for word in changed):
                yield f"{name}, {mistake}", query, arguments


def errors_of(db: Db, scene: dict[str, Any]) -> Iterator[tuple[str, psycopg.Error]]:
    """Make every call with every mistake; yield what each is told."""
    for wrong, query, arguments in attempts(scene):
        try:
            with db.transaction(force_rollback=True):
                db.execute(query, arguments)
        except psycopg.Error as error:
            yield wrong, error


def test_the_log_is_that_of_the_defaults_and_can_be_read(loud: Db, log: ServerLog) -> None:
    assert {name: scalar(loud, f"show {name}") for name in DEFAULTS} == DEFAULTS

    with pytest.raises(psycopg.errors.RaiseException):
        loud.execute(f"do $$ begin raise exception '{SECRET}'; end $$")

    assert len(log.lines(SECRET)) == 2  # the error and its statement


def test_no_payload_is_in_an_error_or_in_the_log(
    loud: Db, secrets: dict[str, Any], log: ServerLog
) -> None:
    told = {where: texts(error) for where, error in errors_of(loud, secrets)}

    assert len(told) > 100
    assert [where for where, text in told.items() if SECRET in text] == []
    assert log.lines(SECRET) == []
    assert len(log.lines("ERROR:  ")) >= len(told)


def test_errors_are_ours_and_never_of_a_constraint(loud: Db, secrets: dict[str, Any]) -> None:
    """The detail of a violated constraint shows the whole row."""
    codes = {where: error.sqlstate for where, error in errors_of(loud, secrets)}

    ours = {"22023", "2D000", "0A000"}
    assert {
        w: c for w, c in codes.items() if c not in ours and not str(c).startswith("RT")
    } == {}


def test_what_maintenance_cannot_do_is_told_without_the_job(
    loud: Db, db: Db, secrets: dict[str, Any], log: ServerLog
) -> None:
    """The warnings of tick() hold a message, and never its detail."""
    db.execute(
        "create function public.refuse() returns trigger language plpgsql as"
        " $$ begin raise check_violation using message = 'no', detail = new::text; end $$;"
        "create trigger refuse before update on rota.jobs"
        " for each row execute function public.refuse()"
    )
    call(loud, "set_queue", queue="q", lease="1 millisecond")
    db.execute("alter table rota.jobs disable trigger refuse")
    db.execute("update rota.jobs set locked_until = '2020-01-01' where status = 'running'")
    db.execute("alter table rota.jobs enable always trigger refuse")

    call(loud, "tick")

    assert log.lines("WARNING:  ") != []
    assert log.lines(SECRET) == []


def test_messages_of_channels_tell_nothing(
    loud: Db, connect: Callable[..., Db], secrets: dict[str, Any]
) -> None:
    """Neither the channel nor the message has more than a number made of the queue's name."""
    worker = connect()
    (waiting,) = call(worker, "wait_for_jobs", queues=["canary-queue"])
    for channel in waiting.channels:
        worker.execute(f"listen {channel}")
    heard: list[psycopg.Notify] = []

    payload = {"secret": SECRET}
    keys = {"idempotency_key": KEY, "ordering_key": KEY + "o", "limit_key": KEY}
    enqueue(loud, "t", payload=payload, queue="canary-queue", **keys)
    many = [{"job_type": "t", "queue": "canary-queue", "payload": payload}]
    call(loud, "enqueue_many", jobs=Jsonb(many))
    heard += worker.notifies(timeout=5, stop_after=1)

    assert heard
    for notify in heard:
        assert re.fullmatch(r"rota_([0-9a-f]{1,8}|maintenance)_[0-9]{1,2}", notify.channel)
        assert notify.payload == ""
