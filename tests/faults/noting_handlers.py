"""The handlers of the workers that are killed, frozen and stopped.

Each first writes down that it runs, in a transaction of its own that is committed before
anything else happens; so the table `faults.executions` knows of every attempt that began.
"""

import hashlib
import os
import signal
import threading
import time

import psycopg

import rota

registry = rota.Registry()
_connections: list[psycopg.Connection] = []
_opening = threading.Lock()

TABLES = """
create schema faults;
create table faults.executions (
    job_id bigint, lease_token bigint, attempt integer, worker integer,
    began_at timestamptz default clock_timestamp()
);
create index on faults.executions (job_id);
create table faults.effects (job_id bigint, lease_token bigint);
create table faults.gate (is_open boolean);
insert into faults.gate values (false);
"""


def note(job: rota.Job) -> psycopg.Connection:
    """Write down that the job runs; return a connection for more."""
    with _opening:
        if not _connections:
            # A pooler gives it another session each time, which has prepared nothing.
            connection = psycopg.connect(
                os.environ["DATABASE_URL"], autocommit=True, prepare_threshold=None
            )
            _connections.append(connection)
    _connections[0].execute(
        "insert into faults.executions values (%s, %s, %s, %s)",
        (job.job_id, job.lease_token, job.attempt, os.getpid()),
    )
    return _connections[0]


def is_unlucky(job: rota.Job, percent: int) -> bool:
    """Roll the dice of this seed, job and attempt: always the same ones."""
    key = f"{job.payload.get('seed')}:{job.job_id}:{job.attempt}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) % 100 < percent


@registry.handler("plain")
def plain(job: rota.Job) -> None:
    """Fail for so many per cent of the attempts."""
    note(job)
    time.sleep(job.payload.get("seconds", 0))
    if is_unlucky(job, job.payload["failing"]):
        raise RuntimeError("bad luck")


@registry.handler("effect")
def effect(job: rota.Job) -> None:
    """The same, with a write in the transaction that ends the job."""
    note(job)
    with job.transaction() as connection:
        connection.execute(
            "insert into faults.effects values (%s, %s)", (job.job_id, job.lease_token)
        )
        if is_unlucky(job, job.payload["failing"]):
            raise RuntimeError("bad luck")


@registry.handler("hopeless")
def hopeless(job: rota.Job) -> None:
    """Fail always."""
    note(job)
    raise RuntimeError("no hope")


@registry.handler("killer")
def killer(job: rota.Job) -> None:
    """Take the whole worker along."""
    note(job)
    os.kill(os.getpid(), signal.SIGKILL)


@registry.handler("hold")
def hold(job: rota.Job) -> None:
    """Wait for the gate, but only in the first attempt."""
    connection = note(job)
    while job.attempt == 1:
        if connection.execute("select is_open from faults.gate").fetchone()[0]:
            return
        time.sleep(0.02)
