"""Workers that are killed between an effect and their finish; effects_kill.py in small."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from faults import effects_kill


@pytest.mark.slow
def test_ledger_and_mailbox_agree_however_workers_die(dsn: str, tmp_path: Path) -> None:
    pytest.importorskip("aiosmtpd")
    seed = random.SystemRandom().randrange(10**6)

    wrong = effects_kill.play(dsn, tmp_path, kills=10, workers=4, seed=seed)

    assert wrong == {}
