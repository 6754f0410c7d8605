"""What the Python client and the worker tell by the way: no value of any job.

The client binds every value, so a statement holds names only.  The worker logs one line for
each thing that happens to a job: its type, id, attempt and outcome.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from rota import Client, FatalError, Job, JsonFormatter, Registry, RetryIn, Snooze, Worker
from security.leaks import KEY, SECRET, ServerLog
from sql.helpers import scalar

Db = psycopg.Connection[Any]


@pytest.mark.own_session
def test_no_statement_of_the_client_holds_a_value(
    loud: Db, db: Db, secrets: dict[str, Any]
) -> None:
    """Who may look at all sessions, as monitoring does, sees names of arguments only."""
    client, seen = Client(loud), {}
    payload, job = {"secret": SECRET}, (secrets["job_id"], secrets["token"])
    batch: dict[str, Any] = {
        "job_ids": [secrets["job_id"]],
        "lease_tokens": [secrets["token"]],
        "results": [payload],
    }
    calls: dict[str, Callable[[], Any]] = {
        "enqueue": lambda: client.enqueue("t", payload, idempotency_key=KEY, limit_key=KEY),
        "enqueue_many": lambda: client.enqueue_many([{"job_type": "t", "payload": payload}]),
        "start_pipeline": lambda: client.start_pipeline("line", payload, ordering_key=KEY),
        "schedule_job": lambda: client.schedule_job("n", "@daily", "t", payload=payload),
        "finish_job": lambda: client.finish_job(*job, payload),
        "finish_jobs": lambda: client.finish_jobs(**batch),
        "finish_and_claim": lambda: client.finish_and_claim("w", **batch),
        "end_jobs": lambda: client.end_jobs(
            [{"job_id": job[0], "lease_token": job[1], "outcome": "failed", "error": SECRET}]
        ),
        "fail_job": lambda: client.fail_job(*job, SECRET, "E", SECRET),
        "set_progress": lambda: client.set_progress(*job, 5, SECRET),
        "record_effect": lambda: client.record_effect("mail", KEY + "2", *job),
        "complete_effect": lambda: client.complete_effect("mail", KEY, *job, result=payload),
        "withdraw_effect": lambda: client.withdraw_effect("mail", KEY, *job),
        "effect_result": lambda: client.effect_result("mail", KEY),
        "settle_effect": lambda: client.settle_effect("sms", KEY, "done", payload),
        "resume_ordering_key": lambda: client.resume_ordering_key(KEY),
        "set_limit": lambda: client.set_limit(limit_key=KEY, max_running=1),
    }
    activity = "select query from pg_stat_activity where pid = %s"

    for name, make in calls.items():
        with loud.transaction(force_rollback=True):
            make()
            seen[name] = scalar(db, activity, loud.info.backend_pid)

    assert [query for query in seen.values() if '"rota"."' not in query] == []
    assert [query for query in seen.values() if "c4n4ry" in query] == []


@pytest.mark.parametrize(
    "payload",
    [
        {"secret": f"{SECRET}\x00"},
        {"secret": f"{SECRET}\ud800"},
        {"secret": SECRET, "n": float("nan")},
    ],
)
def test_the_client_refuses_what_the_server_would_log(
    loud: Db, log: ServerLog, payload: Any
) -> None:
    """For JSON that it cannot read the server logs a piece of it."""
    client = Client(loud)
    told = []

    for refused in (
        lambda: client.enqueue("t", payload),
        lambda: client.enqueue_many([{"job_type": "t", "payload": payload}]),
        lambda: client.schedule_job("n", "@daily", "t", payload=payload),
        lambda: client.start_pipeline("line", payload),
    ):
        with pytest.raises(ValueError, match="payload") as caught:
            refused()
        told.append(str(caught.value))

    assert [text for text in told if SECRET in text] == []
    assert log.lines(SECRET) == []


registry = Registry()
SIGHTINGS: list[str] = []


@registry.handler("succeeds")
def succeeds(job: Job) -> dict[str, str]:
    job.set_progress(50, f"half of {SECRET}")
    return {"secret": SECRET}


@registry.handler("looks")
def looks(job: Job) -> None:
    with job.transaction() as connection:
        query = "select query from pg_stat_activity where datname = current_database()"
        SIGHTINGS.extend(query for (query,) in connection.execute(query))


@registry.handler("odd_result")
def odd_result(job: Job) -> Any:
    return {SECRET: {SECRET}, (SECRET,): 1}


@registry.handler("big_result")
def big_result(job: Job) -> Any:
    return SECRET * 100_000


@registry.handler("snoozes")
def snoozes(job: Job) -> None:
    raise Snooze(60)


@registry.handler("fails")
def fails(job: Job) -> None:
    raise ValueError("cannot charge")


@registry.handler("retries")
def retries(job: Job) -> None:
    raise RetryIn(60, "later")


@registry.handler("dies")
def dies(job: Job) -> None:
    raise FatalError("never")


@registry.handler("fails_after_its_end")
def fails_after_its_end(job: Job) -> None:
    with job.transaction():
        pass
    raise ValueError("cannot greet")


def told(
    dsn: str, client: Client, caplog: pytest.LogCaptureFixture, *job_types: str
) -> list[str]:
    """Run such jobs, full of secrets; return the lines of the log, as text and as JSON."""
    for n, job_type in enumerate(job_types):
        key = f"{KEY} {n}"
        client.enqueue(
            job_type,
            {"secret": SECRET},
            idempotency_key=key,
            ordering_key=key,
            limit_key=key,
        )
    with caplog.at_level(logging.INFO, "rota"):
        Worker(dsn, registry, poll_interval=0.05).run(drain=True)
    formatters = logging.Formatter(), JsonFormatter()
    return [f.format(record) for record in caplog.records for f in formatters]


def test_the_worker_logs_no_payload_result_progress_or_key(
    dsn: str, db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    """The text of an error is the handler's own word, and is logged."""
    endings = ["succeeds", "odd_result", "big_result", "snoozes"]
    endings += ["fails", "retries", "dies", "fails_after_its_end"]

    lines = told(dsn, Client(db), caplog, *endings)

    assert len(lines) > 2 * 2 * len(endings)
    assert [line for line in lines if "c4n4ry" in line] == []


def test_no_statement_of_the_worker_holds_a_value(
    dsn: str, db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sessions, while it works: the superuser sees them all."""
    SIGHTINGS.clear()

    told(dsn, Client(db), caplog, *["succeeds", "looks"] * 3)

    assert any('"rota".' in query for query in SIGHTINGS)
    assert [query for query in SIGHTINGS if "c4n4ry" in query] == []
