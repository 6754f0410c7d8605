"""What type checkers say of uses: they must refuse the lines that end in ``# wrong``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rota

PYRIGHT_SETTINGS = '{"pythonVersion": "3.11", "typeCheckingMode": "standard"}'

USES = """
from collections.abc import Iterator
from typing import TypedDict

import rota

registry = rota.Registry()

class Answer(TypedDict):
    sent: int

@registry.handler("plain")
def plain(job: rota.Job) -> int:
    with job.effect("mail", "7", if_unknown="never"):  # wrong
        pass
    return job.attempt

@registry.handler("in_loop")
async def in_loop(job: rota.AsyncJob) -> None:
    await job.set_progress(50)
    async with job.transaction() as connection:
        await connection.execute("select 1")
    async with job.effect("mail", "7", if_unknown="again"):
        pass
    async with job.effect("mail", "7", if_unknown="never"):  # wrong
        pass

@registry.handler("either")
def either(job: rota.Job | rota.AsyncJob) -> None: ...

registry.add("nothing", lambda job: None)

@registry.handler("number")  # wrong
def number(job: int) -> None: ...

@registry.handler("async_with_job")  # wrong
async def async_with_job(job: rota.Job) -> None: ...

@registry.handler("plain_with_async_job")  # wrong
def plain_with_async_job(job: rota.AsyncJob) -> None: ...

@registry.handler("async_number")  # wrong
async def async_number(job: int) -> None: ...

@registry.handler("generator")  # wrong
def generator(job: rota.Job) -> Iterator[int]:
    yield 1

@registry.handler("second_name")
@registry.handler("first_name")
async def of_two_names(job: rota.Job | rota.AsyncJob) -> dict[str, int]:
    return {}

@registry.handler("returns_its_error")
def returns_its_error(job: rota.Job) -> rota.RotaError | list[str]:
    return rota.RotaError("no")

class Sender:
    async def send(self, job: rota.AsyncJob) -> Answer:
        return {"sent": 1}

    def count(self, job: rota.Job) -> Answer:
        return {"sent": 1}

registry.handler("method")(Sender().send)
registry.handler("plain_method")(Sender().count)

@registry.handler(plain)  # wrong
def bare(job: rota.Job) -> None: ...

@registry.handler("forgets")
async def forgets(job: rota.AsyncJob) -> None:
    job.set_progress(50)  # wrong

def enqueue(client: rota.Client) -> int:
    client.enqueue("plain", {"n": 1}, queue="mail")
    client.enqueue("plain", {"n": 1}, "mail")  # wrong
    client.enqueue("plain", priorty=1)  # wrong
    return client.enqueue("plain").job_id

rota.Worker("", registry, lease=60).run()
rota.Worker("", {"plain": plain}).run()  # wrong
"""


TASKS = """
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ParamSpec, TypeVar

import psycopg
import rota

registry = rota.Registry()

@dataclass
class Order:
    order_id: int

@registry.task(queue="mail", max_attempts=5, give_up_on=ValueError)
def send_receipt(order_id: int, *, queue: str = "", copies: int = 1) -> int:
    return order_id

@registry.task("of_job", aliases=["with_job"], retry_on=(OSError, TimeoutError))
def of_job(job: rota.Job, order_id: int) -> None: ...

@registry.task()
async def ship(job: rota.AsyncJob, order: Order, at: datetime) -> str:
    await job.set_progress(50)
    return str(order.order_id)

@registry.task()
async def fetch(order_id: int) -> int:
    return order_id

P = ParamSpec("P")
R = TypeVar("R")

