"""A database that is called a thousand times a second and shows all its rows after each call.

The clock, a call and the look at the tables are one prepared statement, so a step is one round
trip.  A call that is refused leaves no other rows than there were, which is PostgreSQL's own
promise; the next call shows whether it is true.  One database serves all examples and is
emptied between them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
from psycopg.pq import DiagnosticField, ExecStatus, TransactionStatus

from model.rows import Seen
from support.clock import now_is

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EMPTIED = (
    *("jobs", "finished_jobs", "job_errors", "queues", "pauses", "idempotency_keys"),
    *(
        "pending_checks",
        "limits",
        "limits_to_count",
        "limit_slots",
        "limit_parts",
        "limit_starts",
        "fair_queues",
    ),
    *("job_definitions", "occurrences", "halted_keys", "effects", "dependencies"),
    *("pipeline_stages", "stage_runs", "restored_ends", "audit_log", "reruns"),
)
# Claims leave hints in settings of their session, and each example shall be the same again.
SETTINGS = "set client_min_messages = error; set jit = off; set synchronous_commit = off"
CLOCK = now_is(
    "'epoch'::timestamptz + current_setting('model.now')::bigint * interval '1 microsecond'"
)
# {name} is a column with a point in time or a duration, shown as microseconds.
JOB = """
    r.id, r.queue, r.job_type, r.payload, r.priority, {run_at}, r.status, r.attempts,
    r.max_attempts, r.locked_by, %s, r.lease_token, r.idempotency_key, r.progress_percent,
    r.progress_message, {cancel_requested_at}, r.cancel_reason,
    split_part(r.last_error, ' neither', 1), r.error_type, {failed_at}, {created_at},
    {started_at}, %s, r.definition, {scheduled_for}, {lease}, r.backoff, r.ordering_key,
    r.skip_dead, r.limit_key, r.pipeline, r.stage, r.stage_input, %s, %s
"""
LIVE = JOB % (
    "{locked_until}",
    "null, null",
    "{stage_queued_at}",
    "(select json_build_array(n.job -> 'payload',"
    " (date_part('epoch', n.run_at) * 1e6)::bigint, coalesce((n.job ->> 'priority')::int, 0),"
    " (date_part('epoch', (n.job ->> 'created_at')::timestamptz) * 1e6)::bigint)"
    " from rota.reruns as n where n.job_id = r.id order by n.id desc limit 1)",
)
SHOWN = {
    "jobs": LIVE,
    "finished_jobs": JOB % ("null", "{finished_at}, r.result", "null", "null"),
    "job_errors": """
        r.job_id, r.lease_token, r.attempt, r.worker, {started_at}, {failed_at}, r.error_type,
        split_part(r.message, ' neither', 1)
    """,
    "queues": "r.queue, {lease}, r.max_attempts, r.backoff",
    "pauses": "coalesce(r.queue, ''), {paused_at}, r.reason",
    "job_definitions": """
        r.name, r.schedule, r.job_type, r.catch_up, r.overlap, {anchored_at}, r.is_enabled,
        {next_run_at}, {last_run_at}, r.last_job_id
    """,
    "halted_keys": "r.ordering_key, r.job_id, {halted_since}",
    "dependencies": "r.job_id, r.parent_id",
    "effects": """
        r.scope, r.key, r.job_id, r.lease_token, {recorded_at}, {completed_at}, r.result
    """,
    "limits": "r.limit_name, r.max_running, r.max_starts, {per}, r.burst, r.weight",
    "pipeline_stages": """
        r.pipeline, r.stage, r.ordinal, r.next_stage, r.job_type, r.queue, r.priority,
        r.max_attempts, {lease}, r.backoff
    """,
    "stage_runs": """
        r.job_id, r.lease_token, r.pipeline, r.stage, r.status, r.queue, r.job_type,
        r.attempts, r.worker, {queued_at}, {started_at}, {finished_at}, r.stage_input, r.result
    """,
    "occurrences": "r.definition, {scheduled_for}, r.outcome, r.job_id, {recorded_at}",
}
CLAIMED = """
    r.job_id, r.lease_token, r.queue, r.job_type, r.payload, r.priority, r.attempt,
    r.max_attempts, {run_at}, {locked_until}, {locked_for}, r.idempotency_key, {created_at},
    r.definition, {scheduled_for}, r.pipeline, r.stage, r.stage_input
"""
ANSWERS = {
    "enqueue": "r",
    "enqueue_many": "r.ordinal, r.job_id, r.is_new",
    "claim_jobs": CLAIMED,
    "finish_jobs": "r.job_id, r.outcome",
    "finish_and_claim": "r.outcome, r.job_id, r.lease_token",
    "end_jobs": "r.job_id, r.lease_token, r.answer, {run_at}",
    "fail_job": "r.status, {run_at}",
    "snooze_job": "(date_part('epoch', r) * 1e6)::bigint",
    "release_jobs": "r.job_id, r.is_released",
    "heartbeat": "{locked_until}, r.is_cancel_requested",
    "heartbeat_jobs": "r.job_id, {locked_until}, r.is_lost, r.is_cancel_requested",
    "reschedule_job": "(date_part('epoch', r) * 1e6)::bigint",
    "enable_schedule": "(date_part('epoch', r) * 1e6)::bigint",
    "schedule_job": "r.outcome, {next_run_at}",
    "tick": "r.jobs_enqueued, r.jobs_swept",
    **dict.fromkeys(
        ("set_progress", "set_priority", "set_queue", "pause_queue", "resume_queue",
         "pause_all", "resume_all",
         "unschedule_job", "withdraw_effect", "disable_schedule", "define_pipeline",
         "drop_pipeline", "set_limit"),
        "null",
    ),
}  # fmt: skip
TOLD = """
    select set_config('model.now', %s, false), (
        select coalesce(json_object_agg(r.id, (
            select e.reason from rota.explain_job(r.id) as e order by e.ordinal limit 1
        )), '{}')
        from rota.jobs as r where r.status <> 'running'
    )
