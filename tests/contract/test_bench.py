"""What the runner of the benchmarks promises, without measuring anything."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from bench import measure_all, report
from bench.figures import Figure, Missing, Ratio, Reading, Series

FIGURES: list[Figure] = [
    Ratio(
        number=1,
        name="claim | finish",
        unit="us/job",
        ours=[30.0, 10.0, 20.0],
        theirs=[40.0, 40.0],
        yardstick="bare",
        goal=0.9,
        is_cost=True,
    ),
    Reading(number=2, name="rate", unit="jobs/s", values=[1500.0], goal=2000, is_cost=False),
    Series(plot="Rate", name="rota", unit="jobs/s", points=[(0.0, 1.0), (1.0, 2.0)]),
    Missing(number=3, name="peers", reason="not installed"),
]


class NoServer:
    def __enter__(self) -> NoServer:
        return self

    def __exit__(self, *exc_info: object) -> None: ...


def test_report_reads_what_it_wrote() -> None:
    assert report.from_json(report.to_json(FIGURES)) == FIGURES


def test_report_says_what_missed_its_goal_and_what_is_missing() -> None:
    lines = report.text(FIGURES).splitlines()

    assert ["0.50" in lines[0], "reached" in lines[0]] == [True, True]
    assert "MISSED" in lines[1]
    assert ["MISSING" in lines[2], "not installed" in lines[2]] == [True, True]


def test_report_keeps_a_bar_in_a_name_out_of_the_table() -> None:
    assert "claim \\| finish" in report.markdown(FIGURES)


def test_measure_keeps_what_came_before_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(server: object, rounds: int, is_quick: bool) -> Iterator[Figure]:
        yield FIGURES[1]
        raise RuntimeError("no luck\nat all")

    module = ModuleType("bench.workloads.broken", "Break.")
    vars(module).update(NUMBER=7, run=fail)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(measure_all, "BenchServer", NoServer)

    found = measure_all.measure("broken", rounds=1, is_quick=True)

    assert found["has_failed"]
    assert report.from_json(found["figures"]) == [
        FIGURES[1],
        Missing(number=7, name="broken", reason="RuntimeError: no luck"),
    ]


def test_save_writes_what_can_be_read_again(tmp_path: Path) -> None:
    workload = {
        "number": 1,
        "title": "Claims",
        "took_place": "today",
        "seconds": 1.5,
        "has_failed": False,
        "figures": report.to_json(FIGURES),
    }
    machine = {"processors": 2, "model": "x", "memory_gb": 1, "kernel": "6", "load": 0.1}
    about = {"began_at": "today", "postgresql": "15", "settings": [], "machine": machine}

    measure_all.save({"about": about, "workloads": {"claims": workload}}, tmp_path)

    assert "## 1. Claims" in (tmp_path / "RESULTS.md").read_text()
    assert sorted(path.suffix for path in tmp_path.glob("results.*")) == [".json"]


def test_workloads_are_named_after_their_modules_with_the_long_ones_last() -> None:
    names = measure_all.workloads()

    assert names[0] == "claims"
    assert names[-3:] == ["spike", "held", "steady"]
