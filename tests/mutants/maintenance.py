"""Maintenance, wake-ups and rights: what nobody sees until it is missing."""

from __future__ import annotations

from mutants.mutant import mutant, sql

MAINTENANCE = (
    mutant(
        "pause-deleted-by-hand",
        "What a pause has held waits for ever, once its row is deleted by hand.",
        "sql/jobs/test_pauses.py",
        sql("base/configured", "if tg_table_name = 'pauses'\n", "if false\n"),
    ),
    mutant(
        "install-waits-with-half-of-the-views",
        "An install and who reads several views wait for each other, and one is ended.",
        "contract/test_install.py",
        sql("upgrades/all", "for v_try in 1..25 loop", "for v_try in 1..0 loop"),
    ),
    mutant(
        "schema-of-a-stranger-stops-it",
        "Anybody who may create a schema stops each install by the name of an old one.",
        "security/test_hostile_install.py",
        sql(
            "upgrades/all",
            "where n.nspname = 'rota_0_1_0' and n.nspowner = v_owner",
            "where n.nspname = 'rota_0_1_0'",
        ),
    ),
    mutant(
        "default-privileges-open-the-first-install",
        "A role that is given what the owner makes may write to rota's tables.",
        "security/test_public.py",
        sql(
            "access/grants",
            "            select rota._default_grantees()\n",
            "            select null where false\n",
        ),
    ),
    mutant(
        "default-privileges-open-the-days",
        "A role that is given what the owner makes may read a day of all queues.",
        "security/test_public.py",
        sql(
            "maintenance/retention",
            "for v_role in select rota._default_grantees()\n",
            "for v_role in select null::name where false\n",
        ),
    ),
    mutant(
        "counts-stand-still-while-nothing-ticks",
        "While no worker runs, the due jobs are as many as when the last one ran.",
        "sql/operations/test_statistics.py",
        sql("maintenance/depths", "    > 40000 * 8192);", "    > 0);"),
    ),
    mutant(
        "index-of-schedules-lost",
        "Each schedule that comes due reads the jobs of all others.",
        "contract/test_plans.py",
        sql(
            "tables/jobs",
            "create index jobs_definition_idx on rota.jobs (definition)"
            " where definition is not null;\n",
            "",
        ),
    ),
    mutant(
        "tick-reads-failures-for-each-breaker",
        "Each tick reads the newest 5000 failures once more for each breaker.",
        "sql/jobs/test_retries.py",
        sql("maintenance/breakers", "s.queue || ' ' || s.job_type = any(c_failing)", "true"),
    ),
    mutant(
        "retention-goes-on-for-nothing",
        "A database of many queues ticks all the time, though there is nothing to delete.",
        "sql/maintenance/test_retention.py",
        sql(
            "maintenance/retention",
            "has_more := has_more or c_had_more or v_did;",
            "has_more := true;",
        ),
    ),
    mutant(
        "retention-looks-at-the-same-queues",
        "Queues behind a thousand that keep their jobs for long are never purged.",
        "sql/maintenance/test_retention.py",
        sql(
            "maintenance/retention",
            "perform rota._keep_scan_start('queues', coalesce(v_next, '~'));",
            "perform rota._keep_scan_start('queues', '~');",
        ),
    ),
    mutant(
        "retention-looks-at-one-day",
        "What ended days before the seventh stays if its queue does nothing any longer.",
        "sql/maintenance/test_retention.py",
        sql(
            "maintenance/retention",
            "(oldest at time zone 'UTC') - interval '1 day', interval '-1 day'",
            "date_trunc('day', c_before) - interval '1 day', interval '-1 day'",
        ),
    ),
    mutant(
        "statistics-count-no-dead-of-other-queues",
        "Dead jobs are not counted where nothing else of their queue ended.",
        "sql/maintenance/test_statistics.py",
        sql(
            "maintenance/statistics",
            "where f.finished_at > since and f.finished_at <= until",
            "where false",
        ),
    ),
    mutant(
        "tick-looks-at-all-budgets",
        "Each tick looks for retries of each queue that has a budget.",
        "sql/maintenance/test_budgets.py",
        sql(
            "maintenance/budgets",
            "from rota._held_budgets() as b",
            "from rota.retry_budgets as b",
        ),
    ),
    mutant(
        "tick-looks-through-all-queues",
        "Each tick of a database of many queues looks through all of them for what ended.",
        "sql/maintenance/test_statistics.py",
        sql(
            "maintenance/statistics",
            "or c_scan.start is not null then",
            "or false then",
        ),
    ),
    mutant(
        "upgrade-without-locks",
        "What old clients write while the rows are carried over from 0.1.0 is lost.",
        "releases/test_from_0_1_0.py",
        sql(
            "upgrades/from_0_1_0/switch_over",
            "lock table rota_0_1_0.jobs in share row exclusive mode;",
            "lock table rota_0_1_0.jobs in access share mode;",
        ),
        sql(
            "upgrades/from_0_1_0/switch_over",
            "'lock table %s in share row exclusive mode nowait'",
            "'lock table %s in access share mode nowait'",
        ),
    ),
    mutant(
        "upgrade-without-last-pass",
        "What old clients changed after the first pass over their tables is not carried over.",
        "releases/test_from_0_1_0.py",
        sql(
            "upgrades/from_0_1_0/switch_over",
            "    perform rota_0_1_0._carry(v_since);\n    if (select",
            "    if (select",
        ),
    ),
    mutant(
        "upgrade-keeps-what-is-gone",
        "What old clients took away after the first pass over their tables comes back.",
        "releases/test_from_0_1_0.py",
        sql(
            "upgrades/from_0_1_0/carry_over",
            "if since is not null and name not in ('occurrences', 'job_errors') then",
            "if false then",
        ),
    ),
    mutant(
        "upgrade-over-foreign-objects",
        "Views of others go with the schema of 0.1.0, or with rota.",
        "contract/test_install.py",
        sql(
            "upgrades/refuse_others",
            "if v_others is not null then",
            "if false then",
        ),
    ),
    mutant(
        "retention-trusts-a-look",
        "A job is purged from its partition though another has come to wait for it.",
        "races/test_waiting.py",
        sql(
            "maintenance/retention",
            "where f.ctid = any($1::tid[]) and %s', partition, condition)),",
            "where f.ctid = any($1::tid[])', partition)),",
        ),
    ),
    mutant(
        "ended-move-begun-by-a-late-call",
        "A call of a mover that died begins a move that has ended, and keys are refused.",
        "sql/maintenance/test_moves.py",
        sql(
            "jobs/receive",
            "where found and settle_above is null and exists (",
            "where false and exists (",
        ),
    ),
    mutant(
        "end-of-a-move-forgotten",
        "A call of a mover that died begins a move that has ended, if no job had moved.",
        "sql/maintenance/test_moves.py",
        sql("maintenance/moves", "    else\n        -- That", "    elsif false then\n--"),
    ),
    mutant(
        "move-ended-in-an-older-snapshot",
        "A job that is on its way belongs to no move any more, and no mover sends it.",
        "sql/maintenance/test_moves.py",
        sql("maintenance/moves", "perform rota._check_isolation('end_queue_move');", ""),
    ),
    mutant(
        "queue-taken-for-empty",
        "A mover with an older snapshot settles a queue in which there are jobs with a key.",
        "sql/maintenance/test_moves.py",
        sql("maintenance/moves", "perform rota._check_isolation('take_moves');", ""),
    ),
    mutant(
        "end-of-a-move-told-to-nobody",
        "A queue that stays here after all starts with the next poll of its workers.",
        "sql/maintenance/test_wakeups.py",
        sql("maintenance/moves", "perform rota._notify_paused(queue);", ""),
    ),
    mutant(
        "grants-of-roles-that-are-gone",
        "A dump gives the grants of a role that was dropped to whichever role has its number.",
        "sql/access/test_queue_grants.py",
        sql(
            "maintenance/retention",
            "        when 'workers' then v_deleted := rota._purge_grants();\n",
            "",
        ),
    ),
    mutant(
        "retention-under-an-open-enqueue",
        "A parent is removed while the transaction of its child is open, which is cancelled.",
        "sql/maintenance/test_retention.py",
        sql(
            "maintenance/statistics",
            "'rota.stage_runs', 'rota.dependencies']::regclass[]",
            "'rota.stage_runs']::regclass[]",
        ),
    ),
    mutant(
        "downgrade-unasked",
        "Older functions go over newer tables.",
        "releases/test_general.py",
        sql("install", "\\ir upgrades/refuse_downgrade.sql\n", ""),
    ),
    mutant(
        "downgrade-over-what-changed",
        "Nobody can go back from a version in which a function has another result.",
        "releases/test_general.py",
        sql("install", "\\ir upgrades/drop_code.sql\n", ""),
    ),
    mutant(
        "downgrade-takes-views-of-others",
        "A downgrade drops the views that others have built on rota.",
        "releases/test_general.py",
        sql("upgrades/drop_code", "'drop routine %s'", "'drop routine %s cascade'"),
    ),
    mutant(
        "downgrade-stopped-by-a-trigger",
        "Nobody can go back from a version that has added a trigger.",
        "releases/test_general.py",
        sql(
            "operations/drift",
            "          and not exists (select from pg_trigger as t where t.tgfoid = p.oid)\n",
            "",
        ),
    ),
    mutant(
        "grants-lost-with-arguments",
        "An upgrade takes a function that has one argument more from those who call it.",
        "releases/test_general.py",
        sql("install", "\\ir upgrades/give_grants.sql\n", ""),
    ),
    mutant(
        "leftovers-of-others",
        "An upgrade drops what others have put into the schema.",
        "releases/test_general.py",
        sql(
            "operations/drift",
            "where m.kind in ('function', 'procedure') and m.definition is not null\n",
            "where m.kind in ('function', 'procedure')\n",
        ),
    ),
    mutant(
        "breaker-without-probes",
        "What a breaker lets through to try is held again.",
        "sql/jobs/test_retries.py",
        sql(
            "maintenance/breakers",
            "rota._open_for('try ' || c_name,",
            "rota._open_for(null,",
        ),
    ),
    mutant(
        "probes-held-without-a-check",
        "What a late tick holds for a breaker that an operator has ended waits for ever.",
        "races/test_open_settings.py",
        sql(
            "maintenance/breakers",
            "array[c_name]) where found",
            "array[c_name]) where false",
        ),
    ),
    mutant(
        "breaker-kept-by-a-stranger",
        "A job type stays paused while a stranger has what its breaker let through to try.",
        "sql/jobs/test_retries.py",
        sql("maintenance/breakers", "limit 100 for update skip locked", "limit 100"),
    ),
    mutant(
        "half-open-twice-at-once",
        "Two ticks let through twice as many as a breaker that is half open allows.",
        "sql/jobs/test_retries.py",
        sql(
            "maintenance/breakers",
            "where s.tag = state.tag for update skip locked;\n        if not found",
            "where s.tag = state.tag;\n        if not found",
        ),
    ),
    mutant(
        "breaker-ends-the-pause-of-another",
        "A breaker that closes ends the pause that an operator has just set.",
        "races/test_open_settings.py",
        sql("jobs/pauses", " and p.set_by = coalesce(_resume.set_by, p.set_by)", ""),
    ),
    mutant(
        "look-past-the-first-of-another-type",
        "An idle worker reads a thousand jobs of other types each time it looks.",
        "sql/maintenance/test_wakeups.py",
        sql("maintenance/wakeups", "            exit when has_others;\n", ""),
    ),
    mutant(
        "erased-and-still-found",
        "Dead jobs that were erased are found for an hour, with a retry that is refused.",
        "sql/operations/test_doctor.py",
        sql(
            "operations/acts",
            "case when f.status = 'dead' then rota.now() end",
            "null",
        ),
    ),
    mutant(
        "no-mover-not-told",
        "A queue stands still, and nothing says that nobody carries its jobs.",
        "sql/maintenance/test_moves.py",
        sql(
            "maintenance/moves",
            "where (m.state <> 'settled' or w.waiting",
            "where (false and w.waiting",
        ),
    ),
    mutant(
        "running-command-not-seen",
        "The command that carries a queue says that nobody does.",
        "sql/maintenance/test_moves.py",
        sql("maintenance/moves", "a.application_name = 'rota mover'", "false"),
    ),
    mutant(
        "attempt-of-less-than-no-time",
        "An attempt during which the clock was set back makes the average too short.",
        "sql/maintenance/test_statistics.py",
        sql(
            "maintenance/statistics",
            "case when u.ran < '0' then '0' else",
            "case when true then",
        ),
    ),
    mutant(
        "rule-that-waits-undoes-the-checks",
        "An open pause of an operator undoes all checks of a tick that is to pause the same.",
        "sql/jobs/test_retries.py",
        sql(
            "maintenance/breakers",
            "    when lock_not_available then return false;\n",
            "    when lock_not_available then raise;\n",
        ),
    ),
    mutant(
        "probe-that-ends-counts-as-none",
        "In place of a probe that fails while a tick counts, another is let in.",
        "races/test_open_settings.py",
        sql(
            "maintenance/breakers",
            "c_breaker.probes - v_succeeded - v_trying);",
            "c_breaker.probes - v_succeeded - (select count(*)::integer from rota.jobs as j\n"
            "where j.status = 'running' and j.job_type = c_breaker.job_type));",
        ),
    ),
    mutant(
        "breaker-counts-old-attempts",
        "An attempt of before the pause decides about those that try.",
        "sql/jobs/test_retries.py",
        sql(
            "maintenance/breakers",
            "          and e.started_at >= begun_since\n          and (breaker",
            "          and (breaker",
        ),
    ),
    mutant(
        "breaker-of-a-later-time",
        "A breaker waits, and counts nothing, until a clock that was set back has caught up.",
        "sql/jobs/test_retries.py",
        sql("maintenance/breakers", "elsif state.updated_at > v_now then", "elsif false then"),
    ),
    mutant(
        "breaker-blind-in-a-busy-queue",
        "Where others end very many jobs a breaker sees what fails and not what succeeds.",
        "sql/jobs/test_retries.py",
        sql("maintenance/breakers", "if rota._may_miss_ends(breaker, v_from)", "if false"),
    ),
    mutant(
        "breaker-blind-to-what-is-not-kept",
        "Where nothing is kept a breaker opens by failures of long ago, and closes never.",
        "sql/jobs/test_retries.py",
        sql("maintenance/breakers", "since < rota._kept_since(breaker.queue)", "false"),
    ),
    mutant(
        "breaker-half-open-in-a-busy-queue",
        "Where others end very many jobs a breaker never sees that all its probes succeed.",
        "sql/jobs/test_retries.py",
        sql(
            "maintenance/breakers",
            "v_successes < breaker.probes and rota._may_miss_ends(breaker, probed_at)",
            "false",
        ),
    ),
    mutant(
        "breaker-of-failures-to-come",
        "What failed before the clock was set back is taken for a failure of a probe.",
        "sql/jobs/test_retries.py",
        sql(
            "maintenance/breakers",
            " and r.failed_at <= (select least(_breaker_failures.until, rota.now()))",
            "",
        ),
    ),
    mutant(
        "budget-of-no-tokens",
        "A retry that begins takes no token out of the budget.",
        "sql/maintenance/test_budgets.py",
        sql("maintenance/budgets", "v_state.tokens - cardinality(v_ids)", "v_state.tokens"),
    ),
    mutant(
        "budget-spent-in-a-pause",
        "Retries of a paused queue are let in, and their tokens are gone.",
        "sql/maintenance/test_budgets.py",
        sql(
            "maintenance/budgets",
            "_is_paused(_first_retries.queue, rota.now(), h.job_type)",
            "_is_paused(null, rota.now(), h.job_type)",
        ),
    ),
    mutant(
        "budget-spent-on-a-paused-type",
        "Retries of a paused type use up what those of other types wait for.",
        "sql/maintenance/test_budgets.py",
        sql(
            "maintenance/budgets",
            "not rota._is_paused(_first_retries.queue, rota.now(), h.job_type)",
            "true",
        ),
    ),
    mutant(
        "what-is-not-kept-earns-no-retries",
        "A queue that keeps nothing earns a few of the retries that it may begin.",
        "sql/maintenance/test_budgets.py",
        sql(
            "base/counted",
            "(select p.counted_until from rota.stats_progress as p)",
            "'-infinity'",
        ),
    ),
    mutant(
        "stages-earn-no-retries",
        "First attempts of the stages of pipelines earn no retries of their queue.",
        "sql/maintenance/test_budgets.py",
        sql("base/counted", "p.pipeline, s.queue = _newest_ends.queue,", "p.pipeline, false,"),
    ),
    mutant(
        "breaker-tries-no-retry",
        "A breaker stays open for ever if all jobs of its type wait for the retry budget.",
        "sql/maintenance/test_budgets.py",
        sql(
            "maintenance/breakers",
            "array['pause ' || c_name, 'retries ' || breaker.queue]",
            "array['pause ' || c_name]",
        ),
    ),
    mutant(
        "rows-without-identity",
        "Where all tables are published nothing is counted, retried or purged.",
        "sql/tables/test_first_run.py",
        sql("tables/first_run", "c.relkind in ('r', 'p') and not", "false and not"),
    ),
    mutant(
        "new-partitions-without-identity",
        "The same, of the partitions that are made later.",
        "sql/tables/test_first_run.py",
        sql(
            "maintenance/retention",
            "        'alter table rota.%1$I replica identity full;'\n",
            "",
        ),
    ),
    mutant(
        "history-without-identity",
        "A subscription stops at the first retry of a job that had ended.",
        "sql/tables/test_first_run.py",
        sql("tables/first_run", "c.relkind in ('r', 'p') and", "c.relkind = 'r' and"),
    ),
    mutant(
        "checks-of-any-kind-by-their-ids",
        "Ten thousand checks of one kind keep those of all others waiting.",
        "sql/waiting/test_pending.py",
        sql("maintenance/pending", "order by f.place, f.id limit", "order by f.id limit"),
    ),
    mutant(
        "timed-checks-after-all-others",
        "What is due at a time waits for all that is due at once, as the end of a pause.",
        "sql/waiting/test_pending.py",
        sql(
            "maintenance/pending",
            "if cardinality(v_ids) >= max_checks and max_checks < 10 then",
            "if cardinality(v_ids) >= max_checks then",
        ),
    ),
    mutant(
        "limit-set-behind-all-checks",
        "A limit that an operator has set takes effect behind all that is due already.",
        "sql/waiting/test_limits.py",
        sql(
            "waiting/limits",
            "-nextval('rota.pending_checks_id_seq'), 'limit'",
            "nextval('rota.pending_checks_id_seq'), 'limit'",
        ),
    ),
    mutant(
        "checks-without-an-end",
        "A tick lets in what a thousand checks are for, a million jobs, in one transaction.",
        "sql/waiting/test_pending.py",
        sql(
            "maintenance/pending",
            "interval '300 milliseconds';",
            "interval '1 hour';",
        ),
    ),
    mutant(
        "same-checks-first",
        "A pause that is over, with jobs for many ticks, keeps another that is over waiting.",
        "sql/waiting/test_pending.py",
        sql("maintenance/pending", "order by c.kind, min(c.id)", "order by c.kind, c.subject"),
    ),
    mutant(
        "expired-pause-stays",
        "A pause that an operator had locked when it ended stays in the list of pauses.",
        "sql/jobs/test_pauses.py",
        sql(
            "jobs/pauses",
            " and not exists (select from rota.pauses as p "
            "where p.pause_name = _check_pause.pause_name)",
            "",
        ),
    ),
    mutant(
        "pause-until-a-time-that-is-over",
        "An operator pauses until a time that is over, is told so, and nothing is paused.",
        "sql/jobs/test_pauses.py",
        sql(
            "jobs/pauses",
            "where set_by = 'operator' and until <= rota.now();",
            "where false;",
        ),
    ),
    mutant(
        "let-in-though-it-stayed",
        "A job that a trigger keeps as it is spends the retries of its queue.",
        "sql/maintenance/test_budgets.py",
        sql(
            "jobs/pauses",
            "j.id = any(_let_in.job_ids) and j.hold is distinct from _let_in.hold",
            "j.id = any(_let_in.job_ids)",
        ),
    ),
    mutant(
        "single-checks-without-an-end",
        "The same, where one of the checks fails.",
        "sql/waiting/test_pending.py",
        sql(
            "maintenance/pending",
            "interval '1 second';\n        for v_check",
            "interval '1 hour';\n        for v_check",
        ),
    ),
    mutant(
        "held-checks-in-front",
        "Checks that a tick holds which is not committed keep those behind them.",
        "sql/waiting/test_pending.py",
        sql("maintenance/pending", "v_seen := 4 * v_seen;", "exit;"),
    ),
    mutant(
        "held-retry-in-front",
        "A retry that another session has locked keeps all others of its queue.",
        "sql/maintenance/test_budgets.py",
        sql("maintenance/budgets", "v_max_jobs + 1000);", "v_max_jobs);"),
    ),
    mutant(
        "count-held-by-an-open-tick",
        "A tick that is not committed keeps what has ended from being counted, and purged.",
        "sql/maintenance/test_statistics.py",
        sql(
            "maintenance/statistics",
            "      and not rota._leaves_to_others() and (",
            "      and (",
        ),
    ),
    mutant(
        "breaker-held-by-an-open-tick",
        "A tick that is not committed keeps a breaker from opening.",
        "races/test_open_settings.py",
        sql(
            "maintenance/tick",
            "_check_breakers()\n where not rota._leaves_to_others('15 seconds');",
            "_check_breakers();",
        ),
    ),
    mutant(
        "schedule-held-by-an-open-tick",
        "A tick that is not committed keeps schedules from making jobs.",
        "races/test_racing_schedules.py",
        sql(
            "maintenance/tick",
            "when rota._leaves_to_others() and rota._first",
            "when false and rota._first",
        ),
    ),
    mutant(
        "round-held-by-an-open-tick",
        "A tick that is not committed keeps the numbers of jobs as they were.",
        "sql/operations/test_statistics.py",
        sql("maintenance/depths", " or rota._leaves_to_others() then return", " then return"),
    ),
    mutant(
        "budget-held-by-an-open-tick",
        "A tick that is not committed keeps all retries of the queue from beginning.",
        "sql/maintenance/test_budgets.py",
        sql("maintenance/budgets", "boolean := rota._leaves_to_others();", "boolean := false;"),
    ),
    mutant(
        "budget-left-for-ever",
        "No tick that is not alone lets a retry begin, while one was alone lately.",
        "sql/maintenance/test_budgets.py",
        sql(
            "maintenance/budgets",
            "interval '3 seconds' < greatest(",
            "interval '3 hours' < greatest(",
        ),
    ),
    mutant(
        "retry-that-fails-stops-all",
        "A retry that cannot be let in keeps those behind it.",
        "sql/maintenance/test_budgets.py",
        sql(
            "maintenance/budgets",
            "v_ids := v_ids || rota._let_in(v_locked, 'retries ' || v_budget.queue);",
            "v_ids := rota._let_in(v_locked, 'retries ' || v_budget.queue);\n        exit;",
        ),
    ),
    mutant(
        "worker-waits-for-another",
        "A worker cannot start while the report of another that started is not committed.",
        "races/test_strangers.py",
        sql(
            "jobs/workers",
            "case when pg_try_advisory_xact_lock(1919907963, 0)",
            "case when true",
        ),
    ),
    mutant(
        "sweep-over-the-rule",
        "A lease that ends the first time is tried again in a second, whatever a rule says.",
        "sql/jobs/test_retries.py",
        sql(
            "maintenance/sweep",
            "(rota._retry_rule('lease_expired', s.job_type, s.queue)).retry_in\n"
            "                        is null",
            "true",
        ),
    ),
    mutant(
        "rerun-expires-as-the-run-before",
        "A run that was asked for meanwhile expires when the one before it would have.",
        "sql/maintenance/test_expiry.py",
        sql(
            "jobs/keys",
            """\
            run_at = greatest(j.run_at, case when not keeps_run_at then r.run_at end),
            expires_at = rota._default_expiry(j.job_type, j.queue, r.run_at)
""",
            """\
            run_at = greatest(j.run_at, case when not keeps_run_at then r.run_at end)
""",
        ),
    ),
    mutant(
        "header-of-a-list",
        "A list of texts is taken for a header.",
        "sql/jobs/test_enqueue.py",
        sql("base/checks", "'strict $.* ? (@.type()", "'lax $.* ? (@.type()"),
    ),
    mutant(
        "ending-without-a-name",
        "Of an ending with a value that cannot be read it is not told which one.",
        "sql/jobs/test_end.py",
        sql("jobs/end", "if v_problem is not null then", "if false then"),
    ),
    mutant(
        "later-job-counts-though-it-stayed",
        "A job that a trigger keeps as it is at its time is a reason to tick again.",
        "sql/waiting/test_pending.py",
        sql(
            "maintenance/sweep",
            "v_ids := rota._let_in(job_ids, 'time');",
            "perform rota._enter_lanes(job_ids);",
        ),
    ),
    mutant(
        "paused-job-keeps-all",
        "A job that cannot be let in after a pause keeps all others that it held.",
        "sql/jobs/test_pauses.py",
        sql(
            "jobs/pauses",
            "raise warning 'held jobs are let in one by one: %', sqlerrm;",
            "raise;",
        ),
    ),
    mutant(
        "breaker-stops-the-others",
        "A breaker that cannot change its jobs keeps all others from what they have to do.",
        "sql/jobs/test_retries.py",
        sql(
            "maintenance/breakers",
            "raise warning 'breaker of % in queue % failed and will be tried again: %',"
            " v_state.job_type, v_state.queue, sqlerrm;",
            "raise;",
        ),
    ),
    mutant(
        "breaker-waits-for-the-operator",
        "A tick waits until an operator commits the pause of what a breaker is for.",
        "sql/jobs/test_retries.py",
        sql(
            "maintenance/breakers",
            "plpgsql set lock_timeout = '100ms' as $$",
            "plpgsql as $$",
        ),
    ),
    mutant(
        "looking-waits-for-the-history",
        "Workers hang while a table of the history is rewritten, as they look for maintenance.",
        "sql/maintenance/test_tick.py",
        sql(
            "maintenance/tick",
            "plpgsql stable set lock_timeout = '100ms' as $$",
            "plpgsql stable as $$",
        ),
    ),
    mutant(
        "counting-waits-for-the-history",
        "Ticks hang while a table of the history is rewritten, as they count what ended.",
        "sql/maintenance/test_tick.py",
        sql(
            "maintenance/statistics",
            "plpgsql set lock_timeout = '100ms' as $$",
            "plpgsql as $$",
        ),
    ),
    mutant(
        "breaker-over-the-operator",
        "A breaker goes on with a type that an operator has resumed.",
        "sql/jobs/test_retries.py",
        sql(
            "maintenance/breakers",
            "elsif state.retry_at is not null and v_set_by is distinct from 'breaker'",
            "elsif false",
        ),
    ),
    mutant(
        "breaker-opened-twice-at-once",
        "Two ticks at once open a breaker twice, for twice as long.",
        "races/test_open_settings.py",
        sql("maintenance/breakers", " and o.updated_at = state.updated_at", ""),
    ),
    mutant(
        "locked-probe-of-an-open-breaker",
        "A job that was let through, and was locked when a breaker opened again, runs.",
        "sql/jobs/test_retries.py",
        sql(
            "maintenance/breakers",
            "perform rota._hold_probes(c_breaker);\n        if",
            "if",
        ),
    ),
    mutant(
        "breaker-that-is-no-more",
        "The pause of a breaker that was removed lasts for ever.",
        "races/test_open_settings.py",
        sql(
            "maintenance/breakers",
            "where b.tag is null or s.retry_at",
            "where s.retry_at",
        ),
        sql("maintenance/breakers", "if c_breaker.tag is null then", "if false then"),
    ),
    mutant(
        "breaker-of-another",
        "A breaker that is set anew goes on where the former one was.",
        "races/test_open_settings.py",
        sql("maintenance/breakers", "b.tag = s.tag\n", "b.job_type = s.job_type\n"),
        sql(
            "maintenance/breakers",
            "where b.tag = state.tag);",
            "where b.job_type = state.job_type and b.queue = state.queue);",
        ),
    ),
    mutant(
        "rule-without-end",
        "A fatal retry rule changes nothing.",
        "sql/jobs/test_retries.py",
        sql("jobs/fail", "when v_rule.is_fatal then 'dead'", "when false then 'dead'"),
    ),
    mutant(
        "tick-under-an-advisory-lock",
        "Any login can keep all ticks but one in ten seconds from their work.",
        "faults/test_sessions.py",
        sql(
            "maintenance/tick",
            "lock table rota.maintenance in share update exclusive mode nowait;\n",
            "if not pg_try_advisory_xact_lock(hashtextextended('rota.tick', 0)) then\n"
            "                raise lock_not_available; end if;\n",
        ),
    ),
    mutant(
        "ticks-lock-each-other-out-of-nothing",
        "All ticks do the same at once.",
        "sql/maintenance/test_tick.py",
        sql(
            "maintenance/tick",
            "lock table rota.maintenance in share update exclusive mode nowait;\n",
            "null;\n",
        ),
    ),
    mutant(
        "ticker-under-an-advisory-lock",
        "Any login can keep operators from starting and stopping the ticker.",
        "sql/maintenance/test_pg_cron.py",
        sql(
            "maintenance/pg_cron",
            "    perform from rota.maintenance as u where u.task = 'ticker' for update;",
            "    perform pg_advisory_xact_lock(hashtextextended('rota.ticker', 0));",
        ),
    ),
    mutant(
        "ticker-without-turns",
        "Two who start the ticker again at once meet the error of pg_cron.",
        "sql/maintenance/test_pg_cron.py",
        sql(
            "maintenance/pg_cron",
            "    perform from rota.maintenance as u where u.task = 'ticker' for update;",
            "",
        ),
    ),
    mutant(
        "two-who-begin-a-move",
        "Two who let a queue move at once: the second meets an error.",
        "sql/maintenance/test_moves.py",
        sql(
            "maintenance/moves",
            "        on conflict on constraint queue_moves_queue_key do nothing;\n",
            ";\n",
        ),
    ),
    mutant(
        "locks-that-wait-untold",
        "All wait behind one who waits to change a table, and the doctor is silent.",
        "sql/operations/test_doctor.py",
        sql(
            "operations/doctor",
            "      and (l.granted or l.waitstart < w.waitstart)\n",
            "      and l.granted\n",
        ),
    ),
    mutant(
        "waits-for-a-lock-unnamed",
        "The doctor cannot read a table, and does not say who ends that.",
        "sql/operations/test_doctor.py",
        sql(
            "operations/doctor",
            "                    where l.mode = 'AccessExclusiveLock'\n",
            "                    where l.mode = 'AccessExclusiveLock' and l.granted\n",
        ),
    ),
    mutant(
        "move-waits-for-strangers",
        "Any login of any database stops a move, and the jobs of its queue.",
        "sql/maintenance/test_moves.py",
        sql(
            "maintenance/moves",
            "move.horizon is null or exists (select from rota._missing_move(move.horizon))",
            "move.horizon is null or move.horizon > pg_snapshot_xmin(pg_current_snapshot())",
        ),
    ),
    mutant(
        "move-misses-open-producers",
        "A move begins before the jobs of open transactions are there.",
        "sql/maintenance/test_moves.py",
        sql(
            "maintenance/moves",
            "array['rota.jobs',\n            'rota.dependencies', 'rota.job_definitions',\n"
            "            'rota.pipeline_stages']::regclass[]",
            "array[]::regclass[]",
        ),
    ),
    mutant(
        "move-misses-older-snapshots",
        "A move begins while a transaction may enqueue that does not see it.",
        "sql/maintenance/test_moves.py",
        sql(
            "maintenance/moves",
            "        or age(a.backend_xmin) > c_age\n",
            "        or false\n",
        ),
    ),
    mutant(
        "move-under-an-advisory-lock",
        "Any login can keep all movers from a queue that moves.",
        "faults/test_sessions.py",
        sql(
            "maintenance/moves",
            "and m.direction = 'out' for update skip locked;",
            "and m.direction = 'out' and pg_try_advisory_xact_lock(\n"
            "        hashtextextended('rota.mover ' || move_id::text, 0));",
        ),
    ),
    mutant(
        "tick-has-a-leader",
        "A tick that hangs with the lock keeps all others from ticking.",
        "sql/maintenance/test_tick.py",
        sql(
            "maintenance/tick",
            "was_skipped := exists (",
            "was_skipped := true or exists (",
        ),
    ),
    mutant(
        "tick-without-sweep",
        "A tick takes nothing back from workers that vanished.",
        "sql/maintenance/test_tick.py sql/maintenance/test_sweep.py",
        sql(
            "maintenance/tick",
            "jobs_swept := rota.sweep_stale_leases(1000);",
            "jobs_swept := 0;",
        ),
    ),
    mutant(
        "tick-stops-at-a-failure",
        "Where one part fails, a tick does nothing at all.",
        "sql/maintenance/test_tick.py",
        sql(
            "maintenance/tick",
            "raise warning '% failed and will be tried again: %', v_part, sqlerrm;",
            "raise;",
        ),
    ),
    mutant(
        "stale-lease-not-looked-for",
        "A tick does not see that there is something to take back.",
        "sql/maintenance/test_tick.py sql/maintenance/test_wakeups.py",
        sql(
            "maintenance/tick",
            "if rota._has_late('sweep') or rota._has_late('expiry')",
            "if rota._has_late('expiry')",
        ),
    ),
    mutant(
        "expired-not-looked-for",
        "A tick does not see that a job has expired.",
        "sql/maintenance/test_expiry.py",
        sql(
            "maintenance/tick",
            "rota._has_late('sweep') or rota._has_late('expiry')",
            "rota._has_late('sweep')",
        ),
    ),
    mutant(
        "due-schedules-are-looked-for-from-the-start",
        "Under a held snapshot each tick walks past all times that ever were.",
        "sql/schedules/test_occurrences.py",
        sql("schedules/occurrences", "rota._from_micros(c_scan.start);", "'-infinity';"),
    ),
    mutant(
        "earlier-time-is-never-found",
        "A schedule that was committed late waits until its session ends.",
        "sql/schedules/test_occurrences.py",
        sql(
            "schedules/occurrences",
            "rota._from_micros(c_scan.start)",
            "rota._from_micros(substr(rota._scan_start('schedule'), 18)::bigint)",
        ),
    ),
    mutant(
        "own-checks-done",
        "A transaction does its own checks, before others see what it did.",
        "sql/waiting/test_pending.py",
        sql("maintenance/pending", "when not _due_checks.with_own\n", "when false\n"),
    ),
    mutant(
        "asked-as-if-it-did",
        "A worker hears of a check of a limit three seconds late.",
        "sql/waiting/test_pending.py",
        sql("maintenance/pending", "when not asks and rota.", "when rota."),
    ),
    mutant(
        "head-freed-beside-its-parent",
        "The next of a line starts though it waits for a job.",
        "sql/waiting/test_dependencies.py",
        sql(
            "waiting/order",
            "_newest_parent(v_job_id);\n    if v_parent_id is null then\n",
            "_newest_parent(v_job_id);\n    if true then\n",
        ),
        sql(
            "waiting/order",
            "unnest(c_held) as h (id) where rota._newest_parent(h.id) is null",
            "unnest(c_held) as h (id)",
        ),
    ),
    mutant(
        "stage-finished-by-two",
        "A finish that is repeated before it is committed is told that its stage is lost.",
        "races/test_racing_pipelines.py",
        sql(
            "jobs/finish",
            "and rota._lock_lease(job_id, lease_token) then",
            "then",
        ),
    ),
    mutant(
        "rerun-before-its-time",
        "A job that was asked for again, for later, runs when the try under way has failed.",
        "sql/jobs/test_keys.py",
        sql(
            "jobs/keys",
            "run_at = greatest(j.run_at, case when not keeps_run_at then r.run_at end),",
            "run_at = j.run_at,",
        ),
    ),
    mutant(
        "check-lost",
        "A check that cannot be decided just now is taken away.",
        "sql/waiting/test_pending.py races/test_waiting.py",
        sql(
            "maintenance/pending",
            "            v_deferred := v_deferred || v_check.ids[1];\n",
            "            v_done := v_done || v_check.ids[1];\n",
        ),
    ),
    mutant(
        "deferred-checks-pile-up",
        "Each check that cannot be decided stays, however many are about the same.",
        "sql/waiting/test_pending.py",
        sql(
            "maintenance/pending",
            "            v_deferred := v_deferred || v_check.ids[1];\n"
            "            v_done := v_done || v_check.ids[2:];\n",
            "            v_deferred := v_deferred || v_check.ids;\n",
        ),
    ),
    mutant(
        "second-check-of-a-limit-at-once",
        "A held job is forgotten though a transaction is open that gives back its slot.",
        "sql/waiting/test_pending.py",
        sql(
            "base/pending",
            " and c.deferrals > 0\n          and c.made_by <= "
            "pg_snapshot_xmin(pg_current_snapshot())",
            "",
        ),
    ),
    mutant(
        "second-check-of-a-limit-for-all",
        "A check that an earlier job has left is taken for that of one that was held later.",
        "sql/waiting/test_pending.py",
        sql(
            "waiting/limits",
            "        -- It may be from before the job was held, which then has the next.\n"
            "        return false;\n",
            "        null;\n",
        ),
    ),
    mutant(
        "history-purged-early",
        "Retention deletes what is to be kept.",
        "sql/maintenance/test_retention.py",
        sql("maintenance/retention", "least(c_now - k.keep,", "least(c_now,"),
    ),
    mutant(
        "waited-for-dropped",
        "A day goes with a cancelled job for whose retry another one waits.",
        "sql/maintenance/test_retention.py",
        sql("maintenance/retention", "continue when v_is_waited_for;", ""),
    ),
    mutant(
        "waited-for-purged",
        "A cancelled job for whose retry another one waits goes with the rows of its day.",
        "sql/maintenance/test_retention.py",
        sql("maintenance/retention", "d.parent_id = f.id)'),", "false)'),"),
    ),
    mutant(
        "row-of-a-user-stops-the-commit",
        "A row to which a table of a user refers by a deferred constraint undoes each tick.",
        "sql/maintenance/test_retention.py",
        sql(
            "maintenance/tick",
            "if v_is_alone then set constraints all immediate;",
            "if false then",
        ),
    ),
    mutant(
        "no-partition-no-drop",
        "Where no partition can be made, none is dropped either, and the disk fills.",
        "sql/maintenance/test_retention.py",
        sql(
            "maintenance/retention",
            "raise warning 'a partition of % cannot be made now: %', v_table.name,\n"
            "                        sqlerrm;",
            "raise;",
        ),
    ),
    mutant(
        "row-of-a-user-stops-retention",
        "A row to which a table of a user refers keeps all of its kind for ever.",
        "sql/maintenance/test_retention.py",
        sql("maintenance/retention", "if v_failed < 10 then", "if true then raise;"),
    ),
    mutant(
        "infinite-time-stops-the-count",
        "A time that was written by hand stops statistics and retention for ever.",
        "sql/maintenance/test_statistics.py",
        sql("base/clock", "case when since between", "case when true or since between"),
    ),
    mutant(
        "endless-length-stops-the-statistics",
        "A length that was written by hand fails every sum of the statistics.",
        "sql/tables/test_jobs.py",
        sql("tables/statistics", "check (waited < '10000 years')", "check (true)"),
    ),
    mutant(
        "check-that-failed-too-often-stops-all",
        "One check whose count of failures a hand has set to the end stops all checks.",
        "sql/waiting/test_pending.py",
        sql("maintenance/pending", "least(c.deferrals, 1000) + 1", "c.deferrals + 1"),
    ),
    mutant(
        "time-before-all-others-stops-the-tick",
        "A lease or an expiry of -infinity, as written by hand, stops all maintenance.",
        "sql/maintenance/test_tick.py",
        sql("base/scan_start", "case when moment between", "case when true or moment between"),
    ),
    mutant(
        "key-purged-early",
        "Retention deletes keys that are still unique.",
        "sql/jobs/test_keys.py",
        sql("maintenance/retention", "'where f.%2$I < $1 and f", "'where f"),
    ),
    mutant(
        "retention-never-has-more",
        "A tick that reached a bound of retention does not say so, and the rest piles up.",
        "sql/maintenance/test_retention.py",
        sql("maintenance/retention", "has_more := has_more or v_rows > c_max_rows;", "null;"),
    ),
    mutant(
        "tick-tells-no-next-time",
        "Where all workers are busy, jobs start at a rate once a second.",
        "sql/maintenance/test_tick.py",
        sql("maintenance/tick", "greatest(jobs_enqueued, checks_done) > 0 then", "false then"),
    ),
    mutant(
        "purge-never-starts-over",
        "A row that was locked when a purge passed it stays for ever.",
        "sql/maintenance/test_retention.py",
        sql(
            "base/scan_start",
            "when not is_full and not rota._is_full_scan_due(c_start[1], c_now, "
            "greatest(max_pause, '3 seconds')) then",
            "when not is_full then",
        ),
    ),
    mutant(
        "overdue-partition-kept",
        "Where no tick is ever alone, what lies in partitions is kept for ever.",
        "sql/maintenance/test_retention.py",
        sql(
            "maintenance/retention",
            "exit when v_deleted >= _purge_partitions.max_rows;\n        begin",
            "exit;\n        begin",
        ),
    ),
    mutant(
        "no-worker-is-notified",
        "A job comes, and the workers sleep on until their next poll.",
        "sql/maintenance/test_wakeups.py",
        sql(
            "jobs/enqueue",
            "rota._notify(queue) where coalesce(v_run_at, v_now) < v_now + rota._soon();"
            " end if; return v_job_id; end if;",
            "from now(); end if; return v_job_id; end if;",
        ),
    ),
    mutant(
        "no-worker-is-notified-of-a-special-job",
        "A job that is not plain comes, and the workers sleep on until their next poll.",
        "sql/maintenance/test_wakeups.py sql/jobs/test_enqueue.py",
        sql(
            "jobs/enqueue",
            "if v_status = 'queued' and rota._others_hold(",
            "if false and rota._others_hold(",
        ),
    ),
    mutant(
        "every-worker-is-notified",
        "One job wakes all workers that sleep.",
        "sql/maintenance/test_wakeups.py",
        sql("base/notify", "exit when v_notified >= _notify_slots.max_slots;", "null;"),
    ),
    mutant(
        "sure-beside-a-writer",
        "A worker goes to sleep, sure to hear of a job that was notified before it came.",
        "sql/maintenance/test_wakeups.py",
        sql(
            "maintenance/wakeups",
            "v_is_sure := c_xmin >= v_state[3];",
            "v_is_sure := true;",
        ),
    ),
    mutant(
        "short-retry-not-notified",
        "Who sleeps does not hear of a retry that is due before the next poll.",
        "sql/maintenance/test_wakeups.py client/test_woken_workers.py",
        sql("jobs/fail", "perform rota._notify_for(v_soon_ids);", "null;"),
    ),
    mutant(
        "cancel-notifies-nobody",
        "The worker of a running job hears of its cancel by the next heartbeat only.",
        "sql/maintenance/test_wakeups.py",
        sql(
            "jobs/control",
            "perform rota._notify_holders(array_agg(j.id)) from",
            "perform array_agg(j.id) from",
        ),
    ),
    mutant(
        "forced-retry-notifies-nobody",
        "The worker of a running job goes on beside the next that an operator lets run it.",
        "sql/maintenance/test_wakeups.py",
        sql(
            "jobs/control",
            "perform rota._notify_holders(array[job_id]) where v_status = 'running';",
            "null;",
        ),
    ),
    mutant(
        "next-time-without-schedules",
        "An idle worker makes the job of a schedule up to a second late.",
        "sql/maintenance/test_wakeups.py client/test_woken_workers.py",
        sql(
            "maintenance/tick",
            "where d.next_run_at > _next_let_in_at.since order",
            "where false order",
        ),
    ),
    mutant(
        "next-time-without-checks",
        "When a line may go on is not told to who asks for the next time.",
        "sql/maintenance/test_wakeups.py client/test_woken_workers.py",
        sql(
            "maintenance/tick",
            "                where j.hold = 'time'\n",
            "                where false\n",
        ),
    ),
    mutant(
        "lost-notification-never-found",
        "An idle worker never looks for a job that no session has notified it of.",
        "sql/maintenance/test_wakeups.py",
        sql(
            "maintenance/wakeups",
            "v_found.has_due and (v_is_new or not claimed)",
            "v_found.has_due and v_is_new",
        ),
    ),
    mutant(
        "look-put-off-without-a-claim",
        "Under a held snapshot an idle worker neither looks nor claims for a minute.",
        "sql/maintenance/test_wakeups.py",
        sql(
            "maintenance/wakeups",
            "v_must_claim := v_is_put_off and not claimed;",
            "v_must_claim := false;",
        ),
    ),
    mutant(
        "stopped-worker-taken-for-waiting",
        "A worker that had no slot, stopped and waits again is never notified.",
        "sql/maintenance/test_wakeups.py",
        sql(
            "maintenance/wakeups",
            "    perform set_config('rota.held_locks', '', false);\n",
            "",
        ),
    ),
    mutant(
        "slot-of-a-rollback-kept",
        "A session that took a slot twice, once before a rollback, holds it for ever.",
        "sql/maintenance/test_wakeups.py",
        sql(
            "maintenance/wakeups",
            "    for v_time in 1..16 loop\n",
            "    for v_time in 1..1 loop\n",
        ),
    ),
    mutant(
        "locks-of-slots-remembered",
        "Nobody notifies a worker again whose application has dropped its locks.",
        "sql/maintenance/test_wakeups.py",
        sql(
            "maintenance/wakeups",
            "case when c_text ~ '^(0|18) -?[0-9]{1,10}(, (0|18) -?[0-9]{1,10})*$'\n",
            "case when c_text <> ''\n",
        ),
    ),
    mutant(
        "shared-slot-not-notified",
        "However many jobs come at once, they wake sixteen workers, and the others poll.",
        "sql/maintenance/test_wakeups.py",
        sql("base/notify", "if v_notified = 0 and above < 16\n", "if false\n"),
    ),
    mutant(
        "shared-slot-notified-from-above",
        "Workers without a slot of their own wake each other for jobs they do not take.",
        "sql/maintenance/test_wakeups.py",
        sql("base/notify", " and above < 16\n", "\n"),
    ),
    mutant(
        "shared-slot-handed-over",
        "Each worker without a slot that leaves wakes the first of its queue.",
        "sql/maintenance/test_wakeups.py",
        sql("maintenance/wakeups", "where h.kind between 1 and 17);", "where h.kind > 0);"),
    ),
    mutant(
        "shared-slots-in-all-queues",
        "A hundred workers of a hundred queues fill the server's table of locks.",
        "sql/maintenance/test_wakeups.py",
        sql(
            "maintenance/wakeups",
            "case when v_queue between 2 and 11 then 16 else 15 end",
            "case when v_queue > 1 then 16 else 15 end",
        ),
    ),
    mutant(
        "only-the-first-asks-to-tick",
        "Where the first idle worker hangs no other ticks.",
        "sql/maintenance/test_wakeups.py",
        sql(
            "maintenance/wakeups",
            "      or rota._is_full_scan_due(v_ask_at, v_now, '5 minutes')) then",
            "      ) then",
        ),
    ),
    mutant(
        "let-in-late-behind-the-first",
        "What a tick lets in waits for the first worker, which may look at other queues.",
        "sql/maintenance/test_wakeups.py",
        sql("maintenance/wakeups", "(look_again_in <= '0'\n      or ", "("),
    ),
    mutant(
        "locks-of-others-dropped",
        "A worker that stops waiting drops the advisory locks of its application.",
        "sql/maintenance/test_wakeups.py",
        sql(
            "maintenance/wakeups",
            "    perform rota._give_up(h.kind, h.key) from rota._held_locks() as h;\n",
            "    perform pg_advisory_unlock_all();\n",
        ),
    ),
    mutant(
        "other-types-not-passed-on",
        "A worker that does not take the job it was notified of tells nobody.",
        "sql/maintenance/test_wakeups.py client/test_woken_workers.py",
        sql(
            "maintenance/wakeups",
            "        if v_found.has_others then\n",
            "        if false then\n",
        ),
    ),
    mutant(
        "passed-on-in-a-cycle",
        "Workers that do not take a job notify each other of it for ever.",
        "sql/maintenance/test_wakeups.py",
        sql(
            "maintenance/wakeups",
            "perform rota._notify_slots(hashtext(queues[v_n]), 1, slots[v_n]);",
            "perform rota._notify_slots(hashtext(queues[v_n]), 16);",
        ),
    ),
    mutant(
        "round-trip-hides-the-lost",
        "The call that finishes and claims does not tell what was lost.",
        "sql/jobs/test_round_trip.py",
        sql("jobs/round_trip", "where f.answer in ('lost', 'busy')", "where false"),
    ),
    mutant(
        "round-trip-tells-only-the-lost",
        "The call that finishes and claims is silent where all that it did not end is busy.",
        "sql/jobs/test_round_trip.py",
        sql("jobs/round_trip", "if v_answers && '{lost,busy}'", "if v_answers && '{lost}'"),
    ),
    mutant(
        "public-may-execute",
        "Whoever may connect may call every function.",
        "sql/access/test_grants.py contract/test_catalog.py",
        sql("access/grants", "'{public,rota_producer,", "'{rota_producer,"),
    ),
    mutant(
        "observer-may-cancel",
        "Who may only look can cancel jobs.",
        "security/test_matrix.py",
        sql("access/grants", "'{explain_job,doctor,", "'{explain_job,cancel_job,doctor,"),
    ),
    mutant(
        "old-grants-stay",
        "What was granted once to one of our roles is never taken back.",
        "sql/access/test_grants.py",
        sql(
            "access/grants",
            "'{public,rota_producer,rota_worker,rota_operator,rota_observer}'",
            "'{public}'",
        ),
    ),
    mutant(
        "search-path-of-the-caller",
        "One function finds its operators on the search_path of whoever calls it.",
        "contract/test_catalog.py contract/test_style.py",
        sql(
            "base/clock",
            """\
    returns timestamptz language plpgsql stable security definer
    set search_path = pg_catalog, pg_temp
""",
            """\
    returns timestamptz language plpgsql stable security definer
""",
        ),
    ),
    mutant(
        "rights-of-the-caller",
        "One function runs with the rights of whoever calls it, who has none.",
        "sql/access/test_grants.py contract/test_catalog.py",
        sql(
            "jobs/lease",
            """\
    message text default null
)
    returns void language plpgsql security definer
""",
            """\
    message text default null
)
    returns void language plpgsql
""",
        ),
    ),
    mutant(
        "dry-run-blind-to-locks",
        "A dry run takes a row that another session has locked for a free one.",
        "sql/operations/test_acts.py",
        sql("operations/acts", "and j.xmax <> all(v_holders)", ""),
    ),
    mutant(
        "erased-brought-back",
        "A retry of many brings back what was erased, with no payload to run with.",
        "sql/operations/test_acts.py",
        sql(
            "jobs/control",
            "case when payload = '{\"erased\": true}' then 'erased' else",
            "case when false then 'erased' else",
        ),
    ),
    mutant(
        "erased-retried-alone",
        "A retry of one job brings it back, although it was erased.",
        "sql/operations/test_acts.py",
        sql(
            "jobs/control",
            "where rota._payload_type(j.job -> 'payload') = 'erased' limit 1",
            "where false",
        ),
    ),
    mutant(
        "purge-past-the-archive",
        "What an operator purges does not go to the archive.",
        "sql/maintenance/test_archive.py",
        sql(
            "maintenance/archive",
            "execute rota._removing(name,\n        format(",
            "execute concat(format(",
        ),
    ),
    mutant(
        "breaker-quotes-an-error",
        "The reason of a pause keeps the text of an error, which no erase reaches.",
        "sql/jobs/test_retries.py",
        sql(
            "maintenance/breakers",
            "format('%s (job %s)', coalesce(n.error_type, 'an error'), n.job_id)",
            "format('%s: %s', coalesce(n.error_type, 'an error'), n.message)",
        ),
        sql(
            "maintenance/breakers",
            "select e.failed_at, e.error_type, e.job_id",
            "select e.failed_at, e.error_type, e.message",
        ),
        sql(
            "maintenance/breakers",
            "r.queue, r.error_type, r.job_id\n",
            "r.queue, r.error_type, r.message\n",
        ),
    ),
    mutant(
        "uninstall-with-tables-of-others",
        "An uninstall drops what an application has created in the schema.",
        "contract/test_install.py",
        sql("uninstall", "if v_others is not null then", "if false then"),
    ),
    mutant(
        "reference-that-keeps-nothing-named",
        "The doctor asks to drop a foreign key that is set to null when its job ends.",
        "sql/operations/test_drift.py",
        sql("operations/drift", " and k.confdeltype in ('a', 'r', 'c')", ""),
    ),
    mutant(
        "missing-rights-one-by-one",
        "After a restore without rights the doctor tells of hundreds, and of nothing else.",
        "sql/operations/test_drift.py",
        sql("operations/drift", "where r.rights > 20\n", "where false\n"),
        sql("operations/drift", "    where r.rights <= 20 or not f.is_replayed;", ";"),
    ),
    mutant(
        "record-without-nulls",
        "What was null in the payload of a schedule is gone when a change of it is undone.",
        "web/test_acts.py",
        sql(
            "base/audit",
            "_without_nulls(v_before)",
            "_without_nulls(jsonb_strip_nulls(v_before))",
        ),
    ),
    mutant(
        "setting-refused-by-its-log",
        "Schedules and limits of a dump are refused, since the log has come before them.",
        "releases/test_restore.py",
        sql(
            "base/audit",
            "exit when not exists (select from rota.audit_log as a where a.id = v_id);",
            "exit;",
        ),
    ),
    mutant(
        "catalog-by-the-session",
        "The doctor takes what a session writes otherwise for drift.",
        "sql/operations/test_drift.py",
        sql(
            "operations/drift",
            "    set timezone = 'UTC' set datestyle = 'ISO' set intervalstyle = 'postgres'\n",
            "",
        ),
    ),
    mutant(
        "detach-that-was-interrupted",
        "The doctor takes a partition whose detach was interrupted for one of the history.",
        "sql/operations/test_doctor.py",
        sql(
            "operations/doctor",
            "where i.inhrelid = c.oid and not i.inhdetachpending",
            "where i.inhrelid = c.oid",
        ),
    ),
    mutant(
        "days-of-a-detached-partition",
        "A detached partition cannot be attached again, since later rows are of its days.",
        "sql/operations/test_doctor.py",
        sql("operations/doctor", "f.%4$I < %6$L '", "f.%4$I < %5$L '"),
    ),
    mutant(
        "late-behind-a-forgotten-type",
        "The doctor tells of no late job behind one of a type that no worker takes.",
        "sql/operations/test_doctor.py",
        sql(
            "operations/doctor",
            "                select distinct on (d.queue, d.job_type) d.*\n",
            "                select distinct on (d.queue) d.*\n",
        ),
    ),
    mutant(
        "remedy-of-a-part",
        "What the doctor prints for dead jobs ends before it has looked at all of them.",
        "sql/operations/test_doctor.py",
        sql("operations/doctor", "when jobs < 1000 and not is_large then", "when true then"),
    ),
    mutant(
        "age-of-old-functions",
        "After two thousand million transactions an upgrade leaves the functions it has not.",
        "sql/operations/test_drift.py",
        sql("operations/drift", " between -1000000 and 0;", " <= 0;"),
    ),
    mutant(
        "schema-without-its-objects",
        "Where only the schema has another owner, an install fails at a right it has not.",
        "contract/test_install.py",
        sql("upgrades/all", "elsif v_owner <> c_owner_of_tables then", "elsif false then"),
    ),
    mutant(
        "install-waits-for-a-tick",
        "An install fails while a transaction that has ticked stays open.",
        "contract/test_install.py",
        sql(
            "tables/rows",
            "where not exists (select from rota.maintenance as m where m.task = n.task)\n",
            "",
        ),
    ),
    mutant(
        "settings-without-their-list",
        "After a restore without their list, an install leaves settings without effect.",
        "releases/test_restore.py",
        sql(
            "tables/rows",
            "from rota._unlisted() as n\n",
            "from rota._unlisted() as n where false\n",
        ),
    ),
    mutant(
        "all-grants-in-the-list",
        "After an install over a restore each call reads a row for each of many grants.",
        "sql/base/test_configured.py",
        sql("tables/rows", "where u.role is null or u.number <= 16 on", "on"),
    ),
    mutant(
        "no-grant-for-the-others",
        "After an install over a restore roles that are not listed are not confined.",
        "sql/base/test_configured.py",
        sql("tables/rows", "case when u.number <= 15 then u.role end", "u.role"),
    ),
    mutant(
        "stranger-named-to-the-install",
        "An install tells to end a session that reads a copy of the database.",
        "contract/test_install.py",
        sql("upgrades/all", "and d.datname = current_database()", ""),
    ),
    mutant(
        "views-of-another-version",
        "After pg_upgrade the doctor has twelve views that were changed.",
        "sql/operations/test_drift.py",
        sql(
            "operations/drift",
            "split_part(m.definition, ' ', 1) <> split_part(o.definition, ' ', 1)) is",
            "false) is",
        ),
    ),
    mutant(
        "copy-without-data",
        "In a copy of the schema alone the doctor has each object dropped.",
        "releases/test_restore.py",
        sql("operations/drift", "      and exists (select from rota.manifest)\n", ""),
    ),
    mutant(
        "numbers-of-another-server",
        "A restored queue under way stands still until the server has come so far.",
        "releases/test_restore.py",
        sql(
            "maintenance/moves",
            "set horizon = least(m.horizon, pg_snapshot_xmax(pg_current_snapshot()))",
            "set horizon = coalesce(m.horizon, pg_snapshot_xmax(pg_current_snapshot()))",
        ),
    ),
    mutant(
        "grants-by-hand-reported",
        "The doctor takes a grant by hand to a role of ours for drift.",
        "sql/operations/test_drift.py",
        sql(
            "operations/drift", "      and (d.kind <> 'grant' or d.expected is not null)\n", ""
        ),
    ),
    mutant(
        "schedule-that-cannot-be-mended",
        "A schedule whose jobs a trigger refuses cannot be given other jobs either.",
        "sql/schedules/test_definitions.py",
        sql(
            "schedules/definitions",
            "exception when raise_exception then",
            "exception when no_data then",
        ),
    ),
    mutant(
        "schedule-ahead-untold",
        "A schedule waits for a time that a wrong clock had shown, and the doctor is silent.",
        "sql/operations/test_doctor.py",
        sql(
            "operations/doctor",
            "d.last_run_at > n.soon\n",
            "false\n",
        ),
    ),
    mutant(
        "schedule-planned-ahead-untold",
        "A schedule whose last job ended when the clock was ahead waits, and nobody says so.",
        "sql/operations/test_doctor.py",
        sql(
            "operations/doctor",
            "or d.kind = 'after' and d.next_run_at",
            "or false and d.next_run_at",
        ),
    ),
    mutant(
        "enqueued-ahead-untold",
        "Jobs wait for a time that a wrong clock had shown, and the doctor is silent.",
        "sql/operations/test_doctor.py",
        sql("operations/doctor", "and a.run_at > c_now + interval '1 minute'", "and false"),
    ),
    mutant(
        "stopped-runs-again",
        "The doctor runs again what an operator had asked to stop.",
        "sql/operations/test_doctor.py",
        sql("operations/words", "when cancel_requested_at is null or", "when true or"),
    ),
    mutant(
        "stopped-runs-again-from-all",
        "The doctor runs again what a killed worker was to stop.",
        "sql/operations/test_doctor.py",
        sql("operations/doctor", "case when h.cancels = 0 then", "case when true then"),
    ),
    mutant(
        "dependants-stay-cancelled",
        "What was cancelled with a dead job stays so when its remedy brings it back.",
        "sql/operations/test_explain.py",
        sql(
            "operations/words",
            "when with_dependants or exists (",
            "when with_dependants and exists (",
        ),
    ),
    mutant(
        "dependants-of-many-stay-cancelled",
        "What was cancelled with many dead jobs stays so when doctor's remedy retries these.",
        "sql/operations/test_doctor.py",
        sql(
            "operations/doctor",
            "exists (select from rota._dependants(ended_ids, 'cancelled', 1000))",
            "false",
        ),
    ),
    mutant(
        "retry-walks-all-dependants",
        "A retry of many walks all of the million jobs that wait for one of them.",
        "sql/operations/test_acts.py",
        sql(
            "waiting/dependencies",
            "limit cardinality(_dependants.job_ids) + 2 * _dependants.max_jobs",
            "limit 1000000",
        ),
    ),
    mutant(
        "retries-earned-by-a-wrong-clock",
        "What ended while the clock was ahead lets retries through their budget for days.",
        "sql/maintenance/test_budgets.py",
        sql(
            "base/counted",
            "and f.finished_at <= (select rota.now())",
            "",
        ),
    ),
    mutant(
        "retries-earned-by-failures-of-a-wrong-clock",
        "What failed while the clock was ahead lets retries through their budget for days.",
        "sql/maintenance/test_budgets.py",
        sql("maintenance/budgets", "and i.failed_at <= c_now", ""),
    ),
    mutant(
        "rule-pauses-by-a-wrong-clock",
        "A rule pauses a type until a time that a wrong clock had shown, at each failure.",
        "sql/jobs/test_retries.py",
        sql(
            "maintenance/breakers",
            "c_now - c_rule.pause_for and r.failed_at <= c_now",
            "c_now - c_rule.pause_for",
        ),
    ),
    mutant(
        "no-tick-since-the-clock-went-back",
        "Nothing ticks after the clock went back, and no monitor says so for as long.",
        "sql/operations/test_doctor.py",
        sql("operations/views", "greatest(n.now - t.at, t.at - n.now)", "n.now - t.at"),
    ),
    mutant(
        "time-limit-of-a-wrong-clock",
        "A handler that hangs keeps its job until a time that a wrong clock had shown.",
        "sql/maintenance/test_sweep.py",
        sql(
            "maintenance/sweep",
            "greatest(r.updated_at, r.started_at) > c_now",
            "r.updated_at > c_now",
        ),
    ),
    mutant(
        "put-back-ahead-untold",
        "Jobs that were retried while the clock was ahead wait, and the doctor is silent.",
        "sql/operations/test_doctor.py",
        sql(
            "operations/doctor",
            "or a.run_at between a.updated_at - interval '1 s' and a.updated_at)",
            ")",
        ),
    ),
    mutant(
        "lease-of-a-wrong-clock",
        "A job whose worker died waits until a time that a wrong clock had shown.",
        "sql/maintenance/test_sweep.py",
        sql(
            "maintenance/sweep",
            "m.task = 'tick' and m.done_at > c_now + interval '1 minute'",
            "false",
        ),
    ),
    mutant(
        "limit-kept-by-a-wrong-clock",
        "A limit lets nothing in until jobs that it had let in are due once more.",
        "sql/waiting/test_limits.py",
        sql("waiting/limits", "and j.run_at <= c_now", ""),
    ),
    mutant(
        "other-rules-untold",
        "A schedule that old rules of its zone have planned runs at a wrong time, unnoticed.",
        "sql/operations/test_doctor.py",
        sql("operations/doctor", "d.kind = 'cron' and w.planned <> d.next_run_at", "false"),
    ),
    mutant(
        "expired-before-its-delay",
        "A job is taken that expires before its delay ends, and so never runs.",
        "sql/jobs/test_enqueue.py",
        sql(
            "jobs/enqueue", "rota.now() + rota._exact(delay)) then", "rota.now() + delay) then"
        ),
    ),
    mutant(
        "kept-by-the-calendar",
        "A queue keeps its jobs for less than it says, by another's setting or the month.",
        "sql/maintenance/test_retention.py",
        sql(
            "jobs/queues",
            "rota._exact(set_queue.keep_finished)",
            "set_queue.keep_finished",
        ),
    ),
    mutant(
        "year-that-is-short",
        "A retry in 365 days is refused as one in more than a year.",
        "sql/base/test_checks.py",
        sql("base/checks", "value <= 2 * longest", "value <= longest"),
    ),
    mutant(
        "failed-ahead-untold",
        "Retries wait for a time that a wrong clock had shown, and the doctor is silent.",
        "sql/operations/test_doctor.py",
        sql(
            "operations/doctor",
            "or a.status = 'failed' and a.failed_at > c_now + interval '1 minute'",
            "",
        ),
    ),
    mutant(
        "statistics-ahead-untold",
        "Nothing is counted until a time that a wrong clock had shown: the doctor is silent.",
        "sql/operations/test_doctor.py",
        sql(
            "operations/doctor",
            "where p.counted_until > rota.now() + interval '1 minute'",
            "where false",
        ),
    ),
    mutant(
        "preview-of-what-is-not-planned",
        "Where the clock was ahead, a schedule is said to run at times that make no job.",
        "sql/schedules/test_next.py",
        sql(
            "schedules/next",
            "case when upcoming_runs.after is null and v_definition.next_run_at > run_at",
            "case when false",
        ),
    ),
    mutant(
        "schedule-broken-untold",
        "A schedule whose text was broken by hand misses its time before anybody knows.",
        "sql/operations/test_doctor.py",
        sql(
            "operations/doctor",
            "where e.next_run_at is not null order by",
            "where false order by",
        ),
    ),
    mutant(
        "archive-gone-untold",
        "The archive is gone, nothing is purged any more, and the doctor says nothing.",
        "sql/maintenance/test_archive.py",
        sql(
            "operations/doctor",
            "from rota.archive as a where to_regclass",
            "from rota.archive as a where false and to_regclass",
        ),
    ),
    mutant(
        "two-archive-tables",
        "Of two sessions that set the same archive one fails with an error of the catalog.",
        "sql/maintenance/test_archive.py",
        sql(
            "maintenance/archive",
            "    insert into rota.archive (schema) values (set_archive.schema)\n"
            "on conflict on constraint archive_pkey do update set schema = excluded.schema;\n",
            "",
        ),
        sql(
            "maintenance/archive",
            "'belong to role %s, got %L', current_user, rota._cut(schema, 80)));\n"
            "    end if;\nend $$;",
            "'belong to role %s, got %L', current_user, rota._cut(schema, 80)));\n"
            "    end if;\n"
            "    insert into rota.archive (schema) values (set_archive.schema)\n"
            "on conflict on constraint archive_pkey do update set schema = excluded.schema;\n"
            "end $$;",
        ),
    ),
    mutant(
        "archive-of-another",
        "The archive takes a table of another role, and runs its triggers.",
        "sql/maintenance/test_archive.py",
        sql("maintenance/archive", "elsif v_rows_owner <>", "elsif false and v_rows_owner <>"),
    ),
    mutant(
        "expiry-given-again",
        "A job that was brought back gets the expiry of its type once more.",
        "sql/jobs/test_queues.py",
        sql(
            "jobs/insert",
            "select num_nonnulls(n.created_at, n.lease_token) = 2 as is_back",
            "select false as is_back",
        ),
    ),
    mutant(
        "act-in-any-status",
        "A retry of many takes running jobs away from their workers.",
        "sql/operations/test_acts.py",
        sql(
            "operations/acts",
            "when k.status <> all(c_statuses) then",
            "when false then",
        ),
    ),
    mutant(
        "act-forgets-what-waits",
        "A cancel that is taken back twice runs at once what was planned for later.",
        "sql/operations/test_acts.py",
        sql("jobs/control", "keeps_run_at and j.status <> 'failed'", "false"),
    ),
    mutant(
        "spread-all-at-once",
        "Jobs that are to be spread over a time are due in the same moment.",
        "sql/operations/test_acts.py",
        sql("jobs/control", "random() * coalesce(", "0 * coalesce("),
    ),
    mutant(
        "act-keeps-a-backoff",
        "A retry of what failed waits for its backoff all the same.",
        "sql/operations/test_acts.py",
        sql("jobs/control", "keeps_run_at and j.status <> 'failed'", "keeps_run_at"),
    ),
    mutant(
        "act-without-force",
        "A retry of many takes running jobs though its caller has not said force.",
        "sql/operations/test_acts.py",
        sql(
            "operations/acts",
            """case when a.act = 'retry' and not arguments @> '{"force": true}'\n""",
            "case when false\n",
        ),
    ),
    mutant(
        "remedy-of-discarded",
        "The remedy for dead jobs of an error runs those again that were acknowledged.",
        "sql/operations/test_doctor.py",
        sql("operations/doctor", "'is_discarded', false, ", ""),
    ),
    mutant(
        "expiry-that-is-meant",
        "doctor tells of each type of which a job expires, also where that is meant.",
        "sql/operations/test_doctor.py",
        sql("operations/doctor", " having bool_and(s.outcome = 'cancelled')", ""),
    ),
    mutant(
        "erase-escaped-on-the-way",
        "What is to be erased by its payload arrives in the database where its queue moves to.",
        "sql/maintenance/test_moves.py",
        sql("operations/acts", "and act = 'erase' and filter ? 'payload'", "and false"),
    ),
    mutant(
        "moved-without-its-key",
        "A queue moves away from a key that is unique here, and whose job was purged.",
        "sql/maintenance/test_moves.py",
        sql(
            "maintenance/moves",
            "(k.queue = plan_queue_move.queue or k.queue is null)",
            "k.job_id in (select j.id from rota.jobs as j)",
        ),
    ),
    mutant(
        "text-obeyed-by-terminals",
        "The key of a job moves the cursor of the operator who asks for a reason.",
        "sql/operations/test_explain.py",
        sql("operations/explain", "rota._printable(r.explanation)", "r.explanation"),
    ),
    mutant(
        "act-on-what-was-found",
        "A retry of what has failed runs again what has succeeded since it was found.",
        "races/test_racing_acts.py",
        sql(
            "operations/acts",
            "|| jsonb_build_object('ids', v_ids), act,",
            "|| jsonb_build_object('ids', v_ids, 'status', c_statuses), act,",
        ),
    ),
    mutant(
        "act-in-any-queue",
        "An operator who is confined to a queue acts on the jobs of others.",
        "sql/operations/test_acts.py",
        sql("operations/acts", "and (c_allowed is null or w.queue = any(c_allowed))", ""),
    ),
    mutant(
        "act-on-any-error",
        "An act on all whose error has a text is done to jobs of any error.",
        "sql/operations/test_acts.py",
        sql(
            "operations/acts",
            "and (c_error_text is null or strpos(lower(w.last_error), c_error_text) > 0\n"
            "                or strpos("
            'lower(w.last_error collate "C"), c_ascii_error_text) > 0)',
            "",
        ),
    ),
    mutant(
        "error-text-in-one-language",
        "An act finds no English error in capitals where the small letter of I is not i.",
        "sql/operations/test_acts.py",
        sql(
            "operations/acts",
            '\n                or strpos(lower(w.last_error collate "C"),'
            " c_ascii_error_text) > 0",
            "",
        ),
    ),
    mutant(
        "act-on-any-cancel",
        "An act on the jobs that were cancelled for a reason is done to all jobs.",
        "sql/operations/test_acts.py",
        sql("operations/acts", "'error_type', 'cancel_reason', 'idem", "'error_type', 'idem"),
    ),
    mutant(
        "act-on-error-with-its-type",
        "An act on an error that is given with its type, as screens show it, finds no job.",
        "sql/operations/test_acts.py",
        sql(
            "operations/acts",
            "or rota.fold_error(w.error_type || ': ' || w.last_error)\n"
            "                    in (c_error, filter ->> 'error'))",
            ")",
        ),
    ),
    mutant(
        "schedule-of-another-queue",
        "An operator who is confined to a queue makes jobs in others by a schedule.",
        "sql/access/test_queue_grants.py",
        sql(
            "schedules/definitions",
            "perform rota._check_queues('operator', array[queue]);",
            "",
        ),
    ),
    mutant(
        "schedule-taken-from-another-queue",
        "An operator who is confined to a queue ends the schedules of others.",
        "sql/access/test_queue_grants.py",
        sql(
            "schedules/definitions",
            "if not found or v_definition.queue <> all(rota._allowed_queues('operator')) then",
            "if not found then",
        ),
    ),
    mutant(
        "schedule-changed-in-another-queue",
        "An operator who is confined to a queue takes the schedules of others into his.",
        "sql/access/test_queue_grants.py",
        sql(
            "schedules/definitions",
            "perform rota._check_queues('operator', array[old.queue], "
            "format('schedule %L', old.name));",
            "",
        ),
    ),
    mutant(
        "queue-of-a-refused-key-told",
        "Whoever is confined to a queue learns that of a key, schedule or pipeline.",
        "sql/access/test_queue_grants.py",
        sql("base/queue_rights", "coalesce('the queue of ' || what, ", "coalesce("),
    ),
    mutant(
        "stage-tells-its-queue",
        "Who may not start a pipeline is told the queue of its first stage.",
        "sql/access/test_queue_grants.py",
        sql("jobs/keys", ",\n        'stage ' || quote_literal(new_job.stage));", ");"),
    ),
    mutant(
        "jobs-before-the-barrier",
        "A confined observer reads jobs of other queues by what he asks of them.",
        "sql/access/test_visible_rows.py",
        sql(
            "operations/views",
            "rota._visible_runs with (security_barrier = true) as",
            "rota._visible_runs as",
        ),
    ),
    mutant(
        "jobs-behind-no-gate",
        "A confined observer reads jobs where only those who see all queues should.",
        "sql/access/test_visible_rows.py",
        sql(
            "operations/views",
            "where (rota.sees_all_queues() or r.way <> 'open')\n"
            "  -- Asked once for each table, before anything is read of it.\n"
            "  and r.way = case\n"
            "    when (select rota.visible_queues()) is not null then 'queues'\n"
            "    when rota.sees_all_queues() then 'open' else 'barred'\n"
            "  end;",
            "where (select rota.visible_queues()) is null and r.way = 'open'\n"
            "   or r.way = 'open' and r.queue = any((select rota.visible_queues())::text[]);",
        ),
    ),
    mutant(
        "samples-of-job-runs",
        "The planner shows a confined observer what jobs of other queues hold.",
        "sql/access/test_visible_rows.py",
        sql(
            "operations/views",
            "where (rota.sees_all_queues() or r.way <> 'open')\n"
            "  -- Asked once for each table, before anything is read of it.\n"
            "  and",
            "where",
        ),
    ),
    mutant(
        "plan-of-a-confined-role",
        "Who is confined no more finds no job by the plan that he has.",
        "sql/access/test_visible_rows.py",
        sql(
            "operations/views",
            """
    union all
    select b.*, 'barred'::text as way from rota._barred_runs as b
""",
            "",
        ),
    ),
    mutant(
        "way-that-is-planned-only",
        "Who is confined after a query was planned sees all queues by it.",
        "sql/access/test_visible_rows.py",
        sql(
            "operations/views",
            """and r.way = case
    when (select rota.visible_queues()) is not null then 'queues'
    when rota.sees_all_queues() then 'open' else 'barred'
  end;""",
            """and r.way = case
    when rota.sees_all_queues() then 'open'
    when (select rota.visible_queues()) is not null then 'queues' else 'barred'
  end;""",
        ),
    ),
    mutant(
        "times-of-another-queue",
        "An observer who is confined to a queue is told when schedules of others run.",
        "sql/access/test_visible_rows.py",
        sql(
            "schedules/next",
            "if not found or v_definition.queue <> all(rota._allowed_queues('observer')) then",
            "if not found then",
        ),
    ),
    mutant(
        "error-of-another-queue",
        "An observer who is confined to a queue reads the errors of others by what waits.",
        "sql/access/test_visible_rows.py",
        sql(
            "operations/explain",
            "i.last_error, i.cancel_reason from rota.job_runs as i",
            "i.last_error, i.cancel_reason from rota.finished_jobs as i",
        ),
    ),
    mutant(
        "limit-full-by-one-open-claim",
        "A limit is said to be full, and a session blamed, where a slot is free.",
        "sql/operations/test_explain.py",
        sql(
            "operations/explain",
            "where not exists (select from rota._row_holder(x.row_xmax))",
            "where false",
        ),
    ),
    mutant(
        "limit-filled-in-another-queue",
        "An observer who is confined to a queue is told which jobs of others fill a limit.",
        "sql/access/test_visible_rows.py",
        sql(
            "operations/explain",
            "when r.queue <> all(c_visible) then 'one of another queue'",
            "when false then ''",
        ),
    ),
    mutant(
        "open-policy-untold",
        "A policy that keeps an observer to his queues is gone, and the doctor says nothing.",
        "sql/operations/test_drift.py",
        sql(
            "operations/drift",
            "from pg_policies as p where p.schemaname = 'rota'",
            "from pg_policies as p where false",
        ),
    ),
    mutant(
        "effect-of-another-queue",
        "A worker that is confined to a queue reads the results of effects of others.",
        "sql/access/test_queue_grants.py",
        sql(
            "jobs/effects",
            "case when rota._is_own_effect(e, 'worker') then e.result end",
            "e.result",
        ),
    ),
    mutant(
        "worker-of-another-queue",
        "A worker that is confined to a queue says that those of others are gone.",
        "sql/access/test_queue_grants.py",
        sql(
            "jobs/workers",
            "and not w.queues && rota._allowed_queues('worker')",
            "and false",
        ),
    ),
    mutant(
        "reported-for-any-queue",
        "A worker that is confined to a queue says that it takes jobs of others.",
        "sql/access/test_queue_grants.py",
        sql("jobs/workers", "perform rota._check_queues('worker', queues);", ""),
    ),
    mutant(
        "effect-without-its-queue",
        "A worker that is confined to a queue is not told what became of its own effects.",
        "sql/access/test_queue_grants.py",
        sql(
            "jobs/effects",
            "return effect.queue = any(rota._allowed_queues(access))\n      or",
            "return",
        ),
    ),
    mutant(
        "effect-of-the-queue-before",
        "A record that was taken over is of the queue of the job that had it before.",
        "sql/access/test_queue_grants.py",
        sql(
            "jobs/effects",
            "lease_token = j.lease_token, queue = j.queue,",
            "lease_token = j.lease_token,",
        ),
    ),
    mutant(
        "what-is-gone-is-for-all",
        "Who is confined to a queue may do anything with what a purged job of others left.",
        "sql/access/test_queue_grants.py",
        sql(
            "base/queue_rights",
            """
        select i.id from unnest(_jobs_outside_grants.job_ids) as i (id)
        where i.id is not null and not exists (
            select from rota.jobs as j where j.id = i.id and j.queue = any(v_allowed)
        ) and not exists (
            select from rota.finished_jobs as f where f.id = i.id and f.queue = any(v_allowed)
        )
""",
            """
        select j.id from rota.jobs as j
        where j.id = any(_jobs_outside_grants.job_ids) and j.queue <> all(v_allowed)
        union all
        select f.id from rota.finished_jobs as f
        where f.id = any(_jobs_outside_grants.job_ids) and f.queue <> all(v_allowed)
""",
        ),
    ),
    mutant(
        "runs-of-another-queue",
        "An operator who is confined to a queue leads runs of others into his.",
        "sql/access/test_queue_grants.py",
        sql(
            "waiting/pipelines",
            "where p.pipeline = _lock_pipeline.pipeline\n    ),",
            "where p.pipeline = _lock_pipeline.pipeline and p.ordinal is not null\n    ),",
        ),
    ),
    mutant(
        "key-of-another-queue-told",
        "A confined observer is told which job of another queue has the key of a dead one.",
        "sql/access/test_visible_rows.py",
        sql(
            "operations/words",
            "and (c_visible is null or f.queue = any(c_visible))\n    limit 1;",
            "\n    limit 1;",
        ),
    ),
    mutant(
        "pipeline-under-an-advisory-lock",
        "Any login can keep operators from defining a pipeline.",
        "faults/test_sessions.py",
        sql(
            "waiting/pipelines",
            "    for v_try in 1..2 loop\n",
            "    perform pg_advisory_xact_lock(\n"
            "        hashtextextended('rota.pipeline ' || pipeline, 0));\n"
            "    for v_try in 1..2 loop\n",
        ),
    ),
    mutant(
        "first-definitions-at-once",
        "Two first definitions of a pipeline at once make one of both.",
        "races/test_racing_pipelines.py",
        sql(
            "waiting/pipelines",
            "        exit when found or v_try = 2 or not may_be_new;",
            "        exit;",
        ),
    ),
    mutant(
        "known-definitions-at-once",
        "Two definitions of a pipeline at once make one of both.",
        "races/test_racing_pipelines.py",
        sql("waiting/pipelines", "        order by p.stage for update;", "        limit 1;"),
    ),
    mutant(
        "restarted-in-another-queue",
        "An operator who is confined to a queue lets runs go on in others.",
        "sql/access/test_queue_grants.py",
        sql(
            "waiting/pipelines",
            "perform rota._check_queues('operator', array[v_stage.queue], 'stage ' ||"
            " quote_literal(stage));",
            "",
        ),
    ),
    mutant(
        "ticker-left-behind",
        "start_ticker() makes an entry that pg_cron, which serves another database, ignores.",
        "sql/maintenance/test_pg_cron.py",
        sql(
            "maintenance/pg_cron",
            "              and j.database = current_database()\n        );\n    exception",
            "        );\n    exception",
        ),
    ),
    mutant(
        "ticker-of-all-queues",
        "An operator who is confined to a queue stops the maintenance of all.",
        "sql/access/test_queue_grants.py",
        sql(
            "maintenance/pg_cron",
            "    perform rota._check_queues('operator', '{*}');\n    if not",
            "    if not",
        ),
    ),
    mutant(
        "ticker-of-another-name",
        "The ticker of a renamed database goes on ticking for one that is not there.",
        "sql/maintenance/test_pg_cron.py",
        sql(
            "maintenance/pg_cron",
            "j.active and j.database = current_database()\n",
            "j.active\n",
        ),
    ),
    mutant(
        "key-of-another-queue",
        "An operator who is confined to a queue lets the jobs of others go on.",
        "sql/access/test_queue_grants.py",
        sql(
            "waiting/order",
            "      and rota._jobs_outside_grants(array[s.job_id], 'operator') = '{}'\n",
            "",
        ),
    ),
    mutant(
        "observer-of-all-queues",
        "An observer who is confined to a queue sees the jobs of others.",
        "sql/access/test_visible_rows.py",
        sql(
            "base/queue_rights",
            "begin return rota._allowed_queues('observer'); end;",
            "begin return null; end;",
        ),
    ),
    mutant(
        "errors-for-all-observers",
        "An observer who is confined to a queue reads the errors of others.",
        "sql/access/test_visible_rows.py",
        sql("access/visible_rows", "'{job_errors,stage_runs,", "'{stage_runs,"),
    ),
    mutant(
        "depths-for-all-observers",
        "An observer who is confined to a queue counts the jobs of others.",
        "sql/access/test_visible_rows.py",
        sql(
            "maintenance/depths",
            "where c_visible is null or j.queue = any(c_visible)\n",
            "where true\n",
        ),
    ),
    mutant(
        "act-waits-for-a-producer",
        "A producer who does not commit a key holds up an act on a thousand jobs.",
        "sql/operations/test_acts.py",
        sql("operations/acts", "set lock_timeout = '50ms' as $$", "as $$"),
    ),
    mutant(
        "retry-with-any-payload",
        "An operator retries a job with a payload that no producer may give it.",
        "sql/operations/test_acts.py",
        sql("operations/acts", "('payload', 'object', 'must be a JSON object'),", ""),
    ),
    mutant(
        "filter-of-no-status",
        "A filter that names no status at all is taken for one that finds nothing.",
        "sql/operations/test_acts.py",
        sql(
            "operations/acts",
            "v_statuses <@ c_statuses and v_statuses <> '{}'",
            "v_statuses <@ c_statuses",
        ),
    ),
    mutant(
        "explain-of-for-ever",
        "A job that a hand has put off for ever cannot be explained.",
        "sql/operations/test_explain.py",
        sql("operations/explain", "least(job.run_at, '9999-01-01')", "job.run_at"),
    ),
    mutant(
        "explain-of-taken-back",
        "Of a job that was just taken back it is said that no worker took it.",
        "sql/operations/test_explain.py",
        sql("operations/explain", "greatest(job.run_at, job.updated_at)", "job.run_at"),
    ),
    mutant(
        "doctor-stopped-by-a-hand",
        "A run_at that was written by hand keeps all from queue_stats and half of doctor().",
        "sql/operations/test_doctor.py sql/operations/test_views.py",
        sql(
            "maintenance/depths",
            "then job.updated_at end), '-infinity')",
            "then job.updated_at end), null)",
        ),
    ),
    mutant(
        "hours-of-a-longer-day",
        "Where summer time ends, a day of statistics by the hour has 25.",
        "sql/operations/test_views.py",
        sql(
            "operations/views",
            "rota.now() - interval '24 hours'",
            "rota.now() - interval '1 day'",
        ),
    ),
    mutant(
        "act-without-a-record",
        "Nobody can tell who cancelled a thousand jobs.",
        "sql/operations/test_acts.py",
        sql("operations/acts", "if changed > 0 then", "if false then"),
    ),
    mutant(
        "erased-but-for-the-record",
        "What was erased can be read in the record of what was done to it.",
        "sql/operations/test_acts.py",
        sql("operations/acts", "where a.job_ids && _erase_jobs.job_ids", "where false"),
    ),
    mutant(
        "edit-without-what-was",
        "Nobody can tell with what payload an attempt failed.",
        "sql/operations/test_acts.py",
        sql(
            "operations/acts",
            "set payload = r.payload",
            "set payload = null",
        ),
    ),
    mutant(
        "paused-retries-before-others",
        "A retry seems to wait for those of a paused type, which begin only after the pause.",
        "sql/maintenance/test_budgets.py",
        sql(
            "operations/explain",
            "or not rota._is_paused(job.queue, rota.now(), k.job_type)",
            "or true",
        ),
    ),
    mutant(
        "stages-are-no-ends",
        "A stage that takes as long as always seems to hang, as none of its type had ended.",
        "sql/operations/test_explain.py",
        sql("base/counted", "where g.queue = _newest_ends.queue", "where false"),
    ),
    mutant(
        "span-within-what-goes-on",
        "A span that ends in the hour or day that goes on has what ended after it.",
        "sql/maintenance/test_statistics.py",
        sql(
            "operations/statistics",
            "when until < v_progress.hours_until then date_bin('1 hour', until, 'epoch')",
            "when false then until",
        ),
    ),
    mutant(
        "added-up-twice",
        "Minutes that are in their hour are added to it again five minutes later.",
        "sql/maintenance/test_statistics.py",
        sql(
            "maintenance/statistics",
            "s.starts_at >= greatest(v_start, v_step.since)",
            "s.starts_at >= v_start",
        ),
    ),
    mutant(
        "limit-full-by-none",
        "A limit is full by jobs whose rows do not say so, and they are not named.",
        "sql/operations/test_explain.py",
        sql(
            "operations/explain",
            "v_bound.limit_name and p.part = -2",
            "v_bound.limit_name and false",
        ),
    ),
    mutant(
        "lowered-limit-asks-for-ticks",
        "More run than a lowered limit allows, and the remedy is a tick, which does nothing.",
        "sql/operations/test_explain.py",
        sql(
            "operations/explain",
            "cardinality(v_running) < v_bound.max_running\n              and not",
            "not",
        ),
    ),
    mutant(
        "those-let-in-ask-for-ticks",
        "Jobs let in for a limit have no worker, and those behind them ask for ticks instead.",
        "sql/operations/test_explain.py",
        sql(
            "operations/explain",
            "where (v_opened < v_room) is not false and (",
            "where (",
        ),
    ),
    mutant(
        "marks-of-rollbacks-ask-for-ticks",
        "Those let in were in a claim that was rolled back, and those behind ask for ticks.",
        "sql/operations/test_explain.py",
        sql("operations/explain", "0, v_room, 2147483647)", "0, v_room, null)"),
    ),
    mutant(
        "ticks-without-a-check-are-asked-for",
        "A job is let in at the end of others, and asks for ticks that have no check to do.",
        "sql/operations/test_explain.py",
        sql("operations/explain", "select count(*) = 1000 or", "select true or"),
    ),
    mutant(
        "rate-lets-in-all-at-once",
        "Those let in for a rate have no worker, and those behind them ask for ticks instead.",
        "sql/operations/test_explain.py",
        sql("operations/explain", "(select c.burst from rota._cells(v_bound) as c)", "1000"),
    ),
    mutant(
        "class-raised-asks-for-ticks",
        "A job of a class whose limit was raised asks for ticks, which pass over its key.",
        "sql/operations/test_explain.py",
        sql(
            "operations/explain",
            "or (v_bound.limit_key <> job.limit_key) is not true",
            "or true",
        ),
    ),
    mutant(
        "rate-asks-for-ticks",
        "A job asks for ticks, though none lets in the next before the span of the rate.",
        "sql/operations/test_explain.py",
        sql("operations/explain", "if v_opened < v_room and v_next", "if false and v_next"),
    ),
    mutant(
        "any-parent-is-retried",
        "What was cancelled by hand is to come back with a parent that did not cancel it.",
        "sql/operations/test_explain.py",
        sql(
            "operations/explain",
            "          and ended.cancel_reason = any(rota._parent_reasons(d.parent_id))\n",
            "",
        ),
    ),
    mutant(
        "expired-retry-needs-tick",
        "A retry that has expired is told to wait for the budget of its queue.",
        "sql/maintenance/test_budgets.py",
        sql("operations/explain", "(job.expires_at <= c_now) is not true", "true"),
    ),
    mutant(
        "live-parent-is-retried",
        "What was cancelled comes back with its parent, which runs and cannot be retried.",
        "sql/operations/test_explain.py",
        sql("operations/explain", "and p.status in ('dead', 'cancelled')\n    );", ");"),
    ),
)
