#!/bin/sh
# Bring what the tests need beside Python: a PostgreSQL server with pg_cron,
# plpgsql_check and PL/Proxy, pgbouncer, npm, chromium, the SQL exporter.  Does nothing when all is there; as root on Debian or
# Ubuntu it installs the rest, and anybody else gets a list.
set -eu

# The newest server that is installed, else the newest that can be.
major=$(find /usr/lib/postgresql -mindepth 1 -maxdepth 1 -name '[0-9]*' 2>/dev/null |
    sed 's|.*/||' | sort -n | tail -n 1)
if [ -z "$major" ] && command -v apt-cache >/dev/null; then
    major=$(apt-cache depends postgresql 2>/dev/null | sed -n 's/.*postgresql-\([0-9]*\)$/\1/p' | tail -n 1)
fi
major=${major:-15}

missing=
needs() { # package, and a file or command that shows that it is there
    case $2 in
        /*) [ ! -e "$2" ] || return 0 ;;
        *) ! command -v "$2" >/dev/null || return 0 ;;
    esac
    missing="$missing $1"
}
needs "postgresql-$major" "/usr/lib/postgresql/$major/bin/postgres"
needs "postgresql-client-$major" psql
needs "postgresql-$major-cron" "/usr/lib/postgresql/$major/lib/pg_cron.so"
needs "postgresql-$major-plpgsql-check" "/usr/lib/postgresql/$major/lib/plpgsql_check.so"
needs "postgresql-$major-plproxy" "/usr/lib/postgresql/$major/lib/plproxy.so"
needs pgbouncer pgbouncer
needs npm npm
needs chromium chromium
needs shellcheck shellcheck
needs util-linux setpriv
needs systemd systemd-analyze
needs iproute2 ip
needs faketime faketime
needs prometheus-sql-exporter prometheus-sql-exporter
python3 -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"
[ -n "$missing" ] || exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "The tests need these Debian packages, or what they hold:$missing" >&2
    echo "Tests that lack theirs are skipped." >&2
    command -v psql >/dev/null || exit 1
    exit 0
fi
echo "Installing$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -q >/dev/null
# shellcheck disable=SC2086  # a list of packages
apt-get install -q -y --no-install-recommends $missing >/dev/null
