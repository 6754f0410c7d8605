"""The demo: a small shop's background jobs on real processes, one of which is killed.

`handlers` is the part to learn from: the shop's jobs, safe to run twice.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Play the demo; return 0 if everything was as told."""
    try:
        # Imported here: a worker that loads the handlers does not need it.
        from .command import main as play
    except ImportError as error:
        hint = "install what the demo needs: pip install './python_client[demo]'"
        print(f"rota demo: {error}; {hint}", file=sys.stderr)
        return 1
    return play(argv)
