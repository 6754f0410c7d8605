"""What to call, and with what: mostly what callers send, and one to three values that hurt.

A call that is wrong in every argument is refused by the first check.  So most values are such
as they should be, and speak of the jobs, queues and schedules that the world has.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fuzz.hostile import ATOMS, BIG, BY_TYPE, HOSTILE, ODD_KEYS, quoted
from fuzz.judge import Function
from fuzz.plain import ENDINGS, JOB, MAY_END, MAY_HAVE, MEMBERS, PLAIN, RULE, STAGE

OBJECTS = {"jobs": JOB, "stages": STAGE, "backoff": RULE}
ALIVE = ("running", "running too", "keyed", "cancelling", "stale", "in stage", "second stage")
CHECK_EVERY = 20  # calls that are followed by all that comes later
BIG_EVERY = 400  # of the values that can be


@dataclass(frozen=True)
class Call:
    """A call of a function, and which of its arguments are meant to hurt."""

    function: Function
    arguments: dict[str, str]
    hostile: tuple[str, ...] = ()
    how_to: str = "undo"

    def _passed(self) -> list[str]:
        return [f"{name} => {value}" for name, value in self.arguments.items()]

    def judged(self) -> str:
        passed = ", ".join([f"'{self.how_to}'", *self._passed()])
        return f"select * from rota_fuzz.call_{self.function.name}({passed})"

    def line(self) -> str:
        """Return what one would type into psql."""
        verb = "call" if self.function.kind == "p" else "select * from"
        return f"{verb} rota.{self.function.name}({', '.join(self._passed())});"

    def without(self, name: str) -> Call:
        return replace(
            self, arguments={key: value for key, value in self.arguments.items() if key != name}
        )

    def having(self, name: str, value: str) -> Call:
        return replace(self, arguments={**self.arguments, name: value})

    @property
    def is_big(self) -> bool:
        return any(value in pool for value in self.arguments.values() for pool in BIG.values())


class Chooser:
    """Random calls of some functions, in a world of some jobs."""

    def __init__(
        self,
        dice: random.Random,
        functions: Sequence[Function],
        jobs: dict[str, tuple[int, int]],
        refused: frozenset[str] = frozenset(),
    ) -> None:
        self._dice = dice
        self._functions = functions
        self._weights = [3 + 2 * len(function.names) for function in functions]
        self._jobs = jobs
        self._by_type = {
            kind: [value for value in pool if value not in refused]
            for kind, pool in BY_TYPE.items()
        }

    def call(self) -> Call:
        dice = self._dice
        (function,) = dice.choices(self._functions, self._weights)
        types = dict(zip(function.names, function.types, strict=True))
        count = min(len(types), dice.choices((0, 1, 2, 3), (10, 55, 25, 10))[0])
        to_hurt = dice.sample(function.names, count)
        chosen = [
            name
            for number, name in enumerate(function.names)
            if number < function.required or name in to_hurt or dice.random() < 0.25
        ]
        jobs = self._some_jobs(dice.choice((1, 1, 2, 4)))
        arguments = {name: self._plain(name, types[name], jobs) for name in chosen}
        arguments |= {name: self._hurtful(name, types[name], jobs) for name in to_hurt}
        how_to = (
            "check"
            if dice.random() < 1 / CHECK_EVERY
            else "keep"
            if dice.random() < 0.3
            else "undo"
        )
        return Call(function, arguments, tuple(to_hurt), how_to)

    def _some_jobs(self, count: int) -> list[tuple[int, int]]:
        """Return jobs with their tokens, mostly such as run."""
        labels = ALIVE if self._dice.random() < 0.7 else tuple(self._jobs)
        return [self._jobs[label] for label in self._dice.sample(labels, count)]

    def _plain(self, name: str, kind: str, jobs: list[tuple[int, int]]) -> str:
        dice, of = self._dice, name.removeprefix("kept_")
        if of in ("job_id", "blocks"):
            return str(jobs[0][0])
        if of == "lease_token":
            return str(jobs[0][1])
        if of != name:  # kept, and not one of those that are finished
            jobs = [self._jobs["running"]]
        if of in ("job_ids", "lease_tokens") or (name, kind) == ("depends_on", "bigint[]"):
            column = of == "lease_tokens"
            return f"'{{{','.join(str(job[column]) for job in jobs)}}}'::bigint[]"
        if name == "results":
            return quoted(f"[{', '.join('{}' for _ in jobs)}]", "jsonb")
        if name == "endings":
            endings = (self._ending(job, dice.choice(ENDINGS)) for job in jobs)
            return quoted(f"[{', '.join(endings)}]", "jsonb")
        if name in OBJECTS:
            return self._objects(name, harm=0)
        if kind == "text[]":
            pool = PLAIN.get(name.removesuffix("s"), PLAIN["queue"])
            count = len(jobs) if name == "next_stages" else dice.choice((1, 1, 2))
            return f"array[{', '.join(dice.choices(pool, k=count))}]"
        if (name, kind) == ("after", "timestamp with time zone"):
            name = "run_at"
        return dice.choice(PLAIN.get(name) or self._by_type[kind])

    def _hurtful(self, name: str, kind: str, jobs: list[tuple[int, int]]) -> str:
        dice = self._dice
        if kind in BIG and dice.random() < 1 / BIG_EVERY:
            return dice.choice(BIG[kind])
        if name in OBJECTS and dice.random() < 0.8:
            return self._objects(name, harm=dice.choice((1, 1, 2, 3)))
        if name == "results" and dice.random() < 0.5:
            return quoted(f"[{', '.join(dice.choices(ATOMS, k=len(jobs)))}]", "jsonb")
        if name.endswith(("job_id", "token", "job_ids", "tokens")) and dice.random() < 0.4:
            return self._plain(name, kind, self._some_jobs(dice.choice((1, 2, 3))))
        if name == "endings" and dice.random() < 0.8:
            harmed = [
                self._ending(
                    job, dice.choice(ENDINGS) | {dice.choice(MAY_END): dice.choice(ATOMS)}
                )
                for job in jobs
            ]
            return quoted(f"[{', '.join(harmed)}]", "jsonb")
        pool = HOSTILE.get(name, []) if dice.random() < 0.7 else []
        return dice.choice(pool or self._by_type[kind])

    @staticmethod
    def _ending(job: tuple[int, int], members: dict[str, str]) -> str:
        ending = {"job_id": str(job[0]), "lease_token": str(job[1])} | members
        text = ", ".join(f'"{name}": {value}' for name, value in ending.items())
        return f"{{{text}}}"

    def _objects(self, name: str, harm: int) -> str:
        dice, shape = self._dice, OBJECTS[name]
        if shape == RULE:
            return quoted(self._object(shape, harm), "jsonb")
        count = dice.choice((1, 1, 2, 3))
        harms = [harm if number == 0 else 0 for number in range(count)]
        dice.shuffle(harms)
        return quoted(f"[{', '.join(self._object(shape, one) for one in harms)}]", "jsonb")

    def _object(self, shape: tuple[str, ...], harm: int) -> str:
        dice = self._dice
        chance = dice.choice((0, 0.1, 0.3))
        keys = [*shape, *(key for key in MAY_HAVE[shape] if dice.random() < chance)]
        members = {f'"{key}"': dice.choice(MEMBERS[key]) for key in keys}
        for _ in range(harm):
            key = f'"{dice.choice((*shape, *MAY_HAVE[shape]))}"'
            if dice.random() < 0.1:
                key = dice.choice(ODD_KEYS)
            members[key] = (
                self._object(RULE, 1)
                if key == '"backoff"' and dice.random() < 0.6
                else dice.choice(ATOMS)
            )
            if dice.random() < 0.1:
                members.pop(dice.choice(list(members)))
        return "{" + ", ".join(f"{key}: {value}" for key, value in members.items()) + "}"
