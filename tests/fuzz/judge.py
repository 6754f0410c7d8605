"""What stands beside each function and tells how a call went.

For each function there is `rota_fuzz.call_NAME` with the same arguments.  It calls the function
in a subtransaction, whose outcome it tells as one row, and undoes what the call did unless told
to keep it.  So a hundred calls go in one message, and each finds the world as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import class_row

from invariants import BROKEN

JUDGE = f"""
create type rota_fuzz.verdict as (
    step text, state text, message text, milliseconds float8, rows_written bigint,
    locks_left bigint
);
create table rota_fuzz.tables as
select c.oid from pg_class as c where c.relnamespace = 'rota'::regnamespace and c.relkind = 'r';

create function rota_fuzz.rows_written()
    returns bigint
    language sql
as $$
    select sum(pg_stat_get_xact_tuples_inserted(t.oid) + pg_stat_get_xact_tuples_updated(t.oid)
        + pg_stat_get_xact_tuples_deleted(t.oid))
    from rota_fuzz.tables as t;
$$;

create function rota_fuzz.session_locks()
    returns bigint
    language sql
as $$
    select count(*) from pg_locks as l
    where l.locktype = 'advisory' and l.pid = pg_backend_pid();
$$;

create function rota_fuzz.later(duration interval)
    returns void
    language sql
as $$
    select set_config('rota_fuzz.now', (rota.now() + duration)::text, true);
$$;

create function rota_fuzz.tick_well()
    returns void
    language plpgsql
as $$
declare
    v_tick record;
    v_error text;
begin
    select * into v_tick from rota.tick();
    if v_tick is distinct from null and num_nulls(v_tick.jobs_swept, v_tick.jobs_expired,
        v_tick.jobs_enqueued, v_tick.checks_done, v_tick.jobs_deleted) > 0 then
        raise exception using
            errcode = 'FZ001', message = 'a part of the tick failed: ' || v_tick;
    end if;
    select format('schedule %s: %s', d.name, d.last_error) into v_error
    from rota.job_definitions as d where d.last_error is not null;
    if found then
        raise exception using errcode = 'FZ001', message = v_error;
    end if;
end;
$$;

/* What the call did must not stop anything later: claim all there is, fail, retry, finish. */
create function rota_fuzz.go_on()
    returns void
    language plpgsql
as $$
declare
    v_queues constant text[] := array(
        select j.queue from rota.jobs as j
        where j.queue !~ '^forward:' -- which claim_jobs() refuses
        group by 1 limit 1000
    );
    v_broken text;
begin
    select format('job %s %s', b.id, b.rule) into v_broken from (
        {BROKEN}
    ) as b;
    if found then
        raise exception using errcode = 'FZ001', message = v_broken;
    end if;
    perform count(v::text) from rota.job_runs as v;
    perform count(v::text) from rota.queue_stats as v;
    perform count(v::text) from rota.limit_stats as v;
    perform count(v::text) from rota.running_jobs as v;
    perform count(v::text) from rota.stale_jobs as v;
    perform count(v::text) from rota.dead_jobs as v;
    perform count(v::text) from rota.error_groups as v;
    perform count(v::text) from rota.hourly_stats as v;
    perform count(v::text) from rota.ticker_health as v;
    perform count(v::text) from rota.worker_health as v;
    perform rota_fuzz.tick_well();
    perform rota.fail_job(c.job_id, c.lease_token, 'it broke')
    from rota.claim_jobs('after', v_queues, 100, '1 minute') as c;
    perform rota_fuzz.later('1 day');
    perform rota_fuzz.tick_well();
    perform rota.finish_job(c.job_id, c.lease_token)
    from rota.claim_jobs('after', v_queues, 100) as c;
end;
$$;
"""

CALLER = """
create or replace function rota_fuzz.call_{name}(how_to text{comma}{arguments})
    returns rota_fuzz.verdict
    language plpgsql
as $$
#variable_conflict use_column
declare
    fz rota_fuzz.verdict;
    fz_rows bigint := rota_fuzz.rows_written();
    fz_locks bigint := {locks};
    fz_began timestamptz := clock_timestamp();
begin
    fz.step := 'call';
    begin
        {statement};
        fz.milliseconds := 1000 * extract(epoch from clock_timestamp() - fz_began);
        if call_{name}.how_to = 'check' then
            fz.step := 'after';
            perform rota_fuzz.go_on();
        end if;
        fz.state := '00000';
        if call_{name}.how_to <> 'keep' then
            raise sqlstate 'FZ000';
        end if;
    exception
        when query_canceled or assert_failure or others then
            if sqlstate <> 'FZ000' then
                fz.state := sqlstate;
                fz.message := sqlerrm;
                fz.rows_written := rota_fuzz.rows_written() - fz_rows;
                fz.locks_left := {locks} - fz_locks;
            end if;
    end;
    fz.milliseconds := coalesce(
        fz.milliseconds, 1000 * extract(epoch from clock_timestamp() - fz_began));
    return fz;
end;
$$;
"""

FUNCTIONS = """
select
    p.proname::text as name,
    p.prokind::text as kind,
    coalesce((proargnames::text[])[1:pronargs], '{}') as names,
    array(select format_type(t.oid, null) from unnest(p.proargtypes::oid[]) with ordinality
        as t (oid, n) order by t.n) as types,
    p.pronargs - p.pronargdefaults as required,
    pg_get_function_arguments(p.oid) as arguments,
    p.prosrc ~ 'advisory' as has_locks,
    coalesce(obj_description(p.oid, 'pg_proc'), '') as comment
from pg_proc as p
where p.pronamespace = 'rota'::regnamespace
  and p.proname !~ '^_'
  and p.proname ~ %s
order by p.proname
"""


@dataclass(frozen=True)
class Function:
    """What the catalog says of a function."""

    name: str
    kind: str
    names: list[str]
    types: list[str]
    required: int
    arguments: str
    has_locks: bool
    comment: str


def functions(db: psycopg.Connection[Any], only: str = "") -> list[Function]:
    """Return the public functions, or those whose names match."""
    with db.cursor(row_factory=class_row(Function)) as cursor:
        return cursor.execute(FUNCTIONS, [only]).fetchall()


def add_caller(db: psycopg.Connection[Any], function: Function) -> None:
    """Put the judge of one function beside it."""
    passed = ", ".join(f"{name} => call_{function.name}.{name}" for name in function.names)
    called = f"rota.{function.name}({passed})"
    db.execute(
        CALLER.format(
            name=function.name,
            arguments=function.arguments,
            comma=", " * bool(function.arguments),
            locks="rota_fuzz.session_locks()" if function.has_locks else "0",
            statement=f"call {called}" if function.kind == "p" else f"perform * from {called}",
        )
    )
