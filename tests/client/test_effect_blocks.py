"""An effect is recorded before its block and completed after it, whatever happens inside."""

import asyncio
import json
import re
import smtplib
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from aiosmtpd.controller import Controller

import rota
from rota import AsyncJob, Client, Effect, Job, Registry
from rota.job import _done
from rota.worker.lending import Watch
from support.clock import Clock
from support.waiting import wait_until

pytestmark = pytest.mark.slow

Drain = Callable[..., None]
Status = Callable[[int], str]
Body = Callable[[Any, Effect], None]
NOW = {"kind": "fixed", "base_seconds": 0.001}
Make = Callable[[], Awaitable[Any]]
KINDS = ["plain", "async"]
CUT = psycopg.OperationalError("cut")


def _registry(body: Body, **options: Any) -> Registry:
    """Handlers of both kinds that run *body* as the effect and return its result."""
    registry = Registry()

    @registry.handler("plain")
    def plain(job: Job) -> Any:
        with job.effect("mail", job.payload.get("key", "k"), **options) as effect:
            body(job, effect)
        return effect.result

    @registry.handler("async")
    async def in_loop(job: AsyncJob) -> Any:
        async with job.effect("mail", job.payload.get("key", "k"), **options) as effect:
            body(job, effect)
        return effect.result

    return registry


def _replace(
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    call: Callable[[Any, Make], Coroutine[Any, Any, Any]],
) -> None:
    """Replace a function of both clients; *call* gets the client, and what makes the call."""
    sync, in_loop = getattr(Client, function), getattr(rota.AsyncClient, function)

    def replaced(self: Client, *args: Any, **kwargs: Any) -> Any:
        async def make() -> Any:
            return sync(self, *args, **kwargs)

        return _done(call(self, make))

    async def replaced_async(self: rota.AsyncClient, *args: Any, **kwargs: Any) -> Any:
        return await call(self, partial(in_loop, self, *args, **kwargs))

    monkeypatch.setattr(Client, function, replaced)
    monkeypatch.setattr(rota.AsyncClient, function, replaced_async)


def _ledger(db: psycopg.Connection[Any]) -> list[Any]:
    return db.execute(
        "select key, completed_at is not null, result from rota.effects order by key"
    ).fetchall()


def _results(db: psycopg.Connection[Any]) -> list[Any]:
    return [r for (r,) in db.execute("select result from rota.finished_jobs order by id")]


@pytest.mark.parametrize("kind", KINDS)
def test_an_effect_is_done_once_and_its_result_is_there_later(
    client: Client, db: psycopg.Connection[Any], dsn: str, drain: Drain, kind: str
) -> None:
    seen: list[tuple[bool, bool]] = []

    def body(job: Any, effect: Effect) -> None:
        seen.append((effect.is_due, effect.is_done))
        if effect.is_due:
            assert _ledger(db) == [("k", False, None)]  # committed before
            effect.result = {"id": 5}

    client.enqueue(kind)
    drain(_registry(body))
    client.enqueue(kind)
    drain(_registry(body))

    assert seen == [(True, False), (False, True)]
    assert _ledger(db) == [("k", True, {"id": 5})]
    assert _results(db) == [{"id": 5}, {"id": 5}]


