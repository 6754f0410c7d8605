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
cd ..
# All of them read for seconds, so they do it at once.
read=$(mktemp)
trap 'rm -f "$read"' EXIT
{
    tests/security/gate.sh && cd tests && "../$bin/python" -m pytest -q --no-header \
        -p no:cacheprovider contract/test_style.py contract/test_layers.py
} >"$read" 2>&1 &
beside=$!
MYPYPATH=tests:python_client/src:python_client/examples "$bin/mypy" --config-file $config --explicit-package-bases \
    python_client/src/rota python_client/examples/demo \
    tests/conftest.py tests/matrix.py tests/fuzz/arena.py tests/fuzz/arguments.py \
    tests/fuzz/calls.py tests/fuzz/hostile.py tests/fuzz/judge.py tests/fuzz/plain.py \
    tests/fuzz/shrink.py tests/fuzz/filled_database.py \
    tests/races/harness.py tests/races/play_races.py \
    tests/races/schedules.py tests/support/*.py \
    tests/bench/measure_all.py tests/bench/workloads/*.py \
    tests/faults/play_faults.py tests/faults/of_*.py tests/settings.py tests/pythons.py \
    tests/faults/history/*.py tests/model/*.py tests/mutants/*.py tests/security/*.py
wait $beside || {
    cat "$read"
    exit 1
}
if command -v shellcheck >/dev/null; then
    shellcheck -s sh install.sh tests/*.sh tests/security/*.sh
    shellcheck .ci/run
else
    echo "shellcheck is not installed: the shell scripts were not checked" >&2
fi
