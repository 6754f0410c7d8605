"""The server that everything is measured on: a PostgreSQL of its own, in one configuration.

What makes a benchmark pretty is left alone: every commit is on the disk, checkpoints and the
autovacuum run as they do for everybody.  Memory and the room for the log are those of a small
real server, so that no figure is about the defaults for a laptop.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from rota.testing import EmbeddedPostgres, find_binaries

BENCH = Path(__file__).resolve().parent
INSTALL = BENCH.parents[1] / "sql" / "install.sql"
SETTINGS = [
    "fsync=on",
    "synchronous_commit=on",
    "full_page_writes=on",
    "shared_buffers=1GB",
    "effective_cache_size=4GB",
    "random_page_cost=1.1",
    "max_wal_size=8GB",
    "checkpoint_timeout=30min",
    "max_connections=300",
    "autovacuum=on",
    "track_io_timing=off",
    "jit=off",
]
# jit=off is for the yardstick: rota's functions say so themselves.
Db = psycopg.Connection[Any]


class BenchServer:
    """A running server; leave the `with` block to stop it and delete its data."""

    def __init__(self, settings: list[str] | None = None) -> None:
        self.settings = SETTINGS + (settings or [])
        self.bindir, _ = find_binaries(None)
        self._embedded = EmbeddedPostgres(bindir=self.bindir, settings=self.settings)
        self.version = self._embedded.version
        self.admin: Db = psycopg.connect(self.dsn("template1"), autocommit=True)
        self.data = Path(one(self.admin, "show data_directory"))
        self.postmaster = int((self.data / "postmaster.pid").read_text().split()[0])

    def dsn(self, name: str) -> str:
        """Return the URL of a database."""
        return self._embedded.url(name)

    def program(self, name: str) -> str:
        """Return the path of a program of this PostgreSQL, or of one on the PATH."""
        path = self.bindir / name
        found = str(path) if path.exists() else shutil.which(name)
        if found is None:
            raise FileNotFoundError(f"there is no {name}; it comes with PostgreSQL")
        return found

    def fresh(self, name: str) -> str:
        """Make a database with rota and the bare queues in it; return its URL."""
        self.drop(name)
        self.admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        dsn = self.dsn(name)
        for script in (INSTALL, BENCH / "bare.sql"):
            command = [self.program("psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", dsn]
            subprocess.run([*command, "-f", str(script)], check=True)
        return dsn

    def drop(self, name: str) -> None:
        """Drop a database, whoever is in it."""
        drop = sql.SQL("drop database if exists {} with (force)")
        self.admin.execute(drop.format(sql.Identifier(name)))

    def cpu(self) -> float:
        """Return the CPU seconds that all server processes, gone ones too, have used."""
        fields = Path(f"/proc/{self.postmaster}/stat").read_text().rpartition(")")[2].split()
        gone = (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
        return gone + sum(process_cpu(pid) for pid in [self.postmaster, *self._children()])

    def _children(self) -> list[int]:
        path = Path(f"/proc/{self.postmaster}/task/{self.postmaster}/children")
        return [int(pid) for pid in path.read_text().split()]

    def stop(self) -> None:
        self.admin.close()
        os.kill(self.postmaster, signal.SIGQUIT)  # what it has not written yet is not wanted
        self._embedded.stop()

    def __enter__(self) -> BenchServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


@dataclass(frozen=True)
class Machine:
    """What the figures were taken on."""

    processors: int
    model: str
    memory_gb: int
    kernel: str
    load: float

    @classmethod
    def here(cls) -> Machine:
        """Look at this machine."""
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return cls(
            processors=len(os.sched_getaffinity(0)),
            model=models[0] if models else os.uname().machine,
            memory_gb=round(memory),
            kernel=os.uname().release,
            load=os.getloadavg()[0],
        )


def process_cpu(pid: int) -> float:
    """Return the CPU seconds of a process, to the nanosecond; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def one(db: Db, query: Any, values: Any = None) -> Any:
    """Return the one value that a query gives."""
    row = db.execute(query, values).fetchone()
    if row is None:
        raise LookupError(f"no row from {query!r}")
    return row[0]
