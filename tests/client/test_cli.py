"""The command line: what it prints, and what it returns."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

import rota
from rota import Client
from rota.__main__ import main


@pytest.fixture
def run(
    dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Run a command and return what it printed."""
    monkeypatch.setenv("DATABASE_URL", dsn)

    def call(*words: str, code: int = 0) -> str:
        assert main(words) == code
        printed = capsys.readouterr()
        assert printed.err.count("\n") == (1 if code else 0)
        return printed.err if code else printed.out

    return call


def test_enqueue_and_job(run: Callable[..., str]) -> None:
    job_id = run(
        "enqueue", "send_mail", '{"user_id": 7}', "--delay", "1 hour", "--key", "k"
    ).strip()
    again = json.loads(run("enqueue", "send_mail", "--key", "k", "--json"))

    assert again == {"job_id": int(job_id), "is_new": False}
    job = json.loads(run("job", job_id, "--json"))
    assert job["payload"] == {"user_id": 7}
    assert job["status"] == "queued"
    assert "send_mail" in run("job", job_id)


def test_jobs_filters(run: Callable[..., str], client: Client) -> None:
    client.enqueue("a", queue="one")
    client.enqueue("b", queue="two")

    assert [job["job_type"] for job in json.loads(run("jobs", "--json"))] == ["b", "a"]
    assert [j["queue"] for j in json.loads(run("jobs", "--type", "a", "--json"))] == ["one"]
    assert len(json.loads(run("jobs", "--limit", "1", "--json"))) == 1
    assert run("jobs", "--status", "dead") == "(none)\n"
    head, line = run("jobs", "--queue", "two").splitlines()
    assert head.index("job_type") == line.index("b ")


def test_retry_and_cancel(run: Callable[..., str], client: Client) -> None:
    job_id = str(client.enqueue("a").job_id)

    assert run("cancel", job_id, "--reason", "test") == f"job {job_id} is cancelled\n"
    assert run("retry", job_id) == f"job {job_id} is queued\n"
    client.claim_jobs("w")
    assert "heartbeat" in run("cancel", job_id)
    assert "rota: " in run("retry", job_id, code=1)
    assert json.loads(run("retry", job_id, "--force", "--json"))["status"] == "queued"
    assert "not found" in run("retry", "999999", code=1)
    assert run("job", "999999", code=1)


def test_status_and_tick(run: Callable[..., str], client: Client) -> None:
    client.enqueue("a", queue="mail")
    client.report_worker("w1", "host", 1, "0.1.0", ["mail"])

    status = json.loads(run("status", "--json"))

    assert status["version"] == rota.__version__
    assert [queue["queue"] for queue in status["queues"]] == ["mail"]
    assert [worker["worker"] for worker in status["workers"]] == ["w1"]
    assert "w1" in run("status")
    assert json.loads(run("tick", "--json"))["jobs_swept"] == 0


def test_worker_command(
    dsn: str, client: Client, db: psycopg.Connection[Any], tmp_path: Path
) -> None:
    (tmp_path / "my_jobs.py").write_text(
        "import rota\n"
        "registry = rota.Registry()\n"
        "@registry.handler('a')\n"
        "def a(job): return job.payload\n"
    )
    client.enqueue("a", {"n": 1})

    command = [sys.executable, "-m", "rota", "worker", "my_jobs:registry", "--drain"]
    done = subprocess.run(
        [*command, "-d", dsn, "--log-format", "json"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines if "event" in line] == ["claimed", "succeeded"]
    assert db.execute("select result from rota.finished_jobs").fetchone() == ({"n": 1},)


@pytest.mark.parametrize("spec", ["no_such_module:registry", "json:registry", "json"])
def test_worker_needs_a_registry(run: Callable[..., str], spec: str) -> None:
    assert "rota: " in run("worker", spec, code=2)


def test_worker_says_where_the_handlers_fail_to_load(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_jobs.py").write_text("import rota\nregistry = rota.Registri()\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert "broken_jobs.py:2" in run("worker", "broken_jobs:registry", code=2)


def test_used_wrongly(run: Callable[..., str]) -> None:
    assert "not JSON" in run("enqueue", "a", "{", code=2)
    assert run("enqueue", "", code=1).startswith("rota: ")
    with pytest.raises(SystemExit) as caught:
        main(["no_such_command"])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:s3cret@127.0.0.1:1/db",
        "postgres//me:s3cret@x",
        "password=s3cret port=1 =",
    ],
)
def test_errors_show_no_password(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "-d", url]) in (1, 2)

    printed = capsys.readouterr()
    assert "s3cret" not in printed.out + printed.err
    assert printed.err.count("\n") == 1


def test_missing_schema_has_a_hint(
    dsn: str, db: psycopg.Connection[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    db.execute("drop schema rota cascade")

    assert main(["status", "-d", dsn]) == 1
    assert "rota install" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"rota {rota.__version__}\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "exit codes" in capsys.readouterr().out
