"""Let servers, workers, lines, disks and clocks fail under load; what `make faults` does.

    play_faults.py [--only NAME,...] [--scale FACTOR] [--seed N] [--keep DIR]

Each fault has a server of its own with workers and producers that write down every call.  When
it has struck often enough all jobs have to end, and the whole history is held against the
promise of rota.  Scale 1 should take an hour and a half (a guess); a fault for which this
machine has not the means is left out and said so.  Exits 1 if anything was broken, or if a
canary lived.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from faults import (  # noqa: E402
    of_callers,
    of_clocks,
    of_disks,
    of_network,
    of_outages,
    of_poolers,
    of_replicas,
    of_servers,
    of_settings,
    of_workers,
)
from faults.fault_run import FAULTS, Scene, Verdict  # noqa: E402
from support.bar import Bar  # noqa: E402

FAMILIES = (
    *(of_workers, of_servers, of_network, of_clocks, of_replicas, of_disks),
    *(of_poolers, of_callers, of_settings, of_outages),
)
TOLD = 5
LINES = 40
"""So many problems are told, each with so many lines of its story at most."""


def play(name: str, arguments: argparse.Namespace) -> bool:
    """Let one fault happen, and print what came of it; return whether all is well."""
    fault = FAULTS[name]
    if missing := fault.lacks():
        print(f"{name:<11}left out: {missing}", flush=True)
        return True
    bar = Bar(name, max(1, round(fault.times * arguments.scale)))
    folder = Path(tempfile.mkdtemp(prefix=f"rota-faults-{name}-"))
    folder.chmod(0o711)  # servers are another user's
    try:
        with Scene(
            name, arguments.scale, arguments.seed, folder, show=lambda done, _: bar.show(done)
        ) as scene:
            fault.play(scene)
        verdict = scene.judge()
    except Exception:  # the others have their turn
        verdict = Verdict(f"{name:<11}broke off", [traceback.format_exc()])
    finally:
        if arguments.keep:
            kept = arguments.keep / name
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(folder / "history", kept)
        shutil.rmtree(folder, ignore_errors=True)
    if sys.stderr.isatty():
        print(end="\r\033[K", file=sys.stderr, flush=True)
    print(f"{verdict.line}  {'WRONG' if verdict.problems else 'ok'}", flush=True)
    for problem in verdict.problems[:TOLD]:
        print(f"  {shortened(problem)}", flush=True)
    if len(verdict.problems) > TOLD:
        print(f"  and {len(verdict.problems) - TOLD} more", flush=True)
    return not verdict.problems


def shortened(text: str) -> str:
    """Leave out the middle of a long story."""
    lines = text.splitlines()
    if len(lines) > LINES:
        lines[LINES // 2 : -LINES // 2] = ["    ..."]
    return "\n".join(lines)


def main() -> int:
    """Play the faults that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help=f"some of {','.join(FAULTS)}")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the histories there")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(FAULTS)
    if unknown := [name for name in names if name not in FAULTS]:
        parser.error(f"there is no fault {', '.join(unknown)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also in the background
    minutes = sum(FAULTS[name].minutes for name in names) * arguments.scale
    print(f"seed {arguments.seed}, about {minutes + len(names) / 4:.0f} minutes", flush=True)
    wrong = [name for name in names if not play(name, arguments)]
    print(f"seed {arguments.seed}: {'wrong: ' + ', '.join(wrong) if wrong else 'all well'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
