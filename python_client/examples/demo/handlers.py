"""The background jobs of a small shop, written the way you would write yours.

Any job may run twice: a worker can die when the work is done and the job is not yet finished.
So each handler must be right when it runs again, and there are three ways to that:

- `cleanup_nightly` writes to the database only.  ``job.transaction()`` commits its writes
  together with the end of the job: both happen, or neither.
- `send_weekly_report` sends a mail, which nothing can roll back.  ``job.effect()`` records
  that first; an attempt that finds the record does not send.
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
from .story import SCOPE

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
    report = write_report(job.payload["user_id"], job.payload["week_start"])
    with job.effect(SCOPE, report.key) as effect:
        if not effect.is_due:
            return "not sent: record found"
        try:
            mail.send(report)
        except mail.MailNotAcceptedError:
            # For certain there is no mail, so the next attempt has to send it.  After any
            # other error there may be one, and the record stays.
            effect.withdraw()
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


def write_report(user_id: int, week_start: str) -> mail.Message:
    """Return the mail to one user."""
    # No transaction is open any more while the mail provider is asked.
    with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
        row = connection.execute(
            "select u.name,"
            " (select count(*) from rota_demo.sessions as s where s.user_id = u.id)"
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
