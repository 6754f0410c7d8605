"""A fault that is a way of life: everybody shares two sessions through pgbouncer."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from urllib.parse import urlsplit

from faults.scene import Scene, fault
from faults.server import free_port, give_away

JOBS_A_ROUND = 1000


def find_pgbouncer() -> str:
    """Return where pgbouncer is, or nothing."""
    return shutil.which("pgbouncer", path=os.environ.get("PATH", "") + ":/usr/sbin") or ""


def lacks_pgbouncer() -> str:
    """Say what this machine lacks for a pooler, or nothing."""
    return "" if find_pgbouncer() else "needs pgbouncer"


@fault("pooler", "thousand jobs through two sessions by 32 clients", 100, minutes=4,
       lacks=lacks_pgbouncer)  # fmt: skip
def pooler(scene: Scene) -> None:
    """Let eight workers with their connections, and some producers, share two sessions."""
    direct = scene.url()
    url = _start(scene, direct)
    with scene.load(
        url,
        observed=direct,
        workers=8,
        producers=4,
        backlog=500,
        worker_options={"batch": 20},
        producer_options={"pause": 0},
    ) as load:
        for number in scene.rounds():
            while load.enqueued() < JOBS_A_ROUND * (number + 1):
                load.pause(0.2)
        sessions = load.ask("select count(*) from pg_stat_activity where datname = "
                            "current_database() and pid <> pg_backend_pid()")  # fmt: skip
    scene.counts["sessions"] = int(sessions)


def _start(scene: Scene, direct: str) -> str:
    parts, port = urlsplit(direct), free_port()
    target = f"host={parts.hostname} port={parts.port} dbname={parts.path[1:]} "
    target += f"user={parts.username} password={parts.password}"
    lines = [
        *("[databases]", f"jobs = {target}"),
        *("[pgbouncer]", "listen_addr = 127.0.0.1", f"listen_port = {port}"),
        *("unix_socket_dir =", "auth_type = any", "pool_mode = transaction"),
        *("default_pool_size = 2", "max_client_conn = 500"),
        "user = nobody" if os.geteuid() == 0 else "",
    ]
    config = scene.folder / "pgbouncer.ini"
    config.write_text("\n".join([*lines, ""]))
    give_away(config)
    command = ["setpriv", "--pdeathsig", "KILL", find_pgbouncer(), "-q", str(config)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    scene.stack.callback(process.wait)
    scene.stack.callback(process.kill)
    _wait_for(port)
    return f"postgresql://anybody@127.0.0.1:{port}/jobs"


def _wait_for(port: int) -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise TimeoutError("pgbouncer did not start")
