"""The background jobs of a small shop, written the way you would write yours.

Any job may run twice: a worker can die when the work is done and the job is not yet finished.
So each handler must be right when it runs again, and there are three ways to that:

- `cleanup_nightly` writes to the database only.  ``job.transaction()`` commits its writes
  together with the end of the job: both happen, or neither.
- `send_weekly_report` sends a mail, which nothing can roll back.  It records that it is about
  to send, and commits that first; an attempt that finds the record does not send.
- `deliver_webhook` leaves it to the receiver, who gets the same event id each time.
"""

from __future__ import annotations

import os
import time
from http.client import HTTPConnection

import psycopg

import rota

from . import mail
from .processes import end_with_parent

registry = rota.Registry()


@registry.handler("cleanup_nightly")
def cleanup_nightly(job: rota.Job) -> None:
    """Forget old sessions: the deletes and the end of the job are one commit."""
    with job.transaction() as connection:
        deleted = connection.execute(
            "delete from rota_demo.sessions as s"
            " where s.last_seen_at < rota.now() - interval '30 days'"
        ).rowcount
        connection.execute("insert into rota_demo.cleanups (deleted) values (%s)", [deleted])
        job.result = f"{deleted} old sessions deleted"


@registry.handler("send_weekly_report")
def send_weekly_report(job: rota.Job) -> str:
    """Mail a user his week, not twice."""
    user_id, week_start = job.payload["user_id"], job.payload["week_start"]
    # Autocommit: no transaction is open while the mail provider is asked.
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        report = write_report(connection, user_id, week_start)
        if not record_sending(connection, user_id, week_start):
            return "not sent: record found"
        try:
            mail.send(report)
        except mail.MailNotAcceptedError:
            # For certain there is no mail, so the next attempt has to send it.  After any
            # other error there may be one, and the record stays.
            withdraw_record(connection, user_id, week_start)
            raise
    time.sleep(job.payload.get("linger_seconds", 0))  # for the demo to kill this worker
    return "mail sent"


@registry.handler("deliver_webhook")
def deliver_webhook(job: rota.Job) -> None:
    """Tell a customer's server about an event; it knows repetitions by the id."""
    connection = HTTPConnection("127.0.0.1", job.payload["port"], timeout=2)
    connection.request("POST", "/hooks", headers={"Event-Id": job.payload["event_id"]})
    if connection.getresponse().status >= 300:
        raise RuntimeError("the customer's server refused the event")


def record_sending(
    connection: psycopg.Connection[object], user_id: int, week_start: str
) -> bool:
    """Record that the report is about to be sent; say whether this is the first record."""
    return bool(
        connection.execute(
            "insert into rota_demo.sent_reports (user_id, week_start) values (%s, %s)"
            " on conflict do nothing",
            [user_id, week_start],
        ).rowcount
    )


def withdraw_record(
    connection: psycopg.Connection[object], user_id: int, week_start: str
) -> None:
    """Forget the record of a report that was not sent."""
    connection.execute(
        "delete from rota_demo.sent_reports where user_id = %s and week_start = %s",
        [user_id, week_start],
    )


def write_report(
    connection: psycopg.Connection[tuple[str, int]], user_id: int, week_start: str
) -> mail.Message:
    """Return the mail to one user."""
    row = connection.execute(
        "select u.name, (select count(*) from rota_demo.sessions as s where s.user_id = u.id)"
        " from rota_demo.users as u where u.id = %s",
        [user_id],
    ).fetchone()
    if row is None:
        raise rota.FatalError(f"there is no user {user_id}")  # trying again cannot help
    name, sessions = row
    return mail.Message(
        key=f"weekly_report:{name}:{week_start}",
        to=f"{name}@example.com",
        subject=f"Your week from {week_start}",
        text=f"Dear {name},\n\nyou came to the shop {sessions} times.\n",
    )


end_with_parent()
