#!/bin/sh
# Install rota into a PostgreSQL database, look at it there, or remove it.
set -u

self=$(basename -- "$0")
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P) || exit 2

usage() {
    cat <<END
Usage: ./$self [OPTION]... [URL]

Install rota into a PostgreSQL database, or upgrade it.
Everything happens in one transaction: if it fails, nothing has changed.
You can run it again at any time.

Which database:
  -d, --dbname URL     a URL such as postgresql://app@db.example.com/app, a libpq string
                       such as "host=db dbname=app", or the name of a database
                       Default: DATABASE_URL, else the defaults of libpq:
                       PGHOST, PGPORT, PGUSER, PGDATABASE, PGSERVICE and ~/.pgpass.
The role needs CONNECT and CREATE on that database, and need not be a superuser.

What to install:
      --with-roles     also create the roles rota_producer, rota_worker, rota_operator and
                       rota_observer (needs CREATEROLE)
      --with-cron      also let pg_cron tick every second, by rota.start_ticker()
                       Not needed while workers run: each of them ticks too.
      --force          even if a newer rota is installed
      --dry-run        print the SQL and change nothing: the upgrade for a database with
                       rota, otherwise, or without a database, the whole install

What else it can do:
      --status         show what is installed there and what calls tick()
      --print-grants ACCESS ROLE
                       print the grants that give ROLE access as producer, worker,
                       operator or observer, to read first and then run
      --uninstall      remove rota with all its jobs; asks first
      --yes            do not ask
      --version        print the version of these files
  -h, --help           print this

Exit codes: 0 done; 1 refused, not confirmed or not installed; 2 wrong usage; 3 the SQL
failed and nothing has changed; 4 no connection; 5 psql is missing or the server is too old.

Examples:
  ./$self                                         into the database of your PG* settings
  ./$self postgresql://app@localhost/app          into that one
  ./$self --dry-run > rota.sql                    for a migration tool or a review
  ./$self --print-grants worker app | psql        let the role app run jobs
END
}

say() { printf '%s\n' "$*"; }

fail() {
    code=$1
    shift
    printf '%s: %s\n' "$self" "$*" >&2
    exit "$code"
}

misused() { fail 2 "$*; see ./$self --help"; }

choose() {
    [ "$action" = install ] || misused "--$action and --$1 do not go together"
    action=$1
}

# --- the command line

action=install
target=
dry_run=
with_roles=
with_cron=
force=
confirmed=
access=
role=

while [ $# -gt 0 ]; do
    case $1 in
        -d | --dbname)
            [ $# -ge 2 ] || misused "$1 needs a URL"
            target=$2
            shift
            ;;
        --dbname=*) target=${1#--dbname=} ;;
        --with-roles) with_roles=1 ;;
        --with-cron) with_cron=1 ;;
        --dry-run) dry_run=1 ;;
        --force) force=1 ;;
        --status | --uninstall | --version) choose "${1#--}" ;;
        --print-grants)
            [ $# -ge 3 ] || misused "--print-grants needs an access and a role"
            choose print-grants
            access=$2 role=$3
            case $role in -*) misused "--print-grants needs an access and a role" ;; esac
            shift 2
            ;;
        -y | --yes) confirmed=1 ;;
        -h | --help)
            usage
            exit 0
            ;;
        -*) misused "unknown option $1" ;;
        postgres://* | postgresql://* | postgres+*://* | postgresql+*://*)
            [ -z "$target" ] || misused "there are two databases to choose from"
            target=$1
            ;;
        *://*) misused "this is no URL of a PostgreSQL database" ;;
        '') misused "the URL is empty" ;;
        *)
            [ -z "$target" ] || misused "there are two databases to choose from"
            target=$1
            ;;
    esac
    shift
done

version=$(sed -n "s/^ *select '\([0-9][^']*\)'.*/\1/p" "$here/sql/base/version.sql" 2>/dev/null)
[ -n "$version" ] || fail 2 "the folder sql is not beside this script; run it from its own checkout"
if [ "$action" = version ]; then
    say "rota $version"
    exit 0
fi

# --- the connection: a password leaves the command line, where any user could see it

target=${target:-${DATABASE_URL:-}}
# A URL for SQLAlchemy names a driver, which libpq does not understand.
case $target in
    postgres+*://* | postgresql+*://*) target=${target%%+*}://${target#*://} ;;
esac

