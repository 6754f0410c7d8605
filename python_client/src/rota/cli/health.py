"""What a worker answers over HTTP with ``--health``.

``/live`` answers as long as the event loop turns, with the database or without: to kill all
workers because the database is down would only make its return harder.  ``/ready`` says whether
jobs are asked for, of one database at least: one that is down shall not hold up a deployment
for the others.  ``/metrics`` has what prometheus_client knows, ours and the user's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import import_module

from ..worker.worker import Worker

logger = logging.getLogger("rota")

REQUEST_TIMEOUT = 5.0
MAX_REQUEST = 8192
TEXT = "text/plain; charset=utf-8"
NO_METRICS = "pip install 'rota[prometheus]' for metrics\n"

Answer = tuple[int, str, str]
Metrics = Callable[[], tuple[str, str]]


@asynccontextmanager
async def serve_health(host: str, port: int, workers: Sequence[Worker]) -> AsyncIterator[None]:
    """Answer requests inside the block; of port 0 at a free one, which the log tells."""
    metrics = _metrics()

    def answer(path: str) -> Answer:
        match path.partition("?")[0]:
            case "/live":
                return 200, TEXT, "live\n"
            case "/ready":
                is_ready = any(worker.is_ready for worker in workers)
                return (200, TEXT, "ready\n") if is_ready else (503, TEXT, "not ready\n")
            case "/metrics" if metrics is not None:
                return (200, *metrics())
            case "/metrics":
                return 404, TEXT, NO_METRICS
        return 404, TEXT, "/live, /ready, /metrics\n"

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT):
                head = await reader.readuntil(b"\r\n\r\n")
                words = head.decode("latin-1").split(" ", 2)
                code, kind, text = answer(words[1] if words[0] in ("GET", "HEAD") else "")
                body = text.encode()
                writer.write(
                    f"HTTP/1.1 {code} {'OK' if code == 200 else 'Unavailable'}\r\n"
                    f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                    "Connection: close\r\n\r\n".encode()
                )
                writer.write(body if words[0] != "HEAD" else b"")
                await writer.drain()
        except (TimeoutError, OSError, IndexError, asyncio.IncompleteReadError):
            pass  # it is the caller who gets no answer
        except asyncio.LimitOverrunError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, host, port, limit=MAX_REQUEST)
    port = server.sockets[0].getsockname()[1]
    logger.info("health is served at http://%s:%s/ready", host, port)
    try:
        yield
    finally:
        server.close()


def _metrics() -> Metrics | None:
    try:
        found: Metrics = import_module("rota.contrib.prometheus").exposition
    except ImportError:
        return None
    return found