def timed(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    return function

@registry.task()
@timed
async def decorated(job: rota.AsyncJob, order_id: int) -> int:
    return order_id

@registry.handler("decorated_handler")
@timed
async def decorated_handler(job: rota.AsyncJob) -> None: ...

@registry.handler("wrong_decorated_handler")  # wrong
@timed
async def wrong_decorated_handler(job: rota.Job) -> None: ...

@registry.task()
async def wrong_job(job: rota.Job, order_id: int) -> None: ...

@registry.task()
def wrong_async_job(job: rota.AsyncJob, order_id: int) -> None: ...

@registry.task(quue="mail")  # wrong
def option(order_id: int) -> None: ...

@registry.task(queue=7)  # wrong
def option_type(order_id: int) -> None: ...

@registry.schedule("@daily", time_zone="UTC", payload={"order_id": 7})
@registry.task()
def scheduled(order_id: int) -> int:
    return order_id

@registry.schedule("@daily", time_zne="UTC")  # wrong
@registry.task()
def zoned(order_id: int = 1) -> None: ...

@registry.schedule("@daily", overlap="never")  # wrong
@registry.task()
def overlapping(order_id: int = 1) -> None: ...

@registry.task  # wrong
def bare(order_id: int) -> None: ...

def produce(client: rota.Client, connection: psycopg.Connection[Any]) -> int:
    send_receipt.enqueue(client, order_id=7)
    send_receipt.enqueue(connection, 7, copies=2, queue="a parameter")
    of_job.enqueue(client, order_id=7)
    ship.enqueue(client, Order(1), datetime.now())
    decorated.enqueue(client, order_id=7)
    decorated.enqueue(client, order_id="7")  # wrong
    send_receipt.enqueue(client, order=7)  # wrong
    send_receipt.enqueue(client, order_id="7")  # wrong
    send_receipt.enqueue(client)  # wrong
    send_receipt.enqueue("postgresql://", order_id=7)  # wrong
    of_job.enqueue(client, order_id="7")  # wrong
    of_job.enqueue(client, job=1, order_id=7)  # wrong
    ship.enqueue(client, Order(1), "now")  # wrong
    wrong_job.enqueue(client, order_id=7)  # wrong
    wrong_async_job.enqueue(client, order_id=7)  # wrong
    soon = send_receipt.options(queue="slow", delay=timedelta(seconds=5))
    soon.enqueue(client, order_id=7)
    soon.enqueue(client, order_id="7")  # wrong
    send_receipt.options(priorty=1)  # wrong
    send_receipt.options(delay=5)  # wrong
    send_receipt.options(on_conflict="rerun", if_parent_dead="wait")
    send_receipt.options(on_conflict="again")  # wrong
    send_receipt.options(if_parent_dead="skip")  # wrong
    send_receipt.enqueue_many(client, [send_receipt.job(order_id=n) for n in range(3)])
    send_receipt.enqueue_many(client, [send_receipt.job(order=n) for n in range(3)])  # wrong
    send_receipt("7")  # wrong
    of_job(7)  # wrong
    return scheduled(7) + send_receipt.enqueue(client, 7).job_id

async def produce_async(client: rota.AsyncClient, job: rota.AsyncJob) -> int:
    await ship(job, Order(1), datetime.now())
    await fetch.enqueue(client, order_id="7")  # wrong
    fetch.enqueue(client, 7).job_id  # wrong
    await fetch.enqueue_many(client, [fetch.job(1)])
    return (await fetch.enqueue(client, 7)).job_id + await fetch(7)
"""


CONNECTIONS = """
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import psycopg
import rota
from django.db import connection, connections  # type: ignore[import-untyped]
from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import (
    AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
)
from sqlalchemy.orm import Session, scoped_session

registry = rota.Registry()

@registry.task()
def count_to(n: int) -> None: ...

def produce(
    session: Session,
    scoped: scoped_session[Session],
    alchemy: Connection,
    plain: psycopg.Connection[Any],
    engine: Engine,
    in_loop: AsyncSession,
) -> int:
    count_to.enqueue(scoped, 1)
    count_to.enqueue(connection, 1)
    count_to.enqueue(connections["default"], 1)
    count_to.enqueue(alchemy, "1")  # wrong
    count_to.enqueue(engine, 1)  # wrong
    rota.Client(engine)  # wrong
    rota.Client(in_loop)  # wrong
    rota.Client("postgresql://")  # wrong
    rota.AsyncClient(session)  # wrong
    rota.AsyncClient(plain)  # wrong
    count_to.enqueue_many(plain, [count_to.job(1)])[0].is_new
    rota.Client(alchemy).enqueue("a")
    return count_to.enqueue(session, 1).job_id + rota.Client(session).enqueue("a").job_id

async def produce_in_loop(
    session: AsyncSession,
    scoped: async_scoped_session[AsyncSession],
    alchemy: AsyncConnection,
    plain: psycopg.AsyncConnection[Any],
    engine: AsyncEngine,
) -> int:
    await count_to.enqueue(scoped, 1)
    await count_to.enqueue(alchemy, 1)
    await count_to.enqueue(plain, "1")  # wrong
    count_to.enqueue(session, 1).job_id  # wrong
    await count_to.enqueue(engine, 1)  # wrong
    rota.AsyncClient(engine)  # wrong
    await rota.AsyncClient(await asyncpg.connect()).enqueue("a")
    await count_to.enqueue_many(session, [count_to.job(1)])
    return (await count_to.enqueue(plain, 1)).job_id
"""


@pytest.mark.slow
def test_mypy_refuses_wrong_uses_and_takes_right_ones(tmp_path: Path) -> None:
    uses = {"handlers": USES, "tasks": TASKS, "connections": CONNECTIONS}

    assert_refused(uses, tmp_path, "mypy", "--strict", "--cache-dir", ".")


@pytest.mark.slow
def test_pyright_refuses_wrong_uses_and_takes_right_ones(tmp_path: Path) -> None:
    (tmp_path / "pyrightconfig.json").write_text(PYRIGHT_SETTINGS)
    uses = {"handlers": USES, "tasks": TASKS, "connections": CONNECTIONS}

    assert_refused(uses, tmp_path, "pyright", "--pythonpath", sys.executable)


def assert_refused(uses: dict[str, str], directory: Path, *checker: str) -> None:
    """Run a type checker once on all files: it must refuse the wrong lines and no other."""
    for name, text in uses.items():
        (directory / f"{name}.py").write_text(text)
    source = str(Path(rota.__file__).parents[1])

    done = subprocess.run(
        [sys.executable, "-m", *checker, *(f"{name}.py" for name in uses)],
        cwd=directory,
        env={**os.environ, "MYPYPATH": source, "PYTHONPATH": path_with(source)},
        check=False,
        capture_output=True,
        text=True,
    )

    found = re.findall(r"(\w+)\.py:(\d+):.*\berror\b", done.stdout)
    assert {(name, int(line)) for name, line in found} == {
        (name, number)
        for name, text in uses.items()
        for number, line in enumerate(text.splitlines(), 1)
        if line.endswith("# wrong")
    }, done.stdout


def path_with(source: str) -> str:
    return os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