# Print the target without its password; with `password`, print the password alone.
split_target() {
    printf '%s\n' "$target" | awk -v wanted="${1:-target}" '
        function decode(text,    out, code) {
            while (match(text, /%[0-9A-Fa-f][0-9A-Fa-f]/)) {
                code = index(hex, tolower(substr(text, RSTART + 1, 1))) * 16 - 17
                code += index(hex, tolower(substr(text, RSTART + 2, 1)))
                out = out substr(text, 1, RSTART - 1) sprintf("%c", code)
                text = substr(text, RSTART + 3)
            }
            return out text
        }
        function unescape(text,    out) {
            while (match(text, /\\./)) {
                out = out substr(text, 1, RSTART - 1) substr(text, RSTART + 1, 1)
                text = substr(text, RSTART + 2)
            }
            return out text
        }
        function cut(length_of_name) {
            password = substr(rest, RSTART + length_of_name, RLENGTH - length_of_name)
            rest = substr(rest, 1, RSTART - 1) substr(rest, RSTART + RLENGTH)
        }
        BEGIN { hex = "0123456789abcdef" }
        { rest = rest (NR > 1 ? "\n" : "") $0 }
        END {
            if (match(rest, /^postgres(ql)?:\/\//)) {
                scheme = substr(rest, 1, RLENGTH)
                rest = substr(rest, RLENGTH + 1)
                if (match(rest, /^[^:@\/]*:[^@\/]*@/)) {
                    match(rest, /:[^@\/]*/)
                    cut(1)
                    password = decode(password)
                }
                if (match(rest, /[?&]password=[^&]*/)) {
                    first = substr(rest, RSTART, 1)
                    cut(10)
                    password = decode(password)
                    if (first == "?") sub(/&/, "?", rest)
                }
                rest = scheme rest
            } else if (rest ~ /=/) {
                rest = " " rest
                if (match(rest, /[ \t]password[ \t]*=[ \t]*(\047([^\047\\]|\\.)*\047|[^ \t\047]([^ \t\\]|\\.)*)/)) {
                    cut(1)
                    sub(/^password[ \t]*=[ \t]*/, "", password)
                    if (password ~ /^\047/) password = substr(password, 2, length(password) - 2)
                    password = unescape(password)
                }
                sub(/^[ \t]+/, "", rest)
            }
            print (wanted == "password" ? password : rest)
        }'
}

case $target in
    *sslpassword*) fail 2 "put sslpassword into a service file and name that with PGSERVICE" ;;
    *password* | postgres*:*@*)
        password=$(LC_ALL=C split_target password)
        target=$(LC_ALL=C split_target)
        [ -z "$password" ] || export PGPASSWORD="$password"
        ;;
esac
# What libpq cannot read it repeats in its message, password and all.
case ${target%%\?*} in
    postgres*://*@*@* | postgres*://*[:/]*@*)
        fail 2 "the URL cannot be read; write @ : / of a password as %40 %3A %2F"
        ;;
esac

command -v psql >/dev/null 2>&1 ||
    fail 5 "psql is missing; install the PostgreSQL client (Debian: apt install postgresql-client)"

export PGAPPNAME='rota install' PGCLIENTENCODING=UTF8

run_psql() {
    if [ -n "$target" ]; then
        psql -X -q -v ON_ERROR_STOP=1 -d "$target" "$@"
    else
        psql -X -q -v ON_ERROR_STOP=1 "$@"
    fi
}

# One message, so it is one transaction, in which no schema that others may fill is looked at.
ask() { run_psql -A -t -c "set local search_path = pg_catalog, pg_temp; $1"; }

# --- the actions

require_installed() {
    [ "$installed" = t ] || fail 1 "rota is not installed in $place"
    [ "$may_use" = t ] || fail 1 "rota is installed in $place, but this role may not use it; \
let its owner see $self --print-grants"
    # Whatever its owner has put there would run with the rights of a superuser.
    [ "$is_trusted" = t ] || fail 1 "rota belongs to another role in $place; \
run this as its owner, for example with PGOPTIONS='-c role=ROLE'"
}

print_sql() {
    vars="${with_roles:+with_roles }${with_cron:+with_cron }${force:+allow_downgrade }"
    applied=
    first=$(ask "select exists (select from pg_class as c where c.relname = 'upkeep'
        and c.relnamespace = to_regnamespace('rota'))")
    if [ "$first" = t ]; then
        vars="${vars}is_first fresh"
    elif [ "$installed" = t ]; then
        require_installed
        applied=$(ask 'select id from rota.upgrade_log order by id' | tr '\n' ' ')
    else
        vars="${vars}fresh"
    fi
    awk -v vars="$vars" -v applied="$applied" -f "$here/sql/flatten.awk" "$1" || exit 2
}

