"""A network namespace with a line to this machine that can be cut.

Packets then vanish without a word, as they do where a switch dies: in both directions, or in
that of the answers only, so that what was asked for happens and nobody is told.
"""

from __future__ import annotations

import os
import shutil
import subprocess


class Namespace:
    """A namespace of its own; stop it to remove it."""

    def __init__(self) -> None:
        number = os.getpid() % 250 + 1
        self.name = f"rota-{os.getpid()}"
        self.address = f"10.77.{number}.1"
        """Where this machine is, seen from there."""
        self._line = f"rota{os.getpid()}"
        self._is_muted = False
        ip("netns", "add", self.name)
        try:
            ip(
                "link",
                "add",
                self._line,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                self.name,
            )
            ip("address", "add", f"{self.address}/30", "dev", self._line)
            ip("link", "set", self._line, "up")
            there = ("-n", self.name)
            ip(*there, "address", "add", f"10.77.{number}.2/30", "dev", "eth0")
            ip(*there, "link", "set", "eth0", "up")
            ip(*there, "link", "set", "lo", "up")
        except subprocess.CalledProcessError:
            self.stop()
            raise

    def cut(self) -> None:
        """Let nothing through in either direction."""
        ip("link", "set", self._line, "down")

    def mute(self) -> None:
        """Let through what is asked, and no answer."""
        subprocess.run(
            ["tc", "qdisc", "add", "dev", self._line, "root", "blackhole"], check=True
        )
        self._is_muted = True

    def restore(self) -> None:
        """Let everything through again."""
        if self._is_muted:
            subprocess.run(["tc", "qdisc", "del", "dev", self._line, "root"], check=True)
            self._is_muted = False
        ip("link", "set", self._line, "up")

    def stop(self) -> None:
        """Remove it, and the line with it."""
        subprocess.run(["ip", "netns", "delete", self.name], check=False)


def ip(*words: str) -> None:
    """Run the command."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def lacks_namespaces() -> str:
    """Say what this machine lacks for a namespace, or nothing."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    return f"needs {' and '.join(missing)}, of iproute2" if missing else ""
