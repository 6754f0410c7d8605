"""The once-only ledger as a handler uses it: ``with job.effect(…) as effect``.

The record is committed before the block begins, and completed after it.  No connection is lent
in between.  Completing and withdrawing can be repeated, so they are until the database answers.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .client.async_client import AsyncClient
from .client.statement import Unset
from .client.values import storable
from .rows import EffectResult
from .worker.connection import PASSING, Retry

if TYPE_CHECKING:
    from .job import BaseJob, JobContext

logger = logging.getLogger("rota")

Errors = tuple[type[BaseException], ...]
WITHDRAW_ON: Errors = (ConnectionRefusedError, socket.gaierror)
"""Exceptions after which an effect certainly did not happen: nobody was reached."""


class Effect:
    """What the ledger says of an effect, and what the handler says of it in return."""

    def __init__(self, is_due: bool, earlier: EffectResult | None) -> None:
        self.is_due = is_due
        """Whether it is to be done now."""
        self.is_done = earlier is not None and earlier.is_done
        """Whether it was done before; if it is not due either, nobody knows."""
        self.result: Any = earlier.result if earlier else None
        """What is stored with it: by an earlier run, or by this one if it is due."""
        self._is_withdrawn = False

    def withdraw(self) -> None:
        """Say that it certainly did not happen; the end of the block then frees the key."""
        self._is_withdrawn = True


class _Recording:
    """The record of one effect of one job."""

    def __init__(
        self, job: BaseJob, context: JobContext, scope: str, key: str, withdraw_on: Errors
    ) -> None:
        self._job = job
        self._context = context
        self._what = f"job {job.job_id}: effect {scope!r} {key!r}"
        self._withdraw_on = withdraw_on
        self._names: dict[str, Any] = {
            "scope": scope,
            "key": key,
            "job_id": job.job_id,
            "lease_token": job.lease_token,
        }

    async def begin(self, if_unknown: str, keep: timedelta | Unset) -> Effect:
        """Record the effect."""
        async with self._context.connections.lend_async() as connection:
            client = AsyncClient(connection)
            if await client.record_effect(**self._names, if_unknown=if_unknown, keep=keep):
                return Effect(is_due=True, earlier=None)
            earlier = await client.effect_result(self._names["scope"], self._names["key"])
        effect = Effect(is_due=False, earlier=earlier)
        if not effect.is_done:
            logger.warning("%s is skipped: nobody knows whether it happened", self._what)
        return effect

    async def end(self, effect: Effect, error: BaseException | None) -> None:
        """Complete or withdraw the effect, or leave it unknown; repeat until it is stored."""
        if not effect.is_due:
            return
        if effect._is_withdrawn or isinstance(error, self._withdraw_on):
            await self._repeat(lambda client: client.withdraw_effect(**self._names))
        elif error is None:
            result = storable(effect.result, self._job.job_id)
            await self._repeat(
                lambda client: client.complete_effect(**self._names, result=result)
            )
        else:
            logger.warning(
                "%s is unknown after %s: only withdraw() or an exception of withdraw_on says "
                "that it did not happen",
                self._what,
                type(error).__name__,
            )

    async def _repeat(self, action: Callable[[AsyncClient], Awaitable[object]]) -> None:
        retry = Retry("storing what became of an effect", self._context.connections.state)
        while True:
            try:
                async with self._context.connections.lend_async() as connection:
                    await action(AsyncClient(connection))
                    return
            except PASSING as error:
                if self._job.is_lost:
                    raise
                await retry.wait(error)


@contextmanager
def record(
    job: BaseJob,
    context: JobContext,
    scope: str,
    key: str,
    if_unknown: str,
    keep: timedelta | Unset,
    withdraw_on: Errors,
) -> Iterator[Effect]:
    """Record an effect before the block, and complete or withdraw it after."""
    recording = _Recording(job, context, scope, key, withdraw_on)
    effect = context.run_in_loop(recording.begin(if_unknown, keep))
    try:
        yield effect
    except BaseException as error:
        context.run_in_loop(recording.end(effect, error))
        raise
    context.run_in_loop(recording.end(effect, None))


@asynccontextmanager
async def record_async(
    job: BaseJob,
    context: JobContext,
    scope: str,
    key: str,
    if_unknown: str,
    keep: timedelta | Unset,
    withdraw_on: Errors,
) -> AsyncIterator[Effect]:
    """Record an effect before the block, and complete or withdraw it after."""
    recording = _Recording(job, context, scope, key, withdraw_on)
    effect = await recording.begin(if_unknown, keep)
    try:
        yield effect
    except BaseException as error:
        await recording.end(effect, error)
        raise
    await recording.end(effect, None)
