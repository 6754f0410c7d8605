"""Let servers, a front and workers of many databases fail, and judge all that happened.

    python -m faults.scale_history [--jobs N] [--seed N] [--pause SECONDS] [--keep DIR]

Two servers with two numbered databases each, and a front on a third one.  Producers enqueue
directly, through the front, and by `enqueue_to`; the workers, each for all four, carry as well.
Meanwhile backends of each server are killed with -9, so that it falls and recovers, servers
stand still, and workers are killed or stand still.  Then the faults stop, everything is worked
off, and the history of each database is held against the promise, and those of all together
(`history/many.py`).  Two queues move from database to database all the time, by commands that
are killed, and producers follow them (`faults/followers.py`).  With --canary no receipt stays,
and of what moves some is lost and some doubled, all of which has to be found.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from faults.followers import Homes, run_follower, run_mover
from faults.history import many
from faults.history.dump import dump
from faults.history.recorder import Recorder, both_clocks
from faults.of_servers import VICTIM
from faults.processes import Crew, Task, begin
from faults.senders import QUEUES, run_sender
from invariants import BROKEN
from support.server import DATABASE, Server

PLACES = {"one": "a", "two": "a", "three": "b", "four": "b"}
NUMBERS = {name: number for number, name in enumerate(PLACES, 1)}
WAYS = {"direct": 2, "to": 3, "front": 2}
HOMES = (1, 3)
"""Where the queues that move are at first."""
FOLLOWERS = 2
TICK = 0.4
CALM_BACKLOG = 20
PATIENCE = 120.0
FAULTS = {
    "workers killed with -9": 8,
    "workers stopped past their leases": 3,
    "crashes of a server by kill -9 of a backend": 4,
    "servers stopped for a while": 2,
    "crashes of the front's server": 3,
    "commands that move a queue killed with -9": 8,
}
CANARY = """
create function public.forget() returns trigger language plpgsql as $$
begin
    delete from rota.receipts where source_job_id = new.source_job_id;
    return null;
end;
$$;
create constraint trigger forget after insert on rota.receipts
    deferrable initially deferred for each row
    when (new.move_id = 0) execute function public.forget();

create sequence public.turns;
create function public.lose_or_double() returns trigger language plpgsql as $$
begin
    if not exists (
        select from rota.jobs where id = new.job_id
          and num_nonnulls(ordering_key, idempotency_key) = 0
    ) then
        return null;
    elsif nextval('public.turns') % 2 = 1 then
        delete from rota.jobs where id = new.job_id;
    else
        insert into rota.jobs overriding system value
        select (jsonb_populate_record(null::rota.jobs,
            to_jsonb(j) || jsonb_build_object('id', (rota._new_ids(1))[1]))).*
        from rota.jobs as j where j.id = new.job_id;
    end if;
    return null;
end;
$$;
create constraint trigger lose_or_double after insert on rota.receipts
    deferrable initially deferred for each row
    when (new.move_id > 0) execute function public.lose_or_double();
"""
FOUND = ("M2", "M5")
"""What the canary breaks."""
# Who is told where a job went, and whether that is what is written down.
LATE_CALLERS = """
select t.job_id, concat_ws(' ', t.database, t.new_job_id) from rota.moved_jobs as t
where not exists (
    select from rota.jobs as j where j.id = t.job_id
    union all
    select from rota.finished_jobs as f where f.id = t.job_id)
