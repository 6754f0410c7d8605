"""Random steps by many processes on few keys, held against a written model of the feature.

Each process is a `Player`: it does random steps and logs every call with its arguments, when
it began and ended, and what was answered.  In the database, triggers write each change of a
row down with the call that made it, in `storm.changes`.  The numbers of the changes are drawn
while the row is locked, so for one row, or one key, they give the true order; changes that are
rolled back leave none.  Afterwards the feature's model reads this `History`, and must be able
to explain all of it.

A feature is a module with a `FEATURE`, an object of this form:

    places             the tables whose changes are written down; jobs, finished_jobs and more
    setup(db)          what the tables hold before; db is a superuser's connection
    step(player)       one random step of one process
    drain(player)      called until it returns False when all have ended, to finish what is left
    check(history)     the violations: what the model forbids or cannot explain
"""

from __future__ import annotations

import multiprocessing
import pickle
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import psycopg
from psycopg import sql
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb
from styles import CURSOR

from invariants import BROKEN

NOTES = """
create schema storm;
create table storm.changes (
    number bigint generated always as identity,
    call text,
    place text not null,
    old jsonb,
    new jsonb,
    made_at timestamptz not null default clock_timestamp()
);
create function storm.note()
    returns trigger
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    insert into storm.changes (call, place, old, new)
    values (
        current_setting('storm.call', true), tg_argv[0],
        case when tg_op <> 'INSERT' then to_jsonb(old) end,
        case when tg_op <> 'DELETE' then to_jsonb(new) end
    );
    return null;
end;
$$;
"""
# After the statement and not before the row: an insert that meets a key is not yet one.
NOTE = """
create trigger storm_note after insert or update or delete on rota.{table}
    for each row execute function storm.note({table});
alter table rota.{table} enable always trigger storm_note;
"""
PATIENCE = 5.0  # seconds
# What a story tells of a row that changed.
TOLD = (
    *("status", "payload", "attempts", "run_at", "lease_token", "locked_by", "locked_until"),
    *("cancel_requested_at", "source_updated_at", "unique_until", "job_id", "completed_at"),
    *("parent_id", "job"),
)


class Feature(Protocol):
    """What a module of this room provides for one promise."""

    name: str
    places: tuple[str, ...]

    def setup(self, db: psycopg.Connection[Any]) -> None: ...
    def step(self, player: Player) -> None: ...
    def drain(self, player: Player) -> bool: ...
    def check(self, history: History) -> list[Violation]: ...


@dataclass
class Call:
    """One call of a stored function; the times are of the machine's monotonic clock."""

    name: str
    function: str
    arguments: dict[str, Any]
    began: int
    began_at: float
    ended: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    detail: str = ""
    is_committed: bool = True

    @property
    def is_done(self) -> bool:
        return self.is_committed and not self.error

    def __str__(self) -> str:
        return self.tell(lambda row: True)

    def tell(self, is_told: Callable[[dict[str, Any]], bool]) -> str:
        """Return the call as a line, of several jobs only with those that are told of."""
        given = ", ".join(
            f"{k} => {_short([_brief(r) for r in v if is_told(r)] if k == 'jobs' else v)}"
            for k, v in _brief(self.arguments).items()
        )
        rows = [row for row in self.rows if len(self.rows) == 1 or is_told(row)]
        told = self.error or ", ".join(str([*_brief(row).values()]) for row in rows)
        undone = "" if self.is_committed else "  (rolled back)"
        times = f"{self.began / 1e9:.6f} {(self.ended - self.began) / 1e6:7.2f} ms"
        return f"{times}  [{self.name}] {self.function}({given}) -> {told}{undone}"


@dataclass(frozen=True)
class Change:
    """One row of one table before and after."""

    number: int
    call: str
    place: str
    old: dict[str, Any] | None
    new: dict[str, Any] | None
    made_at: datetime

    def __str__(self) -> str:
        before, after = self.old or {}, self.new or {}
        which = before.get("id") or after.get("id") or ""
        told = ", ".join(
            f"{name} {before.get(name)} > {after.get(name)}"
            for name in TOLD
            if before.get(name) != after.get(name)
        )
        return f"#{self.number} {self.place} {which}: {told}"


@dataclass(frozen=True)
class Step:
    """What one call did to one job, whatever tables it went through."""

    number: int
    call: Call
    job_id: int
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    made_at: datetime

    @property
    def statuses(self) -> tuple[str, str]:
        return (
            self.before["status"] if self.before else "none",
            self.after["status"] if self.after else "none",
        )


@dataclass(frozen=True)
class Violation:
    """A sentence, the key it is about, and the call where it showed."""

    problem: str
    key: str = ""
    call: str = ""

    def __str__(self) -> str:
        where = f" (key {self.key})" if self.key else ""
        return f"{self.problem}{where}{f', call [{self.call}]' if self.call else ''}"


