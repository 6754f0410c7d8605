"""What no call may do, the calls that did, and how they are made small."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row

from fuzz import hostile, judge
from fuzz.calls import Call
from fuzz.shrink import smaller_values

LONGEST_MS = 100.0
LONGEST_MESSAGE = 1000
# Who may refuse an argument after it has written; the statement undoes that as any error does.
LATE = {
    "finish_and_claim": "",  # is three calls in one, and the last of them refuses
    "enqueue": "blocks on_conflict",  # depends on the jobs that were found
    "enqueue_many": "jobs on_conflict",
    "start_pipeline": "blocks",
    "retry_job": "job_id",  # has lost its payload
    "retry_with_dependants": "job_id",
    "set_limit": "burst",  # with what was set before
}
WORLD = "fuzz_world"
_seen: set[Key] = set()  # by this process
Key = tuple[str, str, str]


@dataclass
class Finding:
    """A call that did what no call may do, after others whose effects were kept."""

    problem: str
    calls: list[Call]
    begin: str
    message: str = ""
    milliseconds: float = 0
    count: int = 1

    @property
    def key(self) -> Key:
        """What makes two findings one."""
        words = re.sub(r"'.*'|\".*\"|[\d.-]+|got .*", "~", self.message, flags=re.DOTALL)[:60]
        if " RT0" in self.problem:
            words = ""
        elif "refuses" in self.problem:
            words = re.split(r"\W", self.message, maxsplit=1)[0]
        elif self.problem == "slow":
            words = self.hurt
        return self.calls[-1].function.name, self.problem, words

    @property
    def hurt(self) -> str:
        """The arguments that are meant to hurt and were not left out."""
        call = self.calls[-1]
        return ", ".join(name for name in call.hostile if name in call.arguments) or "nothing"

    def __str__(self) -> str:
        *before, call = self.calls
        told = f"{call.function.name}({self.hurt}): {self.problem}, {self.count} times"
        told += (
            f" ({self.milliseconds:.0f} ms)" if self.problem == "slow" else f": {self.message}"
        )
        begin = [] if self.begin == "begin" else [f"{self.begin};"]
        return "\n  ".join([told, *begin, *(one.line() for one in before), call.line()])


class Arena:
    """A connection to a world, and what its functions may raise."""

    def __init__(self, url: str, only: str = "", patience: float = 1) -> None:
        self._url, self._patience = url, patience
        self.connect()
        self.functions = judge.functions(self.db, only)
        for function in self.functions:
            judge.add_caller(self.db, function)
        self.jobs: dict[str, tuple[int, int]] = {
            label: (job_id, lease_token)
            for label, job_id, lease_token in self.db.execute(
                "select label, job_id, lease_token from rota_fuzz.world"
            )
        }
        self._documented = {
            function.name: set(
                re.findall(r"\b(?:RT\d{3}|22023|0A000|2D000)\b", function.comment)
            )
            for function in self.functions
        }
        for codes in self._documented.values():
            if "RT001" in codes:  # a job that is not here may be in another database
                codes.add("RT016")

    def connect(self) -> None:
        """Connect, again if the server has gone away."""
        self.db = psycopg.connect(self._url, autocommit=True, row_factory=namedtuple_row)
        self.db.execute("set statement_timeout = '20s'; set client_min_messages = error")

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.db.close()

    def run(self, calls: Sequence[Call], begin: str) -> list[Any]:
        """Make the calls in one transaction that is rolled back; return the verdicts."""
        self.db.execute(begin)
        try:
            cursor = self.db.execute(";".join(call.judged() for call in calls))
            verdicts = [cursor.fetchone()]
            while cursor.nextset():
                verdicts.append(cursor.fetchone())
        finally:
            if not self.db.closed:
                self.db.execute("rollback; select pg_advisory_unlock_all()")
        return verdicts

    def problem(self, call: Call, verdict: Any) -> str | None:
        """Return what is wrong with the outcome of a call."""
        function = call.function
        if verdict.step == "after" and verdict.state != "00000":
            return f"what it did stops others later with {verdict.state}"
        if verdict.milliseconds > LONGEST_MS * self._patience:
            return "slow"
        if verdict.state == "00000":
            return None
        if len(verdict.message) > LONGEST_MESSAGE:
            return "tells what it was given whole"
        if verdict.state not in self._documented[function.name] | {"22023"}:
            return f"raises {verdict.state}"
        if verdict.state == "22023" and not verdict.message.startswith(
            tuple(f"{name}{sign}" for name in function.names for sign in " [.'")
        ):
            return "refuses without naming an argument"
        if verdict.state == "22023" and verdict.rows_written:
            late = LATE.get(function.name, "-")
            if late and re.split(r"\W", verdict.message, maxsplit=1)[0] not in late.split():
                return "writes before it refuses"
        if verdict.locks_left:
            return f"leaves a lock of the session behind at {verdict.state}"
        return None

    def problem_of_last(self, calls: Sequence[Call], begin: str) -> tuple[str | None, Any]:
        """Make the calls again and return what is wrong with the last; slow means each time."""
        for _ in range(3):
            verdict = self.run(calls, begin)[-1]
            problem = self.problem(calls[-1], verdict)
            if problem != "slow":
                break
        return problem, verdict

    def shrunk(self, finding: Finding) -> Finding | None:
        """Return the smallest form that shows the same; None if it does not come again."""
        problem, verdict = self.problem_of_last(finding.calls, finding.begin)
        if problem != finding.problem:
            return None
        for calls, begin in smaller(finding):
            problem, _ = self.problem_of_last(calls, begin)
            if problem == finding.problem:
                smallest = self.shrunk(replace(finding, calls=calls, begin=begin))
                if smallest:
                    return smallest
        return replace(
            finding, message=(verdict.message or "")[:300], milliseconds=verdict.milliseconds
        )


def smaller(finding: Finding) -> Iterator[tuple[list[Call], str]]:
    """Yield forms of a finding that lack one thing."""
    *before, call = finding.calls
    if before:
        yield [call], finding.begin
        half = len(before) // 2
        if half:
            yield [*before[half:], call], finding.begin
            yield [*before[:half], call], finding.begin
        if len(before) < 6:
            for number in range(len(before)):
                yield [*before[:number], *before[number + 1 :], call], finding.begin
    if finding.begin != "begin":
        yield [*before, call], "begin"
    for name in call.function.names[call.function.required :]:
        if name in call.arguments:
            yield [*before, call.without(name)], finding.begin
    for name, value in call.arguments.items():
        for less in smaller_values(value):
            yield [*before, call.having(name, less)], finding.begin


def refused_values(db: psycopg.Connection[Any]) -> frozenset[str]:
    """Return the values that the server does not read, of whatever version it is."""
    refused = set()
    for value in {value for pool in hostile.BY_TYPE.values() for value in pool}:
        try:
            db.execute(f"select {value}")
        except (psycopg.DataError, psycopg.errors.StatementTooComplex):
            refused.add(value)
    return frozenset(refused)
