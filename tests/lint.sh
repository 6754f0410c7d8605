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
    tests/conftest.py tests/matrix.py tests/races/harness.py tests/races/run.py \
    tests/races/schedules.py tests/races/storm_*.py tests/races/tickers.py \
    tests/bench/run.py tests/bench/workloads/*.py
# The whole install as one script, because the manifest pins the search_path for all parts.
# PS002 is `create or replace`, which is how rota upgrades its functions: they are in a
# schema that the install has made itself.  A procedure that commits cannot have a search_path;
# this one sets it in each transaction.
flat=$(mktemp)
trap 'rm -f "$flat"' EXIT
awk -v vars="fresh with_roles with_cron" -f sql/flatten.awk sql/install.sql >"$flat"
"$bin/pgspot" --ignore PS002 \
    --proc-without-search-path 'rota.tick_loop(duration interval,every interval)' "$flat"
if command -v shellcheck >/dev/null; then
    shellcheck -s sh install.sh tests/*.sh
    shellcheck .ci/run
else
    echo "shellcheck is not installed: the shell scripts were not checked" >&2
fi
