"""How the tests of the stored functions call them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb

Db = psycopg.Connection[Any]

WORKER = {"worker": "w"}


def call(db: Db, function: str, /, **arguments: Any) -> list[Any]:
    """Call a function of rota by its argument names; return its rows."""
    names = [
        sql.SQL("{} => {}").format(sql.Identifier(a), sql.Placeholder(a)) for a in arguments
    ]
    query = sql.SQL("select * from rota.{}({})").format(
        sql.Identifier(function), sql.SQL(", ").join(names)
    )
    values = {k: Jsonb(v) if isinstance(v, dict) else v for k, v in arguments.items()}
    with db.cursor(row_factory=namedtuple_row) as cursor:
        # What has no values goes in one message, so that a tick is alone in its transaction.
        prepare = None if values else False
        return cursor.execute(query, values or None, prepare=prepare).fetchall()


def one(db: Db, function: str, /, **arguments: Any) -> Any:
    """Call a function that returns one row; return the row."""
    (row,) = call(db, function, **arguments)
    return row


def value(db: Db, function: str, /, **arguments: Any) -> Any:
    """Call a function that returns one value; return the value."""
    return one(db, function, **arguments)[0]


def rows(db: Db, query: str, *parameters: Any) -> list[Any]:
    """Run a query; return its rows."""
    with db.cursor(row_factory=namedtuple_row) as cursor:
        return cursor.execute(query, parameters or None).fetchall()


def scalar(db: Db, query: str, *parameters: Any) -> Any:
    """Run a query of one value; return the value."""
    ((found,),) = rows(db, query, *parameters)
    return found


def grant(db: Db, access: str, role: str) -> None:
    """Give a role what those with such an access need."""
    for (statement,) in call(db, "grant_statements", access=access, role=role):
        db.execute(statement)


def enqueue(db: Db, job_type: str | None = "x", **arguments: Any) -> int:
    """Enqueue a job; return its id."""
    return value(db, "enqueue", job_type=job_type, **arguments)  # type: ignore[no-any-return]


def claim(db: Db, **arguments: Any) -> list[Any]:
    """Claim jobs, one from the default queue unless told otherwise."""
    return call(db, "claim_jobs", **{**WORKER, **arguments})


def running(db: Db, **arguments: Any) -> Any:
    """Enqueue a job and claim it; return what the claim said."""
    job_id = enqueue(db, **arguments)
    (job,) = claim(db, queues=[arguments.get("queue", "default")])
    if job.job_id != job_id:
        raise AssertionError(f"claimed job {job.job_id} instead of {job_id}")
    return job


def settle(db: Db) -> None:
    """Tick until there is nothing to do."""
    while one(db, "tick").has_more:
        pass


def poison(
    db: Db, job_id: int, by: str = "raise exception 'poison'", what: str = "update"
) -> None:
    """Let a trigger refuse every change of a job."""
    db.execute(
        f"""
        create function public.poison() returns trigger language plpgsql as $$
        begin
            if old.id = {job_id} then {by}; end if;
            return coalesce(new, old);
        end $$;
        create trigger poison before {what} on rota.jobs
            for each row execute function public.poison();
    """.encode()
    )


def swallow(db: Db, table: str, condition: str = "true") -> None:
    """Let a trigger keep new rows out of a table, without an error."""
    db.execute(
        f"""
        create function swallow() returns trigger language plpgsql as 'begin return null; end';
        create trigger swallow before insert on rota.{table} for each row
            when ({condition}) execute function swallow();
        set statement_timeout = '20s';
    """.encode()
    )


def last_tick(db: Db) -> Any:
    """Return when a tick was recorded last: the tests of a lag stop their clock there."""
    return scalar(db, "select done_at from rota.maintenance where task = 'tick'")


def pending(db: Db) -> list[tuple[str, str]]:
    """Return the kind and the subject of each pending check."""
    return [
        tuple(row)
        for row in rows(db, "select kind, subject from rota.pending_checks order by id")
    ]


def owner(job: Any) -> dict[str, int]:
    """Return the arguments by which a worker speaks for its job."""
    return {"job_id": job.job_id, "lease_token": job.lease_token}


def owners(*jobs: Any) -> dict[str, list[int]]:
    """Return the arguments by which a worker speaks for several jobs."""
    return {
        "job_ids": [job.job_id for job in jobs],
        "lease_tokens": [job.lease_token for job in jobs],
    }


def nth(db: Db, ordinal: int) -> int:
    """Return the id of the job that was the first, second, ... of its database."""
    query = "select seqstart + seqincrement * %s from pg_sequence"
    query += " where seqrelid = 'rota.jobs_id_seq'::regclass"
    return scalar(db, query, ordinal - 1)  # type: ignore[no-any-return]


def run(db: Db, job_id: int) -> Any:
    """Return the one row that job_runs has of a job."""
    (row,) = rows(db, "select * from rota.job_runs where id = %s", job_id)
    return row


def everything(db: Db) -> list[Any]:
    """Return every row of the tables that outcomes are written to."""
    return [
        rows(db, "select * from rota.jobs order by id"),
        rows(db, "select * from rota.finished_jobs order by id"),
        rows(db, "select * from rota.job_errors order by job_id, lease_token"),
    ]


@contextmanager
def raises(sqlstate: str, name: str = "") -> Iterator[None]:
    """Expect this error; its message begins with *name* as a word."""
    with pytest.raises(psycopg.Error) as caught:
        yield
    message = caught.value.diag.message_primary or ""
    if caught.value.sqlstate != sqlstate or (name and not message.startswith(f"{name} ")):
        raise AssertionError(
            f"expected {sqlstate} {name}, got {caught.value.sqlstate} {message}"
        )


@contextmanager
def refused(name: str) -> Iterator[None]:
    """Expect the refusal of the argument of this name."""
    with raises("22023", name):
        yield
