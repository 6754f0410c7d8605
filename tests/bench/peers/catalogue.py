"""Who is compared with rota, in which version, and with which settings.

Each peer runs its own worker on its own client, as its documentation or its own benchmark
says that it is fastest; README.md says where each setting comes from.  Programs for Python
have a virtual environment each, those for Node share a folder, all under .bench/peers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[2] / ".bench" / "peers"
NODE = CACHE / "node"
PATIENCE = 600
Environment = dict[str, str]


class NotInstalledError(Exception):
    """A peer is not there; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A queue with its worker; *waiting* counts the jobs that have not ended."""

    name: str
    program: str
    waiting: str
    prepare: Callable[[str], list[str]]
    settings: Environment = field(default_factory=dict)
    idle_settings: Environment = field(default_factory=dict)
    fill: str = "fill"
    commands: dict[str, str] = field(default_factory=dict)
    note: str = ""
    is_peer: bool = True

    def command(self, step: str) -> list[str]:
        """Return what to call for a step; raise NotInstalledError."""
        program = self.prepare(self.program)
        if step in self.commands:
            return [*program[:-1], *self.commands[step].split()]
        return [*program, self.fill if step == "fill" else step]

    def environment(self, step: str, **values: object) -> Environment:
        """Return the environment of a step, with *values* as BENCH_NAME."""
        chosen = {"work": self.settings, "listen": self.idle_settings}.get(step, {})
        given = {name.upper(): str(value) for name, value in values.items()}
        named = {f"BENCH_{name}": value for name, value in {**chosen, **given}.items()}
        return {**os.environ, **named}


def ours(program: str) -> list[str]:
    """Return the command for a program that needs rota or psycopg only."""
    return [sys.executable, str(HERE / program)]


def in_python(program: str) -> list[str]:
    """Return the command for a program with an environment of its own, and make that."""
    name = Path(program).stem.removeprefix("with_")
    pins = HERE / "pins" / f"{name}.txt"
    folder = CACHE / name
    if not is_fresh(folder, pins):
        call(sys.executable, "-m", "venv", "--clear", str(folder))
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        call(*pip, "--disable-pip-version-check", "--requirement", str(pins))
        stamp(folder, pins)
    return [str(folder / "bin" / "python"), str(HERE / program)]


def in_node(program: str) -> list[str]:
    """Return the command for a program in JavaScript, and bring what they all need."""
    pins = HERE / "pins" / "package.json"
    if not is_fresh(NODE, pins):
        if shutil.which("npm") is None:
            raise NotInstalledError("npm is not there")
        shutil.rmtree(NODE, ignore_errors=True)
        NODE.mkdir(parents=True)
        shutil.copy(pins, NODE)
        call("npm", "--prefix", str(NODE), "install", "--no-audit", "--no-fund", "--silent")
        stamp(NODE, pins)
    for source in HERE.glob("*.mjs"):  # modules are looked for beside the file that names them
        shutil.copy(source, NODE)
    return [str(NODE / "node_modules" / "node" / "bin" / "node"), str(NODE / program)]


def with_extension(program: str) -> list[str]:
    """Return the command for PgQ, and bring its Debian package if we may."""
    if not any(Path("/usr/share/postgresql").glob("*/extension/pgq.control")):
        major = newest_server()
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise NotInstalledError(f"the Debian package postgresql-{major}-pgq3 is not there")
        install = ["apt-get", "install", "-y", "--no-install-recommends"]
        call(*install, f"postgresql-{major}-pgq3")
    return ours(program)


def newest_server() -> str:
    """Return the number of the newest PostgreSQL that is installed."""
    found = Path("/usr/lib/postgresql").glob("[0-9]*")
    return max((path.name for path in found), key=int, default="")


def call(*command: str) -> None:
    """Run a command that installs something; raise NotInstalledError with its last words."""
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=PATIENCE
    )
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise NotInstalledError(f"{Path(command[0]).name} failed: {words[-1]}")


def is_fresh(folder: Path, pins: Path) -> bool:
    """Return whether a folder was made from these pins."""
    mark = folder / ".pins"
    return mark.exists() and mark.read_text() == digest(pins)


def stamp(folder: Path, pins: Path) -> None:
    """Write down from which pins a folder was made."""
    (folder / ".pins").write_text(digest(pins))


def digest(pins: Path) -> str:
    """Return what tells one set of pins from another."""
    return hashlib.sha256(pins.read_bytes()).hexdigest()


WORKER = "-m rota worker --log-level warning with_rota"
ROTA = Peer(
    name="rota",
    program="with_rota.py",
    waiting="select count(*) from rota.jobs",
    prepare=ours,
    commands={
        "work": f"{WORKER}:registry --concurrency 100",
        "listen": f"{WORKER}:listening",
    },
    note="--concurrency 100",
    is_peer=False,
)
ROTA_THREADS = Peer(
    name="rota, plain handlers in threads",
    program="with_rota.py",
    waiting="select count(*) from rota.jobs",
    prepare=ours,
    fill="fill_threads",
    commands={"work": f"{WORKER}:registry --concurrency 8"},
    note="--concurrency 8",
    is_peer=False,
)
BARE = Peer(
    name="bare loop in Python",
    program="with_bare.py",
    waiting="select count(*) from bare.tasks where status <> 'done'",
    prepare=ours,
    note="psycopg, batches of 100, no queue around it",
    is_peer=False,
)
PGQ = Peer(
    name="PgQ 3.5, a batch at a time",
    program="with_pgq.py",
    waiting="select coalesce(sum(pending_events), 0)::bigint from pgq.get_consumer_info()",
    prepare=with_extension,
    note="events, not jobs: a batch of 500 ends as a whole",
    is_peer=False,
)
PEERS = [
    Peer(
        name="procrastinate 3.10.0",
        program="with_procrastinate.py",
        waiting="""
            select count(*) from procrastinate_jobs where status in ('todo', 'doing')
        """,
        prepare=in_python,
        settings={"CONCURRENCY": "10", "POOL": "10", "DELETE": "always"},
        idle_settings={"CONCURRENCY": "10", "POOL": "10", "DELETE": "always"},
        note="concurrency 10, pool of 10, delete_jobs=always",
    ),
    Peer(
        name="PgQueuer 1.6.0",
        program="with_pgqueuer.py",
        waiting="select count(*) from pgqueuer",
        prepare=in_python,
        settings={"MANAGERS": "3", "BATCH": "500"},
        idle_settings={"MANAGERS": "1", "BATCH": "10"},
        note="asyncpg, uvloop, 3 queue managers, batch_size 500, autovacuum as it advises",
    ),
    Peer(
        name="awa 0.6.9",
        program="with_awa.py",
        # Both go together when a part of the ring is emptied, so the difference is right.
        waiting="""
            select (select count(*) from awa.ready_entries)
                - (select coalesce(sum(completed_count), 0) from awa.receipt_completion_batches)
        """,
        prepare=in_python,
        settings={"WORKERS": "1024", "CLAIMERS": "1", "BATCH": "512", "CONNECTIONS": "50"},
        idle_settings={"WORKERS": "50", "CLAIMERS": "0", "CONNECTIONS": "10"},
        note="Rust runtime, max_workers 1024, claim_batch_size 512, 50 connections",
    ),
    Peer(
        name="Graphile Worker 0.18.0",
        program="with_graphile_worker.mjs",
        waiting="select count(*) from graphile_worker._private_jobs",
        prepare=in_node,
        settings={"CONCURRENCY": "24", "LOCAL_QUEUE": "1000", "BATCHED": "1"},
        idle_settings={"CONCURRENCY": "1", "BATCHED": "0"},
        note="concurrentJobs 24, localQueue 1000, completeJobBatchDelay 0",
    ),
    Peer(
        name="pg-boss 12.38.0",
        program="with_pg_boss.mjs",
        waiting="select count(*) from pgboss.job where name = 'noop' and state < 'completed'",
        prepare=in_node,
        settings={"BATCH": "1000", "CONCURRENCY": "2"},
        idle_settings={"BATCH": "10", "CONCURRENCY": "2"},
        note="batchSize 1000, localConcurrency 2, burstWhenBatchFull, notify",
    ),
]
