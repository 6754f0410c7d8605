"""The cheapest faults in small; play_faults.py plays all of them, and for longer."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from faults import of_network, of_servers, of_workers
from faults.fault_run import FAULTS, Scene
from faults.gap import Difference, Told

FAMILIES = (of_network, of_servers, of_workers)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "times"), [("kill", 10), ("commit", 4)])
def test_fault_breaks_no_promise(dsn: str, tmp_path: Path, name: str, times: int) -> None:
    scale = times / FAULTS[name].times
    with Scene(name, scale, 7, tmp_path / "scene", url=dsn) as scene:
        FAULTS[name].play(scene)

    verdict = scene.judge()

    print(verdict.line)  # noqa: T201
    assert verdict.problems == []


@pytest.mark.long
@pytest.mark.timeout(300)
def test_canary_that_promises_too_early_is_found() -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o711)  # the server is another user's
        with Scene("unsynced", 0.2, 7, Path(name, "scene")) as scene:
            FAULTS["unsynced"].play(scene)

        verdict = scene.judge()

    assert verdict.problems == []


ROW = {"id": 1, "place": "jobs", "status": "queued", "lease_token": 5, "created_at": 0}


@pytest.mark.parametrize(
    ("before", "after", "is_lost"),
    [
        ({}, None, True),
        ({"lease_token": 7, "status": "running"}, {}, True),
        ({"lease_token": 8, "status": "queued"}, {"lease_token": 7}, False),
        ({"status": "succeeded"}, {"status": "running"}, True),
        ({"locked_until": 9, "status": "running"}, {"status": "running"}, False),
    ],
    ids=["enqueue", "claim", "claim that was given back", "finish", "heartbeat"],
)
def test_gap_tells_what_somebody_was_told(
    tmp_path: Path, before: dict[str, object], after: dict[str, object] | None, is_lost: bool
) -> None:
    told = Told(tmp_path)
    told.enqueued.add(1)
    told.granted[1] |= {7, 8}
    told.ended[1] |= {5}
    told.given_back[1] |= {8}
    row = None if after is None else {**ROW, **after}

    found = told.has_lost(Difference(1, {**ROW, **before}, row))

    assert found is is_lost
