"""What is built carries the SQL parts, also when it is built from the source distribution."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import psycopg
import pytest

import rota

PROJECT = Path(rota.__file__).resolve().parents[2]
STATIC = Path(rota.__file__).parent / "web" / "static"


@pytest.mark.own_session
@pytest.mark.slow
def test_package_from_the_source_distribution_installs(dsn: str, tmp_path: Path) -> None:
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    dist, target = tmp_path / "dist", tmp_path / "target"
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist)]
    subprocess.run([*build, str(PROJECT)], check=True, capture_output=True)
    (wheel,) = dist.glob("*.whl")  # made from the unpacked source distribution
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(target)

    parts = {
        path.relative_to(PROJECT.parent) for path in (PROJECT.parent / "sql").rglob("*.sql")
    }
    assert {f"rota/{part}" for part in parts} <= names
    page = {path.relative_to(PROJECT / "src") for path in STATIC.iterdir()}
    assert {str(path) for path in page} <= names
    assert "rota/py.typed" in names

    where = "import rota; print(rota.sql_dir())"
    for command in (["-c", where], ["-m", "rota", "install", "-d", dsn]):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(target),
                "PGOPTIONS": "-c role=rota_installer",  # who owns rota there
            },
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() in (
            str(target / "rota" / "sql"),
            f"rota {rota.__version__} is installed in {dsn.rpartition('/')[2]}",
        )


@pytest.mark.slow
@pytest.mark.own_session
def test_examples_work_together(dsn: str) -> None:
    examples: dict[str, Any] = {
        "cwd": PROJECT / "examples",
        # They make tables, and a database may have an empty search path.
        "env": {**os.environ, "DATABASE_URL": dsn, "PGOPTIONS": "-c search_path=public"},
        "text": True,
    }

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], check=True, capture_output=True, **examples
        )
        return done.stdout + done.stderr

    assert "is new" in run("enqueue.py")
    assert "is there already" in run("enqueue.py")
    run("-m", "rota", "enqueue", "count_users")
    run("-m", "rota", "enqueue", "import_pages")
    assert run("-m", "rota", "worker", "jobs:registry", "--drain").count(" succeeded ") == 3
    embedded = subprocess.Popen(
        [sys.executable, "embedded_worker.py"], stderr=subprocess.PIPE, **examples
    )
    run("-m", "rota", "enqueue", "import_pages")
    assert run("send_once.py").count("sent invoice 5") == 1
    indexed = run("reindex.py")
    assert indexed.count("index document 1") == 2
    assert "second thoughts" in indexed
    assert "changed while it was indexed" in indexed
    booked = run("ledger.py")
    for account in ("ada", "bob"):
        assert booked.index(f"{account} has 300") < booked.index(f"{account} has 200")
    for _ in range(2):  # the second sum has nothing of the first
        assert run("fan_out.py") == "9 words\n"
    run("-m", "rota", "enqueue", "of_another_program")  # and waits for it
    served = run("limits.py").splitlines()[-1]
    assert served.startswith("at most 2 at once")
    assert "small" in served.split()[-12:-6]  # of the twelve in their order
    with psycopg.connect(dsn) as connection:
        results = connection.execute(
            "select result from rota.finished_jobs where job_type = 'send_invoice'"
        ).fetchall()
    assert results == [({"message_id": "<invoice.5@shop.example>"},)] * 2
    day = run("schedules.py")
    assert "clean_up is created: at 02:00 every day in Europe/Warsaw" in day
    assert day.index("export from") < day.index("clean up of")
    assert day.count("report for user 8") == 1
    assert day.count("report for user 7") <= 1  # on a Monday morning it waits until eight
    assert "clean_up is unchanged" in run("schedules.py")
    told = run("pipeline.py")
    assert told.count("order 1 shipped, receipt-1") == 1
    assert told.count("order 2 refunded: 900") == 1
    assert "order 3" not in told
    _, log = embedded.communicate(timeout=60)
    assert (embedded.returncode, log.count("succeeded job_type=import_pages")) == (0, 1), log
