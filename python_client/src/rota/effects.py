"""The once-only ledger as a handler uses it: ``with job.effect(…) as effect``.

The record is committed before the block begins, and completed after it.  No connection is open
in between.  Completing and withdrawing can be repeated, so they are until the database answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

from .client.async_client import AsyncClient
from .client.statement import Unset
from .client.sync_client import Client
from .client.values import storable
from .rows import EffectResult
from .worker.connection import backoff
from .worker.host import Host
from .worker.outage import PASSING

if TYPE_CHECKING:
    from .job import BaseJob


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

    def _ending(
        self, names: dict[str, Any], is_over: bool
    ) -> tuple[str, dict[str, Any]] | None:
        if self.is_due and self._is_withdrawn:
            return "withdraw_effect", names
        if self.is_due and is_over:
            return "complete_effect", {
                **names,
                "result": storable(self.result, names["job_id"]),
            }
        return None


@contextmanager
def record(
    job: BaseJob, host: Host, scope: str, key: str, if_unknown: str, keep: timedelta | Unset
) -> Iterator[Effect]:
    """Record an effect before the block, and complete or withdraw it after."""
    names = _names(job, scope, key)
    with host.connect() as connection:
        client = Client(connection)
        is_due = client.record_effect(**names, if_unknown=if_unknown, keep=keep)
        effect = Effect(is_due, None if is_due else client.effect_result(scope, key))
    is_over = False
    try:
        yield effect
        is_over = True
    finally:
        if ending := effect._ending(names, is_over):
            _insist(job, host, *ending)


@asynccontextmanager
async def record_async(
    job: BaseJob, host: Host, scope: str, key: str, if_unknown: str, keep: timedelta | Unset
) -> AsyncIterator[Effect]:
    """Record an effect before the block, and complete or withdraw it after."""
    names = _names(job, scope, key)
    async with await host.connect_async() as connection:
        client = AsyncClient(connection)
        is_due = await client.record_effect(**names, if_unknown=if_unknown, keep=keep)
        effect = Effect(is_due, None if is_due else await client.effect_result(scope, key))
    is_over = False
    try:
        yield effect
        is_over = True
    finally:
        if ending := effect._ending(names, is_over):
            await _insist_async(job, host, *ending)


def _names(job: BaseJob, scope: str, key: str) -> dict[str, Any]:
    return {"scope": scope, "key": key, "job_id": job.job_id, "lease_token": job.lease_token}


def _insist(job: BaseJob, host: Host, function: str, arguments: dict[str, Any]) -> None:
    for failures in count():
        try:
            with host.connect() as connection:
                getattr(Client(connection), function)(**arguments)
                return
        except PASSING:
            if job.is_lost:
                raise
            time.sleep(backoff(failures))


async def _insist_async(
    job: BaseJob, host: Host, function: str, arguments: dict[str, Any]
) -> None:
    for failures in count():
        try:
            async with await host.connect_async() as connection:
                await getattr(AsyncClient(connection), function)(**arguments)
                return
        except PASSING:
            if job.is_lost:
                raise
            await asyncio.sleep(backoff(failures))
