"""The client is the stored functions, and nothing else."""

import ast
import inspect
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from math import nan
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pytest

import rota
from rota import AsyncClient, Client, InvalidArgumentError
from rota.client.values import CONVERTERS, DURATIONS
from rota.exceptions import ACCESS, OWNERS

PACKAGE = Path(rota.__file__).parent
NOT_OF_THE_CLIENT = {"now"}


def _methods(cls: type) -> dict[str, list[str]]:
    return {
        name: list(inspect.signature(method).parameters)[1:]
        for name, method in vars(cls).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }


def test_client_has_the_functions_of_the_catalog(db: psycopg.Connection[Any]) -> None:
    functions = db.execute(
        """
        select p.proname, coalesce(array(
            select a.name
            from unnest(p.proargnames, p.proargmodes) with ordinality as a (name, mode, n)
            where coalesce(a.mode, 'i') = 'i'
            order by a.n
        ), '{}')
        from pg_proc as p
        where p.pronamespace = 'rota'::regnamespace
          and p.prokind = 'f'
          and p.prorettype <> 'trigger'::regtype
          and p.proname !~ '^_'
        """
    ).fetchall()

    expected = {name: names for name, names in functions if name not in NOT_OF_THE_CLIENT}
    # The client also does the waiting.
    expected["wait_for_result"] += ["timeout", "listen"]

    assert _methods(Client) == expected
    assert _methods(AsyncClient) == expected


def test_arrays_and_json_are_made_of_arguments_by_their_names(
    db: psycopg.Connection[Any],
) -> None:
    found = db.execute(
        """
        select distinct a.name
        from pg_proc as p
        cross join unnest(p.proargnames, p.proargtypes::oid[]) as a (name, type)
        join pg_type as t on t.oid = a.type
        where p.pronamespace = 'rota'::regnamespace and p.proname !~ '^_'
          and p.prokind = 'f' and (t.typcategory = 'A' or a.type = 'jsonb'::regtype)
        """
    ).fetchall()

    cleaned = {"error", "message", "reason", "stack"}
    assert {name for (name,) in found} == CONVERTERS.keys() - cleaned


def test_a_number_is_refused_as_a_duration_before_it_is_sent(
    db: psycopg.Connection[Any], client: Client
) -> None:
    found = db.execute(
        """
        select distinct a.name
        from pg_proc as p
        cross join unnest(p.proargnames, p.proargtypes::oid[]) as a (name, type)
        where p.pronamespace = 'rota'::regnamespace and p.proname !~ '^_'
          and p.prokind = 'f' and a.type = 'interval'::regtype
        """
    ).fetchall()

    assert {name for (name,) in found} == DURATIONS
    with db.transaction():
        for call in (
            lambda: client.set_limit(queue="q", max_starts=10, per=60),  # type: ignore[arg-type]
            lambda: client.set_queue("q", lease=0.5),  # type: ignore[arg-type]
        ):
            with pytest.raises(rota.InvalidArgumentError, match=r"^\w+ must be a timedelta"):
                call()
        assert client.enqueue("a", delay=60).is_new


def test_sync_client_is_fresh() -> None:
    tool = PACKAGE.parents[1] / "tools" / "generate_sync.py"

    assert subprocess.run([sys.executable, str(tool), "--check"], check=False).returncode == 0


def test_clients_name_no_table() -> None:
    tree = ast.parse((PACKAGE / "client" / "async_client.py").read_text())
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]

    assert not [t for t in texts if isinstance(t, str) and "from rota." in t]


def test_exported_members_are_complete_and_sorted() -> None:
    public = {
        name
        for name, value in vars(rota).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }

    assert rota.__all__ == sorted(rota.__all__)
    assert set(rota.__all__) == public | {"__version__"}


