"""What is written down of real calls, and that a real load keeps every promise."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from faults.history import random_callers
from faults.history.checker import check, summary
from faults.history.dump import dump
from faults.history.reading import Operation, Reader
from faults.history.recording import record, stop_recording
from rota import AsyncClient, Client, JobNotFoundError

Connect = Callable[..., psycopg.Connection[Any]]
Read = Callable[[], list[Operation]]


@pytest.fixture
def operations(tmp_path: Path) -> Iterator[Read]:
    """Record this test; the function ends that, and returns what was recorded."""
    record(tmp_path)

    def read() -> list[Operation]:
        stop_recording()
        return list(Reader(tmp_path).operations())

    yield read
    stop_recording()


def outcomes(found: list[Operation]) -> Counter[str]:
    return Counter(operation.outcome for operation in found)


def test_call_is_recorded_with_its_answer_and_without_the_payload(
    db: psycopg.Connection[Any], operations: Read, tmp_path: Path
) -> None:
    job = Client(db).enqueue("t", {"secret": "xyzzy"}, idempotency_key="k")
    claimed = Client(db).claim_jobs("w")
    Client(db).finish_job(job.job_id, claimed[0].lease_token, {"secret": "xyzzy"})

    enqueue, claim, finish = operations()

    assert enqueue.arguments["jobs"] == [{"job_type": "t", "idempotency_key": "k"}]
    assert enqueue.rows == [{"ordinal": 1, "job_id": job.job_id, "is_new": True}]
    assert claim.rows is not None
    assert claim.rows[0]["lease_token"] == claimed[0].lease_token
    assert claim.rows[0]["locked_for"] == 60
    assert finish.rows == ["finished"]
    assert enqueue.began < (enqueue.ended or 0) < claim.began < finish.began
    assert "xyzzy" not in "".join(path.read_text() for path in tmp_path.iterdir())


def test_call_of_the_async_client_is_recorded(dsn: str, operations: Read) -> None:
    async def call() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            await AsyncClient(connection).enqueue("t")
            await connection.rollback()
            await AsyncClient(connection).enqueue("t")

    asyncio.run(call())

    assert [operation.outcome for operation in operations()] == ["undone", "ok"]


def test_refused_call_is_recorded_with_its_sqlstate(
    db: psycopg.Connection[Any], operations: Read
) -> None:
    with pytest.raises(JobNotFoundError):
        Client(db).finish_job(4711, 1)

    (refused,) = operations()

    assert (refused.outcome, refused.error) == ("refused", "RT001")


def test_call_in_a_transaction_is_what_became_of_the_transaction(
    db: psycopg.Connection[Any], operations: Read
) -> None:
    client = Client(db)

    def enqueue_and_undo() -> None:
        with db.transaction():
            client.enqueue("undone")
            raise psycopg.Rollback

    with db.transaction():
        client.enqueue("kept")
        enqueue_and_undo()
        client.enqueue("kept")
    enqueue_and_undo()

    told = {(o.arguments["jobs"][0]["job_type"], o.outcome) for o in operations()}

    assert told == {("kept", "ok"), ("undone", "undone")}


def test_call_in_a_transaction_ends_with_its_commit(connect: Connect, operations: Read) -> None:
    connection = connect(autocommit=False)
    Client(connection).enqueue("first")
    Client(connection).enqueue("second")
    connection.commit()

    first, second = operations()

    assert first.ended == second.ended
    assert (first.ended or 0) > second.began


def test_commit_of_a_failed_transaction_undoes_it(connect: Connect, operations: Read) -> None:
    connection = connect(autocommit=False)
    Client(connection).enqueue("t")
    with pytest.raises(JobNotFoundError):
        Client(connection).finish_job(4711, 1)
    connection.commit()

    assert outcomes(operations()) == {"undone": 1, "refused": 1}


def test_transaction_without_a_commit_never_was(connect: Connect, operations: Read) -> None:
    connection = connect(autocommit=False)
    Client(connection).enqueue("t")
    connection.close()

    assert outcomes(operations()) == {"undone": 1}


@pytest.mark.own_session
def test_call_whose_connection_breaks_is_unknown(
    db: psycopg.Connection[Any], connect: Connect, operations: Read
) -> None:
    connection = connect()
    db.execute("select pg_terminate_backend(%s, 5000)", (connection.info.backend_pid,))
    with pytest.raises(psycopg.OperationalError):
        Client(connection).enqueue("t")

    assert outcomes(operations()) == {"unknown": 1}


@pytest.mark.own_session
def test_commit_whose_connection_breaks_is_unknown(
    db: psycopg.Connection[Any], connect: Connect, operations: Read
) -> None:
    connection = connect(autocommit=False)
    Client(connection).enqueue("t")
    db.execute("select pg_terminate_backend(%s, 5000)", (connection.info.backend_pid,))
    with pytest.raises(psycopg.OperationalError):
        connection.commit()

    assert outcomes(operations()) == {"unknown": 1}


def test_what_threads_do_at_random_keeps_every_promise(dsn: str, tmp_path: Path) -> None:
    random_callers.play(dsn, tmp_path)

    context = check(tmp_path)

    print("\n".join(summary(context)))  # noqa: T201
    assert [f"{each}\n{each.story}" for each in context.violations] == []
    assert context.is_drained
    assert context.counts["operations"] > 500


@pytest.mark.own_session
def test_statistics_of_a_history_that_ended_too_early_are_held_against_a_recount(
    db: psycopg.Connection[Any], dsn: str, operations: Read, tmp_path: Path
) -> None:
    """Also where the table has so many pages that they are counted in rounds."""
    client = Client(db)
    for _ in range(5):
        client.enqueue_many([{"job_type": "t", "payload": {"text": "x" * 1500}}] * 500)
    client.tick()
    for job in client.claim_jobs("w", max_jobs=100)[:60]:
        client.finish_job(job.job_id, job.lease_token)
    operations()

    dump(dsn, tmp_path, is_drained=False)
    context = check(tmp_path)
    db.execute("update rota.job_stats set total = total + 1")
    dump(dsn, tmp_path, is_drained=False)
    wrong = check(tmp_path)

    assert context.looked["I11"] > 0
    assert [str(each) for each in context.violations] == []
    assert {each.promise for each in wrong.violations} == {"I11"}
