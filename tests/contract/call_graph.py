"""Who calls whom in the SQL, read from the bodies of the functions.

    python tests/contract/call_graph.py            the graph as the reference prints it

A call is the name of one of our functions before a parenthesis, where it is code and not a
comment.  Names in strings are not calls, but for those of triggers, which are made of code.
"""

# ruff: noqa: T201 -- a command talks to its user

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

SQL = Path(__file__).resolve().parents[2] / "sql"
FOLDERS = ("base", "jobs", "waiting", "schedules", "maintenance", "operations", "access")
"""From the bottom up: a function calls its own folder and those before it."""
FUNCTION = re.compile(
    r"^create or replace (?:function|procedure) rota\.(\w+)\((.*?)^(?:end )?\$\$;$",
    re.DOTALL | re.MULTILINE,
)
HIDDEN = re.compile(r"'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/", re.DOTALL)
CALL = re.compile(r"\brota\.(\w+)\(")

Graph = Mapping[str, set[str]]


def homes() -> dict[str, str]:
    """Return by function the part that it stands in, such as ``jobs/claim``."""
    return {name: part for part, name, _ in _functions()}


def calls() -> dict[str, set[str]]:
    """Return by function those that it calls."""
    known = homes()
    return {
        name: {found for found in CALL.findall(HIDDEN.sub(" ", body)) if found in known}
        for _, name, body in _functions()
    }


def reached(graph: Graph, start: str) -> set[str]:
    """Return all that *start* can call, itself left out unless it calls itself."""
    seen: set[str] = set()
    waiting = [*graph[start]]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


def cycles(graph: Graph) -> list[list[str]]:
    """Return the groups of nodes that reach each other; one that calls itself is none."""
    reach = {name: reached(graph, name) for name in graph}
    groups = {
        tuple(sorted({name} | {other for other in reach[name] if name in reach[other]}))
        for name in graph
    }
    return sorted([*group] for group in groups if len(group) > 1)


def between(functions: Graph, where: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the graph of the parts or folders that the functions stand in."""
    graph: dict[str, set[str]] = {place: set() for place in where.values()}
    for caller, called in functions.items():
        graph[where[caller]] |= {where[name] for name in called} - {where[caller]}
    return graph


def upward(functions: Graph, where: Mapping[str, str]) -> set[tuple[str, str]]:
    """Return the calls into a folder above the caller's own."""

    def height(name: str) -> int:
        return FOLDERS.index(where[name].split("/")[0])

    return {
        (where[caller], name)
        for caller, called in functions.items()
        for name in called
        if height(name) > height(caller)
    }


def readers(table: str) -> set[str]:
    """Return the functions that select from a table."""
    read = re.compile(rf"\b(?:from|join) rota\.{table}\b")
    return {name for _, name, body in _functions() if read.search(HIDDEN.sub(" ", body))}


def text() -> str:
    """Return the graph as lines: of each part the parts that it calls."""
    where = homes()
    graph = between(calls(), where)
    lines = []
    for folder in FOLDERS:
        for part in sorted(graph):
            if part.startswith(f"{folder}/"):
                lines.append(f"{part}: {_by_folder(graph[part])}".rstrip(": "))
    return "\n".join(lines)


def _by_folder(parts: Iterable[str]) -> str:
    names: dict[str, list[str]] = defaultdict(list)
    for part in sorted(parts):
        folder, name = part.split("/")
        names[folder].append(name)
    return "; ".join(
        f"{folder}/{{{', '.join(names[folder])}}}"
        if len(names[folder]) > 1
        else f"{folder}/{names[folder][0]}"
        for folder in FOLDERS
        if folder in names
    )


def _functions() -> list[tuple[str, str, str]]:
    return [
        (path.relative_to(SQL).with_suffix("").as_posix(), name, body)
        for path in sorted(SQL.glob("*/*.sql"))
        if path.parent.name in FOLDERS
        for name, body in FUNCTION.findall(path.read_text())
    ]


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "problems":
        where, graph = homes(), calls()
        print("upward:", *sorted(upward(graph, where)), sep="\n  ")
        print("cycles of functions:", *cycles(graph), sep="\n  ")
        print("cycles of parts:", *cycles(between(graph, where)), sep="\n  ")
        print("claim_jobs reaches", len(reached(graph, "claim_jobs")))
    else:
        print(text())
