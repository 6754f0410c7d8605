"""The command ``rota worker``, and what it answers over HTTP with ``--health``.

``/live`` answers as long as the event loop turns, with the database or without: to kill all
workers because the database is down would only make its return harder.  ``/ready`` says whether
jobs are asked for, of one database at least: one that is down shall not hold up a deployment
for the others.  ``/metrics`` has what prometheus_client knows, ours and the user's own.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import ModuleType

from ..client.connecting import begin, named
from ..forwarding import Forwarder
from ..registry import Registry
from ..worker.executor import Places
from ..worker.process import INSISTS
from ..worker.worker import Worker, run_together
from .output import (
    LEFT_BEHIND,
    MAKES_ROOM,
    CommandError,
    UsageError,
    conninfo,
    conninfos,
    set_up_log,
    url_of,
)
from .supervisor import Supervisor

logger = logging.getLogger("rota")

REQUEST_TIMEOUT = 5.0
MAX_REQUEST = 8192
TEXT = "text/plain; charset=utf-8"
SAME = (
    "batch", "lease", "poll_interval", "tick_interval", "grace_period", "max_jobs",
    "max_memory",
)  # fmt: skip
"""The options that a `Worker` takes by the same names."""
NO_METRICS = "pip install 'rota[prometheus]' for metrics\n"


def work(arguments: argparse.Namespace) -> int:
    """Run workers until they are told to stop."""
    log_format = "json" if arguments.json else arguments.log_format
    set_up_log(log_format, arguments.log_level)
    if arguments.processes < 1:
        raise UsageError(f"--processes must be 1 or more, got {arguments.processes}")
    health = _health(arguments)
    is_child = arguments.process_number is not None
    if (arguments.processes > 1 or arguments.reload) and not is_child:
        is_done = arguments.drain or arguments.once
        return Supervisor(
            arguments.again, arguments.processes, reload=arguments.reload, is_done=is_done
        ).run()
    if is_child:
        # Until it runs, and when it has left, there is nothing to insist on.  And in the
        # background of a terminal a handler that reads from it would stop the whole process,
        # instead of getting an error.
        for each in (INSISTS, signal.SIGTTIN, signal.SIGTTOU):
            signal.signal(each, signal.SIG_IGN)
    if os.getpid() == 1:  # for which, as in a container, no signal has a default
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        registry = load_registry(arguments.registry)
    except UsageError as error:
        if error.__cause__ is not None:
            logger.error("cannot import the handlers", exc_info=error.__cause__)
        raise
    # A dictConfig() there disables the loggers that it does not name, if not told otherwise.
    logger.disabled = False
    databases = conninfos(arguments) or [conninfo(arguments)]
    workers = _workers(arguments, registry, databases)
    beside: list[AbstractAsyncContextManager[None]] = []
    if health is not None:
        beside.append(serve_health(*health, workers))
        if (metrics := _metrics()) is not None:
            metrics.instrument(registry, workers)
    if len(databases) > 1 and not (arguments.drain or arguments.once or arguments.no_forward):
        shared = [worker.idle_connections for worker in workers[: len(databases)]]
        forwarder = Forwarder(databases, poll_interval=arguments.poll_interval, shared=shared)
        beside.append(forwarder.run_beside(workers[0]))
    # What was imported stays, and the collector need not go through it again and again.
    gc.collect()
    gc.freeze()
    try:
        have_ended = run_together(
            workers,
            drain=arguments.drain,
            once=arguments.once,
            beside=beside,
            has_parent=is_child,
        )
    except OSError as error:
        if health is None or error.errno != errno.EADDRINUSE:
            raise
        raise CommandError(f"another process already uses port {health[1]}") from None
    if not have_ended:
        # A handler ignores that its job was given back: end it together with the process,
        # without a clean-up of the interpreter that it could disturb.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(LEFT_BEHIND)
    makes_room = workers[0].is_retiring and not arguments.once
    return MAKES_ROOM if is_child and makes_room else 0


def _workers(
    arguments: argparse.Namespace, registry: Registry, databases: Sequence[str]
) -> list[Worker]:
    """Return a worker for the queues that share places, and one for each that has its own."""
    places: dict[str, int] = {}
    shared: list[str] = []
    for word in arguments.queue or ["default"]:
        if "," in word:
            raise UsageError(f"--queue names one queue: repeat it, instead of {word!r}")
        queue, sign, number = word.partition("=")  # and not ":", which a name can have
        if queue in places or queue in shared:
            raise UsageError(f"--queue {queue} is given twice")
        if not sign:
            shared.append(queue)
        elif number.isascii() and number.isdigit():
            places[queue] = int(number)
        else:
            raise UsageError(f"--queue is NAME or NAME=PLACES, got {word!r}")
    if len(set(databases)) < len(databases):
        raise UsageError("a database is named twice")
    if arguments.listen_url and len(databases) > 1:
        raise UsageError("--listen-url is of one database, and does not go with several")
    groups = [([queue], number) for queue, number in places.items()]
    if shared:
        groups.insert(0, (shared, arguments.concurrency))
    workers: list[Worker] = []
    for queues, concurrency in groups:
        if concurrency < len(databases) > 1:
            number = len(databases)
            raise UsageError(f"{concurrency} places are too few for {number} databases")
        together = Places(concurrency) if len(databases) > 1 else None
        name = arguments.name
        if name and len(groups) > 1:
            name = f"{name}:{queues[0]}"
        if name and arguments.process_number is not None:
            name = f"{name}:{arguments.process_number}"
        try:
            workers += [
                Worker(
                    database,
                    registry,
                    name=name,
                    queues=queues,
                    concurrency=concurrency,
                    tick=not arguments.no_tick,
                    listen=not arguments.no_listen,
                    listen_conninfo=arguments.listen_url and named(arguments.listen_url),
                    places=together,
                    **{option: getattr(arguments, option) for option in SAME},
                )
                for database in databases
            ]
        except ValueError as error:
            raise UsageError(str(error)) from None
    return workers


def _health(arguments: argparse.Namespace) -> tuple[str, int] | None:
    """Read ``[HOST:]PORT``; each further process of a supervisor gets the next port."""
    if arguments.health is None:
        return None
    host, _, text = arguments.health.rpartition(":")
    port = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 65536
    if port > 65535:
        raise UsageError(f"--health is PORT or HOST:PORT, got {arguments.health!r}")
    last = arguments.processes - 1
    if port + last > 65535:
        raise UsageError(
            f"--health: the last of {last + 1} processes has no port {port + last}"
        )
    own = port + (arguments.process_number or 0)
    return host.strip("[]") or "127.0.0.1", own if port else 0


@asynccontextmanager
async def serve_health(host: str, port: int, workers: Sequence[Worker]) -> AsyncIterator[None]:
    """Answer requests inside the block; of port 0 at a free one, which the log tells."""
    metrics = _metrics()
    scrape: asyncio.Future[tuple[str, str]] | None = None

    async def figures(metrics: ModuleType) -> tuple[str, str]:
        # The user's own may wait for anything: neither the loop nor a second thread for them.
        nonlocal scrape
        if scrape is None or scrape.done():
            scrape = asyncio.wrap_future(begin(metrics.exposition, "rota-metrics"))
        return await asyncio.shield(scrape)

    async def answer(path: str) -> tuple[int, str, str]:
        match path.partition("?")[0]:
            case "/live":
                return 200, TEXT, "live\n"
            case "/ready":
                is_ready = any(worker.is_ready for worker in workers)
                return (200, TEXT, "ready\n") if is_ready else (503, TEXT, "not ready\n")
            case "/metrics" if metrics is not None:
                return (200, *await figures(metrics))
            case "/metrics":
                return 404, TEXT, NO_METRICS
        return 404, TEXT, "/live, /ready, /metrics\n"

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT):
                head = await reader.readuntil(b"\r\n\r\n")
                words = head.decode("latin-1").split(" ", 2)
                path = words[1] if words[0] in ("GET", "HEAD") else ""
                code, kind, text = await answer(path)
                body = text.encode()
                writer.write(
                    f"HTTP/1.1 {code} {'OK' if code == 200 else 'Unavailable'}\r\n"
                    f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                    "Connection: close\r\n\r\n".encode()
                )
                writer.write(body if words[0] != "HEAD" else b"")
                await writer.drain()
        except (
            TimeoutError,
            OSError,
            IndexError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
        ):
            pass  # it is the caller who gets no answer
        finally:
            writer.close()

    server = await asyncio.start_server(handle, host, port, limit=MAX_REQUEST)
    port = server.sockets[0].getsockname()[1]
    logger.info("health is served at %s/ready", url_of(host, port))
    try:
        yield
    finally:
        server.close()


def _metrics() -> ModuleType | None:
    try:
        return importlib.import_module("rota.contrib.prometheus")
    except ImportError:
        return None


def load_registry(spec: str) -> Registry:
    """Import ``module:name``; modules of the current directory are found too."""
    module_name, _, name = spec.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if "importlib" in frame.filename else f" ({frame.filename}:{frame.lineno})"
        kind = type(error).__name__
        message = f"cannot import {module_name}: {kind}: {error}{place}"
        hint = _import_hint(module_name, error)
        raise UsageError(message, hint) from (None if hint else error)
    if not hasattr(module, name := name or "registry"):
        there = [
            f"{module_name}:{other}"
            for other, value in vars(module).items()
            if isinstance(value, Registry)
        ]
        hint = f"Name the registry: {' or '.join(there)}" if there else None
        raise UsageError(f"{module_name} has no attribute {name}", hint)
    found = getattr(module, name)
    if not isinstance(found, Registry):
        raise UsageError(f"{module_name}:{name} is not a rota.Registry")
    return found


def _import_hint(module_name: str, error: BaseException) -> str | None:
    if "/" in module_name or module_name.endswith(".py"):
        return "Name a module, not a file, as in an import statement: shop.jobs:registry"
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    module, _, name = module_name.rpartition(".")
    if isinstance(getattr(sys.modules.get(module), name, None), Registry):
        return f"Name the registry: {module}:{name}"
    top, _, _ = module_name.partition(".")
    if missing == top:
        return f"Run it where `import {top}` works, or set PYTHONPATH"
    if missing == "django_tasks":
        return "Name a registry, --registry shop.jobs:registry; only Tasks need django-tasks"
    return None
