"""Faults of disks: there is no room any more, for the tables or for the log.

Without room for the tables calls fail one by one.  Without room for the log the server falls
down, and stays down until there is some again.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psycopg

from faults.fault_run import Scene, fault
from faults.workload import Load
from support.server import Server, give_away

DATA, LOG = "512m", "384m"
DISK_FULL = "53100"
WITHOUT_PAUSE = {"mix": {"quick": 9, "plain": 1}, "pause": 0}
PIECES = (1 << 22, 1 << 16, 1 << 12)
PATIENCE = 20.0


class Disk:
    """A small disk in memory."""

    def __init__(self, scene: Scene, path: Path, size: str) -> None:
        path.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "rota-faults", path], check=True
        )
        scene.stack.callback(lambda: subprocess.run(["umount", "--lazy", path], check=False))
        give_away(path)
        self.path, self._ballast = path, path / "ballast"

    def fill(self) -> None:
        """Take what room there is, in ever smaller pieces, as others take some too."""
        end = 0
        with self._ballast.open("wb") as file:
            for piece in PIECES:
                with suppress(OSError):
                    while True:
                        os.posix_fallocate(file.fileno(), end, piece)
                        end += piece

    def empty(self) -> None:
        """Give it back."""
        self._ballast.unlink(missing_ok=True)


def lacks_disks() -> str:
    """Say what this machine lacks for small disks, or nothing."""
    return "" if os.geteuid() == 0 else "needs root, to mount a small disk"


@fault("disk", "disks full", 20, minutes=4, lacks=lacks_disks)
def fill_disks(scene: Scene) -> None:
    """Fill the disk of the tables and that of the log in turns."""
    home = scene.folder / "disks"
    data, log = Disk(scene, home / "data", DATA), Disk(scene, home / "log", LOG)
    server = scene.server("max_wal_size=64MB", "min_wal_size=32MB", "wal_keep_size=0",
                          data=data.path / "data", wal=log.path / "wal")  # fmt: skip
    scene.general.add(DISK_FULL)
    with scene.load(server.url(), workers=4, producer_options=WITHOUT_PAUSE,
                    backlog=3000) as load:  # fmt: skip
        for number in scene.rounds():
            load.pause(2.0)
            disk = (data, log)[number % 2]
            noticed = server.log.count("No space left")
            disk.fill()
            try:
                _wait_for_trouble(load, server, noticed)
                load.pause(scene.dice.uniform(0.5, 2.0))
            finally:
                disk.empty()
            scene.counts["servers down"] += _get_up(load, server)


def _wait_for_trouble(load: Load, server: Server, before: int) -> None:
    """Return when the server has noticed; new segments of the log hasten that."""
    until = time.monotonic() + PATIENCE
    while server.log.count("No space left") == before:
        if time.monotonic() > until:
            raise TimeoutError("the server did not notice that its disk is full")
        load.pause(0.2)
        with suppress(psycopg.Error):
            server.execute("select pg_switch_wal()")


def _get_up(load: Load, server: Server) -> bool:
    """Start the server again if it has fallen down; return whether it had."""
    until = time.monotonic() + PATIENCE
    while server.is_running and time.monotonic() < until:
        load.pause(0.5)
        with suppress(psycopg.OperationalError):
            server.execute("select 1")
            return False
    server.stop()
    server.start()
    return True
