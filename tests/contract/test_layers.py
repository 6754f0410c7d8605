"""Calls go down: what the bodies of the functions say of who calls whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract import call_graph

REFERENCE = Path(__file__).resolve().parents[2] / "sql/README.md"
# By these jobs/ tells what waits that jobs come in (one or many before their rows are written,
# or after), wait in a lane, or have ended.
HOOKS = {"_enter_lanes", "_give_places", "_job_comes_in", "_jobs_came_in", "_jobs_ended"}


@pytest.fixture(scope="module")
def functions() -> dict[str, set[str]]:
    return call_graph.calls()


def test_calls_go_down_but_for_the_hooks(functions: dict[str, set[str]]) -> None:
    upward = call_graph.upward(functions, call_graph.homes())

    assert {name for _, name in upward} == HOOKS
    assert {part.split("/")[0] for part, _ in upward} == {"jobs"}
    assert {call_graph.homes()[name] for name in HOOKS} == {"waiting/hooks"}


def test_no_function_calls_itself_over_others(functions: dict[str, set[str]]) -> None:
    assert call_graph.cycles(functions) == []


def test_no_part_calls_itself_over_others(functions: dict[str, set[str]]) -> None:
    """A hook is a way up, and not what the caller is made of."""
    down = {caller: called - HOOKS for caller, called in functions.items()}

    assert call_graph.cycles(call_graph.between(down, call_graph.homes())) == []


def test_a_claim_reaches_few_functions(functions: dict[str, set[str]]) -> None:
    assert len(call_graph.reached(functions, "claim_jobs")) <= 45


def test_a_claim_reads_no_pending_checks(functions: dict[str, set[str]]) -> None:
    readers = call_graph.readers("pending_checks")

    assert "_due_checks" in readers
    assert call_graph.reached(functions, "claim_jobs") & readers == set()


def test_the_reference_prints_the_graph() -> None:
    assert f"```text\n{call_graph.text()}\n```\n" in REFERENCE.read_text()
