"""Run the workloads and show what they measured; what `make bench` does.

    measure_all.py [--only NAME ...] [--rounds N] [--quick] [--out DIR] [--resume]

Every workload is measured on a server of its own.  After each one all results so far are
written to DIR: results.json with the values of every round, RESULTS.md, and plots if there is
matplotlib.  --only replaces the results of those workloads and keeps the others; --resume
leaves out what is in results.json already.  A workload that fails is reported as missing and
ends the run with exit status 1; a goal that is missed does not.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
import time
import traceback
from datetime import datetime
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from bench import plots, report  # noqa: E402
from bench.figures import Figure, Missing  # noqa: E402
from bench.measured_server import SETTINGS, BenchServer, Machine  # noqa: E402

WORKLOADS = TESTS / "bench" / "workloads"
# The long ones last.  What is not named here comes in between.
FIRST = ["claims", "singly", "enqueue", "workers", "latency", "depth", "memory"]
LAST = ["spike", "held", "steady"]
NUMBERS = {"workers": 3, "latency": 4, "wakeups": 8, "idle": 9}


def main() -> int:
    """Run what was asked for; return 1 if something could not be measured."""
    names = workloads()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME")
    parser.add_argument("--rounds", type=int, help="default: 5, with --quick 1")
    parser.add_argument("--quick", action="store_true", help="four minutes for all")
    parser.add_argument("--out", type=Path, help="default: .bench/results or .bench/quick")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 5)

    out = options.out or TESTS.parent / ".bench" / ("quick" if options.quick else "results")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.json"
    results: dict[str, Any] = {"about": about(), "workloads": {}}
    if (options.resume or options.only) and path.exists():
        results["workloads"] = json.loads(path.read_text())["workloads"]
    print(describe(results["about"]), flush=True)

    for name in [name for name in names if name in (options.only or names)]:
        there = results["workloads"].get(name)
        if options.resume and there is not None and not there["has_failed"]:
            print(f"{name}: there already", flush=True)
            continue
        results["workloads"][name] = measure(name, rounds, options.quick)
        save(results, out)
    print(f"\n{out}/RESULTS.md")
    return int(any(found["has_failed"] for found in results["workloads"].values()))


def workloads() -> list[str]:
    """Return the names of all workloads in the order of a run."""
    names = sorted(path.stem for path in WORKLOADS.glob("[a-z]*.py"))
    between = [name for name in names if name not in FIRST + LAST]
    return [name for name in [*FIRST, *between, *LAST] if name in names]


def measure(name: str, rounds: int, is_quick: bool) -> dict[str, Any]:
    """Run one workload and print its figures."""
    figures: list[Figure] = []
    number, title, has_failed = NUMBERS.get(name, 0), name, False
    began = time.monotonic()
    took_place = f"{now()}, {'a quick run of ' if is_quick else ''}{rounds} rounds"
    took_place += f", load {os.getloadavg()[0]:.1f} before"
    try:
        module = importlib.import_module(f"bench.workloads.{name}")
        number = getattr(module, "NUMBER", number)
        title = (module.__doc__ or name).splitlines()[0].rstrip(".")
        print(f"\n{number}. {name}: {title}", flush=True)
        with BenchServer() as server:
            for figure in module.run(server, rounds, is_quick):
                figures.append(figure)
                show(figure, time.monotonic() - began)
    except Exception as error:  # whatever it raises: the others are measured all the same
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        figures.append(Missing(number=number, name=name, reason=reason))
        has_failed = True
    seconds = time.monotonic() - began
    print(report.text(figures), f"({seconds:.0f} s)", sep="\n", flush=True)
    return {
        "number": number,
        "title": title,
        "took_place": took_place,
        "seconds": round(seconds, 1),
        "has_failed": has_failed,
        "figures": report.to_json(figures),
    }


def show(figure: Figure, seconds: float) -> None:
    """Show on a terminal that something goes on."""
    if sys.stderr.isatty():
        print(f"\r  {seconds:4.0f} s  {figure.name[:70]:70}", end="\r", file=sys.stderr)


def save(results: dict[str, Any], out: Path) -> None:
    """Write results.json, RESULTS.md and the plots."""
    report.dump(results, out / "results.json")
    parts = ["# Results of the benchmarks\n", describe(results["about"]) + "\n"]
    found_by_number = sorted(results["workloads"].items(), key=lambda each: each[1]["number"])
    for name, found in found_by_number:
        figures = report.from_json(found["figures"])
        parts.append(f"## {found['number']}. {found['title']}\n")
        parts.append(f"{found['took_place']}, {found['seconds']:.0f} s.\n")
        parts.append(report.markdown(figures))
        parts += [f"![{image}]({image})\n" for image in plots.draw(name, figures, out)]
    (out / "RESULTS.md").write_text("\n".join(parts))


def about() -> dict[str, Any]:
    """Return what must be known to judge the figures."""
    with BenchServer() as server:
        version = server.version
    return {
        "began_at": now(),
        "postgresql": version,
        "settings": SETTINGS,
        "machine": dataclasses.asdict(Machine.here()),
    }


def now() -> str:
    return datetime.now().astimezone().isoformat("T", "seconds")


def describe(facts: dict[str, Any]) -> str:
    """Return these facts as a paragraph."""
    machine = facts["machine"]
    return (
        f"{facts['began_at']}, {machine['processors']} processors ({machine['model']}), "
        f"{machine['memory_gb']} GB, Linux {machine['kernel']}, load {machine['load']:.1f} at "
        f"the start. PostgreSQL {facts['postgresql']} with {', '.join(facts['settings'])}."
    )


if __name__ == "__main__":
    sys.exit(main())
