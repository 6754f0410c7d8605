"""Workers that are killed in the middle: their history, of which much is unknown, is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.history import recorded_run
from faults.history.checker import check, summary


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_and_frozen_workers_keep_every_promise(dsn: str, tmp_path: Path) -> None:
    played = recorded_run.play(dsn, tmp_path)

    context = check(tmp_path)

    print("\n".join(summary(context)))  # noqa: T201
    assert [f"{each}\n{each.story}" for each in context.violations] == []
    assert context.is_drained
    assert played.counts["killed"] > 3
    assert context.counts["unknown"] > 0
