"""From lines to operations: each call once, with all that is known of its end.

An operation is ``ok`` (it happened), ``refused`` or ``undone`` (it did not: an error, a
rollback, or a transaction whose commit was never sent) or ``unknown``: either, and nobody was
told.  Only open calls and transactions are held, so a file may be as long as it likes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Operation(NamedTuple):
    """One call; *ended* is the commit's answer where it was in a transaction."""

    who: str
    function: str
    arguments: dict[str, Any]
    began: int
    ended: int | None
    outcome: str
    rows: list[Any] | None
    error: str


@dataclass(slots=True)
class _Transaction:
    calls: dict[int, Operation] = field(default_factory=dict)
    is_sent: bool = False


class Reader:
    """Reads the files of one process after the other; *marks* and *skew* fill meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.marks: list[dict[str, Any]] = []
        self.dumps: list[dict[str, Any]] = []
        self.skew = 0
        """Microseconds to add to a time of the calls to get one of the database."""
        self.documented: dict[str, set[str]] = {}
        self._folder = folder

    def operations(self) -> Iterator[Operation]:
        """Yield every call of every process."""
        for path in sorted(self._folder.glob("calls-*.ndjson")):
            yield from self._process(path)

    def rows(self) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Yield every row of every dump with the number of the dump and the table."""
        for path in sorted(self._folder.glob("rows-*.ndjson")):
            number = int(path.stem.partition("-")[2])
            with path.open(encoding="utf-8") as file:
                for text in file:
                    line = json.loads(text)
                    if "table" in line:
                        yield number, line["table"], line["row"]
                    elif "documented" in line:
                        self.documented[line["function"]] = set(line["documented"])
                    else:
                        self._note_clocks(line)
                        self.dumps.append(line)

    def _process(self, path: Path) -> Iterator[Operation]:
        who = path.stem.split("-")[1]
        calls: dict[int, dict[str, Any]] = {}
        transactions: dict[int, _Transaction] = {}
        for line in _lines(path):
            if "began" in line:
                calls[line["call"]] = line
            elif "call" in line:
                call = calls.pop(line["call"])
                operation = _operation(who, call, line)
                if number := call.get("transaction"):
                    transaction = transactions.setdefault(number, _Transaction())
                    transaction.calls[line["call"]] = operation
                else:
                    yield operation
            elif "transaction" in line:
                number = line["transaction"]
                if "commits" in line:
                    transactions.setdefault(number, _Transaction()).is_sent = True
                elif number in transactions:
                    over = transactions.pop(number)
                    yield from _end(over, line["outcome"], line["ended"])
            elif "undone" in line:
                yield from _undo(transactions, line["undone"])
            else:
                self._note_clocks(line)
                if "mark" in line:
                    self.marks.append(line)
        for call in calls.values():
            number = call.get("transaction")
            is_over = number and not (number in transactions and transactions[number].is_sent)
            answer: dict[str, Any] = {"ended": None, "lost": ""}
            operation = _operation(who, call, answer)
            yield operation._replace(outcome="undone") if is_over else operation
        for transaction in transactions.values():
            outcome = "lost" if transaction.is_sent else "rollback"
            yield from _end(transaction, outcome, None)

    def _note_clocks(self, line: dict[str, Any]) -> None:
        self.skew = line["wall"] - line["at"] // 1000


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    loads = json.loads
    with path.open(encoding="utf-8") as file:
        for text in file:
            if text.endswith("\n"):  # the machine may have died within the last
                yield loads(text)


def _operation(who: str, call: dict[str, Any], answer: dict[str, Any]) -> Operation:
    rows = answer.get("rows")
    error = answer.get("error", "")
    outcome = "ok" if rows is not None else "refused" if error else "unknown"
    return Operation(
        who,
        call["function"],
        call["arguments"],
        call["began"],
        answer["ended"],
        outcome,
        rows,
        error,
    )


def _end(transaction: _Transaction, outcome: str, ended: int | None) -> Iterator[Operation]:
    """Yield the calls of a transaction as its end has made them."""
    for operation in transaction.calls.values():
        if operation.outcome == "refused":
            yield operation
        elif outcome == "commit":
            yield operation._replace(ended=ended)
        else:
            known = "unknown" if outcome == "lost" else "undone"
            yield operation._replace(outcome=known, ended=ended)


def _undo(transactions: dict[int, _Transaction], numbers: list[int]) -> Iterator[Operation]:
    for transaction in transactions.values():
        for number in numbers:
            if operation := transaction.calls.pop(number, None):
                is_refused = operation.outcome == "refused"
                yield operation if is_refused else operation._replace(outcome="undone")
