"""Taking measurements: what statements cost the server, and pgbench.

CPU is that of the server process itself as the scheduler counts it, in nanoseconds.  Against
the clock on the wall it has two advantages: the client's work is not in it, and neighbours on
a shared machine who take the processor away lengthen the wall time only.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.measured_server import BenchServer, Db, one, process_cpu

backend_cpu = process_cpu


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which *share* of all lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def wal_position(db: Db) -> int:
    """Return how many bytes of log were ever written, by everybody."""
    return int(one(db, "select pg_current_wal_insert_lsn() - '0/0'"))


class Meter:
    """What one connection costs the server between `start` and `stop`.

    Log and buffers are counted for the whole server and the whole database, so nothing else
    may run there meanwhile; CPU is that of the connection's own process.
    """

    def __init__(self, db: Db) -> None:
        self._db = db
        self._pid = db.info.backend_pid
        self.cpu = self.wall = self.wal = self.buffers = 0.0

    def start(self) -> None:
        self._began = (self._buffers(), wal_position(self._db))
        self._began_cpu = backend_cpu(self._pid)
        self._began_wall = time.perf_counter()

    def stop(self) -> None:
        self.wall += time.perf_counter() - self._began_wall
        self.cpu += backend_cpu(self._pid) - self._began_cpu
        self.wal += wal_position(self._db) - self._began[1]
        self.buffers += self._buffers() - self._began[0]

    def _buffers(self) -> int:
        if self._db.info.server_version >= 150000:
            self._db.execute("select pg_stat_force_next_flush()")
        return int(
            one(
                self._db,
                "select blks_hit + blks_read from pg_stat_database"
                " where datname = current_database()",
            )
        )


@dataclass(frozen=True, kw_only=True)
class Pgbench:
    """What a run of pgbench gave: how many transactions, and what each process used."""

    transactions: int
    seconds: float
    server_cpu: float
    client_cpu: float
    latencies: list[tuple[float, float]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Transactions in a second."""
        return self.transactions / self.seconds


class PgbenchProcess:
    """A pgbench in the background, with prepared statements."""

    def __init__(
        self,
        server: BenchServer,
        dsn: str,
        script: str,
        *,
        clients: int,
        seconds: float | None = None,
        transactions: int | None = None,
        rate: float | None = None,
        variables: dict[str, str] | None = None,
        is_logged: bool = False,
    ) -> None:
        self._server = server
        self._is_logged = is_logged
        self._folder = tempfile.TemporaryDirectory(prefix="rota-pgbench-")
        folder = Path(self._folder.name)
        (folder / "script.sql").write_text(script)
        threads = min(clients, len(os.sched_getaffinity(0)))
        command = [server.program("pgbench"), "-n", "-M", "prepared", "-f", "script.sql"]
        command += ["-c", str(clients), "-j", str(threads)]
        if transactions is None:
            command += ["-T", str(max(1, round(seconds or 10)))]
        else:
            command += ["-t", str(transactions)]
        if rate is not None:
            command += ["-R", str(rate)]
        if is_logged:
            command += ["-l", "--log-prefix=log"]
        for name, value in (variables or {}).items():
            command += ["-D", f"{name}={value}"]
        self._began_cpu = server.cpu()
        self._began_client = os.times()
        self.process = subprocess.Popen(
            [*command, dsn],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self, timeout: float = 3600) -> Pgbench:
        """Wait for its end; raises RuntimeError if a statement failed."""
        try:
            out, err = self.process.communicate(timeout=timeout)
            cpu = self._server.cpu() - self._began_cpu
            if self.process.returncode != 0:
                raise RuntimeError(f"pgbench: {err.strip()[-800:]}")
            return self._read(out, cpu)
        finally:
            self.stop()

    def stop(self) -> None:
        """End it, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        self._folder.cleanup()

    def _read(self, out: str, cpu: float) -> Pgbench:
        done = re.search(r"actually processed: (\d+)", out)
        rate = re.search(r"^tps = ([\d.]+) \(without", out, re.MULTILINE)
        if done is None or rate is None:
            raise RuntimeError(f"pgbench said: {out}")
        after = os.times()
        client = (
            after.children_user
            + after.children_system
            - self._began_client.children_user
            - self._began_client.children_system
        )
        return Pgbench(
            transactions=int(done[1]),
            seconds=int(done[1]) / float(rate[1]),
            server_cpu=cpu,
            client_cpu=client,
            latencies=self._latencies() if self._is_logged else [],
        )

    def _latencies(self) -> list[tuple[float, float]]:
        """When each transaction ended, and how many seconds it took, lag of a rate included."""
        found = []
        for path in Path(self._folder.name).glob("log.*"):
            for line in path.read_text().splitlines():
                fields = line.split()
                ended = int(fields[4]) + int(fields[5]) / 1e6
                found.append((ended, int(fields[2]) / 1e6))
        return sorted(found)


def pgbench(
    server: BenchServer,
    dsn: str,
    script: str,
    *,
    clients: int,
    seconds: float | None = None,
    transactions: int | None = None,
    variables: dict[str, str] | None = None,
) -> Pgbench:
    """Run a script in pgbench with prepared statements, and wait for its end."""
    return PgbenchProcess(
        server,
        dsn,
        script,
        clients=clients,
        seconds=seconds,
        transactions=transactions,
        variables=variables,
    ).wait()
