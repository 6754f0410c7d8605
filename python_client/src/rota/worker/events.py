"""One log line for each thing that happens to a job or a worker, as text or as JSON.

`Ends` tells how attempts ended: the log, the worker's figures, and the functions of `on_end`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from datetime import UTC, datetime
from typing import Any

from ..job import BaseJob, JobEnd
from ..registry import EndFunction, is_async

logger = logging.getLogger("rota")

MAX_PENDING = 2000
"""So many ends may wait for their functions before no more jobs are started."""
_LEVELS = {"failed": logging.WARNING, "lost": logging.WARNING, "dead": logging.ERROR}


def _guard(handle: Callable[[logging.LogRecord], None]) -> Callable[[logging.LogRecord], None]:
    """Let what a handler of the log raises end no worker, and tell it as `logging` does."""

    def guarded(record: logging.LogRecord) -> None:
        try:
            handle(record)
        except Exception:
            if logging.raiseExceptions:
                traceback.print_exc()

    return guarded


logger.handle = _guard(logger.handle)  # type: ignore[method-assign,assignment]


def log_job(
    event: str,
    job: BaseJob,
    duration: float | None = None,
    exception: BaseException | None = None,
    **details: Any,
) -> None:
    """Log one event; *details* that are None are left out."""
    level = _LEVELS.get(event, logging.INFO)
    if not logger.isEnabledFor(level):
        return
    fields = {
        "event": event,
        "job_type": job.job_type,
        "job_id": job.job_id,
        "queue": job.queue,
        "schedule": job.definition,
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "worker": job.worker,
        "duration": None if duration is None else round(duration, 3),
        **details,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    words = [f"{name}={_word(value)}" for name, value in fields.items() if name != "event"]
    logger.log(
        level, "%s %s", event, " ".join(words), exc_info=exception, extra={"rota": fields}
    )


class Ends:
    """Logs the ends of attempts, and calls *functions* for each, one after the other."""

    def __init__(self, functions: Sequence[EndFunction]) -> None:
        self.count = 0
        """How many attempts have ended."""
        self._functions = functions
        self._pending: deque[tuple[BaseJob, JobEnd]] = deque()
        self._telling: asyncio.Task[None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether the functions are so far behind that no more jobs should end."""
        return len(self._pending) >= MAX_PENDING

    def add(
        self,
        event: str,
        job: BaseJob,
        duration: float = 0.0,
        exception: BaseException | None = None,
        next_run: datetime | None = None,
        **details: Any,
    ) -> None:
        """Log an end that the database knows of, and tell the functions."""
        self.count += 1
        log_job(event, job, duration or None, exception, next_run=next_run, **details)
        if self._functions:
            self._pending.append((job, JobEnd(event, duration, exception, next_run)))
            if self._telling is None or self._telling.done():
                # In a context of its own: this may be called in that of a job.
                self._telling = asyncio.create_task(self._tell(), context=Context())

    async def close(self) -> None:
        """Wait until the functions know of all."""
        if self._telling is not None and not self._telling.done():
            await self._telling

    async def _tell(self) -> None:
        while self._pending:
            job, end = self._pending.popleft()
            for function in self._functions:
                try:
                    if is_async(function):
                        await function(job, end)
                    else:
                        await asyncio.to_thread(function, job, end)
                except BaseException as error:  # one that raises SystemExit ends no worker
                    if _is_cancelled(error):
                        raise
                    name = getattr(function, "__qualname__", repr(function))
                    logger.exception("job %s: %s, of on_end, failed", job.job_id, name)


def _is_cancelled(error: BaseException) -> bool:
    """Whether this task is cancelled, and not something that it awaited."""
    task = asyncio.current_task()
    return (
        isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
    )


class JsonFormatter(logging.Formatter):
    """Format each record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; events of jobs keep their fields apart."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        line |= getattr(record, "rota", None) or {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=_plain)


def _plain(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds")
    return str(value)


def _word(value: Any) -> str:
    text = _plain(value)
    # A quoted word keeps line breaks and spaces of an error message inside one line.
    return text if text and text.isprintable() and " " not in text else json.dumps(text)
