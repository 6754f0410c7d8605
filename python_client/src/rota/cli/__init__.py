"""The command line: say what went wrong in one line, never with a traceback or a password."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from typing import Any

import psycopg

from ..client.connecting import one_line
from ..client.sync_client import Client
from ..exceptions import BadScheduleError, InvalidArgumentError, RotaError, grant_remedy
from .many import run_on_many
from .output import (
    LOCKED_THIS,
    CommandError,
    PlainText,
    UsageError,
    connected,
    conninfos,
    hint_for,
    hint_to_connect,
    lock_holder,
    printable,
)
from .parser import FOR_MANY, OWN_MANY, Misuse, make_parser

OK, FAILED, INTERRUPTED = 0, 1, 130
READ_ONLY = (
    "On a standby, name the primary, or let libpq find it among several hosts with "
    "target_session_attrs=read-write. Else default_transaction_read_only is on, for the role "
    "or the database, as some providers set it when the disk is full"
)
INSTALLERS = ("install", "uninstall")
MAY_INSTALL = (
    "An installation needs CREATE on the database, an upgrade or removal the owner of the "
    "schema, and --with-roles CREATEROLE"
)
LOCKED = "Nothing was done. Try again, or end that session: "


def main(argv: Sequence[str] | None = None, again: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0 done, 1 failed, 2 used wrongly.

    *again* is what starts the same in another process, if that is not the command `rota`.
    """
    _open_standard_files()
    words = list(sys.argv[1:] if argv is None else argv)
    plain: Any = PlainText(sys.stdout)
    with redirect_stdout(plain):
        try:
            arguments, unknown = make_parser().parse_known_args(words)
            if unknown:
                arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        except Misuse as error:
            if "--json" in words:
                _complain(error, None, error.code, as_json=True)
            else:
                print(f"{error.usage}rota: {printable(str(error))}", file=sys.stderr)
            raise SystemExit(error.code) from None
        except OSError as error:  # where the help goes to
            return _unwritten(error)
        arguments.again = again or [sys.executable, "-m", "rota", *words]
        return _run(arguments, _run_on_databases)


def _open_standard_files() -> None:
    """Open those that were closed: else what is printed could go into a connection."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            # It gets the lowest number that is free.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:  # so Python starts where it was closed
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _run_on_databases(arguments: argparse.Namespace) -> int | None:
    """Run a command on each of the databases that it names."""
    named = [getattr(arguments, name, None) for name in ("database", "databases")]
    if any(named) and arguments.database_url:
        raise UsageError("-d names the only database, so it does not go with --database(s)")
    if arguments.command not in FOR_MANY:
        if any(named) and arguments.command not in OWN_MANY:
            raise UsageError("this command takes one database: -d")
        return arguments.run(arguments)  # type: ignore[no-any-return]
    several = conninfos(arguments)
    if len(several) < 2:
        arguments.database_url = several[0] if several else arguments.database_url
        return arguments.run(arguments)  # type: ignore[no-any-return]
    if getattr(arguments, "loop", False):
        raise UsageError("--loop ticks in one database; workers tick in all of theirs")
    if arguments.command == "top" and not (arguments.once or arguments.json):
        raise UsageError("use --once or --json with several databases")
    return run_on_many(arguments, several, lambda each: _run(each, each.run))


def _run(arguments: argparse.Namespace, run: Callable[[argparse.Namespace], Any]) -> int:
    """Return the exit code of a command, with what went wrong said in one line."""
    own = getattr(arguments, "failed", None)
    failed = own or FAILED
    as_json = getattr(arguments, "json", False)

    def complain(error: Exception, hint: str | None, code: int = failed) -> int:
        arguments.error = error
        return _complain(error, hint, code, as_json=as_json)

    try:
        code = int(run(arguments) or OK)
        sys.stdout.flush()  # at the end of the process nobody would say that it failed
        return code
    except CommandError as error:
        return complain(error, error.hint, own or error.code)
    except InvalidArgumentError as error:
        return complain(_naming_option(error, arguments), error.hint, own or UsageError.code)
    except RotaError as error:
        # A bad text that was given is a wrong value; one that was stored is not.
        is_given = isinstance(error, BadScheduleError) and getattr(arguments, "schedule", None)
        code = UsageError.code if is_given else FAILED
        return complain(error, hint_for(error, arguments), own or code)
    except psycopg.DataError as error:
        hint = error.diag.message_hint
        return complain(_naming_option(error, arguments), hint, own or UsageError.code)
    except psycopg.errors.InvalidSchemaName as error:
        return complain(error, "Is rota installed in this database? Try: rota install")
    except psycopg.errors.UndefinedTable as error:
        if "rota_front." in str(error):
            return complain(error, "Is this database a front? Try: rota front make")
        return complain(
            error,
            "Is rota installed in this database? Try: rota install; a front has no tables,"
            " so name the databases behind it: --databases FILE",
        )
    except (psycopg.errors.UndefinedFunction, psycopg.errors.UndefinedColumn) as error:
        maker = "rota front make" if "rota_front." in str(error) else "rota install"
        return complain(error, f"Bring the database up to date with: {maker}")
    except psycopg.errors.InvalidFunctionDefinition as error:  # from another commit
        return complain(error, "This drops the functions first: rota install --force")
    except psycopg.errors.LockNotAvailable as error:
        if hint := error.diag.message_hint:  # rota's own says more
            return complain(error, hint)
        text, remedy = _holder(arguments)
        return complain(CommandError(text), LOCKED + remedy)
    except psycopg.errors.InsufficientPrivilege as error:
        needed = MAY_INSTALL
        if arguments.command not in INSTALLERS:
            is_change = getattr(arguments, "is_change", False)
            needed = grant_remedy("act_on_jobs" if is_change else "")
        return complain(error, error.diag.message_hint or needed)
    except psycopg.errors.ReadOnlySqlTransaction as error:
        return complain(error, error.diag.message_hint or READ_ONLY)
    except psycopg.OperationalError as error:
        return complain(error, error.diag.message_hint or hint_to_connect(arguments))
    except psycopg.Error as error:
        return complain(error, error.diag.message_hint)
    except BrokenPipeError as error:
        return _unwritten(error)
    except OSError as error:
        _unwritten(error, tell=False)
        return complain(error, None)
    except UnicodeEncodeError:  # so Python keeps them, as lone surrogates
        return complain(UsageError("a value has bytes that are not UTF-8"), None, own or 2)
    except ValueError as error:
        return complain(error, None)
    except RecursionError:
        return complain(CommandError("JSON is nested too deeply for Python"), None)
    except EOFError:  # Ctrl-D where a question was asked
        return complain(CommandError("nothing was done"), None)
    except KeyboardInterrupt:
        return INTERRUPTED


def _unwritten(error: OSError, *, tell: bool = True) -> int:
    """Give up what cannot be written; that nobody reads on is no failure."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return OK
    return _complain(error, None, FAILED) if tell else FAILED


