"""All states of the protocol, breadth first: so what is found wrong has a shortest trace.

A state is kept as some forty bytes, the same ones for states that differ in names only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from model.protocol import IDLE, NOBODY, Job, Protocol, State, Wrong


def pack(state: State) -> bytes:
    """Return the same bytes for states that differ in the names of workers or jobs only."""
    packed = _pack(state)
    if len(state.jobs) != 2:
        return packed
    swapped = state._replace(
        jobs=state.jobs[::-1],
        backup=state.backup[::-1],
        sweeper=state.sweeper if state.sweeper == NOBODY else 1 - state.sweeper,
        workers=tuple(sorted(w if w == IDLE else (1 - w[0], *w[1:]) for w in state.workers)),
    )
    return min(packed, _pack(swapped))


def _pack(state: State) -> bytes:
    rows = (*state.jobs, *state.workers, *state.backup)
    head = (state.now, state.sweeper, state.operations, state.was_restored)
    return bytes(head + tuple(number for row in rows for number in row))


def unpack(packed: bytes, jobs: int, workers: int) -> State:
    def rows(at: int, count: int) -> tuple[Job, ...]:
        return tuple(Job(*packed[at + 9 * n : at + 9 * n + 9]) for n in range(count))

    at = 4 + 9 * jobs
    end = at + 3 * workers
    held = tuple((packed[n], packed[n + 1], packed[n + 2]) for n in range(at, end, 3))
    return State(
        packed[0], packed[1], packed[2], rows(4, jobs), held,
        rows(end, jobs if len(packed) > end else 0), packed[3],
    )  # fmt: skip


@dataclass
class Explored:
    """How far it went, and the shortest way to what is wrong."""

    states: int
    depth: int
    is_complete: bool
    problem: str = ""
    trace: tuple[str, ...] = ()


def explore(
    protocol: Protocol,
    depth: int,
    show: Callable[[int, int], None] = lambda states, depth: None,
) -> Explored:
    """Go through all states that are so many events away."""
    first = pack(protocol.first())
    came_from: dict[bytes, bytes] = {first: b""}
    frontier = [first]
    for level in range(depth):
        found = []
        for packed in frontier:
            try:
                for _, state in protocol.after(unpack(packed, protocol.jobs, protocol.workers)):
                    new = pack(state)
                    if new not in came_from:
                        came_from[new] = packed
                        found.append(new)
            except Wrong as wrong:
                trace = _trace(protocol, came_from, packed)
                return Explored(len(came_from), level + 1, False, str(wrong), trace)
        show(len(came_from), level + 1)
        frontier = found
        if not frontier:
            return Explored(len(came_from), level + 1, True)
    return Explored(len(came_from), depth, False)


def _trace(protocol: Protocol, came_from: dict[bytes, bytes], packed: bytes) -> tuple[str, ...]:
    """Return what happened, from the beginning on."""
    words: list[str] = []
    while before := came_from[packed]:
        state = unpack(before, protocol.jobs, protocol.workers)
        words.append(next(word for word, to in protocol.after(state) if pack(to) == packed))
        packed = before
    return tuple(reversed(words))
