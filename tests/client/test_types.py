"""What mypy says of right and of wrong uses: it must refuse lines that end in ``# wrong``."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import rota

pytestmark = pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed")

USES = """
import rota

registry = rota.Registry()

@registry.handler("plain")
def plain(job: rota.Job) -> int:
    return job.attempt

@registry.handler("in_loop")
async def in_loop(job: rota.AsyncJob) -> None:
    await job.set_progress(50)
    async with job.transaction() as connection:
        await connection.execute("select 1")

@registry.handler("either")
def either(job: rota.Job | rota.AsyncJob) -> None: ...

registry.add("nothing", lambda job: None)

@registry.handler("number")  # wrong
def number(job: int) -> None: ...

@registry.handler(plain)  # wrong
def bare(job: rota.Job) -> None: ...

@registry.handler("forgets")
async def forgets(job: rota.AsyncJob) -> None:
    job.set_progress(50)  # wrong

def enqueue(client: rota.Client) -> int:
    client.enqueue("plain", {"n": 1}, queue="mail")
    client.enqueue("plain", {"n": 1}, "mail")  # wrong
    client.enqueue("plain", priorty=1)  # wrong
    return client.enqueue("plain").job_id

rota.Worker("", registry, lease=60).run()
rota.Worker("", {"plain": plain}).run()  # wrong
"""


def test_mypy_refuses_wrong_uses_and_takes_right_ones(tmp_path: Path) -> None:
    (tmp_path / "uses.py").write_text(USES)
    source = str(Path(rota.__file__).parents[1])

    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), "uses.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": source},
        check=False,
        capture_output=True,
        text=True,
    )

    told = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    wrong = {n for n, line in enumerate(USES.splitlines(), 1) if line.endswith("# wrong")}
    assert told == wrong, done.stdout
