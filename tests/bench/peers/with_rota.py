"""rota: the registries that its own command runs, and how it is filled."""

from __future__ import annotations

import psycopg
from common import URL, Times, begin, chunks, main, pace

import rota

registry = rota.Registry()
listening = rota.Registry()
_times: list[Times] = []


@registry.handler("noop")
async def nothing(job: rota.AsyncJob) -> None:
    """Do nothing, in the event loop."""
    begin()


@registry.handler("noop_in_thread")
def nothing_in_thread(job: rota.Job) -> None:
    """Do nothing, in a thread."""
    begin()


@listening.handler("noop")
async def note(job: rota.AsyncJob) -> None:
    """Write down when it began."""
    if not _times:
        _times.append(Times())
    _times[0].add(job.payload["n"])


async def fill(job_type: str = "noop") -> None:
    """Enqueue the jobs."""
    with psycopg.connect(URL) as db:
        client = rota.Client(db)
        for numbers in chunks():
            client.enqueue_many([{"job_type": job_type, "payload": {"n": n}} for n in numbers])


async def fill_threads() -> None:
    """Enqueue jobs for the plain handler."""
    await fill("noop_in_thread")


async def produce() -> None:
    """Enqueue one job after the other."""
    times = Times()
    async with await psycopg.AsyncConnection.connect(URL, autocommit=True) as db:
        client = rota.AsyncClient(db)
        async for n in pace():
            times.add(n)
            await client.enqueue("noop", {"n": n})


if __name__ == "__main__":
    main({"fill": fill, "fill_threads": fill_threads, "produce": produce})
