"""The worker of effects_kill.py: it sends mails once, and kills itself on the way.

It writes down each step before the next, so that what a killed attempt did is known.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
from pathlib import Path

import rota
from demo import mail

registry = rota.Registry()
_folder = Path()
_seed = 0
_notes = -1

SCOPE = "mail"
LEASE = 2.0
CONCURRENCY = 3
# Where so many of a hundred attempts end; others die with them, wherever they are.
DEATHS = {"recorded": 5, "sent": 35, "completed": 30}


def run(url: str, folder: Path, port: int, seed: int) -> None:
    """Work until told to stop, or dead."""
    global _folder, _seed, _notes
    _folder, _seed = folder, seed
    _notes = os.open(
        folder / "notes" / str(os.getpid()), os.O_CREAT | os.O_WRONLY | os.O_APPEND
    )
    os.environ["ROTA_DEMO_SMTP"] = str(port)
    logging.basicConfig(filename=folder / "log", level=logging.ERROR)
    rota.Worker(
        url, registry, concurrency=CONCURRENCY, poll_interval=0.05, tick_interval=0.3
    ).run()


@registry.handler("send")
def send(job: rota.Job) -> None:
    """Send a mail, as often as the policy of this job says."""
    key, if_unknown = job.payload["key"], job.payload["if_unknown"]
    try:
        with job.effect(SCOPE, key, if_unknown) as effect:
            if effect.is_due:
                note("due", job)
                die_at("recorded", job)
                mail.send(mail.Message(key=key, to="a@example.com", subject=key, text=key))
                note("sent", job)
                die_at("sent", job)
    except rota.LeaseLostError:
        note("lost", job)
        raise
    if effect.is_due:
        note("completed", job)
        die_at("completed", job)


def note(step: str, job: rota.Job) -> None:
    """Write a line, which stays also if this process is killed."""
    os.write(_notes, f"{step} {job.payload['key']} {job.lease_token}\n".encode())


def die_at(place: str, job: rota.Job) -> None:
    """Kill this process, if that is what the dice of seed, job and attempt say."""
    roll = hashlib.sha256(f"{_seed}:{job.payload['key']}:{job.attempt}".encode()).digest()
    number = int.from_bytes(roll[:4]) % 100
    for name, share in DEATHS.items():
        if number < share and name == place and not (_folder / "enough").exists():
            note(f"killed-{place}", job)
            os.kill(os.getpid(), signal.SIGKILL)
        number -= share
        if number < 0:
            return
