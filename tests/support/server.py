"""A PostgreSQL server that can be crashed, copied, and started again where it lies.

All of it is in one directory of its own, so a replica, a small disk or a false clock is only a
matter of where that is and what the server is started with.  The settings are in its
configuration file and not on its command line, so that they can be changed while it runs.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psycopg

from rota.testing import find_binaries
from support.locales import chosen

INSTALL = Path(__file__).resolve().parents[2] / "sql" / "install.sql"
DATABASE = "jobs"
PATIENCE = 60.0
# The machine itself stays up, so what is written is safe: only what is not written can be lost.
SETTINGS = (
    *("fsync=off", "max_connections=450", "shared_buffers=256MB", "max_wal_size=4GB"),
    *("wal_level=replica", "wal_keep_size=1GB", "max_wal_senders=8", "jit=off"),
    *("restart_after_crash=on", "log_min_messages=warning", "unix_socket_directories=''"),
)


class Server:
    """A server: `create` makes a new one, `copy` a replica, `twin` one that goes on alone."""

    def __init__(self, home: Path, password: str, *, port: int = 0) -> None:
        self.home, self.data = home, home / "data"
        self.port = port or free_port()
        self.environment: dict[str, str] = {}
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def create(
        cls,
        home: Path,
        settings: Sequence[str] = (),
        *,
        port: int = 0,
        data: Path | None = None,
        wal: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Server:
        """Make a server with rota in a database, and start it.

        Its tables may be on another disk, in *data*, and what it writes first in *wal*.
        """
        server = cls(home, secrets.token_urlsafe(12), port=port)
        server.data = data or server.data
        server.environment.update(environment or {})
        give_away(home)
        password_file = home / "password"
        password_file.write_text(server._password)
        give_away(password_file)
        words = ["-E", "UTF8", "--locale=C", "--no-sync", "-U", "postgres", "-A"]
        words += ["scram-sha-256", f"--pwfile={password_file}", "-D", str(server.data)]
        words += [f"--waldir={wal}"] if wal else []
        words += chosen()
        _run("initdb", *words)
        with (server.data / "postgresql.conf").open("a") as file:
            file.write("\n".join([*SETTINGS, *settings, ""]))
        with (server.data / "pg_hba.conf").open("a") as file:
            file.write("host all all 10.77.0.0/16 scram-sha-256\n")
        server.start()
        with psycopg.connect(server.url("postgres"), autocommit=True) as db:
            db.execute(f"create database {DATABASE}")
        install = ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", server.url()]
        subprocess.run([*install, "-f", str(INSTALL)], check=True)
        return server

    def copy(self, home: Path, *, port: int = 0) -> Server:
        """Return a running replica of this server."""
        home.mkdir()
        give_away(home)
        replica = Server(home, self._password, port=port)
        _run("pg_basebackup", "-R", "-X", "stream", "-c", "fast", "--no-sync",
             "-D", str(replica.data), "-d", self.url("postgres"))  # fmt: skip
        replica.start()
        return replica

    def twin(self, home: Path) -> Server:
        """Return a running server that is what this one was when it was stopped."""
        home.mkdir()
        give_away(home)
        twin = Server(home, self._password)
        subprocess.run(["cp", "-a", str(self.data), str(twin.data)], check=True)
        twin.start()
        return twin

    def url(self, database: str = DATABASE, host: str = "127.0.0.1", options: str = "") -> str:
        """Return the URL of a database of it."""
        address = f"postgres:{self._password}@{host}:{self.port}"
        return f"postgresql://{address}/{database}{options}"

    def url_of_both(self, other: Server) -> str:
        """Return a URL that leads to this server or another, whichever can be written to."""
        address = f"postgres:{self._password}@127.0.0.1:{self.port},127.0.0.1:{other.port}"
        return f"postgresql://{address}/{DATABASE}?target_session_attrs=read-write"

    def start(self) -> None:
        """Start it, and wait until it lets somebody in."""
        command = [str(_program("postgres")), "-D", str(self.data), "-p", str(self.port)]
        # Only now: libfaketime would leave something of root's where the server looks for it.
        falsehoods = [f"{name}={value}" for name, value in self.environment.items()]
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                _as_user(["env", *falsehoods, *command]),
                cwd="/",
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and self.is_running:
            with suppress(psycopg.OperationalError):
                psycopg.connect(self.url("template1"), connect_timeout=5).close()
                return
            time.sleep(0.05)
        raise RuntimeError(f"the server did not start: {self.log[-2000:]}")

    @property
    def is_running(self) -> bool:
        """Whether its first process is there."""
        return self._process is not None and self._process.poll() is None

    def processes(self) -> list[int]:
        """Return the number of the postmaster, which it says in a file, and its children's."""
        parent = (self.data / "postmaster.pid").read_text().split()[0]
        found = [int(parent)]
        for each in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (each / "stat").read_text().rpartition(")")[2].split()[1] == parent:
                    found.append(int(each.name))
        return found

    @property
    def log(self) -> str:
        """Return what it has to say."""
        return (self.home / "log").read_text(errors="replace")

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop it in good order, or with SIGQUIT like a crash: nothing more is written."""
        if self._process is None:
            return
        if self.is_running:
            self._process.send_signal(how)
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGQUIT)
                self._process.wait(PATIENCE)
        self._process = None

    def execute(self, *statements: str) -> None:
        """Execute statements as its superuser."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as db:
            for statement in statements:
                db.execute(statement.encode())

    def configure(self, **settings: str) -> None:
        """Change settings, and wait until a new session has them."""
        changes = [f"alter system set {name} = '{value}'" for name, value in settings.items()]
        self.execute(*changes, "select pg_reload_conf()")
        time.sleep(0.3)

    def age(self, xids: int) -> None:
        """Let it have given about so many transaction ids, while it is stopped."""
        each = 1 << 20
        segment = xids // each
        log = self.data / "pg_xact" / f"{segment:04X}"
        log.write_bytes(bytes(each // 4))
        give_away(log)
        _run("pg_resetwal", "-f", "-x", str(segment * each), "-D", str(self.data))

    def destroy(self) -> None:
        """Stop it and delete all of it."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.home, ignore_errors=True)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def give_away(path: Path) -> None:
    """Let the user of the servers have a file or directory, if we are root."""
    if os.geteuid() == 0:
        user = _user()
        os.chown(path, user.pw_uid, user.pw_gid)


def _user() -> pwd.struct_passwd:
    users = {user.pw_name: user for user in pwd.getpwall()}
    return users.get("postgres") or users["nobody"]


def _as_user(command: list[str]) -> list[str]:
    words = ["setpriv", "--pdeathsig", "INT"]
    if os.geteuid() == 0:
        user = _user()
        words += [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    return [*words, *command]


def _program(name: str) -> Path:
    return find_binaries(os.environ.get("ROTA_PG_BINDIR"))[0] / name


def _run(program: str, *words: str) -> None:
    command = _as_user([str(_program(program)), *words])
    done = subprocess.run(command, cwd="/", capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{program} failed: {done.stderr}")
