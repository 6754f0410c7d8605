"""A clock that tests set: they put a function of their own in the place of `rota.now()`."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, LiteralString

import psycopg


def now_is(body: LiteralString) -> LiteralString:
    """Return the statement that makes `rota.now()` return what *body* says."""
    return f"""
        create or replace function rota.now()
            returns timestamptz
            language plpgsql
            stable
            security definer
            set search_path = pg_catalog, pg_temp
        as $$
        begin
            return {body};
        end;
        $$;
        """


class Clock:
    """The clock of one test's database: real until `set` or `advance` stops it."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        connection.execute(
            """
            create schema rota_test;
            grant usage on schema rota_test to public;
            create table rota_test.clock (stopped_at timestamptz not null);
            grant select on rota_test.clock to public;
            """
        )
        connection.execute(
            now_is(
                "coalesce((select c.stopped_at from rota_test.clock as c), clock_timestamp())"
            )
        )

    def now(self) -> datetime:
        row = self._connection.execute("select rota.now()").fetchone()
        assert row is not None
        return row[0]  # type: ignore[no-any-return]

    def set(self, moment: datetime | str) -> datetime:
        """Stop the clock at *moment*, for every session of this database."""
        with self._connection.transaction():
            self._connection.execute("delete from rota_test.clock")
            self._connection.execute("insert into rota_test.clock values (%s)", (moment,))
        return self.now()

    def advance(self, interval: timedelta | str) -> datetime:
        """Stop the clock that much later than it shows now."""
        row = self._connection.execute(
            "select rota.now() + cast(%s as interval)", (interval,)
        ).fetchone()
        assert row is not None
        return self.set(row[0])
