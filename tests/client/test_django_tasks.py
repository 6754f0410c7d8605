"""Rota as the backend of Django's Tasks, beyond what Django's own tests ask of one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.conf import settings
from django.db import connections, transaction
from django.test import override_settings
from django_tasks import TaskResultStatus, default_task_backend, task, task_backends
from django_tasks.exceptions import (
    InvalidTaskError,
    TaskResultDoesNotExist,
    TaskResultMismatch,
)
from django_tasks.signals import task_enqueued, task_finished, task_started
from psycopg.conninfo import conninfo_to_dict

from client.django_jobs import SEEN, add, add_in_loop, fail, return_no_json, succeed_at
from client.own_connections import django_on
from rota import Client
from rota.contrib.django.backend import RotaBackend
from rota.contrib.django.jobs import registry

pytestmark = pytest.mark.slow

Drain = Callable[..., None]
TASKS: Any = {"BACKEND": "rota.contrib.django.backend.RotaBackend"}


@pytest.fixture(autouse=True)
def _django(dsn: str) -> Iterator[None]:
    SEEN.clear()
    with django_on(dsn):
        yield


@pytest.fixture
def work(db: psycopg.Connection[Any], drain: Drain) -> Callable[[], None]:
    """Run Tasks, also those that have failed, until there are none."""

    def until_ended() -> None:
        for _ in range(50):
            drain(registry)
            if db.execute("select count(*) from rota.jobs").fetchone() == (0,):
                return

    return until_ended


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make a module, parcels.mail, which nothing has imported yet."""
    (tmp_path / "parcels").mkdir()
    (tmp_path / "parcels/__init__.py").touch()
    (tmp_path / "parcels/mail.py").write_text(
        "from django_tasks import task\nno_task = print\n@task()\ndef send(): return 'sent'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "parcels.mail"
    for name in ("parcels.mail", "parcels"):
        sys.modules.pop(name, None)


def test_it_is_the_backend() -> None:
    assert isinstance(task_backends["default"], RotaBackend)
    for feature in ("defer", "async_task", "get_result", "priority"):
        assert getattr(default_task_backend, f"supports_{feature}")


def test_a_task_that_was_enqueued_is_ready() -> None:
    result = add.enqueue(1, b=2)

    assert (result.task, result.backend) == (add, "default")
    assert (result.args, result.kwargs) == ([1], {"b": 2})
    assert result.status == TaskResultStatus.READY
    assert not result.is_finished
    assert (result.started_at, result.finished_at, result.last_attempted_at) == (None,) * 3
    assert (result.errors, result.worker_ids, result.attempts) == ([], [], 0)
    with pytest.raises(ValueError, match="not finished"):
        _ = result.return_value
    found = add.get_result(result.id)
    assert (found.id, found.status, found.args) == (result.id, result.status, result.args)
    assert found.task == add


def test_a_task_of_an_older_version_has_the_time_of_its_job(
    client: Client, db: psycopg.Connection[Any]
) -> None:
    path = add.module_path
    job = client.enqueue(
        "django_task", {"task": path, "args": [1], "kwargs": {}, "backend": "default"}
    )

    found = add.get_result(str(job.job_id))

    assert (found.enqueued_at,) == db.execute("select created_at from rota.jobs").fetchone()


@pytest.mark.parametrize(
    ("name", "apps", "ended"),
    [
        ("send", ["parcels"], "sent"),
        ("send", [], "parcels.mail.send is not imported, and in no app of INSTALLED_APPS"),
        ("no_task", ["parcels"], "parcels.mail.no_task is no Task"),
    ],
)
def test_a_payload_lets_nothing_be_imported_but_what_belongs_to_an_app(
    name: str,
    apps: list[str],
    ended: str,
    module: str,
    client: Client,
    db: psycopg.Connection[Any],
    work: Callable[[], None],
) -> None:
    """Whoever may enqueue writes it, such as a program in another language."""
    payload = {"task": f"{module}.{name}", "args": [], "kwargs": {}, "backend": "default"}
    job = client.enqueue("django_task", payload, max_attempts=1)

    with override_settings(INSTALLED_APPS=[*settings.INSTALLED_APPS, *apps]):
        work()
        status = "succeeded" if ended == "sent" else "dead"
        found = "select status, coalesce(result #>> '{}', last_error) from rota.job_runs"
        assert db.execute(found).fetchall() == [(status, ended)]
        assert (module in sys.modules) == bool(apps)
        if not apps:
            with pytest.raises(ImportError, match="is not imported"):
                default_task_backend.get_result(str(job.job_id))


@pytest.mark.parametrize("each", [add, add_in_loop])
def test_a_task_that_was_run_has_its_value(each: Any, work: Callable[[], None]) -> None:
    result = each.enqueue(1, b=2)
    work()

    result.refresh()

    assert result.status == TaskResultStatus.SUCCESSFUL
    assert (result.return_value, result.attempts, result.errors) == (3, 1, [])
    assert result.enqueued_at <= result.started_at == result.last_attempted_at
    assert result.started_at <= result.finished_at


def test_the_same_by_async_calls(work: Callable[[], None]) -> None:
    async def enqueue() -> Any:
        return await add.aenqueue(1, 2)

    result = asyncio.run(enqueue())
    work()
    asyncio.run(result.arefresh())

    assert result.return_value == 3
    assert asyncio.run(add.aget_result(result.id)).return_value == 3


def test_a_task_that_fails_is_tried_again_and_then_failed(work: Callable[[], None]) -> None:
    result = fail.enqueue("wrong")
    work()

    result.refresh()

    assert result.status == TaskResultStatus.FAILED
    assert result.is_finished
    assert (result.attempts, len(result.errors)) == (2, 2)
    assert result.errors[0].exception_class is ValueError
    assert result.errors[0].traceback.endswith("ValueError: wrong\n")
    assert result.started_at < result.last_attempted_at
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value


def test_a_task_that_runs_is_running_and_then_waits_for_its_next_attempt(
    client: Client,
) -> None:
    result = fail.enqueue("wrong")
    (job,) = client.claim_jobs("w1")
    result.refresh()
    assert (result.status, result.worker_ids) == (TaskResultStatus.RUNNING, ["w1"])

    client.fail_job(job.job_id, job.lease_token, "no", retry_in=timedelta(hours=1))
    result.refresh()

    assert (result.status, result.worker_ids) == (TaskResultStatus.READY, ["w1"])
    assert result.errors[0].exception_class is Exception


def test_a_task_sees_which_attempt_it_is(work: Callable[[], None]) -> None:
    result = succeed_at.enqueue(2)
    work()

    result.refresh()

    assert result.return_value == 2
    assert result.errors[0].exception_class is KeyError


def test_what_is_no_json_is_refused_or_has_failed(
    work: Callable[[], None], db: psycopg.Connection[Any]
) -> None:
    with pytest.raises(TypeError):
        add.enqueue(object())
    assert db.execute("select count(*) from rota.job_runs").fetchone() == (0,)

    result = return_no_json.enqueue()
    work()
    result.refresh()

    assert SEEN == ["run"]  # another attempt would return the like
    assert result.errors[0].exception_class is TypeError


def test_the_higher_priority_runs_first(drain: Drain) -> None:
    for priority in (0, -100, 100, 5):
        add.using(priority=priority).enqueue(priority)

    drain(registry, concurrency=1, batch=1)

    assert SEEN == [100, 5, 0, -100]


def test_a_task_may_be_for_later_and_for_another_queue(
    db: psycopg.Connection[Any], drain: Drain
) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    result = add.using(run_after=later, queue_name="mail", priority=7).enqueue(1)
    drain(registry, queues=["mail"])

    assert SEEN == []
    assert db.execute("select run_at, queue, priority from rota.jobs").fetchone() == (
        later,
        "mail",
        -7,
    )
    assert add.get_result(result.id).task.queue_name == "mail"


def test_a_task_runs_wherever_an_operator_puts_it(client: Client, drain: Drain) -> None:
    """Also with a priority, or in a queue, that no Task may have by its settings."""
    result = add.enqueue(1)
    client.set_priority(int(result.id), -1000)
    client.act_on_jobs("move", {"all": True}, {"queue": "rescue"})
    result.refresh()
    assert result.status == TaskResultStatus.READY

    drain(registry, queues=["rescue"])

    found = add.get_result(result.id)
    assert found.status == TaskResultStatus.SUCCESSFUL
    assert (found.task.queue_name, found.task.priority) == ("rescue", 1000)
    assert (add.queue_name, add.priority) == ("default", 0)


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(InvalidTaskError):
        task()(lambda: None)
    for wrong in (
        {"priority": 101},
        {"priority": -101},
        {"queue_name": "unknown"},
        {"run_after": datetime(2030, 1, 1)},
    ):
        with pytest.raises(InvalidTaskError):
            add.using(**wrong)


def test_a_result_that_is_not_there(client: Client) -> None:
    other = client.enqueue("x").job_id
    for wrong in ("12345", "abc", str(other), "-1", "9" * 30):
        with pytest.raises(TaskResultDoesNotExist):
            default_task_backend.get_result(wrong)
    with pytest.raises(TaskResultMismatch):
        fail.get_result(add.enqueue(1).id)


def test_a_task_joins_the_transaction(db: psycopg.Connection[Any]) -> None:
    count = "select count(*) from rota.jobs"
    with transaction.atomic():
        add.enqueue(1)
        assert db.execute(count).fetchone() == (0,)
    assert db.execute(count).fetchone() == (1,)

    with transaction.atomic():
        add.enqueue(2)
        transaction.set_rollback(True)
    assert db.execute(count).fetchone() == (1,)


def test_django_is_told_what_happens(work: Callable[[], None]) -> None:
    told: list[tuple[str, Any, int]] = []

    def listener(name: str) -> Callable[..., None]:
        def listen(sender: type, task_result: Any, **_: Any) -> None:
            assert sender is RotaBackend
            told.append((name, task_result.status, task_result.attempts))

        return listen

    signals = {"enqueued": task_enqueued, "started": task_started, "finished": task_finished}
    listeners = {name: listener(name) for name in signals}
    for name, signal in signals.items():
        signal.connect(listeners[name])
    try:
        add.enqueue(1)
        work()
        fail.enqueue("wrong")
        work()
    finally:
        for name, signal in signals.items():
            signal.disconnect(listeners[name])

    assert told == [
        ("enqueued", "READY", 0), ("started", "RUNNING", 1), ("finished", "SUCCESSFUL", 1),
        ("enqueued", "READY", 0), ("started", "RUNNING", 1), ("started", "RUNNING", 2),
        ("finished", "FAILED", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_attempts": 3, "lease": timedelta(minutes=5)}, None),
        ({"attempts": 3}, "unknown OPTIONS attempts"),
        ({"priority": 3, "queue": "mail"}, "unknown OPTIONS priority, queue"),
        ({"database": "other"}, "which is not in DATABASES"),
    ],
)
def test_wrong_settings_are_found(options: dict[str, Any], message: str | None) -> None:
    with override_settings(TASKS={"default": {**TASKS, "OPTIONS": options}}):
        found = [each.msg for each in task_backends["default"].check()]

    assert len(found) == (message is not None)
    assert message is None or message in found[0]


JOBS = """
import os
import threading
import time

import rota
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django_tasks import task
from rota.contrib.django.jobs import registry as tasks

registry = rota.Registry()
registry.include(tasks)


@task()
def add(a, b):
    return a + b


@registry.task(own_process=True)
def ask(is_broken: bool) -> list[object]:
    with connection.cursor() as cursor:
        if is_broken:
            connection.connection.close()
        cursor.execute("select 1")
    return [ContentType.__name__, os.getpid()]


@registry.handler("tells_role")
def tells_role(job: rota.Job) -> None:
    with job.transaction() as own:
        job.result = own.execute("select current_user").fetchone()[0]


@registry.handler("leaves_thread")
async def leaves_thread(job: rota.AsyncJob) -> None:
    threading.Thread(target=time.sleep, args=[40]).start()
"""


@pytest.fixture
def shop(dsn: str, tmp_path: Path) -> Callable[..., str]:
    """Make a project of Django; return a function that runs a command of its manage.py."""
    said = conninfo_to_dict(dsn)
    (tmp_path / "shop_settings.py").write_text(
        f"""
DATABASES = {{"default": {{
    "ENGINE": "django.db.backends.postgresql", "NAME": {said["dbname"]!r},
    "USER": {said["user"]!r}, "PASSWORD": {said["password"]!r}, "HOST": {said["host"]!r},
    "PORT": {said["port"]!r}, "OPTIONS": {{"connect_timeout": 5}},
}}, "files": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}}}}
INSTALLED_APPS = ["django.contrib.contenttypes", "django_tasks", "rota.contrib.django"]
TASKS = {{"default": {TASKS!r}}}
USE_TZ = True
"""
    )
    (tmp_path / "shop_jobs.py").write_text(JOBS)
    manage = tmp_path / "manage.py"
    manage.write_text(
        "import os, sys\n"
        "from django.core.management import execute_from_command_line\n"
        "os.environ['DJANGO_SETTINGS_MODULE'] = 'shop_settings'\n"
        "execute_from_command_line(sys.argv)\n"
    )

    def run(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, str(manage), *words], capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        return done.stderr

    return run


@pytest.mark.parametrize("processes", [[], ["--processes", "2"]])
def test_manage_py_has_a_worker(
    processes: list[str], shop: Callable[..., str], db: psycopg.Connection[Any]
) -> None:
    """Also from elsewhere, and for handlers that need the models of an application."""
    shop("shell", "-c", "import shop_jobs; shop_jobs.add.enqueue(1, 2)")

    shop(
        "rota_worker", "--drain", "--concurrency", "2", *processes,
        "--registry", "shop_jobs:registry",
    )  # fmt: skip

    assert db.execute("select status, result from rota.job_runs").fetchall() == [
        ("succeeded", 3)
    ]


def test_a_worker_of_manage_py_has_the_role_that_django_assumes(
    shop: Callable[..., str], client: Client, db: psycopg.Connection[Any], tmp_path: Path
) -> None:
    client.enqueue("tells_role")
    with (tmp_path / "shop_settings.py").open("a") as settings_file:
        settings_file.write("DATABASES['default']['OPTIONS']['assume_role'] = 'runs the shop'")
    db.execute('create role "runs the shop" superuser')
    try:
        shop("rota_worker", "--drain", "--registry", "shop_jobs:registry")
    finally:
        db.execute('drop owned by "runs the shop"; drop role "runs the shop"')

    assert db.execute("select result from rota.job_runs").fetchall() == [("runs the shop",)]


@pytest.mark.parametrize(
    ("alias", "text"), [("other", "no other in DATABASES"), ("files", "is no PostgreSQL")]
)
def test_manage_py_names_a_database_that_has_no_jobs(
    alias: str, text: str, shop: Callable[..., str]
) -> None:
    """A worker must not ask the one that libpq finds."""
    assert text in shop("rota_worker", "--database", alias, code=2).splitlines()[-1]


def test_a_process_of_a_handler_has_django(
    shop: Callable[..., str], client: Client, db: psycopg.Connection[Any]
) -> None:
    """Its models, and a new connection where the old one is broken."""
    for is_broken in (False, True, False):
        client.enqueue("ask", {"is_broken": is_broken}, max_attempts=1)

    shop("rota_worker", "--drain", "--concurrency", "1", "--registry", "shop_jobs:registry")

    runs = db.execute("select status, result from rota.job_runs order by id").fetchall()
    assert [status for status, _ in runs] == ["succeeded", "dead", "succeeded"]
    first, _, last = (result for _, result in runs)
    assert first == last  # by one process, which has had a broken connection
    assert first[0] == "ContentType"


def test_a_thread_that_a_job_has_left_keeps_no_process_of_manage_py(
    shop: Callable[..., str], client: Client
) -> None:
    client.enqueue("leaves_thread")

    shop("rota_worker", "--drain", "--registry", "shop_jobs:registry", code=3)


def test_a_worker_that_may_not_read_results_tries_again(
    db: psycopg.Connection[Any], work: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the Task knows which attempt it is."""
    succeed_at.enqueue(2)
    db.execute("create role reads_no_results; grant usage on schema rota to reads_no_results")
    try:
        options = {"options": "-c role=reads_no_results"}
        monkeypatch.setitem(connections["default"].settings_dict, "OPTIONS", options)
        work()
    finally:
        db.execute("drop owned by reads_no_results; drop role reads_no_results")

    errors = db.execute("select message from rota.job_errors").fetchall()
    assert db.execute("select result from rota.job_runs").fetchall() == [(2,)]
    assert errors == [("'too early'",)]
