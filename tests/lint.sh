#!/bin/sh
# Everything that reads code without running it.
set -eu
cd "$(dirname "$0")/.."
bin=${BIN:-.venv/bin}
config=python_client/pyproject.toml

"$bin/ruff" format --config $config --check --quiet tests
"$bin/ruff" check --config $config tests
cd python_client
"../$bin/ruff" format --check --quiet
"../$bin/ruff" check
"../$bin/mypy"
cd ..
MYPYPATH=tests "$bin/mypy" --config-file $config --explicit-package-bases \
    tests/conftest.py tests/matrix.py tests/fuzz/arena.py tests/fuzz/arguments.py \
    tests/fuzz/calls.py tests/fuzz/hostile.py tests/fuzz/judge.py tests/fuzz/plain.py \
    tests/fuzz/shrink.py tests/fuzz/world.py tests/races/harness.py tests/races/run.py \
    tests/races/schedules.py tests/races/storm_*.py tests/races/tickers.py \
    tests/bench/run.py tests/bench/workloads/*.py \
    tests/faults/faults.py tests/faults/of_*.py tests/settings.py \
    tests/history/*.py tests/model/*.py tests/mutants/*.py tests/security/*.py
# Not asked: assertions for the type checker, random numbers that spread load, and programs
# that are started from a list of words.  The demo makes SQL of names that it chose itself.
skips=B101,B311,B404,B603
"$bin/bandit" -q -r -s "$skips" -x python_client/src/rota/demo python_client/src
"$bin/bandit" -q -r -s "$skips,B608" python_client/src/rota/demo
# The whole install as one script, because the manifest pins the search_path for all parts.
# PS002 is `create or replace`, which is how rota upgrades its functions: they are in a
# schema that the install has made itself.  A procedure that commits cannot have a search_path;
# this one sets it in each transaction.
# PS015 is PS002 for views, on the way of an upgrade, which finds its schema.
flat=$(mktemp)
trap 'rm -f "$flat"' EXIT
spot() {
    "$bin/pgspot" "$@" \
        --proc-without-search-path 'rota.tick_loop(duration interval,every interval)' "$flat"
}
awk -v vars="fresh with_roles with_cron" -f sql/flatten.awk sql/install.sql >"$flat"
spot --ignore PS002
awk -v vars="with_roles with_cron" -f sql/flatten.awk sql/install.sql >"$flat"
spot --ignore PS002 --ignore PS015
awk -f sql/flatten.awk sql/uninstall.sql >"$flat"
spot
if command -v shellcheck >/dev/null; then
    shellcheck -s sh install.sh tests/*.sh
    shellcheck .ci/run
else
    echo "shellcheck is not installed: the shell scripts were not checked" >&2
fi
