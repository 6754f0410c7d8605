"""The client with values that no caller means to send: what comes of it has a name.

Every public method is called with every value, one argument at a time, the others as they
should be.  A value of the right type is taken, or refused as a RotaError or TypeError; one of
another type also as psycopg or the server refuses it.  What the caller had done in the
transaction is still there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import psycopg
import pytest

import rota
from rota import Client
from rota.client.values import check_size

pytestmark = pytest.mark.slow

ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]
ODD_RESULTS: list[Any] = [
    *({"k": value} for value in ("\x00", "\ud800", float("nan"), float("inf"), Decimal("NaN"))),
    *({"k": value} for value in (b"x", object(), {1}, datetime(2026, 1, 1), "x" * 2_000_000)),
    *({"\x00": 1}, {1: 2}, {None: 1}, {(1, 2): 3}, {b"k": 1}, []),
]
ODD_PAYLOADS = [*ODD_RESULTS, *({"k": value} for value in (ENDLESS, DEEP, 10**5000))]
# By annotation: values that a type checker lets through.
RIGHT: dict[str, list[Any]] = {
    "str": ["", "\x00", "a\x00b", "\ud800", "x" * 300, "😀", "\ufffd", "%s", "'", "\\"],
    "int": [0, -1, 2**31 - 1, -(2**31)],
    "bool": [True, False],
    "datetime": [
        datetime(2026, 1, 1),
        datetime.min.replace(tzinfo=UTC),
        datetime.max.replace(tzinfo=UTC),
    ],
    "timedelta": [timedelta.max, timedelta.min, timedelta(0), timedelta(microseconds=-1)],
    "float": [float("nan"), float("inf"), 1e308, -0.0],
    "Decimal": [Decimal("NaN"), Decimal("Infinity"), Decimal("1e400"), Decimal("-0.0")],
    "Mapping[": ODD_PAYLOADS,
    "Any": [*ODD_RESULTS, "\x00", float("nan"), object()],
    "Sequence[str": [[], [""], ["x"] * 2000, ("a", "b")],
    "Sequence[int]": [[], [2**63 - 1], [-1], [0, 0], [1] * 2000, range(3)],
    "Sequence[datetime": [[], [datetime(2026, 1, 1)], [datetime.max.replace(tzinfo=UTC)] * 2],
    "Sequence[Mapping": [
        [],
        [{}],
        [{"x": 1}],
        *([{"payload": value}] for value in ODD_PAYLOADS),
    ],
    "Sequence[Any]": [[], ["\x00"], [float("nan")], [object()], [None] * 2000],
}
WRONG = [b"x", object(), 1.5, {1}, [[1], [2]], "x", 5, {"a": 1}, len, ["x", 1]]
# What a call needs besides the value that is tried: by the type of its argument, and by name.
BY_TYPE: dict[str, Any] = {
    "str": "x",
    "int": 1,
    "bool": False,
    "timedelta": timedelta(1),
    "float": 1.0,
    "Decimal": Decimal(1),
    "datetime": datetime(2026, 1, 1, tzinfo=UTC),
    "Mapping[": {},
    "Sequence[str": ["x"],
    "Sequence[int]": [1],
    "Sequence[datetime": [datetime(2026, 1, 1, tzinfo=UTC)],
}
PLAIN: dict[str, Any] = {
    "access": "worker",
    "act": "cancel",
    "databases": [{"number": 1, "dbname": "shop"}],
    "endings": [{"job_id": 1, "lease_token": 1, "outcome": "succeeded"}],
    "filter": {"ids": [1]},
    "from_database": 2,
    "jobs": [{"job_type": "x"}],
    "outcome": "done",
    "queue": "default",
    "queues": ["default"],
    "role": "postgres",
    "schedule": "@daily",
    "scope": "mail",
    "stages": [{"stage": "s", "job_type": "x"}],
}
# What a call comes to that no type checker lets through.
PASSED = (
    *("AttributeError", "DataError", "InvalidDatetimeFormat", "ValueError"),
    *("InvalidTextRepresentation", "ProgrammingError", "UndefinedFunction"),
)
METHODS = sorted(
    name
    for name, method in inspect.getmembers(Client, inspect.isfunction)
    if not name.startswith("_") and len(inspect.signature(method).parameters) > 1
)


def values_of(annotation: str) -> Iterator[Any]:
    for choice in annotation.split(" | "):
        for kind, values in RIGHT.items():
            if choice == kind or ("[" in kind and choice.startswith(kind)):
                yield from values


def plain(parameter: inspect.Parameter) -> Any:
    """Return a value for an argument that is needed."""
    if parameter.name in PLAIN:
        return PLAIN[parameter.name]
    kind = parameter.annotation.split(" | ")[0]
    return next(value for name, value in BY_TYPE.items() if kind.startswith(name))


@pytest.fixture(scope="module")
def client(
    admin: psycopg.Connection[Any], template: str, url_of: Callable[[str], str]
) -> Iterator[Client]:
    """One for all tests: what their calls do is rolled back or refused."""
    admin.execute(f"create database hostile template {template}".encode())
    with psycopg.connect(url_of("hostile"), autocommit=True) as db:
        yield Client(db)
    admin.execute("drop database hostile with (force)")


def outcome(db: psycopg.Connection[Any], call: Callable[[], Any]) -> str:
    """Return what comes of a call, within the transaction of a caller."""
    with db.transaction(force_rollback=True):
        db.execute("select pg_current_xact_id()")  # as if something was written
        try:
            with db.transaction():
                call()
        except (rota.RotaError, TypeError):
            return "refused"
        except Exception as error:
            return type(error).__name__
        return "taken"


def shown(value: Any) -> str:
    try:
        return ascii(value)[:40]
    except (RecursionError, ValueError):
        return f"a huge {type(value).__name__}"


def tried(client: Client, method: str, values: Callable[[str], Iterable[Any]]) -> list[str]:
    """Call a method with all values for each of its arguments; return what came of it."""
    parameters = list(inspect.signature(getattr(Client, method)).parameters.values())[1:]
    needed = {p.name: plain(p) for p in parameters if p.default is inspect.Parameter.empty}
    found = []
    for parameter in parameters:
        for value in values(parameter.annotation):
            call = partial(getattr(client, method), **{**needed, parameter.name: value})
            found.append(f"{outcome(client.connection, call)} {parameter.name}={shown(value)}")
    return found


@pytest.mark.parametrize("method", METHODS)
def test_values_of_the_right_type_are_taken_or_refused(client: Client, method: str) -> None:
    found = tried(client, method, values_of)

    assert [case for case in found if not case.startswith(("taken ", "refused "))] == []


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_values_of_another_type_break_nothing(client: Client, method: str) -> None:
    found = tried(client, method, lambda _: WRONG)

    assert [
        case for case in found if not case.startswith(("taken ", "refused ", *PASSED))
    ] == []


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.cancel_job(2**63),
        lambda client: client.set_priority(1, 2**31),
        lambda client: client.heartbeat_jobs([2**63], [1]),
        lambda client: client.start_pipeline("p", blocks=10**5000),
        lambda client: client.claim_jobs("w", ["\x00"]),
        lambda client: client.claim_jobs("w", ["\ud800"]),
        lambda client: client.finish_job(1, 1, ENDLESS),
        lambda client: client.finish_job(1, 1, DEEP),
        lambda client: client.finish_job(1, 1, 10**5000),
        lambda client: client.enqueue_many([{"\x00": 1}]),
        lambda client: client.define_pipeline("p", [{"\x00": 1}]),
    ],
)
def test_what_no_column_can_hold_is_refused(client: Client, call: Any) -> None:
    with pytest.raises(rota.InvalidArgumentError):
        call(client)


def test_numbers_are_refused_by_the_width_that_the_catalog_gives_their_argument(
    db: psycopg.Connection[Any],
) -> None:
    arguments = db.execute(
        """
        select distinct a.name, t.typname
        from pg_proc as p,
            unnest(p.proargnames[:p.pronargs], p.proargtypes::oid[]) as a (name, type),
            pg_type as t
        where p.pronamespace = 'rota'::regnamespace
          and p.proname !~ '^_'
          and t.oid = a.type
          and t.typname in ('int4', '_int4', 'int8', '_int8')
        """
    ).fetchall()

    assert ("blocks", "int8") in arguments
    for name, kind in arguments:
        bits = 63 if kind.endswith("8") else 31
        check_size(name, [-(2**bits), 2**bits - 1])
        with pytest.raises(rota.InvalidArgumentError, match=f"^{name} must be -"):
            check_size(name, [2**bits])
