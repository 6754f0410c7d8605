"""The handlers of recorded workers; they end jobs in every way there is.

They run in processes of their own, which record if the environment names a folder.
"""

from __future__ import annotations

import asyncio
import random
import time
from datetime import timedelta

import rota
from faults.history.recording import record_if_asked

record_if_asked()
registry = rota.Registry()
# A worker that was killed must not do the same again.
dice = random.SystemRandom()


@registry.handler("plain")
def plain(job: rota.Job) -> None:
    """Take a moment; sometimes fail, for good or not, or ask for another time."""
    time.sleep(dice.choice([0, 0, 0.02, 0.2]))
    luck = dice.random()
    if luck < 0.08:
        raise RuntimeError("bad luck")
    if luck < 0.1:
        raise rota.FatalError("no hope")
    if luck < 0.14:
        raise rota.Snooze(timedelta(seconds=0.1))
    if luck < 0.16:
        raise rota.RetryIn(timedelta(seconds=0.2))


@registry.handler("together")
def together(job: rota.Job) -> None:
    """Finish in a transaction of one's own, which may not come to its end."""
    with job.transaction():
        time.sleep(dice.choice([0, 0.02]))
        if dice.random() < 0.1:
            raise RuntimeError("bad luck")


@registry.handler("mail")
def mail(job: rota.Job) -> None:
    """Do something outside of the database, once."""
    with job.effect("mail", str(job.job_id), if_unknown="again") as effect:
        time.sleep(0.01 if effect.is_due else 0)


@registry.handler("waiting")
async def waiting(job: rota.AsyncJob) -> None:
    """Wait in the loop, and say how far it is."""
    await job.set_progress(50)
    await asyncio.sleep(dice.choice([0, 0.05, 0.3]))
