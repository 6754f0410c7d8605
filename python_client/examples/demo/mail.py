"""The shop's way to its mail provider."""

from __future__ import annotations

import os
import smtplib
from contextlib import closing
from dataclasses import dataclass
from email.message import EmailMessage
from email.policy import SMTP

SENDER = "reports@shop.example"
TIMEOUT = 3.0
"""Seconds to wait for each answer of the provider."""


class MailNotAcceptedError(Exception):
    """The provider certainly does not have the mail."""


class MailTimeoutError(MailNotAcceptedError):
    """The provider did not answer, and so far it had not got the mail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A mail; *key* names the business event, so it is the same in every attempt."""

    key: str
    to: str
    subject: str
    text: str

    @property
    def message_id(self) -> str:
        """The Message-ID, made of the key."""
        return message_id(self.key)

    def as_bytes(self) -> bytes:
        """Return the mail as it goes over the wire."""
        mail = EmailMessage(SMTP)
        mail["From"] = SENDER
        mail["To"] = self.to
        mail["Subject"] = self.subject
        mail["Message-ID"] = self.message_id
        mail.set_content(self.text)
        return mail.as_bytes()


def message_id(key: str) -> str:
    """Return the Message-ID of the mail about one business event."""
    return f"<{key.replace(':', '.')}@shop.example>"


def send(message: Message) -> None:
    """Hand a mail to the provider.

    Raise MailNotAcceptedError if the provider certainly does not have it.  After any other
    error it may have it or not, and nobody can know without asking.
    """
    with closing(smtplib.SMTP(timeout=TIMEOUT)) as smtp:
        try:
            smtp.connect("127.0.0.1", int(os.environ["ROTA_DEMO_SMTP"]))
            smtp.ehlo()
            _expect_ok(smtp.mail(SENDER))
            _expect_ok(smtp.rcpt(message.to))
        except OSError as error:  # smtplib's own errors are among these
            if isinstance(error.__context__ or error, TimeoutError):
                text = f"the mail provider did not answer within {TIMEOUT:.0f} s"
                raise MailTimeoutError(text) from error
            raise MailNotAcceptedError(
                f"the mail provider does not take it: {error}"
            ) from error
        try:
            _expect_ok(smtp.data(message.as_bytes()))
        except smtplib.SMTPResponseException as error:  # it did answer, and said no
            raise MailNotAcceptedError(
                f"the mail provider does not take it: {error}"
            ) from error


def _expect_ok(answer: tuple[int, bytes]) -> None:
    if answer[0] != 250:
        raise smtplib.SMTPResponseException(*answer)