def _naming_option(error: Exception, arguments: argparse.Namespace) -> UsageError:
    """Say by its option which value is wrong, where the database says which argument is."""
    message = one_line(error)
    argument, _, rest = message.partition(" ")
    if argument.startswith("arguments.") and getattr(arguments, "to", None) is not None:
        return UsageError(f"--to {rest}")
    name = argument.rpartition(".")[2]
    times: list[str] = []
    for action in arguments.parser._actions:
        option = max(action.option_strings, key=len, default=action.metavar or action.dest)
        value = getattr(arguments, action.dest, None)
        if name in (action.dest, option.lstrip("-").replace("-", "_")) and value is not None:
            return UsageError(f"{option} {rest}")
        if isinstance(value, str) and f'"{value}"' in message:
            return UsageError(f"{option}: {message}")
        if action.metavar in ("AGE", "INTERVAL", "TIME") and value is not None:
            times.append(option)
    # The time that is none has been computed, from one of these.
    is_time = argument == "timestamp" and times
    return UsageError(f"{' or '.join(times)}: {message}" if is_time else message)


def _holder(arguments: argparse.Namespace) -> tuple[str, str]:
    """Say which session has locked a job, where that is to be seen, and what ends it."""
    remedy = "select pg_terminate_backend(PID)"
    job_id = getattr(arguments, "job_id", None)
    with suppress(psycopg.Error), connected(arguments) as connection:
        if job_id is not None:
            with suppress(psycopg.Error, RotaError):
                for row in Client(connection).explain_job(job_id):
                    if row.reason == "row_locked":
                        text = row.explanation.replace("its row", f"job {job_id}", 1)
                        return text, row.remedy or remedy
        return lock_holder(connection), remedy
    return LOCKED_THIS, remedy


def _complain(error: Exception, hint: str | None, code: int, *, as_json: bool = False) -> int:
    if as_json:
        said = {"error": one_line(error), "hint": hint, "exit_code": code}
        print(json.dumps(said), file=sys.stderr)
        return code
    said_hint = f" ({printable(hint)})" if hint else ""
    print(f"rota: {printable(one_line(error))}{said_hint}", file=sys.stderr)
    return code
