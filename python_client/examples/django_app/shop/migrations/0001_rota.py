"""Install rota; a later version of it comes by one more migration like this."""

from typing import Any

from django.db import migrations

import rota


def install(apps: Any, schema_editor: Any) -> None:
    """Install rota with the connection of the migration."""
    schema_editor.connection.ensure_connection()
    rota.install(schema_editor.connection.connection)


class Migration(migrations.Migration):
    """It stands first, so that every test database has rota too."""

    atomic = False  # rota's script has a transaction of its own
    operations = [migrations.RunPython(install, migrations.RunPython.noop)]  # noqa: RUF012
