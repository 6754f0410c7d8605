"""One log line for each thing that happens to a job, as text or as JSON."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from ._job import BaseJob

logger = logging.getLogger("rota")

_LEVELS = {"failed": logging.WARNING, "lost": logging.WARNING, "dead": logging.ERROR}


def log_job(event: str, job: BaseJob, duration: float | None = None, **details: Any) -> None:
    """Log one event; *details* that are None are left out."""
    fields = {
        "event": event,
        "job_type": job.job_type,
        "job_id": job.job_id,
        "queue": job.queue,
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "duration": None if duration is None else round(duration, 3),
        **details,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    words = [f"{name}={_word(value)}" for name, value in fields.items() if name != "event"]
    level = _LEVELS.get(event, logging.INFO)
    logger.log(level, "%s %s", event, " ".join(words), extra={"rota": fields})


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
        return json.dumps(line, default=str)


def _word(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds")
    text = str(value)
    # A quoted word keeps line breaks and spaces of an error message inside one line.
    return text if text and text.isprintable() and " " not in text else json.dumps(text)
