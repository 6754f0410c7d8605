"""A database in a state of a game, and two sessions in it.

Each state is made once and copied.  To bring it back is to write the rows of all tables anew,
which takes some milliseconds; the sessions forget what they knew, and the clock stands still.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.rows import dict_row

from invariants import BROKEN
from races.game import Game
from races.harness import Session
from races.outcome import Outcome, comparable
from support.clock import Clock

START, NOW = "2026-03-01 11:00:00+00", "2026-03-01 12:00:00+00"
NOBODY = 999_999_999
PLACES = ("", "second_", "third_", "fourth_")
DOCUMENTED = """
    select proname, obj_description(oid, 'pg_proc') from pg_proc
    where pronamespace = 'rota'::regnamespace and proname !~ '^_'
"""
STATE = re.compile(r"\b(?:RT\d{3}|\d[0-9A-Z]\d{3})\b")
# What a tick swallows and tries again later; everything else that it warns of is a problem.
# What counts of a table, where that is not all that it says.
ROWS: dict[str, str] = {
    **dict.fromkeys(
        ("finished_jobs", "job_errors", "stage_runs", "restored_ends"),
        "to_jsonb(t) - 'ended_by'",
    ),
    # A job that an act makes has whatever id is the next.
    "audit_log": "to_jsonb(t) - '{id,before,after}'::text[]"
    " - case t.act when 'run_schedule_now' then 'job_ids' else '' end",
    "queue_moves": "to_jsonb(t) - 'move_id'",
    **dict.fromkeys(("breakers", "breaker_states"), "to_jsonb(t) - 'tag'"),
    "limits_to_count": "to_jsonb(t) - 'asked_xid'",
    # Which job made it unique; a run that follows late is that of another.
    "idempotency_keys": "to_jsonb(t) - 'job_id'",
    # The end of the job takes the newest, and with it those that no check has deleted yet.  The
    # time from which max_wait counts may be that of a call which a cancel has just taken.
    "reruns": "case when not exists (select from rota.reruns as n where n.job_id = t.job_id"
    " and n.seen is null and n.id > t.id) then (to_jsonb(t) - '{id,made_by,seen}'::text[])"
    " #- '{job,created_at}' end",
}
EXPECTED_WARNINGS = ("lock timeout", "updated partition constraint for default partition")
FORGET_HINTS = """
    select set_config(format('rota.scan_%s_%s', k, n), '', false)
    from unnest(
        '{claim,sweep,due,next,free,held,waiting,lane,later,checks,edges,kept}'::text[]) as k
    cross join generate_series(0, 15) as n
"""
KEEP_HINT = """
    select rota._keep_scan_start('claim ' || %s, format('%%s %%s 0 0 0', m.until, m.until))
    from (select (extract(epoch from rota.now()) * 1000000)::bigint + 50000000) as m (until)
"""
# Partitions are made by ticks that are alone, and would be there ever after.
FORGET_PARTITIONS = """
    do $$ declare v_table regclass; begin
        for v_table in select i.inhrelid from pg_inherits as i
            where i.inhparent = 'rota.finished_jobs_done'::regclass
              and i.inhrelid::regclass::text ~ '_20260[23]'
        loop execute format('drop table %s', v_table); end loop;
    end $$
"""
BECOME = """
    do $$ begin
        create role {role};
    exception when duplicate_object or unique_violation then null;
    end $$;
    grant usage on schema rota, race to {role};
    grant execute on all routines in schema rota to {role};
    grant all on sequence race.passed to {role}
