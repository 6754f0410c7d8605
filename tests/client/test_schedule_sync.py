"""Schedules beside the code: what a deployment puts in, and what it removes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any

import psycopg
import pytest

import rota
from rota import AsyncJob, Client, Job, Registry
from support.waiting import wait_until

pytestmark = pytest.mark.slow

Run = Callable[..., str]


@pytest.fixture
def deploy(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Sync the schedules of a registry."""

    def sync(registry: Registry, *options: str, code: int = 0) -> str:
        module = ModuleType("shop_jobs")
        module.__dict__["registry"] = registry
        monkeypatch.setitem(sys.modules, "shop_jobs", module)
        return run("schedule", "sync", "shop_jobs:registry", *options, code=code)

    return sync


def with_schedules(name: str | None, *schedules: str, at: str = "0 2 * * *") -> Registry:
    """Make a registry with a task, and schedules of these names for it."""
    registry = Registry(name)

    @registry.task()
    def clean_up(days: int = 30) -> None: ...

    for each in schedules:
        registry.schedule(at, name=each)(clean_up)
    return registry


def there(db: psycopg.Connection[Any]) -> list[Any]:
    return db.execute(
        "select name, source, schedule from rota.job_definitions order by name"
    ).fetchall()


def test_what_is_beside_the_code_is_put_in(
    deploy: Callable[..., str], db: psycopg.Connection[Any]
) -> None:
    registry = Registry("shop")

    @registry.schedule("0 2 * * *", time_zone="Europe/Warsaw", payload={"days": 7})
    @registry.task(
        queue="slow", priority=5, max_attempts=3, time_limit=timedelta(hours=1),
        give_up_on=ValueError,
    )  # fmt: skip
    def clean_up(days: int = 30) -> None: ...

    @registry.schedule("every 10 minutes", overlap="skip", jitter=timedelta(minutes=1))
    @registry.schedule(
        "@daily", name="full", payload={"all": True}, starts_at=datetime(2030, 1, 1, tzinfo=UTC)
    )
    @registry.handler("warm_cache")
    async def warm_cache(job: AsyncJob) -> None: ...

    said = deploy(registry)

    assert said.splitlines()[-1] == "3 created, 0 changed, 0 unchanged"
    rows = db.execute(
        "select name, job_type, payload, queue, schedule, time_zone, priority, max_attempts,"
        " overlap, jitter, starts_at::date::text, source, time_limit"
        " from rota.job_definitions order by name"
    ).fetchall()
    none = timedelta(0)
    assert rows == [
        ("clean_up", "clean_up", {"days": 7}, "slow", "0 2 * * *", "Europe/Warsaw", 5, 3,
         "allow", none, None, "shop", timedelta(hours=1)),
        ("full", "warm_cache", {"all": True}, "default", "@daily", "UTC", 0, None,
         "allow", none, "2030-01-01", "shop", None),
        ("warm_cache", "warm_cache", {}, "default", "every 10 minutes", "UTC", 0, None, "skip",
         timedelta(minutes=1), None, "shop", None),
    ]  # fmt: skip
    assert deploy(registry).splitlines()[-1] == "0 created, 0 changed, 3 unchanged"


def test_what_the_code_has_no_more_is_left_or_pruned(
    deploy: Callable[..., str], db: psycopg.Connection[Any]
) -> None:
    deploy(with_schedules("shop", "one", "two"))
    only = with_schedules("shop", "one", at="0 3 * * *")

    left = deploy(only)
    assert [row[0] for row in there(db)] == ["one", "two"]
    pruned = deploy(only, "--prune")

    assert "    schedule: 0 2 * * * -> 0 3 * * *" in left.splitlines()
    assert "--prune removes them" in left
    assert pruned.splitlines()[-1] == "0 created, 0 changed, 1 unchanged, 1 removed"
    assert there(db) == [("one", "shop", "0 3 * * *")]


def test_what_the_code_has_no_more_may_be_broken(
    deploy: Callable[..., str], db: psycopg.Connection[Any]
) -> None:
    deploy(with_schedules("shop", "one", "two"))
    db.execute(
        "update rota.job_definitions set schedule = 'nonsense', is_enabled = false,"
        " disabled_at = now(), last_error = 'no schedule', next_run_at = null"
        " where name = 'two'"
    )
    only = with_schedules("shop", "one")

    assert "no schedule" in deploy(only)
    assert "no schedule" in deploy(only, "--prune")
    assert there(db) == [("one", "shop", "0 2 * * *")]


def test_what_an_error_has_disabled_is_told_where_nothing_has_changed(
    deploy: Callable[..., str], db: psycopg.Connection[Any]
) -> None:
    registry = with_schedules("shop", "one", "two")
    deploy(registry)
    db.execute(
        "update rota.job_definitions set is_enabled = false, disabled_at = now(),"
        " last_error = 'boom', next_run_at = null where name = 'two'"
    )

    told = deploy(registry)

    assert "at 02:00 every day (disabled: boom)\n" in told
    assert told.count("disabled") == 1


def test_two_deployments_at_once_prune_the_same(
    deploy: Callable[..., str],
    connect: Callable[[], psycopg.Connection[Any]],
    db: psycopg.Connection[Any],
) -> None:
    """The other has removed it and commits while this one waits for it."""
    deploy(with_schedules("shop", "one", "two"))
    other = connect()
    other.execute("begin")
    other.execute("select rota.unschedule_job('two')")

    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(deploy, with_schedules("shop", "one", "three"), "--prune")
        wait_until(
            lambda: (
                db.execute(
                    "select from pg_locks where not granted and locktype = 'transactionid'"
                ).fetchone()
                is not None
            ),
            "the wait",
        )
        other.execute("commit")

    assert said.result().splitlines()[-1] == ("1 created, 0 changed, 1 unchanged, 1 removed")
    assert [name for name, _, _ in there(db)] == ["one", "three"]


