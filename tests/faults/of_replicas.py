"""Faults of a pair of servers: the primary dies, and its replica takes over.

With a synchronous replica nothing that was told may be lost.  An asynchronous one loses what it
had not got, and the checker must tell exactly the jobs of that gap: it is the other canary.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psycopg

from faults.fault_run import Scene, fault
from faults.gap import Difference, differences, judge_gap
from faults.history.context import Context
from faults.history.dump import dump
from support.server import Server, free_port

READ_ONLY = "default_transaction_read_only"


class Pair:
    """A primary and its replica, which change places."""

    def __init__(self, primary: Server, stack: ExitStack, *, is_synchronous: bool) -> None:
        self._stack, self.is_synchronous = stack, is_synchronous
        self._number, self._home = 0, primary.home
        self.primary = primary
        self.replica = self.primary  # until there is one
        self._port = free_port()
        self.follow()
        self.url = self.primary.url_of_both(self.replica)

    def follow(self, port: int = 0) -> None:
        """Give the primary a new replica, where the old primary was."""
        self._port = port or self._port
        self._number += 1
        home = self._home.with_name(f"{self._home.name}-replica-{self._number}")
        self.replica = self.primary.copy(home, port=self._port)
        self._stack.callback(self.replica.destroy)
        if self.is_synchronous:
            self.primary.configure(synchronous_standby_names="*")

    def cut(self) -> None:
        """Let the replica get nothing any more."""
        self.replica.configure(primary_conninfo="")

    @contextmanager
    def promoted(self) -> Iterator[Server]:
        """Let the primary die and the replica be it; in the block nobody can write to it.

        The old primary is yielded; it can be started, as nobody else knows its new port.
        """
        old, self._port = self.primary, self.primary.port
        self.replica.configure(**{READ_ONLY: "on"})
        old.stop(signal.SIGQUIT)
        self.primary = self.replica
        self.primary.execute("select pg_promote()")
        old.port = free_port()
        try:
            yield old
        finally:
            old.destroy()
        self.primary.configure(**{READ_ONLY: "off"})


@fault("sync", "promotions of a synchronous replica", 10, minutes=2)
def promote_synchronous(scene: Scene) -> None:
    """Promote the replica again and again; nobody may notice more than broken lines."""
    pair = Pair(scene.server(), scene.stack, is_synchronous=True)
    with scene.load(pair.url) as load:
        for _ in scene.rounds():
            load.pause(scene.dice.uniform(1.5, 3.0))
            with pair.promoted():
                pass
            pair.follow()


def tell_the_gap(scene: Scene, context: Context) -> list[str]:
    """Judge by the rows that are missing."""
    lost, problems = judge_gap(scene.found, scene.history, context)
    scene.counts["jobs that lost what was told"] = len(lost)
    if twice := scene.counts["ids given twice"]:
        problems.append(f"{twice} ids were given to two jobs")
    return problems


@fault("async", "promotions of an asynchronous replica", 10, minutes=2, judge=tell_the_gap)
def promote_asynchronous(scene: Scene) -> None:
    """Promote a replica that is behind."""
    pair = Pair(scene.server(), scene.stack, is_synchronous=False)
    # A key of a job that was lost is free again, as it should be.
    with scene.load(pair.url, producer_options={"has_keys": False}) as load:
        for number in scene.rounds():
            load.pause(scene.dice.uniform(1.5, 3.0))
            pair.cut()
            load.pause(0.3)
            scene.found += _promote(scene, pair, number)
            pair.follow()
    scene.counts["jobs in the gaps"] = len(scene.found)
    scene.counts["ids given twice"] = _given_twice(scene, pair.primary)


def _promote(scene: Scene, pair: Pair, number: int) -> list[Difference]:
    folders = [scene.folder / f"{name}-{number}" for name in ("before", "after")]
    for folder in folders:
        folder.mkdir()
    with pair.promoted() as old:
        old.start()
        dump(old.url(), folders[0])
        dump(pair.primary.url(), folders[1])
    return differences(*folders)


def _given_twice(scene: Scene, server: Server) -> int:
    """Count the ids of jobs that were lost as a whole, and are there again."""
    lost = [each.job_id for each in scene.found if each.after is None]
    with psycopg.connect(server.url()) as db:
        row = db.execute(
            "select count(distinct id) from rota.job_runs where id = any(%s)", (lost,)
        ).fetchone()
    return int(row[0]) if row else 0
