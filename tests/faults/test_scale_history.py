"""Servers, a front and workers of many databases fail, and nothing that was told is untrue."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from faults.history.many import SENTENCES
from faults.scale_history import FAULTS, play
from rota.testing.server import memory

pytestmark = pytest.mark.timeout(600)
SMALL: dict[str, Any] = {"backlog": 600, "lease": 1.0, "moves": 2}


@pytest.fixture(scope="module", autouse=True)
def _plproxy(admin: psycopg.Connection[tuple[object, ...]]) -> None:
    query = "select from pg_available_extensions where name in ('plproxy', 'postgres_fdw')"
    if admin.execute(query).rowcount < 2 or admin.info.server_version < 150000:
        pytest.skip("the server has no PL/Proxy, or is older than PostgreSQL 15")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=memory()) as name:
        Path(name).chmod(0o711)  # the servers are another user's
        yield Path(name)


@pytest.mark.long
def test_nothing_is_lost_or_doubled_whatever_fails(folder: Path) -> None:
    together, problems = play(folder, 2000, 7, faults=len(FAULTS), pause=0.2, **SMALL)

    assert problems == []
    assert together.counts["told to"] > 0
    assert together.counts["jobs that moved"] > 0
    assert {*together.looked} == {*SENTENCES}


@pytest.mark.long
def test_what_moves_and_is_lost_or_doubled_and_receipts_that_are_not_kept_are_found_out(
    folder: Path,
) -> None:
    together, problems = play(folder, 300, 7, faults=0, pause=0.2, is_canary=True, **SMALL)

    assert together.broken["M5"] > 0
    assert any("and is nowhere" in problem for problem in problems)
    assert any("it is there as job" in problem for problem in problems)
