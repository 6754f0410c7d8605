"""Run the tests under settings that a database may have had for years, and in other locales.

    settings.py [NAME ...] [-- PYTEST-ARGUMENT ...]  # settings.py "old strings" -- sql -k cron

The settings are those of faults/of_settings.py; the server of the tests gets them as its own.
Those that do not mind each other share a run, and if it fails each has one of its own.  A name
is that of a setting, and then it is alone, or of a locale (support/locales.py), as "icu tr".
"pooler" is neither: it runs the tests through two sessions of pgbouncer, without those that
need sessions of their own.  Nor is "columns": it runs them over the tables of a newer version.
Ends with one line for each run, and with a failure if one failed.
"""

# ruff: noqa: T201 -- a command talks to its user

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))

from matrix import read, run_pytest  # noqa: E402

from faults.of_settings import SETTINGS  # noqa: E402
from support.locales import LOCALES  # noqa: E402

# Without arrays, as psycopg cannot send a null in one, and without serializable, where each
# claim is refused.  `make faults` has both.
BUNDLES: tuple[tuple[str, ...], ...] = (
    ("time zone", "few digits", "null equals"),
    ("dates", "intervals", "search path", "old strings"),
    ("generic plans", "deferrable", "variables"),
    ("no triggers", "no indexes"),
    ("compiled",),
)
# All but what makes trees of its own.
ROOMS = ["sql", "races", "fuzz", "model", "client", "contract", "security", "faults"]
POOLER = "pooler"
# A race knows its sessions by their process, and stops one in a transaction while others go on.
POOLED = [room for room in ROOMS if room != "races"]
COLUMNS = "columns"
# What sorts texts, or shows them.
LOCAL = ["sql", "races", "client", "contract", "security", "web"]
Result = tuple[str, bool, str]


def run(names: Sequence[str], arguments: list[str]) -> Result:
    """Run the tests under some settings at once."""
    if names == (POOLER,):
        print("\n--- pgbouncer in transaction mode", flush=True)
        chosen = ["-m", "not own_session and not long", *(arguments or POOLED)]
        return POOLER, *run_pytest({**os.environ, "ROTA_TEST_POOLER": "1"}, chosen)
    if names == (COLUMNS,):
        print("\n--- tables with more columns", flush=True)
        environment = {**os.environ, "ROTA_TEST_COLUMNS": "1"}
        return COLUMNS, *run_pytest(environment, arguments or ROOMS)
    if names[0] in LOCALES:
        print(f"\n--- databases of {names[0]}", flush=True)
        environment = {**os.environ, "ROTA_TEST_LOCALE": names[0]}
        return names[0], *run_pytest(environment, arguments or LOCAL)
    told = [f"{name}={value}" for each in names for name, value in SETTINGS[each].items()]
    print(f"\n--- {', '.join(told)}", flush=True)
    environment = {**os.environ, "ROTA_TEST_SETTINGS": "\n".join(told)}
    return ", ".join(names), *run_pytest(environment, arguments or ROOMS)


def main(arguments: list[str]) -> int:
    """Run the tests so often, and tell how it went."""
    names, extra = read(arguments, __doc__, "NAME", [*SETTINGS, *LOCALES, POOLER, COLUMNS])
    results: list[Result] = []
    alone = [(name,) for name in (*LOCALES, POOLER, COLUMNS)]
    for bundle in [(name,) for name in names] or (*BUNDLES, *alone):
        results.append(run(bundle, extra))
        if not results[-1][1] and len(bundle) > 1:
            results += [run([name], extra) for name in bundle]
    print()
    for told, is_well, closing in results:
        print(f"{'ok' if is_well else 'FAILED':<8}{told}: {closing}")
    return 0 if all(is_well for _, is_well, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
