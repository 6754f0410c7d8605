"""A load: workers and producers, what is known of them, and how it comes to rest.

While the faults last, the producers keep some jobs waiting.  Then they go on slowly; when the
backlog is worked off it is calm, which is noted in the history, and from now on everything must
be done in time.  At last nothing new comes, and every job has to end.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg

from faults.history.recording import mark
from faults.processes import LEASE, TICK, Crew, Task, run_producer, run_worker

CALM_BACKLOG = 20
PATIENCE = 40.0
AT_WORK = "select count(*) from rota.workers where exists (select from rota.finished_jobs)"
MANY = 10_000
"""To count so many is work, and not done all the time."""
Show = Callable[[], None]


class Load:
    """Workers and producers at a database; leave them alone by `rest`, end them by `stop`."""

    def __init__(
        self,
        url: str,
        folder: Path,
        seed: str,
        *,
        show: Show,
        workers: int = 4,
        producers: int = 2,
        backlog: int = 300,
        worker_options: Mapping[str, Any] | None = None,
        producer_options: Mapping[str, Any] | None = None,
        observed: str = "",
        namespace: str = "",
        environments: Sequence[Mapping[str, str]] = (),
        skew: int | None = None,
    ) -> None:
        self.url, self.folder = url, folder
        self.is_drained = False
        self.clock: Callable[[], dict[str, int]] = dict
        """What the clock of the database shows, if that is not the one of this machine."""
        self._seed, self._show = seed, show
        self._backlog = backlog
        self.observed = observed or url
        self._limit = multiprocessing.get_context("forkserver").Value("i", backlog, lock=False)
        self._observer: psycopg.Connection[Any] | None = None
        self._crews: list[Crew] = []
        made = Task(url, folder, seed, options=producer_options or {}, namespace=namespace)
        self._producer = made
        self._producers = producers
        self._workers = [
            Task(
                url,
                folder,
                seed,
                options=worker_options or {},
                namespace=namespace,
                environment=environment,
                skew=skew,
            )
            for environment in (environments or [{}])
        ]
        self._worker_count = workers

    def start(self) -> None:
        """Let them begin, and wait until they are at work: else a fault strikes nobody."""
        self.crews = [
            self.add(run_worker, task, f"worker-{number}" if number else "worker", count)
            for number, task in enumerate(self._workers)
            if (count := self._worker_count // len(self._workers))
        ]
        self.producers = self.add(
            run_producer, self._producer, "producer", self._producers, self._limit
        )
        count = sum(map(len, self.crews))
        until = time.monotonic() + PATIENCE + 2 * count
        while self.ask(AT_WORK) < count:
            if time.monotonic() > until:
                raise TimeoutError("the workers did not begin")
            self.pause(0.1)

    @property
    def crew(self) -> Crew:
        """Return the workers, or the first of several kinds."""
        return self.crews[0]

    def add(self, run: Any, task: Task, name: str, count: int, *arguments: Any) -> Crew:
        """Start more processes, which end with the load."""
        self._crews.append(Crew(run, task, name, count, *arguments))
        return self._crews[-1]

    def task(self, **changes: Any) -> Task:
        """Return a task for processes of another kind."""
        return replace(Task(self.url, self.folder, self._seed), **changes)

    def ask(self, query: str, *values: Any) -> Any:
        """Return the one value that a query gives, however often the server goes away."""
        row = self._run(query, values).fetchone()
        return row[0] if row else None

    def execute(self, statement: str) -> None:
        """Execute a statement that returns nothing, and may be executed twice."""
        self._run(statement)

    def _run(self, statement: str, values: Sequence[Any] = ()) -> psycopg.Cursor[Any]:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                if self._observer is None or self._observer.closed:
                    self._observer = psycopg.connect(
                        self.observed,
                        autocommit=True,
                        prepare_threshold=None,
                        connect_timeout=5,
                    )
                return self._observer.execute(statement.encode(), values)
            except psycopg.OperationalError:
                if self._observer is not None:
                    self._observer.close()
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def live(self) -> int:
        """Return how many jobs are live."""
        return int(self.ask("select count(*) from rota.jobs"))

    def enqueued(self) -> int:
        """Return about how many jobs there have been."""
        name = "pg_get_serial_sequence('rota.jobs', 'id')::regclass"
        return int(self.ask(f"select coalesce(pg_sequence_last_value({name}), 0)"))

    def pause(self, seconds: float) -> None:
        """Let some time pass, and look after all processes meanwhile."""
        until = time.monotonic() + seconds
        while True:
            for crew in self._crews:
                crew.look()
            self._show()
            if (left := until - time.monotonic()) <= 0:
                return
            time.sleep(min(left, 0.05))

    def wait(self, condition: Callable[[int], bool]) -> bool:
        """Wait until the number of live jobs is right, as long as it changes at all."""
        before, until = -1, 0.0
        while not condition(live := self.live()):
            if live != before:
                before, until = live, time.monotonic() + PATIENCE
            elif time.monotonic() > until:
                return False
            self.pause(0.1 if live < MANY else 2.0)
        return True

    def rest(self) -> None:
        """Let everything come to its end: there are no more faults."""
        for crew in self._crews:
            crew.thaw()
        self._limit.value = CALM_BACKLOG
        self.wait(lambda live: live <= 2 * CALM_BACKLOG)
        self.pause(1.0)
        mark("calm", lease=LEASE, sweep=TICK, **self.clock())
        self.pause(1.5)
        self.producers.stop()
        self.is_drained = self.wait(lambda live: live == 0)

    def stop(self) -> None:
        """End all processes."""
        for crew in reversed(self._crews):
            crew.stop()
        if self._observer is not None:
            self._observer.close()

    def troubles(self) -> dict[str, int]:
        """Return what processes did that they should not."""
        names = ("ended by themselves", "did not leave")
        found = {name: sum(crew.counts[name] for crew in self._crews) for name in names}
        return {f"processes that {name}": count for name, count in found.items() if count}
