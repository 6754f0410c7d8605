"""Time how long producers wait when the primary dies and its standby is promoted.

    python -m bench.failover [--promotions N] [--asynchronous]

A producer enqueues all the time by a URL with both hosts.  The primary is killed, and at once
its standby is promoted.  On the new timeline the ids leap before the first enqueue, which is a
part of what is timed.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import psycopg

from faults.of_replicas import Pair
from rota.testing.server import memory
from support.server import Server

PAUSE = 0.01
"""Seconds until a producer whose call failed tries again."""


class Producer(threading.Thread):
    """Enqueues one job after the other, and says when which was told and how long it took."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.told: list[tuple[float, float, int]] = []
        """When it was told, how long the call took, and the id."""
        self.failed = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        while not self.stopping.is_set():
            try:
                with psycopg.connect(self._url, autocommit=True, connect_timeout=3) as db:
                    while not self.stopping.is_set():
                        began = time.monotonic()
                        row = db.execute("select rota.enqueue('x')").fetchone()
                        now = time.monotonic()
                        self.told.append((now, now - began, row[0] if row else 0))
            except psycopg.Error:
                self.failed += 1
                time.sleep(PAUSE)

    def wait(self, since: float, count: int) -> Sequence[tuple[float, float, int]]:
        """Return the first that were told since then, when there are so many."""
        while len(found := [each for each in self.told if each[0] > since]) < count:
            time.sleep(0.005)
        return found


def promote(pair: Pair, producer: Producer) -> tuple[float, float, float, float]:
    """Return how long it took from the death and from the promotion, and the calls around."""
    producer.wait(time.monotonic(), 200)
    before = median(took for _, took, _ in producer.told[-200:])
    old, port = pair.primary, pair.primary.port
    died = time.monotonic()
    old.stop(signal.SIGKILL)
    with psycopg.connect(pair.replica.url("postgres"), autocommit=True) as db:
        asked = time.monotonic()
        db.execute("select pg_promote()")
        if pair.is_synchronous:  # nobody follows for now, and a commit must not wait for it
            db.execute("alter system set synchronous_standby_names = ''")
            db.execute("select pg_reload_conf()")
    told, took, _ = producer.wait(asked, 1)[0]
    pair.primary, pair.replica = pair.replica, old
    old.destroy()
    pair.follow(port)
    return told - died, told - asked, took, before


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--promotions", type=int, default=10)
    parser.add_argument("--asynchronous", action="store_true")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=memory()))
    folder.chmod(0o711)
    try:
        with ExitStack() as stack:
            (folder / "server").mkdir()
            server = Server.create(folder / "server")
            stack.callback(server.destroy)
            pair = Pair(server, stack, is_synchronous=not arguments.asynchronous)
            producer = Producer(pair.url)
            producer.start()
            figures = [promote(pair, producer) for _ in range(arguments.promotions)]
            producer.stopping.set()
            producer.join()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ids = [job_id for _, _, job_id in producer.told]
    names = ("from the death of the primary", "from pg_promote()",
             "the first call alone", "a call before")  # fmt: skip
    for name, values in zip(names, zip(*figures, strict=True), strict=True):
        low, middle, high = min(values), median(values), max(values)
        print(f"{name:<32}{low * 1e3:9.1f} {middle * 1e3:9.1f} {high * 1e3:9.1f} ms")
    print(f"{len(ids)} enqueued, {producer.failed} calls failed, "
          f"{len(ids) - len(set(ids))} ids given twice")  # fmt: skip


if __name__ == "__main__":
    main()
