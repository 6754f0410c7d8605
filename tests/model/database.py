"""A database that is called a thousand times a second and shows all its rows after each call.

A call and the look at the tables are one statement, so a step is one round trip.  The clock is
a setting of the session.  One database serves all examples and is emptied between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from model.rows import Seen

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EMPTIED = (
    *("jobs", "finished_jobs", "job_errors", "queues", "idempotency_keys", "rechecks"),
    *("job_definitions", "fires", "stuck_keys", "effects", "dependencies"),
)
# Delays are drawn by chance, and each example shall be the same again.
SETTINGS = """
    set client_min_messages = error; set jit = off; set synchronous_commit = off;
    select setseed(0)
"""
CLOCK = """
create or replace function rota.now()
    returns timestamptz
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    return 'epoch'::timestamptz
        + current_setting('model.now')::bigint * interval '1 microsecond';
end;
$$;
"""
# {name} is a column with a point in time or a duration, shown as microseconds.
JOB = """
    r.id, r.queue, r.job_type, r.payload, r.priority, {run_at}, r.status, r.attempts,
    r.max_attempts, r.locked_by, %s, r.lease_token, r.idempotency_key, r.progress_percent,
    r.progress_message, {cancel_requested_at}, r.cancel_reason,
    split_part(r.last_error, ' neither', 1), r.error_type, {failed_at}, {created_at},
    {started_at}, %s, r.definition, {scheduled_for}, {lease}, r.backoff, r.ordering_key,
    r.skip_dead, %s
"""
LIVE = JOB % (
    "{locked_until}",
    "null, null",
    "case when r.rerun_payload is not null then"
    " json_build_array(r.rerun_payload, {rerun_run_at}, r.rerun_priority) end",
)
SHOWN = {
    "jobs": LIVE,
    "finished_jobs": JOB % ("null", "{finished_at}, r.result", "null"),
    "job_errors": """
        r.job_id, r.lease_token, r.attempt, r.worker, {started_at}, {failed_at}, r.error_type,
        split_part(r.message, ' neither', 1)
    """,
    "queues": """
        r.queue, r.is_paused, {paused_at}, r.pause_reason, {lease}, r.max_attempts, r.backoff
    """,
    "job_definitions": """
        r.name, r.schedule, r.job_type, r.catch_up, r.overlap, {anchored_at}, r.is_enabled,
        {next_run_at}, {last_run_at}, r.last_job_id
    """,
    "stuck_keys": "r.ordering_key, r.job_id, {stuck_since}",
    "dependencies": "r.job_id, r.parent_id, r.is_failed",
    "effects": """
        r.scope, r.key, r.job_id, r.lease_token, {recorded_at}, {completed_at}, r.result
    """,
    "fires": "r.definition, {scheduled_for}, r.outcome, r.job_id, {fired_at}",
}
CLAIMED = """
    r.job_id, r.lease_token, r.queue, r.job_type, r.payload, r.priority, r.attempt,
    r.max_attempts, {run_at}, {locked_until}, {locked_for}, r.idempotency_key, {created_at},
    r.definition, {scheduled_for}
