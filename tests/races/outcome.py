"""What two operations came to, in a form in which two endings can be compared.

New jobs get their ids in the order in which they are made, which tells nothing.  So they are
named anew: of all ways to number them the one is taken that gives the least text.

Two sessions that do not see each other's jobs may give out the same place of a fair queue, or
places of another order than one after the other: nobody holds a row for them.  So only whether
a job has a place of its own is compared; the storm of fairness judges which.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

# What a run that follows a job has from it; else it is that of the call.
SETTINGS = re.compile(r'"(?:lease_token|max_attempts)": \d+, ')
# Columns that hold the id of a job; what ids new jobs get depends on who was first.
ID_COLUMNS = {"id", "job_id", "last_job_id", "parent_id"}


@dataclass(frozen=True)
class Outcome:
    """What A and B were answered, and what the tables hold, in a form that can be compared."""

    a: str
    b: str
    tables: str

    def __str__(self) -> str:
        return f"A: {self.a}\nB: {self.b}\n{self.tables}"

    def without_settings(self) -> Outcome:
        """Return it without what a new job may have from one that it follows."""
        lines = (
            SETTINGS.sub("", line) if '"id": "new job' in line else line
            for line in self.tables.splitlines()
        )
        return replace(self, tables="\n".join(lines))

    def tell_from(self, other: Outcome) -> str:
        """Return the lines that only one of the two has."""
        mine, theirs = str(self).splitlines(), str(other).splitlines()
        lines = [f"+ {line}" for line in mine if line not in theirs]
        return "\n".join([*lines, *(f"- {line}" for line in theirs if line not in mine)])


def comparable(
    answers: dict[str, Any], tables: dict[str, list[Any]], known: list[int]
) -> Outcome:
    """Call new jobs by names that do not depend on which was first to get its id."""
    new = sorted(_ids([*answers.values(), *tables.values()]) - {*known})
    forms = []
    for order in permutations(new):
        names = {job_id: f"new job {number}" for number, job_id in enumerate(order, 1)}
        told = {who: text(_rename(answer, names)) for who, answer in answers.items()}
        lines = (
            f"{table}: {text(row)}" for table in tables for row in _rename(tables[table], names)
        )
        forms.append((told["a"], told["b"], "\n".join(sorted(lines))))
    return Outcome(*min(forms))


def text(value: Any) -> str:
    """Return a value as text, without the columns that have none."""
    if isinstance(value, dict):
        value = {key: each for key, each in value.items() if each is not None}
    return json.dumps(value, sort_keys=True, default=str)


def _ids(value: Any) -> set[int]:
    if isinstance(value, list):
        return set().union(*map(_ids, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    own = {value[name] for name in ID_COLUMNS & value.keys() if value[name] is not None}
    return own | _ids(list(value.values()))


def _rename(value: Any, names: dict[int, str]) -> Any:
    if isinstance(value, list):
        return [_rename(each, names) for each in value]
    if not isinstance(value, dict):
        return value
    named = {
        key: names.get(each, each) if key in ID_COLUMNS else _rename(each, names)
        for key, each in value.items()
    }
    if named.get("own_place") is not None:
        named["own_place"] = "given"
    return named