show_status() {
    say "where         $place"
    say "server        PostgreSQL $server_version"
    if [ "$installed" != t ]; then
        say "rota          not installed (these files: $version)"
        exit 1
    fi
    require_installed
    say "rota          $(ask 'select rota.version()') (these files: $version)"
    cron=$(ask "select extversion from pg_extension where extname = 'pg_cron'")
    say "pg_cron       ${cron:-not in this database}"
    ticker=
    if [ "$(ask "select has_schema_privilege(to_regnamespace('cron'), 'usage')")" = t ]; then
        ticker=$(ask "
            select string_agg(concat('pg_cron, ', j.schedule,
                                     case when not j.active then ' (switched off)' end), '; ')
            from cron.job as j
            where j.command like '%rota.tick%' and j.database = current_database()")
    fi
    say "ticker        ${ticker:-the workers, while one runs (this role has no pg_cron job for it)}"
    last=
    if [ "$(ask "select has_table_privilege('rota.ticker_health', 'select')")" = t ]; then
        last=$(ask "
            select coalesce(date_trunc('second', lag) || ' ago, by ' || last_tick_by, 'never')
                || case when schedules_overdue > 0
                    then '; schedules overdue: ' || schedules_overdue else '' end
            from rota.ticker_health")
    fi
    say "last tick     ${last:-not for this role to see}"
    live=$(ask "select case when has_table_privilege('rota.jobs', 'select') then 't' end")
    [ -z "$live" ] || live=$(ask 'select count(*) from rota.jobs')
    say "live jobs     ${live:-not for this role to see}"
}

uninstall() {
    require_installed
    [ "$is_owner" = t ] || fail 1 "rota belongs to another role in $place"
    live=$(ask 'select count(*) from rota.jobs') || exit 3
    kept=$(ask 'select count(*) from rota.finished_jobs') || exit 3
    if [ -z "$confirmed" ]; then
        say "This removes rota from $place, with its history, schedules and settings;"
        say "live jobs: $live, finished jobs: $kept."
        [ -t 0 ] || fail 1 "no terminal to ask on; add --yes if you are sure"
        printf 'Remove it? [y/N] '
        read -r answer || answer=
        case $answer in
            [yY] | [yY][eE][sS]) ;;
            *) fail 1 "nothing was removed" ;;
        esac
    fi
    run_psql -f "$here/sql/uninstall.sql" || fail 3 "nothing was removed"
    say "rota is removed from $place; live jobs: $live, finished jobs: $kept."
}

install() {
    before=
    # The SQL refuses what belongs to others, so nothing of it may run before.
    [ "$is_ours" != t ] || before=$(ask 'select rota.version()')
    run_psql ${with_roles:+-v with_roles=1} ${with_cron:+-v with_cron=1} \
        ${force:+-v allow_downgrade=1} -f "$here/sql/install.sql" || fail 3 "the SQL failed; nothing has changed in $place"
    if [ "$before" = "$version" ]; then
        say "rota $version is up to date in $place; it was there already."
    elif [ -n "$before" ]; then
        say "rota $version is installed in $place, where it was $before."
    else
        say "rota $version is installed in $place. Try it:"
        say "    select rota.enqueue('hello', '{\"name\": \"world\"}');"
        say "    select * from rota.claim_jobs('me');"
    fi
}

if ! facts=$(ask "
    select current_setting('server_version_num')::int / 10000, current_setting('server_version'),
           exists (select from pg_catalog.pg_class as c
                   where c.relnamespace = to_regnamespace('rota') and c.relname = 'upgrade_log'),
           coalesce(has_schema_privilege(to_regnamespace('rota'), 'usage'), false),
           coalesce((select pg_has_role(n.nspowner, 'usage') from pg_catalog.pg_namespace as n
                     where n.nspname = 'rota'), false),
           o.is_ours, o.is_ours or not (select r.rolsuper from pg_catalog.pg_roles as r
                                        where r.rolname = current_user),
           format('database %s (role %s)', current_database(), current_user)
    from (select count(*) = 3 and bool_and(p.owner = to_regrole(quote_ident(current_user)))
                 as is_ours
          from (select n.nspowner as owner from pg_catalog.pg_namespace as n
                where n.nspname = 'rota'
                union all
                select c.relowner from pg_catalog.pg_class as c
                where c.relnamespace = to_regnamespace('rota') and c.relname = 'upgrade_log'
                union all
                select f.proowner from pg_catalog.pg_proc as f
                where f.pronamespace = to_regnamespace('rota') and f.proname = 'version') as p
         ) as o"); then
    [ -n "$dry_run" ] || fail 4 "no connection to the database"
    say "$self: no connection, so this is the SQL for a database without rota" >&2
    facts='99|unknown|f|f|f|f|f|no database'
fi
IFS='|' read -r major server_version installed may_use is_owner is_ours is_trusted place <<END
$facts
END
[ "$major" -ge 14 ] || fail 5 "rota needs PostgreSQL 14 or newer, and this server is $server_version"

case $action${dry_run:+ dry} in
    install) install ;;
    'install dry') print_sql "$here/sql/install.sql" ;;
    uninstall) uninstall ;;
    'uninstall dry') print_sql "$here/sql/uninstall.sql" ;;
    status*) show_status ;;
    print-grants*)
        require_installed
        run_psql -A -t -v access="$access" -v role="$role" <<'END' || exit 3
select g.statement from rota.grant_statements(:'access', :'role') as g(statement);
END
        ;;
esac
