"""What the tests are run in, and which of them; support/databases.py has their server."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest
from styles import CURSOR, PLAIN_SESSION

from rota.testing.server import find_binaries, memory
from support.locales import has_utf8

HERE = Path(__file__).resolve().parent
pytest_plugins = ["support.databases"]
SLOW_ROOMS = {
    "races",
    "model",
    "mutants",
    "fuzz",
    "faults",
    "security",
    "web",
    "releases",
}
# Each of them takes 5 to 90 seconds.  They are run first, so that all processes end together.
SLOWEST = (
    "web/test_browser.py",
    "races/test_games.py",
    "client/test_demo.py",
    "contract/test_install_sh.py",
    "sql/maintenance/test_pg_cron.py",
    "races/test_racing_pipelines.py",
    "client/test_supervisor.py",
    "sql/schedules/test_occurrences.py",
    "sql/waiting/test_limits_open.py",
    "web/test_pages.py",
    "contract/test_plans.py",
    "sql/operations/test_doctor.py",
    "client/test_frozen.py",
    "client/test_worker.py",
    "sql/maintenance/test_statistics.py",
    "web/test_access.py",
    "releases/test_from_0_1_0.py",
    "races/test_pairs.py",
    "faults/test_forward_kill.py",
    "sql/maintenance/test_wakeups.py",
    "model/test_machine.py",
    "contract/test_recipes.py",
    "faults/test_move_kill.py",
    "client/test_many_databases.py",
    "client/test_woken_workers.py",
    "client/test_package.py",
    "mutants/test_games_notice.py",
    "client/test_django_tasks.py",
    "security/test_gate.py",
    "sql/maintenance/test_retention.py",
    "client/test_schedules_cli.py",
    "races/test_waiting.py",
    "contract/test_install.py",
    "client/test_django_suite.py",
    "releases/test_restore.py",
    "sql/operations/test_drift.py",
    "sql/schedules/test_describe.py",
    "races/test_interleavings.py",
    "client/test_testing_plugin.py",
    "client/test_example_apps.py",
    "model/test_storms.py",
    "faults/test_scale_history.py",
    "mutants/test_storms_notice.py",
    "client/test_types.py",
    "faults/test_incidents.py",
    "fuzz/test_cron_oracle.py",
    "web/test_acts.py",
    "contract/test_node.py",
    "faults/test_promotions.py",
    "faults/test_standby.py",
    "mutants/test_model_notices.py",
    "fuzz/test_arguments.py",
    "races/test_load.py",
    "client/test_hostile.py",
    "model/test_tickers.py",
    "client/test_finish_in.py",
    "faults/test_sessions.py",
    "client/test_time_limit.py",
    "faults/test_killed_workers.py",
    "faults/test_horizon.py",
    "mutants/test_mutants.py",
    "mutants/test_histories_notice.py",
    "client/test_worker_process.py",
    "client/test_locked_rows.py",
    "races/test_strangers.py",
    "releases/test_general.py",
    "mutants/test_tickers_notice.py",
    "races/test_racing_schedules.py",
)

_left_out: Counter[str] = Counter()


@pytest.fixture(scope="session", autouse=True)
def _own_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the developer's own database from everything that a test starts."""
    # A shell starts what it puts in the background with SIGINT ignored, and so would all
    # that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            is_ours = name == "PGBINDIR" or os.environ[name] == PLAIN_SESSION
            if name == "DATABASE_URL" or (name.startswith("PG") and not is_ours):
                patch.delenv(name)
        # What a test starts in another directory finds the same code.
        if path := os.environ.get("PYTHONPATH"):
            folders = [str(Path(folder).resolve()) for folder in path.split(os.pathsep)]
            patch.setenv("PYTHONPATH", os.pathsep.join(folders))
        # A new server is a thousand files: on a disk they take twice the CPU of all else.
        tmp_path_factory.getbasetemp()  # pytest keeps those of three runs, so not in memory
        if directory := memory(room=6 << 30):
            patch.setenv("TMPDIR", str(directory))
            patch.setattr(tempfile, "tempdir", None)  # which Python has chosen already
        # A session of the server touches each page of its memory once: with large ones, where
        # the system has them, the tests take a twelfth less CPU.
        patch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        # Before those of Debian, which are scripts that look for these.
        programs, _ = find_binaries(os.environ.get("ROTA_PG_BINDIR"))
        patch.setenv("PATH", str(programs), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session", autouse=True)
def _styles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        defaults = psycopg.Connection.connect.__func__.__kwdefaults__  # type: ignore[attr-defined]
        patch.setitem(defaults, "cursor_factory", CURSOR)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let what is about texts or plans see those of a server without settings."""
    with pytest.MonkeyPatch.context() as patch:
        if "ROTA_TEST_SETTINGS" in os.environ and item.get_closest_marker("plain_session"):
            patch.setenv("PGOPTIONS", PLAIN_SESSION)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what no process can send to another: a log that tells of half a character."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode())
        for name, text in report.sections
    ]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take the rooms that take long for slow as a whole, and begin with the slowest files."""
    turns = {HERE / name: turn for turn, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: turns.get(item.path, len(turns)))
    for item in items:
        if item.path.relative_to(HERE).parts[0] in SLOW_ROOMS:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("of_utf8") and not has_utf8():
            item.add_marker(pytest.mark.skip("the database has another encoding"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while the tests are read, which halves the time, nor among them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count what is left out for being slow; with xdist each worker sees all of it."""
    for item in items:
        is_asked_for = "not slow" in item.config.getoption("markexpr")
        if is_asked_for and item.get_closest_marker("slow"):
            _left_out[item.path.relative_to(HERE).as_posix()] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts from a worker of xdist to the process that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Receive them; all workers have the same."""
    for name, number in getattr(node, "workeroutput", {}).get("left_out", {}).items():
        _left_out[name] = number


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what a quick run has left out."""
    if _left_out:
        told = ", ".join(f"{name} {number}" for name, number in sorted(_left_out.items()))
        number = sum(_left_out.values())
        config = terminalreporter.config
        rooms = {Path(arg.partition("::")[0]).parts[0] for arg in config.args}
        others = " ".join(sorted({*config.getini("testpaths")} - rooms)) or "none"
        terminalreporter.write_line(f"left out: {number} slow tests (make test), of {told}")
        terminalreporter.write_line(f"left out as a whole: {others}")
