"""Every operation against every other on one key, with one of them stopped at each statement.

A begins its operation and is stopped before one of the statements inside it (instrument.py).
B does the whole of its own, or waits for a lock that A holds.  Then A goes on and commits,
then B ends.  What both were answered and all that the tables hold must be as if one had been
called after the other, in either order; what that is, is found by really calling them so.

Only what locks with `skip locked` has one more way: where the other holds the row it may
answer that it found nothing, and then must have done nothing.

An operation is a line in OPERATIONS, a state that a key can be in a line in STATES.  The same
is played with schedules in place of keys (schedules.py).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations
from typing import Any

import psycopg
from conftest import Clock
from psycopg.rows import dict_row

from invariants import BROKEN
from races.harness import Session
from races.instrument import ARM, DISARM, GATE

START, NOW = "2026-03-01 11:00:00+00", "2026-03-01 12:00:00+00"


def _enqueue(rule: str, function: str = "enqueue", by: str = "%(me)s::text") -> str:
    return f"""
        select e.job_id from rota.{function}(
            't', jsonb_build_object('by', {by}), 'q', idempotency_key => 'k',
            backoff => '{{"kind": "fixed", "base_seconds": 60, "jitter": 0}}', {rule}
        ) as e (job_id)"""


def _enqueue_many(*rules: str) -> str:
    jobs = ", ".join(
        f"jsonb_build_object('job_type', 't', 'queue', 'q', 'idempotency_key', 'k',"
        f" 'max_attempts', 3, 'payload', jsonb_build_object('by', %(me)s::text || {n})"
        f"{', ' if rule else ''}{rule})"
        for n, rule in enumerate(rules)
    )
    return (
        f"select m.job_id, m.is_new from rota.enqueue_many(jsonb_build_array({jobs})) as m"
        " order by m.ordinal"
    )


JOB = "%(job_id)s::bigint"
LEASE = "%(job_id)s::bigint, %(token)s::bigint"
CLAIMED = "c.job_id, c.lease_token, c.payload, c.attempt"
BATCH = "array[%(job_id)s::bigint], array[%(token)s::bigint]"
OPERATIONS = {
    "enqueue keep": _enqueue("max_attempts => 3"),
    "enqueue replace": _enqueue("max_attempts => 3, on_conflict => 'replace'"),
    "enqueue rerun": _enqueue("max_attempts => 3, on_conflict => 'rerun'"),
    "enqueue version 1": _enqueue("on_conflict => 'rerun', updated_at => '2026-01-01'"),
    "enqueue version 2": _enqueue("on_conflict => 'rerun', updated_at => '2026-01-02'"),
    "enqueue unique": _enqueue("unique_for => '1 day'"),
    "enqueue many": _enqueue_many("", ""),
    "enqueue many rerun": _enqueue_many("'on_conflict', 'replace'", "'on_conflict', 'rerun'"),
    "enqueue many mixed": _enqueue_many(
        "'on_conflict', 'replace'", "'on_conflict', 'rerun', 'updated_at', '2026-01-01'"
    ),
    "claim": f"select {CLAIMED} from rota.claim_jobs(%(me)s, '{{q}}') as c",
    "finish": f"select rota.finish_job({LEASE}) as answer",
    "finish batch": f"select f.outcome from rota.finish_jobs({BATCH}) as f",
    "fail": f"select f.* from rota.fail_job({LEASE}, %(me)s) as f",
    "fail for good": f"select f.* from rota.fail_job({LEASE}, %(me)s, is_fatal => true) as f",
    "release": f"select r.is_released from rota.release_jobs({BATCH}) as r",
    "snooze": f"select rota.snooze_job({LEASE}, '1 hour') as run_at",
    "heartbeat": f"select h.* from rota.heartbeat({LEASE}) as h",
    "heartbeat batch": f"select is_lost, locked_until from rota.heartbeat_jobs({BATCH})",
    "reschedule": f"select rota.reschedule_job({JOB}, delay => '0') as run_at",
    "sweep": "select rota.sweep_stale_leases() as swept",
    "cancel": f"select rota.cancel_job({JOB}, %(me)s) as answer",
    "retry": f"select rota.retry_job({JOB}) as answer",
    "retry forced": f"select rota.retry_job({JOB}, true) as answer",
}
# The answers of those that lock with `skip locked`, where they passed over the job.
PASSED_OVER: dict[str, list[Any]] = {
    "claim": [],
    "sweep": [{"swept": 0}],
    "finish batch": [{"outcome": "busy"}],
    "heartbeat batch": [{"is_lost": False, "locked_until": None}],
}
# What may be answered instead; everything else, above all a deadlock, is a violation.
REFUSALS = {"RT001", "RT002", "RT003", "RT007", "RT008"}

_NEW = _enqueue("max_attempts => 3", by="'first'")
_ONE_ATTEMPT = _enqueue("max_attempts => 1", by="'first'")
FORGET_HINTS = """
    select set_config('rota.hint_' || n, '', false) from generate_series(0, 15) as n
