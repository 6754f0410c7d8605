"""The proof: every claim of the demo, checked in the database and in the provider's mailbox."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from . import shop, story
from .mail import message_id
from .outage import JOBS, Outage
from .play import Happened
from .records import Run

_NOTHING = Outage(queue="", delivered=0, attempts=0, late=0)


@dataclass(frozen=True, slots=True)
class Check:
    """A claim, whether it holds, and if not, what was found."""

    claim: str
    is_true: bool
    found: object


def check_all(happened: Happened, connection: Connection[Any]) -> list[Check]:
    """Check every claim; *connection* reads what the shop's own tables say."""
    return [
        Check("all jobs ended in time", happened.is_in_time, "some did not"),
        *_check_jobs(happened),
        *_check_takeover(happened),
        *_check_shop(happened, connection),
        *_check_mails(happened),
        *_check_outage(happened),
    ]


def _check_outage(happened: Happened) -> Iterator[Check]:
    plain, guarded = (outage.attempts for outage in happened.outage or [_NOTHING] * 2)
    delivered = [outage.delivered for outage in happened.outage]
    yield Check(
        "each webhook arrived in the end, with a breaker in less than half of the attempts",
        delivered == [JOBS, JOBS] and 2 * guarded < plain,
        (delivered, plain, guarded),
    )


def _check_jobs(happened: Happened) -> Iterator[Check]:
    count = len(happened.parts)
    yield Check(
        "cron ran on two servers, and each job was enqueued once",
        happened.new_jobs == [count - 1, 0] and len(happened.runs) == count,
        (happened.new_jobs, len(happened.runs)),
    )
    runs = {run.idempotency_key: run for run in happened.runs}
    wrong = [part.key for part in happened.parts if not _is_as_told(part, runs.get(part.key))]
    yield Check(
        "each job has the status, the attempts and the errors that were told", not wrong, wrong
    )
    dead = [run.job_type for run in happened.runs if run.status == "dead"]
    yield Check(
        "one job is dead, after all its attempts: the webhook",
        dead == ["deliver_webhook"],
        dead,
    )
    too_early = [
        (run.id, run.waits)
        for run in happened.runs
        if len(run.waits) != run.attempts - 1
        or any(wait < 2**number * 0.8 for number, wait in enumerate(run.waits))
    ]
    yield Check(
        "no retry came before 1 s, then 2 s (less a fifth of jitter)", not too_early, too_early
    )
    codes = happened.exit_codes
    yield Check(
        "the other workers left in good order when told to",
        len(codes) == len(story.WORKERS) - 1 and not any(codes.values()),
        codes,
    )


def _is_as_told(part: story.Part, run: Run | None) -> bool:
    return run is not None and (
        run.status == part.status
        and run.attempts == part.attempts
        and [failure.error for failure in run.failures] == part.errors
    )


def _check_takeover(happened: Happened) -> Iterator[Check]:
    run = next(r for r in happened.runs if f":{story.VICTIM}:" in r.idempotency_key)
    lost = [failure.worker for failure in run.failures if failure.error == story.KILLED]
    yield Check(
        f"{happened.killed} was killed, its lease ended, and {run.worker} took over its job",
        happened.killed is not None and lost == [happened.killed] != [run.worker],
        (happened.killed, lost, run.worker),
    )
    yield Check(
        "the second attempt found the record of the first, and did not send",
        str(run.result).startswith("not sent"),
        run.result,
    )


def _check_shop(happened: Happened, connection: Connection[Any]) -> Iterator[Check]:
    row = connection.execute(
        "select array(select deleted from rota_demo.cleanups),"
        " (select count(*) from rota_demo.sessions),"
        " array(select e.completed_at is not null from rota.effects as e"
        " where e.scope = %s order by 1)",
        [story.SCOPE],
    ).fetchone()
    reports = sum(part.sends_mail for part in happened.parts)
    yield Check(
        "old sessions were deleted once, and only those",
        row is not None and row[:2] == ([shop.OLD_SESSIONS], shop.NEW_SESSIONS),
        row,
    )
    yield Check(
        "the ledger has one record per report; one of them may or may not have been sent",
        row is not None and row[2] == [False] + [True] * (reports - 1),
        row,
    )


def _check_mails(happened: Happened) -> Iterator[Check]:
    expected = {message_id(part.key): 1 for part in happened.parts if part.sends_mail}
    yield Check(
        f"the provider's mailbox holds each of the {len(expected)} reports exactly once",
        happened.mails == expected,
        dict(happened.mails),
    )
