"""Typed tasks: what is enqueued, what the function gets, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NewType,
    NotRequired,
    TypedDict,
    TypeVar,
    get_origin,
)
from uuid import UUID

import psycopg
import pydantic
import pytest
from typing_extensions import ReadOnly, TypeAliasType

import rota
from rota import AsyncClient, AsyncJob, Client, Codec, Job, Registry
from rota.testing import run_job

if TYPE_CHECKING:
    from pathlib import PurePath


class Address(pydantic.BaseModel):
    street: str = pydantic.Field(alias="Street")
    since: date


class Home(Address):
    floor: int = 0


Drain = Callable[..., None]
Row = dict[str, Any]
T = TypeVar("T")
SEEN: list[Any] = []


class Color(Enum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Place(Enum):
    HERE = (1, 2)


class Day(Enum):
    FIRST = date(2026, 1, 1)


Number = NewType("Number", int)
Name = NewType("Name", str)


@dataclass
class Parcel:
    kinds: ClassVar[list[object]] = []
    weight: int
    _: KW_ONLY
    width: int = 1
    made_by: object = field(init=False, default=None)


class Line(TypedDict):
    sku: ReadOnly[str]
    count: NotRequired[int]
    shelf: ReadOnly[NotRequired[str]]


@dataclass
class Node:
    children: list[Node]


@dataclass
class Folder:
    path: PurePath


@dataclass
class Weighed:
    net: int
    tare: InitVar[int] = 0

    def __post_init__(self, tare: int) -> None:
        self.net -= tare


@dataclass(frozen=True)
class Order:
    order_id: UUID
    total: Decimal
    placed_at: datetime
    lines: list[Line] = field(default_factory=list)


@pytest.fixture
def job(db: psycopg.Connection[Any]) -> Callable[[int], Row]:
    def get(job_id: int) -> Row:
        with db.cursor(row_factory=psycopg.rows.dict_row) as cursor:
            cursor.execute("select * from rota.job_runs where id = %s", [job_id])
            row = cursor.fetchone()
            assert row is not None
            return row

    return get


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


def test_task_runs_with_the_arguments_it_was_enqueued_with(
    client: Client, job: Callable[[int], Row], drain: Drain
) -> None:
    registry = Registry()

    @registry.task(queue="default")
    def send_receipt(order_id: int, copies: int = 1) -> dict[str, int]:
        SEEN.append((order_id, copies))
        return {"sent": copies}

    first = send_receipt.enqueue(client, order_id=7).job_id
    send_receipt.enqueue(client.connection, 8, copies=2)
    drain(registry, concurrency=1)

    assert SEEN == [(7, 1), (8, 2)]
    done = job(first)
    assert (done["job_type"], done["payload"]) == ("send_receipt", {"order_id": 7})
    assert (done["status"], done["result"]) == ("succeeded", {"sent": 1})


def test_arguments_reach_parameters_of_each_kind(client: Client, drain: Drain) -> None:
    registry = Registry()

    @registry.task()
    def take(job: Job, /, a: int, b: int = 2, c: int = 3, *, d: int, e: int = 5) -> None:
        SEEN.append((a, b, c, d, e))

    take.enqueue_many(client, [take.job(1, c=30, d=4), take.job(a=1, b=20, d=40, e=50)])
    drain(registry, concurrency=1)

    assert SEEN == [(1, 2, 30, 4, 5), (1, 20, 3, 40, 50)]


def test_a_payload_names_what_a_function_takes_by_place_only() -> None:
    registry = Registry()

    @registry.task()
    def take(job: Job, a: int, b: int = 2, c: int = 3, /, *, d: int = 4) -> list[int]:
        return [a, b, c, d]

    registry.schedule("@daily", payload={"a": 1, "c": 5})(take)

    assert registry.schedules[0]["payload"] == {"a": 1, "c": 5}
    assert run_job(registry, take, {"a": 1, "c": 5}).result == [1, 2, 5, 4]
    assert run_job(registry, take.job(1, d=6)).result == [1, 2, 3, 6]


def test_async_task_is_enqueued_by_an_async_client_and_gets_its_job(
    dsn: str, job: Callable[[int], Row], drain: Drain
) -> None:
    registry = Registry()

    @registry.task("rates")
    async def fetch_rates(job: AsyncJob, day: date) -> str:
        await job.set_progress(50)
        SEEN.append((job.attempt, day))
        return day.isoformat()

    async def produce() -> list[int]:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            one = await fetch_rates.enqueue(connection, day=date(2026, 1, 12))
            many = await fetch_rates.enqueue_many(
                AsyncClient(connection), [fetch_rates.job(date(2026, 1, 13))]
            )
            return [row.job_id for row in (one, *many)]

    job_ids = asyncio.run(produce())
    drain(registry, concurrency=1)

    assert [day.day for _, day in SEEN] == [12, 13]
    assert [job(job_id)["result"] for job_id in job_ids] == ["2026-01-12", "2026-01-13"]


def test_calling_a_task_just_calls_the_function() -> None:
    registry = Registry()

    @registry.task()
    def double(number: int) -> int:
        """Double it."""
        return 2 * number

    @registry.task()
    async def triple(job: AsyncJob | None, number: int) -> int:
        return 3 * number

    assert double(21) == 42
    assert asyncio.run(triple(None, number=3)) == 9  # type: ignore[misc, arg-type]
    assert (double.__name__, double.__doc__) == ("double", "Double it.")


def test_plain_handler_and_task_live_in_one_registry_that_another_includes(
    client: Client, drain: Drain
) -> None:
    part, whole = Registry(), Registry()

    @part.task()
    def typed(job: Job, number: int) -> None:
        SEEN.append((job.job_type, number))

    @part.handler("plain")
    def plain(job: Job) -> None:
        SEEN.append((job.job_type, job.payload["number"]))

    whole.include(part)
    client.enqueue_many([typed.job(1), {"job_type": "plain", "payload": {"number": 2}}])
    drain(whole, concurrency=1)

    assert SEEN == [("typed", 1), ("plain", 2)]


def test_options_of_the_task_are_defaults_and_those_of_a_call_go_first(
    client: Client, job: Callable[[int], Row]
) -> None:
    registry = Registry()

    @registry.task(
        queue="mail",
        priority=3,
        max_attempts=5,
        lease=timedelta(seconds=90),
        time_limit=timedelta(minutes=5),
        headers={"trace": "1"},
        backoff={"kind": "fixed", "base_seconds": 60},
        idempotency_key="receipt:{order_id}:{copies}",
        ordering_key="order:{order_id}",
        limit_key="customers",
    )
    def send_receipt(order_id: int, queue: str = "a parameter", copies: int = 1) -> None: ...

    first = send_receipt.enqueue(client, 7, queue="x")
    again = send_receipt.enqueue(client, 7, queue="y")
    other = send_receipt.options(
        queue="slow",
        max_attempts=None,
        idempotency_key="a {brace}",
        ordering_key=None,
        delay=timedelta(hours=1),
        time_limit=None,
        headers={"trace": "2"},
        expires_at=datetime(2100, 1, 1, tzinfo=UTC),
    ).enqueue(client, 7, queue="z")

    assert (again.is_new, again.job_id) == (False, first.job_id)
    row = job(first.job_id)
    assert row["payload"] == {"order_id": 7, "queue": "x"}
    assert (row["queue"], row["priority"], row["max_attempts"]) == ("mail", 3, 5)
    assert row["idempotency_key"] == "receipt:7:1"
    row = job(other.job_id)
    assert (row["queue"], row["priority"], row["max_attempts"]) == ("slow", 3, 10)
    assert row["idempotency_key"] == "a {brace}"
    keys = client.connection.execute(
        "select ordering_key, limit_key, extract(epoch from lease)::int, backoff ->> 'kind', "
        "run_at > now() + interval '50 minutes', time_limit, headers ->> 'trace', "
        "extract(year from expires_at)::int from rota.jobs order by id"
    ).fetchall()
    assert keys == [
        ("order:7", "customers", 90, "fixed", False, timedelta(minutes=5), "1", None),
        (None, "customers", 90, "fixed", True, None, "2", 2100),
    ]


def test_options_are_not_lost_on_jobs_that_are_made_without_them(client: Client) -> None:
    def count_to(n: int) -> None: ...

    task = Registry().task(queue="mail", ordering_key="n:{n}")(count_to)
    slow = task.options(queue="slow").options(ordering_key=None)

    with pytest.raises(
        ValueError, match=r"^queue of options\(\) is 'slow', and of a job 'mail'"
    ):
        slow.enqueue_many(client, [task.job(1)])
    with pytest.raises(ValueError, match=r"^ordering_key .* is None, and of a job 'n:1'"):
        slow.enqueue_many(client, [task.options(queue="slow").job(1)])
    assert len(slow.enqueue_many(client, [slow.job(1)])) == 1
    assert len(task.enqueue_many(client, [task.job(1), slow.job(2)])) == 2


def test_a_value_has_one_key_in_whatever_form_it_is_given() -> None:
    @Registry().task(idempotency_key="{user}:{amount}")
    def pay(user: UUID, amount: float) -> None: ...

    user = "5F1E0B5E-0000-4000-8000-00000000000A"
    given: list[tuple[Any, float]] = [(UUID(user), 1.0), (user, 1)]

    assert {pay.job(*each)["idempotency_key"] for each in given} == {f"{user.lower()}:1.0"}


@pytest.mark.parametrize(
    ("template", "said"),
    [("{day.yer}", "no attribute 'yer'"), ("{day[0]}", "TypeError"), ("{day.year:s}", "'s'")],
)
def test_a_key_that_cannot_be_made_is_refused_by_its_option(template: str, said: str) -> None:
    @Registry().task(ordering_key=template)
    def count(day: date) -> None: ...

    with pytest.raises(rota.InvalidArgumentError, match=r"^ordering_key '\{day") as caught:
        count.job(date(2026, 1, 2))
    assert said in str(caught.value)


def test_a_key_has_a_set_in_one_order() -> None:
    """In each process a set has another."""

    @Registry().task(idempotency_key="{tags}")
    def tag(tags: set[str] = frozenset("cab")) -> None: ...  # type: ignore[assignment]

    for made in (tag.job(), tag.job({"b", "c", "a"})):
        assert made["idempotency_key"] == "['a', 'b', 'c']"


def test_a_task_keeps_its_own_from_the_names_of_the_function() -> None:
    def move(self: int, queue: str) -> int:
        return self

    move.job = move.job_type = move._options = "of a decorator"  # type: ignore[attr-defined]
    task = Registry().task()(move)

    payload = {"self": 1, "queue": "slow"}
    assert task.job(self=1, queue="slow") == {"job_type": "move", "payload": payload}
    assert task(self=1, queue="slow") == 1


def test_a_task_and_a_call_say_for_how_long_a_job_may_start(client: Client) -> None:
    registry = Registry()

    @registry.task("send_code", expires_after=timedelta(minutes=5))
    def send_code(number: str) -> None: ...

    send_code.enqueue(client, "1")
    send_code.options(expires_after=timedelta(hours=1)).enqueue(client, "2")
    send_code.options(expires_after=None).enqueue(client, "3")
    kept = client.connection.execute(
        "select round(extract(epoch from expires_at - run_at))::int from rota.jobs order by id"
    ).fetchall()
    assert kept == [(300,), (3600,), (None,)]


def test_job_of_a_former_name_is_run_by_the_renamed_task(client: Client, drain: Drain) -> None:
    registry = Registry()
    former: Any = iter(["mail_receipt", "receipt"])

    @registry.task("send_receipt", aliases=former)
    def send_receipt(order_id: int) -> None:
        SEEN.append(order_id)

    client.enqueue("mail_receipt", {"order_id": 1})
    client.enqueue("receipt", {"order_id": 2})
    drain(registry, concurrency=1)

    assert SEEN == [1, 2]
    assert send_receipt.job(3)["job_type"] == "send_receipt"


RAISED: list[tuple[dict[str, Any], Callable[[], Exception], str]] = [
    ({}, ValueError, "failed"),
    ({"give_up_on": ValueError}, ValueError, "dead"),
    ({"give_up_on": (KeyError, ValueError)}, UnicodeError, "dead"),
    ({"give_up_on": ValueError}, KeyError, "failed"),
    ({"retry_on": ConnectionError}, ConnectionRefusedError, "failed"),
    ({"retry_on": ConnectionError}, ValueError, "dead"),
    (
        {"retry_on": OSError, "give_up_on": ConnectionRefusedError},
        ConnectionRefusedError,
        "dead",
    ),
    ({"give_up_on": Exception}, rota.EffectInProgressError, "failed"),
    ({"give_up_on": rota.EffectInProgressError}, rota.EffectInProgressError, "dead"),
    ({"give_up_on": Exception}, lambda: rota.RetryIn(60), "failed"),
    ({"give_up_on": Exception}, lambda: rota.Snooze(60), "queued"),
    ({"retry_on": ConnectionError}, rota.EffectInProgressError, "failed"),
    ({"retry_on": ConnectionError}, lambda: rota.RetryIn(60), "failed"),
    ({"retry_on": ConnectionError}, lambda: rota.Snooze(60), "queued"),
    ({"retry_on": ConnectionError}, lambda: rota.FatalError("no"), "dead"),
    ({}, lambda: ExceptionGroup("", [rota.FatalError("no")]), "dead"),
    ({}, lambda: ExceptionGroup("", [ExceptionGroup("", [rota.Snooze(60)])]), "queued"),
    ({}, lambda: ExceptionGroup("", [rota.Snooze(60), KeyError()]), "failed"),
    ({}, lambda: ExceptionGroup("", [rota.Snooze(60), rota.Snooze(90)]), "queued"),
    ({}, lambda: ExceptionGroup("", [rota.FatalError("a"), rota.FatalError("b")]), "dead"),
    ({}, lambda: ExceptionGroup("", [rota.FatalError("a"), rota.Snooze(60)]), "failed"),
    ({}, lambda: ExceptionGroup("", [KeyError(), KeyError()]), "failed"),
    ({"give_up_on": KeyError}, lambda: ExceptionGroup("", [KeyError()]), "dead"),
    ({"retry_on": OSError}, lambda: ExceptionGroup("", [OSError()]), "failed"),
]


def _failing(raised: Callable[[], Exception], is_async: bool) -> Callable[[], Any]:
    def fail() -> None:
        raise raised()

    async def fail_async() -> None:
        raise raised()

    return fail_async if is_async else fail


@pytest.mark.parametrize("is_async", [False, True])
def test_exceptions_that_are_tried_again_and_those_that_are_not(
    client: Client, job: Callable[[int], Row], drain: Drain, is_async: bool
) -> None:
    registry = Registry()
    backoff = {"kind": "fixed", "base_seconds": 3600}
    ids = []
    for number, (options, raised, _) in enumerate(RAISED):
        task = registry.task(f"fails-{number}", backoff=backoff, **options)
        ids.append(task(_failing(raised, is_async)).enqueue(client).job_id)
    drain(registry)

    for job_id, case in zip(ids, RAISED, strict=True):
        _, raised, status = case
        row = job(job_id)
        assert row["status"] == status, case
        if isinstance(raised, type) and issubclass(raised, ValueError):
            assert row["error_type"] == raised.__name__


VALUES: list[tuple[Any, Any, Any]] = [
    (None, None, None),
    (bool, True, True),
    (float, 3, 3),
    (str, "a", "a"),
    (int, 2**70, 2**70),
    (Any, {"a": [1]}, {"a": [1]}),
    (datetime, datetime(2026, 1, 2, 3, 4, 5, 6, UTC), "2026-01-02T03:04:05.000006+00:00"),
    (date, date(2026, 1, 2), "2026-01-02"),
    (timedelta, timedelta(milliseconds=1500), 1.5),
    (UUID, UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    (Decimal, Decimal("1.10"), "1.10"),
    (Color, Color.RED, "red"),
    (Literal["a", 1], 1, 1),
    (int | None, None, None),
    (str | date, date(2026, 1, 2), "2026-01-02"),
    (str | date, "tomorrow", "tomorrow"),
    (datetime | date, date(2026, 1, 2), "2026-01-02"),
    (list[UUID], [UUID(int=2)], ["00000000-0000-0000-0000-000000000002"]),
    (tuple[int, ...], (1, 2), [1, 2]),
    (tuple[int, Decimal], (1, Decimal(2)), [1, "2"]),
    (frozenset[str], frozenset("a"), ["a"]),
    (dict[int, date], {1: date(2026, 1, 2)}, {"1": "2026-01-02"}),
    (Mapping[str, list[Decimal]], {"a": [Decimal(1)]}, {"a": ["1"]}),
    (Line, {"sku": "a"}, {"sku": "a"}),
    (Line, {"sku": "a", "shelf": "B7"}, {"sku": "a", "shelf": "B7"}),
    (
        Order,
        Order(UUID(int=1), Decimal("9.90"), datetime(2026, 1, 2, tzinfo=UTC), [{"sku": "a"}]),
        {
            "order_id": "00000000-0000-0000-0000-000000000001",
            "total": "9.90",
            "placed_at": "2026-01-02T00:00:00+00:00",
            "lines": [{"sku": "a"}],
        },
    ),
]


@pytest.mark.parametrize(
    ("kind", "value", "encoded"),
    [
        (Parcel, Parcel(3, width=4), {"weight": 3, "width": 4}),
        (dict[Number, str], {Number(1): "a"}, {"1": "a"}),
        (dict[Annotated[int, "positive"], str], {1: "a"}, {"1": "a"}),
        (dict[int | None, str], {1: "a"}, {"1": "a"}),
        (dict[Level, str], {Level.LOW: "a"}, {"1": "a"}),
        (dict[Literal[1, 2], str], {2: "a"}, {"2": "a"}),
        (dict[Color, int], {Color.RED: 1}, {"red": 1}),
        (dict[str, int], {"1": 1}, {"1": 1}),
        (Literal[Color.RED], Color.RED, "red"),
        (Place, Place.HERE, [1, 2]),
        (Day, Day.FIRST, "2026-01-01"),
        (set[str], set("hgfedcba"), list("abcdefgh")),
        (set[str | int], {2, "b", 1, "a"}, ["a", "b", 1, 2]),
        (TypeAliasType("Days", list[date]), [date(2026, 1, 2)], ["2026-01-02"]),
        (Name | date, date(2026, 1, 2), "2026-01-02"),
    ],
)
def test_value_comes_back_from_its_json(kind: Any, value: Any, encoded: Any) -> None:
    """Sets have an order that is the same in each process."""
    codec = Codec()
    assert codec.encode(value) == encoded

    decoded = codec.decoder(kind)(encoded)

    assert decoded == value
    if isinstance(value, dict):
        assert [*map(type, decoded)] == [*map(type, value)]


def test_two_keys_of_a_mapping_that_are_one_in_json_are_refused() -> None:
    with pytest.raises(TypeError, match="two keys of a mapping are one key in JSON"):
        Codec().encode({1: 1, "1": 2})


def test_value_is_json_in_the_payload_and_itself_in_the_function(
    client: Client, drain: Drain
) -> None:
    registry = Registry()
    taken: dict[int, Any] = {}
    for number, (kind, value, json) in enumerate(VALUES):

        def take(value: Any, number: int = number) -> None:
            taken[number] = value

        take.__annotations__["value"] = kind
        task = registry.task(f"take-{number}")(take)
        assert task.job(value)["payload"] == {"value": json}
        task.enqueue(client, value)
    drain(registry)

    for number, (kind, value, _) in enumerate(VALUES):
        assert taken[number] == value
        assert type(taken[number]) is type(value) or kind is float


def test_model_of_pydantic_goes_through_the_payload(client: Client, drain: Drain) -> None:
    registry = Registry()
    address = Address(Street="Mill Lane", since=date(2026, 1, 2))

    @registry.task()
    def move(to: Address) -> Address:
        SEEN.append(to)
        return to

    move.enqueue(client, address)
    drain(registry)

    assert SEEN[0] == address
    assert move.job(address)["payload"] == {
        "to": {"Street": "Mill Lane", "since": "2026-01-02"}
    }


class Flat(Address):
    floor: int = 0


class Twice(pydantic.BaseModel):
    street: str = pydantic.Field("", validation_alias="from", serialization_alias="to")


class Hidden(pydantic.BaseModel):
    street: str = pydantic.Field("", exclude=True)


def test_a_model_that_would_lose_a_field_on_its_way_is_refused() -> None:
    def take(address: Address, twice: Twice, all: list[Address | Hidden]) -> None: ...

    task = Registry().task()(take)
    address = Address(Street="Mill Lane", since=date(2026, 1, 2))
    flat = Flat(Street="Mill Lane", since=date(2026, 1, 2), floor=3)
    twice = Twice(**{"from": "Mill Lane"})

    refused: list[tuple[Any, str]] = [
        (
            (flat, Twice(), []),
            r"address: Flat\(.*Address\(.* Address does not read all that Flat",
        ),
        (
            (address, twice, []),
            r"twice: Twice\(.* the model Twice does not read all that Twice",
        ),
        ((address, Twice(), [flat]), r"all: Flat\(.* the model Address does not read"),
    ]
    for arguments, said in refused:
        with pytest.raises(rota.InvalidArgumentError, match=said):
            task.job(*arguments)

    assert task.job(address, Twice(), [address, Hidden(street="a")])


def test_dataclass_of_pydantic_that_takes_its_names_is_made_again() -> None:
    parcel = Named(sizes=[1, 2])

    assert Codec().decoder(Named)(Codec().encode(parcel)) == parcel


class Login(pydantic.BaseModel):
    name: str
    passwords: list[pydantic.SecretStr]


class OpenLogin(Login):
    @pydantic.field_serializer("passwords")
    def _open(self, passwords: list[pydantic.SecretStr]) -> list[str]:
        return [password.get_secret_value() for password in passwords]


def test_a_secret_that_pydantic_hides_is_refused_and_does_not_arrive_as_asterisks() -> None:
    def take(login: Login) -> None:
        SEEN.append(login)

    registry = Registry()
    task = registry.task()(take)
    login = {"name": "ada", "passwords": [pydantic.SecretStr("hunter2")]}

    with pytest.raises(rota.InvalidArgumentError, match="login: pydantic writes a secret as"):
        task.job(Login(**login))
    run_job(registry, task.job(OpenLogin(**login)))

    assert SEEN[0].passwords[0].get_secret_value() == "hunter2"
    assert task.job(Login(name="*" * 9, passwords=[]))["payload"]["login"]["passwords"] == []


@dataclass
class Greeting:
    text: str


def test_asterisks_that_hide_no_secret_are_taken() -> None:
    def take(greeting: Greeting, login: Login, lines: tuple[str, ...]) -> None: ...

    text = "*" * 10
    made = Registry().task()(take).job(Greeting(text), Login(name=text, passwords=[]), (text,))

    assert made["payload"]["greeting"] == {"text": text}


@pytest.mark.parametrize("kind", [Address | Home, Home | Address | None, list[Address | Home]])
def test_model_in_a_union_keeps_the_fields_that_another_lacks(kind: Any) -> None:
    home = Home(Street="Mill Lane", since=date(2026, 1, 2), floor=3)
    value = [home] if get_origin(kind) is list else home

    def take(value: Any) -> None:
        SEEN.append(value)

    take.__annotations__["value"] = kind
    registry = Registry()
    run_job(registry, registry.task()(take).job(value))

    assert SEEN[0] == value


@dataclass
class Farewell(Greeting):
    until: date | None = None


@dataclass
class Insult:
    text: str


@pytest.mark.parametrize("kind", [Greeting | Farewell, Farewell | Greeting])
def test_dataclass_in_a_union_does_not_become_one_of_more_fields(kind: Any) -> None:
    for value in (Greeting("hi"), Farewell("bye")):
        decoded = Codec().decoder(kind)(Codec().encode(value))
        assert (type(decoded), decoded) == (type(value), value)


def test_dataclasses_of_a_union_that_are_the_same_in_json_are_refused() -> None:
    def take(said: list[Greeting | Annotated[Insult, "rude"]]) -> None: ...

    with pytest.raises(TypeError, match=r"parameter said .* Greeting and Insult have the same"):
        Registry().task()(take)


class Colour(Enum):
    RED = "red"


@dataclass
class Parcel:
    ref: UUID | str


class Wrapped(TypedDict):
    paper: NotRequired[str | date]


class Samples(list[int]):
    """Compared like an array: neither equal nor not."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = None


