"""The once-only ledger as a handler uses it: ``with job.effect(…) as effect``.

The record is committed before the block begins, and completed after it.  No connection is lent
in between.  Completing and withdrawing can be repeated, so they are until the database answers.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
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


class Recording:
    """The record of one effect of one job, around the block that causes it."""

    def __init__(
        self,
        job: BaseJob,
        context: JobContext,
        scope: str,
        key: str,
        if_unknown: str,
        keep: timedelta | Unset,
        withdraw_on: Errors,
    ) -> None:
        self._job = job
        self._context = context
        self._what = f"job {job.job_id}: effect {scope!r} {key!r}"
        self._choice: dict[str, Any] = {"if_unknown": if_unknown, "keep": keep}
        self._withdraw_on = withdraw_on
        self._names: dict[str, Any] = {
            "scope": scope,
            "key": key,
            "job_id": job.job_id,
            "lease_token": job.lease_token,
        }

    def __enter__(self) -> Effect:
        return self._context.run_in_loop(self.__aenter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        self._context.run_in_loop(self.__aexit__(kind, error, _))

    async def __aenter__(self) -> Effect:
        """Record the effect."""
        is_due, earlier = await self._context.connections.call(self._job, self._record)
        self._effect = Effect(is_due, earlier)
        if not is_due and not self._effect.is_done:
            logger.warning(
                "%s is skipped: it may or may not have happened; see rota effects settle",
                self._what,
            )
        return self._effect

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Complete or withdraw the effect, or leave it unknown; repeat until it is stored."""
        effect = self._effect
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

    async def _record(self, client: AsyncClient) -> tuple[bool, EffectResult | None]:
        if await client.record_effect(**self._names, **self._choice):
            return True, None
        return False, await client.effect_result(self._names["scope"], self._names["key"])

    async def _repeat(self, action: Callable[[AsyncClient], Awaitable[object]]) -> None:
        retry = Retry("storing what became of an effect", self._context.connections.state)
        while True:
            try:
                await self._context.connections.call(self._job, action)
                return
            except PASSING as error:
                if self._job.is_lost:
                    raise
                pause = min(retry.fail(error), max(self._job.seconds_left, 0.0))
                await self._context.connections.state.sleep(pause)
