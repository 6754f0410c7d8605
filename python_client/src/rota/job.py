"""The job as its handler sees it: `Job` for plain functions, `AsyncJob` for ``async def``."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from math import inf
from typing import Any, Literal, ParamSpec, TypeVar, cast, overload

from psycopg import AsyncConnection, Connection

from .client.adapters import AsyncCaller, Caller, check_transaction, is_async
from .client.async_client import AsyncClient
from .client.connecting import one_line, spelled_for
from .client.statement import UNSET, Unset
from .client.sync_client import Client
from .client.values import storable
from .exceptions import (
    EffectNotHeldError,
    JobCancelled,
    JobFinishedError,
    LeaseLostError,
    TimeLimitExceeded,
    kinds_of,
)
from .rows import ClaimedJob, EffectResult
from .worker.connection import (
    PASSING,
    ConnectionState,
    NoAnswerError,
    Retry,
    is_lost,
    is_wrong,
    outlast,
)
from .worker.lending import Pool
from .worker.own_process import Processes

logger = logging.getLogger("rota")

P = ParamSpec("P")
T = TypeVar("T")

Errors = tuple[type[BaseException], ...]
WITHDRAW_ON: Errors = (ConnectionRefusedError, socket.gaierror)
"""Exceptions after which an effect certainly did not happen: nobody was reached."""
PROGRESS_TIMEOUT = 5.0
"""Seconds after which progress is given up, such as that of a row that somebody has locked."""


class State(Enum):
    """How far a job in hand is: from each state to the next, and back after a rollback.

    Only what runs its handler changes it.  A handler may end while it is running, finishing or
    finished.
    """

    RUNNING = "running"
    """It waits for a free place, or its handler runs."""
    FINISHING = "finishing"
    """Its handler runs, and a transaction has its end, of which nobody knows if it commits."""
    FINISHED = "finished"
    """Its handler runs, and `transaction` has committed its end."""
    ENDED = "ended"
    """Its handler has ended, and that is being reported."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How an attempt ended, as the functions of `Registry.on_end` are told."""

    outcome: str
    """succeeded, failed (it is tried again), dead, cancelled, snoozed, released or lost."""
    duration: float
    """Seconds that the handler ran; 0 if it did not start."""
    exception: BaseException | None = None
    """What the handler raised, if that is why."""
    next_run: datetime | None = None
    """When a job that failed or snoozed runs again."""


class Effect:
    """An effect as the once-only ledger has it, and what the handler reports about it."""

    def __init__(
        self,
        names: dict[str, Any],
        is_due: bool,
        earlier: EffectResult | None,
        withdraw_on: Errors,
    ) -> None:
        self.is_due = is_due
        """Whether the block has to cause it now."""
        self.is_done = earlier is not None and earlier.is_done
        """Whether an earlier run did it; if it is neither due nor done, that is unknown."""
        self.result: Any = earlier.result if earlier else None
        """The stored result: of the earlier run, or what this one sets if it is due."""
        self._names = names
        self._withdraw_on = withdraw_on
        self._is_withdrawn = False

    def __str__(self) -> str:
        return "job {job_id}: effect {scope!r} {key!r}".format(**self._names)

    def withdraw(self) -> None:
        """Report that it certainly did not happen: the end of the block then frees the key."""
        self._is_withdrawn = True


class JobContext:
    """What a job uses of the worker that runs it: its name, connections, resources.

    *handlers* are lent connections, and *calls* of theirs go over others.
    """

    def __init__(
        self, worker: str, handlers: Pool, calls: Pool, state: ConnectionState
    ) -> None:
        self.worker = worker
        self.handlers, self.calls, self.state = handlers, calls, state
        self.resources: dict[str, Any] = {}
        self.processes = Processes()
        self.is_leaving = False
        """Whether the worker is to stop."""
        self.is_stopping = False
        """Whether its jobs have no grace period left."""
        state.on_back(self.close_idle)  # an old connection may lead to a standby

    def close_idle(self) -> None:
        """Close the idle connections."""
        self.handlers.close_idle()
        self.calls.close_idle()