def test_every_row_that_a_client_returns_is_exported() -> None:
    methods = [m for n, m in inspect.getmembers(rota.Client, callable) if n[0] != "_"]
    returned = " ".join(str(method.__annotations__.get("return")) for method in methods)

    assert set(re.findall(r"rows\.(\w+)", returned)) - set(rota.__all__) == set()


def test_version_is_that_of_the_database(client: Client) -> None:
    assert client.version() == rota.__version__


def test_enqueue_says_whether_the_job_is_new(client: Client) -> None:
    first = client.enqueue("send_mail", {"user_id": 7}, idempotency_key="welcome:7")
    second = client.enqueue("send_mail", {"user_id": 7}, idempotency_key="welcome:7")

    assert first.is_new
    assert not second.is_new
    assert first.job_id == second.job_id


def test_enqueue_passes_every_argument(client: Client, db: psycopg.Connection[Any]) -> None:
    job = client.enqueue(
        "send_mail",
        {"list": [1, {"a": None}]},
        queue="mail",
        delay=timedelta(minutes=10),
        priority=-3,
        max_attempts=2,
        lease=timedelta(seconds=90),
        backoff={"kind": "fixed", "base_seconds": 5},
        idempotency_key="k",
    )

    row = db.execute(
        "select queue, payload, priority, max_attempts, lease, run_at - created_at,"
        " idempotency_key from rota.jobs where id = %s",
        [job.job_id],
    ).fetchone()
    assert row is not None
    assert row[:5] == ("mail", {"list": [1, {"a": None}]}, -3, 2, timedelta(seconds=90))
    assert abs(row[5] - timedelta(minutes=10)) < timedelta(seconds=1)
    assert row[6] == "k"


def test_enqueue_joins_the_transaction_of_the_caller(
    connect: Callable[..., psycopg.Connection[Any]], db: psycopg.Connection[Any]
) -> None:
    connection = connect(autocommit=False)

    Client(connection).enqueue("send_mail")
    connection.rollback()

    assert db.execute("select count(*) from rota.jobs").fetchone() == (0,)


def test_every_call_works(client: Client) -> None:
    client.set_queue("default", lease=timedelta(seconds=30), backoff={"kind": "fixed"})
    client.set_limit(job_type="a", max_running=6, max_starts=9, per=timedelta(1), burst=9)
    ids = [job.job_id for job in client.enqueue_many([{"job_type": "a"}] * 6)]
    jobs = {job.job_id: job for job in client.claim_jobs("w", ["default"], 6)}
    tokens = [jobs[i].lease_token for i in ids]

    assert sorted(jobs) == ids
    assert jobs[ids[0]].locked_for == timedelta(seconds=30)
    assert not client.heartbeat(ids[0], tokens[0]).is_cancel_requested
    assert [b.is_lost for b in client.heartbeat_jobs(ids, tokens)] == [False] * 6
    client.set_progress(ids[0], tokens[0], 12.5, "begun")
    assert client.finish_job(ids[0], tokens[0], {"ok": True}) == "finished"
    assert client.finish_job(ids[0], tokens[0], {"ok": True}) == "already_finished"
    assert [f.outcome for f in client.finish_jobs(ids[:2], tokens[:2], [1, None])] == [
        "already_finished",
        "finished",
    ]
    assert client.fail_job(ids[2], tokens[2], "bad\x00", "E", "stack").status == "failed"
    assert client.fail_job(ids[3], tokens[3], "worse", fatal=True).status == "dead"
    assert client.snooze_job(ids[4], tokens[4], timedelta(hours=1)) is not None
    assert [r.is_released for r in client.release_jobs(ids[5:], tokens[5:])] == [True]
    assert client.retry_job(ids[3]) == "queued"
    client.set_priority(ids[3], 4)
    client.reschedule_job(ids[3], delay=timedelta(hours=2))
    assert client.cancel_job(ids[3], "no more") == "cancelled"
    client.pause_queue("default", "lunch")
    client.resume_queue("default")
    client.report_worker("w", "host", 1, "0", ["default"])
    client.deregister_worker("w")
    assert client.sweep_stale_leases() == 0
    assert client.tick().jobs_swept == 0
    assert client.grant_statements("producer", "postgres")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c, j: c.retry_job(10**12), rota.JobNotFoundError),
        (lambda c, j: c.heartbeat(j.job_id, j.lease_token - 1), rota.LeaseLostError),
        (lambda c, j: c.reschedule_job(j.job_id, delay=timedelta(1)), rota.JobRunningError),
        (lambda c, j: c.pause_queue("nowhere"), rota.UnknownQueueError),
        (lambda c, j: c.enqueue(""), rota.InvalidArgumentError),
    ],
)
def test_errors_have_classes(client: Client, call: Any, error: type[rota.RotaError]) -> None:
    client.enqueue("a")
    (job,) = client.claim_jobs("w")

    with pytest.raises(error) as caught:
        call(client, job)

    assert isinstance(caught.value.__cause__, psycopg.Error)
    assert caught.value.__cause__.sqlstate == error.sqlstate


