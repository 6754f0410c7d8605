"""The files for monitoring: queries run as an observer, and all speak of the same figures."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from contract.test_docs import ROOT
from rota import Registry
from rota.contrib import prometheus
from support.waiting import wait_until

FILES = ROOT / "python_client/docs/monitoring"
NAME = "sql_exporter.yml"
FIGURE = re.compile(r'sql_(\w+)\{col=~?"([\w|]+)"\}')


def queries() -> list[dict[str, str]]:
    text = (FILES / "sql_exporter.yml").read_text().partition("queries:\n")[2]
    parts = re.split(r"(?=^ {6}- name: )", text, flags=re.MULTILINE)[1:]
    return [
        {
            "name": re.findall(r"name: (\w+)", part)[0],
            "labels": "".join(re.findall(r"labels: \[(.*)\]", part)),
            "values": re.findall(r"values: \[(.*)\]", part)[0],
            "query": part.partition("query: |\n")[2],
        }
        for part in parts
    ]


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


@pytest.mark.parametrize("query", queries(), ids=lambda query: query["name"])
def test_queries_run_for_an_observer_and_always_return_a_row(
    query: dict[str, str], db: psycopg.Connection[Any]
) -> None:
    with db.transaction():
        row = db.execute("select to_regrole('rota_observer') is not null").fetchone()
        if row == (True,):
            db.execute("set local role rota_observer")
        cursor = db.execute(query["query"])  # type: ignore[call-overload]
        columns = [column.name for column in cursor.description]
        found = cursor.fetchall()

    assert columns == words(query["labels"]) + words(query["values"])
    assert found


@pytest.mark.parametrize("name", ["alerts.yml", "grafana.json"])
def test_alerts_and_dashboard_ask_for_figures_that_there_are(name: str) -> None:
    have = {(query["name"], value) for query in queries() for value in words(query["values"])}
    text = (FILES / name).read_text()
    if name.endswith(".json"):
        text = "\n".join(
            target["expr"]
            for panel in json.loads(text)["panels"]
            for target in panel["targets"]
        )

    asked = {
        (figure, value) for figure, col in FIGURE.findall(text) for value in col.split("|")
    }

    assert asked
    assert asked <= have


@pytest.mark.slow
def test_the_exporter_of_debian_shows_each_figure(
    dsn: str, tmp_path: Path, db: psycopg.Connection[Any]
) -> None:
    """It runs with our file alone, against a database with a job that nothing ticks for."""
    program = shutil.which("prometheus-sql-exporter")
    if program is None:
        pytest.skip("prometheus-sql-exporter is not installed")
    db.execute("select rota.enqueue('mail', queue => 'letters')")
    own = conninfo_to_dict(dsn)
    url = "postgres://{user}:{password}@{host}:{port}/{dbname}?sslmode=disable".format(**own)
    text, replaced = re.subn(r"'postgres://.*'", f"'{url}'", (FILES / NAME).read_text())
    assert replaced == 1
    (tmp_path / NAME).write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"

    def shown() -> str:
        with contextlib.suppress(OSError), urlopen(f"http://{address}/metrics") as answer:
            return str(answer.read(), "utf-8")
        return ""

    have = {(query["name"], value) for query in queries() for value in words(query["values"])}
    command = [program, "-config.file", tmp_path / NAME, "-web.listen-address", address]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as exporter:
        try:
            wait_until(
                lambda: have <= set(re.findall(r'sql_(\w+)\{col="(\w+)"', shown())), "figures"
            )
            text = shown()
        finally:
            exporter.terminate()

    found = re.findall(r'^sql_rota_queue\{col="ready",.*queue="letters".* (\S+)$', text, re.M)
    assert list(map(float, found)) == [1]


def test_a_process_that_names_no_worker_is_not_ready() -> None:
    prometheus.instrument(Registry())

    assert "\nrota_is_ready 0.0\n" in prometheus.exposition()[1]


def test_promtool_accepts_the_alerts() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    command = ["promtool", "check", "rules", str(FILES / "alerts.yml")]
    subprocess.run(command, check=True, capture_output=True)
