"""Run a worker inside an asyncio program of one's own."""

import asyncio
import logging
import os

from jobs import registry

import rota


async def main() -> None:
    """Serve for ten seconds, then leave in good order."""
    logging.basicConfig(level=logging.INFO)
    worker = rota.Worker(os.environ.get("DATABASE_URL", ""), registry, concurrency=8)
    working = asyncio.create_task(worker.run_async())
    await asyncio.sleep(10)
    worker.stop()
    await working


if __name__ == "__main__":
    asyncio.run(main())
