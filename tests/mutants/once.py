"""Promises about keys, effects, order, dependencies, limits and schedules, each broken."""

from __future__ import annotations

from mutants.mutant import mutant, sql

ONCE = (
    mutant(
        "key-not-unique",
        "A key has as many live jobs as one likes.",
        "sql/tables/test_jobs.py sql/jobs/test_enqueue.py",
        sql(
            "tables/jobs",
            "create unique index jobs_idempotency_key_idx",
            "create index jobs_idempotency_key_idx",
        ),
        sql(
            "jobs/enqueue",
            """\
        on conflict (idempotency_key, coalesce('pipeline ' || pipeline, job_type))
            where idempotency_key is not null do nothing
        returning""",
            """\
        returning""",
        ),
        sql(
            "jobs/enqueue",
            """\
        order by n.idempotency_key, n.job_type, n.ordinal
        on conflict do nothing""",
            """\
        order by n.idempotency_key, n.job_type, n.ordinal""",
        ),
    ),
    mutant(
        "key-of-all-types",
        "A key finds the job of another type.",
        "sql/jobs/test_enqueue.py sql/jobs/test_keys.py",
        sql(
            "tables/jobs",
            "on rota.jobs (idempotency_key, coalesce('pipeline ' || pipeline, job_type))",
            "on rota.jobs (idempotency_key, coalesce('pipeline ' || pipeline, 'job'))",
        ),
    ),
    mutant(
        "batch-in-the-order-given",
        "Two batches that share keys insert them in any order, and wait in a circle.",
        "races/test_enqueue.py races/test_load.py",
        sql(
            "jobs/enqueue",
            "order by n.idempotency_key, n.job_type, n.ordinal",
            "order by n.ordinal",
        ),
    ),
    mutant(
        "batch-of-rules-in-the-order-given",
        "Two batches with rules for shared keys take them in any order.",
        "races/test_enqueue.py races/test_keys.py",
        sql(
            "jobs/keys",
            "order by m.idempotency_key, m.job_type, m.ordinal",
            "order by m.ordinal",
        ),
    ),
    mutant(
        "version-seen-twice",
        "An update of the version that was seen last runs once more.",
        "sql/jobs/test_keys.py races/test_keys.py",
        sql(
            "jobs/keys",
            "coalesce(k.source_updated_at, '-infinity') < excluded.source_updated_at",
            "coalesce(k.source_updated_at, '-infinity') <= excluded.source_updated_at",
        ),
    ),
    mutant(
        "unique-for-no-time",
        "A key makes another job before its time is over.",
        "sql/jobs/test_keys.py",
        sql(
            "jobs/keys",
            "coalesce(k.unique_until, '-infinity') <= v_now",
            "coalesce(k.unique_until, '-infinity') <= 'infinity'",
        ),
    ),
    mutant(
        "replace-reaches-a-running-job",
        "A replace makes a running job run again.",
        "sql/jobs/test_keys.py",
        sql("jobs/keys", "and (j.status <> 'running' or _update_keyed.is_rerun)", "and true"),
    ),
    mutant(
        "cancel-keeps-the-rerun",
        "A job is cancelled, and the run that was asked for before it comes all the same.",
        "sql/jobs/test_keys.py",
        sql(
            "jobs/control",
            """\
        -- What was asked for before the cancel is cancelled with it.
        rerun_payload = null,
        rerun_run_at = null,
        rerun_priority = null,
""",
            "",
        ),
    ),
    mutant(
        "effect-not-unique",
        "The same effect is recorded as often as one likes.",
        "sql/jobs/test_effects.py races/test_effects.py",
        sql("tables/effects", "    constraint effects_pkey primary key (scope, key),\n", ""),
    ),
    mutant(
        "effect-taken-from-its-holder",
        "An effect is done again while its first worker is at it.",
        "sql/jobs/test_effects.py races/test_effects.py",
        sql(
            "jobs/effects",
            "and rota._is_leased(v_effect.job_id, v_effect.lease_token)",
            "and false",
        ),
    ),
    mutant(
        "effect-not-locked",
        "Two that come upon an effect of unknown outcome both do it again.",
        "races/test_effects.py",
        sql(
            "jobs/effects",
            """\
          and e.key = record_effect.key
        for update;""",
            """\
          and e.key = record_effect.key;""",
        ),
    ),
    mutant(
        "effect-forgotten-in-use",
        "Retention forgets a record whose effect is just being done.",
        "sql/jobs/test_effects.py races/test_effects.py",
        sql(
            "maintenance/retention",
            "not rota._is_leased(e.job_id, e.lease_token))\n        order by",
            "true)\n        order by",
        ),
        sql(
            "maintenance/retention",
            "not rota._is_leased(e.job_id, e.lease_token));",
            "true);",
        ),
    ),
    mutant(
        "effect-forgotten-as-it-is-taken-over",
        "Retention forgets a record that another lease has taken over since it looked.",
        "races/test_effects.py",
        sql(
            "maintenance/retention",
            "not rota._is_leased(e.job_id, e.lease_token));",
            "true);",
        ),
    ),
    mutant(
        "two-heads",
        "No index keeps two jobs of an ordering key from running at once.",
        "sql/tables/test_jobs.py sql/waiting/test_order.py races/test_waiting.py",
        sql(
            "tables/jobs",
            "create unique index jobs_ordering_key_head_idx",
            "create index jobs_ordering_key_head_idx",
        ),
    ),
    mutant(
        "order-from-the-end",
        "The last job of an ordering key goes first.",
        "sql/waiting/test_order.py",
        sql(
            "waiting/order",
            "    order by coalesce(j.first_job_id, j.id)\n    limit 1;",
            "    order by coalesce(j.first_job_id, j.id) desc\n    limit 1;",
        ),
    ),
    mutant(
        "dead-head-lets-go",
        "The jobs behind a dead one go on, though nobody said so.",
        "sql/waiting/test_order.py",
        sql("jobs/finish", "      and not e.skip_dead\n", "      and false\n"),
    ),
    mutant(
        "turn-not-passed-on",
        "The job behind one that has ended waits for ever.",
        "sql/waiting/test_order.py",
        sql(
            "jobs/finish",
            """\
    where e.ordering_key is not null;

    -- What follows""",
            """\
    where false;

    -- What follows""",
        ),
    ),
    mutant(
        "child-before-its-parents",
        "A job starts when the first of its parents has ended.",
        "sql/waiting/test_dependencies.py",
        sql("waiting/dependencies", "if rota._has_parents(v_job.id) then", "if false then"),
    ),
    mutant(
        "dead-parent-is-well",
        "A job runs although one that it waits for is dead.",
        "sql/waiting/test_dependencies.py",
        sql(
            "waiting/dependencies",
            "and v_job.if_parent_dead is distinct from 'run'",
            "and false",
        ),
    ),
    mutant(
        "parent-ends-unheard",
        "A parent is not locked while a job comes to wait for it, and ends without a word.",
        "races/test_waiting.py",
        sql(
            "waiting/dependencies",
            """\
        where j.id = any(_depend.parent_ids)
        order by j.id
        for key share
""",
            """\
        where j.id = any(_depend.parent_ids)
""",
        ),
    ),
    mutant(
        "two-stages-at-once",
        "No index keeps a run of a pipeline from being in two stages.",
        "sql/waiting/test_pipelines.py",
        sql(
            "tables/jobs",
            "create unique index jobs_first_job_id_idx",
            "create index jobs_first_job_id_idx",
        ),
    ),
    mutant(
        "limit-plus-one",
        "One job more than the limit runs.",
        "sql/waiting/test_limits.py",
        sql("waiting/limits", "room := _room.max_running -", "room := 1 + _room.max_running -"),
    ),
    mutant(
        "limit-blind-to-what-ran",
        "What ran before a limit was set counts only once somebody has committed a look at it.",
        "sql/waiting/test_limits.py",
        sql(
            "waiting/limits",
            "+ rota._count_unseen(_count_running.limit_name, c_kind, c_subject)",
            "+ 0",
        ),
    ),
    mutant(
        "limit-settled-before-its-commit",
        "Who looks at a limit that he has set himself takes all others to know of it.",
        "sql/waiting/test_limits.py",
        sql(
            "waiting/limits",
            "                  and r.made_by = pg_current_xact_id()\n            ) then",
            "                  and false\n            ) then",
        ),
    ),
    mutant(
        "class-looked-at-once",
        "A key of a class is looked at under the limit of before, and nobody looks again.",
        "sql/waiting/test_limits.py",
        sql("waiting/limits", "like '%:*' and v_is_new then", "like '%:*' and false then"),
    ),
    mutant(
        "walk-gives-up",
        "A claim that has seen many keys of types that it does not take looks no further.",
        "sql/waiting/test_limits.py",
        sql(
            "waiting/fairness",
            """\
        exit when cardinality(v_ids) > 0
          and cardinality(v_seen)""",
            """\
        exit when cardinality(v_seen)""",
        ),
    ),
    mutant(
        "limit-counted-by-two",
        "Two claims count at once, and both find room.",
        "races/test_limits.py",
        sql(
            "waiting/limits",
            """\
    where s.limit_name = _hold_limit.limit_name
    for update skip locked;""",
            """\
    where s.limit_name = _hold_limit.limit_name;""",
        ),
    ),
    mutant(
        "free-slot-not-told",
        "A place under a limit gets free, and nobody is told.",
        "sql/waiting/test_limits.py",
        sql(
            "waiting/limits", "continue when v_limit_name like 'queue %'", "continue when true"
        ),
    ),
    mutant(
        "limits-kept-by-origin-only",
        "Where session_replication_role is replica, a job of a limit is never found.",
        "sql/tables/test_first_run.py",
        sql(
            "tables/first_run",
            """
alter table rota.jobs
    enable always trigger on_insert,
    enable always trigger on_update,
    enable always trigger on_delete;
""",
            "",
        ),
    ),
    mutant(
        "replicated-rows-are-noted-again",
        "What comes by logical replication makes notes beside those that come with it.",
        "sql/tables/test_first_run.py",
        sql("waiting/limits", "and current_query() is null", "and false"),
    ),
    mutant(
        "rate-without-end",
        "Starts are not counted, so a rate holds nobody up.",
        "sql/waiting/test_limits.py",
        sql("waiting/limits", "and _use_rate.starts > 0", "and false"),
    ),
    mutant(
        "planned-time-fired-twice",
        "Nothing says that a planned time has its job already.",
        "sql/schedules/test_occurrences.py races/test_tickers.py",
        sql(
            "tables/schedules",
            "    constraint fires_pkey primary key (definition, scheduled_for),\n",
            "",
        ),
    ),
    mutant(
        "schedule-not-moved-on",
        "A planned time stays the next one when its job was made.",
        "sql/schedules/test_occurrences.py",
        sql(
            "schedules/occurrences",
            "when u.job_id is null or d.kind <> 'after' then u.next_run_at",
            "when u.job_id is null then u.next_run_at else d.next_run_at",
        ),
    ),
    mutant(
        "overlap-not-skipped",
        "A schedule that shall skip makes a job beside the live one.",
        "sql/schedules/test_occurrences.py",
        sql("schedules/occurrences", "when _outcomes.is_live then 'skipped'", ""),
    ),
    mutant(
        "ticks-wait-for-ticks",
        "A tick waits for a schedule that another one has locked.",
        "races/test_schedules.py races/test_tickers.py",
        sql(
            "schedules/occurrences",
            """\
                limit _fire_schedules.max_jobs - v_fired
                for update skip locked""",
            """\
                limit _fire_schedules.max_jobs - v_fired
                for update""",
        ),
    ),
)
