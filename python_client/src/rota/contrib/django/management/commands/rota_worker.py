"""``manage.py rota_worker``: a worker for the database of the settings."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from django.core.management.base import BaseCommand
from django.db import connections
from django.utils.autoreload import get_child_arguments
from psycopg.conninfo import make_conninfo
from psycopg.pq import Conninfo

from .....__main__ import run


class Command(BaseCommand):  # type: ignore[misc]  # untyped in Django
    """Runs the command ``rota worker``, in this process or in as many as it is told to."""

    help = (
        "Run Django's Tasks, and the jobs of another registry that includes them, until "
        "SIGTERM or Ctrl-C. All options of `rota worker` go with it, such as --queue mail "
        "--concurrency 8."
    )

    def add_arguments(self, parser: Any) -> None:
        """Add those that `rota worker` does not have."""
        parser.add_argument("--database", default="default", help="an alias of DATABASES")
        own = "rota.contrib.django.jobs:registry"
        parser.add_argument(
            "--registry", default=own, help="module:name (default: %(default)s)"
        )

    def run_from_argv(self, argv: Sequence[str]) -> None:
        """Leave the options that are not Django's to `rota worker`."""
        self._called_from_command_line = True  # so that an error is no traceback
        parser = self.create_parser(argv[0], argv[1], allow_abbrev=False)
        known, others = parser.parse_known_args(argv[2:])
        if known.database not in connections:
            parser.error(f"there is no {known.database} in DATABASES")
        if connections[known.database].vendor != "postgresql":
            parser.error(f"{known.database} is no PostgreSQL: name one with --database")
        # By the environment, where no list of processes shows the password.
        os.environ["DATABASE_URL"] = _conninfo(known.database)
        # Further processes need Django, and what manage.py has done before.
        again = None
        with suppress(RuntimeError):  # a program that is no file cannot be started again
            again = get_child_arguments()
        sys.exit(run(["worker", known.registry, *others], again))


def _conninfo(alias: str) -> str:
    keywords = {option.keyword.decode() for option in Conninfo.get_defaults()}
    said = connections[alias].get_connection_params()
    # Not one of libpq: Django sets it in each of its own sessions.
    if role := connections[alias].settings_dict["OPTIONS"].get("assume_role"):
        escaped = re.sub(r"([\\\s])", r"\\\1", role)
        said["options"] = f"{said.get('options', '')} -c role={escaped}"
    return make_conninfo(**{name: said[name] for name in said if name in keywords})
