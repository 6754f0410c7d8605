"""Take one guard after the other out of the product, and see that the tests notice.

    run.py [--only NAME ...] [--quick] [--resume] [--processes N] [--seed N] [--write]

Ends with a table of who killed whom, and in exit status 1 if a mutant survived or proves
nothing.  At the end the tests that killed are run on the product as it is: what fails there too
has killed nobody.  What pytest told about each is in .mutants/.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import random
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutants.everything import ALL, BY_NAME, problems
from mutants.mutant import Mutant
from mutants.trial import LOGS, ROOT, Verdict, is_tested, run_tests, stop_all, tree, try_mutant
from mutants.verdicts import Bar, Record, amend, last_killers, table, write


def try_all(
    chosen: Sequence[Mutant], record: Record, processes: int, is_thorough: bool
) -> list[Verdict]:
    """Try mutants, so many at a time, and say how it goes."""
    verdicts = []
    bar, known = Bar(len(chosen)), last_killers(ROOT / "tests")
    with ThreadPoolExecutor(processes) as pool:
        trials = [
            pool.submit(try_mutant, mutant, is_thorough, known.get(mutant.name))
            for mutant in chosen
        ]
        try:
            for trial in as_completed(trials):
                verdicts.append(trial.result())
                record.add(verdicts[-1])
                bar.add(verdicts[-1])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop_all()
            raise
    return verdicts


def false_kills(verdicts: Sequence[Verdict]) -> str:
    """Run the tests that killed on the product itself; return one that fails, if any does."""
    tests = {verdict.function for verdict in verdicts if verdict.outcome == "killed"}
    if not tests:
        return ""
    with tree() as copy:
        outcome, test, reason = run_tests(copy, sorted(tests), "control")
    return "" if outcome == "SURVIVED" else f"{test} {reason}"


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=BY_NAME, metavar="NAME")
    parser.add_argument(
        "--quick", action="store_true", help="only the test that killed it last"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the last run")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--write", action="store_true", help="put the table into the README")
    return parser.parse_args()


def main() -> int:
    arguments = read_arguments()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # also in the background
    if found := problems(ROOT):
        print(*found, sep="\n")
        return 1
    with tree() as copy:
        if not is_tested(copy):
            print("the tests of a copy would not import the client of the copy")
            return 1

    chosen = [BY_NAME[name] for name in arguments.only] if arguments.only else list(ALL)
    record = Record(LOGS / "verdicts.jsonl")
    verdicts = [] if arguments.only else record.begin(arguments.resume)
    left = [mutant for mutant in chosen if mutant not in [v.mutant for v in verdicts]]
    random.Random(arguments.seed).shuffle(left)
    print(f"seed {arguments.seed}, {len(left)} mutants, logs in {LOGS}", flush=True)
    verdicts += try_all(left, record, arguments.processes, not arguments.quick)
    verdicts.sort(key=lambda verdict: ALL.index(verdict.mutant))
    false_kill = false_kills(verdicts)
    alive = [verdict for verdict in verdicts if verdict.outcome != "killed"]
    told = (
        f"{len(verdicts)} mutants, {len(verdicts) - len(alive)} killed, in"
        f" {sum(verdict.seconds for verdict in verdicts) / 60:.0f} minutes of tests"
    )
    print(table(verdicts), f"\n{told}", sep="\n")
    print(*(f"{verdict.mutant.name} {verdict.outcome}" for verdict in alive), sep="\n")
    if false_kill:
        print(f"fails without any mutant, so it has killed nobody: {false_kill}")
    elif arguments.write and arguments.only:
        amend(verdicts)
    elif arguments.write:
        write(verdicts, told)
    return 1 if alive or false_kill else 0


if __name__ == "__main__":
    sys.exit(main())