def test_finished_job_refuses(client: Client) -> None:
    job_id = client.enqueue("a").job_id
    (job,) = client.claim_jobs("w")
    client.finish_job(job_id, job.lease_token)

    with pytest.raises(rota.JobFinishedError):
        client.cancel_job(job_id)


def test_claim_refuses_other_isolation(
    connect: Callable[..., psycopg.Connection[Any]],
) -> None:
    connection = connect(autocommit=False)
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ

    with pytest.raises(rota.IsolationLevelError):
        Client(connection).claim_jobs("w")


def test_unknown_database_errors_pass_through(
    client: Client, db: psycopg.Connection[Any]
) -> None:
    db.execute("drop function rota.tick()")

    with pytest.raises(psycopg.errors.UndefinedFunction):
        client.tick()


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_call_within_a_pipeline_raises_the_error_of_the_database(
    client: Client, connect: Callable[..., psycopg.Connection[Any]], is_broken: bool
) -> None:
    connection = connect(autocommit=False)

    error = psycopg.errors.UndefinedTable if is_broken else rota.JobNotFoundError
    # For what comes behind a failure psycopg raises that at the end, if it has not read it yet.
    with suppress(psycopg.errors.PipelineAborted), connection.pipeline():
        assert Client(connection).enqueue("a").is_new
        if is_broken:
            connection.execute("select from nothing")
        with pytest.raises(error) as raised:
            Client(connection).enqueue("a", depends_on=[999])

    assert raised.type is error


def test_a_text_is_no_list_of_queues(client: Client) -> None:
    with pytest.raises(TypeError, match=r"^queues must be a list, got the text 'default'$"):
        client.claim_jobs("w", "default")


def test_a_moment_needs_a_time_zone(client: Client, db: psycopg.Connection[Any]) -> None:
    job_id = client.enqueue("a", {"at": "noon"}, run_at=datetime.now(UTC)).job_id
    naive = datetime(2030, 1, 1)
    calls: list[Callable[[], Any]] = [
        lambda: client.enqueue("a", run_at=naive),
        lambda: client.reschedule_job(job_id, run_at=naive),
        lambda: client.enqueue("a", run_at=date(2030, 1, 1)),  # type: ignore[arg-type]
        lambda: client.reschedule_job(job_id, run_at=date(2030, 1, 1)),  # type: ignore[arg-type]
    ]

    for call in calls:
        with pytest.raises(rota.InvalidArgumentError, match=r"^run_at must have a time zone"):
            call()

    assert db.execute("select count(*) from rota.jobs").fetchone() == (1,)


