"""Waiting for the result of a job."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from rota import AsyncClient, Client
from rota.client.connecting import connect_async

Db = psycopg.Connection[Any]
Connect = Callable[..., Db]


def finish(client: Client, result: Any) -> None:
    (job,) = client.claim_jobs("w")
    client.finish_job(job.job_id, job.lease_token, result=result)


class Counted(Client):
    """A client that counts how often it asks."""

    asked = 0

    def _ask_result(self, job_id: int, active: bool) -> Any:
        self.asked += 1
        return super()._ask_result(job_id, active)


@pytest.mark.parametrize("listen", [True, False])
def test_the_result_comes_when_the_job_ends(
    client: Client, connect: Connect, listen: bool
) -> None:
    job_id = client.enqueue("a").job_id
    waiting = Counted(connect())
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(waiting.wait_for_result(job_id, timeout=20, listen=listen))
    )
    thread.start()
    while waiting.asked < 2:
        time.sleep(0.01)

    finish(client, {"pages": 3})
    thread.join(20)

    assert (found[0].status, found[0].result) == ("succeeded", {"pages": 3})
    assert waiting.asked < 10


def test_a_job_that_has_ended_is_told_at_once(client: Client) -> None:
    job_id = client.enqueue("a").job_id
    finish(client, 7)

    assert client.wait_for_result(job_id, timeout=0).result == 7
    assert client.wait_for_result(job_id, False).is_ended


def test_a_time_out_says_how_far_the_job_is_and_what_explains_that(client: Client) -> None:
    job_id = client.enqueue("a").job_id

    said = f"job {job_id} has not ended within 0 s: it is queued (rota explain {job_id})"
    with pytest.raises(TimeoutError, match=f"^{re.escape(said)}$"):
        client.wait_for_result(job_id, timeout=0)


@pytest.mark.parametrize("autocommit", [True, False])
def test_a_time_out_leaves_nothing_behind(
    client: Client, db: Db, connect: Connect, autocommit: bool
) -> None:
    job_id = client.enqueue("a").job_id
    other = connect(autocommit=autocommit)

    with pytest.raises(TimeoutError, match=f"job {job_id} has not ended within 0.1 s"):
        Client(other).wait_for_result(job_id, timeout=0.1)

    held = "select count(*) from pg_locks where locktype = 'advisory' and pid = %s"
    assert db.execute(held, [other.info.backend_pid]).fetchone() == (0,)
    assert other.execute("select pg_listening_channels()").fetchall() == []


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_an_interrupt_leaves_nothing_behind(
    client: Client, db: Db, connect: Connect, asked: int
) -> None:
    job_id = client.enqueue("a").job_id

    class Interrupted(Counted):
        def _ask_result(self, job_id: int, active: bool) -> Any:
            answer = super()._ask_result(job_id, active)
            if self.asked == asked:
                raise KeyboardInterrupt
            return answer

    waiting = connect(autocommit=True)
    with pytest.raises(KeyboardInterrupt):
        Interrupted(waiting).wait_for_result(job_id)

    held = "select count(*) from pg_locks where locktype = 'advisory' and pid = %s"
    assert db.execute(held, [waiting.info.backend_pid]).fetchone() == (0,)
    assert waiting.execute("select pg_listening_channels()").fetchall() == []


def test_a_time_that_is_no_number_of_seconds_is_refused_by_its_name(client: Client) -> None:
    job_id = client.enqueue("a").job_id

    with pytest.raises(TypeError, match=r"^timeout must be a number of seconds, got dat"):
        client.wait_for_result(job_id, timeout=timedelta(seconds=1))  # type: ignore[arg-type]


def test_an_async_client_waits_too(client: Client, dsn: str) -> None:
    job_id = client.enqueue("a").job_id

    async def play() -> Any:
        async with await connect_async(dsn, "test") as connection:
            waiting = asyncio.create_task(
                AsyncClient(connection).wait_for_result(job_id, timeout=20)
            )
            await asyncio.sleep(0.05)
            await asyncio.to_thread(finish, client, "done")
            return await waiting

    assert asyncio.run(play()).result == "done"