"""
KEEP_HINT = """
    select rota._keep_hint(%s, array[m.until, m.until, 0, 0, 0])
    from (select (extract(epoch from rota.now()) * 1000000)::bigint + 50000000) as m (until)
"""
_CLAIM = "select from rota.claim_jobs('first', '{q}', lease => '3 hours')"
_LAPSE = "select from rota.claim_jobs('first', '{q}', lease => '1 second')"
_FINISH = "select rota.finish_job(j.id, j.lease_token) from rota.jobs as j"
_FAIL = "select from rota.jobs as j, rota.fail_job(j.id, j.lease_token, 'first')"
_DIE = _FAIL.replace("'first'", "'first', is_fatal => true")
_CANCEL = "select rota.cancel_job(j.id, 'first') from rota.jobs as j"
_RERUN = _enqueue("on_conflict => 'rerun'", by="'next'")
_VERSION = _enqueue("on_conflict => 'rerun', updated_at => '2026-01-01'", by="'first'")
_UNIQUE = _enqueue("unique_for => '1 day'", by="'first'")
STATES = {
    "none": [],
    "waiting": [_NEW],
    "put off": [_enqueue("max_attempts => 3, delay => '1 day'", by="'first'")],
    "failed": [_NEW, _CLAIM, _FAIL],
    "running": [_NEW, _CLAIM],
    "running, to be rerun": [_NEW, _CLAIM, _RERUN],
    "running, to be cancelled": [_NEW, _CLAIM, _CANCEL],
    "lapsed": [_NEW, _LAPSE],
    "lapsed, to be rerun": [_NEW, _LAPSE, _RERUN],
    "lapsed at its last attempt": [_ONE_ATTEMPT, _LAPSE],
    "succeeded": [_NEW, _CLAIM, _FINISH],
    "succeeded, version 1": [_VERSION, _CLAIM, _FINISH],
    "succeeded, still unique": [_UNIQUE, _CLAIM, _FINISH],
    "succeeded, and again waiting": [_NEW, _CLAIM, _FINISH, _NEW],
    "dead": [_NEW, _CLAIM, _DIE],
    "cancelled": [_NEW, _CANCEL],
}
# Columns that hold the id of a job; what ids new jobs get depends on who was first.
ID_COLUMNS = {"id", "job_id", "last_job_id"}


@dataclass(frozen=True)
class Game:
    """What is played: operations in states, and how they may answer."""

    operations: dict[str, str]
    states: dict[str, list[str]]
    passed_over: dict[str, list[Any]]
    refusals: set[str]
    # What is done in the end, before one looks; what was put off is due by the last of it.
    settle: tuple[str, ...] = ()
    # The operations that are two, with the other one in front.
    fronts: dict[str, str] = field(default_factory=dict)


KEYS = Game(OPERATIONS, STATES, PASSED_OVER, REFUSALS)


@dataclass(frozen=True)
class Outcome:
    """What A and B were answered, and what the tables hold, in a form that can be compared."""

    a: str
    b: str
    tables: str

    def __str__(self) -> str:
        return f"A: {self.a}\nB: {self.b}\n{self.tables}"


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


class Bench:
    """Brings a key into a state and plays operations on it, in an instrumented database."""

    def __init__(
        self, connect: Callable[[], psycopg.Connection[Any]], game: Game = KEYS
    ) -> None:
        self._game = game
        self.observer = connect()
        self.observer.execute("set session_replication_role = replica")
        # Only a few rows, but many that are dead; the rule's query is big and its jit slow.
        self.observer.execute("set jit = off; set enable_seqscan = off")
        self._gate = Session(self.observer, self.observer)
        self.a, self.b = (Session(connect(), self.observer) for _ in "ab")
        for session in (self.a, self.b):
            session.connection.row_factory = dict_row
            session.connection.execute("set deadlock_timeout = '50ms'")
        self.runs = 0
        self.has_hint = False
        """Whether the sessions know where to begin when they claim."""
        self.observer.execute("create schema bench")
        self._clock = Clock(self.observer)
        rows = self.observer.execute(
            "select relname from pg_class where relnamespace = 'rota'::regnamespace"
            " and relkind in ('r', 'p') and not relispartition order by relname"
        ).fetchall()
        self._tables = [row[0] for row in rows]
        self._columns = {table: self._columns_of(table) for table in self._tables}
        numbered = enumerate(game.states)
        self._jobs = {state: self._save(state, number) for number, state in numbered}
        self._places: dict[tuple[str, str], list[str]] = {}
        self._in_turn: dict[tuple[str, ...], Outcome] = {}

    def close(self) -> None:
        self.a.close()
        self.b.close()

    def forget(self) -> None:
        """Forget what operations do in turn, because their functions have changed."""
        self._in_turn.clear()

    def play_pair(self, state: str, first: str, second: str) -> Iterator[Run]:
        """Play the pair with A stopped before each of its statements, and at its end."""
        places = self.find_places(state, first)
        for number, place in enumerate(places, 1):
            yield self._play(state, first, second, place, number)
        for place in ("commit", "rollback"):
            yield self._play(state, first, second, place, 0)

    def find_places(self, state: str, name: str) -> list[str]:
        """Return the places that the operation comes by in that state."""
        if (state, name) not in self._places:
            self._restore(state)
            places: list[str] = []
            connection = self.a.connection

            def note(notice: psycopg.errors.Diagnostic) -> None:
                if notice.severity_nonlocalized == "NOTICE":
                    places.append(notice.message_primary or "")

            connection.add_notice_handler(note)
            connection.execute(ARM, [0])
            self._answer(lambda: self._do(self.a, state, name))
            connection.execute(DISARM)
            connection.remove_notice_handler(note)
            self._places[state, name] = places
        return self._places[state, name]

    def play_in_turn(self, state: str, *order: tuple[str, str]) -> Outcome:
        """Call operations one after the other, each given with the session that calls it."""
        key = (state, *(f"{who} {name}" for who, name in order))
        if key not in self._in_turn:
            self._restore(state)
            answers = {"a": "nothing", "b": "nothing"}
            for who, name in order:
                session = self.a if who == "a" else self.b
                answers[who] = self._answer(partial(self._do, session, state, name))
            self._in_turn[key], problems = self._look(state, answers)
            if problems:
                raise AssertionError(f"{key}, one after the other: {problems}")
        return self._in_turn[key]

    def _play(self, state: str, first: str, second: str, place: str, stop: int) -> Run:
        self.runs += 1
        self._restore(state)
        self.observer.execute("select pg_advisory_lock(%s)", [GATE])
        self.a.connection.execute("begin")
        self.a.connection.execute(ARM, [stop or -1])
        ahead = self.a.start_call(lambda: self._do(self.a, state, first))
        if stop:
            ahead.wait_blocked(by=self._gate)
        else:
            self._answer(ahead.result)
        a_holds = self._has_locked(self.a)
        behind = self.b.start_call(lambda: self._do(self.b, state, second))
        b_waits = behind.wait_settled()
        self.observer.execute("select pg_advisory_unlock(%s)", [GATE])
        answers = {"a": self._answer(ahead.result)}
        if place == "rollback":
            answers["a"] = "nothing"
        self.a.connection.execute("rollback" if place == "rollback" else "commit")
        self.a.connection.execute(DISARM)
        answers["b"] = self._answer(behind.result)
        outcome, problems = self._look(state, answers)

        allowed = list(self._allowed(state, first, second, place, a_holds, b_waits))
        if outcome not in allowed:
            waited = "B waited" if b_waits else "B did not wait"
            expected = "\n-- or\n".join(map(str, allowed))
            problems.append(f"{waited}; got\n{outcome}\n-- expected\n{expected}")
        return Run(state, first, second, place, problems)

    def _allowed(
        self, state: str, first: str, second: str, place: str, a_holds: bool, b_waits: bool
    ) -> Iterator[Outcome]:
        done_by_a = [] if place == "rollback" else [("a", first)]
        b = ("b", second)
        yield self.play_in_turn(state, *done_by_a, b)
        yield self.play_in_turn(state, b, *done_by_a)
        passed_over, fronts = self._game.passed_over, self._game.fronts
        if done_by_a and first in fronts:
            yield self.play_in_turn(state, ("a", fronts[first]), b, *done_by_a)
        if done_by_a and second in fronts:
            yield self.play_in_turn(state, ("b", fronts[second]), *done_by_a, b)
        if a_holds and second in passed_over:
            alone = self.play_in_turn(state, *done_by_a)
            yield replace(alone, b=_text(passed_over[second]))
        if b_waits and done_by_a and first in passed_over:
            alone = self.play_in_turn(state, b)
            yield replace(alone, a=_text(passed_over[first]))

    def _do(self, session: Session, state: str, name: str) -> Any:
        me = "a" if session is self.a else "b"
        return session.fetch(self._game.operations[name], {"me": me, **self._jobs[state]})

    def _answer(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except psycopg.Error as error:
            if error.sqlstate in self._game.refusals:
                return error.sqlstate
            return f"unexpected {error.sqlstate}: {error.diag.message_primary}"

    def _has_locked(self, session: Session) -> bool:
        """Whether a session may hold rows of jobs or schedules."""
        return bool(
            self.observer.execute(
                "select from pg_locks where pid = %s and mode in ('RowShareLock',"
                " 'RowExclusiveLock') and relation in ('rota.jobs'::regclass,"
                " 'rota.job_definitions'::regclass)",
                [session.pid],
            ).fetchall()
        )

    def _columns_of(self, table: str) -> str:
        rows = self.observer.execute(
            "select quote_ident(attname) from pg_attribute where attrelid = %s::regclass"
            " and attnum > 0 and not attisdropped and attgenerated = '' order by attnum",
            (f"rota.{table}",),
        )
        return ", ".join(row[0] for row in rows)

    def _save(self, state: str, number: int) -> dict[str, Any]:
        """Bring the key into a state, a minute a step, and keep what the tables hold then."""
        for table in self._tables:
            self.observer.execute(f"delete from rota.{table}")
        self._clock.set(START)
        for step in self._game.states[state]:
            self._clock.advance("1 minute")
            self.observer.execute(step)
        self._clock.set(NOW)
        for table, columns in self._columns.items():
            copy = f"create table bench.s{number}_{table} as select {columns} from rota.{table}"
            self.observer.execute(copy)
        found = self.observer.execute(
            "select r.id, r.lease_token from rota.job_runs as r order by r.id"
        ).fetchall()
        job_id, token = found[0] if found else (999_999_999, 0)
        restore = "; ".join(
            f"delete from rota.{table}; insert into rota.{table} ({columns})"
            f" overriding system value table bench.s{number}_{table}"
            for table, columns in self._columns.items()
        )
        return {
            "job_id": job_id,
            "token": token,
            "ids": [row[0] for row in found],
            "restore": restore,
        }

    def _restore(self, state: str) -> None:
        self.observer.execute(self._jobs[state]["restore"])
        if self._game.settle:
            self._clock.set(NOW)
        for session in (self.a, self.b):
            session.connection.execute(FORGET_HINTS)
            if self.has_hint:
                me = "a" if session is self.a else "b"
                session.connection.execute(KEEP_HINT, [f"'{me}' {{q}}  "])

    def _look(self, state: str, answers: dict[str, Any]) -> tuple[Outcome, list[str]]:
        """Return the outcome, and what is wrong with it whatever was expected."""
        for step in self._game.settle:
            self.observer.execute(step)
        columns = ", ".join(
            f"(select jsonb_agg(to_jsonb(t)) from rota.{table} as t)" for table in self._tables
        )
        query = f"select array(select rule || ' ' || id from ({BROKEN}) as b), {columns}"
        row = self.observer.execute(query).fetchone()
        assert row is not None
        problems = [f"a job {broken}" for broken in row[0]]
        problems += [
            f"{who} got {answer}"
            for who, answer in answers.items()
            if isinstance(answer, str) and answer.startswith("unexpected")
        ]
        tables = {
            table: rows for table, rows in zip(self._tables, row[1:], strict=True) if rows
        }
        return _comparable(answers, tables, self._jobs[state]["ids"]), problems


def _comparable(
    answers: dict[str, Any], tables: dict[str, list[Any]], known: list[int]
) -> Outcome:
    """Call new jobs by names that do not depend on which was first to get its id."""
    new = sorted(_ids([*answers.values(), *tables.values()]) - {*known})
    forms = []
    for order in permutations(new):
        names = {job_id: f"new job {number}" for number, job_id in enumerate(order, 1)}
        told = {who: _text(_rename(answer, names)) for who, answer in answers.items()}
        lines = (
            f"{table}: {_text(row)}"
            for table in tables
            for row in _rename(tables[table], names)
        )
        forms.append((told["a"], told["b"], "\n".join(sorted(lines))))
    return Outcome(*min(forms))


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
    return {
        key: names.get(each, each) if key in ID_COLUMNS else _rename(each, names)
        for key, each in value.items()
    }


def _text(value: Any) -> str:
    """Return a value as text, without the columns that have none."""
    if isinstance(value, dict):
        value = {key: each for key, each in value.items() if each is not None}
    return json.dumps(value, sort_keys=True, default=str)


def choose(seed: int, count: int | None, game: Game = KEYS) -> list[tuple[str, str, str]]:
    """Return pairs in their states, all or so many, in an order that the seed decides."""
    names = game.operations
    every = [(s, a, b) for s in game.states for a in names for b in names]
    random.Random(seed).shuffle(every)
    return every[:count]
