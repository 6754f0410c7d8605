"""The files for monitoring: queries run as an observer, and all speak of the same figures."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import psycopg
import pytest

from contract.test_docs import ROOT

FILES = ROOT / "python_client/docs/monitoring"
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


def test_promtool_accepts_the_alerts() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    command = ["promtool", "check", "rules", str(FILES / "alerts.yml")]
    subprocess.run(command, check=True, capture_output=True)
