"""The worker of the shop, with Django set up around it."""

from typing import Any

from django.core.management import BaseCommand
from django.db import connection
from psycopg.conninfo import make_conninfo

import rota
from shop.jobs import registry


class Command(BaseCommand):
    """Run jobs until SIGTERM or Ctrl-C."""

    help = __doc__

    def handle(self, **options: Any) -> None:
        """Work in the database that Django has by default."""
        given = connection.get_connection_params()
        names = {"dbname", "host", "port", "user", "password"} & given.keys()
        rota.Worker(
            make_conninfo("", **{name: given[name] for name in names}),
            registry,
            queues=["default", "mail"],
        ).run()
