"""The command line: say what went wrong in one line, never with a traceback or a password."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import psycopg

from ..client.connecting import one_line
from ..client.sync_client import Client
from ..exceptions import RotaError
from .output import CommandError, connected, hint_for, hint_to_connect
from .parser import make_parser

OK, FAILED, INTERRUPTED = 0, 1, 130
LOCKED = "Nothing was done. Try again, or end that session: select pg_terminate_backend(PID)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0 done, 1 failed, 2 used wrongly."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["demo"]:
        return _demo(words[1:])
    arguments = make_parser().parse_args(words)
    arguments.words = words
    failed = getattr(arguments, "failed", FAILED)
    try:
        return int(arguments.run(arguments) or OK)
    except CommandError as error:
        return _complain(error, error.hint, error.code)
    except RotaError as error:
        return _complain(error, hint_for(error, arguments), failed)
    except (psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedTable) as error:
        return _complain(error, "Is rota installed in this database? Try: rota install", failed)
    except psycopg.errors.UndefinedFunction as error:
        return _complain(error, "Bring the database up to date with: rota install", failed)
    except psycopg.errors.LockNotAvailable:
        return _complain(CommandError(_holder(arguments)), LOCKED, failed)
    except psycopg.OperationalError as error:
        hint = error.diag.message_hint or hint_to_connect(arguments)
        return _complain(error, hint, failed)
    except psycopg.Error as error:
        return _complain(error, error.diag.message_hint, failed)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (OSError, ValueError) as error:
        return _complain(error, None, failed)
    except KeyboardInterrupt:
        return INTERRUPTED


def _holder(arguments: argparse.Namespace) -> str:
    """Say which session has locked a job, where that is to be seen."""
    message = "another session has locked this"
    if getattr(arguments, "job_id", None) is None:
        return f"{message}; see in pg_stat_activity whose transaction is the oldest"
    with suppress(psycopg.Error, RotaError), connected(arguments) as connection:
        for row in Client(connection).explain_job(arguments.job_id):
            if row.reason == "row_locked":
                return row.explanation.replace("its row", f"job {arguments.job_id}", 1)
    return message


def _complain(error: Exception, hint: str | None, code: int) -> int:
    print(f"rota: {one_line(error)}" + (f" ({hint})" if hint else ""), file=sys.stderr)
    return code


def _demo(words: list[str]) -> int:
    try:
        demo = importlib.import_module("rota.contrib.demo")
    except ImportError as error:
        hint = "Install what the demo needs: pip install './python_client[demo]'"
        return _complain(error, hint, FAILED)
    return int(demo.main(words))