class BaseJob:
    """What both kinds of job share: the claim, and what became known about it since."""

    result: Any = None
    """What is stored when it ends, unless the handler returns a value."""
    next_stage: str | None = None
    """Where its run of a pipeline goes on to: None is the next in order, ``end`` none."""
    is_given_up = False
    """Its task does not want another attempt after what its function raised."""
    state = State.RUNNING
    is_cancel_requested = False
    """Whether an operator called ``cancel_job()``."""
    is_lease_gone = False
    """Whether its lease is known to be lost: no heartbeat brings it back."""
    last_words = 0
    """How many effects it is storing, which it may also after its time limit."""
    _put_at = inf  # when a transaction last got its end
    _sent_effects: frozenset[tuple[str, str]] = frozenset()

    def __init__(self, claim: ClaimedJob, context: JobContext, claimed_at: float) -> None:
        self.worker = context.worker
        self.job_id = claim.job_id
        self.lease_token = claim.lease_token
        self.job_type = claim.job_type
        self.queue = claim.queue
        self.payload = claim.payload
        self.attempt = claim.attempt
        self.max_attempts = claim.max_attempts
        self.priority = claim.priority
        self.run_at: datetime = claim.run_at
        self.created_at: datetime = claim.created_at
        self.idempotency_key = claim.idempotency_key
        self.pipeline = claim.pipeline
        self.stage = claim.stage
        self.stage_input = claim.stage_input
        """The result of the stage before."""
        self.definition = claim.definition
        """The name of the schedule that made it."""
        self.scheduled_for: datetime | None = claim.scheduled_for
        """The time that the schedule named, however late the job was made or runs."""
        self.lease: timedelta = claim.locked_for
        self.time_limit = claim.time_limit
        """How long the attempt may take, from the start of its handler; None is without end."""
        self.headers: dict[str, str] = claim.headers or {}
        """Texts that the producer sent along."""
        self.open_effects: set[str] = set()
        """The effects that are due and in whose blocks its handler is."""
        self.confirmed_at = claimed_at
        """When the lease was last given, on the monotonic clock."""
        self.began_at = claimed_at
        """When its handler started, once it has."""
        self.over_since = inf
        """When its lease or its time was found to be over while its handler ran."""
        self.is_outlived = False
        """Whether the log has told that its handler outlives its lease."""
        self._transaction = threading.Lock()
        self._context = context

    def __repr__(self) -> str:
        return f"<rota.{type(self).__name__} {self.job_id} {self.job_type!r}>"

    @property
    def resources(self) -> Mapping[str, Any]:
        """What the functions of `Registry.lifespan` have opened for all jobs of the worker."""
        return self._context.resources

    @property
    def _ids(self) -> dict[str, Any]:
        return {"job_id": self.job_id, "lease_token": self.lease_token}

    @property
    def is_finished(self) -> bool:
        """Whether `transaction` has committed."""
        return self.state is State.FINISHED

    @property
    def is_in_doubt(self) -> bool:
        """Whether a transaction has held its end, and so may have committed it."""
        return self._put_at < inf

    @property
    def is_lost(self) -> bool:
        """Whether the lease is lost: swept, another worker's, or not extended in time."""
        return self.is_lease_gone or (self.seconds_left < 0 and not self.may_be_finished)

    @property
    def is_leaving(self) -> bool:
        """Whether the worker is to stop: end soon, or raise JobCancelled to return the job."""
        return self._context.is_leaving

    @property
    def may_be_finished(self) -> bool:
        """Whether the database may have its end, and so not the job any more."""
        if self.state is State.FINISHING:
            # A heartbeat that came through later found no lock: the end was rolled back.
            return self.confirmed_at <= self._put_at
        return self.state is not State.RUNNING

    @property
    def seconds_left(self) -> float:
        """How long the lease lasts if no heartbeat succeeds any more."""
        return self.confirmed_at + self.lease.total_seconds() - time.monotonic()

    @property
    def seconds_to_limit(self) -> float:
        """How long the attempt may still take; infinite without a time limit."""
        if self.time_limit is None:
            return inf
        return self.began_at + self.time_limit.total_seconds() - time.monotonic()

    @property
    def over_at(self) -> float:
        """When the lease or the time is over, on the monotonic clock."""
        return time.monotonic() + min(self.seconds_left, self.seconds_to_limit)

    @property
    def is_overdue(self) -> bool:
        """Whether the attempt has taken longer than its time limit."""
        return self.seconds_to_limit <= 0.0

    @property
    def is_wanted(self) -> bool:
        """Whether it makes sense to go on."""
        return self._reason_to_stop() is None

    def check(self) -> None:
        """Raise LeaseLostError, JobCancelled or TimeLimitExceeded if the job should stop."""
        if (reason := self._reason_to_stop()) is not None:
            raise reason

    def _reason_to_stop(self) -> Exception | None:
        if self.is_lost:
            return LeaseLostError(f"the lease of job {self.job_id} is lost")
        if self.is_cancel_requested:
            return JobCancelled(f"job {self.job_id} was cancelled")
        if self.is_overdue:
            return TimeLimitExceeded(
                f"job {self.job_id} has exceeded its time limit of {self.time_limit}"
            )
        if self._context.is_stopping:
            return JobCancelled(f"the worker of job {self.job_id} is stopping")
        return None

    def finish_in(self, connection: Caller) -> None:
        """Finish the job, with `result`, in the transaction of your own connection or session.

            with Session.begin() as session:
                session.add(Payment(...))
                job.finish_in(session)

        Call it last: your commit then ends the job too, and a rollback does neither.  A lost
        lease raises LeaseLostError.  If the handler returns and has not committed, the attempt
        has failed, since what it wrote is lost.
        """
        client = Client(connection)
        check_transaction(client._driver())
        with self._finishing():
            self._end_finish(client.finish_job(**self._begin_finish()))

    async def _store_progress(self, percent: float, message: str | None) -> None:
        """Store it, and go on without it if the database cannot be reached."""
        if not isinstance(message, str | None):
            raise TypeError(f"message must be a text, got {message!r:.80}")
        try:
            await self._call(
                lambda client: client.set_progress(
                    **self._ids,
                    percent=percent,
                    message=message and spelled_for(client.connection, message),
                ),
                PROGRESS_TIMEOUT,
            )
        except LeaseLostError:
            self.is_lease_gone = True
            raise
        except PASSING as error:
            if not is_lost(error):
                text = one_line(error)
                logger.warning("job %s: progress not stored: %s", self.job_id, text)

    @contextmanager
    def _finishing(self) -> Iterator[None]:
        """Let the block put the end of the job into a transaction.

        That is committed later, or not: `Completer` asks when the handler has ended.
        """
        if self.is_finished:
            raise RuntimeError(f"job {self.job_id} is finished: it has one transaction")
        before = self.state  # an end that was put there before may still be committed, or not
        try:
            yield
        except BaseException:
            self.state = before
            raise

    @contextmanager
    def _committing(self) -> Iterator[None]:
        """Remember that the block, in which a connection is lent, has committed the end.

        While it has one, a job is lent no second, for which it might wait forever.
        """
        if not self._transaction.acquire(blocking=False):
            raise RuntimeError(f"job {self.job_id} already has a transaction: use that")
        put_at = self._put_at
        try:
            with self._finishing():
                yield
            if self._put_at != put_at:  # else the block was left by psycopg.Rollback
                self.state = State.FINISHED
        finally:
            self._transaction.release()

    def _names(self, scope: str, key: str) -> dict[str, Any]:
        for name, value in (("scope", scope), ("key", key)):
            if not isinstance(value, str):  # for a number Postgres would find no function
                raise TypeError(f"{name} of an effect must be a text, got {value!r:.80}")
        return {"scope": scope, "key": key, **self._ids}

    async def _open_effect(
        self,
        scope: str,
        key: str,
        if_unknown: Literal["skip", "again"],
        keep: timedelta | Unset,
        withdraw_on: Errors,
    ) -> Effect:
        """Record an effect that is due, or find what became of it."""
        withdraw_on = kinds_of("withdraw_on", withdraw_on, BaseException)
        names, name = self._names(scope, key), (scope, key)
        was_sent = name in self._sent_effects

        def record(client: Any) -> Any:
            self._sent_effects |= {name}
            return client.record_effect(**names, if_unknown=if_unknown, keep=keep)

        try:
            is_due: bool = await self._call(record)
        except (*PASSING, TimeLimitExceeded, asyncio.CancelledError) as error:
            # It may be recorded, though its block has certainly not begun.  But an earlier one
            # of this attempt may have, or one of another attempt whose record is taken over.
            is_in_doubt = is_lost(error) or isinstance(
                error, NoAnswerError | TimeLimitExceeded | asyncio.CancelledError
            )
            is_first = name in self._sent_effects and not was_sent
            if is_in_doubt and is_first and if_unknown == "skip":
                with suppress(EffectNotHeldError):  # so it was not recorded either
                    await self._repeat(lambda client: client.withdraw_effect(**names))
            raise
        earlier: EffectResult | None = None
        if not is_due:
            earlier = await self._call(lambda client: client.effect_result(scope, key))
        effect = Effect(names, is_due, earlier, withdraw_on)
        if is_due:
            self.open_effects.add(str(effect))
        elif not effect.is_done:
            text = "%s is skipped: it may or may not have happened; see rota effects settle"
            logger.warning(text, effect)
        return effect

    async def _close_effect(self, effect: Effect, error: BaseException | None) -> None:
        """Store what became of an effect, if that is known."""
        names = effect._names
        self.open_effects.discard(str(effect))
        if not effect.is_due:
            return
        if effect._is_withdrawn or isinstance(error, effect._withdraw_on):
            await self._repeat(lambda client: client.withdraw_effect(**names))
        elif error is None:
            result = storable(effect.result, str(effect))
            await self._repeat(lambda client: client.complete_effect(**names, result=result))
        else:
            text = (
                "%s is unknown after %s: only withdraw() or an exception of withdraw_on says "
                "that it did not happen"
            )
            logger.warning(text, effect, type(error).__name__)

    async def _repeat(self, action: Callable[[Any], Any]) -> None:
        """Make a call that may be made twice, until the database answers."""
        retry = Retry("storing what became of an effect", self._context.state)
        self.last_words += 1
        try:
            while True:
                try:
                    await self._call(action)
                    return
                except PASSING as error:
                    is_over = self.is_lost or self.is_overdue or self._context.is_stopping
                    if is_over or is_wrong(error.sqlstate):
                        raise
                    await self._pause(retry, error)
        finally:
            self.last_words -= 1

    async def _call(self, action: Callable[[Any], Any], seconds: float | None = None) -> Any:
        """Make a call of ours: at once in a thread, and else in the loop."""
        raise NotImplementedError

    async def _pause(self, retry: Retry, error: BaseException) -> None:
        """Wait for the next try."""
        raise NotImplementedError

    def _begin_finish(self) -> dict[str, Any]:
        if self.open_effects:
            raise RuntimeError(
                f"{min(self.open_effects)} is not completed yet, and a job that has ended "
                "completes none: let the block of the effect end before the job does"
            )
        # From here on a heartbeat that finds the job gone means that it is finished.
        self.state = State.FINISHING
        arguments: dict[str, Any] = {**self._ids}
        if self.result is not None:
            arguments["result"] = storable(self.result, f"job {self.job_id}")
        if self.next_stage is not None:
            arguments["next_stage"] = self.next_stage
        return arguments

    def _end_finish(self, outcome: str) -> None:
        if outcome != "finished":
            # An earlier commit succeeded though its reply was lost: never write twice.
            raise JobFinishedError(f"job {self.job_id} was finished by an earlier transaction")
        self._put_at = time.monotonic()


