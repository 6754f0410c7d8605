"""The demo: a small shop's background jobs on real processes, one of which is killed.

`handlers` is the part to learn from: the shop's jobs, safe to run twice.
"""

from __future__ import annotations

from typing import Any

__all__ = ["main"]


def __getattr__(name: str) -> Any:
    # Imported when it is asked for: a worker that loads the handlers does not need it.
    if name == "main":
        from .command import main

        return main
    raise AttributeError(name)
