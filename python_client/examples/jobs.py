"""Handlers of each kind, for a worker:  rota worker jobs:registry.

For cron there is ``rota worker jobs:registry --drain``: it leaves when nothing is due.
"""

import asyncio

import rota

registry = rota.Registry()


@registry.handler("send_welcome")
def send_welcome(job: rota.Job) -> dict[str, str]:
    """Run in a thread; the return value is the result of the job."""
    return {"sent_to": job.payload["email"]}


@registry.handler("count_users")
def count_users(job: rota.Job) -> None:
    """Write in the transaction that also finishes the job: exactly once, or not at all."""
    with job.transaction() as connection:
        connection.execute("create table if not exists counts (users bigint)")
        connection.execute("insert into counts select count(*) from users")


@registry.handler("import_pages")
async def import_pages(job: rota.AsyncJob) -> None:
    """Run in the event loop, and say how far it is; a cancelled job is cancelled here."""
    for page in range(1, 11):
        await asyncio.sleep(0.1)
        await job.set_progress(page * 10, f"page {page} of 10")