def test_a_result_that_is_not_json_is_dropped_and_the_log_names_the_effect(
    client: Client, db: psycopg.Connection[Any], drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    def body(job: Any, effect: Effect) -> None:
        effect.result = object()

    job_id = client.enqueue("plain").job_id
    drain(_registry(body))

    assert _ledger(db) == [("k", True, None)]
    assert f"job {job_id}: effect 'mail' 'k': its result is not JSON" in caplog.text


REFUSED_BESIDE_OTHERS = ExceptionGroup("of a TaskGroup", [ConnectionRefusedError("no")])
"""The other tasks of the group may have sent something."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [TimeoutError("no answer"), REFUSED_BESIDE_OTHERS])
@pytest.mark.parametrize(
    ("if_unknown", "expected"),
    [("skip", [(True, False), (False, False)]), ("again", [(True, False), (True, False)])],
)
def test_a_block_that_raises_leaves_the_outcome_unknown(
    client: Client,
    db: psycopg.Connection[Any],
    drain: Drain,
    kind: str,
    error: Exception,
    if_unknown: str,
    expected: list[Any],
) -> None:
    seen: list[tuple[bool, bool]] = []

    def body(job: Any, effect: Effect) -> None:
        seen.append((effect.is_due, effect.is_done))
        if job.attempt == 1:
            raise error

    client.enqueue(kind, backoff=NOW)
    _until_ended(db, lambda: drain(_registry(body, if_unknown=if_unknown)))

    assert seen == expected
    assert _ledger(db) == [("k", if_unknown == "again", None)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("raises", [True, False])
def test_a_withdrawn_effect_is_due_again(
    client: Client, db: psycopg.Connection[Any], drain: Drain, kind: str, raises: bool
) -> None:
    ledgers: list[Any] = []

    def body(job: Any, effect: Effect) -> None:
        assert effect.is_due
        if job.attempt == 1:
            effect.withdraw()
            if raises:
                raise ConnectionRefusedError("not accepted")

    registry = _registry(body)

    @registry.handler("look")
    def look(job: Job) -> None:
        ledgers.append(_ledger(db))

    client.enqueue(kind, backoff=NOW)
    _until_ended(db, lambda: drain(registry))
    if raises:
        assert _ledger(db) == [("k", True, None)]
    else:
        assert _ledger(db) == []


def _until_ended(db: psycopg.Connection[Any], drain: Callable[[], None]) -> None:
    for _ in range(100):
        drain()
        if db.execute("select count(*) from rota.jobs").fetchone() == (0,):
            return
    pytest.fail("the job did not end")


def test_a_lost_lease_is_refused_before_the_block_and_after_it(
    client: Client, db: psycopg.Connection[Any], dsn: str, drain: Drain
) -> None:
    seen: list[str] = []

    def take_away(job: Job) -> None:
        with psycopg.connect(dsn) as other:  # one transaction, or this worker would claim it
            Client(other).retry_job(job.job_id, force=True)
            Client(other).claim_jobs("thief", max_jobs=1)

    registry = Registry()

    @registry.handler("x")
    def handle(job: Job) -> None:
        with pytest.raises(rota.LeaseLostError), job.effect("mail", "after"):
            take_away(job)
        with pytest.raises(rota.LeaseLostError), job.effect("mail", "before"):
            seen.append("block")
        seen.append("end")

    client.enqueue("x")
    drain(registry)

    assert seen == ["end"]
    assert _ledger(db) == [("after", False, None)]


def test_an_effect_that_another_job_is_at_is_not_for_this_one(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    client.enqueue("other")
    (other,) = client.claim_jobs("other")
    client.record_effect("mail", "k", other.job_id, other.lease_token)
    registry = _registry(lambda job, effect: pytest.fail("it ran"))

    client.enqueue("plain", max_attempts=1)
    client.enqueue("async", max_attempts=1)
    drain(registry)

    rows = db.execute("select status, error_type from rota.finished_jobs").fetchall()
    assert rows == [("dead", "rota.EffectInProgressError")] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_completion_is_repeated_until_the_database_answers(
    client: Client,
    db: psycopg.Connection[Any],
    drain: Drain,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first connection is cut after the commit, as far as the handler can tell."""
    calls: list[str] = []

    async def cut(client: Any, make: Make) -> str:
        calls.append(await make())
        if len(calls) == 1:
            raise CUT
        return calls[-1]

    _replace(monkeypatch, "complete_effect", cut)
    client.enqueue(kind)
    drain(_registry(lambda job, effect: None))

    assert calls == ["completed", "already_completed"]
    assert _results(db) == [None]


@pytest.mark.parametrize(
    ("kind", "error"), [("plain", CUT), ("async", CUT), ("async", asyncio.CancelledError())]
)
@pytest.mark.parametrize("is_stored", [True, False])
def test_an_effect_whose_record_had_no_answer_is_due_in_the_next_run(
    client: Client,
    db: psycopg.Connection[Any],
    drain: Drain,
    kind: str,
    error: BaseException,
    is_stored: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The block has not begun, so it is known that nothing was sent."""
    errors = [error]

    async def cut(client: Any, make: Make) -> bool:
        is_due = await make() if is_stored or not errors else True
        if errors:
            raise errors.pop()
        return is_due

    _replace(monkeypatch, "record_effect", cut)
    sent = []
    client.enqueue(kind, backoff=NOW)
    drain(_registry(lambda job, effect: effect.is_due and sent.append(job.attempt)))

    assert sent == [2]
    assert _ledger(db) == [("k", True, None)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_effect_that_was_recorded_as_its_time_ended_is_due_in_the_next_run(
    client: Client,
    db: psycopg.Connection[Any],
    drain: Drain,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connection is cut then, and that over which the record is withdrawn is not."""
    recorded, sent, add = [], [], Watch.add

    async def slow(client: Any, make: Make) -> bool:
        recorded.append(await make())
        if len(recorded) == 1:
            sleeping = client.connection.execute("select pg_sleep(60)")
            if kind == "async":
                await sleeping
        return recorded[-1]

    def add_and_look(self: Watch, lent: Any) -> None:
        add(self, lent)
        self.look()  # as it may at any moment

    _replace(monkeypatch, "record_effect", slow)
    monkeypatch.setattr(Watch, "add", add_and_look)
    client.enqueue(kind, backoff=NOW, time_limit=timedelta(seconds=0.4))
    wait_until(lambda: drain(_registry(lambda job, effect: sent.append(effect.is_due))) or sent)

    assert sent == [True]
    assert _ledger(db) == [("k", True, None)]


@pytest.mark.parametrize("times", [1, 3])
def test_an_effect_is_withdrawn_though_its_handler_is_cancelled_meanwhile(
    client: Client,
    db: psycopg.Connection[Any],
    drain: Drain,
    times: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by a TaskGroup, of which another task has failed, or again and again by anyio."""
    withdraw, handlers, sent = rota.AsyncClient.withdraw_effect, [], []

    async def withdraw_slowly(self: rota.AsyncClient, *args: Any, **kwargs: Any) -> None:
        for _ in range(times):
            handlers[0].cancel()
            await asyncio.sleep(0.01)
        await withdraw(self, *args, **kwargs)

    def body(job: Any, effect: Effect) -> None:
        handlers.append(asyncio.current_task())
        if job.attempt == 1:
            raise ConnectionRefusedError
        sent.append(effect.is_due)

    monkeypatch.setattr(rota.AsyncClient, "withdraw_effect", withdraw_slowly)
    client.enqueue("async", backoff=NOW)
    wait_until(lambda: drain(_registry(body)) or sent)

    assert sent == [True]
    (error,) = db.execute("select error_type from rota.job_errors").fetchone() or ()
    assert error == "asyncio.exceptions.CancelledError"


def test_an_unknown_effect_stays_unknown_though_its_next_record_had_no_answer(
    client: Client, db: psycopg.Connection[Any], drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One attempt asks twice: its first block may have caused it."""
    sync, asked = Client.record_effect, []

    def cut(self: Client, *args: Any, **kwargs: Any) -> bool:
        is_due = sync(self, *args, **kwargs)
        asked.append(is_due)
        if len(asked) == 2:
            raise psycopg.OperationalError("cut")
        return is_due

    monkeypatch.setattr(Client, "record_effect", cut)
    registry = Registry()

    @registry.handler("asks_twice")
    def asks_twice(job: Job) -> None:
        with suppress(KeyError), job.effect("mail", "k"):
            raise KeyError
        with job.effect("mail", "k"):
            pass

    client.enqueue("asks_twice", max_attempts=1)
    drain(registry)

    assert asked == [True, False]
    assert _ledger(db) == [("k", False, None)]


def test_client_returns_none_for_an_effect_that_nobody_recorded(client: Client) -> None:
    assert client.effect_result("mail", "k") is None


def test_an_async_handler_cannot_wait_for_an_effect_in_its_loop(
    client: Client, db: psycopg.Connection[Any], drain: Drain
) -> None:
    registry = Registry()

    @registry.handler("forgets_async")
    async def forgets_async(job: AsyncJob) -> None:
        with job.effect("mail", "1"):  # type: ignore[attr-defined]
            pass

    client.enqueue("forgets_async", max_attempts=1)
    drain(registry)

    error = db.execute("select error_type, message from rota.job_errors").fetchone()
    assert error is not None
    assert error[0] == "TypeError"
    assert "context manager" in error[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_as_the_key_of_an_effect_is_refused_by_its_name(
    client: Client, db: psycopg.Connection[Any], drain: Drain, kind: str
) -> None:
    client.enqueue(kind, {"key": 7})
    drain(_registry(lambda job, effect: None))

    (error,) = db.execute("select last_error from rota.job_runs").fetchone() or ()
    assert error == "key of an effect must be a text, got 7"


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.record_effect("mail", 7, 1, 1),
        lambda client: client.effect_result(True, "7"),
        lambda client: client.pause_queue("default", reason=5),
    ],
)
def test_a_number_for_a_text_is_refused_by_its_name(client: Client, call: Any) -> None:
    with pytest.raises(rota.InvalidArgumentError, match=r"^\w+ must be a text, got \w+$"):
        call(client)


def test_a_job_cannot_end_within_the_block_of_an_effect(
    client: Client, db: psycopg.Connection[Any], dsn: str, drain: Drain
) -> None:
    registry = Registry()

    @registry.handler("transaction")
    def transaction(job: Job) -> None:
        with job.effect("mail", "1"), job.transaction():
            pass

    @registry.handler("finish_in")
    def finish_in(job: Job) -> None:
        with psycopg.connect(dsn) as own, job.effect("mail", "2"):
            job.finish_in(own)  # else the end of the block would wait for this transaction

    @registry.handler("in_loop")
    async def in_loop(job: AsyncJob) -> None:
        async with job.effect("mail", "3"), job.transaction():
            pass

    @registry.handler("after")
    def after(job: Job) -> None:
        with job.effect("mail", "4"):
            pass
        with job.effect("mail", "4") as effect, job.transaction():
            assert effect.is_done

    for job_type in registry.job_types:
        client.enqueue(job_type, max_attempts=1)
    drain(registry)

    errors = db.execute("select job_type, error_type from rota.dead_jobs order by 1").fetchall()
    assert errors == [
        (each, "RuntimeError") for each in ("finish_in", "in_loop", "transaction")
    ]
    assert _ledger(db) == [(key, key == "4", None) for key in "1234"]


def test_a_cancelled_async_block_stays_unknown(
    client: Client, db: psycopg.Connection[Any], background: Callable[..., Any]
) -> None:
    registry = Registry()
    begun = asyncio.Event()

    @registry.handler("slow")
    async def slow(job: AsyncJob) -> None:
        async with job.effect("mail", "k"):
            begun.set()
            await asyncio.sleep(60)

    client.enqueue("slow")
    worker = background(registry, grace_period=0)
    while not begun.is_set():
        pass
    worker.stop(now=True)

    assert _ledger(db) == [("k", False, None)]
    assert db.execute("select status, attempts from rota.jobs").fetchone() == ("queued", 0)


@pytest.mark.own_session
@pytest.mark.parametrize("kind", KINDS)
def test_an_effect_is_completed_once_the_database_takes_writes_again(
    client: Client, db: psycopg.Connection[Any], drain: Drain, kind: str
) -> None:
    """A failover leaves it read-only for a while."""
    read_only = f"alter database {db.info.dbname} set default_transaction_read_only = {{}}"
    sent = []

    def body(job: Any, effect: Effect) -> None:
        if effect.is_due:
            sent.append(job.attempt)
            effect.result = {"id": 5}
            db.execute(read_only.format("on"))
            threading.Timer(0.5, lambda: db.execute(read_only.format("off"))).start()

    client.enqueue(kind, backoff=NOW)
    drain(_registry(body))

    assert sent == [1]
    assert _ledger(db) == [("k", True, {"id": 5})]
    assert _results(db) == [{"id": 5}]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mail_server_that_is_down_costs_no_mail(
    client: Client, db: psycopg.Connection[Any], drain: Drain, kind: str
) -> None:
    """Nobody was reached, so the effect is due again; and what the caller names is the same."""
    errors = [ConnectionRefusedError("no"), socket.gaierror("no name")]
    sent: list[int] = []

    def body(job: Any, effect: Effect) -> None:
        if effect.is_due:
            if errors:
                raise errors.pop()
            sent.append(job.attempt)

    client.enqueue(kind, backoff=NOW)
    wait_until(lambda: drain(_registry(body)) or sent)

    assert sent == [3]
    assert _ledger(db) == [("k", True, None)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_that_says_that_nothing_happened_makes_it_due_again(
    client: Client, db: psycopg.Connection[Any], drain: Drain, kind: str
) -> None:
    due: list[bool] = []

    def body(job: Any, effect: Effect) -> None:
        due.append(effect.is_due)
        if job.attempt == 1:
            raise KeyError("no such template")

    client.enqueue(kind, backoff=NOW)
    wait_until(lambda: drain(_registry(body, withdraw_on=(KeyError,))) or len(due) == 2)

    assert due == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_exceptions_that_are_no_tuple_are_refused_before_the_effect_is_recorded(
    client: Client, db: psycopg.Connection[Any], drain: Drain, kind: str
) -> None:
    client.enqueue(kind)
    drain(_registry(lambda job, effect: None, withdraw_on=[KeyError]))

    (error,) = db.execute("select last_error from rota.job_runs").fetchone() or ()
    assert error.startswith("withdraw_on takes an exception class or a tuple of them, got [")
    assert _ledger(db) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_stays_unknown_is_told_when_it_does_and_at_each_skip(
    client: Client,
    db: psycopg.Connection[Any],
    drain: Drain,
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(job: Any, effect: Effect) -> None:
        if effect.is_due:
            raise ValueError("half of it was sent")

    job_id = client.enqueue(kind, backoff=NOW).job_id
    wait_until(lambda: drain(_registry(body)) or _results(db))

    told = [m for m in caplog.messages if m.startswith(f"job {job_id}: effect 'mail' 'k' is ")]
    assert [line.split(" is ")[1].split(":")[0] for line in told] == [
        "unknown after ValueError",
        "skipped",
    ]


ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [
    ("README.md", "mail_report", {"user_id": 7}, "send_mail"),
    ("python_client/README.md", "send_invoice", {"number": 7}, "deliver"),
]


class MailServer:
    """One that is down until it is started, always at the same address."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = found.getsockname()[1]
        self.mails: list[str] = []
        self._controller = Controller(self, hostname="127.0.0.1", port=self.port)
        self.start, self.stop = self._controller.start, self._controller.stop

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        self.mails.append(envelope.content.decode().strip())
        return "250 OK"

    def send(self, number: int) -> str:
        """Send a mail as a handler would."""
        with smtplib.SMTP("127.0.0.1", self.port) as smtp:
            smtp.sendmail("shop@example.com", ["you@example.com"], f"mail {number}")
        return f"<{number}@example.com>"


@pytest.mark.parametrize(("document", "job_type", "payload", "name"), EXAMPLES)
def test_the_example_sends_its_mail_after_ten_minutes_without_a_server(
    document: str,
    job_type: str,
    payload: Any,
    name: str,
    client: Client,
    db: psycopg.Connection[Any],
    clock: Clock,
    drain: Drain,
) -> None:
    """As it is printed, with the defaults for attempts and backoff."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    server, registry = MailServer(), Registry()
    (example,) = [
        text for text in blocks if "job.effect(" in text and "def " + job_type in text
    ]
    exec(example, {"rota": rota, "registry": registry, name: server.send})
    is_back_at = clock.set(clock.now()) + timedelta(minutes=10)
    client.enqueue(job_type, payload)

    drain(registry)
    while clock.now() < is_back_at:
        assert _ledger(db) == []
        (run_at,) = db.execute("select run_at from rota.jobs").fetchone() or (None,)
        assert run_at is not None
        clock.set(run_at)
        if run_at >= is_back_at:
            server.start()
        drain(registry)
    server.stop()

    assert server.mails == ["mail 7"]
    assert [done for _, done, _ in _ledger(db)] == [True]
    assert db.execute("select status from rota.finished_jobs").fetchall() == [("succeeded",)]


def test_what_nobody_knows_is_listed_and_settled(
    client: Client,
    db: psycopg.Connection[Any],
    drain: Drain,
    run: Callable[..., str],
) -> None:
    """The server has gone away in the middle, and an operator finds no such mail there."""
    sent: list[int] = []

    def body(job: Any, effect: Effect) -> None:
        if effect.is_due:
            if not sent:
                sent.append(job.attempt)
                raise TimeoutError("no answer")
            sent.append(job.attempt)

    registry = _registry(body)
    job_id = client.enqueue("plain", backoff=NOW).job_id
    _until_ended(db, lambda: drain(registry))
    (listed,) = json.loads(run("effects", "--json"))
    assert (listed["scope"], listed["key"], listed["status"]) == ("mail", "k", "succeeded")
    db.execute("update rota.finished_jobs set job_type = rpad('a', 70, 'a')")
    shown = run("effects").splitlines()
    assert shown[-1] == "(once you know: rota effects settle SCOPE KEY --done, or --again)"
    assert shown[1].startswith("mail   k ")
    assert max(map(len, shown)) == 80
    db.execute("update rota.finished_jobs set job_type = 'plain'")

    assert run("effects", "settle", "mail", "k", "--again", "--dry-run") == (
        "effect mail k is due again\n"
        f"(job {job_id} has ended, succeeded; to run it: rota retry {job_id})\n"
        "(dry run: nothing was done)\n"
    )
    assert _ledger(db) == [("k", False, None)]
    run("effects", "settle", "mail", "k", "--again")
    run("retry", str(job_id))
    drain(registry)

    assert len(sent) == 2
    assert _ledger(db) == [("k", True, None)]
    assert "has no open record" in run("effects", "settle", "mail", "k", "--done", code=1)


def test_what_is_known_to_be_done_is_settled_with_its_result(
    client: Client,
    db: psycopg.Connection[Any],
    drain: Drain,
    run: Callable[..., str],
) -> None:
    def body(job: Any, effect: Effect) -> None:
        if effect.is_due:
            raise TimeoutError("no answer")

    registry = _registry(body)
    client.enqueue("plain", max_attempts=1)
    drain(registry)

    said = run("effects", "settle", "mail", "k", "--done", "--result", '{"id": 5}')
    client.enqueue("plain")
    drain(registry)

    assert said == "effect mail k is done\n"
    assert _ledger(db) == [("k", True, {"id": 5})]
    assert _results(db)[-1] == {"id": 5}
    assert run("effects") == "(none)\n"
    wrong = run("effects", "settle", "mail", "k", "--again", "--result", "5", code=2)
    assert wrong == "rota: --result goes with --done\n"
