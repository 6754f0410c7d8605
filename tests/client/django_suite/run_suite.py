"""Django's own tests of Tasks, with rota's backend in the place of its two.

The files in vendored/ are those of tests/tasks of Django 6.0.10, byte for byte, under the
licence beside them.  Here they get other imports: the backends of backends.py, and with
django-tasks the names of that package.  DATABASE_URL names the database, in which rota is
installed; what came out is written as JSON.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path

import django
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict

HERE = Path(__file__).parent
OTHER_IMPORTS = {
    r"from django\.tasks\.backends\.dummy import": "from backends import QueuedBackend as",
    r"from django\.tasks\.backends\.immediate import": "from backends import RunBackend as",
    r"django\.tasks\.backends\.dummy\.DummyBackend": "backends.QueuedBackend",
    r"django\.tasks\.backends\.immediate\.ImmediateBackend": "backends.RunBackend",
}
NAMES_OF_THE_PACKAGE = {
    r"\bdjango\.tasks\b": "django_tasks",
    r"\b(InvalidTask|InvalidTaskBackend)\b": r"\1Error",
    r"does not support async Tasks": "does not support async tasks",
}
LEFT_OUT = {
    "test_refresh_result (DummyBackendTestCase)": "changes a list in memory behind the backend",
    "test_refresh_result_async (DummyBackendTestCase)": "the same",
    "test_cannot_get_result (ImmediateBackendTestCase)": "wants that a backend cannot; it can",
    "test_cannot_refresh_result (ImmediateBackendTestCase)": "the same",
    "test_cannot_pass_run_after (ImmediateBackendTestCase)": "the same",
    "test_throws_keyboard_interrupt (ImmediateBackendTestCase)": "wants it run by the caller",
    "test_doesnt_wait_until_transaction_commit_by_default"
    " (ImmediateBackendTransactionTestCase)": "wants it run before the commit",
}


def set_up(has_own_tasks: bool) -> None:
    said = conninfo_to_dict(os.environ["DATABASE_URL"])
    names = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host"}
    database = {key: said.get(name, "") for key, name in {**names, "PORT": "port"}.items()}
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **database}},
        INSTALLED_APPS=[*([] if has_own_tasks else ["django_tasks"]), "rota.contrib.django"],
        TASKS={"default": {"BACKEND": "backends.QueuedBackend"}},
        USE_TZ=True,
    )
    # Django's cases call the backend within `async def`, which with a database it refuses.
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    django.setup()


def adapt(directory: Path, has_own_tasks: bool) -> None:
    others = {**OTHER_IMPORTS, **({} if has_own_tasks else NAMES_OF_THE_PACKAGE)}
    (directory / "tasks").mkdir()
    for path in (HERE / "vendored").glob("*.py"):
        text = path.read_text()
        for old, new in others.items():
            text = re.sub(old, new, text)
        (directory / "tasks" / path.name).write_text(text)


def cases(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from cases(each)
        else:
            yield each


def name_of(case: unittest.TestCase) -> str:
    return f"{case._testMethodName} ({type(case).__name__})"


def main() -> None:
    has_own_tasks = django.VERSION >= (6,)
    with tempfile.TemporaryDirectory() as directory:
        adapt(Path(directory), has_own_tasks)
        sys.path.insert(0, directory)
        set_up(has_own_tasks)
        found = unittest.defaultTestLoader.loadTestsFromNames(
            ["tasks.test_tasks", "tasks.test_dummy_backend", "tasks.test_immediate_backend"]
        )
        chosen = [case for case in cases(found) if name_of(case) not in LEFT_OUT]
        for case in chosen:
            type(case).databases = {
                "default"
            }  # there is one, where Django's backends need none
        result = unittest.TextTestRunner(stream=sys.stderr).run(unittest.TestSuite(chosen))
    failed = {str(case): text for case, text in [*result.failures, *result.errors]}
    told = {"django": django.get_version(), "ran": result.testsRun, "failed": failed}
    told["left_out"] = len(list(cases(found))) - len(chosen)
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
