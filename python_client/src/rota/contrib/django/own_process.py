"""What a handler in a process of its own needs of Django."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import django
from django.apps import apps
from django.db import close_old_connections


@contextmanager
def as_in_a_worker() -> Iterator[None]:
    """Have models, which can be imported only now, and keep no broken or old connection."""
    if not apps.ready:
        django.setup()
    close_old_connections()
    try:
        yield
    finally:
        close_old_connections()
