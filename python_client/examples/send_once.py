"""Send a mail once, however often its job runs and however many jobs want it.

DATABASE_URL=postgresql://localhost/shop python send_once.py
"""

import os
import smtplib
from email.message import EmailMessage

import psycopg

import rota

registry = rota.Registry()


@registry.handler("send_invoice")
def send_invoice(job: rota.Job) -> dict[str, str] | None:
    """Send one invoice; the key comes from the business event and not from the job."""
    number = job.payload["number"]
    with job.effect("invoice", f"invoice:{number}") as effect:
        if effect.is_due:
            try:
                effect.result = {"message_id": send_mail(number, job.payload["email"])}
            except smtplib.SMTPRecipientsRefused:
                effect.withdraw()  # it certainly was not sent, so the next attempt has to
                raise
        elif not effect.is_done:
            # An earlier worker died in this block; after a look into the provider's log ...
            print(f"it is unknown whether invoice {number} was sent")
    result: dict[str, str] | None = effect.result
    return result


def send_mail(number: int, email: str) -> str:
    """Hand a mail to the server at SMTP_HOST, or only print it."""
    mail = EmailMessage()
    mail["To"], mail["Subject"] = email, f"Invoice {number}"
    mail["Message-ID"] = f"<invoice.{number}@shop.example>"
    if host := os.environ.get("SMTP_HOST"):
        with smtplib.SMTP(host) as smtp:
            smtp.send_message(mail, "shop@shop.example")
    print(f"sent invoice {number} to {email}")
    return str(mail["Message-ID"])


if __name__ == "__main__":
    database = os.environ.get("DATABASE_URL", "")
    with psycopg.connect(database) as connection:
        for _ in range(2):  # a mistake: no idempotency_key
            rota.Client(connection).enqueue(
                "send_invoice", {"number": 5, "email": "a@b.example"}
            )
    rota.Worker(database, registry, concurrency=1).run(drain=True)
