"""The once-only ledger as a handler uses it: ``with job.effect(…) as effect``.

The record is committed before the block begins, and completed after it.  No connection is lent
in between.  Completing and withdrawing can be repeated, so they are until the database answers.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .client.async_client import AsyncClient
from .client.statement import Unset
from .client.sync_client import Client
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
    """An effect as the ledger has it, and what the handler reports about it."""

    def __init__(self, is_due: bool, earlier: EffectResult | None) -> None:
        self.is_due = is_due
        """Whether the block has to cause it now."""
        self.is_done = earlier is not None and earlier.is_done
        """Whether an earlier run did it; if it is neither due nor done, that is unknown."""
        self.result: Any = earlier.result if earlier else None
        """The stored result: of the earlier run, or what this one sets if it is due."""
        self._is_withdrawn = False

    def withdraw(self) -> None:
        """Report that it certainly did not happen: the end of the block then frees the key."""
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
        self._calls = context.calls
        self._what = f"job {job.job_id}: effect {scope!r} {key!r}"
        self._choice: dict[str, Any] = {"if_unknown": if_unknown, "keep": keep}
        self._withdraw_on = withdraw_on
        self._retry = Retry("storing what became of an effect", context.state)
        self._names: dict[str, Any] = {
            "scope": scope,
            "key": key,
            "job_id": job.job_id,
            "lease_token": job.lease_token,
        }

    def _begin(self, is_due: bool, earlier: EffectResult | None) -> Effect:
        self._effect = Effect(is_due, earlier)
        if is_due:
            self._job.open_effects.add(self._what)
        if not is_due and not self._effect.is_done:
            logger.warning(
                "%s is skipped: it may or may not have happened; see rota effects settle",
                self._what,
            )
        return self._effect

    def _settlement(self, error: BaseException | None) -> Callable[[Any], Any] | None:
        """Return the call that stores what became of it, if that is known."""
        effect = self._effect
        self._job.open_effects.discard(self._what)
        if not effect.is_due:
            return None
        if effect._is_withdrawn or isinstance(error, self._withdraw_on):
            return lambda client: client.withdraw_effect(**self._names)
        if error is None:
            result = storable(effect.result, self._job.job_id)
            return lambda client: client.complete_effect(**self._names, result=result)
        logger.warning(
            "%s is unknown after %s: only withdraw() or an exception of withdraw_on says "
            "that it did not happen",
            self._what,
            type(error).__name__,
        )
        return None

    def _longest_pause(self, error: BaseException) -> float:
        """Return the most seconds until the next try; raise the error if the lease is lost."""
        if self._job.is_lost:
            raise error
        return max(self._job.seconds_left, 0.0)


class PlainRecording(Recording):
    """The record of an effect of a `Job`."""

    def __enter__(self) -> Effect:
        is_due, earlier = self._calls.call(self._job, self._record)
        return self._begin(is_due, earlier)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        action = self._settlement(error)
        while action is not None:
            try:
                self._calls.call(self._job, action)
                return
            except PASSING as passing:
                self._retry.wait_in_thread(passing, self._longest_pause(passing))

    def _record(self, client: Client) -> tuple[bool, EffectResult | None]:
        if client.record_effect(**self._names, **self._choice):
            return True, None
        return False, client.effect_result(self._names["scope"], self._names["key"])


class AsyncRecording(Recording):
    """The record of an effect of an `AsyncJob`: a plain ``with`` would block its loop."""

    async def __aenter__(self) -> Effect:
        """Record the effect."""
        is_due, earlier = await self._calls.call_async(self._job, self._record_async)
        return self._begin(is_due, earlier)

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Complete or withdraw the effect, or leave it unknown; repeat until it is stored."""
        action = self._settlement(error)
        while action is not None:
            try:
                await self._calls.call_async(self._job, action)
                return
            except PASSING as passing:
                await self._retry.wait(passing, self._longest_pause(passing))

    async def _record_async(self, client: AsyncClient) -> tuple[bool, EffectResult | None]:
        if await client.record_effect(**self._names, **self._choice):
            return True, None
        return False, await client.effect_result(self._names["scope"], self._names["key"])