@pytest.mark.parametrize(
    ("kind", "value", "is_exact"),
    [
        (UUID | str, str(UUID(int=1)), False),
        (UUID | str | None, UUID(int=1), True),
        (UUID | str, "one", True),
        (str | date, "2026-01-02", False),
        (Color | Colour, Color.RED, True),
        (Color | Colour, Colour.RED, False),
        (Level | int, 1, True),
        (timedelta | float, 1.0, False),
        (TypeAliasType("Id", UUID | str) | None, str(UUID(int=1)), False),
        (set[int] | list[int], [1], False),
        (UUID | None, str(UUID(int=1)), True),
        (list[UUID | str], [str(UUID(int=1)), UUID(int=1)], False),
        (list[UUID | str], ["one", UUID(int=1)], True),
        (list[UUID], [str(UUID(int=1))], True),
        (set[UUID | str], {str(UUID(int=1))}, False),
        (dict[str, Decimal | str], {"a": "1.10"}, False),
        (Mapping[UUID | str, int], {str(UUID(int=1)): 1}, False),
        (tuple[int, time | Decimal], (1, Decimal(12)), False),
        (tuple[Decimal | str, ...] | None, (Decimal(1), "1"), False),
        (Parcel | None, Parcel(str(UUID(int=1))), False),
        (list[Parcel], [Parcel(UUID(int=1))], True),
        (list[Wrapped], [{"paper": "2026-01-02"}], False),
        (list[Wrapped], [{}], True),
        (Sequence[int], Samples([1]), True),
        (Wrapped | dict[str, UUID], {"a": str(UUID(int=1))}, True),
    ],
)
def test_what_would_arrive_as_another_member_of_a_union_is_refused(
    kind: Any, value: Any, is_exact: bool
) -> None:
    def take(value: Any) -> None: ...

    take.__annotations__["value"] = kind
    task = Registry().task()(take)
    if is_exact:
        task.job(value)
        return
    with pytest.raises(rota.InvalidArgumentError, match=r"^payload.value: .* would arrive as"):
        task.job(value)


