"""Read times and intervals in whatever style the server under test writes them.

In binary form they look the same in every style, and psycopg can read no other.  A test that is
about the texts themselves, or about plans, has the mark plain_session, and its sessions write
and plan as by default.
"""

from __future__ import annotations

import os
import re
from typing import Any

import psycopg


class BinaryCursor(psycopg.Cursor[Any]):
    """Asks for binary form, but where a statement must come as text, in one message."""

    def execute(self, query: Any, *args: Any, **options: Any) -> Any:
        text = query.as_string(self) if hasattr(query, "as_string") else query
        text = text if isinstance(text, str) else text.decode()
        # Several statements; or tick(), which in several messages is not alone.
        is_binary = not re.search(r';|\btick"?\(', text)
        return super().execute(query, *args, **{"binary": is_binary, **options})


CURSOR: type[psycopg.Cursor[Any]] = (
    BinaryCursor if "Style=" in os.environ.get("ROTA_TEST_SETTINGS", "") else psycopg.Cursor
)

PLAIN_SESSION = (
    "-c DateStyle=ISO,MDY -c IntervalStyle=postgres -c standard_conforming_strings=on"
    ' -c extra_float_digits=1 -c search_path="$user",public'
    " -c enable_indexscan=on -c enable_bitmapscan=on -c jit_above_cost=100000"
)
"""Options of libpq that let a session write and plan as by default."""
