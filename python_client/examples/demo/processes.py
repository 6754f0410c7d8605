"""The processes of the demo: how they are started, and how they never outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
TETHER = "ROTA_DEMO_TETHER"


class Processes:
    """Children of the demo; leaving the ``with`` block ends them all."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self._folder = folder
        # They run in a folder of their own, and import the demo's modules.
        paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.variables = {**variables, "PYTHONPATH": os.pathsep.join(paths)}
        self._running: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
        """Start ``python -m`` with *arguments*; what it logs goes to a file."""
        with self._log(name).open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=self._folder,
                env={**os.environ, **self.variables, TETHER: "stdin"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is for the demo alone, which then ends them
            )
        self._running[name] = process
        return process

    def kill(self, name: str) -> None:
        """End a process with SIGKILL, so that it can do nothing more."""
        self._running[name].kill()
        self._running[name].wait()

    def stop(self, names: Sequence[str], timeout: float = 15) -> dict[str, int]:
        """Ask processes to end with SIGTERM; return their exit codes."""
        for name in names:
            self._running[name].terminate()
        return {name: self._running[name].wait(timeout) for name in names}

    def dead(self) -> list[str]:
        """Return the names of the processes that are not there any more."""
        return [name for name, process in self._running.items() if process.poll() is not None]

    def last_words(self, lines: int = 15) -> str:
        """Return the end of each log, for when something went wrong."""
        logs = ((name, self._log(name).read_text().splitlines()) for name in self._running)
        return "\n".join(f"--- {name}\n" + "\n".join(log[-lines:]) for name, log in logs if log)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for name, process in self._running.items():
            self.kill(name)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


def end_with_parent() -> None:
    """End this process as soon as the demo is gone, even when it was killed.

    Standard input is a pipe that only the demo holds open: the system closes it with the demo.
    """
    if os.environ.pop(TETHER, None) == "stdin":
        pipe = os.dup(sys.stdin.fileno())

        def wait() -> None:
            os.read(pipe, 1)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=wait, name="tether", daemon=True).start()