"""


class Stage:
    """Brings a database into a state, and looks at it; its functions are instrumented."""

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], game: Game) -> None:
        self._game = game
        self.observer = connect()
        # Only a few rows, but many that are dead; the rule's query is big and its jit slow.
        self.observer.execute("set jit = off; set enable_seqscan = off")
        self.gate = Session(self.observer, self.observer)
        self._connect = connect
        self._warnings: list[str] = []
        if game.role:
            self.observer.execute(BECOME.format(role=game.role))
        self.a, self.b = self._open(), self._open()
        self._holder = connect()
        self.has_hint = False
        """Whether the sessions know where to begin when they claim."""
        # It would keep a tick from making a partition.
        self.observer.execute(
            "alter table rota.finished_jobs_done_default set (autovacuum_enabled = false)"
        )
        self.observer.execute("create schema bench")
        self._clock = Clock(self.observer)
        rows = self.observer.execute(
            "select relname from pg_class where relnamespace = 'rota'::regnamespace"
            " and relkind in ('r', 'p') and not relispartition order by relname"
        ).fetchall()
        # The triggers of jobs write into others, which are restored after them.
        self._tables = sorted((row[0] for row in rows), key=lambda table: table != "jobs")
        self._columns = {table: self._columns_of(table) for table in self._tables}
        self._refusals = self._find_refusals()
        numbered = enumerate(game.states)
        self._jobs = {state: self._save(state, number) for number, state in numbered}

    def close(self) -> None:
        self.a.close()
        self.b.close()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold the rows of all jobs, and change none."""
        with self._holder.transaction(force_rollback=True):
            self._holder.execute("select from rota.jobs for update")
            yield

    def _open(self) -> Session:
        connection = self._connect()
        connection.row_factory = dict_row
        # What is prepared comes in several messages, and tick() is not alone in it.
        connection.prepare_threshold = None
        # Later than each lock_timeout, as in production: those end deadlocks without a victim.
        connection.execute("set deadlock_timeout = '300ms'")
        connection.add_notice_handler(self._note_warning)
        if self._game.role:
            connection.execute(f"set role {self._game.role}")
        return Session(connection, self.observer)

    def begin_anew(self) -> None:
        """End both sessions, whatever they wait for, and open others."""
        self.close()
        self.observer.execute("select pg_advisory_unlock_all()")
        self.a, self.b = self._open(), self._open()

    def _note_warning(self, notice: psycopg.errors.Diagnostic) -> None:
        message = notice.message_primary or ""
        if notice.severity_nonlocalized == "WARNING" and not any(
            expected in message for expected in (*EXPECTED_WARNINGS, *self._game.warnings)
        ):
            self._warnings.append(message)

    def _find_refusals(self) -> dict[str, set[str]]:
        """Return the SQLSTATE that each operation may raise: what its comments name."""
        documented = {
            name: {*STATE.findall(comment or "")}
            for name, comment in self.observer.execute(DOCUMENTED)
        }
        always = {"42501"} if self._game.role else set()
        return {
            name: always.union(*(documented[f] for f in self._game.functions(name)))
            for name in self._game.operations
        } | dict.fromkeys(self._game.parts, always)

    def _columns_of(self, table: str) -> str:
        rows = self.observer.execute(
            "select quote_ident(attname) from pg_attribute where attrelid = %s::regclass"
            " and attnum > 0 and not attisdropped and attgenerated = '' order by attnum",
            (f"rota.{table}",),
        )
        return ", ".join(row[0] for row in rows)

    def _save(self, state: str, number: int) -> dict[str, Any]:
        """Bring the database into the state, a minute a step, and keep what it holds then."""
        self.observer.execute("set session_replication_role = replica")
        for table in self._tables:
            self.observer.execute(f"delete from rota.{table}")
        self.observer.execute("set session_replication_role = origin")
        self.observer.execute(
            "insert into rota.maintenance (task, done_at)"
            " values ('retention', '-infinity'), ('tick', '-infinity')"
        )
        self._clock.set(START)
        for step in self._game.states[state]:
            self._clock.advance("1 minute")
            self.observer.execute(FORGET_HINTS)
            self.observer.execute(step)
        self._clock.set(NOW)
        for table, columns in self._columns.items():
            copy = f"create table bench.s{number}_{table} as select {columns} from rota.{table}"
            self.observer.execute(copy)
        found = self.observer.execute(
            "select r.id, r.lease_token from rota.job_runs as r order by r.id"
        ).fetchall()
        restore = "; ".join(
            f"delete from rota.{table}; insert into rota.{table} ({columns})"
            f" overriding system value table bench.s{number}_{table}"
            for table, columns in self._columns.items()
        )
        restore = (
            f"set session_replication_role = replica; {restore};"
            f" set session_replication_role = origin; update rota_test.clock"
            f" set stopped_at = '{NOW}'"
        )
        jobs: dict[str, Any] = {"ids": [row[0] for row in found], "restore": restore}
        for place, prefix in enumerate(PLACES):
            job_id, token = found[place] if place < len(found) else (NOBODY, 0)
            jobs[f"{prefix}id" if prefix else "job_id"] = job_id
            jobs[f"{prefix}token"] = token
        return jobs

    def restore(self, state: str) -> None:
        self.observer.execute(self._jobs[state]["restore"])
        if self._game.outside:
            self.observer.execute(FORGET_PARTITIONS)
        self._warnings.clear()
        for session in (self.a, self.b):
            session.connection.execute(f"select pg_advisory_unlock_all(); {FORGET_HINTS}")
            if self.has_hint:
                me = "a" if session is self.a else "b"
                session.connection.execute(KEEP_HINT, [f"'{me}' {{q}}  "])

    def look(self, state: str, answers: dict[str, Any]) -> tuple[Outcome, list[str]]:
        """Return the outcome, and what is wrong with it whatever was expected."""
        if self._game.settle:
            # Each on its own: a transaction leaves the checks that it adds to others.
            for statement in (FORGET_HINTS, *self._game.settle):
                self.observer.execute(statement)
        told = [table for table in self._tables if table not in self._game.ignored]
        columns = ", ".join(
            f"(select jsonb_agg(r.shown) from (select {ROWS.get(table, 'to_jsonb(t)')} as shown"
            f" from rota.{table} as t) as r where r.shown is not null)"
            for table in told
        )
        broken = (
            f"{BROKEN} union all {self._game.left_over}" if self._game.left_over else BROKEN
        )
        query = f"select array(select rule || ' ' || id from ({broken}) as b), {columns}"
        row = self.observer.execute(query).fetchone()
        assert row is not None
        problems = [f"a job {broken}" for broken in row[0]]
        problems += [f"a warning: {warning}" for warning in self._warnings]
        problems += [
            f"{who} got {answer}"
            for who, answer in answers.items()
            if isinstance(answer, str) and answer.startswith("unexpected")
        ]
        tables = {table: rows for table, rows in zip(told, row[1:], strict=True) if rows}
        return comparable(answers, tables, self._jobs[state]["ids"]), problems

    def do(self, session: Session, state: str, name: str) -> Any:
        query = self._game.queries[name]
        if "%(" not in query:
            return session.fetch(query)  # in one message
        me = "a" if session is self.a else "b"
        return session.fetch(query, {"me": me, **self._jobs[state]})

    def answer(self, name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except psycopg.Error as error:
            if error.sqlstate in self._refusals[name]:
                return error.sqlstate
            return f"unexpected {error.sqlstate}: {error.diag.message_primary}"

    def has_locked(self, session: Session) -> bool:
        """Whether a session may hold rows that others pass over."""
        return bool(
            self.observer.execute(
                "select from pg_locks where pid = %s and mode in ('RowShareLock',"
                " 'RowExclusiveLock') and relation in ('rota.jobs'::regclass,"
                " 'rota.job_definitions'::regclass, 'rota.effects'::regclass)",
                [session.pid],
            ).fetchall()
        )