class Job(BaseJob):
    """A job for a plain function, which runs in a thread."""

    @contextmanager
    def transaction(self) -> Iterator[Connection[Any]]:
        """Lend a connection in a transaction that finishes the job, with `result`, at its end.

        Business writes and finish are committed together or not at all; a lost lease raises
        LeaseLostError and rolls both back.  A task or thread that uses the
        connection after the block gets an InterfaceError, so wait for it in the block.
        """
        lending = self._context.handlers.lend(self)
        with self._committing(), lending as lent, lent.connection.transaction():
            with lent.to_handler() as connection:
                yield connection
            client = Client(lent.connection)
            self._end_finish(client.finish_job(**self._begin_finish()))

    @contextmanager
    def effect(
        self,
        scope: str,
        key: str,
        if_unknown: Literal["skip", "again"] = "skip",
        keep: timedelta | Unset = UNSET,
        *,
        withdraw_on: Errors = WITHDRAW_ON,
    ) -> Iterator[Effect]:
        """Cause an effect outside of the database once: the block causes it if `is_due`.

        If an earlier run died or raised in its block, the outcome is unknown: *if_unknown* is
        ``skip`` (at most once) or ``again`` (at least once).  An exception of *withdraw_on*
        means that it did not happen, so the next run finds it due; an exception group never
        does, since other tasks may have caused it.  Raise EffectInProgressError while another
        job causes it.
        """
        effect = _done(self._open_effect(scope, key, if_unknown, keep, withdraw_on))
        try:
            yield effect
        except BaseException as error:
            _done(self._close_effect(effect, error))
            raise
        _done(self._close_effect(effect, None))

    def set_progress(self, percent: float, message: str | None = None) -> None:
        """Record how far the job is; raise LeaseLostError if another worker has it."""
        _done(self._store_progress(percent, message))

    async def _call(self, action: Callable[[Any], Any], seconds: float | None = None) -> Any:
        return self._context.calls.call(self, action, seconds)

    async def _pause(self, retry: Retry, error: BaseException) -> None:
        retry.wait_in_thread(error, max(self.seconds_left, 0.0))


