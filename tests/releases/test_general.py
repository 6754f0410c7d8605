"""What every upgrade and downgrade promises, whatever the versions are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

Make = Callable[[Path | None], str]


@pytest.fixture
def other(tmp_path: Path, sql_dir: Path) -> Path:
    """The parts of a newer version, which has a function that the present one has not."""
    copied = shutil.copytree(sql_dir, tmp_path / "sql")
    version = copied / "base/version.sql"
    version.write_text(
        version.read_text().replace("select '", "select '10.")
        + "\ncreate or replace function rota.of_newer() returns text language sql\n"
        "set search_path = pg_catalog, pg_temp as $$ select 'newer' $$;\n"
    )
    return copied / "install.sql"


def functions(dsn: str) -> set[str]:
    with psycopg.connect(dsn) as db:
        found = db.execute(
            "select proname from pg_proc where pronamespace = 'rota'::regnamespace"
        ).fetchall()
    return {name for (name,) in found}


@pytest.mark.slow
def test_a_downgrade_is_refused_unless_asked_for(
    make: Make, other: Path, psql: Any, sql_dir: Path
) -> None:
    dsn = make(other)
    psql(dsn, "-c", "select rota.enqueue('kept')")
    psql(
        dsn,
        "-c",
        "create function rota.by_hand() returns text language sql as 'select 1::text'",
    )

    for words in ((), ("-v", "allow_downgrade=0")):
        refused = psql(dsn, *words, "-f", sql_dir / "install.sql", check=False)

        assert refused.returncode == 3
        assert "has rota 10.0.2.0, and this is the older 0.2.0" in refused.stderr
        assert "of_newer" in functions(dsn)

    psql(dsn, "-v", "allow_downgrade=1", "-f", sql_dir / "install.sql")

    # What the other version had and this one has not is gone; what is not of rota stays.
    assert "of_newer" not in functions(dsn)
    assert "by_hand" in functions(dsn)
    with psycopg.connect(dsn) as db:
        assert db.execute("select job_type from rota.claim_jobs('w')").fetchone() == ("kept",)


@pytest.mark.slow
def test_grants_by_hand_survive_an_upgrade_and_those_of_the_roles_are_made_anew(
    make: Make, other: Path, psql: Any, sql_dir: Path, admin: psycopg.Connection[Any]
) -> None:
    dsn = make(sql_dir / "install.sql")
    admin.execute("create role upgraded_app")
    try:
        with psycopg.connect(dsn, autocommit=True) as db:
            db.execute("grant usage on schema rota to upgraded_app")
            db.execute("grant execute on function rota.version to upgraded_app, public")

        psql(dsn, "-f", other)

        with psycopg.connect(dsn) as db:
            row = db.execute(
                "select has_function_privilege('upgraded_app', 'rota.version()', 'execute'),"
                " has_schema_privilege('upgraded_app', 'rota', 'usage'),"
                " has_function_privilege('public', 'rota.version()', 'execute')"
            ).fetchone()
        assert row == (True, True, False)
    finally:
        psql(dsn, "-c", "drop owned by rota_installer cascade")
        admin.execute("drop role upgraded_app")