"""
ANSWERS = {
    "enqueue": "r",
    "enqueue_many": "r.ordinal, r.job_id, r.is_new",
    "claim_jobs": CLAIMED,
    "finish_jobs": "r.job_id, r.outcome",
    "finish_and_claim": "r.outcome, r.job_id, r.lease_token",
    "fail_job": "r.status, {run_at}",
    "snooze_job": "(date_part('epoch', r) * 1e6)::bigint",
    "release_jobs": "r.job_id, r.is_released",
    "heartbeat": "{locked_until}, r.is_cancel_requested",
    "heartbeat_jobs": "r.job_id, {locked_until}, r.is_lost, r.is_cancel_requested",
    "reschedule_job": "(date_part('epoch', r) * 1e6)::bigint",
    "enable_schedule": "(date_part('epoch', r) * 1e6)::bigint",
    "schedule_job": "r.outcome, {next_run_at}",
    "tick": "r.jobs_fired, r.jobs_swept",
    **dict.fromkeys(
        ("set_progress", "set_priority", "set_queue", "pause_queue", "resume_queue",
         "unschedule_job", "withdraw_effect", "disable_schedule"),
        "null",
    ),
}  # fmt: skip
MOMENTS = {"run_at", "updated_at"}
DURATIONS = {"lease", "delay", "unique_for", "max_wait", "retry_in"}
JSONS = {"payload", "backoff", "result", "results", "jobs"}


def columns(text: str) -> str:
    return re.sub(r"\{(\w+)\}", r"(date_part('epoch', r.\1) * 1e6)::bigint", text)


def look() -> str:
    parts = [
        f"'{table}', (select coalesce(json_agg(json_build_array({columns(shown)})), '[]')"
        f" from rota.{table} as r)"
        for table, shown in SHOWN.items()
    ]
    return f"""
        create schema model;
        create function model.look() returns json language plpgsql as $$
        begin
            return json_build_object({", ".join(parts)});
        end;
        $$;
    """


class Database:
    """One session, and all that can be seen after each of its calls."""

    def __init__(self, url: str) -> None:
        self.db = psycopg.connect(url, autocommit=True, prepare_threshold=0)
        self.db.prepared_max = 1000
        self.db.execute(CLOCK)
        self.db.execute(look(), prepare=False)
        self.examples = self.calls = 0
        self.shown: dict[str, Any] = {}
        self._queries: dict[tuple[str, ...], str] = {}
        self.empty()

    def empty(self) -> None:
        """Let nothing be left of the example before but the numbers of the ids."""
        self.rollback()
        deletions = "; ".join(f"delete from rota.{table}" for table in EMPTIED)
        self.db.execute(f"reset all; {SETTINGS}; {deletions}", prepare=False)
        self.examples += 1
        if self.examples % 20 == 0:
            self.db.execute(f"vacuum {', '.join(f'rota.{table}' for table in EMPTIED)}")

    def set_clock(self, now: int) -> None:
        self.db.execute("select set_config('model.now', %s, false)", [str(now)])

    def begin(self) -> None:
        self.db.execute("begin")

    def commit(self) -> None:
        self.db.execute("commit")

    def rollback(self) -> None:
        if self.db.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            self.db.execute("rollback")

    def call(self, function: str, **arguments: Any) -> tuple[str, Any]:
        """Return the SQLSTATE, empty if all went well, and the rows of the answer."""
        self.calls += 1
        names = (function, *arguments)
        query = self._queries.get(names)
        if query is None:
            query = self._queries[names] = self._query(function, list(arguments))
        try:
            row = self.db.execute(query, {k: given(k, v) for k, v in arguments.items()})
            answer, self.shown = row.fetchone()  # type: ignore[misc]
        except psycopg.Error as error:
            self.rollback()
            self.shown = self.db.execute("select model.look()").fetchone()[0]  # type: ignore[index]
            return error.sqlstate or "?", str(error)
        return "", answer

    def seen(self) -> Seen:
        return Seen(self.shown["jobs"] + self.shown["finished_jobs"])

    def _query(self, function: str, names: list[str]) -> str:
        said = ", ".join(f"{name} => %({name})s" for name in names)
        shown = columns(ANSWERS.get(function, "r"))
        return f"""
            select (
                select coalesce(json_agg(json_build_array({shown})), '[]')
                from rota.{function}({said}) as r
            ), model.look()
        """


def given(name: str, value: Any) -> Any:
    """The argument as the driver takes it."""
    if value is None:
        return None
    if name in MOMENTS:
        return EPOCH + timedelta(microseconds=value)
    if name in DURATIONS:
        return timedelta(microseconds=value)
    if name == "jobs":
        return Jsonb([{k: _in_json(k, v) for k, v in job.items()} for job in value])
    return Jsonb(value) if name in JSONS else value


def _in_json(name: str, value: Any) -> Any:
    if value is not None and name in MOMENTS | DURATIONS:
        value = given(name, value)
        return (
            value.isoformat() if name in MOMENTS else f"{value / timedelta(microseconds=1)} us"
        )
    return value


@contextmanager
def opened(url: str) -> Iterator[Database]:
    database = Database(url)
    try:
        yield database
    finally:
        database.db.close()
