"""One command on many databases: it runs on each separately, and an error names its database.

A command that only reads queries all at once, so that databases that do not answer cost their
time limit once; it prints the answers in the order of the databases.  A command that acts, and
may ask for a confirmation, first connects to all at once, and then acts on those that it has
reached, one after the other.

Job ids are looked up in all databases at once; the answer of the database whose number an id
contains is enough.
"""

from __future__ import annotations

import argparse
import io
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import psycopg

from ..client.connecting import begin, connect, name_of, one_line
from ..client.sync_client import Client
from ..exceptions import JobNotFoundError, RotaError
from .databases import number_of
from .output import CommandError, InFront, UnknownOutcomeError, guarded, lock_holder, print_json

FAILED = 1
ACTS = {
    *("retry", "cancel", "discard", "reschedule", "priority", "move", "purge", "erase"),
    *("pause", "resume", "import", "remove", "enable", "disable"),
}
"""Commands that act on one database after the other."""
LONGEST = 60.0
"""How many seconds a command waits for a database that has stopped in an answer."""
Run = Callable[[argparse.Namespace], int]


@dataclass
class Answer:
    """What one database has come to; *text* is None where the terminal has it already."""

    name: str
    code: int
    text: str | None = None
    complaints: str = ""
    error: Exception | None = None

    @property
    def verdict(self) -> str:
        """What has to be said beside the name."""
        if isinstance(self.error, UnknownOutcomeError):
            return ": outcome unknown"
        if isinstance(self.error, psycopg.OperationalError):
            return ": no answer"
        return ": failed" if self.error else ""


def run_on_many(arguments: argparse.Namespace, databases: Sequence[str], run: Run) -> int:
    """Run a command on each of several databases; return 1 if it failed on any, or its code."""
    job_ids = _job_ids(arguments)
    chosen = _places_of(job_ids, databases) if job_ids else {each: [] for each in databases}
    each_one = [_for_one(arguments, *item) for item in chosen.items()]
    answers: list[Answer] = []
    numbers: dict[str, Future[tuple[int | None, str]]] = {}
    deadline = time.monotonic() + LONGEST
    if arguments.command == "doctor":  # no database knows of the others
        numbers = {each: begin(partial(number_of, each)) for each in databases}
    as_json = getattr(arguments, "json", False)
    acts = arguments.command in ACTS
    for answer in (_one_by_one if acts else _at_once)(each_one, run):
        answers.append(answer)
        if not as_json and answer.text is not None:
            print(f"== {answer.name}{answer.verdict}")
            sys.stdout.write(answer.text)
        sys.stdout.flush()
        sys.stderr.write(answer.complaints)
    if as_json:
        print_json([_as_json(answer) for answer in answers])  # one document
    _tell_failures(answers)
    there = [
        each for each, answer in zip(numbers, answers, strict=False) if answer.error is None
    ]
    wait([numbers[each] for each in there], max(0, deadline - time.monotonic()))
    silent = [each for each in there if not numbers[each].done()]
    for each in silent:
        print(f"rota: {name_of(each)} does not tell its number", file=sys.stderr)
    told = {each: numbers[each].result()[0] for each in there if each not in silent}
    is_bad = _tell_same_numbers(told) or bool(silent)
    codes = [answer.code for answer in answers] + [FAILED] * is_bad
    return max(codes, default=0)


def _for_one(
    arguments: argparse.Namespace, database: str, job_ids: list[int]
) -> argparse.Namespace:
    own = argparse.Namespace(**vars(arguments))
    own.database_url, own.error = database, None
    if job_ids and hasattr(arguments, "job_ids"):
        own.job_ids = job_ids
    elif job_ids:
        own.job_id = job_ids[0]
    return own


def _at_once(each_one: list[argparse.Namespace], run: Run) -> Iterator[Answer]:
    """Return the answers in the order of the databases, each as soon as it is there."""
    written: Any = Divided(sys.stdout)
    complained: Any = Divided(sys.stderr)
    with redirect_stdout(written), redirect_stderr(complained):

        def ask(arguments: argparse.Namespace) -> Answer:
            code = run(arguments)
            return Answer(
                name_of(arguments.database_url), code, written.taken(), complained.taken(),
                arguments.error,
            )  # fmt: skip

        deadline = time.monotonic() + LONGEST
        for each, answer in [(each, begin(partial(ask, each))) for each in each_one]:
            try:
                yield answer.result(max(0, deadline - time.monotonic()))
            except TimeoutError:
                silence = psycopg.OperationalError(f"no answer for {LONGEST:.0f} s")
                print(f"rota: {silence}", file=sys.stderr)
                yield Answer(name_of(each.database_url), FAILED, "", error=silence)


def _one_by_one(each_one: list[argparse.Namespace], run: Run) -> Iterator[Answer]:
    """Run it on those that can be reached; it may ask, so what it says is not kept back."""
    reached = _reach([each.database_url for each in each_one])
    for each in each_one:
        name, error = name_of(each.database_url), reached[each.database_url]
        each.patience = LONGEST
        if error is not None:

            def refuse(_: argparse.Namespace, error: Exception = error) -> int:
                raise error

            each.run = refuse
        if getattr(each, "json", False):
            with redirect_stdout(io.StringIO()) as written:
                code = run(each)
            yield Answer(name, code, written.getvalue(), error=each.error)
            continue
        print(f"== {name}{Answer(name, 0, error=error).verdict}")
        sys.stdout.flush()
        code = run(each)
        answer = Answer(name, code, error=each.error)
        if error is None and answer.verdict:
            print(f"== {name}{answer.verdict}")
        yield answer