def test_enqueue_speaks_of_its_own_arguments(client: Client) -> None:
    with pytest.raises(rota.InvalidArgumentError, match=r"^priority must "):
        client.enqueue("a", priority=10**6)
    with pytest.raises(rota.InvalidArgumentError, match=r"^jobs\[1\]\.priority must "):
        client.enqueue_many([{"job_type": "a", "priority": 10**6}])
    flaws: list[tuple[str, dict[str, Any]]] = [
        ("run_at must have a time zone", {"run_at": datetime(2030, 1, 1)}),
        (r"payload\['n'\] must be a finite number", {"payload": {"n": nan}}),
    ]
    for said, flaw in flaws:
        with pytest.raises(rota.InvalidArgumentError, match=rf"^jobs\[2\]\.{said}"):
            client.enqueue_many([{"job_type": "a"}, {"job_type": "a", **flaw}])


@pytest.mark.parametrize("factory", [psycopg.ClientCursor, psycopg.RawCursor])
def test_any_cursor_class_of_the_caller_will_do(
    connect: Callable[..., psycopg.Connection[Any]], factory: Any
) -> None:
    """Django's connections have a cursor class that binds on the side of the client."""
    connection = connect(cursor_factory=factory)
    client = Client(connection)

    job = client.enqueue("a", {"n": 1}, delay=timedelta(minutes=1))
    (claimed,) = client.enqueue_many([{"job_type": "a"}]) and client.claim_jobs("w")

    assert job.is_new
    assert client.finish_job(claimed.job_id, claimed.lease_token) == "finished"
    assert connection.cursor_factory is factory