def test_returned_exception_counts_as_raised(
    client: Client, job: Callable[[int], Row], drain: Drain
) -> None:
    registry = Registry()

    @registry.task(give_up_on=ValueError)
    def check() -> Exception:
        return ValueError("no such order")

    job_id = check.enqueue(client).job_id
    drain(registry)

    assert (job(job_id)["status"], job(job_id)["last_error"]) == ("dead", "no such order")


def test_result_is_encoded_too(client: Client, job: Callable[[int], Row], drain: Drain) -> None:
    registry = Registry()

    @registry.task()
    def price() -> dict[str, Decimal]:
        return {"total": Decimal("9.90")}

    job_id = price.enqueue(client).job_id
    drain(registry)

    assert job(job_id)["result"] == {"total": "9.90"}


def test_results_that_are_set_are_encoded_like_those_that_are_returned(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry, total = Registry(), {UUID(int=7): [Decimal("9.90")]}

    @registry.task()
    def sets(job: rota.Job) -> None:
        job.result = total

    @registry.task()
    def sets_before_its_transaction(job: rota.Job) -> None:
        job.result = total
        with job.transaction():
            pass

    @registry.task()
    def sets_that_of_an_effect(job: rota.Job) -> object:
        with job.effect("price", "of tea") as effect:
            effect.result = total
        return total

    @registry.handler("handles")
    def handles(job: rota.Job) -> object:
        return total

    for task in (sets, sets_before_its_transaction, sets_that_of_an_effect):
        task.enqueue(client)
    client.enqueue("handles")
    drain(registry)

    encoded = {str(UUID(int=7)): ["9.90"]}
    rows = db.execute("select result from rota.job_runs").fetchall()
    assert [result for (result,) in rows] == [encoded] * 4
    assert db.execute("select result from rota.effects").fetchall() == [(encoded,)]


class Recipe(TypedDict):
    half: NotRequired[Fraction]


class Opaque(pydantic.BaseModel):
    what: Any


def test_result_without_a_form_in_json_is_dropped_and_not_run_for_again(
    client: Client, job: Callable[[int], Row], drain: Drain
) -> None:
    registry = Registry()
    loop: list[Any] = []
    loop.append(loop)

    @registry.task()
    def model() -> Opaque:
        return Opaque(what=object())

    @registry.task()
    def in_itself() -> list[Any]:
        return loop

    ids = [model.enqueue(client).job_id, in_itself.enqueue(client).job_id]
    drain(registry)

    for job_id in ids:
        assert (job(job_id)["status"], job(job_id)["result"]) == ("succeeded", None)


def test_codec_of_the_user_knows_more_types(client: Client, drain: Drain) -> None:
    class Fractions(Codec):
        def encode(self, value: Any) -> Any:
            return str(value) if isinstance(value, Fraction) else super().encode(value)

        def decoder(self, kind: Any) -> Callable[[Any], Any]:
            return Fraction if kind is Fraction else super().decoder(kind)

    registry = Registry(codec=Fractions())

    @registry.task()
    def mix(parts: list[Fraction], of: Recipe, rest: Annotated[Fraction, "of 1"]) -> None:
        SEEN.append((parts, of, rest))

    third = Fraction(1, 3)
    mix.enqueue(client, [third], {"half": third}, third)
    drain(registry)

    assert SEEN[0] == ([third], {"half": third}, third)


def test_payload_that_does_not_fit_fails_the_attempt_and_says_where(
    client: Client, job: Callable[[int], Row], drain: Drain
) -> None:
    registry = Registry()

    @registry.task(retry_on=ConnectionError)
    def pack(lines: list[Line]) -> None:
        SEEN.append(lines)

    job_ids = [
        client.enqueue("pack", payload).job_id
        for payload in ({}, {"lines": [{"sku": 1}]}, {"lines": [], "of": 7})
    ]
    drain(registry)

    said = "; the task is pack(lines: list[client.test_tasks.Line])"
    assert [job(job_id)["last_error"] for job_id in job_ids] == [
        f"payload lacks 'lines', got {{}}{said}",
        f"payload.lines[0].sku must be str, got 1{said}",
        f"payload has the unknown 'of', got {{'of': 7, 'lines': []}}{said}",
    ]
    # A newer worker may understand it.
    assert {job(job_id)["status"] for job_id in job_ids} == {"failed"}
    assert SEEN == []


def test_wrong_arguments_are_refused_before_anything_is_enqueued(
    client: Client, db: psycopg.Connection[Any]
) -> None:
    registry = Registry()

    @registry.task()
    def send_receipt(order_id: int, when: datetime | None = None) -> None: ...

    task: Any = send_receipt
    with pytest.raises(TypeError, match=r"^send_receipt\(order_id: int, .* unexpected"):
        task.enqueue(client, 7, order=7)
    with pytest.raises(TypeError, match="missing a required argument: 'order_id'"):
        task.job()
    with pytest.raises(TypeError, match="got an unexpected argument 'ordr_id'"):
        task.job(ordr_id=7)
    with pytest.raises(TypeError, match=r"'queue'; as an option it goes into options\(queue="):
        task.enqueue(client, order_id=7, queue="mail")
    with pytest.raises(
        rota.InvalidArgumentError, match=r"^payload\.order_id must be int, got '7'; "
    ):
        task.enqueue(client, order_id="7")
    with pytest.raises(
        rota.InvalidArgumentError, match=r"^payload\.when: the type object has no form"
    ):
        task.enqueue(client, 7, when=object())
    for value in (memoryview(b"7"), Opaque(what=object())):
        with pytest.raises(rota.InvalidArgumentError, match=r"^payload\.order_id: "):
            task.enqueue(client, value)
    with pytest.raises(
        TypeError, match=r"^'priorty' is not an option of a task: it can have queue"
    ):
        task.options(priorty=1)
    with pytest.raises(
        TypeError, match=r"^enqueue_many\(\) of send_receipt takes what its job"
    ):
        task.enqueue_many(client, [{"order_id": 7}])
    with pytest.raises(rota.InvalidArgumentError, match=r"^job_type .* call its enqueue"):
        client.enqueue(task, {"order_id": 7})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"open it first, psycopg\.connect"):
        task.enqueue("postgresql://localhost/shop", order_id=7)

    assert db.execute("select count(*) from rota.jobs").fetchone() == (0,)


