"""Commands about the whole: install, uninstall."""

from __future__ import annotations

import argparse

from ..client.sync_client import Client
from ..schema import run_script, script_text
from .output import CommandError, confirm, connected, print_json


def install(arguments: argparse.Namespace) -> None:
    """Install, or bring up to date."""
    options = {
        "with_roles": arguments.with_roles,
        "with_cron": arguments.with_cron,
        "allow_downgrade": arguments.force,
    }
    with connected(arguments) as connection:
        if arguments.dry_run:
            text = script_text(connection, "install.sql", options)
            print_json({"sql": text}) if arguments.json else print(text, end="")
            return
        run_script(connection, "install.sql", options)
        version, database = Client(connection).version(), connection.info.dbname
    if arguments.json:
        print_json({"database": database, "version": version})
    else:
        print(f"rota {version} is installed in {database}")


def uninstall(arguments: argparse.Namespace) -> None:
    """Remove the schema with everything in it, after a question."""
    with connected(arguments) as connection:
        database = connection.info.dbname
        row = connection.execute("select to_regnamespace('rota') as schema").fetchone()
        if not row or row["schema"] is None:
            raise CommandError(f"rota is not installed in {database}")
        if not arguments.yes:
            confirm(f"delete rota and all its jobs from {database}")
        run_script(connection, "uninstall.sql", {})
    if arguments.json:
        print_json({"database": database, "version": None})
    else:
        print(f"rota is removed from {database}")