def _done(steps: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of a `Job` to its end: as its calls block, it waits for no loop."""
    try:
        steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a call of a plain handler cannot wait for a loop")


class AsyncJob(BaseJob):
    """A job for an ``async def`` function, which runs in the worker's event loop."""

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection[Any]]:
        """Lend a connection in a transaction that finishes the job, like `Job.transaction`."""
        lending = self._context.handlers.lend_async(self)
        with self._committing():
            async with lending as lent, lent.connection.transaction():
                with lent.to_handler() as connection:
                    yield connection
                client = AsyncClient(lent.connection)
                self._end_finish(await client.finish_job(**self._begin_finish()))

    @overload
    def finish_in(self, connection: AsyncCaller) -> Coroutine[Any, Any, None]: ...

    @overload
    def finish_in(self, connection: Caller) -> None: ...

    def finish_in(self, connection: AsyncCaller | Caller) -> Coroutine[Any, Any, None] | None:
        """Finish the job in the transaction of your own connection or session, like `Job`.

        With a connection that is not async, as of Django within ``sync_to_async()``, there is
        nothing to await.
        """
        if not is_async(connection):
            return super().finish_in(cast(Caller, connection))
        return self._finish_in_async(cast(AsyncCaller, connection))

    async def _finish_in_async(self, connection: AsyncCaller) -> None:
        client = AsyncClient(connection)
        check_transaction(await client._driver())
        with self._finishing():
            self._end_finish(await client.finish_job(**self._begin_finish()))

    @asynccontextmanager
    async def effect(
        self,
        scope: str,
        key: str,
        if_unknown: Literal["skip", "again"] = "skip",
        keep: timedelta | Unset = UNSET,
        *,
        withdraw_on: Errors = WITHDRAW_ON,
    ) -> AsyncIterator[Effect]:
        """Cause an effect outside of the database once, like `Job.effect`."""
        effect = await self._open_effect(scope, key, if_unknown, keep, withdraw_on)
        try:
            yield effect
        except BaseException as error:
            await self._close_effect(effect, error)
            raise
        await self._close_effect(effect, None)

    async def run_in_process(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a module-level function in its own process, which stays for the next call.

        A long computation there blocks neither the event loop nor other handlers, and the
        worker kills the process when the job is cancelled or the worker stops.  Arguments and
        result must be picklable.
        """
        result: T = await self._context.processes.run(function, args, kwargs)
        return result

    async def set_progress(self, percent: float, message: str | None = None) -> None:
        """Record how far the job is; raise LeaseLostError if another worker has it."""
        await self._store_progress(percent, message)

    async def _repeat(self, action: Callable[[Any], Any]) -> None:
        # In a task of its own: what is known of an effect is stored also by who is cancelled.
        await outlast(asyncio.create_task(super()._repeat(action)))

    async def _call(self, action: Callable[[Any], Any], seconds: float | None = None) -> Any:
        return await self._context.calls.call_async(self, action, seconds)

    async def _pause(self, retry: Retry, error: BaseException) -> None:
        await retry.wait(error, max(self.seconds_left, 0.0))
