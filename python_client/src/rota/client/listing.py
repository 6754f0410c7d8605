"""What the command line and the page list alike: the jobs that a filter means, and errors.

They list jobs with the filters of act_on_jobs(), with which they also act, so that what was
listed is what would be changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import LiteralString

from psycopg import sql

CONDITIONS: dict[str, LiteralString] = {
    "ids": "id = any(%(ids)s)",
    "queue": "queue = %(queue)s",
    "status": "status = any(%(status)s)",
    "job_type": "job_type = %(job_type)s",
    # What is looked for is folded once and not for each row, whatever plan there is.
    "error": (
        "array[rota.fold_error(last_error), rota.fold_error(error_type || ': ' || last_error)]"
        " && array(values (rota.fold_error(%(error)s)), (%(error)s))"
    ),
    # In Turkish the small letter of I is another one than i, but an error may be in English.
    "error_text": (
        "(strpos(lower(last_error), lower(%(error_text)s)) > 0"
        ' or strpos(lower(last_error collate "C"), lower(%(error_text)s collate "C")) > 0)'
    ),
    "error_type": "error_type = %(error_type)s",
    "cancel_reason": "cancel_reason = %(cancel_reason)s",
    "is_due": "(run_at <= rota.now()) = %(is_due)s",
    "is_discarded": "(discarded_at is not null) = %(is_discarded)s",
    "worker": "locked_by = %(worker)s",
    "key": "%(key)s in (idempotency_key, ordering_key, limit_key)",
    "idempotency_key": "idempotency_key = %(idempotency_key)s",
    "ordering_key": "ordering_key = %(ordering_key)s",
    "limit_key": "limit_key = %(limit_key)s",
    "definition": "definition = %(definition)s",
    "pipeline": "pipeline = %(pipeline)s",
    "stage": "stage = %(stage)s",
    "older_than": "coalesce(finished_at, created_at) <= rota.now() - %(older_than)s::interval",
    "newer_than": "coalesce(finished_at, created_at) > rota.now() - %(newer_than)s::interval",
    "payload": "payload @> all(%(payload)s::jsonb[])",
    "headers": "headers @> all(%(headers)s::jsonb[])",
    "all": "true",
    # Not of a filter, but of a part of the list.
    "before": "id < %(before)s",
    "from": "id >= %(from)s",
    # One of the two tables is then not read at all.
    "is_live": "finished_at is null",
    "is_ended": "finished_at is not null",
}
"""What each key asks of a job; lists of `payload` and `headers` are of JSON as texts."""

FEW: LiteralString = """
    select count(*) <= 10000 as are_few
    from (select from rota.job_runs where queue = %(queue)s limit 10001) as f
    """
"""Whether a queue has so few jobs that its index may find all of them at once."""


def beginning(text: LiteralString, longest: LiteralString) -> LiteralString:
    """Return the SQL of the first characters of a text that is shown beside the others.

    A database that counts bytes would cut within a character.
    """
    return (
        f"case when getdatabaseencoding() <> 'SQL_ASCII' or length({text}) <= {longest}"
        f" then left({text}, {longest}) else regexp_replace(left({text}, {longest}),"
        r" E'[\\xc2-\\xf4][\\x80-\\xbf]{0,3}$', '') end"
    )


LISTED: LiteralString = """
    select id, queue, job_type, status, priority, attempts, max_attempts, run_at, created_at,
        started_at, finished_at, locked_by, error_type, last_error, cancel_reason,
        idempotency_key, ordering_key, limit_key, pipeline, stage, definition,
        progress_percent, progress_message{} from rota.job_runs
    where {} order by {} limit %(limit)s
    """
PAYLOAD: LiteralString = f", {beginning('payload::text', '4000')} as payload"


def listed(
    names: Iterable[str], *, are_few: bool = False, payload: bool = False
) -> sql.Composed:
    """Return the question for the jobs that fulfil all of these conditions, the newest first.

    If they *are_few*, it is in the order of no index, so that none is walked.
    """
    wanted = sql.SQL(" and ").join(sql.SQL(CONDITIONS[name]) for name in [*names, "all"])
    order = sql.SQL("id + 0 desc" if are_few else "id desc")
    return sql.SQL(LISTED).format(sql.SQL(PAYLOAD if payload else ""), wanted, order)


# Equal texts are folded once: that is most of the work.  fold_error() cuts at 1000 by itself.
GROUPED: LiteralString = """
    with newest as materialized (
        select i.queue, i.job_type, i.error_type, left(i.message, 1004) as message,
            i.failed_at, i.job_id, {}
        from rota.job_errors as i
        where i.failed_at > rota.now() - %(since)s::interval
          and (%(queue)s::text is null or i.queue = %(queue)s)
          and (%(job_type)s::text is null or i.job_type = %(job_type)s)
        order by i.failed_at desc limit %(max_rows)s
    ),
    folded as materialized (
        select t.message, rota.fold_error(t.message) as text
        from (select distinct n.message from newest as n) as t
    )
    select count(*) as failures, count(distinct n.job_id) as jobs,
        max(n.failed_at) as last_failed_at, min(n.failed_at) as first_failed_at,
        max(n.job_id) as last_job_id, array_agg(distinct n.queue order by n.queue) as queues,
        n.job_type, n.error_type, f.text as message, {}
    from newest as n join folded as f on f.message = n.message
    group by n.job_type, n.error_type, f.text
    order by failures desc, last_failed_at desc
    limit %(limit)s
    """


def grouped(column: LiteralString, summary: LiteralString) -> sql.Composed:
    """Return the question for the newest failures, grouped by error, those of most first.

    *summary* is what a group tells of one more *column* of the failures.
    """
    return sql.SQL(GROUPED).format(sql.SQL(column), sql.SQL(summary))
