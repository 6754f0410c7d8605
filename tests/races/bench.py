"""Two operations at once, with one of them stopped at each of its statements.

A begins its operation and is stopped before one of the statements inside it (instrument.py).
B does the whole of its own, or waits for a lock that A holds.  Then A goes on and commits,
then B ends.  What both were answered and all that the tables hold must be as if one had been
called after the other, in either order; what that is, is found by really calling them so.

Only what locks with `skip locked` has one more way: where the other holds the row it may
answer that it found nothing, and then must have done nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psycopg

from races.game import Game
from races.harness import Pending
from races.instrument import ARM, DISARM, GATE
from races.outcome import Outcome, text
from races.stage import Stage


@dataclass
class Run:
    """One interleaving that was played."""

    state: str
    first: str
    second: str
    place: str
    problems: list[str]

    def __str__(self) -> str:
        return f"{self.state}: A {self.first}, B {self.second} while A is at [{self.place}]"


class Bench(Stage):
    """Plays operations at once, and holds the outcome against that of one after the other."""

    def __init__(
        self, connect: Callable[[], psycopg.Connection[Any]], game: Game, seed: int = 0
    ) -> None:
        super().__init__(connect, game)
        self.runs = 0
        self._game, self._seed = game, seed
        self._places: dict[tuple[str, str], list[str]] = {}
        self._in_turn: dict[tuple[str, ...], Outcome] = {}

    def forget(self) -> None:
        """Forget what operations do in turn, because their functions have changed."""
        self._in_turn.clear()

    def play_pair(self, state: str, first: str, second: str) -> Iterator[Run]:
        """Play the pair with A stopped before each of its statements, and at its end."""
        places = self.find_places(state, first)
        stops = [*enumerate(places, 1)]
        if len(stops) > self._game.max_stops:
            chance = random.Random(f"{self._seed} {state} {first} {second}")
            stops = sorted(chance.sample(stops, self._game.max_stops))
        if first not in self._game.outside:
            stops += [(0, "commit"), (0, "rollback")]
        for number, place in stops:
            try:
                run = self._play(state, first, second, place, number)
                if run:
                    yield run
            except (AssertionError, TimeoutError) as error:
                yield Run(state, first, second, place, [str(error) or "it does not end"])
                self.begin_anew()

    def find_places(self, state: str, name: str) -> list[str]:
        """Return the places that the operation comes by in that state."""
        if (state, name) not in self._places:
            self.restore(state)
            places: list[str] = []
            connection = self.a.connection

            def note(notice: psycopg.errors.Diagnostic) -> None:
                if notice.severity_nonlocalized == "NOTICE":
                    places.append(notice.message_primary or "")

            connection.add_notice_handler(note)
            connection.execute(ARM, [0])
            if name not in self._game.outside:
                connection.execute("begin")
            self.answer(name, lambda: self.do(self.a, state, name))
            connection.execute("rollback")
            connection.execute(DISARM)
            connection.remove_notice_handler(note)
            self._places[state, name] = places
        return self._places[state, name]

    def play_in_turn(self, state: str, *order: tuple[str, str]) -> Outcome:
        """Call operations one after the other, each given with who calls it.

        That is a or b, whose answers are those of all their calls; a or b before that, which
        nobody hears of; a or b while somebody holds all jobs and changes none; or a tick.
        """
        key = (state, *(f"{who} {name}" for who, name in order))
        if key not in self._in_turn:
            self.restore(state)
            answers: dict[str, Any] = {"a": "nothing", "b": "nothing"}
            for who, name in order:
                session = {"a": self.a, "b": self.b}.get(who[0], self.gate)
                with self.holding() if who.endswith("held") else nullcontext():
                    answer = self.answer(name, partial(self.do, session, state, name))
                if who in answers or who.endswith("held"):
                    before = answers[who[0]]
                    answers[who[0]] = answer if before == "nothing" else [*before, *answer]
            self._in_turn[key], problems = self.look(state, answers)
            if problems:
                raise AssertionError(f"{key}, one after the other: {problems}")
        return self._in_turn[key]

    def _play(self, state: str, first: str, second: str, place: str, stop: int) -> Run | None:
        """Play one run; None if A did not come by that place, because it gave up before."""
        self.runs += 1
        self.restore(state)
        is_open = first not in self._game.outside
        self.observer.execute("select pg_advisory_lock(%s)", [GATE])
        self.a.connection.execute(ARM, [stop or -1])
        if is_open:
            self.a.connection.execute("begin")
        ahead = self.a.start_call(lambda: self.do(self.a, state, first))
        if stop and not self._comes_to_gate(ahead):
            self._stop_racing(is_open)
            return None
        if not stop:
            self.answer(first, ahead.result)
        a_holds = self.has_locked(self.a)
        behind = self.b.start_call(lambda: self.do(self.b, state, second))
        b_waits = behind.wait_settled()
        self.observer.execute("select pg_advisory_unlock(%s)", [GATE])
        answers = {"a": self.answer(first, ahead.result)}
        if place == "rollback":
            answers["a"] = "nothing"
        if is_open:
            self.a.connection.execute("rollback" if place == "rollback" else "commit")
        answers["b"] = self.answer(second, behind.result)
        self.a.connection.execute(DISARM)
        outcome, problems = self.look(state, answers)

        is_loose = first in self._game.loose or second in self._game.loose
        if (
            not is_loose
            and not any(
                outcome == each
                for each in self._allowed(state, first, second, place, a_holds, b_waits)
            )
            and not any(
                outcome.without_settings() == each.without_settings()
                for each in self._late(state, first, second, place)
            )
        ):
            allowed = self._allowed(state, first, second, place, a_holds, b_waits)
            waited = "B waited" if b_waits else "B did not wait"
            wrong = "\n-- or\n".join(dict.fromkeys(map(outcome.tell_from, allowed)))
            problems.append(f"{waited}; got (+) and expected (-)\n{wrong}")
        return Run(state, first, second, place, problems)

    def _comes_to_gate(self, ahead: Pending) -> bool:
        try:
            ahead.wait_blocked(by=self.gate)
        except (AssertionError, psycopg.Error):
            if ahead.is_done:
                return False
            raise
        return True

    def _stop_racing(self, is_open: bool) -> None:
        self.observer.execute("select pg_advisory_unlock(%s)", [GATE])
        if is_open:
            self.a.connection.execute("rollback")
        self.a.connection.execute(DISARM)

    def _allowed(
        self, state: str, first: str, second: str, place: str, a_holds: bool, b_waits: bool
    ) -> Iterator[Outcome]:
        done_by_a = [] if place == "rollback" else [("a", first)]
        b = ("b", second)
        fronts, passed_over = self._game.fronts, self._game.passed_over
        of_a = [[], *([("a before", part)] for part in fronts.get(first, ()) if done_by_a)]
        of_b = [[], *([("b before", part)] for part in fronts.get(second, ()))]
        for front in ([*x, *y] for x in of_a for y in of_b):
            for order in self._orders(first if done_by_a else None, second):
                yield self.play_in_turn(state, *front, *order)
            for seam in self._game.seams if done_by_a else ():
                yield self.play_in_turn(state, *front, *done_by_a, ("tick", seam), b)
                yield self.play_in_turn(state, *front, b, ("tick", seam), *done_by_a)
            if a_holds and not b_waits and second in self._game.later:
                held = ("b held", second)
                yield self.play_in_turn(state, *front, *done_by_a, held)
                yield self.play_in_turn(state, *front, held, *done_by_a)
            if a_holds and second in passed_over:
                alone = self.play_in_turn(state, *front, *done_by_a)
                yield replace(alone, b=text(passed_over[second]))
            if b_waits and done_by_a and first in passed_over:
                alone = self.play_in_turn(state, *front, b)
                yield replace(alone, a=text(passed_over[first]))

    def _late(self, state: str, first: str, second: str, place: str) -> Iterator[Outcome]:
        """What one asked of a job came too late for the other: it is done after that.

        It was answered with the job that it has found, and if that had just ended, the new job
        has its settings.
        """
        done_by_a = None if place == "rollback" else first
        for order in self._orders(done_by_a, second):
            for who, name in (("a", done_by_a), ("b", second)):
                parts = self._game.halves.get(name or "", (name or "",))
                if self._game.later.isdisjoint(parts):
                    continue
                held = (
                    (f"{who} held" if part in self._game.later else who, part) for part in parts
                )
                told = getattr(self.play_in_turn(state, *held), who)
                yield replace(self.play_in_turn(state, *order), **{who: told})

    def _orders(self, first: str | None, second: str) -> Iterator[list[tuple[str, str]]]:
        """One after the other, or one between the two halves of the other."""
        b = [("b", second)]
        if first is None:
            yield b
            return
        a = [("a", first)]
        yield a + b
        yield b + a
        for who, name, between in (("a", first, b), ("b", second, a)):
            if name in self._game.halves:
                one, other = self._game.halves[name]
                yield [(who, one), *between, (who, other)]