class Player:
    """One session that does random steps and writes down what it was answered."""

    def __init__(self, url: str, number: int, seed: int) -> None:
        self.connection = psycopg.connect(
            url, autocommit=True, row_factory=dict_row, cursor_factory=CURSOR
        )
        self.connection.execute("set deadlock_timeout = '100ms'")
        self.random = random.Random(f"{seed} {number}")
        self.number, self.name = number, f"p{number}"
        self.calls: list[Call] = []
        self.steps = 0
        self.memory: dict[str, Any] = {}
        self._open: list[Call] | None = None

    def call(self, function: str, /, **arguments: Any) -> Call:
        """Call a function of rota; an error is an answer too."""
        name = f"{self.name}.{len(self.calls)}"
        given = {k: Jsonb(v) if _is_json(v) else v for k, v in arguments.items()}
        self.connection.execute("select set_config('storm.call', %s, false)", [name])
        call = Call(name, function, arguments, time.monotonic_ns(), time.time())
        self.calls.append(call)
        if self._open is not None:
            self._open.append(call)
        try:
            call.rows = self.connection.execute(_query(function, *arguments), given).fetchall()
        except psycopg.Error as error:
            if self.connection.broken:
                raise
            call.error = error.sqlstate or "error"
            call.detail = f"{error} {error.diag.context}"
        call.ended = time.monotonic_ns()
        return call

    @contextmanager
    def transaction(self, *, is_committed: bool = True) -> Iterator[None]:
        """Make the calls of a `with` block in one transaction, and end it so."""
        self._open = []
        self.connection.execute("begin")
        yield
        is_committed = is_committed and not any(call.error for call in self._open)
        self.connection.execute("commit" if is_committed else "rollback")
        for call in self._open:
            call.ended, call.is_committed = time.monotonic_ns(), is_committed
        self._open = None

    def chance(self, likelihood: float) -> bool:
        return self.random.random() < likelihood


@cache
def _query(function: str, *names: str) -> bytes:
    named = [sql.SQL("{} => {}").format(sql.Identifier(n), sql.Placeholder(n)) for n in names]
    query = sql.SQL("select * from rota.{}({})")
    return query.format(sql.Identifier(function), sql.SQL(", ").join(named)).as_bytes()


class History:
    """The calls of all players and the changes they made, in their order."""

    def __init__(
        self, calls: list[Call], changes: list[Change], broken: list[str] | None = None
    ) -> None:
        self.calls = {call.name: call for call in calls}
        self.changes = changes
        self.broken = broken or []
        self.changes_by_call: dict[str, list[Change]] = defaultdict(list)
        self.memory: dict[str, list[Change]] = defaultdict(list)
        for change in changes:
            self.changes_by_call[change.call].append(change)
            if change.place == "idempotency_keys" and change.new:
                self.memory[change.new["idempotency_key"]].append(change)
        self.keys = {
            row["id"]: row["idempotency_key"] or row["ordering_key"]
            for change in changes
            if change.place in ("jobs", "finished_jobs") and (row := change.new or change.old)
        }
        # Jobs that a story tells together although they have no key in common.
        self.families: dict[str, set[int]] = {}
        self.steps = self._steps()
        self.steps_by_call: dict[str, list[Step]] = defaultdict(list)
        self.steps_by_job: dict[int, list[Step]] = defaultdict(list)
        for step in self.steps:
            self.steps_by_call[step.call.name].append(step)
            self.steps_by_job[step.job_id].append(step)

    def _steps(self) -> list[Step]:
        parts: dict[tuple[str, int], list[Change]] = defaultdict(list)
        for change in self.changes:
            if change.place in ("jobs", "finished_jobs") and change.call in self.calls:
                row = change.new or change.old or {}
                parts[change.call, row["id"]].append(change)
        found = []
        for (call, job_id), changes in parts.items():
            born = [c for c in changes if c.old is None]
            gone = [c for c in changes if c.new is None]
            if changes[0].old is None and changes[-1].new is None:
                continue  # was put in, turned out to be an old version, and was taken back
            # A job that moves between the tables is deleted here and inserted there.
            is_new, has_gone = len(born) > len(gone), len(gone) > len(born)
            before = None if is_new else next(c.old for c in changes if c.old)
            since = born[-1].number if born and not is_new else 0
            last = [c for c in changes if c.new and c.number >= since][-1:]
            after = None if has_gone else last[0].new
            # A job that comes in, or back, is what it becomes by the last of its changes.
            comes = any(c.place == "jobs" for c in born)
            number = changes[-1 if comes else 0].number
            made_at = changes[-1].made_at
            step = Step(number, self.calls[call], job_id, before, after, made_at)
            found.append(step)
        return sorted(found, key=lambda step: step.number)

    def might_see(
        self, call: Call, job_id: int, is_so: Callable[[dict[str, Any]], bool]
    ) -> bool:
        """Whether the job may have been so at any moment of the call.

        What a step left may have been there from the begin of its call to the end of the next.
        """
        steps = self.steps_by_job.get(job_id, [])
        following = [*(step.call.ended for step in steps[1:]), call.ended]
        return any(
            step.after is not None
            and is_so(step.after)
            and step.call.began <= call.ended
            and call.began <= until
            for step, until in zip(steps, following, strict=False)
        )

    def story(self, key: str) -> str:
        """Return all that was ever called or changed for a key, in the order of the calls."""
        ids = {job_id for job_id, its in self.keys.items() if its == key}
        ids |= self.families.get(key, set())

        def is_about(row: dict[str, Any]) -> bool:
            named = {row.get(name) for name in ("id", "job_id", "enqueue")}
            named |= {
                *row.get("job_ids", []),
                *(row.get("depends_on") or []),
                row.get("blocks"),
            }
            keys = {row.get(name) for name in ("idempotency_key", "ordering_key", "key")}
            return key in keys or bool(named & ids)

        lines = []
        for call in sorted(self.calls.values(), key=lambda call: call.began):
            changes = [
                change
                for change in self.changes_by_call.get(call.name, [])
                if is_about(change.new or change.old or {})
            ]
            rows = [call.arguments, *call.arguments.get("jobs", []), *call.rows]
            if changes or any(map(is_about, rows)):
                lines += [call.tell(is_about), *(f"            {change}" for change in changes)]
        return "\n".join(lines)


