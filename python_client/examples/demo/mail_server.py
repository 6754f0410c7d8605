"""The mail provider: a real SMTP server in a process of its own, which outlives any worker.

It keeps what it accepts in a Maildir, and answers 250 only when the mail is there.  Told to,
it does not answer at all the first time, or the first few times, a mail is for somebody.
"""

from __future__ import annotations

import argparse
import asyncio
import mailbox
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiosmtpd.smtp import SMTP

from .processes import end_with_parent


class Provider:
    """What the server does with a conversation; the names are those that aiosmtpd calls."""

    def __init__(self, maildir: Path, silences: Counter[str]) -> None:
        self._mails = mailbox.Maildir(maildir, create=True)
        self._silences = silences

    async def handle_RCPT(
        self, server: Any, session: Any, envelope: Any, address: str, options: list[str]
    ) -> str:
        """Take a recipient, or leave the client waiting until it goes away."""
        if self._silences[address] > 0:
            self._silences[address] -= 1
            await asyncio.sleep(3600)
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        """Put the mail into the mailbox."""
        self._mails.add(envelope.content)
        return "250 OK"


async def serve(provider: Provider) -> None:
    """Listen on a free port and print it; never return."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: SMTP(provider), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the server until it is killed."""
    parser = argparse.ArgumentParser(description="A mail provider that only keeps mail.")
    parser.add_argument("maildir", type=Path)
    parser.add_argument(
        "--silent-for", action="append", default=[], metavar="ADDRESS",
        help="do not answer the first mail for this address; may be repeated",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    asyncio.run(serve(Provider(arguments.maildir, Counter(arguments.silent_for))))


if __name__ == "__main__":
    end_with_parent()
    main()
