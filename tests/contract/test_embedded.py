"""The throw-away server: it works, and above all it goes away again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from rota.testing import EmbeddedPostgres, find_binaries
from support.waiting import wait_until

BINDIR = os.environ.get("ROTA_PG_BINDIR")
OWNER = """
import sys, time
from rota.testing import EmbeddedPostgres
server = EmbeddedPostgres(bindir=sys.argv[1])
print(server.url(), flush=True)
time.sleep(60)
"""


def is_up(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.mark.slow
def test_it_wants_its_password_and_ends_with_the_block() -> None:
    with EmbeddedPostgres(bindir=BINDIR, settings=["work_mem=7MB"]) as server:
        url = server.url()
        with psycopg.connect(url) as connection:
            shown = connection.execute("show work_mem").fetchone()
            directory = connection.execute("show data_directory").fetchone()
        open_to_all = is_up(url.replace(url.split(":")[2].split("@")[0], "guess"))

    assert shown == ("7MB",)
    assert not open_to_all
    assert not is_up(url)
    assert directory is not None
    assert not Path(directory[0]).exists()


@pytest.mark.slow
def test_it_goes_with_a_killed_parent_and_leaves_no_files() -> None:
    bindir = str(find_binaries(BINDIR)[0])
    command = [sys.executable, "-c", OWNER, bindir]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        with psycopg.connect(url) as connection:
            (data,) = connection.execute("show data_directory").fetchone() or ("",)
        assert Path(data).is_dir()

        parent.send_signal(signal.SIGKILL)

    wait_until(lambda: not is_up(url), "the end of the server")
    wait_until(lambda: not Path(data).parent.exists(), "the end of its files")


def test_it_says_where_its_programs_are_from(tmp_path: Path) -> None:
    bindir, _ = find_binaries(BINDIR)

    assert find_binaries(bindir) == (bindir, "given")
    assert find_binaries()[1] != "given"
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        find_binaries(tmp_path)


def test_it_looks_on_when_pg_config_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pg_config").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "pg_config").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    assert find_binaries()[1] != "pg_config"
