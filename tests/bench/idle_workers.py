"""Real workers in a process of their own, whose handlers note when they start.

    idle_workers.py DSN COUNT [--queue NAME] [--concurrency N] [--poll-interval S] [--no-listen]

Says `ready` when all have claimed, and prints the starts as JSON when its input ends.
"""

# ruff: noqa: T201 -- it talks to its parent
from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import rota


class IdleWorkers:
    """A process of workers; the clock of its starts is that of `time.monotonic`."""

    def __init__(self, dsn: str, count: int, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), dsn, str(count), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        """Wait until all are there."""
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError("the workers did not start")

    def stop(self) -> dict[int, float]:
        """Stop them; return when each job started."""
        out, _ = self.process.communicate("", timeout=60)
        return {int(n): at for n, at in json.loads(out).items()}

    def __enter__(self) -> IdleWorkers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


async def sleep(options: argparse.Namespace) -> dict[int, float]:
    starts: dict[int, float] = {}
    registry = rota.Registry()

    async def note(job: rota.AsyncJob) -> None:
        starts[job.payload.get("n", 0)] = time.monotonic()

    registry.add("noop", note)
    workers = [
        rota.Worker(
            options.dsn,
            registry,
            queues=[options.queue],
            concurrency=options.concurrency,
            poll_interval=options.poll_interval,
            listen=not options.no_listen,
        )
        for _ in range(options.count)
    ]
    tasks = []
    for worker in workers:
        tasks.append(asyncio.create_task(worker.run_async()))
        await asyncio.sleep(0.03)
    await asyncio.sleep(1.0)
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for worker in workers:
        worker.stop()
    await asyncio.gather(*tasks)
    return starts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dsn")
    parser.add_argument("count", type=int)
    parser.add_argument("--queue", default="default")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--poll-interval", type=float, default=1.0)
    parser.add_argument("--no-listen", action="store_true")
    known: Any = parser.parse_args()
    print(json.dumps(asyncio.run(sleep(known))))


if __name__ == "__main__":
    main()
