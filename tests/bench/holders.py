"""What keeps vacuum from its work: old snapshots of every kind that is met in practice.

Each is a context: inside it no row that dies can be removed.  A replication slot does so when
a standby that sent its feedback through it is gone: the slot keeps the standby's oldest
transaction for ever.  A logical slot holds back the catalogs only, and the rows not at all.
"""

from __future__ import annotations

import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import psycopg
from psycopg.pq import ExecStatus, PGconn

from bench.measured_server import BenchServer, Db, one

BIG = """
    create table if not exists bare.big as
    select n, repeat(md5(n::text), 30) as filler from generate_series(1, 50000) as g (n)
"""
Holder = Callable[[BenchServer, str], AbstractContextManager[None]]


@contextmanager
def nobody(server: BenchServer, dsn: str) -> Iterator[None]:
    """Hold nothing."""
    yield


@contextmanager
def snapshot(server: BenchServer, dsn: str) -> Iterator[None]:
    """Idle in a transaction that has read something at REPEATABLE READ."""
    with psycopg.connect(dsn) as db:
        db.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        db.execute("select count(*) from rota.queues")
        yield
        db.rollback()


@contextmanager
def writer(server: BenchServer, dsn: str) -> Iterator[None]:
    """Idle in a transaction that has written something elsewhere."""
    with psycopg.connect(dsn) as db:
        db.execute("create table bare.unfinished (n integer)")
        yield
        db.rollback()


@contextmanager
def dump(server: BenchServer, dsn: str) -> Iterator[None]:
    """Run pg_dump of another, big table into a pipe that nobody reads."""
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute(BIG)
        command = [server.program("pg_dump"), "-t", "bare.big", dsn]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            _wait(
                lambda: bool(
                    one(
                        db,
                        "select count(*) from pg_stat_activity"
                        " where application_name = 'pg_dump' and query ilike 'copy%'"
                        " and backend_xmin is not null and datname = current_database()",
                    )
                ),
                "pg_dump did not come to its copy",
            )
            yield
            if process.poll() is not None:
                raise RuntimeError("pg_dump ended before it should")
        finally:
            process.kill()
            process.communicate()


@contextmanager
def slot(server: BenchServer, dsn: str) -> Iterator[None]:
    """Leave behind the slot of a standby that sent feedback once and was never seen again."""
    name = "abandoned"
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute("select pg_create_physical_replication_slot(%s, true)", (name,))
        try:
            _send_feedback(db, dsn, name)
            yield
        finally:
            _wait(
                lambda: (
                    not one(
                        db,
                        "select active from pg_replication_slots where slot_name = %s",
                        (name,),
                    )
                ),
                "the slot is still in use",
            )
            db.execute("select pg_drop_replication_slot(%s)", (name,))


def is_held(db: Db) -> bool:
    """Whether a row that dies now cannot be removed: try it with a table of one row."""
    db.execute("drop table if exists bare.probe")
    db.execute("create table bare.probe as select 1 as n")
    db.execute("delete from bare.probe")
    for _ in range(5):  # whoever is at work holds it for a moment
        db.execute("vacuum bare.probe")
        if one(db, "select pg_relation_size('bare.probe')") == 0:
            return False
        time.sleep(0.1)
    return True


def _send_feedback(db: Db, dsn: str, name: str) -> None:
    xid = int(one(db, "select pg_current_xact_id()::text"))
    lsn = one(db, "select pg_current_wal_flush_lsn()::text")
    standby = PGconn.connect(f"{dsn}?replication=true".encode())
    try:
        answer = standby.exec_(f"START_REPLICATION SLOT {name} PHYSICAL {lsn}".encode())
        if answer.status != ExecStatus.COPY_BOTH:
            raise RuntimeError(f"no replication: {standby.get_error_message()}")
        low, epoch = xid & 0xFFFFFFFF, xid >> 32
        standby.put_copy_data(struct.pack("!cqIIII", b"h", 0, low, epoch, 0, 0))
        standby.flush()
        _wait(
            lambda: bool(
                one(
                    db,
                    "select xmin is not null from pg_replication_slots where slot_name = %s",
                    (name,),
                )
            ),
            "the slot got no xmin",
        )
    finally:
        standby.finish()


def _wait(is_so: Callable[[], bool], problem: str) -> None:
    until = time.monotonic() + 15
    while not is_so():
        if time.monotonic() > until:
            raise RuntimeError(problem)
        time.sleep(0.02)