def _reach(databases: Sequence[str]) -> dict[str, Exception | None]:
    """Return for each database why it cannot be reached, or None."""

    def reach(database: str) -> Exception | None:
        try:
            connect(database, "rota cli").close()
        except psycopg.OperationalError as error:
            return error
        return None

    waiting = {each: begin(partial(reach, each)) for each in databases}
    return {database: each.result() for database, each in waiting.items()}


class Divided(InFront):
    """Keeps what each thread writes, until it takes it; what its maker writes goes on."""

    def __init__(self, raw: TextIO) -> None:
        super().__init__(raw)
        self._maker = threading.get_ident()
        self._own = threading.local()

    def write(self, text: str) -> int:
        """Keep it, or pass it on."""
        if threading.get_ident() == self._maker:
            return self.raw.write(text)
        self._own.text = getattr(self._own, "text", "") + text
        return len(text)

    def taken(self) -> str:
        """Return what this thread has written."""
        text: str = getattr(self._own, "text", "")
        self._own.text = ""
        return text


def _as_json(answer: Answer) -> dict[str, Any]:
    text = answer.text or ""
    try:
        said: object = json.loads(text)
    except ValueError:
        said = text or None
    told: dict[str, Any] = {
        "database": answer.name,
        "exit_code": answer.code,
        "answer": said,
        "error": one_line(answer.error) if answer.error else None,
    }
    if isinstance(answer.error, UnknownOutcomeError):
        told["outcome"] = "unknown"
    return told


def _tell_failures(answers: list[Answer]) -> None:
    """Say which databases are missing in what was told, and where it failed."""
    if len(answers) < 2:
        return
    for verdict, told in (
        (": no answer", "incomplete: no answer from"),
        (": outcome unknown", "outcome unknown on"),
        (": failed", "failed on"),
        ("", "exit status other than 0 on"),
    ):
        names = [each.name for each in answers if each.code and each.verdict == verdict]
        if names:
            which = f"{len(names)} of {len(answers)} databases: {', '.join(names)}"
            print(f"rota: {told} {which}", file=sys.stderr)


def _tell_same_numbers(numbers: dict[str, int | None]) -> bool:
    """Say which databases have one number; return whether there are any."""
    names: dict[int, list[str]] = {}
    for database, number in numbers.items():
        if number is not None:
            names.setdefault(number, []).append(name_of(database))
    same = [(number, each) for number, each in names.items() if len(each) > 1]
    for number, each in same:
        print(
            f"rota: {' and '.join(each)} have the same number {number}: give each its own with"
            " set_database_number(), or name only one if the other is its standby or copy",
            file=sys.stderr,
        )
    return bool(same)


def _job_ids(arguments: argparse.Namespace) -> list[int]:
    if (job_id := getattr(arguments, "job_id", None)) is not None:
        return [job_id]
    return list(getattr(arguments, "job_ids", None) or [])


@dataclass
class _Found:
    """Which of some jobs a database has, and its number; or why it does not say."""

    database: str
    number: int | None = None
    job_ids: Sequence[int] = ()
    problem: str | None = None


def _places_of(job_ids: list[int], databases: Sequence[str]) -> dict[str, list[int]]:
    """Return in which databases these jobs are; an id in none, or in two, is an error.

    All are asked at once, and none is waited for once each job was found where its number is.
    """
    homes: dict[int | None, str] = {}
    found: dict[int, list[str]] = {job_id: [] for job_id in job_ids}
    others: dict[int, list[str]] = {job_id: [] for job_id in job_ids}
    silent: list[str] = []
    answers: queue.SimpleQueue[_Found] = queue.SimpleQueue()
    for database in databases:
        begin(lambda database=database: answers.put(_look_for(job_ids, database)))  # type: ignore[misc]
    deadline = time.monotonic() + LONGEST
    for _ in databases:
        try:
            there = answers.get(timeout=max(0, deadline - time.monotonic()))
        except queue.Empty:
            silent.append(f"others (no answer for {LONGEST:.0f} s)")
            break
        if there.problem:
            silent.append(f"{name_of(there.database)} ({there.problem})")
        homes[there.number] = there.database
        for job_id in there.job_ids:
            at = found if job_id & 1023 == there.number else others
            at[job_id].append(there.database)
        if all(found.values()):
            break
    places: dict[str, list[int]] = {}
    for job_id in job_ids:
        where = found[job_id] or others[job_id]
        if len(where) != 1:
            if not where and job_id & 1023 in homes:
                _refuse_if_moved(job_id, homes[job_id & 1023])
            what = "is in more than one of the databases"
            if not where:
                what = f"is in none of the databases{' that answered' if silent else ''}"
            hint = f"Could not query {', '.join(silent)}" if silent else None
            raise CommandError(f"job {job_id} {what}", hint)
        places.setdefault(where[0], []).append(job_id)
    return places


def _refuse_if_moved(job_id: int, database: str) -> None:
    """Raise what the database says of a job that has left it, or is on its way."""
    with suppress(JobNotFoundError, psycopg.Error), connect(database, "rota cli") as connection:
        Client(connection).explain_job(job_id)


def _look_for(job_ids: list[int], database: str) -> _Found:
    try:
        with connect(database, "rota") as connection:
            try:
                with guarded(connection):
                    number = Client(connection).database_number()
                    there = connection.execute(
                        "select id from rota.job_runs where id = any(%s)", (job_ids,)
                    ).fetchall()
            except psycopg.errors.LockNotAvailable:
                return _Found(database, problem=lock_holder(connection))
    except (psycopg.Error, RotaError) as error:
        return _Found(database, problem=one_line(error))
    return _Found(database, number, [job_id for (job_id,) in there])
