#!/bin/sh
# Everything that reads code without running it.
set -eu
cd "$(dirname "$0")/.."
bin=${BIN:-.venv/bin}
config=python_client/pyproject.toml

"$bin/ruff" format --config $config --check python_client tests
"$bin/ruff" check --config $config python_client tests
(cd python_client && "../$bin/mypy")
MYPYPATH=tests "$bin/mypy" --config-file $config --explicit-package-bases \
    tests/conftest.py tests/matrix.py tests/races/harness.py
# PS002 is `create or replace`, which is how rota upgrades its functions.
"$bin/pgspot" --ignore PS002 sql/[3-9]*.sql
if command -v shellcheck >/dev/null; then
    shellcheck -s sh install.sh tests/*.sh
    shellcheck .ci/run
else
    echo "shellcheck is not installed: the shell scripts were not checked" >&2
fi
