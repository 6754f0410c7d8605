"""The play: start the shop's processes, kill a worker, and watch until all jobs have ended."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from pathlib import Path

from rota.client.connecting import connect

from . import story
from .display import Display
from .mail import message_id
from .outage import Outage, play_outage
from .place import Place
from .processes import Processes
from .records import Run, read_runs
from .shop import click_export, open_shop, run_cron

PATIENCE = 90
"""Seconds after which the demo gives up; a third of it is plenty."""


@dataclass(slots=True)
class Happened:
    """What the play leaves behind for the proof."""

    parts: list[story.Part] = field(default_factory=list)
    new_jobs: list[int] = field(default_factory=list)
    """How many jobs each server's cron brought."""
    runs: list[Run] = field(default_factory=list)
    mails: Counter[str] = field(default_factory=Counter)
    """How often the provider has each mail, by Message-ID."""
    killed: str | None = None
    exit_codes: dict[str, int] = field(default_factory=dict)
    outage: list[Outage] = field(default_factory=list)
    is_in_time: bool = True
    logs: str = ""


def play(place: Place, display: Display, folder: Path) -> Happened:
    """Play the story; return what happened."""
    maildir = folder / "mailbox"
    happened = Happened()
    with (
        connect(place.conninfo, "rota demo") as connection,
        Processes(folder, {"DATABASE_URL": place.conninfo}) as processes,
        _closed_port() as port,
    ):
        today, last_week, week_before = open_shop(connection)
        processes.variables["ROTA_DEMO_SMTP"] = _start_provider(processes, maildir)

        night, click = story.nightly(today, last_week, port), story.export(week_before)
        happened.parts = [*night, click]
        display.expect(happened.parts)
        for server in ("web-1", "web-2"):
            new = sum(run_cron(connection, night))
            happened.new_jobs.append(new)
            display.say(f"cron on {server} enqueues {len(night)} jobs: {new} are new")
        for name in story.WORKERS:
            _start_worker(processes, name)
        display.say(f"{len(story.WORKERS)} workers start")

        begun, is_clicked = time.monotonic(), False
        while happened.is_in_time:
            # In this order, whoever sent a mail is known when the mail is seen.
            happened.mails = read_mails(maildir)
            happened.runs = read_runs(connection)
            display.show(happened.runs, happened.mails)
            if not is_clicked and any(run.attempts for run in happened.runs):
                click_export(connection, click)
                display.say("finn clicks on export: his report goes before all that wait")
                is_clicked = True
            elif happened.killed is None and _has_victims_mail(happened):
                happened.killed = _kill_the_sender(processes, happened.runs)
                display.say(f"kill -9 {happened.killed}, before it can finish the job")
            elif is_clicked and all(run.is_over for run in happened.runs):
                # The last mail may have come between the two.
                happened.mails = read_mails(maildir)
                display.show(happened.runs, happened.mails)
                break
            if gone := set(processes.dead()) - {happened.killed}:
                raise RuntimeError(f"{', '.join(gone)} ended:\n{processes.last_words()}")
            happened.is_in_time = time.monotonic() - begun < PATIENCE
            time.sleep(0.1)
        if happened.is_in_time:
            happened.outage = play_outage(connection, processes, display)
        alive = [name for name in story.WORKERS if name != happened.killed]
        happened.exit_codes = processes.stop(alive)
        happened.logs = processes.last_words()
    return happened


def read_mails(maildir: Path) -> Counter[str]:
    """Count the mails in the provider's mailbox by Message-ID."""
    mails = [message_from_bytes(path.read_bytes()) for path in maildir.glob("new/*")]
    return Counter(str(mail["Message-ID"]) for mail in mails)


def _start_provider(processes: Processes, maildir: Path) -> str:
    silences = [f"--silent-for={user}@example.com" for user in story.SILENCES.elements()]
    server = processes.start("mail", ["demo.mail_server", str(maildir), *silences])
    assert server.stdout is not None
    port = server.stdout.readline().strip()
    if not port:
        raise RuntimeError(f"the mail server did not start:\n{processes.last_words()}")
    return port


def _start_worker(processes: Processes, name: str) -> None:
    command = f"rota worker demo.handlers:registry --name {name} --queue {story.QUEUE}"
    command += f" --concurrency 1 --batch 1 --lease {story.LEASE} --poll-interval 0.2"
    processes.start(name, command.split())


def _has_victims_mail(happened: Happened) -> bool:
    victim = next(part for part in happened.parts if story.KILLED in part.errors)
    return happened.mails[message_id(victim.key)] > 0


def _kill_the_sender(processes: Processes, runs: list[Run]) -> str:
    run = next(run for run in runs if f":{story.VICTIM}:" in run.idempotency_key)
    if run.worker is None:
        raise RuntimeError(f"job {run.id} has no worker though its mail was sent")
    processes.kill(run.worker)
    return run.worker


@contextmanager
def _closed_port() -> Iterator[int]:
    """Hold a port at which nobody listens, so that every connection to it is refused."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
