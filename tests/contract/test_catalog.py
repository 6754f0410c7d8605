"""What is promised of every function, view and table, asked of the catalog and of the text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg
import pytest

Db = psycopg.Connection[Any]

pytestmark = pytest.mark.plain_session

SQL = Path(__file__).resolve().parents[2] / "sql"
PARTS = sorted({*SQL.glob("*/*.sql")} - {*SQL.glob("upgrades/*.sql")})

# Arguments that mean no column.  All others are named as the column that they mean, or as
# its plural for a list; and job_id is what every table but jobs itself calls the job.
WORDS = {
    "retry_budget": "jsonb",
    "access": "text",
    "after_id": "bigint",
    "arguments": "jsonb",
    "dry_run": "boolean",
    "active": "boolean",
    "blocks": "bigint",
    "claimed": "boolean",
    "database": "integer",
    "databases": "jsonb",
    "delay": "interval",
    "duration": "interval",
    "error": "text",
    "every": "interval",
    "if_unknown": "text",
    "fatal": "boolean",
    "force": "boolean",
    "group_by": "text[]",
    "reset": "boolean",
    "jobs": "jsonb",
    "keep": "interval",
    "settle_above": "bigint",
    "facts": "jsonb",
    "from_database": "integer",
    "moving": "boolean",
    "max_bytes": "integer",
    "max_jobs": "integer",
    "max_rows": "integer",
    "max_runs": "integer",
    "max_wait": "interval",
    "message": "text",
    "name": "text",
    "number": "integer",
    "on_conflict": "text",
    "percent": "double precision",
    "poll_interval": "interval",
    "reason": "text",
    "retry_in": "interval",
    "role": "name",
    "unique_for": "interval",
    "version": "text",
}
# An integer outside of smallint is refused by name and not by a cast.
WIDER = {"priority": "integer"}
# Where the same word is about times and not about jobs.
MOMENTS = {("next_run", "after"), ("upcoming_runs", "after")}
LISTS = {
    "depends_on": "bigint[]",
    "endings": "jsonb",
    "enqueue_times": "timestamp with time zone[]",
    "job_ids": "bigint[]",
    "job_types": "text[]",
    "lease_tokens": "bigint[]",
    "kept_job_ids": "bigint[]",
    "kept_lease_tokens": "bigint[]",
    "next_stages": "text[]",
    "queues": "text[]",
    "results": "jsonb",
    "stages": "jsonb",
}
# Changes of a job that has perhaps a worker, and why no token guards them.
UNGUARDED = {
    "claim_jobs": "takes rows that it has just locked in a waiting state",
    "_open_jobs": "a blocked job has no worker",
    "_move_leases": "gives each worker the rest of its lease, whoever it is",
    "_cancel_children": "a blocked job has no worker",
    "_requeue": "an operator takes the job away by force, under the lock of retry_job()",
    "_begin_rerun": "its caller takes the jobs from their workers",
    "_update_keyed": "leaves a running job as it is",
    "_change_jobs": "takes locked rows, and of those that run the priority alone",
    "_place_jobs": "takes waiting rows that the caller has locked",
    "_open_for": "takes waiting rows that it has just locked",
    "_check_queue": "takes waiting rows that it has just locked",
    "_take_out": "takes waiting rows that it has just locked",
    "_enter_moved": "takes waiting rows that its transaction has just inserted",
    "take_forwards": "takes rows that it has just locked in a waiting state",
    "_admit_jobs": "takes rows that the claim has just locked in a waiting state",
    "_hold_unfit": "takes waiting rows that the claim has just locked",
    "_hold_probes": "takes waiting rows that it has just locked",
    "_hold_retries": "takes failed jobs that wait, whose rows the caller has locked",
    "_count_running": "changes what the job counts for, and nothing that the worker relies on",
    "_edit_jobs": "takes rows that the caller has locked, none of which run",
    "_cancel_jobs": "takes rows that the caller has locked, and asks those that run",
}
_GLANCE = {"pg_try_advisory_lock", "pg_advisory_unlock"}
_GLANCE_SHARED = {"pg_try_advisory_lock_shared", "pg_advisory_unlock_shared"}
LOCKS = {
    "_share_lock": {"pg_try_advisory_lock_shared"},
    "_take_listen_slots": {"pg_try_advisory_lock"},
    "_give_up": {"pg_advisory_unlock", "pg_advisory_unlock_shared"},
    "_held_locks": {"advisory"},
    "_try_lock": {"pg_try_advisory_xact_lock"},
    "report_worker": {"pg_try_advisory_xact_lock"},
    "_others_hold": _GLANCE,
    "_notify": _GLANCE | _GLANCE_SHARED,
    "_notify_slots": _GLANCE | _GLANCE_SHARED,
    "_waiting_pids": {"advisory"},
    "wait_for_result": {"advisory", "pg_advisory_unlock_shared"},
}
# Neither is possible where a procedure commits: it runs as its caller, on a path of its own.
COMMITTING = ["tick_loop"]


def ask(db: Db, query: str) -> list[Any]:
    return db.execute(query).fetchall()  # type: ignore[arg-type]


def public_functions(db: Db) -> list[Any]:
    return ask(
        db,
        "select oid::regprocedure::text, proname::text, proargnames, proargmodes::text[],"
        " array(select format_type(t, null)"
        "  from unnest(coalesce(proallargtypes, proargtypes::oid[])) as t)"
        " from pg_proc where pronamespace = 'rota'::regnamespace and proname not like '\\_%'",
    )


def test_public_functions_run_as_their_owner_with_a_fixed_search_path(db: Db) -> None:
    loose = ask(
        db,
        "select proname::text from pg_proc"
        " where pronamespace = 'rota'::regnamespace and not (prosecdef"
        " and coalesce(proconfig, '{}') @> '{\"search_path=pg_catalog, pg_temp\"}')"
        " and (proname not like '\\_%' or prorettype = 'trigger'::regtype)",
    )

    assert [name for (name,) in loose] == COMMITTING
    assert len(public_functions(db)) >= 25


def test_private_functions_are_for_their_owner_alone(db: Db) -> None:
    open_to_others = ask(
        db,
        "select p.oid::regprocedure::text from pg_proc as p,"
        " aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as a"
        " where p.pronamespace = 'rota'::regnamespace and p.proname like '\\_%'"
        " and a.grantee <> p.proowner",
    )

    assert open_to_others == []


def test_functions_are_not_for_public(db: Db) -> None:
    public = ask(
        db,
        "select p.oid::regprocedure::text from pg_proc as p,"
        " aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as a"
        " where p.pronamespace = 'rota'::regnamespace and a.grantee = 0",
    )

    assert public == []


def test_functions_have_one_form_each(db: Db) -> None:
    overloaded = ask(
        db,
        "select proname from pg_proc where pronamespace = 'rota'::regnamespace"
        " group by 1 having count(*) > 1",
    )

    assert overloaded == []


def test_functions_that_keep_to_indexes_pay_no_compiler(db: Db) -> None:
    """A plan that is priced out of its alternatives looks so dear that it would be compiled."""
    priced = ask(
        db,
        "select proname::text from pg_proc where pronamespace = 'rota'::regnamespace"
        " and proname not like '\\_%' and array_to_string(proconfig, ' ') like '%enable_%'"
        " and not proconfig @> '{jit=off}'",
    )

    assert priced == []


def test_functions_are_never_strict(db: Db) -> None:
    strict = ask(
        db,
        "select proname::text from pg_proc"
        " where pronamespace = 'rota'::regnamespace and proisstrict",
    )

    assert strict == []


def test_all_that_is_public_is_explained(db: Db) -> None:
    silent = ask(
        db,
        "select p.oid::regprocedure::text from pg_proc as p"
        " where p.pronamespace = 'rota'::regnamespace and p.proname not like '\\_%'"
        " and obj_description(p.oid, 'pg_proc') is null"
        " union all"
        " select c.oid::regclass::text from pg_class as c"
        " where c.relnamespace = 'rota'::regnamespace and c.relkind in ('r', 'p', 'v')"
        " and c.relname not like '\\_%' and obj_description(c.oid, 'pg_class') is null",
    )

    assert silent == []


def test_arguments_bear_the_names_and_types_of_their_columns(db: Db) -> None:
    columns = dict(
        ask(
            db,
            "select attname::text, min(format_type(atttypid, null)) from pg_attribute as a"
            " join pg_class as c on c.oid = a.attrelid and c.relkind in ('r', 'p')"
            " where c.relnamespace = 'rota'::regnamespace and attnum > 0 and not attisdropped"
            " and attname not in ('id', 'name') group by 1",
        )
    )
    expected = {**columns, **WORDS, **WIDER, **LISTS}

    found = {
        (function, name, kind)
        for _, function, names, modes, types in public_functions(db)
        for name, mode, kind in zip(names or [], modes or ["i"] * 99, types, strict=False)
        if mode == "i" and (function, name) not in MOMENTS
    }

    assert {x for x in found if expected.get(x[1]) != x[2]} == set()
    assert set(WORDS) | set(LISTS) <= {name for _, name, _ in found}


def test_ids_tokens_and_sequences_are_bigint(db: Db) -> None:
    narrow = ask(
        db,
        "select attrelid::regclass::text, attname::text from pg_attribute"
        " join pg_class as c on c.oid = attrelid and c.relkind in ('r', 'p', 'v')"
        " where c.relnamespace = 'rota'::regnamespace"
        " and (attname = 'id' or attname like '%\\_id' or attname like '%\\_token')"
        " and atttypid <> 'bigint'::regtype"
        " and c.relname <> 'upgrade_log'"
        " union all select seqrelid::regclass::text, '' from pg_sequence"
        " join pg_class as c on c.oid = seqrelid and c.relnamespace = 'rota'::regnamespace"
        " where seqtypid <> 'bigint'::regtype and c.relname <> 'id_timeline'",
    )

    assert narrow == []


def test_no_index_is_in_the_order_of_a_language(db: Db) -> None:
    """An upgrade of the operating system may change that order, and the index is broken."""
    rows = db.execute(
        """
        select distinct i.indexrelid::regclass::text
        from pg_index as i join pg_class as c on c.oid = i.indexrelid
        cross join unnest(i.indcollation) as o (id)
        where c.relnamespace = 'rota'::regnamespace
          and o.id not in (0, '"C"'::regcollation)
        """
    ).fetchall()
    assert rows == []


def test_moments_have_a_time_zone(db: Db) -> None:
    zoneless = ask(
        db,
        "select attrelid::regclass::text, attname::text from pg_attribute"
        " join pg_class as c on c.oid = attrelid and c.relnamespace = 'rota'::regnamespace"
        " where atttypid in ('timestamp'::regtype, 'date'::regtype)",
    )

    assert zoneless == []


FUNCTION = re.compile(
    r"^create or replace (?:function|procedure) rota\.(\w+)\((.*?)^(?:end )?\$\$;$",
    re.DOTALL | re.MULTILINE,
)
STATEMENT = re.compile(
    r"(?:update|delete from) rota\.jobs as j\b.*?(?:;|\n +returning\b)", re.DOTALL
)


def bodies() -> dict[str, str]:
    return {
        name: re.sub(r"--[^\n]*", "", body)
        for part in PARTS
        for name, body in FUNCTION.findall(part.read_text())
    }


def changes() -> list[tuple[str, str]]:
    return [
        (name, found[0])
        for name, body in bodies().items()
        for found in STATEMENT.finditer(body)
    ]


def test_changes_of_a_job_are_all_seen_by_these_tests() -> None:
    text = "".join(part.read_text() for part in PARTS)

    assert len(changes()) == len(
        re.findall(r"(?:update|delete from) (?:only )?rota\.jobs\b", text)
    )
    assert len(changes()) >= 11
    assert UNGUARDED.keys() <= {name for name, _ in changes()}


@pytest.mark.parametrize(
    ("function", "statement"), changes(), ids=[name for name, _ in changes()]
)
def test_changes_of_a_running_job_are_fenced_by_its_token(
    function: str, statement: str
) -> None:
    where = statement[
        statement.index("\n    where ")
        if "\n    where " in statement
        else statement.index("where ") :
    ]

    if function in UNGUARDED:
        assert "j.lease_token =" not in where, "take it off the list"
    else:
        assert re.search(r"\band j\.lease_token\s+= ", where)


def test_statuses_are_literals_where_a_partial_index_depends_on_them() -> None:
    code = bodies()
    for function in (
        "claim_jobs",
        "_next_lane",
        "_lock_lanes",
        "_lock_merged",
        "_lock_held",
        "_hold_unfit",
        "_check_pause",
        "_let_probes",
        "_lock_late",
    ):
        conditions = re.findall(
            r"\bj\.status\b(?! *=? *'running',)(?: in \([^)]*\)| = any\(\w+\)| *\S+ *\S*)",
            code[function],
        )
        assert conditions
        for condition in conditions:
            assert condition in (
                "j.status in ('queued', 'failed')",
                "j.status = 'running'",
                "j.status = any(c_waiting)",  # found by id
            )


def test_ids_are_drawn_behind_their_guard() -> None:
    """A drawn id is `nextval`, or the default of an insert that brings none."""
    for name, body in bodies().items():
        drawn = [*re.finditer(r"nextval\('rota\.jobs_id_seq'\)", body)]
        drawn += re.finditer(r"insert into rota\.jobs (?:as j )?\((?!id,)", body)
        guard = body.find("rota._guard_ids()")

        assert all(0 <= guard < draw.start() for draw in drawn), name


def test_nothing_reads_another_clock_or_takes_a_session_lock() -> None:
    for name, body in bodies().items():
        clocks = re.findall(
            r"(?<!rota\.)\bnow\(\)|\bcurrent_timestamp\b|\bclock_timestamp\b"
            r"|\btransaction_timestamp\b|\bstatement_timestamp\b|\blocaltimestamp\b",
            body,
        )
        allowed = {
            "now": ["clock_timestamp"],
            # Whether it is alone in its transaction, not what time it is.
            "_is_alone": ["transaction_timestamp", "statement_timestamp"],
            # And how long it has been at it.
            "tick_loop": ["clock_timestamp", "clock_timestamp"],
            # How long a count has taken, which its caller goes on with.
            "act_on_jobs": ["clock_timestamp", "clock_timestamp"],
        }
        assert clocks == allowed.get(name, []), name
        # What hinders nobody when it is held for ever, and the hints of who sleeps.
        locks = set(re.findall(r"\w*advisory\w*", body))
        assert locks <= LOCKS.get(name, set()), name
        assert not re.search(r"\bcreate temp|\blisten\b", body), name
        # What may be lost at any time, or lasts as long as the transaction or the call.
        settings = {
            "_findings",
            "_keep_scan_start",
            "_guard_ids",
            "_look_again_in",
            "_try_lock_key",
            "_raise_ids",
            "_receive_each",
            "_take_listen_slots",
            "_write_before_commit",
            "stop_waiting",
        }
        settings.update(COMMITTING)
        assert "set_config" not in body or name in settings, name