"""
MOMENTS = {"run_at", "updated_at"}
DURATIONS = {"lease", "delay", "unique_for", "max_wait", "retry_in", "per"}
JSONS = {"payload", "backoff", "result", "results", "jobs", "stages", "endings"}


def columns(text: str) -> str:
    return re.sub(r"\{(\w+)\}", r"(date_part('epoch', r.\1) * 1e6)::bigint", text)


def helpers() -> str:
    """Return the functions that look at all tables, and empty them."""
    parts = [
        f"'{table}', (select coalesce(json_agg(json_build_array({columns(shown)})), '[]')"
        f" from rota.{table} as r)"
        for table, shown in SHOWN.items()
    ]
    parts.append(
        "'holds', (select coalesce(json_object_agg(r.id, r.hold), '{}')"
        " from rota.jobs as r where r.hold is not null)"
    )
    deletions = "; ".join(f"delete from rota.{table}" for table in EMPTIED)
    return f"""
        create schema model;
        create function model.look() returns json language plpgsql as $$
        begin
            return json_build_object({", ".join(parts)});
        end;
        $$;
        create function model.empty() returns void language plpgsql as $$
        begin
            {deletions};
            update rota.maintenance set done_at = '-infinity';
            -- Delays are drawn by chance, and each example shall be the same again.
            perform setseed(0);
        end;
        $$;
    """


class Database:
    """One session, and all that can be seen after each of its calls."""

    def __init__(self, url: str) -> None:
        self.db = psycopg.connect(url, autocommit=True)
        self.db.execute(CLOCK)
        self.db.execute(helpers())
        self.examples = self.calls = self.now = 0
        self.shown: dict[str, Any] = {}
        self._before: dict[str, Any] = {}  # what was shown when the open transaction began
        self._names: dict[tuple[str, ...], bytes] = {}
        self.empty()

    def empty(self) -> None:
        """Let nothing be left of the example before but the numbers of the ids."""
        self.rollback()
        self._run(f"reset all; {SETTINGS}; set model.now = 0; select model.empty()")
        self.shown = {table: [] for table in SHOWN}
        self.examples += 1
        if self.examples % 20 == 0:
            self._run(f"vacuum {', '.join(f'rota.{table}' for table in EMPTIED)}")

    def begin(self) -> None:
        self._before = self.shown
        self._run("begin")

    def commit(self) -> None:
        self._run("commit")

    def rollback(self) -> None:
        if self.db.pgconn.transaction_status != TransactionStatus.IDLE:
            self._run("rollback")
            self.shown = self._before

    def call(self, function: str, **arguments: Any) -> tuple[str, Any]:
        """Return the SQLSTATE, empty if all went well, and the rows of the answer."""
        self.calls += 1
        name = self._names.get((function, *arguments)) or self._prepare(function, [*arguments])
        texts: list[Any] = [b"%d" % self.now]
        texts += [_text(name, value) for name, value in arguments.items()]
        done = self.db.pgconn.exec_prepared(name, texts)
        if done.status != ExecStatus.TUPLES_OK:
            self.rollback()
            code = done.error_field(DiagnosticField.SQLSTATE) or b"?"
            return code.decode(), done.error_message.decode()
        self.shown = json.loads(done.get_value(0, 2) or b"")
        return "", json.loads(done.get_value(0, 1) or b"")

    def look(self) -> None:
        """See the tables once more."""
        row = self.db.execute("select model.look()").fetchone()
        self.shown = row[0] if row else {}

    def told(self) -> dict[int, str]:
        """Return why no worker has each waiting job, as explain_job() tells first."""
        row = self.db.execute(TOLD, [str(self.now)]).fetchone()
        return {int(job_id): reason for job_id, reason in row[1].items()} if row else {}

    def seen(self) -> Seen:
        return Seen(self.shown["jobs"] + self.shown["finished_jobs"], self.shown.get("holds"))

    def _prepare(self, function: str, names: list[str]) -> bytes:
        said = ", ".join(f"{name} => ${n}" for n, name in enumerate(names, 2))
        shown = columns(ANSWERS.get(function, "r"))
        query = f"""
            select set_config('model.now', $1, false), (
                select coalesce(json_agg(json_build_array({shown})), '[]')
                from rota.{function}({said}) as r
            ), model.look()
        """
        name = self._names[function, *names] = b"call%d" % len(self._names)
        done = self.db.pgconn.prepare(name, query.encode())
        assert done.status == ExecStatus.COMMAND_OK, done.error_message.decode()
        return name

    def _run(self, command: str) -> None:
        done = self.db.pgconn.exec_(command.encode())
        assert done.status in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK), done.error_message


def _text(name: str, value: Any) -> bytes | None:
    """The argument as the server reads it."""
    if value is None:
        return None
    if name in ("jobs", "stages"):
        value = [{k: _in_json(k, v) for k, v in job.items()} for job in value]
    if name in JSONS:
        value = json.dumps(value)
    elif name in MOMENTS | DURATIONS:
        value = _in_json(name, value)
    elif isinstance(value, list):
        value = f"{{{','.join('null' if it is None else str(it) for it in value)}}}"
    return str(value).encode()


def _in_json(name: str, value: Any) -> Any:
    if value is not None and name in MOMENTS:
        return (EPOCH + timedelta(microseconds=value)).isoformat()
    return f"{value} us" if value is not None and name in DURATIONS else value


@contextmanager
def opened(url: str) -> Iterator[Database]:
    database = Database(url)
    try:
        yield database
    finally:
        database.db.close()
