"""The command ``rota worker``."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import traceback

from ..client.connecting import named
from ..registry import Registry
from ..worker.worker import Worker
from .output import UsageError, conninfo, set_up_log

LEFT_HANDLERS = 3


def work(arguments: argparse.Namespace) -> int:
    """Run a worker until it is told to stop."""
    set_up_log(arguments.log_format, arguments.log_level)
    registry = load_registry(arguments.registry)
    try:
        worker = Worker(
            conninfo(arguments),
            registry,
            name=arguments.name,
            queues=arguments.queue or ["default"],
            concurrency=arguments.concurrency,
            batch=arguments.batch,
            lease=arguments.lease,
            poll_interval=arguments.poll_interval,
            tick=not arguments.no_tick,
            tick_interval=arguments.tick_interval,
            grace_period=arguments.grace_period,
            listen=not arguments.no_listen,
            listen_conninfo=arguments.listen_url and named(arguments.listen_url),
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    worker.run(drain=arguments.drain, once=arguments.once)
    if worker.has_threads:
        # A handler ignores that its job was given back: end it together with the process,
        # without a clean-up of the interpreter that it could disturb.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(LEFT_HANDLERS)
    return 0


def load_registry(spec: str) -> Registry:
    """Import ``module:name``; modules of the current directory are found too."""
    module_name, _, name = spec.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if "importlib" in frame.filename else f" ({frame.filename}:{frame.lineno})"
        kind = type(error).__name__
        message = f"cannot import {module_name}: {kind}: {error}{place}"
        raise UsageError(message, _import_hint(module_name, error)) from None
    if not hasattr(module, name := name or "registry"):
        raise UsageError(f"{module_name} has no attribute {name}")
    found = getattr(module, name)
    if not isinstance(found, Registry):
        raise UsageError(f"{module_name}:{name} is not a rota.Registry")
    return found


def _import_hint(module_name: str, error: Exception) -> str | None:
    top, _, _ = module_name.partition(".")
    if isinstance(error, ModuleNotFoundError) and error.name == top:
        return f"Run it where `import {top}` works, or set PYTHONPATH"
    return None