def prepare(db: psycopg.Connection[Any], places: tuple[str, ...]) -> None:
    """Let the database of a storm write down its changes."""
    db.execute(NOTES)
    for table in places:
        db.execute(NOTE.format(table=table))


def load(name: str) -> Feature:
    """Return the feature of that name, from the module storm_NAME."""
    return import_module(f"model.storm_{name}").FEATURE  # type: ignore[no-any-return]


def play(
    url: str,
    name: str,
    steps: int,
    seed: int,
    processes: int = 8,
    show: Callable[[int], None] = lambda done: None,
) -> tuple[list[Violation], History]:
    """Let so many processes do so many steps in all; return what the model says of it."""
    feature = load(name)
    with psycopg.connect(url, autocommit=True) as db:
        prepare(db, feature.places)
        feature.setup(db)
    # A server that has everything imported forks them: so they start at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["psycopg", "model.storm", f"model.storm_{name}"])
    done = context.Value("i", 0)
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(number)) for number in range(processes)]
        players = [
            context.Process(
                target=_play_one, args=(url, name, number, steps // processes, seed, log, done)
            )
            for number, log in enumerate(logs)
        ]
        for player in players:
            player.start()
        while any(player.is_alive() for player in players):
            time.sleep(0.05)
            show(done.value)
        if any(player.exitcode for player in players):
            raise RuntimeError("a player has ended by itself")
        calls = [call for log in logs for call in pickle.loads(log.read_bytes())]
    history = read_history(url, calls + _drain(url, feature, seed))
    return check_all(feature, history), history


def check_all(feature: Feature, history: History) -> list[Violation]:
    """Return what the feature's model and the invariants of all features say."""
    return [*feature.check(history), *map(Violation, history.broken)]


def _play_one(
    url: str, name: str, number: int, steps: int, seed: int, log: Path, done: Any
) -> None:
    feature, player = load(name), Player(url, number, seed)
    for player.steps in range(steps):
        feature.step(player)
        if player.steps % 50 == 49:
            with done.get_lock():
                done.value += 50
    log.write_bytes(pickle.dumps(player.calls))


def _drain(url: str, feature: Feature, seed: int) -> list[Call]:
    player, claimed = Player(url, 99, seed), -1
    hope = deadline = time.monotonic() + 60
    # What is left when nothing could be claimed for some seconds is left for good.
    while feature.drain(player) and time.monotonic() < min(hope, deadline):
        jobs = sum(len(call.rows) for call in player.calls if call.function == "claim_jobs")
        if jobs > claimed:
            claimed, hope = jobs, time.monotonic() + PATIENCE
    player.connection.close()
    return player.calls


def read_history(url: str, calls: list[Call]) -> History:
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("set jit = off")
        rows = db.execute(
            "select number, call, place, old, new, made_at from storm.changes order by number"
        ).fetchall()
        broken = db.execute(f"select 'job ' || id || ' ' || rule from ({BROKEN}) as b")
        return History(calls, [Change(*row) for row in rows], [row[0] for row in broken])


def _is_json(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    )


def _brief(row: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is the same everywhere, and what the changes tell better."""
    dull = {
        "job_type",
        "backoff",
        "queue",
        "max_attempts",
        "priority",
        "created_at",
        "locked_for",
    }
    return {name: value for name, value in row.items() if name not in dull}


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 400 else f"{text[:400]}..."
