"""pgbouncer in transaction mode: all who come to a database share two sessions."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from support.server import free_port
from support.waiting import comes_true

CONFIG = """\
[databases]
* = host={host} port={port} auth_user={user}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own_port}
unix_socket_dir =
auth_type = scram-sha-256
auth_file = {folder}/users
auth_query = select usename, passwd from pg_shadow where usename = $1
pool_mode = transaction
default_pool_size = 2
max_client_conn = 1000
query_wait_timeout = 20
"""


def find_pgbouncer() -> str | None:
    """Return where pgbouncer is, or nothing."""
    return shutil.which("pgbouncer", path=os.environ.get("PATH", "") + ":/usr/sbin")


@contextmanager
def pooled(url: str, settings: str = "") -> Iterator[str]:
    """Let pgbouncer stand before a server; yield a superuser's URL with its port instead."""
    server, own_port, program = urlsplit(url), free_port(), find_pgbouncer()
    if program is None:
        raise FileNotFoundError("pgbouncer is not installed")
    with tempfile.TemporaryDirectory(prefix="rota-pooler-") as name:
        folder = Path(name)
        (folder / "users").write_text(f'"{server.username}" "{server.password}"\n')
        (folder / "config").write_text(
            CONFIG.format(
                host=server.hostname,
                port=server.port,
                user=server.username,
                own_port=own_port,
                folder=folder,
            )
            + settings
            # It does not run as root.
            + ("user = nobody\n" if os.geteuid() == 0 else "")
        )
        if os.geteuid() == 0:
            for path in (folder, *folder.iterdir()):
                shutil.chown(path, "nobody")
        command = ["setpriv", "--pdeathsig", "KILL", program, "-q", str(folder / "config")]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            _wait_for(own_port)
            yield url.replace(f":{server.port}/", f":{own_port}/")
        finally:
            process.kill()
            process.wait()


def _wait_for(port: int) -> None:
    def answers() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    if not comes_true(answers, 10, every=0.05):
        raise TimeoutError("pgbouncer did not start")
