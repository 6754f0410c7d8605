"""Play races by the ten thousand and hold each against a model; what `make races` does.

    play_races.py [--feature NAME ...] [--steps N] [--processes N] [--seed N] [--pairs N]
           [--stops N] [--operation NAME ...] [--state NAME]

The games (games.py) stop one operation at its statements and play every other one meanwhile.
The others (storm.py) are random steps by many processes.  Everything found is told with the
whole story of its key, and ends in exit status 1.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psycopg

from rota.testing import EmbeddedPostgres

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from model import storm  # noqa: E402
from races.bench import Bench, Run  # noqa: E402
from races.game import choose  # noqa: E402
from races.games import GAMES, pairs_of_functions  # noqa: E402
from races.instrument import instrument  # noqa: E402
from support.bar import Bar  # noqa: E402

STORMS = ("keys", "rerun", "effects", "order", "dependencies", "limits", "fairness")
SETTINGS = ["max_connections=100", "fsync=off", "synchronous_commit=off"]
_bench: list[Bench] = []
_played: set[frozenset[str]] = set()


def run_game(server: EmbeddedPostgres, arguments: argparse.Namespace, name: str) -> bool:
    """Play all pairs, in so many databases as there are processors."""
    game = GAMES[name]
    if arguments.stops:
        game = GAMES[name] = replace(game, max_stops=arguments.stops)
    with psycopg.connect(server.url("template_rota"), autocommit=True) as db:
        instrument(db)
    workers = os.cpu_count() or 1
    urls: multiprocessing.Queue[str] = multiprocessing.Queue()
    for number in range(workers):
        urls.put(copy_database(server, f"{name}{number}"))
    wanted = {*(arguments.operation or game.operations)}
    if arguments.state:
        game = replace(game, states={arguments.state: game.states[arguments.state]})
    chosen = [pair for pair in choose(arguments.seed, None, game) if wanted & {*pair[1:]}]
    chosen = chosen[: arguments.pairs]
    _played.update(pairs_of_functions((game, a, b) for _, a, b in chosen))
    bar, runs, found = Bar(name, len(chosen)), 0, []
    with multiprocessing.Pool(workers, _open_bench, [urls, name, arguments.seed]) as pool:
        for done, played in enumerate(pool.imap_unordered(_play_pair, chosen, 4), 1):
            runs += len(played)
            for run in (run for run in played if run.problems):
                found.append(run)
                print(f"\n{run}", *run.problems, sep="\n", flush=True)
            bar.show(done)
    print(
        f"\n{name:<9} {len(chosen)} pairs of {len(game.operations)} operations in"
        f" {len(game.states)} states, {runs} runs, {bar.seconds:.0f} s,"
        f" {count_deadlocks(server)} deadlocks, {len(found)} violations"
    )
    for run in found:
        print(f"         {run}")
    return not found


def count_deadlocks(server: EmbeddedPostgres) -> int:
    """Return how many deadlocks the server has broken, reported or not."""
    with psycopg.connect(server.url("template1"), autocommit=True) as db:
        row = db.execute("select sum(deadlocks) from pg_stat_database").fetchone()
    return int(row[0]) if row else 0


def _open_bench(urls: multiprocessing.Queue[str], name: str, seed: int) -> None:
    url = urls.get()
    _bench.append(Bench(lambda: psycopg.connect(url, autocommit=True), GAMES[name], seed))


def _play_pair(pair: tuple[str, str, str]) -> list[Run]:
    return list(_bench[0].play_pair(*pair))


def run_storm(server: EmbeddedPostgres, arguments: argparse.Namespace, name: str) -> bool:
    """Play one feature."""
    bar = Bar(name, arguments.steps)
    url = copy_database(server, f"storm_{name}")
    found, history = storm.play(
        url, name, arguments.steps, arguments.seed, arguments.processes, bar.show
    )
    answers = Counter(call.error or "ok" for call in history.calls.values())
    told = ", ".join(f"{count} {answer}" for answer, count in answers.most_common())
    print(
        f"\n{name:<8} {arguments.steps} steps by {arguments.processes} processes,"
        f" {len(history.changes)} changes, {bar.seconds:.0f} s, {len(found)} violations\n"
        f"         answers: {told}"
    )
    for violation in found[:10]:
        print(violation)
    for key in [*dict.fromkeys(violation.key for violation in found if violation.key)][:2]:
        print(f"\nThe story of {key}\n{history.story(key)}")
    return not found


def copy_database(server: EmbeddedPostgres, name: str) -> str:
    with psycopg.connect(server.url("template1"), autocommit=True) as db:
        db.execute(f"create database {name} template template_rota")
    return server.url(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = (*GAMES, *STORMS)
    parser.add_argument("--feature", action="append", choices=names, help="all by default")
    parser.add_argument("--steps", type=int, default=100_000, help="of each storm, in all")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--pairs", type=int, help="only so many pairs, chosen by the seed")
    parser.add_argument("--operation", action="append", help="only pairs with one of these")
    parser.add_argument("--state", help="only this one")
    parser.add_argument("--stops", type=int, help="places of each pair, chosen by the seed")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)

    results = {}
    for name in arguments.feature or names:
        bindir = os.environ.get("ROTA_PG_BINDIR")
        with EmbeddedPostgres(bindir=bindir, settings=SETTINGS) as server:
            with psycopg.connect(server.url("template1"), autocommit=True) as db:
                db.execute("create database template_rota")
            install = ["psql", "-X", "-q", "-d", server.url("template_rota"), "-f"]
            subprocess.run([*install, str(TESTS.parent / "sql/install.sql")], check=True)
            if name in GAMES:
                results[name] = run_game(server, arguments, name)
            else:
                results[name] = run_storm(server, arguments, name)
    if _played:
        print(f"{len(_played)} pairs of functions were played")
    wrong = [name for name, is_well in results.items() if not is_well]
    print(
        f"seed {arguments.seed}: {'violations in ' + ', '.join(wrong) if wrong else 'all well'}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
