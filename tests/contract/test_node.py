"""rota from Node.js with the `pg` driver: what a client in another language needs to know."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.plain_session

HERE = Path(__file__).parent / "node"

TOUR = """\
enqueued once false
claimed send_mail {"user_id":7} 1
heartbeat true false
failed failed true
claimed 2 true
stale finish RT002
finished finished
finished already_finished
unknown job RT001
bad argument 22023
left succeeded 2 node-2 connection refused {"message_id":"m-1"}
"""


@pytest.fixture(scope="module")
def node() -> str:
    """The node program, with the driver beside the script."""
    program, npm = shutil.which("node"), shutil.which("npm")
    assert program, "node is missing: make setup brings it"
    assert npm, "npm is missing: make setup brings it"
    lock, installed = HERE / "package-lock.json", HERE / "node_modules/.package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        subprocess.run([npm, "ci", "--silent", "--no-audit", "--no-fund"], cwd=HERE, check=True)
    return program


@pytest.mark.timeout(300)
def test_tour_shows_the_life_of_a_job(dsn: str, node: str) -> None:
    done = subprocess.run(
        [node, "tour.mjs"],
        cwd=HERE,
        env={**os.environ, "DATABASE_URL": dsn},
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.stderr == ""
    assert done.stdout == TOUR