def no_type(order_id) -> None:  # type: ignore[no-untyped-def]
    ...


def job_of_no_type(job, order_id: int) -> None:  # type: ignore[no-untyped-def]
    ...


def many(*order_ids: int) -> None: ...


def named(**orders: int) -> None: ...


def job_last(order_id: int, job: Job) -> None: ...


def connected(connection: psycopg.Connection[Any]) -> None: ...


def unknown(path: PurePath) -> None: ...


def pages(count: int) -> Iterator[int]:
    yield count


def jobs(jobs: list[Job]) -> None: ...


def tree(root: Node) -> None: ...


def filed(folders: list[Folder]) -> None: ...


def weighed(parcel: Weighed | None) -> None: ...


@pydantic.dataclasses.dataclass
class Labelled:
    sizes: list[int] = pydantic.Field(alias="s", default_factory=list)


@pydantic.dataclasses.dataclass(config={"populate_by_name": True})
class Named:
    sizes: list[int] = pydantic.Field(alias="s", default_factory=list)


def labelled(parcel: Labelled) -> None: ...


class Box(TypedDict, Generic[T]):
    inside: T


def boxed(box: Box[int]) -> None: ...


async def waits(job: Job) -> None: ...


def plain(job: AsyncJob) -> None: ...


def fine(order_id: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "options", "remedy"),
    [
        (no_type, {}, "order_id of no_type needs a type, such as order_id: int"),
        (job_of_no_type, {}, "job of job_of_no_type needs a type, such as job: rota.Job"),
        (Codec.encode, {}, "Codec.encode is a method, and a worker has no object for it"),
        (many, {}, "has no fixed name: use a list or a mapping instead"),
        (named, {}, "has no fixed name: use a list or a mapping instead"),
        (job_last, {}, "job of job_last is the job: put it first"),
        (connected, {}, "Connection has no form in JSON: take what identifies the value"),
        (unknown, {}, "'PurePath' is not defined; import or define them in its module"),
        (
            filed,
            {},
            "folders of filed: the types of Folder cannot be read: name 'PurePath' is not "
            "defined; import or define them in its module",
        ),
        (pages, {}, "calling it would run none of its code: return a value instead"),
        (jobs, {}, "the parameter jobs of jobs: the type Job has no form in JSON"),
        (labelled, {}, "Labelled is not made by the name of its field sizes, but by its alias"),
        (weighed, {}, "Weighed does not keep its InitVar tare, and cannot be made again"),
        (boxed, {}, "Box[int] is a generic TypedDict: define one that has its types in their"),
        (tree, {}, "root of tree has a recursive type: use Any"),
        (
            Registry().task()(fine),
            {},
            "got <rota.Task 'fine'>; other names of a task are its",
        ),
        (Codec(), {"job_type": "a"}, "a task is made from a function, got <"),
        (waits, {}, "waits is an async function: let its job be of type rota.AsyncJob"),
        (
            plain,
            {},
            "a plain function, or its decorator is one: let its job be of type rota.Job",
        ),
        (fine, {"idempotency_key": "{order}"}, r"names {order}, which is no parameter of fine"),
        (fine, {"limit_key": "{}"}, r"limit_key names {}, which is no parameter of fine"),
        (
            fine,
            {"ordering_key": 7},
            "ordering_key must be a text, which may name parameters",
        ),
        (fine, {"ordering_key": "{"}, "in braces, got '{': "),
        (fine, {"timeout": 5}, "'timeout' is not an option of a task: it can have queue"),
        (fine, {"give_up_on": "ValueError"}, "give_up_on takes an exception class"),
        (fine, {"retry_on": [ValueError]}, "retry_on takes an exception class or a tuple"),
        (
            fine,
            {"retry_on": (OSError, KeyError), "give_up_on": KeyError},
            "KeyError is in both retry_on and give_up_on",
        ),
        (fine, {"queue": "a b"}, "queue must be 1 to 63 of the characters"),
        (fine, {"max_attempts": 0}, "max_attempts must be at least 1, got 0"),
        (fine, {"lease": timedelta(0)}, "lease must be at least 0.001, got 0.0"),
        (fine, {"time_limit": -1}, "time_limit must be at least 0.001, got -1"),
        (fine, {"delay": timedelta(-1)}, "delay must be at least 0, got -86400.0"),
        (fine, {"aliases": "old"}, "aliases is a list of job types, as ['old'], not a text"),
        (fine, {"aliases": [3]}, "aliases must be a text, got 3"),
        (fine, {"aliases": ["fine"]}, "there is already a handler for 'fine'"),
        (fine, {"job_type": "no name"}, "job_type must be 1 to 63 of the characters"),
    ],
)
def test_function_that_is_no_task_is_refused_with_a_remedy(
    function: Any, options: Any, remedy: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        Registry().task(**options)(function)

    assert remedy in str(caught.value)


def test_the_type_of_the_result_may_be_known_to_type_checkers_only() -> None:
    registry = Registry()

    @registry.task()
    def locate(order_id: int) -> PurePath | None:
        return None

    assert run_job(registry, locate.job(7)).status == "succeeded"


def test_decorator_without_parentheses_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^use @registry\.task\(\), with parentheses$"):

        @Registry().task  # type: ignore[arg-type]
        def send_receipt(order_id: int) -> None: ...
