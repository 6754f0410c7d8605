"""Call the database until it has answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import psycopg

from ._async_client import AsyncClient
from ._database import backoff
from ._errors import InvalidArgumentError
from ._outage import is_lost

logger = logging.getLogger("rota")

T = TypeVar("T")
REFUSED = (
    InvalidArgumentError,
    psycopg.DataError,
    psycopg.errors.ProgramLimitExceeded,
    psycopg.errors.StatementTooComplex,
)
"""Errors that say that an argument is wrong: calling again would not help."""


class Caller(Protocol):
    """What lends a client to a call: a database, or `PatientCalls`."""

    async def call(self, action: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Run *action*."""


async def insist(caller: Caller, action: Callable[[AsyncClient], Awaitable[T]]) -> T:
    """Call until the database has answered."""
    failures = 0
    while True:
        try:
            return await caller.call(action)
        except REFUSED:
            raise
        except psycopg.Error as error:
            failures += 1
            if not is_lost(error):
                logger.warning("a job's end could not be reported: %s", str(error).strip())
            await asyncio.sleep(backoff(failures))
