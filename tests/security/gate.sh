#!/bin/sh
# Read the client and the SQL for holes: gate.sh [ROOT], which is the tree to read, else this one.
set -eu
root=${1:-$(dirname "$0")/../..}
bin=${BIN:-$(dirname "$0")/../../.venv/bin}

# Not asked: assertions for the type checker, random numbers that spread load, and programs
# that are started from a list of words.  The demo makes SQL of names that it chose itself.
skips=B101,B311,B404,B603
status=0
"$bin/bandit" -q -r -s "$skips" "$root/python_client/src" || status=1
"$bin/bandit" -q -r -s "$skips,B608" "$root/python_client/examples/demo" || status=1
# The whole install as one script, because the manifest pins the search_path for all parts.
# PS002 is `create or replace`, which is how rota upgrades its functions: they are in a
# schema that the install has made itself.  A procedure that commits cannot have a search_path;
# this one sets it in each transaction.
# PS015 is PS002 for views, on the way of an upgrade, which finds its schema.
flat=$(mktemp)
trap 'rm -f "$flat"' EXIT
spot() {
    "$bin/pgspot" "$@" \
        --proc-without-search-path 'rota.tick_loop(duration interval,every interval)' "$flat" ||
        status=1
}
# A private function has the owner and the path of the public one that called it, and nobody
# else may execute it (test_catalog.py): so it is read as if it had that path itself.
flatten() {
    awk -v vars="$1" -f "$root/sql/flatten.awk" "$root/sql/install.sql" | awk '
        /^create or replace function rota[.]_/ { is_private = 1; has_path = 0 }
        is_private && /set search_path/ { has_path = 1 }
        is_private && /as \$\$$/ {
            if (!has_path) sub(/as \$\$$/, "set search_path = pg_catalog, pg_temp as $$")
            is_private = 0
        }
        { print }' >"$flat"
}
flatten "fresh with_roles with_cron"
spot --ignore PS002
flatten "with_roles with_cron"
spot --ignore PS002 --ignore PS015
awk -f "$root/sql/flatten.awk" "$root/sql/uninstall.sql" >"$flat"
spot
exit $status
