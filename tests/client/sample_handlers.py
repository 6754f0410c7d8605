"""The handlers of the worker processes that the tests start."""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

import rota

registry = rota.Registry()
empty = rota.Registry()


@registry.handler("quick")
def quick(job: rota.Job) -> dict[str, int]:
    """End at once."""
    return {"attempt": job.attempt}


@registry.handler("frozen")
def frozen(job: rota.Job) -> bool:
    """Tell whether the collector of garbage leaves alone what was imported."""
    return gc.get_freeze_count() > 10_000


@registry.handler("fill")
def fill(job: rota.Job) -> int:
    """Use so much memory."""
    return len(b"x" * (1_000_000 * int(job.payload["megabytes"])))


@registry.handler("sleep")
def sleep(job: rota.Job) -> None:
    """Take a while, whatever happens."""
    until = time.monotonic() + float(job.payload["seconds"])
    while time.monotonic() < until:
        time.sleep(0.02)


@registry.handler("leaves_thread")
async def leaves_thread(job: rota.AsyncJob) -> None:
    """Start what the interpreter waits for at its end."""
    threading.Thread(target=time.sleep, args=[60], name="beacon").start()


@registry.handler("leaves_process")
async def leaves_process(job: rota.AsyncJob) -> None:
    """Start what multiprocessing waits for at the end of the interpreter."""
    kind = multiprocessing.get_context("fork")
    kind.Process(target=time.sleep, args=[15], name="beacon").start()


@registry.handler("unblocks")
def unblocks(job: rota.Job) -> None:
    """Leave the error output as ssh and Node do, which a handler may start."""
    os.set_blocking(2, False)


@registry.handler("asks")
def asks(job: rota.Job) -> str:
    """Read from the terminal, as a debugger does."""
    return sys.stdin.readline()


@registry.handler("polite")
def polite(job: rota.Job) -> None:
    """Take a while, unless nobody wants it any more."""
    until = time.monotonic() + float(job.payload["seconds"])
    while time.monotonic() < until:
        job.check()
        time.sleep(0.02)


@registry.handler("async_sleep")
async def async_sleep(job: rota.AsyncJob) -> None:
    """Take a while in the loop."""
    await asyncio.sleep(float(job.payload["seconds"]))


@registry.handler("async_in_thread")
async def async_in_thread(job: rota.AsyncJob) -> None:
    """Let a thread of the loop take a while."""
    await asyncio.to_thread(time.sleep, float(job.payload["seconds"]))


@registry.handler("async_stubborn")
async def async_stubborn(job: rota.AsyncJob) -> None:
    """Go on in the loop, whoever says that it shall end."""
    until = time.monotonic() + float(job.payload["seconds"])
    while time.monotonic() < until:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.02)


@registry.handler("block_loop")
async def block_loop(job: rota.AsyncJob) -> None:
    """Compute in the loop and let nothing else run there."""
    until = time.monotonic() + float(job.payload["seconds"])
    while time.monotonic() < until:
        pass


@registry.handler("mark")
def mark(job: rota.Job) -> None:
    """Write in the transaction that ends the job."""
    with job.transaction() as connection:
        connection.execute("insert into marks (job_id) values (%s)", [job.job_id])
        sleep(job)


@registry.handler("computes")
async def computes(job: rota.AsyncJob) -> None:
    """Compute without end in a process of its own."""
    await job.run_in_process(compute, job.payload["started"])


def compute(started: str) -> None:
    """Tell the process, and go on until it is killed."""
    Path(started).write_text(str(os.getpid()))
    while True:
        time.sleep(1)


@registry.handler("charge")
def charge(job: rota.Job) -> None:
    """Charge once, which takes until it may go on, and write in the end."""
    with job.effect("charge", str(job.job_id)) as effect:
        if effect.is_due:
            _tell(job, "charged")
            _tell(job, "began")
            while not Path(job.payload["go"]).exists():
                time.sleep(0.02)
    with job.transaction() as connection:
        connection.execute("insert into public.marks values (%s)", [job.job_id])


@registry.handler("async_charge")
async def async_charge(job: rota.AsyncJob) -> None:
    """Charge once, which takes until it may go on, and write in the end."""
    async with job.effect("charge", str(job.job_id)) as effect:
        if effect.is_due:
            _tell(job, "charged")
            _tell(job, "began")
            while not Path(job.payload["go"]).exists():
                await asyncio.sleep(0.02)
    async with job.transaction() as connection:
        await connection.execute("insert into public.marks values (%s)", [job.job_id])


@registry.handler("fail")
def fail(job: rota.Job) -> None:
    raise ValueError(job.payload["text"])


def _tell(job: rota.Job | rota.AsyncJob, what: str) -> None:
    with Path(job.payload[what]).open("a") as file:
        file.write(f"{job.job_id}\n")
