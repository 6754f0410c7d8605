"""What a job may use of the worker it runs in: its loop, its connections, its progress."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from psycopg import AsyncConnection, Connection

from .connection import connect, connect_async
from .outage import PASSING, is_lost
from .patient_calls import PatientCalls

logger = logging.getLogger("rota")

NAME = "rota job"
PROGRESS_TIMEOUT = 5.0
"""Seconds after which progress is given up, such as that of a row that somebody has locked."""


class Host:
    """Opens connections for handlers, and stores progress over one of the worker's."""

    def __init__(self, worker: str, conninfo: str, patient: PatientCalls) -> None:
        self.worker = worker
        self.loop: asyncio.AbstractEventLoop
        self._conninfo = conninfo
        self._patient = patient

    def connect(self) -> Connection[Any]:
        """Open a connection for a handler in a thread."""
        return connect(self._conninfo, NAME)

    async def connect_async(self) -> AsyncConnection[Any]:
        """Open a connection for a handler in the loop."""
        return await connect_async(self._conninfo, NAME)

    async def store_progress(
        self, job_id: int, lease_token: int, percent: float, message: str | None
    ) -> None:
        """Store the progress of a job, if the database can be reached."""
        try:
            async with asyncio.timeout(PROGRESS_TIMEOUT):
                await self._patient.call(
                    lambda client: client.set_progress(job_id, lease_token, percent, message)
                )
        except TimeoutError:
            logger.warning("job %s: progress not stored: no answer", job_id)
        except PASSING as error:
            if not is_lost(error):
                logger.warning("job %s: progress not stored: %s", job_id, str(error).strip())
