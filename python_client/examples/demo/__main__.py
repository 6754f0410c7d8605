"""Play the demo: ``make demo``, or ``python -m demo`` in the folder above."""

from __future__ import annotations

import sys

try:
    from .command import main
except ImportError as error:
    sys.exit(f"demo: {error}; install what it needs: pip install './python_client[demo]'")

sys.exit(main(sys.argv[1:]))