@pytest.mark.parametrize("arguments", [("default",), ("default", 0)])
def test_after_the_payload_arguments_have_names(client: Client, arguments: Any) -> None:
    with pytest.raises(TypeError):
        client.enqueue("a", {}, *arguments)
    with pytest.raises(TypeError):
        client.schedule_job("n", "@daily", "a", {}, *arguments)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (
            {"a": [{"at": datetime(2026, 1, 1, tzinfo=UTC)}]},
            r"payload\['a'\]\[0\]\['at'\] is of type datetime",
        ),
        ({"id": uuid.UUID(int=5)}, r"payload\['id'\] is of type UUID, .* str\(value\)"),
        ({"price": Decimal("1.5")}, r"payload\['price'\] is of type Decimal"),
        ({"icon": b"\x01"}, r"payload\['icon'\] is of type bytes, .* base64"),
        ({"icon": bytearray(b"\x01")}, r"payload\['icon'\] is of type bytearray, .* base64"),
        (b'{"n": 1}', r"payload is of type bytes"),
        ({"ids": {1}}, r"payload\['ids'\] is of type set, .* as a list"),
        ({1: 2, "1": 3}, r"payload has the keys 1 and '1', which are one key in JSON"),
        ({"n": {uuid.UUID(int=5): 1}}, r"payload\['n'\] has the key UUID\(.*: send it as text"),
        ({"n": MappingProxyType({})}, r"payload\['n'\] is of type mappingproxy.* as a dict"),
    ],
)
def test_a_payload_that_is_no_json_is_refused_by_its_path(
    client: Client, payload: Any, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        client.enqueue("a", payload)
    with pytest.raises(InvalidArgumentError, match=message):
        client.enqueue_many([{"job_type": "a"}, {"job_type": "a", "payload": payload}])
    with pytest.raises(InvalidArgumentError, match=message):
        client.schedule_job("n", "@daily", "a", payload)


def test_a_payload_may_be_any_mapping(client: Client) -> None:
    payload = MappingProxyType({"n": 1})

    client.enqueue("a", payload, headers=MappingProxyType({"trace": "1"}))
    client.enqueue_many([{"job_type": "a", "payload": payload}])
    client.schedule_job("n", "@daily", "a", payload)

    assert [claimed.payload for claimed in client.claim_jobs("w", max_jobs=2)] == [{"n": 1}] * 2


def test_moments_in_an_array_do_not_hide_what_the_database_says(client: Client) -> None:
    moments = [datetime(2026, 1, 1, tzinfo=UTC)]
    client.connection.execute("select rota.set_database_number(5)")
    client.connection.execute("set default_transaction_read_only = on")
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        client.receive_jobs(5, [1], moments, [{"job_type": "a"}])


def test_objects_in_the_place_of_their_ids_and_names_are_refused_with_what_helps(
    client: Client,
) -> None:
    job: Any = client.enqueue("a")

    with pytest.raises(
        InvalidArgumentError, match=r"job_id is of type EnqueuedJob.* its job_id"
    ):
        client.retry_job(job)
    with pytest.raises(InvalidArgumentError, match=r"depends_on\[0\] .* its job_id"):
        client.enqueue("b", depends_on=[job])
    zone: Any = ZoneInfo("Europe/Warsaw")
    with pytest.raises(InvalidArgumentError, match=r"time_zone .* 'Europe/Warsaw'"):
        client.schedule_job("n", "@daily", "a", time_zone=zone)


@pytest.mark.parametrize("jobs", [{"job_type": "zz"}, [None], ["zz"]])
def test_what_is_no_list_of_jobs_is_refused(
    client: Client, monkeypatch: pytest.MonkeyPatch, jobs: Any
) -> None:
    """Before hooks look at it."""

    @contextmanager
    def hook(out: Any) -> Iterator[None]:
        assert [job["job_type"] for job in out.jobs]
        yield

    monkeypatch.setattr("rota.client.statement.HOOKS", [hook])
    with pytest.raises(InvalidArgumentError, match=r"^jobs\[1\] must be a mapping, got"):
        client.enqueue_many(jobs)
    with pytest.raises(InvalidArgumentError, match=r"^stages\[2\] must be a mapping, got 'b'"):
        client.define_pipeline("p", [{"stage": "a"}, "b"])  # type: ignore[list-item]


def test_a_role_without_a_grant_is_told_the_statement_that_gives_it(
    db: psycopg.Connection[Any], dsn: str
) -> None:
    """As a worker that wants to enqueue, and as one that has no access at all."""
    role = f"works_{db.info.dbname}"
    db.execute(f"create role {role}")  # type: ignore[arg-type]
    for (grant,) in db.execute("select rota.grant_statements('worker', %s)", [role]).fetchall():
        db.execute(grant)
    remedy = (
        "let the owner of the schema run what "
        "select rota.grant_statements('{}', 'ROLE') returns"
    )
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"set role {role}")  # type: ignore[arg-type]
        works = Client(connection)
        works.claim_jobs("w")
        with pytest.raises(rota.NotGrantedError) as enqueue:
            works.enqueue_many([{"job_type": "x"}])
        with pytest.raises(rota.NotGrantedError, match="for the owner of the schema"):
            works.grant_queue(role, "default")
        connection.execute("reset role")
        connection.execute(f"revoke usage on schema rota from {role}")  # type: ignore[arg-type]
        connection.execute(f"set role {role}")  # type: ignore[arg-type]
        with pytest.raises(psycopg.errors.InsufficientPrivilege) as claim:
            works.claim_jobs("w")
    db.execute(f"drop owned by {role}; drop role {role}")  # type: ignore[arg-type]

    assert str(enqueue.value) == (
        f"permission denied for function enqueue_many: {remedy.format('producer')}"
    )
    assert str(claim.value) == f"permission denied for schema rota: {remedy.format('worker')}"


def test_the_client_knows_which_access_each_function_needs(
    db: psycopg.Connection[Any],
) -> None:
    found = db.execute(
        "select name, array_agg(access) from rota._access() where kind = 'function' group by 1"
    )
    needed = dict(found.fetchall())
    public = db.execute(
        "select proname from pg_proc where pronamespace = 'rota'::regnamespace"
        " and prokind = 'f' and proname !~ '^_'"
    ).fetchall()

    assert ACCESS.keys() <= needed.keys()
    assert [name for name in needed if ACCESS.get(name, "observer") not in needed[name]] == []
    assert {name for (name,) in public} - needed.keys() == OWNERS