order by t.job_id & 65535, t.job_id limit 100
"""


class World:
    """The servers and their databases, and what is done to them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        first = folder / "a"
        first.mkdir()
        self.servers = {"a": Server.create(first)}
        stack.callback(self.servers["a"].destroy)
        self._copy(stack)
        self.urls: dict[str, str] = {}
        for name, place in PLACES.items():
            self._create(name, self.servers[place], DATABASE)
            with psycopg.connect(self.urls[name], autocommit=True) as db:
                db.execute("select rota.set_database_number(%s)", (NUMBERS[name],))
        self._create("front", self.servers["c"], "template1")
        self.front = self.urls.pop("front")
        self.file, passwords = folder / "databases", folder / "passwords"
        self.file.write_text("\n".join(self.urls.values()) + "\n")
        password = psycopg.conninfo.conninfo_to_dict(self.front)["password"]
        passwords.write_text(f"postgres:{password}\n")
        words = ["front", "make", "--front", self.front, "--databases", str(self.file)]
        words += ["--role", "postgres=producer", "--passwords", str(passwords)]
        subprocess.run(
            [sys.executable, "-m", "rota", *words], check=True, stdout=subprocess.DEVNULL
        )

    def _copy(self, stack: ExitStack) -> None:
        """Make servers b and c, which have the passwords of the first."""
        one = self.servers["a"]
        one.stop()
        for name in ("b", "c"):
            self.servers[name] = one.twin(self.folder / name)
            stack.callback(self.servers[name].destroy)
        one.start()

    def _create(self, name: str, server: Server, template: str) -> None:
        server.execute(f"create database {name} template {template}")
        self.urls[name] = server.url(name)

    def crash(self, place: str) -> bool:
        """Kill a backend of a server, and wait until it has fallen and is up again."""
        names = [name for name, where in PLACES.items() if where == place] or ["front"]
        url = self.servers[place].url(random.choice(names))
        with (
            suppress(ProcessLookupError, psycopg.OperationalError),
            psycopg.connect(url, autocommit=True, connect_timeout=5) as witness,
        ):
            row = witness.execute(VICTIM.encode()).fetchone()
            if row is None:
                return False
            os.kill(row[0], signal.SIGKILL)
            try:
                witness.execute("select pg_sleep(10)")
            except psycopg.OperationalError:
                self.wait_for(place)
                for name in names if place != "c" else ():
                    # A crash takes the counters that autovacuum goes by.
                    with psycopg.connect(self.urls[name], autocommit=True) as db:
                        db.execute("vacuum rota.jobs")
                return True
        return False

    def wait_for(self, place: str) -> None:
        """Wait until a server lets somebody in."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                psycopg.connect(self.servers[place].url("template1"), connect_timeout=5).close()
            except psycopg.OperationalError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
            else:
                return

    @contextmanager
    def standing_still(self, place: str) -> Iterator[None]:
        """Stop all processes of a server within the block."""
        pids = self.servers[place].processes()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in reversed(pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def live(self) -> int:
        """How many jobs are live in all databases."""
        count = 0
        for url in self.urls.values():
            with psycopg.connect(url, autocommit=True) as db:
                row = db.execute("select count(*) from rota.jobs").fetchone()
                count += row[0] if row else 0
        return count


def run_worker(task: Task, file: str, lease: float) -> None:
    """Be `rota worker` for all databases; begun again by who keeps it."""
    from rota.cli import main

    begin(task)
    words = ["worker", "faults.workload_handlers:registry", "--databases", file]
    words += ["--name", task.name, "--lease", str(lease), "--tick-interval", str(TICK)]
    words += [word for queue in ("default", *QUEUES) for word in ("--queue", queue)]
    words += ["--poll-interval", "0.1", "--concurrency", "100", "--batch", "100"]
    sys.exit(main([*words, "--log-level", "warning"]))


class Play:
    """One run: who takes part, what was done to them, and what came of it."""

    def __init__(
        self, world: World, seed: int, *, workers: int, backlog: int, lease: float
    ) -> None:
        self.world, self.counts = world, Counter[str]()
        self.history = world.folder / "history"
        for name in ("", "front", *NUMBERS):
            (self.history / name).mkdir()
        self._dice, self._lease = random.Random(seed), lease
        self._deck = list(FAULTS)
        self._dice.shuffle(self._deck)
        context = multiprocessing.get_context("forkserver")
        self.limit = context.Value("i", backlog, lock=False)
        self.sent = context.Value("i", 0)
        task = Task("", self.history, str(seed), by_database=True)
        self.workers = Crew(run_worker, task, "worker", workers, str(world.file), lease)
        urls = {NUMBERS[name]: url for name, url in world.urls.items()}
        self.producers = [
            Crew(run_sender, task, way, count, way, urls, world.front, self.limit, self.sent)
            for way, count in WAYS.items()
        ]
        self.homes = Homes(context, HOMES, FOLLOWERS)
        self.producers.append(
            Crew(
                run_follower, task, "follow", FOLLOWERS, urls, self.homes, self.limit, self.sent
            )
        )
        self.movers = Crew(
            run_mover, task, "mover", len(QUEUES), str(world.file), urls, self.homes
        )
        self.crews = [self.workers, self.movers, *self.producers]

    def strike(self) -> bool:
        """Let one fault happen: first each of them, then some more often than others."""
        world, dice = self.world, self._dice
        fault = (self._deck or dice.choices(list(FAULTS), list(FAULTS.values())))[-1]
        number = dice.randrange(len(self.workers))
        if fault.startswith("workers killed"):
            self.workers.kill(number)
        elif fault.startswith("commands"):
            self.movers.kill(dice.randrange(len(QUEUES)))
        elif fault.startswith("workers"):
            if not self.workers.freeze(number, self._lease * dice.uniform(1.1, 2.0)):
                return False
        elif fault.startswith("servers"):
            with world.standing_still(dice.choice("ab")):
                self.pause(dice.uniform(0.5, 4.0))
        elif not world.crash("c" if "front" in fault else dice.choice("ab")):
            return False
        self.counts[fault] += 1
        if self._deck:
            self._deck.pop()
        return True

    def pause(self, seconds: float) -> None:
        """Let some time pass, and look after all processes meanwhile."""
        until = time.monotonic() + seconds
        while True:
            for crew in self.crews:
                crew.look()
            if (left := until - time.monotonic()) <= 0:
                return
            time.sleep(min(left, 0.05))

    def rest(self, moves: int) -> bool:
        """Let so many moves, and then everything, come to an end; return whether it did."""
        for crew in self.crews:
            crew.thaw()
        self.limit.value = CALM_BACKLOG
        have_moved = self._wait_for_moves(moves)
        self._wait(lambda live: live <= 8 * CALM_BACKLOG)
        self.pause(1.0)
        for name in NUMBERS:
            calm = {"mark": "calm", **both_clocks(), "lease": self._lease, "sweep": TICK}
            Recorder(self.history / name).write(calm)
        self.pause(1.5)
        for crew in self.producers:
            crew.stop()
        return self._wait(lambda live: live == 0) and have_moved

    def _wait_for_moves(self, moves: int) -> bool:
        """Wait until so many moves have ended, and those that have begun."""
        homes, before, until = self.homes, -1, 0.0
        while not homes.are_at_rest():
            if (count := homes.moves.value) != before:
                before, until = count, time.monotonic() + PATIENCE
                homes.is_calm.value = count >= moves
            elif time.monotonic() > until:
                return False
            self.pause(0.1)
        self.movers.stop()
        self.crews.remove(self.movers)
        return True

    def _wait(self, condition: Callable[[int], bool]) -> bool:
        before, until = -1, 0.0
        while not condition(live := self.world.live()):
            if live != before:
                before, until = live, time.monotonic() + PATIENCE
            elif time.monotonic() > until:
                return False
            self.pause(0.2)
        return True

    def stop(self) -> None:
        """End all processes."""
        for crew in self.crews:
            crew.stop()


def play(
    folder: Path, jobs: int, seed: int, *, faults: int, pause: float, workers: int = 2,
    backlog: int = 4000, lease: float = 5.0, moves: int = 4, is_canary: bool = False,
) -> tuple[many.Together, list[str]]:  # fmt: skip
    """Let so many jobs pass and queues move, and strike that often meanwhile."""
    began = time.monotonic()
    with ExitStack() as stack:
        world = World(folder, stack)
        if is_canary:
            for url in world.urls.values():
                with psycopg.connect(url, autocommit=True) as db:
                    db.execute(CANARY)
        game = Play(world, seed, workers=workers, backlog=backlog, lease=lease)
        stack.callback(game.stop)
        tell = sys.stderr.isatty()
        for number in range(faults):
            game.pause(pause)
            while game.sent.value * faults < jobs * (number + 1):
                game.pause(0.1)
            while not game.strike():
                game.pause(0.1)
            if tell:
                print(end=f"\r{game.sent.value:,} jobs, {number} faults ", file=sys.stderr)
        while game.sent.value < jobs:
            game.pause(0.1)
        is_drained = game.rest(moves)
        game.stop()
        problems = [] if is_drained else ["not all jobs have ended"]
        for crew in game.crews:
            for name in ("ended by themselves", "did not leave"):
                if crew.counts[name]:
                    problems.append(f"{crew.counts[name]} processes {name}")
        for name, url in world.urls.items():
            dump(url, game.history / name, is_drained=is_drained)
            problems += _broken_tables(name, url)
            problems += _untold(name, url)
    played = time.monotonic() - began
    together, contexts = many.check(game.history, NUMBERS, "front", QUEUES)
    for name, context in contexts.items():
        problems += [
            f"{name}: {each} ({each.subject})\n{each.story}" for each in context.violations
        ]
    problems += together.problems
    _print_table(game, together, contexts, played, time.monotonic() - began - played)
    return together, problems


def _broken_tables(name: str, url: str) -> list[str]:
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("set jit = off")
        found = [f"database {name}: job {job} {rule}" for rule, job in db.execute(BROKEN)]
        query = "select promise, violations from rota.verify() where violations > 0"
        found += [
            f"database {name}: {count} times: {what}" for what, count in db.execute(query)
        ]
    return found


def _untold(name: str, url: str) -> list[str]:
    """Call for jobs that are not there any more, and see what the caller is told."""
    found = []
    with psycopg.connect(url, autocommit=True) as db:
        for job_id, place in db.execute(LATE_CALLERS).fetchall():
            told = ""
            try:
                db.execute("select rota.cancel_job(%s)", (job_id,))
            except psycopg.Error as error:
                told = f"{error.sqlstate} {error.diag.message_detail}"
            if told != f"RT016 {place}":
                found.append(f"database {name}: job {job_id} is in {place}, and told: {told}")
    return found


def _print_table(
    game: Play, together: many.Together, contexts: dict[str, Any], played: float, judged: float
) -> None:
    for fault in FAULTS:
        print(f"  {fault:<60}{game.counts[fault]:>12,}")
    print(f"  {'queues that moved':<60}{game.homes.moves.value:>12,}")
    for name, count in sorted(together.counts.items()):
        print(f"  {name:<60}{count:>12,}")
    for name in ("operations", "jobs", "unknown", "run out", "stale"):
        told = {"unknown": "calls without an answer", "run out": "leases that ran out",
                "stale": "stale tokens refused", "jobs": "jobs, with those that carried",
                "operations": "calls"}[name]  # fmt: skip
        count = sum(context.counts[name] for context in contexts.values())
        print(f"  {told:<60}{count:>12,}")
    broken: Counter[str] = sum((c.broken for c in contexts.values()), Counter())
    print(f"  {'violations in one database':<60}{broken.total():>12,} {dict(broken) or ''}")
    print(*many.summary(together), sep="\n")
    print(f"  played in {played:.0f} s, judged in {judged:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument(
        "--pause", type=float, default=2.0, help="seconds between two faults at least"
    )
    parser.add_argument("--backlog", type=int, default=4000, help="jobs of a database")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lease", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--moves", type=int, default=20, help="of a queue, at least")
    what = "keep no receipts, and lose and double what moves"
    parser.add_argument("--canary", action="store_true", help=what)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the history there")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also in the background
    print(f"seed {arguments.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="rota-scale-history-"))
    folder.chmod(0o711)  # servers are another user's
    try:
        together, problems = play(
            folder, arguments.jobs, arguments.seed, faults=arguments.faults,
            pause=arguments.pause, workers=arguments.workers, backlog=arguments.backlog,
            lease=arguments.lease, moves=arguments.moves, is_canary=arguments.canary,
        )  # fmt: skip
    finally:
        if arguments.keep:
            shutil.copytree(folder / "history", arguments.keep, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    for problem in problems[:10]:
        print(problem[:3000])
    if len(problems) > 10:
        print(f"and {len(problems) - 10} more")
    if arguments.canary:
        is_found = all(together.broken[rule] for rule in FOUND)
        print("the canary was found" if is_found else "NOBODY SAW THE CANARY")
        return int(not is_found)
    print("nothing is broken" if not problems else "BROKEN")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