def test_nothing_of_others_is_pruned_or_taken(
    deploy: Callable[..., str], run: Run, client: Client, db: psycopg.Connection[Any]
) -> None:
    """Two programs and a person share the database."""
    client.schedule_job("by_hand", "@daily", "x")
    deploy(with_schedules("crm", "theirs"))
    deploy(with_schedules("shop", "ours"), "--prune")
    before = there(db)

    deploy(with_schedules("shop", "ours"), "--prune")
    refused = deploy(with_schedules("shop", "theirs", "fresh"), "--prune", code=1)

    assert refused == (
        "rota: theirs: source must be 'crm', which has put in schedule 'theirs', got 'shop'\n"
    )
    assert [name for name, _, _ in before] == ["by_hand", "ours", "theirs"]
    assert there(db) == before


def test_what_was_put_in_by_hand_becomes_that_of_the_code(
    deploy: Callable[..., str], run: Run, client: Client, db: psycopg.Connection[Any]
) -> None:
    client.schedule_job("one", "0 2 * * *", "clean_up")

    said = deploy(with_schedules("shop", "one"))
    client.schedule_job("one", "0 5 * * *", "clean_up")  # somebody in a hurry

    assert "    source: none -> shop" in said.splitlines()
    assert there(db) == [("one", "shop", "0 5 * * *")]
    assert deploy(with_schedules("shop", "one")).splitlines()[-1].startswith("0 created, 1 ch")


def test_a_dry_run_lists_the_changes_and_makes_none(
    deploy: Callable[..., str], db: psycopg.Connection[Any]
) -> None:
    deploy(with_schedules("shop", "one", "two"))
    before = there(db)
    changed = with_schedules("shop", "two", "three", at="0 3 * * *")

    said = json.loads(deploy(changed, "--prune", "--dry-run", "--json"))
    text = deploy(changed, "--prune", "--dry-run")

    outcomes = [(row["name"], row["outcome"]) for row in said]
    assert outcomes == [("three", "created"), ("two", "changed"), ("one", "removed")]
    assert said[1]["changes"] == {"schedule": ["0 2 * * *", "0 3 * * *"]}
    assert text.splitlines()[-1].endswith("1 removed (dry run: nothing was done)")
    assert there(db) == before


def test_a_registry_without_a_name_puts_in_and_never_prunes(
    deploy: Callable[..., str], db: psycopg.Connection[Any]
) -> None:
    deploy(with_schedules(None, "one", "two"))
    deploy(with_schedules(None, "one"))

    assert [(name, source) for name, source, _ in there(db)] == [("one", None), ("two", None)]
    refused = deploy(with_schedules(None, "one"), "--prune", code=2)
    assert 'write rota.Registry("shop")' in refused


def test_all_are_put_in_or_none(
    deploy: Callable[..., str], db: psycopg.Connection[Any]
) -> None:
    registry = with_schedules("shop", "good")
    registry.schedule("0 2 * *", name="bad")(registry["clean_up"])

    refused = deploy(registry, code=1)

    assert refused.startswith("rota: bad: ")
    assert there(db) == []


def test_what_a_schedule_makes_is_run(
    deploy: Callable[..., str],
    client: Client,
    db: psycopg.Connection[Any],
    drain: Callable[..., None],
) -> None:
    registry = Registry("shop")
    seen: list[Any] = []

    @registry.schedule(
        "@yearly", payload={"since": datetime(2026, 1, 1, tzinfo=UTC)},
        time_limit=timedelta(minutes=5),
    )  # fmt: skip
    @registry.task()
    def report(job: Job, since: datetime) -> None:
        seen.append((job.definition, since))

    deploy(registry)
    client.run_schedule_now("report")
    drain(registry)

    assert seen == [("report", datetime(2026, 1, 1, tzinfo=UTC))]
    limits = db.execute("select time_limit from rota.finished_jobs").fetchall()
    assert limits == [(timedelta(minutes=5),)]


def test_a_schedule_that_fits_nothing_is_refused_where_it_is_written() -> None:
    registry: Any = Registry("shop")

    @registry.task(ordering_key="all")
    def in_order() -> None: ...

    @registry.task()
    def clean_up(days: int) -> None: ...

    with pytest.raises(ValueError, match=r"cannot have ordering_key, .* in_order has: each"):
        registry.schedule("@daily")(in_order)
    with pytest.raises(TypeError, match=r"clean_up\(days: int\): missing a required argument"):
        registry.schedule("@daily")(clean_up)
    with pytest.raises(rota.InvalidArgumentError, match=r"payload\.days"):
        registry.schedule("@daily", payload={"days": "many"})(clean_up)
    with pytest.raises(TypeError, match="'time_zne' is not an option of a schedule"):
        registry.schedule("@daily", time_zne="UTC")
    with pytest.raises(TypeError, match=r"put @registry\.schedule\(\.\.\.\) above"):
        registry.schedule("@daily")(lambda job: None)
    registry.schedule("@daily", payload={"days": 5})(clean_up)
    with pytest.raises(ValueError, match="already a schedule 'clean_up': give each a name"):
        registry.schedule("@hourly", payload={"days": 5})(clean_up)


def test_a_registry_includes_the_schedules_of_another() -> None:
    whole, part = Registry("shop"), with_schedules(None, "one")

    whole.include(part)

    assert [said["name"] for said in whole.schedules] == ["one"]
    again: Any = Registry()
    again.handler("x")(lambda job: None)
    again.schedule("@daily", name="one")(again["x"])
    with pytest.raises(ValueError, match="there is already a schedule 'one'"):
        whole.include(again)
