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
            "jobs/insert",
            """\
        on conflict (idempotency_key, coalesce('pipeline ' || pipeline, job_type))
            where idempotency_key is not null do nothing
        returning""",
            """\
        returning""",
        ),
    ),
    mutant(
        "key-waits-for-a-claim",
        "A producer waits for an open claim of the job that has its key.",
        "races/test_racing_enqueues.py races/test_strangers.py",
        sql(
            "jobs/enqueue",
            "if v_job_id is not null then return v_job_id; end if;",
            "v_job_id := null;",
        ),
    ),
    mutant(
        "key-of-many-waits-for-a-claim",
        "A batch, a pipeline or a retry waits for an open claim of the job that has its key.",
        "races/test_racing_enqueues.py races/test_strangers.py",
        sql(
            "jobs/insert",
            """\
        where n.idempotency_key is null or (
            select""",
            """\
        where true or (
            select""",
        ),
    ),
    mutant(
        "key-of-many-found-in-an-old-snapshot",
        "A batch or a retry takes a job that has ended for the live one of its key.",
        "races/test_racing_enqueues.py races/test_racing_keys.py sql/jobs/test_enqueue.py",
        sql(
            "jobs/insert", "where c_shows_live and u.idempotency_key", "where u.idempotency_key"
        ),
    ),
    mutant(
        "batch-says-all-are-new",
        "A batch returns ids that no job has, where one was found by its key.",
        "sql/jobs/test_enqueue.py",
        sql(
            "jobs/enqueue",
            "if cardinality(v_ids) = cardinality(v_new_ids) then",
            "if true then",
        ),
    ),
    mutant(
        "headers-of-the-old-call",
        "A run that follows has the newest payload and the headers, so the trace, of the old.",
        "sql/jobs/test_keys.py",
        sql("jobs/keys", "'headers', r.job -> 'headers', ", ""),
    ),
    mutant(
        "headers-of-the-old-attempt",
        "A job that comes back with a newer payload keeps the headers of the old call.",
        "sql/jobs/test_keys.py",
        sql("jobs/keys", "headers = nullif(r.job -> 'headers', 'null'),", ""),
    ),
    mutant(
        "debounce-counts-from-the-first-day",
        "Each debounced call of a job that has failed retries it at once.",
        "sql/jobs/test_keys.py",
        sql(
            "jobs/keys",
            "greatest(j.created_at, j.started_at, j.failed_at)",
            "j.created_at",
        ),
    ),
    mutant(
        "debounce-without-a-second-call",
        "A job that is called for once waits for longer than its max_wait.",
        "sql/jobs/test_keys.py",
        sql(
            "jobs/keys",
            """\
    new_job.run_at := case when new_job.run_at is not null then least(new_job.run_at,
        coalesce(new_job.created_at, rota.now()) + rota._exact(max_wait)) end;""",
            "",
        ),
    ),
    mutant(
        "debounce-of-the-run-that-follows",
        "While a job runs, each call for its next run counts max_wait from itself.",
        "sql/jobs/test_keys.py",
        sql(
            "jobs/keys",
            """\
least(coalesce(new_job.run_at, rota.now()),
                new_job.created_at + rota._exact(_enqueue_keyed.max_wait)),""",
            "coalesce(new_job.run_at, rota.now()),",
        ),
    ),
    mutant(
        "reruns-by-their-ids",
        "Where many runs are to follow, the end of a job that has one reads all of them.",
        "contract/test_plans.py",
        sql("jobs/keys", "order by n.id + 0 desc", "order by n.id desc"),
    ),
    mutant(
        "reruns-with-statistics",
        "Where many runs are to follow one job, the end of any other that has one reads all.",
        "contract/test_plans.py",
        sql(
            "tables/jobs",
            """\
alter table rota.reruns alter column job_id set statistics 0,
    alter column idempotency_key set statistics 0, alter column job_type set statistics 0;""",
            "",
        ),
    ),
    mutant(
        "parents-with-statistics",
        "Where all jobs wait for one, each end of any other reads all their edges.",
        "contract/test_plans.py",
        sql("tables/waiting", "alter column parent_id set statistics 0,", ""),
    ),
    mutant(
        "children-with-statistics",
        "Where one job waits for all, each end under an ordering key reads all its edges.",
        "contract/test_plans.py",
        sql(
            "tables/waiting",
            """\
 set statistics 0,
    alter column job_id set statistics 0;""",
            " set statistics 0;",
        ),
    ),
    mutant(
        "rules-of-keys-order-a-batch",
        "Jobs of an ordering key in one batch run in the order of their idempotency keys.",
        "sql/jobs/test_keys.py sql/jobs/test_forward.py",
        sql(
            "jobs/keys",
            """\
 end,
                    array[_enqueue_many_keyed.new_ids[v_new.ordinal]]) as k;""",
            " end) as k;",
        ),
    ),
    mutant(
        "key-unique-for-a-while-locks",
        "A key that is unique for a while waits for an open claim of its job.",
        "races/test_racing_enqueues.py",
        sql(
            "jobs/keys",
            """\
        and v_is_versioned and current_setting('transaction_isolation') <> 'read committed';""",
            "        and v_is_versioned;",
        ),
    ),
    mutant(
        "key-found-in-an-older-snapshot",
        "A key in an older snapshot finds a job that has ended.",
        "races/test_racing_enqueues.py sql/jobs/test_enqueue.py",
        sql(
            "jobs/insert",
            "if current_setting('transaction_isolation') = 'read committed' then",
            "if true then",
        ),
    ),
    mutant(
        "running-job-replaced",
        "A replace that is not committed holds up the end of the running job of its key.",
        "races/test_racing_enqueues.py",
        sql(
            "jobs/keys",
            "v_leaves_running constant boolean := on_conflict = 'replace'\n        and",
            "v_leaves_running constant boolean := false and",
        ),
    ),
    mutant(
        "set-role-is-free",
        "A producer that has set a role is confined by none once he may not set it any more.",
        "sql/access/test_queue_grants.py",
        sql(
            "base/queue_rights",
            "'member')\n    or current_setting('role') <> 'none'",
            "'member')",
        ),
    ),
    mutant(
        "waits-for-a-stranger",
        "Anybody who may connect keeps all that wait for jobs or results hanging.",
        "sql/maintenance/test_wakeups.py",
        sql(
            "base/notify",
            "if pg_try_advisory_lock_shared(class, key) then return true; end if;",
            "perform pg_advisory_lock_shared(class, key); return true;",
        ),
    ),
    mutant(
        "half-of-two-locks",
        "Who waits for a result without the lock of its job keeps that of all.",
        "sql/jobs/test_results.py",
        sql(
            "jobs/results",
            "            perform pg_advisory_unlock_shared(1919907970, 0);\n"
            "            v_holds := false;",
            "            v_holds := false;",
        ),
    ),
    mutant(
        "grants-listed-without-end",
        "Each grant of a queue to a role makes the calls of all others slower.",
        "sql/access/test_queue_grants.py",
        sql("base/configured", "where not g.are_many on conflict", "on conflict"),
    ),
    mutant(
        "many-grants-confine-nobody",
        "Where there are many grants, those that come confine nobody.",
        "sql/access/test_queue_grants.py",
        sql("base/configured", "case when g.listed < 15 then", "case when true then"),
        sql("base/configured", "where not g.are_many on", "where g.listed < 15 on"),
    ),
    mutant(
        "pause-taken-for-a-grant",
        "Grants that came while all queues were paused confine nobody once they are not.",
        "sql/base/test_configured.py",
        sql(
            "base/configured",
            "where c.name = v_name and tg_table_name = 'queue_grants'\n"
            "              and c.source ^@ 'queue_grants '",
            "where c.name = v_name and tg_table_name = 'queue_grants'",
        ),
    ),
    mutant(
        "members-of-members-are-free",
        "Who is a member of a member of a confined role is confined by none.",
        "sql/access/test_queue_grants.py",
        sql(
            "base/queue_rights",
            "select m.roleid from found as f join pg_auth_members as m on m.member = f.id",
            "select m.roleid from pg_auth_members as m "
            "where m.member = quote_ident(v_role)::regrole::oid",
        ),
    ),
    mutant(
        "owners-of-the-database-are-free",
        "Who owns the database is not confined as its owners are.",
        "sql/access/test_queue_grants.py",
        sql(
            "base/queue_rights",
            "|| case when pg_has_role(v_role, c_owners, 'member') then c_owners end;",
            ";",
        ),
    ),
    mutant(
        "grants-wait-for-each-other",
        "Two grants of queues to different roles wait for each other.",
        "races/test_strangers.py",
        sql(
            "base/configured",
            """\
setting ->> 'pause_name',
            (setting ->> 'role') || ' ' || (setting ->> 'queue'));""",
            "setting ->> 'pause_name');",
        ),
    ),
    mutant(
        "number-waits-in-front",
        "Producers wait for as long as an operator waits to give the database a number.",
        "sql/base/test_ids.py",
        sql("base/ids", "set lock_timeout = '100ms'", "set lock_timeout = '5s'"),
    ),
    mutant(
        "number-forgotten",
        "Producers wait for an operator that has given a number, and forgot to commit.",
        "sql/base/test_ids.py",
        sql(
            "base/ids",
            "perform set_config('idle_in_transaction_session_timeout', '1s', true);",
            "",
        ),
    ),
    mutant(
        "no-leap",
        "After a promotion ids are given that the old primary had given.",
        "sql/base/test_ids.py",
        sql("base/ids", "        perform rota._leap(v_timeline);\n", "        null;\n"),
    ),
    mutant(
        "no-leap-of-a-copy",
        "After a restore ids are given that were given since the dump.",
        "releases/test_restore.py",
        sql("base/ids", "        'rota.jobs_id_seq'::regclass::oid), 0)", "        0), 0)"),
    ),
    mutant(
        "leap-of-a-new-session-only",
        "A session that stays while a dump is restored gives ids that were given since then.",
        "releases/test_restore.py",
        sql("base/ids", "text := 'rota.jobs_id_seq'::regclass::oid::text;", "text := 'on';"),
        sql("jobs/enqueue", "'rota.jobs_id_seq'::regclass::oid::text then", "'on' then"),
    ),
    mutant(
        "leap-as-far-each-time",
        "A backup that is restored again gives the ids that its first copy gave.",
        "releases/test_restore.py",
        sql("base/ids", "trunc((1 << 16) * ", "trunc(0 * "),
    ),
    mutant(
        "leap-after-a-tick",
        "A tick that comes before the first job of a copy hides how old its backup is.",
        "releases/test_restore.py",
        sql("maintenance/retention", "    perform rota._guard_ids();\n", ""),
    ),
    mutant(
        "leap-again-and-again",
        "Each session leaps, and those that draw meanwhile meet.",
        "sql/base/test_ids.py",
        sql(
            "base/ids", "            perform setval('rota.id_timeline', _leap.timeline);\n", ""
        ),
    ),
    mutant(
        "leap-under-an-advisory-lock",
        "Any login can keep all producers from the first ids after a promotion.",
        "faults/test_sessions.py",
        sql(
            "base/ids",
            "lock table rota.upgrade_log in share update exclusive mode",
            "perform pg_advisory_xact_lock(hashtextextended('rota.ids', 0))",
        ),
    ),
    mutant(
        "leap-locked-until-the-commit",
        "The first session after a promotion stays open, and others cannot enqueue.",
        "sql/base/test_ids.py",
        sql("base/ids", "    raise exception using errcode = 'RTB02';\n", ""),
    ),
    mutant(
        "number-below",
        "A database that gets a number gives ids again.",
        "sql/base/test_ids.py",
        sql(
            "base/ids",
            "(greatest(s.last_value, _raise_ids.above_id) / 1024 + 1) * 1024",
            "(greatest(s.last_value, _raise_ids.above_id) / 1024) * 1024",
        ),
    ),
    mutant(
        "arrived-twice",
        "A job whose mover was killed after the other database had taken it is there twice.",
        "sql/maintenance/test_moves.py",
        sql(
            "jobs/receive",
            "and r.move_id = v_move_id\n",
            "and r.move_id = v_move_id and v_move_id = 0\n",
        ),
        sql(
            "jobs/receive",
            "as i (id, created_at, new_id);",
            "as i (id, created_at, new_id) on conflict do nothing;",
        ),
        # What protects from a restored sender sees it too.
        sql("jobs/receive", "and r.move_id > 0\n", "and r.move_id < 0\n"),
    ),
    mutant(
        "arrival-forgotten-under-way",
        "A job that was sent long ago, and not ended here, is there twice.",
        "sql/maintenance/test_moves.py",
        sql(
            "maintenance/retention",
            "max_rows, 'not exists (select from rota.queue_moves '",
            "max_rows, 'true or not exists (select from rota.queue_moves '",
        ),
    ),
    mutant(
        "receipts-of-jobs-that-wait-are-purged",
        "A job that came with its queue long ago, and still waits, keeps that from moving on.",
        "sql/maintenance/test_moves.py",
        sql(
            "maintenance/retention",
            "'(f.move_id > 0 and exists (",
            "'(false and exists (",
        ),
    ),
    mutant(
        "moved-jobs-with-open-effects-are-purged",
        "After 90 days the open effects of moved jobs are of unknown outcome here.",
        "sql/maintenance/test_moves.py",
        sql(
            "maintenance/retention",
            "'where e.job_id = f.job_id and e.completed_at is null)'",
            "'where false)'",
        ),
    ),
    mutant(
        "arrivals-without-the-disk",
        "Jobs that have left their database are lost in a crash of the other one.",
        "faults/test_promotions.py",
        sql(
            "jobs/receive",
            "set_config('synchronous_commit', 'on', true)",
            "set_config('synchronous_commit', 'off', true)",
        ),
    ),
    mutant(
        "history-read-while-a-queue-moves",
        "Each second of a move reads all jobs that its queue has ever had.",
        "contract/test_plans.py",
        sql(
            "maintenance/moves",
            "        where f.queue = plan_queue_move.queue and not c_is_under_way limit 1)",
            "        where f.queue = plan_queue_move.queue limit 1)",
        ),
    ),
    mutant(
        "moves-without-the-disk",
        "A crash forgets a move, and workers have again what has arrived there.",
        "sql/maintenance/test_moves.py",
        sql("maintenance/moves", "    perform rota._write_before_commit();\n", ""),
    ),
    mutant(
        "receipts-of-moves-by-id-alone",
        "A queue that comes to a database for the second time loses its jobs.",
        "sql/maintenance/test_moves.py",
        sql(
            "jobs/receive",
            "\n              and r.move_id = v_move_id",
            "",
        ),
    ),
    mutant(
        "came-back-and-is-elsewhere",
        "Two databases lead a caller to each other, for a job that moved away and came back.",
        "sql/maintenance/test_moves.py",
        sql(
            "jobs/receive",
            "    delete from rota.moved_jobs as t where t.job_id = any(v_inserted);\n",
            "",
        ),
    ),
    mutant(
        "received-into-an-older-snapshot",
        "A job that has arrived already is in its own way, by an error that nobody documents.",
        "sql/jobs/test_forward.py",
        sql("jobs/receive", "perform rota._check_isolation('receive_jobs');", ""),
    ),
    mutant(
        "moved-into-an-older-snapshot",
        "A job of a queue that moves is dead here because it has arrived there already.",
        "sql/maintenance/test_moves.py",
        sql("jobs/receive", "perform rota._check_isolation('receive_moves');", ""),
    ),
    mutant(
        "move-settled-at-the-wrong-database",
        "A move is settled where its queue leaves, by a call that was meant for the other one.",
        "sql/maintenance/test_moves.py",
        sql(
            "jobs/receive",
            "(receive_moves.move_id, 'in', ",
            "(receive_moves.move_id, v_move.direction, ",
        ),
    ),
    mutant(
        "moved-retries-without-budget",
        "All retries that waited for a budget begin at once where their queue has moved.",
        "sql/maintenance/test_moves.py",
        sql("jobs/receive", "    perform rota._hold_retries(v_inserted);\n", ""),
    ),
    mutant(
        "moved-head-had-not-failed",
        "The retry of a job that was first of its key needs no budget where its queue moved.",
        "sql/maintenance/test_moves.py",
        sql("maintenance/moves", "'has_failed', j.status = 'failed'", "'has_failed', false"),
    ),
    mutant(
        "effect-settled-where-its-job-was",
        "An effect is settled in the database that its job has left, and caused again.",
        "sql/maintenance/test_moves.py",
        sql("jobs/effects", "    perform rota._raise_moved(v_effect.job_id);\n", ""),
    ),
    mutant(
        "swallowed-by-a-trigger",
        "A job that a trigger of the other database swallows is said to have arrived.",
        "sql/maintenance/test_moves.py",
        sql(
            "jobs/receive",
            "    if v_found is null then perform rota._raise_swallowed('the job'); end if;\n",
            "",
        ),
    ),
    mutant(
        "swallowed-alone",
        "A job that a trigger swallows is enqueued without an id.",
        "sql/jobs/test_enqueue.py",
        sql(
            "jobs/enqueue",
            "if v_job_id is null then perform rota._raise_swallowed('the job'); end if;",
            "",
        ),
    ),
    mutant(
        "swallowed-in-a-batch",
        "Of a batch the jobs have the ids of others where a trigger swallows one.",
        "sql/jobs/test_enqueue.py",
        sql(
            "jobs/enqueue",
            "if cardinality(v_ids) < jsonb_array_length(jobs) then",
            "if false then",
        ),
    ),
    mutant(
        "swallowed-effect",
        "A worker is told that it may not cause an effect that a trigger has kept out.",
        "sql/jobs/test_effects.py",
        sql(
            "jobs/effects",
            "if v_effect.scope is null then",
            "if false then",
        ),
    ),
    mutant(
        "swallowed-schedule",
        "A schedule that a trigger has kept out is said to be there.",
        "sql/schedules/test_definitions.py",
        sql(
            "schedules/definitions",
            "if outcome is null then perform rota._raise_swallowed('the schedule'); end if;",
            "",
        ),
    ),
    mutant(
        "swallowed-with-a-rule",
        "A job that a trigger swallows is gone when it is retried.",
        "sql/jobs/test_enqueue.py",
        sql(
            "jobs/insert",
            "        perform rota._raise_swallowed('one of the jobs');",
            "        null;",
        ),
    ),
    mutant(
        "effect-as-before-it-went",
        "What a job did where its queue was meanwhile is done again when it is back.",
        "sql/maintenance/test_moves.py",
        sql(
            "jobs/receive",
            "f.job_id = v_job.id and f.completed_at is null\n",
            "false\n",
        ),
    ),
    mutant(
        "brought-to-a-queue-that-moves",
        "A job is brought to a queue that moves which cannot go with it, and runs nowhere.",
        "sql/maintenance/test_moves.py",
        sql("jobs/control", "    perform rota._check_brought(v_ids);\n", ""),
        sql(
            "jobs/control",
            "    if queue is not null then perform rota._check_brought(job_ids); end if;\n",
            "",
        ),
    ),
    mutant(
        "schedule-in-a-queue-that-has-moved",
        "A schedule that is made while its queue moves away has jobs that can never go.",
        "sql/maintenance/test_moves.py",
        sql(
            "schedules/definitions",
            "    perform rota._check_name('name', name);\n",
            "    perform rota._check_stays(queue, 'a schedule');\n",
        ),
        sql(
            "schedules/definitions",
            "as d;\n    -- After the write, for which a move waits that begins later.\n"
            "    perform rota._check_stays(queue, 'a schedule');\n",
            "as d;\n",
        ),
    ),
    mutant(
        "key-rule-in-a-queue-that-has-moved",
        "What a key remembers is left here by a job that is made while its queue moves away.",
        "sql/maintenance/test_moves.py",
        sql(
            "jobs/keys",
            "    is_requested := false;\n",
            "    is_requested := false;\n"
            "    perform rota._check_stays(new_job.queue, 'a rule for a key')\n"
            "    where v_is_versioned or on_conflict <> 'keep';\n",
        ),
        sql(
            "jobs/keys",
            "if (v_is_versioned or on_conflict <> 'keep') and exists",
            "if false and exists",
        ),
    ),
    mutant(
        "run-in-a-queue-that-has-moved",
        "A run whose stage comes to another queue while it begins is in one that has moved.",
        "sql/maintenance/test_moves.py",
        sql(
            "waiting/pipelines",
            "perform rota._check_stays(v_stage.queue, 'a run of a pipeline');",
            "",
        ),
    ),
    mutant(
        "waits-for-one-that-went",
        "A job comes back and waits for one that is in another database.",
        "sql/maintenance/test_moves.py",
        sql(
            "base/moving", "    perform rota._raise_moved(d.parent_id) from", "    perform from"
        ),
        sql(
            "base/moving",
            "    perform rota._check_stays(p.queue, 'a job that others wait for')\n    from",
            "    perform from",
        ),
    ),
    mutant(
        "resumed-before-it-moves",
        "Who waits for a queue to move ends its pause, and its jobs run here and there.",
        "sql/maintenance/test_moves.py",
        sql(
            "jobs/pauses",
            "if job_type is null then perform rota._check_stays(queue, 'claims'); end if;",
            "",
        ),
        sql(
            "jobs/pauses",
            "    delete from rota.pauses as p\n    where p.pause_name = c_name and p.set_by =",
            "    if job_type is null then perform rota._check_stays(queue, 'claims'); end if;\n"
            "    delete from rota.pauses as p where p.pause_name = c_name and p.set_by =",
        ),
    ),
    mutant(
        "ended-under-a-mover",
        "A late job is taken out while an operator ends the move, and no mover ever sends it.",
        "sql/maintenance/test_moves.py",
        sql(
            "maintenance/moves",
            "where m.move_id = _lock_move.move_id and m.direction = 'out' for update skip "
            "locked;",
            "where m.move_id = _lock_move.move_id and m.direction = 'out';",
        ),
    ),
    mutant(
        "called-off-half-way",
        "A move of which jobs have arrived is called off, and its keys run in two databases.",
        "sql/maintenance/test_moves.py",
        sql(
            "maintenance/moves",
            "(v_move.state <> 'moving' or exists (",
            "(v_move.state <> 'moving' and exists (",
        ),
    ),
    mutant(
        "sequence-not-raised",
        "A job enqueued where its queue has moved to overtakes those of its key that moved.",
        "sql/maintenance/test_moves.py",
        sql("jobs/receive", "        perform rota._raise_ids(settle_above);\n", ""),
    ),
    mutant(
        "mover-uses-up-the-ids",
        "A mover names a last id near the end of all ids, and nobody can enqueue any more.",
        "sql/maintenance/test_moves.py",
        sql(
            "jobs/receive",
            "not between 0 and 9007199254740991",
            "not between 0 and 9223372036854775807",
        ),
    ),
    mutant(
        "sent-before-it-is-out",
        "A job that is being sent to another database can be acted on here.",
        "sql/maintenance/test_moves.py",
        sql(
            "maintenance/moves",
            "        delete from rota.jobs as j where j.id = any(v_ids)\n        returning",
            "        update rota.jobs as j set updated_at = j.updated_at"
            " where j.id = any(v_ids)\n        returning",
        ),
    ),
    mutant(
        "moved-to-a-standby",
        "A queue begins to move to a standby, and its jobs run nowhere.",
        "sql/maintenance/test_moves.py",
        sql(
            "maintenance/moves",
            "'the other database takes no writes, as a standby', null\n    where",
            "'the other database takes no writes, as a standby', null\n    where false and",
        ),
    ),
    mutant(
        "moved-past-a-running-one",
        "A job runs in another database while the one in front of it still runs here.",
        "sql/maintenance/test_moves.py",
        sql(
            "maintenance/moves",
            "and j.status = 'running'\n    ) or exists (",
            "and false\n    ) or exists (",
        ),
        sql("base/moving", "return job.status <> 'running' and", "return"),
    ),
    mutant(
        "key-taken-while-it-comes",
        "A job with a key runs before those of its key that are still to come.",
        "sql/maintenance/test_moves.py",
        sql("base/moving", "and m.direction = 'in' and m.state = 'moving'", "and false"),
    ),
    mutant(
        "moved-to-another-number",
        "A queue moves to a database that is another one by now, and nobody finds its jobs.",
        "sql/maintenance/test_moves.py",
        sql("jobs/receive", "'$[*].database ? (@ != $n)'", "'$[*].database ? (@ == null)'"),
    ),
    mutant(
        "late-job-keeps-its-id",
        "A job that came late where its queue has left overtakes others of its key.",
        "sql/maintenance/test_moves.py",
        sql(
            "jobs/receive",
            "when move.state = 'settled' then rota._new_ids",
            "when false then rota._new_ids",
        ),
    ),
    mutant(
        "receipt-of-an-id-given-twice",
        "A job of a restored source gets the id of one that had arrived, and is lost.",
        "sql/jobs/test_forward.py",
        sql(
            "jobs/receive",
            "where r.source_job_id = i.id and r.source_created_at = i.created_at\n",
            "where r.source_job_id = i.id\n",
        ),
    ),
    mutant(
        "carrier-claimed-by-a-worker",
        "A worker claims a job that is to travel, and ends it though it was never sent.",
        "sql/jobs/test_forward.py",
        sql("jobs/claim", "~ '(^| )forward:[0-9]+( |$)'", "~ '^$'"),
    ),
    mutant(
        "received-for-any-queue",
        "A worker that is confined to a queue receives jobs of another.",
        "sql/access/test_queue_grants.py",
        sql("jobs/receive", "perform rota._check_queues_of(v_jobs, 'worker');", ""),
    ),
    mutant(
        "foreign-index-stops-a-pair",
        "A job that breaks an index of the user's keeps all others from travelling.",
        "sql/jobs/test_forward.py",
        sql(
            "jobs/receive",
            "if sqlstate = '23505' and v_table = 'receipts'\n",
            "if sqlstate = '23505'\n",
        ),
    ),
    mutant(
        "changed-by-what-is-received",
        "A worker that is confined to a queue changes jobs of others by what it receives.",
        "sql/access/test_queue_grants.py",
        sql(
            "jobs/receive",
            "'keep' then v_new_ids[e.n] end])\n"
            "            )) where rota._allowed_queues('worker') is not null;",
            "'keep' then v_new_ids[e.n] end])\n            )) where false;",
        ),
    ),
    mutant(
        "changed-by-what-is-carried",
        "A producer that is confined to a queue changes jobs of others in another database.",
        "sql/access/test_queue_grants.py",
        sql("jobs/receive", "e.job ? 'only_queues' and", "false and"),
    ),
    mutant(
        "moved-in-by-anybody",
        "A worker that is confined to a queue brings ids and effects of others.",
        "sql/access/test_queue_grants.py",
        sql("jobs/receive", "perform rota._check_queues('worker', '{*}');", ""),
    ),
    mutant(
        "first-part-of-many-parents-only",
        "A job of very many parents that ended unseen waits for ever, or starts too soon.",
        "sql/waiting/test_dependencies.py",
        sql(
            "waiting/dependencies",
            "elsif cardinality(v_parents) = 500 then",
            "elsif false then",
        ),
    ),
    mutant(
        "held-up-from-another-queue",
        "A producer that is confined to a queue lets jobs of others wait.",
        "sql/access/test_queue_grants.py",
        sql(
            "waiting/dependencies",
            "unnest(rota._jobs_outside_grants(blocks, 'producer')) as o (id)",
            "unnest('{}'::bigint[]) as o (id)",
        ),
    ),
    mutant(
        "received-behind-a-refused-one",
        "A job gets to another database though the one before it in its line was refused.",
        "sql/jobs/test_forward.py",
        sql("jobs/receive", "            continue when v_key = any(v_halted);\n", ""),
    ),
    mutant(
        "taken-past-a-held-one",
        "A job leaves before the one in front of it, which somebody holds.",
        "sql/jobs/test_forward.py sql/maintenance/test_moves.py",
        sql(
            "jobs/forward",
            "    return array(\n        select l.id from unnest(v_locked) as l (id)",
            "    return v_locked;\n    return array(\n"
            "        select l.id from unnest(v_locked) as l (id)",
        ),
    ),
    mutant(
        "head-stays-for-lower-ids",
        "The head of a line stays for a job of another queue that waits for it.",
        "sql/maintenance/test_moves.py",
        sql("maintenance/moves", "        v_line := v_head;\n", "        null;\n"),
    ),
    mutant(
        "mapping-of-its-own",
        "A role of a front makes itself a superuser of the databases that trust its machine.",
        "sql/access/test_front.py",
        sql("front", "    if not c_is_superuser and exists (", "    if false and exists ("),
    ),
    mutant(
        "bytes-let-in",
        "A job whose bytes are no UTF-8 keeps all who read that from its queue.",
        "sql/base/test_encoding.py",
        sql(
            "base/encoding",
            "and getdatabaseencoding() = 'SQL_ASCII' and exists",
            "and false and exists",
        ),
    ),
    mutant(
        "cut-within-a-character",
        "A long error cannot be read where the database counts bytes.",
        "sql/base/test_encoding.py",
        sql(
            "base/encoding",
            "getdatabaseencoding() <> 'SQL_ASCII' or octet_length(value) <= longest",
            "true",
        ),
    ),
    mutant(
        "bytes-shown-as-controls",
        "What the database shows of other languages is broken where it counts bytes.",
        "sql/base/test_encoding.py",
        sql("operations/words", "getdatabaseencoding() ~ '^(UTF8|LATIN|ISO_8859)'", "true"),
    ),
    mutant(
        "front-made-twice-at-once",
        "Two who make a front at once change the same rows of the catalog, and one fails.",
        "sql/access/test_front.py",
        sql(
            "front",
            "perform pg_advisory_xact_lock(hashtextextended('rota.front', 0));\n"
            "    perform rota_front.check_database();",
            "perform rota_front.check_database();",
        ),
    ),
    mutant(
        "refused-without-ids",
        "A job that succeeded while the server had no transaction ids left has failed.",
        "faults/test_horizon.py",
        sql("jobs/end", "        perform pg_current_xact_id();\n", "        null;\n"),
    ),
    mutant(
        "dead-without-ids",
        "Jobs die that are sent to a database without transaction ids.",
        "faults/test_horizon.py",
        sql(
            "jobs/receive",
            "                perform pg_current_xact_id();\n",
            "                null;\n",
        ),
    ),
    mutant(
        "refused-for-a-while",
        "A full disk in the other database kills the jobs that are sent there.",
        "sql/jobs/test_forward.py",
        sql("jobs/receive", "'{08,25,40,53,57,58}'", "'{}'"),
    ),
    mutant(
        "stranger-stops-a-move",
        "A transaction of the other database that has the key of one job stops a whole move.",
        "sql/maintenance/test_moves.py",
        sql("jobs/receive", "'{08,25,40,53,57,58}'", "'{08,25,40,53,55,57,58}'"),
    ),
    mutant(
        "failed-for-now-is-dead",
        "A trigger that fails for now kills the jobs that are sent to its database.",
        "sql/maintenance/test_moves.py sql/jobs/test_forward.py",
        sql("jobs/receive", "in ('55', 'XX')", "in ('55')"),
    ),
    mutant(
        "pass-stays-where-none-can-go",
        "Jobs that cannot go for now keep all those behind them from going.",
        "sql/maintenance/test_moves.py",
        sql("maintenance/moves", "greatest(m.after_id, v_last_id)", "m.after_id"),
    ),
    mutant(
        "settled-without-those-that-came-back",
        "A queue is said to have settled while a job that could not go for now is here.",
        "sql/maintenance/test_moves.py",
        sql("maintenance/moves", "v_last_id), has_found = true", "v_last_id)"),
    ),
    mutant(
        "restored-source-moves-again",
        "A source that was restored from a backup brings jobs that have run where they moved.",
        "sql/maintenance/test_moves.py",
        sql(
            "jobs/receive",
            "        if v_found is not null then\n            v_ids",
            "        if false then\n            v_ids",
        ),
    ),
    mutant(
        "open-while-it-settled-and-held",
        "A job whose transaction was open when its queue settled goes when it is due.",
        "sql/maintenance/test_moves.py",
        sql(
            "base/moving",
            "        where m.queue = _moves_away.queue and",
            "        where m.queue = _moves_away.queue and m.state = 'settled' and",
        ),
    ),
    mutant(
        "called-off-without-places",
        "Jobs of a queue that was to move have another place than those before and after.",
        "sql/maintenance/test_moves.py",
        sql("maintenance/moves", "perform rota._add_checks('queue', array[queue]);", ""),
    ),
    mutant(
        "first-arrival-hides-the-second",
        "A queue that comes back loses the jobs that had come with it the first time.",
        "sql/maintenance/test_moves.py",
        sql(
            "jobs/receive",
            "not exists (select from rota.moved_jobs as t where t.job_id = r.job_id)",
            "true",
        ),
    ),
    mutant(
        "moved-with-an-id-to-come",
        "A mover takes ids that are still to be given, and each enqueue with one fails.",
        "sql/maintenance/test_moves.py",
        sql("jobs/receive", "then s.last_value", "then 9007199254740991"),
    ),
    mutant(
        "moved-into-a-pipeline",
        "A mover brings a job that goes on to the stages of another queue.",
        "sql/maintenance/test_moves.py",
        sql("jobs/receive", "'pipeline,stage,", "'stage,"),
    ),
    mutant(
        "moved-over-an-open-effect",
        "A mover takes the open effect of a job that runs here.",
        "sql/maintenance/test_moves.py",
        sql(
            "jobs/receive",
            "as t where t.job_id = f.job_id);\n        -- By",
            "as t) is not null;\n        -- By",
        ),
    ),
    mutant(
        "moved-over-a-record-of-another",
        "A mover takes the record of an effect that a job here is just about to cause.",
        "sql/maintenance/test_moves.py",
        sql(
            "jobs/receive",
            "as t where t.job_id = f.job_id);\n    end",
            "as t) is not null;\n    end",
        ),
    ),
    mutant(
        "effects-of-the-id-of-before",
        "A job that came late causes again what it has done, where its queue moves next.",
        "sql/maintenance/test_moves.py",
        sql("jobs/receive", "coalesce(v_found, v_job.new_id))) as n", "v_job.id)) as n"),
    ),
    mutant(
        "moved-between-versions",
        "Jobs move to a database of another version, which cannot take them as they are.",
        "sql/maintenance/test_moves.py",
        sql("jobs/receive", "? (@ != $v)", "? (@ == null)"),
    ),
    mutant(
        "taken-out-all-or-none",
        "A job that cannot be taken out keeps all others from moving.",
        "sql/maintenance/test_moves.py",
        sql(
            "maintenance/moves",
            "foreach v_job_id in array v_window.ids loop\n",
            "foreach v_job_id in array '{}'::bigint[] loop\n",
        ),
    ),
    mutant(
        "taken-out-and-still-here",
        "A job that a trigger keeps here is overtaken by those behind it, which move.",
        "sql/maintenance/test_moves.py",
        sql(
            "maintenance/moves",
            "if cardinality(v_gone) is distinct from cardinality(v_ids) then",
            "if false then",
        ),
    ),
    mutant(
        "halted-keys-in-front",
        "Keys that are halted keep the others of their queue from moving.",
        "sql/maintenance/test_moves.py",
        sql("maintenance/moves", "where h.ordering_key = k.ordering_key)", "where false)"),
    ),
    mutant(
        "running-keys-in-front",
        "Keys whose jobs run keep the others of their queue from moving.",
        "sql/maintenance/test_moves.py",
        sql("maintenance/moves", "and r.status = 'running'", "and false"),
    ),
    mutant(
        "moves-of-all-queues",
        "A mover that is confined to a queue tries for ever to move those of others.",
        "sql/access/test_queue_grants.py",
        sql("maintenance/moves", "(v_allowed is null or m.queue = any(v_allowed))", "true"),
    ),
    mutant(
        "late-and-held",
        "A job that comes late to a queue that has moved stays until its time, or for a limit.",
        "sql/maintenance/test_moves.py",
        sql(
            "waiting/hooks",
            "v_has_places := not v_moves_away\n            and (",
            "v_has_places := (",
        ),
    ),
    mutant(
        "late-and-held-at-once",
        "A job that is due when it comes late to a queue that has moved waits for a limit.",
        "sql/maintenance/test_moves.py",
        sql("waiting/hooks", "rota._moves_away(queue) as moves_away", "false as moves_away"),
    ),
    mutant(
        "late-and-held-by-a-limit",
        "A job that comes late to a queue that has moved waits for a limit of the database.",
        "sql/maintenance/test_moves.py",
        sql("waiting/hooks", "when not v_has_limits or v_moves_away", "when not v_has_limits"),
    ),
    mutant(
        "sent-behind-one-that-came-back",
        "A job runs in the other database before the one in front of it, which came back.",
        "sql/maintenance/test_moves.py",
        sql(
            "maintenance/moves",
            "or t.job ->> 'ordering_key' in (select b.ordering_key from back as b)",
            "or false",
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
        "Two batches that share keys insert them in any order, and deadlock.",
        "races/test_racing_enqueues.py races/test_load.py",
        sql(
            "jobs/enqueue",
            "order by (j.job).idempotency_key, (j.job).job_type, j.id",
            "order by j.id",
        ),
    ),
    mutant(
        "batch-of-rules-in-the-order-given",
        "Two batches with rules for shared keys take them in any order.",
        "races/test_racing_enqueues.py races/test_racing_keys.py",
        sql(
            "jobs/keys",
            "order by n.idempotency_key, n.job_type, r.ordinal",
            "order by r.ordinal",
        ),
    ),
    mutant(
        "version-seen-twice",
        "An update of the version that was seen last runs once more.",
        "sql/jobs/test_keys.py races/test_racing_keys.py",
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
        "A replace that is not committed holds up the end of a running job.",
        "races/test_racing_enqueues.py",
        sql(
            "jobs/keys",
            "v_leaves_running constant boolean := on_conflict = 'replace'",
            "v_leaves_running constant boolean := on_conflict = 'none'",
        ),
    ),
    mutant(
        "rerun-past-the-budget",
        "Each rerun lets a retry begin that the budget of its queue has refused.",
        "sql/maintenance/test_budgets.py",
        sql(
            "jobs/keys",
            "coalesce(j.hold, '') like 'retries %'",
            "coalesce(j.hold, '') like 'nothing %'",
        ),
    ),
    mutant(
        "cancel-keeps-the-rerun",
        "A job is cancelled, and the run that was asked for before it comes all the same.",
        "sql/jobs/test_keys.py",
        sql("jobs/control", "perform from rota._take_reruns(_cancel_jobs.job_ids);", "null;"),
    ),
    mutant(
        "rerun-without-a-check",
        "A run that is asked for while the job before it ends is lost.",
        "races/test_racing_keys.py",
        sql("jobs/keys", "perform rota._add_checks('rerun', array[job_id::text]);", "null;"),
    ),
    mutant(
        "rerun-not-looked-for-by-check",
        "A run that was asked for is forgotten by its check when its job is being ended.",
        "races/test_racing_keys.py",
        sql(
            "jobs/keys",
            "if v_job.status = 'running' and v_job.may_be_locked then",
            "if false then",
        ),
    ),
    mutant(
        "rerun-after-a-newer-job-that-is-gone",
        "A late run comes after a newer job of its key that has come and gone.",
        "races/test_racing_keys.py",
        sql("jobs/keys", "if rota._is_overtaken(v_rerun) then", "if false then"),
    ),
    mutant(
        "batch-asks-for-the-next-job",
        "A batch that asks twice for a run and who makes the next job wait for each other.",
        "races/test_racing_keys.py",
        sql(
            "jobs/keys",
            "v_last.key_scope) then v_last.asked end",
            "v_last.key_scope) then null end",
        ),
    ),
    mutant(
        "rerun-over-a-newer-call",
        "A run that was asked for while its job was locked replaces what was asked for later.",
        "races/test_racing_keys.py",
        sql(
            "jobs/keys",
            """\
        -- Whatever was to follow is older than this, also what was to follow a job before.
        perform from rota._take_reruns(array(
            select r.job_id from rota.reruns as r
            where r.idempotency_key = v_key and r.job_type = v_scope
        ));
""",
            "",
        ),
    ),
    mutant(
        "rerun-that-was-overtaken-comes",
        "A run that was asked for earlier comes after the newest, where it was locked.",
        "races/test_racing_keys.py",
        sql(
            "jobs/keys",
            "and r.seen is null and r.id < n.id and pg_visible_in_snapshot(r.made_by, v_seen)",
            "and false",
        ),
    ),
    mutant(
        "rerun-that-was-not-seen-is-overtaken",
        "A run that was committed after a newer one was taken is lost.",
        "races/test_racing_keys.py",
        sql(
            "jobs/keys",
            "and m.id > rerun.id and pg_visible_in_snapshot(rerun.made_by, m.seen)",
            "and m.id > rerun.id",
        ),
    ),
    mutant(
        "rerun-before-an-older-one-is-gone",
        "Of runs that come late an older one, which was locked, comes after the newest.",
        "races/test_racing_keys.py",
        sql(
            "jobs/keys",
            """
          and r.id < v_rerun.id
""",
            " and false",
        ),
    ),
    mutant(
        "rerun-expires-with-its-job",
        "A job that was locked expires, and with it the run that was asked for meanwhile.",
        "races/test_racing_keys.py",
        sql("jobs/control", "if not have_expired then perform", "if true then perform"),
    ),
    mutant(
        "erase-takes-the-rerun",
        "A job that has ended is erased, and with it the run that is to follow.",
        "races/test_racing_keys.py",
        sql(
            "operations/acts",
            """\
array(
        select j.id from rota.jobs as j where j.id = any(_erase_jobs.job_ids)), 'erased'""",
            "job_ids, 'erased'",
        ),
    ),
    mutant(
        "job-moves-before-its-rerun",
        "A job goes to another database without what was asked for while it was locked.",
        "sql/maintenance/test_moves.py",
        sql(
            "base/moving",
            "where r.idempotency_key = job.idempotency_key and r.job_type = job.job_type",
            "where false",
        ),
    ),
    mutant(
        "rerun-of-an-earlier-job-comes-later",
        "What was to follow an earlier job of a key comes after what was asked for later.",
        "races/test_racing_keys.py",
        sql("jobs/keys", "r.seen is null and r.id < n.id", "r.job_id = n.job_id"),
    ),
    mutant(
        "rerun-that-a-tick-has-locked-comes-later",
        "A run that a tick has locked comes after what was asked for later.",
        "races/test_racing_keys.py",
        sql(
            "jobs/keys",
            "where r.idempotency_key = v_key and r.job_type = v_scope and r.seen is null limit",
            "where false limit",
        ),
    ),
    mutant(
        "rerun-over-a-newer-job",
        "A run whose job has ended replaces what was asked for later, as another job.",
        "races/test_racing_keys.py",
        sql("jobs/keys", "elsif on_conflict = 'keep' then", "elsif is_new then"),
    ),
    mutant(
        "rerun-beside-the-job-of-its-key",
        "A run whose job has ended does not wait for another job of the key.",
        "races/test_racing_keys.py",
        sql("jobs/keys", "if v_next_id is not null then", "if false then"),
    ),
    mutant(
        "effect-not-unique",
        "The same effect is recorded as often as one likes.",
        "sql/jobs/test_effects.py races/test_racing_effects.py",
        sql(
            "tables/effects",
            "    constraint effects_pkey primary key (scope, key),\n",
            "",
        ),
    ),
    mutant(
        "effect-taken-from-its-holder",
        "An effect is done again while its first worker is at it.",
        "sql/jobs/test_effects.py races/test_racing_effects.py",
        sql(
            "jobs/effects",
            "and rota._is_leased(v_effect.job_id, v_effect.lease_token)",
            "and false",
        ),
    ),
    mutant(
        "effect-not-locked",
        "Two that come upon an effect of unknown outcome both do it again.",
        "races/test_racing_effects.py",
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
        "effect-purged-in-use",
        "Retention purges a record whose effect is just being done.",
        "sql/jobs/test_effects.py races/test_racing_effects.py",
        sql(
            "maintenance/retention",
            "or not rota._is_leased(f.job_id, f.lease_token)",
            "or true",
        ),
    ),
    mutant(
        "effect-purged-as-it-is-taken-over",
        "Retention purges a record that another lease has taken over since it looked.",
        "races/test_racing_effects.py",
        sql(
            "maintenance/retention",
            "between $2 and $3 and (%4$s)",
            "between $2 and $3",
        ),
    ),
    mutant(
        "parent-looked-at-twice",
        "A job whose dead parent is purged as it comes in runs as if it had none.",
        "races/test_waiting.py",
        sql(
            "waiting/hooks",
            "where p.id in (select unnest(v_parents)) order by",
            "join rota._parent_statuses($3) as e on e.parent_id = p.id\n"
            "where e.status <> 'succeeded' order by",
        ),
    ),
    mutant(
        "retry-of-a-purged-parent-waited-for",
        "A job waits for ever for the retry of a parent whose purge commits after its check.",
        "races/test_waiting.py",
        sql(
            "waiting/dependencies",
            "where f.id = any(v_left) for key share skip locked",
            "where f.id = any(v_left)",
        ),
    ),
    mutant(
        "dependant-that-came-back-cancelled",
        "A job that an operator brings back is cancelled with those of its dead parent.",
        "races/test_waiting.py",
        sql(
            "waiting/dependencies",
            "          and coalesce(b.if_parent_dead, 'cancel') = 'cancel'\n",
            "",
        ),
    ),
    mutant(
        "dependants-cancelled-for-what-was",
        "Dependants are cancelled because of a parent that was retried meanwhile.",
        "races/test_waiting.py",
        sql(
            "waiting/dependencies",
            "          and coalesce(v_status, 'dead') in ('dead', 'cancelled') returning",
            "        returning",
        ),
    ),
    mutant(
        "dependants-being-cancelled-not-restored",
        "Dependants that a tick is just cancelling stay so when their parent is retried.",
        "races/test_waiting.py",
        sql(
            "waiting/dependencies",
            "              and j.xmax <> '0'::xid and j.xmax <> j.xmin\n            order by 1",
            "              and false\n            order by 1",
        ),
    ),
    mutant(
        "held-dependant-taken-for-restored",
        "A dependant that a tick is just cancelling is asked for once, and stays cancelled.",
        "races/test_waiting.py",
        sql(
            "waiting/dependencies",
            "return rota._still_to_end(array[c_at]) <> '{}';",
            "return true;",
        ),
    ),
    mutant(
        "dependants-looked-for-when-their-parent-has-run",
        "A job that succeeds before the next tick takes along what is to be retried with it.",
        "races/test_waiting.py",
        sql(
            "waiting/dependencies",
            "unnest(v_dependants || array(",
            "unnest(array[]::text[] || array(",
        ),
    ),
    mutant(
        "dependant-restored-however-it-ended",
        "A dependant that has run since a tick looked for those to restore runs twice.",
        "races/test_waiting.py",
        sql(
            "waiting/dependencies",
            "where f.id = c_at and f.status = 'cancelled'\n"
            "          and f.cancel_reason = any(rota._parent_reasons(c_id))\n",
            "where f.id = c_at\n",
        ),
    ),
    mutant(
        "head-and-halt-of-two-snapshots",
        "A tick opens one more job of a key that is resumed between its two looks.",
        "races/test_waiting.py",
        sql(
            "waiting/order",
            "    if v_is_halted then return true; end if;\n",
            "    if exists (select from rota.halted_keys as s\n"
            "        where s.ordering_key = $1) then return true; end if;\n",
        ),
    ),
    mutant(
        "two-heads",
        "A job that came late, with a lower id than the head, becomes a second head.",
        "sql/waiting/test_order.py races/test_waiting.py races/test_pairs.py",
        sql(
            "waiting/order",
            ") and rota._key_head(ordering_key, start) is null",
            ")",
        ),
    ),
    mutant(
        "key-start-never-written",
        "A producer walks all that has ended in its key while somebody holds a snapshot.",
        "sql/waiting/test_key_starts.py",
        sql("waiting/order", "- c_walked > 200", "- c_walked > 200000"),
    ),
    mutant(
        "key-start-never-written-by-an-end",
        "The end of a job walks all that has ended in its key while somebody holds a snapshot.",
        "sql/waiting/test_key_starts.py",
        sql("waiting/order", "- v_walked > 100", "- v_walked > 100000"),
    ),
    mutant(
        "key-start-not-lowered-by-a-producer",
        "A job below the start of its key becomes its head, and others do not see it.",
        "sql/waiting/test_key_starts.py",
        sql("waiting/order", "boolean := job_id < v_start", "boolean := false"),
        sql("waiting/order", "if job_id < v_start then", "if false then"),
    ),
    mutant(
        "key-start-hides-what-comes-back",
        "A job that is retried waits behind those that came later, below the start of its key.",
        "sql/waiting/test_key_starts.py",
        sql("waiting/order", "boolean := job_id < v_start", "boolean := false"),
    ),
    mutant(
        "key-start-not-lowered-by-an-end",
        "The end of a job lets one in below the start of its key, and others do not see it.",
        "sql/waiting/test_key_starts.py model/test_storms.py",
        sql("waiting/order", "o.id < rota._key_start(o.ordering_key)", "false"),
    ),
    mutant(
        "key-start-not-the-newest",
        "The oldest start of a key counts.",
        "sql/waiting/test_key_starts.py",
        sql(
            "waiting/key_starts",
            "order by s.ordering_key desc, s.id desc limit 1\n    ), 0)",
            "order by s.ordering_key, s.id limit 1\n    ), 0)",
        ),
    ),
    mutant(
        "key-start-passes-late-jobs-at-once",
        "A job whose transaction was a moment late is passed by those that come later.",
        "sql/waiting/test_key_starts.py",
        sql("waiting/key_starts", "rota._key_start(ordering_key, '1 second')", "start"),
    ),
    mutant(
        "key-start-purged-without-a-lock",
        "The newest start of a key may go and leave an older one to count.",
        "sql/waiting/test_key_starts.py",
        sql("waiting/key_starts", "continue when not rota._try_lock_key(v_key, 1000);", ""),
    ),
    mutant(
        "key-start-above-a-late-job",
        "A job whose transaction was late is forgotten, below the start of its key.",
        "sql/waiting/test_key_starts.py",
        sql(
            "maintenance/pending",
            "then rota._has_none_below_start(subject) else false end;",
            "then true else false end;",
        ),
    ),
    mutant(
        "key-start-written-over-another",
        "Who has searched from an older start writes over one that makes all search again.",
        "sql/waiting/test_key_starts.py",
        sql("waiting/key_starts", "and rota._key_start(ordering_key) = searched_from", ""),
    ),
    mutant(
        "key-start-purged-by-strangers",
        "A forgotten transaction that has ticked keeps the locks of keys.",
        "sql/waiting/test_key_starts.py",
        sql(
            "maintenance/retention",
            "continue when v_kind = 'key_starts' and rota._leaves_to_others();",
            "",
        ),
    ),
    mutant(
        "plain-job-to-any-queue",
        "A confined producer enqueues a plain job to any queue.",
        "sql/access/test_queue_grants.py",
        sql(
            "jobs/enqueue",
            "and (c.name <> 'access producer' or rota._may_confine(c.role))",
            "and c.name <> 'access producer'",
        ),
    ),
    mutant(
        "plain-job-unchecked",
        "A plain job goes in whatever its name and payload are.",
        "sql/jobs/test_enqueue.py",
        sql(
            "jobs/enqueue",
            """\
rota._is_sound(enqueue.job_type, enqueue.queue, enqueue.payload, enqueue.priority,
            null)""",
            "true",
        ),
    ),
    mutant(
        "plain-job-at-two-times",
        "A plain job with both a run_at and a delay goes in.",
        "sql/jobs/test_enqueue.py",
        sql(
            "jobs/enqueue",
            "and num_nonnulls(run_at, delay) <= 1 and coalesce(",
            "and coalesce(",
        ),
    ),
    mutant(
        "plain-job-at-any-time",
        "A plain job goes in whatever its run_at and delay are.",
        "sql/jobs/test_enqueue.py",
        sql(
            "jobs/enqueue",
            "delay >= '0' and extract(epoch from delay) between 0 and 3000000000, true)",
            "true, true)",
        ),
    ),
    mutant(
        "plain-job-never-attempted",
        "A plain job may have no attempt.",
        "sql/jobs/test_enqueue.py",
        sql("jobs/enqueue", "select coalesce(max_attempts, 1) > 0 and", "select"),
    ),
    mutant(
        "plain-job-with-any-headers",
        "The headers of a plain job may be anything.",
        "sql/jobs/test_enqueue.py",
        sql(
            "jobs/enqueue", "jsonb_typeof(headers) = 'object' and octet_length", "octet_length"
        ),
    ),
    mutant(
        "plain-job-wakes-at-once",
        "A job for next month wakes a worker.",
        "sql/maintenance/test_wakeups.py",
        sql(
            "jobs/enqueue",
            "where coalesce(v_run_at, v_now) < v_now + rota._soon(); end if;"
            " return v_job_id; end if",
            "; end if; return v_job_id; end if",
        ),
    ),
    mutant(
        "plain-job-of-a-type-with-settings",
        "A single job goes past the limit, the time limit and the expiry of its type.",
        "sql/jobs/test_queues.py sql/maintenance/test_expiry.py sql/waiting/test_limits.py",
        sql(
            "jobs/enqueue",
            """\
any(array['access producer', enqueue.queue, 'type ' || enqueue.job_type])
              and""",
            """\
any(array['access producer', enqueue.queue])
              and""",
        ),
    ),
    mutant(
        "single-job-without-defaults-of-its-type",
        "A single job does not get the time limit and the expiry of its type.",
        "sql/jobs/test_queues.py sql/maintenance/test_expiry.py",
        sql(
            "jobs/enqueue",
            "(where c.name = 'access producer'), bool_or(c.source in ('queues', 'job_types'))",
            "(where c.name = 'access producer'), bool_or(c.source = 'queues')",
        ),
    ),
    mutant(
        "single-job-beside-fair-shares",
        "A single job without a key goes before the shares of the keys of its queue.",
        "sql/waiting/test_fairness.py",
        sql(
            "jobs/enqueue",
            "rota._gives_place(c.source, c.name, enqueue.queue)",
            "c.source <> 'fair_queues' and rota._gives_place(c.source, c.name, enqueue.queue)",
        ),
    ),
    mutant(
        "single-job-held-in-a-queue-that-moved",
        "A job with a key goes into a queue that is still coming from another database.",
        "sql/maintenance/test_moves.py",
        sql(
            "jobs/enqueue",
            "rota._gives_place(c.source, c.name, enqueue.queue)",
            "c.source <> 'queue_moves' and rota._gives_place(c.source, c.name, enqueue.queue)",
        ),
    ),
    mutant(
        "single-job-past-the-limit-of-its-type",
        "Single jobs of a type whose limit is full fill the lane.",
        "sql/waiting/test_limits.py",
        sql(
            "jobs/enqueue",
            "rota._gives_place(c.source, c.name, enqueue.queue)",
            "c.source <> 'limits' and rota._gives_place(c.source, c.name, enqueue.queue)",
        ),
    ),
    mutant(
        "single-job-does-not-age",
        "A single job in a queue that ages has no place among the others.",
        "sql/jobs/test_enqueue.py",
        sql("jobs/enqueue", "v_takes_place or q.ageing is not null", "v_takes_place"),
    ),
    mutant(
        "batch-without-defaults",
        "A batch does not get what is set for its queues and types.",
        "sql/jobs/test_enqueue.py",
        sql(
            "jobs/enqueue",
            "coalesce(bool_or(c.source in ('queues', 'job_types')), false)",
            "false",
        ),
    ),
    mutant(
        "batch-past-the-limit-of-its-type",
        "Batches of a type whose limit is full fill the lane.",
        "sql/waiting/test_limits.py",
        sql(
            "jobs/enqueue",
            "rota._gives_place(c.source, c.name, k.queue)",
            "c.source <> 'limits' and rota._gives_place(c.source, c.name, k.queue)",
        ),
    ),
    mutant(
        "batch-does-not-age",
        "A batch in a queue that ages has no places among the others.",
        "sql/jobs/test_enqueue.py",
        sql(
            "jobs/enqueue",
            "q.queue = k.queue and q.ageing is not null",
            "q.queue = k.queue and false",
        ),
    ),
    mutant(
        "batch-beside-fair-shares",
        "A batch without keys goes before the shares of the keys of its queue.",
        "sql/jobs/test_enqueue.py sql/waiting/test_fairness.py",
        sql(
            "jobs/enqueue",
            "rota._gives_place(c.source, c.name, k.queue)",
            "c.source <> 'fair_queues' and rota._gives_place(c.source, c.name, k.queue)",
        ),
    ),
    mutant(
        "plain-batch-to-any-queue",
        "A confined producer enqueues plain jobs to any queue, if it sends a batch.",
        "sql/access/test_queue_grants.py",
        sql(
            "jobs/enqueue",
            "c.name = 'access producer' and rota._may_confine(c.role)",
            "false",
        ),
    ),
    mutant(
        "key-start-purged-alone-only",
        "Where no tick is alone in its transaction the starts of keys stay for ever.",
        "sql/waiting/test_key_starts.py",
        sql(
            "maintenance/retention",
            "v_kind = 'key_starts' and rota._leaves_to_others();",
            "v_kind = 'key_starts' and not is_alone;",
        ),
    ),
    mutant(
        "order-from-the-end",
        "The last job of an ordering key goes first.",
        "sql/waiting/test_order.py",
        sql(
            "waiting/key_starts",
            "order by j.ordering_key, j.id limit 1",
            "order by j.ordering_key desc, j.id desc limit 1",
        ),
    ),
    mutant(
        "dead-head-lets-go",
        "The jobs behind a dead one go on, though nobody said so.",
        "sql/waiting/test_order.py",
        sql("waiting/order", "      and not e.skip_dead\n", "      and false\n"),
        sql("waiting/order", "(_leave_keys.new_status <> 'dead' or e.skip_dead)", "true"),
    ),
    mutant(
        "turn-not-passed-on",
        "The job behind one that has ended waits for ever.",
        "sql/waiting/test_order.py",
        sql(
            "waiting/order",
            "        where e.ordering_key is not null\n",
            "        where false\n",
        ),
    ),
    mutant(
        "child-before-its-parents",
        "A job starts when the first of its parents has ended.",
        "sql/waiting/test_dependencies.py",
        sql(
            "waiting/dependencies",
            "num_nonnulls(c.ordering_key, c.parent_id) = 0",
            "num_nonnulls(c.ordering_key) = 0",
        ),
        sql(
            "waiting/order",
            "unnest(c_held) as h (id) where rota._newest_parent(h.id) is null",
            "unnest(c_held) as h (id)",
        ),
    ),
    mutant(
        "dependant-keeps-the-others",
        "A cancelled job that cannot be brought back keeps the others of its parent.",
        "sql/waiting/test_dependencies.py",
        sql(
            "waiting/dependencies",
            "        when lock_not_available then return false;\n    end;\n    return true;",
            "    end;\n    return true;",
        ),
    ),
    mutant(
        "act-tried-on-a-full-disk",
        "A full disk is said to be a conflict of each of a thousand jobs.",
        "sql/operations/test_acts.py",
        sql(
            "operations/acts",
            "        if rota._is_no_fault_of_a_row(sqlstate) then raise; end if;\n",
            "",
        ),
    ),
    mutant(
        "parent-that-is-not-kept",
        "A job that is retried waits for ever for one that retention has removed.",
        "sql/waiting/test_dependencies.py",
        sql("waiting/dependencies", " or v_rule = 'wait' and s.status is null),", "),"),
    ),
    mutant(
        "retry-of-a-blocked-job-looks-at-nothing",
        "A job waits for ever for one that was deleted by hand, also after it was retried.",
        "sql/operations/test_explain.py",
        sql("jobs/control", " where v_status = 'blocked';", " where false;"),
    ),
    mutant(
        "retry-loses-edges-of-many",
        "Of very many dependants some stay cancelled where the parent succeeds before a tick.",
        "races/test_waiting.py",
        sql(
            "waiting/dependencies",
            "c_status = 'succeeded' and j.id is not null",
            "c_status = 'succeeded'",
        ),
    ),
    mutant(
        "retry-of-a-dependant-looks-later",
        "Jobs stay cancelled where one that was restored for them succeeds before a tick.",
        "races/test_waiting.py",
        sql(
            "waiting/dependencies",
            "perform rota._check_retry(format('%s 0', c_at));",
            "perform rota._add_checks('retry', array[format('%s 0', c_at)]);",
        ),
    ),
    mutant(
        "dead-parent-is-well",
        "A job runs although one that it waits for is dead.",
        "sql/waiting/test_dependencies.py",
        sql(
            "waiting/dependencies",
            "where c_status = 'succeeded' and j.id is not null\n"
            "            or j.if_parent_dead = 'run'),",
            "where true),",
        ),
    ),
    mutant(
        "parent-ends-unheard",
        "A job that waits for others leaves no check, and a parent may end without seeing it.",
        "races/test_waiting.py",
        sql(
            "waiting/hooks",
            "perform rota._add_checks('job', v_waiting);",
            "null;",
        ),
        sql(
            "waiting/hooks",
            "perform rota._add_checks('job', array[format('%s all', job_id)]);",
            "null;",
        ),
    ),
    mutant(
        "parent-guessed",
        "A job may depend on one that only the same call makes, and two on each other.",
        "sql/waiting/test_dependencies.py",
        sql(
            "waiting/hooks",
            "where n.id in (select unnest(parent_ids)) having count(*) > 0",
            "where false having count(*) > 0",
        ),
    ),
    mutant(
        "one-token-for-two-stages",
        "A job has in its next stage the token of the one that it has left.",
        "sql/waiting/test_pipelines.py",
        sql(
            "jobs/finish",
            "lease_token = least(j.lease_token, 9223372036854775806) + 1,",
            "lease_token = j.lease_token,",
        ),
    ),
    mutant(
        "stage-finished-and-lost",
        "A worker that asks again whether its stage is finished is told that it has lost it.",
        "sql/waiting/test_pipelines.py",
        sql("jobs/finish", "and r.status = 'succeeded'", "and false"),
    ),
    mutant(
        "stage-entered-though-cancelled",
        "A job whose cancel was requested goes on to the next stage.",
        "sql/waiting/test_pipelines.py",
        sql(
            "jobs/finish",
            "(where n.stage is not null and h.cancel_requested_at is null)",
            "(where n.stage is not null)",
        ),
    ),
    mutant(
        "restart-with-any-result",
        "A job that is restarted is given the result of a stage that comes later.",
        "sql/waiting/test_pipelines.py",
        sql("waiting/pipelines", " and p.ordinal < stage.ordinal)", ")"),
    ),
    mutant(
        "limit-plus-one",
        "A slot more than the limit has is issued.",
        "sql/waiting/test_limits.py sql/waiting/test_limits_open.py",
        sql(
            "jobs/slots",
            "+ (v_part < bound.max_running % c_parts)::integer;\n        insert",
            "+ (v_part <= bound.max_running % c_parts)::integer;\n        insert",
        ),
    ),
    mutant(
        "limit-blind-to-what-ran",
        "What ran before a limit was set does not count.",
        "sql/waiting/test_limits.py races/test_racing_limits.py",
        sql(
            "waiting/limits",
            "(n.name = any(j.held_limits)) is not true;",
            "(n.name = any(j.held_limits)) is null and false;",
        ),
    ),
    mutant(
        "limit-blind-to-held-rows",
        "What ran before a limit was set does not count while somebody holds its row.",
        "races/test_racing_limits.py",
        sql(
            "waiting/limits",
            "select n.name, coalesce(u.jobs, 0), coalesce(u.jobs, 0) - (",
            "select n.name, 0, 0 - (",
        ),
    ),
    mutant(
        "held-row-counts-for-ever",
        "The slot of a job that ended before it was counted is not given back.",
        "races/test_racing_limits.py",
        sql("waiting/limits", "        if v_new <> 0 then\n", "        if v_new > 0 then\n"),
    ),
    mutant(
        "claim-leaves-what-is-given-back",
        "A claim holds a job for a slot that another limit has just left free.",
        "sql/waiting/test_limits.py",
        sql(
            "jobs/slots",
            "          and v_holds[array_position(v_leaving, j.id)] <> all(v_unused);\n",
            ";\n",
        ),
    ),
    mutant(
        "start-that-is-left-unseen",
        "A claim does not see that another limit has left it a start at a rate.",
        "sql/waiting/test_limits.py",
        sql("jobs/slots", "j.id = any(v_refused) and l.limit_name = any(v_rates)", "false"),
    ),
    mutant(
        "claim-does-not-look-again",
        "A claim ends at a job that another limit has just left a slot for.",
        "sql/waiting/test_limits.py",
        sql("jobs/claim", "                and not v_admitted.must_look_again", ""),
    ),
    mutant(
        "limit-looks-once",
        "What starts while set_limit() stays open is counted only by the next tick.",
        "sql/waiting/test_limits_open.py",
        sql(
            "waiting/limits",
            "and l.max_running is not null and exists (select from rota._uncounted(l));\n",
            "and false;\n",
        ),
    ),
    mutant(
        "held-row-asked-once",
        "A job whose row is held when a limit is set is not counted later.",
        "races/test_racing_limits.py",
        sql(
            "waiting/limits",
            "and not exists (select from rota._uncounted(v_limit)));",
            "and true);",
        ),
    ),
    mutant(
        "limit-issued-by-claims",
        "A claim that is open keeps the slots from others that it has issued.",
        "races/test_racing_limits.py",
        sql("jobs/slots", "or bound.limit_name like 'key %:%'\n", "or true\n"),
    ),
    mutant(
        "tick-takes-limits-along",
        "A tick in a transaction that is forgotten keeps limits from all others.",
        "races/test_racing_limits.py",
        sql(
            "maintenance/pending",
            "return not rota._is_alone() and exists (",
            "return false and exists (",
        ),
    ),
    mutant(
        "limit-settled-too-early",
        "Claims that were under way when a limit was set are asked for once only.",
        "races/test_racing_limits.py",
        sql(
            "waiting/limits",
            "c.asked_xid <= pg_snapshot_xmin(pg_current_snapshot())",
            "c.asked_xid is not null",
        ),
    ),
    mutant(
        "locks-that-any-login-can-name",
        "Any login can keep the locks of ordering keys, rates and limits from all sessions.",
        "faults/test_sessions.py",
        sql(
            "base/locks", "coalesce(pg_sequence_last_value('rota.lock_seed'::regclass), 0)", "0"
        ),
    ),
    mutant(
        "part-issued-twice",
        "Two claims issue the same slots.",
        "sql/waiting/test_limits_open.py races/test_racing_limits.py",
        sql(
            "jobs/slots",
            "v_issued);\n        continue when not rota._try_lock(",
            "v_issued);\n        continue when 1 = 0 and rota._try_lock(",
        ),
    ),
    mutant(
        "slots-wait-for-slots",
        "A claim waits for a slot that another one has taken.",
        "sql/waiting/test_limits_open.py races/test_racing_limits.py",
        sql(
            "jobs/slots",
            """\
            limit _take_slots.wanted
            for update skip locked""",
            """\
            limit _take_slots.wanted
            for update""",
        ),
    ),
    mutant(
        "slot-not-given-back",
        "A job that stops running keeps its slots.",
        "sql/waiting/test_limits.py",
        sql(
            "waiting/limits",
            "perform rota._give_slots(_leave_limits.limit_names);",
            "null;",
        ),
    ),
    mutant(
        "unused-slot-not-given-back",
        "A job that found one limit full keeps the slots of the others.",
        "sql/waiting/test_limits_open.py",
        sql("jobs/slots", "            perform rota._give_slots(v_slots_back);\n", ""),
    ),
    mutant(
        "start-of-a-refused-job-counts",
        "A job that another limit has refused counts as started at its rate.",
        "sql/waiting/test_limits.py",
        sql("jobs/slots", "        if are_started then\n", "        if true then\n"),
    ),
    mutant(
        "free-slot-not-told",
        "A slot gets free, and no held job takes its lane again.",
        "sql/waiting/test_limits_open.py sql/waiting/test_limits.py",
        sql(
            "waiting/limits",
            "            perform rota._open_held(v_name, slots_given => v_given);\n",
            "            null;\n",
        ),
    ),
    mutant(
        "held-let-in-without-count",
        "Each end lets a job into the lane of a queue without workers.",
        "sql/waiting/test_limits_open.py",
        sql(
            "waiting/limits",
            "                    v_free - v_open.jobs)\n",
            "                    v_free)\n",
        ),
    ),
    mutant(
        "turned-away-unheard",
        "A claim turns many away and finds nothing, and nobody looks again.",
        "sql/maintenance/test_wakeups.py",
        sql(
            "jobs/claim",
            "perform rota._notify(q.queue) from unnest(_lock_due.queues) as q (queue);",
            "null;",
        ),
    ),
    mutant(
        "turned-away-unchecked",
        "A claim turns jobs away and leaves no check.",
        "races/test_racing_limits.py sql/waiting/test_limits.py",
        sql(
            "jobs/claim",
            "perform rota._add_checks('limit', v_limits_to_check);",
            "null;",
        ),
    ),
    mutant(
        "surplus-is-used",
        "After a limit was lowered the slots of before are still given out.",
        "sql/waiting/test_limits_open.py",
        sql(
            "jobs/slots",
            "and p.max_running > bound.max_running\n",
            "and false\n",
        ),
    ),
    mutant(
        "rate-without-end",
        "Starts are not counted, so a rate holds nobody up.",
        "sql/waiting/test_limits.py",
        sql(
            "jobs/slots",
            "            bound.limit_name, v_cell, v_free,\n",
            "            bound.limit_name, v_cell, 0,\n",
        ),
    ),
    mutant(
        "keys-without-turns",
        "A new key stands behind the backlog of the others.",
        "sql/waiting/test_limits.py",
        sql(
            "waiting/hooks",
            "least(rota._first_place(v_queue, v_lane), v_kind.first_place)",
            "rota.now()",
        ),
        sql(
            "waiting/hooks",
            "v_first := rota._first_place(queue, priority)",
            "v_first := rota.now()",
        ),
    ),
    mutant(
        "new-job-past-those-held",
        "A new job of a full limit stands in front of others that could start.",
        "sql/waiting/test_limits.py sql/waiting/test_limits_open.py",
        sql("waiting/hooks", "array[job_id]) > 0;", "array[job_id]) >= 0;"),
    ),
    mutant(
        "new-job-held-without-a-check",
        "A new job is held by a limit whose last slot is given back just now.",
        "sql/waiting/test_limits_open.py sql/waiting/test_limits.py",
        sql("waiting/hooks", "perform rota._add_checks('limit', array[hold]);", ""),
    ),
    mutant(
        "new-job-that-does-not-age",
        "A new job of a queue that ages stands in the lane of its priority.",
        "sql/waiting/test_limits.py",
        sql(
            "waiting/hooks",
            "    lane := 0;\n            place",
            "    lane := null;\n            place",
        ),
    ),
    mutant(
        "new-job-that-ages-without-priority",
        "A new job of a queue that ages stands where its time puts it, whatever its priority.",
        "sql/waiting/test_limits.py sql/waiting/test_fairness.py",
        sql(
            "waiting/hooks",
            "place := run_at + priority * v_settings.ageing;",
            "place := run_at;",
        ),
    ),
    mutant(
        "new-job-for-later-in-its-lane",
        "A new job with a key, or of a queue that ages, stands in its lane before its time.",
        "sql/waiting/test_limits.py sql/waiting/test_fairness.py",
        sql(
            "waiting/hooks",
            "            hold := 'time';\n        elsif",
            "            hold := null;\n        elsif",
        ),
    ),
    mutant(
        "batch-for-later-in-its-lane",
        "Jobs of a batch with a key stand in their lane before their time.",
        "sql/waiting/test_limits.py sql/waiting/test_fairness.py",
        sql("waiting/hooks", "if v_has_places then v_job.hold := 'time'; end if;", ""),
    ),
    mutant(
        "kinds-of-a-batch-past-each-other",
        "Each kind of the jobs of a batch has all that a limit of theirs leaves.",
        "sql/waiting/test_fairness.py",
        sql("waiting/hooks", "if v_free is null then", "if true then"),
    ),
    mutant(
        "found-job-in-the-place-of-a-new-one",
        "A job of a batch that is there already takes the last slot from a new one.",
        "sql/waiting/test_fairness.py",
        sql("jobs/insert", "v_need_places and not v_have_keys", "v_need_places"),
    ),
    mutant(
        "ageing-without-priority",
        "In a queue that ages the priority says nothing.",
        "sql/waiting/test_limits.py",
        sql(
            "waiting/hooks",
            "coalesce(v_job.run_at, moment) + v_kind.priority * v_ageing",
            "coalesce(v_job.run_at, moment)",
        ),
    ),
    mutant(
        "planned-time-enqueued-twice",
        "Nothing says that a planned time has its job already.",
        "sql/schedules/test_occurrences.py model/test_tickers.py",
        sql(
            "tables/schedules",
            "    constraint occurrences_pkey primary key (definition, scheduled_for),\n",
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
        sql("schedules/occurrences", "when v_group.is_live then 'skipped'", ""),
    ),
    mutant(
        "ticks-wait-for-ticks",
        "A tick waits for a schedule that another one has locked.",
        "races/test_racing_schedules.py model/test_tickers.py",
        sql(
            "schedules/occurrences",
            """\
                limit _enqueue_due_schedules.max_jobs - v_enqueued
                for update skip locked""",
            """\
                limit _enqueue_due_schedules.max_jobs - v_enqueued
                for update""",
        ),
    ),
    mutant(
        "schedule-of-another-program",
        "A program changes, and then removes, the schedule of another one.",
        "sql/schedules/test_definitions.py client/test_schedule_sync.py",
        sql("schedules/definitions", "if new.source <> old.source then", "if false then"),
    ),
    mutant(
        "result-notified-to-nobody",
        "Who waits for the result of a job hears of no end.",
        "sql/jobs/test_results.py",
        sql("jobs/finish", "perform rota._notify_results(v_ended);", "null;"),
    ),
    mutant(
        "results-notified-to-all",
        "Each end is notified while anybody waits for another job.",
        "sql/jobs/test_results.py",
        sql(
            "base/notify",
            "where rota._others_hold(1919907971, hashint8(i.id))",
            "",
        ),
    ),
    mutant(
        "front-without-a-time-limit",
        "A call through a front may last for ever.",
        "sql/access/test_front.py",
        sql("front", "if current_setting('statement_timeout') = '0' then", "if false then"),
    ),
    mutant(
        "front-that-follows-no-key",
        "A key whose slot was handed over is live in two databases.",
        "sql/access/test_front.py",
        sql("front", "if v_slot.earlier <> '{}' and v_keys <> '{}' then", "if false then"),
    ),
    mutant(
        "front-slot-of-a-stranger",
        "Any login can hold up all calls with keys through a front.",
        "sql/access/test_front.py",
        sql(
            "front",
            "    if not pg_try_advisory_xact_lock_shared(1919907972, v_slots[1]) then\n"
            "        perform rota_front.lock_slot(v_slots[1]);\n"
            "    end if;\n",
            "    perform pg_advisory_xact_lock_shared(1919907972, v_slots[1]);\n",
        ),
    ),
    mutant(
        "front-slot-of-nobody",
        "A call whose slot a stranger has locked goes to a database that it leaves.",
        "sql/access/test_front.py",
        sql("front", "        perform rota_front.lock_slot(v_slots[1]);\n", "        null;\n"),
    ),
    mutant(
        "front-keys-that-any-login-can-name",
        "Any login can hold up all calls with a key through a front.",
        "sql/access/test_front.py",
        sql("front", "hashtextextended(k, s.last_value)", "hashtextextended(k, 1)"),
    ),
    mutant(
        "front-slot-without-lock",
        "A slot is handed over while a call is on its way to its old database.",
        "sql/access/test_front.py",
        sql(
            "front",
            "if not pg_try_advisory_xact_lock_shared(1919907972, v_slots[1]) then",
            "if false then",
        ),
    ),
    mutant(
        "front-of-keys-that-part",
        "Two keys of one job go to the database of the first, and part later.",
        "sql/access/test_front.py",
        sql("front", "if cardinality(v_slots) > 1 then", "if false then"),
    ),
    mutant(
        "front-return-unchecked",
        "A job that ended comes back beside a live one of its key in another database.",
        "sql/access/test_front.py",
        sql("access/front", "perform rota_front.check_return(v_shard, job_id);", "null;"),
    ),
    mutant(
        "front-return-without-lock",
        "A job comes back while the slot of its key changes hands, and the key is live twice.",
        "sql/access/test_front.py",
        sql(
            "front",
            "    select k into v_job",
            """\
    if not exists (select from rota_front.slots as s where s.earlier <> '{}') then
        return;
    end if;
    select k into v_job""",
        ),
    ),
    mutant(
        "front-route-unguarded",
        "A front that looks for a key where no database answers says so as PL/Proxy does.",
        "sql/access/test_front.py",
        sql("access/front", "            v_shard := %5$s;%6$s\n", ""),
        sql(
            "access/front",
            "    -- Each move of its queue leads to",
            "    v_shard := %5$s;%6$s\n    -- Each move of its queue leads to",
        ),
    ),
    mutant(
        "front-key-behind-a-parent",
        "A key is live in two databases, since a job goes to where its parent has moved.",
        "sql/access/test_front.py",
        sql(
            "front",
            "if v_numbers[1] <> v_number then",
            "if moved_to is null and v_numbers[1] <> v_number then",
        ),
        sql(
            "front",
            "return rota_front.shard_of_number('shard_key', v_number);",
            "return coalesce(moved_to, rota_front.shard_of_number('shard_key', v_number));",
        ),
    ),
    mutant(
        "front-line-that-moves",
        "A front refuses all jobs of a line of which a part has moved already.",
        "sql/access/test_front.py",
        sql("front", "if not v_live <@ v_leaving then", "if v_found is not null then"),
    ),
    mutant(
        "front-made-over-others",
        "A front that is made again takes a dashboard's view with it, and says nothing.",
        "sql/access/test_front.py",
        sql("front", "format('drop %s %s', m.kind", "format('drop %s %s cascade', m.kind"),
    ),
    mutant(
        "front-follows-twice",
        "A call through a front does not find a job that moved three times.",
        "sql/access/test_front.py",
        sql("access/front", "for v_try in 1..100 loop", "for v_try in 1..3 loop"),
    ),
    mutant(
        "slot-of-a-job-that-moves",
        "A job that leaves the lane that a limit let it into keeps its slot from others.",
        "sql/waiting/test_limits_open.py",
        sql(
            "waiting/fairness",
            "perform rota._add_checks('limit', v_opened_for);",
            "null;",
        ),
    ),
    mutant(
        "retries-of-other-types-first",
        "Due retries wait while a hundred other kinds have some, due or for later.",
        "sql/maintenance/test_budgets.py",
        sql("maintenance/budgets", "order by h.first_place limit 100", "limit 100"),
    ),
    mutant(
        "place-of-a-queue-that-was-left",
        "A job that was moved meanwhile ages in a queue that does not, and never starts.",
        "races/test_racing_limits.py",
        sql("waiting/fairness", " and j.queue = c_queue\n        for", "\n        for"),
    ),
    mutant(
        "held-retry-ages",
        "A retry that waits for its budget has a place of the queue that has come to age.",
        "sql/maintenance/test_budgets.py",
        sql("waiting/fairness", "not like 'retries %' and case", "not like 'none' and case"),
    ),
    mutant(
        "given-back-behind-its-key",
        "A job that is given back stands behind all that wait of its key.",
        "sql/waiting/test_fairness.py",
        sql(
            "waiting/hooks",
            "case when _give_places.keep_places and n.own_lane is null",
            "case when false",
        ),
    ),
    mutant(
        "share-for-each-type-of-a-batch",
        "A key of a batch has as many shares as job types.",
        "sql/waiting/test_fairness.py",
        sql("waiting/hooks", "and v_key is distinct from concat_ws", "and '' <> concat_ws"),
    ),
    mutant(
        "keys-of-a-batch-apart",
        "The types of a key stand apart in a batch, and each begins anew.",
        "sql/waiting/test_fairness.py",
        sql(
            "waiting/hooks",
            "order by 1, 4, min(min(n.ordinality)) over (\n"
            "            partition by coalesce(n.queue, 'default'), coalesce(n.priority, 0),"
            " n.limit_key\n        ), min(n.ordinality)",
            "order by 1, 4, min(n.ordinality)",
        ),
    ),
    mutant(
        "given-back-to-another-lane",
        "A job whose priority changed while it ran has the place of its old lane.",
        "sql/waiting/test_fairness.py",
        sql(
            "jobs/control",
            "own_place = case when j.status <> 'running' then j.own_place end",
            "own_place = j.own_place",
        ),
    ),
    mutant(
        "carriers-queue-for-anyone",
        "A producer puts jobs where no worker claims and none that is carried is checked.",
        "sql/jobs/test_enqueue.py",
        sql("jobs/enqueue", "and not queue ^@ 'forward:'", ""),
    ),
    mutant(
        "operators-pause-replaced",
        "The pause of a move replaces an operator's, which is gone when it is called off.",
        "sql/maintenance/test_moves.py",
        sql(
            "maintenance/moves",
            "do update set until = null;",
            "do update set until = null, set_by = 'move';",
        ),
    ),
    mutant(
        "pause-left-behind",
        "A queue that an operator has paused runs in the database that it moves to.",
        "sql/maintenance/test_moves.py",
        sql(
            "maintenance/moves",
            "where facts ->> 'move_id' is null and not",
            "where false and not",
        ),
    ),
    mutant(
        "still-coming-is-dead",
        "A job that travels to a queue that is still moving there is dead.",
        "sql/jobs/test_forward.py",
        sql(
            "jobs/forward",
            "when rota._is_for_later(i.ending ->> 'error_code') then 'later'",
            "when false then 'later'",
        ),
    ),
    mutant(
        "key-of-a-stranger-stops-all-that-travels",
        "All jobs for a database wait while a transaction there has the key of one.",
        "sql/jobs/test_forward.py",
        sql(
            "jobs/receive",
            "force_generic_plan set enable_bitmapscan = off\n    set lock_timeout = '100ms'",
            "force_generic_plan set enable_bitmapscan = off",
        ),
    ),
    mutant(
        "key-of-a-stranger-waited-for-again",
        "Each job whose key a transaction has waits for it in turn.",
        "sql/jobs/test_forward.py",
        sql("jobs/receive", "if v_new.error_code = '55P03' then", "if false then"),
    ),
    mutant(
        "keys-not-followed-by-the-front",
        "A front looks for no key where the queue of it moves.",
        "sql/access/test_front.py",
        sql("front", "and k.place = any(v_answer.may_be_live)", "and false"),
    ),
    mutant(
        "live-keys-without-those-on-their-way",
        "A front sends a job past one of its ordering key that is on its way.",
        "sql/access/test_front.py",
        sql(
            "access/front",
            "select t.job ->> 'ordering_key' from rota.moved_jobs as t",
            "select null from rota.moved_jobs as t",
        ),
    ),
    mutant(
        "live-keys-without-halted",
        "A front sends the jobs of a halted ordering key to another database.",
        "sql/access/test_front.py",
        sql(
            "access/front",
            "or (select h.job_id from rota.halted_keys as h"
            " where h.ordering_key = j.ordering_key) is not null",
            "",
        ),
    ),
    mutant(
        "live-keys-without-moves",
        "A front sends a key whose queue moves past the database that carries it on.",
        "sql/access/test_front.py",
        sql(
            "access/front",
            "and rota._moves_away(j.queue)",
            "and false",
        ),
    ),
    mutant(
        "front-without-moves",
        "A front looks for a key nowhere else when its queue moves.",
        "sql/access/test_front.py",
        sql(
            "front",
            "coalesce(v_found, v_moves_from, slot.number)",
            "coalesce(v_found, slot.number)",
        ),
    ),
    mutant(
        "moves-not-followed",
        "A front does not know where a queue of one of its databases has gone.",
        "sql/access/test_front.py",
        sql("front", "where follow_move.source = any(s.earlier || s.number)", "where false"),
    ),
    mutant(
        "travels-before-its-queue",
        "What travels overtakes the jobs of its key that move to the same database.",
        "sql/maintenance/test_moves.py",
        sql("jobs/forward", "v_ids := rota._leave_for_move(v_ids, database);\n", "\n"),
    ),
    mutant(
        "travels-past-one-that-waits",
        "What travels overtakes one of its key that waits for a queue that moves.",
        "sql/maintenance/test_moves.py",
        sql(
            "jobs/forward",
            "and (b.id = j.id or b.ordering_key = j.ordering_key)",
            "and b.id = j.id",
        ),
    ),
    mutant(
        "claim-of-an-old-snapshot",
        "A claim that began before a limit was set never counts for it.",
        "sql/waiting/test_limits.py",
        sql(
            "jobs/claim",
            "v_are_limited := exists (",
            "v_are_limited := false and exists (",
        ),
    ),
    mutant(
        "claim-that-forgets-the-queues-limit",
        "A claim that began before the limit of its queue was set never counts for it.",
        "sql/waiting/test_limits.py",
        sql(
            "jobs/slots",
            "array['queue ' || queue, 'type ' || job_type,",
            "array['type ' || job_type,",
        ),
    ),
    mutant(
        "claim-of-all-that-is-due-without-slots",
        "A claim that takes all that is due does not ask for limits.",
        "sql/waiting/test_limits.py",
        sql(
            "jobs/claim",
            "    if not v_may_be_more then\n        -- Asked",
            "    if cardinality(v_rows) = max_jobs then\n        -- Asked",
        ),
    ),
    mutant(
        "claim-of-all-the-locks",
        "A few claims of a thousand keys take all the locks that the server has.",
        "sql/waiting/test_limits.py",
        sql("jobs/claim", "max_jobs := 200;", "null;"),
    ),
    mutant(
        "claim-with-a-hint-past-the-limit-of-a-key",
        "A claim that has a hint starts more jobs of a key than its limit allows.",
        "sql/waiting/test_limits.py",
        sql(
            "jobs/slots",
            "'type ' || job_type, 'key ' || limit_key,",
            "'type ' || job_type,",
        ),
    ),
    mutant(
        "claim-with-a-hint-past-the-limit-of-a-class",
        "A claim that has a hint starts more jobs of a key than the limit of its class allows.",
        "sql/waiting/test_limits.py",
        sql(
            "jobs/slots",
            "'type ' || job_type, 'key ' || limit_key,\n"
            "    'key ' || substring(limit_key, '^[^:]*:') || '*']",
            "'type ' || job_type, 'key ' || limit_key]",
        ),
    ),
    mutant(
        "claim-past-the-limit-of-its-queue",
        "A claim starts more jobs of a queue than its limit allows.",
        "sql/waiting/test_limits.py",
        sql(
            "jobs/claim",
            "or exists (select from rota.limits as l where l.queue = j.queue))\n            );",
            "));",
        ),
    ),
    mutant(
        "claim-past-the-limit-of-a-type",
        "A claim starts more jobs of a type than its limit allows.",
        "sql/waiting/test_limits.py",
        sql(
            "jobs/claim",
            "j.id = any(v_found) and (j.limit_key is not null\n"
            "                  or exists (select from rota.limits as l where l.job_type"
            " = j.job_type)",
            "j.id = any(v_found) and (j.limit_key is not null",
        ),
    ),
    mutant(
        "reset-of-nothing",
        "To reset a limit that is not there stops its class until the next tick.",
        "sql/waiting/test_limits.py",
        sql(
            "waiting/limits",
            "        if found then\n            -- What",
            "        if true then -- What",
        ),
    ),
    mutant(
        "class-counted-at-once",
        "A limit of a class takes a lock for each of its keys: a server has no room for many.",
        "sql/waiting/test_limits.py",
        sql("waiting/limits", "filter (where k.jobs_before < 500)", "filter (where true)"),
    ),
    mutant(
        "class-counted-in-part",
        "A limit of a class lets jobs start before all keys that run are counted.",
        "sql/waiting/test_limits.py",
        sql(
            "waiting/limits",
            "v_is_whole := cardinality(v_locked) = v_count;",
            "v_is_whole := cardinality(v_locked) = cardinality(v_names);",
        ),
    ),
    mutant(
        "old-end-without-a-check",
        "A job waits for ever for a slot that an end of an old snapshot gave back.",
        "sql/waiting/test_limits.py",
        sql("waiting/limits", "perform rota._add_checks('limit', limit_names);", "null;"),
    ),
    mutant(
        "old-end-locks-what-others-took",
        "An end of an old snapshot fails when others have taken jobs of its limit since.",
        "sql/waiting/test_limits.py",
        sql(
            "waiting/limits",
            "perform rota._add_checks('limit', limit_names);\n        return;",
            "perform rota._add_checks('limit', limit_names);",
        ),
    ),
    mutant(
        "class-without-its-shortest-key",
        "A key that ends with its colon waits for ever when its class has a higher limit.",
        "sql/waiting/test_limits.py",
        sql("waiting/limits", "then array[c_prefix] end;", "then '{}'::text[] end;"),
    ),
    mutant(
        "class-looked-at-at-once",
        "A tick looks at all held keys of a class whose limit has changed, without a bound.",
        "sql/waiting/test_limits.py",
        sql("waiting/limits", "for v_number in 1..c_chunk loop", "loop"),
    ),
    mutant(
        "class-looked-at-in-part",
        "Held keys of a class behind the first thousand do not see that its limit has changed.",
        "sql/waiting/test_limits.py",
        sql(
            "waiting/limits",
            "perform rota._add_checks('class', array[v_name]) where v_name is not null;",
            "",
        ),
    ),
    mutant(
        "limit-of-an-old-snapshot",
        "A limit that was set by an old snapshot does not know what has begun since.",
        "sql/waiting/test_limits.py",
        sql(
            "waiting/limits",
            "when current_setting('transaction_isolation') = 'read committed'\n"
            "          and not exists (select from rota._uncounted(v_limit))",
            "when not exists (select from rota._uncounted(v_limit))",
        ),
    ),
    mutant(
        "held-behind-twenty-kinds",
        "A job waits for a free slot behind twenty types that no worker takes.",
        "sql/waiting/test_limits.py",
        sql("waiting/limits", "then 20 else 1000 end", "then 20 else 20 end"),
    ),
    mutant(
        "probes-past-an-operator",
        "Jobs that a breaker let through start although an operator has paused their type.",
        "sql/jobs/test_retries.py",
        sql("jobs/claim", "p.set_by = 'breaker' and opened_for", "opened_for"),
    ),
    mutant(
        "purged-from-a-producer",
        "A job waits for one that was purged before its producer had committed.",
        "sql/operations/test_acts.py",
        sql(
            "operations/acts",
            "when c_is_open and",
            "when false and",
        ),
    ),
    mutant(
        "purge-asks-late-who-writes",
        "A job waits for one that was purged while its producer committed.",
        "races/test_waiting.py",
        sql(
            "operations/acts",
            "when c_is_open and",
            "when act = 'purge'"
            " and rota._open_writers(array['rota.dependencies'::regclass]) <> '{}' and",
        ),
    ),
    mutant(
        "purged-since-it-is-old",
        "A job waits for one that had ended long ago, and was purged before its commit.",
        "sql/operations/test_acts.py",
        sql("operations/acts", "(k.status <> 'succeeded' or k.ended_at", "(k.ended_at"),
    ),
    mutant(
        "purged-by-an-older-snapshot",
        "A purge of a higher isolation level takes a job for which others wait.",
        "sql/operations/test_acts.py",
        sql(
            "operations/acts",
            "current_setting('transaction_isolation') <> 'read committed'",
            "false",
        ),
    ),
    mutant(
        "placed-once",
        "A job that was not committed when its queue stopped ageing waits for months.",
        "sql/waiting/test_fairness.py",
        sql("waiting/fairness", "elsif v_pass = '' then", "elsif false then"),
    ),
    mutant(
        "placed-when-the-last-stranger-goes",
        "A job that was locked when its queue stopped ageing waits for a stranger.",
        "sql/waiting/test_fairness.py",
        sql("waiting/fairness", "and c.deferrals >= 7", "and false"),
    ),
    mutant(
        "placed-but-for-the-locked",
        "A job that a claim held when its queue stopped ageing waits for months.",
        "sql/waiting/test_fairness.py",
        sql("waiting/fairness", "v_pass := 'missed';", "null;"),
    ),
    mutant(
        "placed-but-for-older-snapshots",
        "What a transaction from before its queue stopped ageing enqueues waits for months.",
        "sql/waiting/test_fairness.py",
        sql("waiting/fairness", "elsif v_pass = 'second' and c_are_older", "elsif false"),
    ),
    mutant(
        "first-key-of-an-older-snapshot",
        "A producer fails because another session's key was the first of its queue.",
        "sql/waiting/test_fairness.py",
        sql(
            "waiting/fairness",
            "exception when serialization_failure then",
            "exception when division_by_zero then",
        ),
    ),
    mutant(
        "held-where-it-aged",
        "A job that was held when its queue stopped ageing waits for months.",
        "sql/waiting/test_fairness.py",
        sql(
            "waiting/fairness",
            "where j.id = any(v_locked) and coalesce(j.hold, 'time') <> 'time' returning",
            "where false returning",
        ),
    ),
    mutant(
        "placed-behind-the-aged",
        "A job of a queue that stopped ageing waits for months, behind one that had aged.",
        "sql/waiting/test_fairness.py",
        sql(
            "waiting/fairness",
            "and coalesce(j.own_place, j.run_at) <= v_end and j.id <> all(",
            "and j.id <> all(",
        ),
    ),
    mutant(
        "slot-kept-with-a-locked-job",
        "A slot waits for a job that a stranger has locked, and no other may have it.",
        "sql/waiting/test_limits_open.py",
        sql(
            "maintenance/tick",
            "from unnest(rota._kept_limits('do')) as k (limit_name);",
            "from unnest('{}'::text[]) as k (limit_name);",
        ),
    ),
    mutant(
        "slot-kept-until-a-tick",
        "Each slot waits for a tick while a stranger has a job of its limit locked.",
        "sql/waiting/test_limits_open.py",
        sql(
            "waiting/limits",
            "or age(j.xmax) < _opened.max_lock_age)",
            "or _opened.max_lock_age > 0)",
        ),
    ),
    mutant(
        "locked-job-asks-for-no-tick",
        "Nobody ticks for a slot that waits for a job that a stranger has locked.",
        "sql/waiting/test_limits_open.py",
        sql("maintenance/tick", "      or rota._kept_limits('ask') <> '{}'\n", ""),
    ),
    mutant(
        "mark-taken-for-a-lock",
        "Ticks are asked for on and on where a lock on a job was given up.",
        "sql/waiting/test_limits_open.py",
        sql("waiting/limits", "and j.id <> all(v_free)", ""),
    ),
    mutant(
        "locks-of-a-later-time",
        "A worker in an older snapshot fails where it asks whether to tick.",
        "sql/waiting/test_limits_open.py",
        sql(
            "waiting/limits",
            "      or current_setting('transaction_isolation') <> 'read committed' then\n"
            "        return '{}'::text[];",
            " then\n        return '{}'::text[];",
        ),
    ),
    mutant(
        "left-while-a-tick-looks",
        "A tick does a check at once that is left meanwhile, and not when it is due.",
        "sql/waiting/test_pending.py",
        sql("maintenance/pending", "c.updated_at > rota.now()", "c.updated_at > v_now"),
    ),
    mutant(
        "pause-without-an-end",
        "What a pause holds stays held where the clock was set back before its end.",
        "sql/jobs/test_pauses.py",
        sql(
            "maintenance/pending",
            "          and (c.kind <> 'pause' or c.deferrals > 0)\n",
            "",
        ),
    ),
    mutant(
        "let-in-for-a-taken-slot",
        "Jobs are let in and held again, on and on, while a forgotten claim has the slot.",
        "sql/waiting/test_limits_open.py",
        sql("waiting/limits", "rota._slots_being_taken(limit_name);", "0;"),
    ),
    mutant(
        "slot-taken-by-a-mark",
        "A slot that a claim took and gave up is not given to a job that waits for it.",
        "sql/waiting/test_limits_open.py",
        sql("waiting/limits", "where m.xid = any(array(", "where true or m.xid = any(array("),
    ),
)
