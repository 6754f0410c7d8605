"""Install rota; another migration like this upgrades it."""

from typing import Any

from django.db import migrations

import rota


def install(apps: Any, schema_editor: Any) -> None:
    """Install rota with the connection of the migration."""
    if schema_editor.connection.vendor == "postgresql":  # each of DATABASES is migrated
        schema_editor.connection.ensure_connection()
        rota.install(schema_editor.connection.connection)


class Migration(migrations.Migration):
    """It comes first, so that every test database has rota too."""

    atomic = False  # rota's script has its own transaction
    operations = [migrations.RunPython(install, migrations.RunPython.noop)]  # noqa: RUF012
