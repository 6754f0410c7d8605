"""Claims: each of these gives a job to two, to nobody, too early, or lets claims wait."""

from __future__ import annotations

from mutants.mutant import mutant, sql

CLAIMS = (
    mutant(
        "checks-for-later-without-their-index",
        "Each check that waits for transactions reads all that wait, of all keys of a class.",
        "contract/test_plans.py",
        sql("base/pending", "c.kind = any('{limit,queue,slots}') and", ""),
    ),
    mutant(
        "full-limit-job-by-job",
        "A claim of one job walks past those of a limit that is full one by one.",
        "sql/waiting/test_limits.py",
        sql(
            "jobs/claim",
            "0 > any(v_found) or v_full_limits <> '{}' then",
            "0 > any(v_found) then",
        ),
    ),
    mutant(
        "held-by-a-pause-reads-all-let-in",
        "A claim that holds jobs of a paused type reads all that limits have let in.",
        "contract/test_plans.py",
        sql(
            "jobs/claim",
            "select j.opened_for from rota.jobs as j where j.id = any(v_ids)), null));",
            """\
            select j.opened_for from rota.jobs as j
            where j.id = any(v_ids) and j.opened_for is not null), null));""",
        ),
    ),
    mutant(
        "held-by-a-limit-reads-all-let-in",
        "A claim that holds jobs of a full limit reads all that others have let in.",
        "contract/test_plans.py",
        sql(
            "jobs/slots",
            "select j.opened_for from rota.jobs as j where j.id = any(v_refused)), null);",
            """\
                select j.opened_for from rota.jobs as j
                where j.id = any(v_refused) and j.opened_for is not null), null);""",
        ),
    ),
    mutant(
        "time-limit-by-hand-stops-claims",
        "A time limit of millions of years in one row keeps all others from being claimed.",
        "sql/jobs/test_claim.py",
        sql("jobs/claim", "nullif(greatest('0', least('31 days',", "nullif(greatest(least("),
    ),
    mutant(
        "lowered-limit-looked-at-later-and-later",
        "A limit that was lowered below what runs lets in seconds after enough have ended.",
        "sql/waiting/test_limits.py",
        sql(
            "waiting/limits",
            "interval '1 second');\n            return v_is_backfilled;\n",
            "interval '1 second') where false;\n            return false;\n",
        ),
    ),
    mutant(
        "held-job-that-was-locked-forgotten",
        "A held job waits for ever that a session has locked while the last slot came back.",
        "races/test_racing_limits.py",
        sql("waiting/limits", "(v_is_kept or jsonb_array_length", "(jsonb_array_length"),
    ),
    mutant(
        "held-job-left-to-another-kind",
        "A held job waits for ever while one was let in that no worker takes.",
        "races/test_racing_limits.py",
        sql(
            "waiting/limits",
            " and j.queue = k.queue\n                  and j.job_type = k.job_type\n",
            "\n",
        ),
    ),
    mutant(
        "last-look-at-a-limit-before-its-last-slot",
        "A job waits for ever whose slot comes between the two questions of a tick.",
        "races/test_racing_limits.py",
        sql(
            "waiting/limits",
            "v_is_backfilled and c_is_last;",
            "v_is_backfilled and rota._has_outlasted_others('slots', $1);",
        ),
    ),
    mutant(
        "dead-slots-of-a-full-queue-walked-again",
        "A session that never takes a slot of a full queue walks all dead ones in each claim.",
        "sql/waiting/test_limits.py",
        sql("jobs/claim", "(v_index) - v_walked >= 200;", "(v_index) - v_walked < 0;"),
    ),
    mutant(
        "claim-keeps-slots-of-kept-rows",
        "Each claim of a job that a trigger keeps as it was loses its slots for ever.",
        "sql/waiting/test_limits.py",
        sql("jobs/claim", "and v_claimed < cardinality(v_rows) then", "and false then"),
    ),
    mutant(
        "claim-waits",
        "A claim waits for a row that another one has locked.",
        "races/test_racing_claims.py sql/jobs/test_claim.py",
        sql(
            "jobs/claim",
            "limit _lock_lanes.max_jobs - cardinality(v_ids) for update skip locked",
            "limit _lock_lanes.max_jobs - cardinality(v_ids) for update",
        ),
    ),
    mutant(
        "claim-of-a-job-that-was-moved",
        "A worker of several queues is given a job that was moved to another one.",
        "races/test_racing_claims.py",
        sql("jobs/claim", " and j.queue = any(_lock_merged.queues)", ""),
    ),
    mutant(
        "claim-of-many-queues-waits",
        "A claim from several queues waits for a row that another one has locked.",
        "races/test_racing_claims.py sql/jobs/test_claim.py",
        sql(
            "jobs/claim",
            """\
            limit _lock_merged.max_jobs - cardinality(ids)
            for update skip locked""",
            """\
            limit _lock_merged.max_jobs - cardinality(ids)
            for update""",
        ),
    ),
    mutant(
        "claim-with-a-hint-waits",
        "A claim that begins at its hint waits for a row that another one has locked.",
        "sql/jobs/test_scan_start.py races/test_racing_claims.py",
        sql("jobs/claim", "for update of j skip locked", "for update of j"),
    ),
    mutant(
        "claim-takes-all-unfit-out",
        "A claim that meets expired or paused jobs does the work of maintenance without bound.",
        "sql/jobs/test_claim.py",
        sql(
            "jobs/claim",
            "limit _hold_unfit.max_more for update skip locked",
            "for update skip locked",
        ),
    ),
    mutant(
        "claim-misses-pauses-of-types",
        "A claim gives a worker jobs of a type that is paused in all queues.",
        "sql/jobs/test_pauses.py",
        sql(
            "jobs/claim",
            "p.pause_name in ('type ' || _unfit_hold.job_type, ",
            "p.pause_name in (",
        ),
    ),
    mutant(
        "claim-misses-pauses-in-a-queue",
        "A claim gives a worker jobs of a type that is paused in their queue.",
        "sql/jobs/test_pauses.py",
        sql(
            "jobs/claim",
            ", concat('type ', _unfit_hold.job_type, ' of ', _unfit_hold.queue))",
            ")",
        ),
    ),
    mutant(
        "claim-without-lock",
        "Two claims at once take the same rows.",
        "races/test_racing_claims.py races/test_load.py",
        sql(
            "jobs/claim",
            "limit _lock_lanes.max_jobs - cardinality(v_ids) for update skip locked",
            "limit _lock_lanes.max_jobs - cardinality(v_ids)",
        ),
    ),
    mutant(
        "claim-trusts-its-candidates",
        "A job that another session took between look and lock is given out again.",
        "races/test_racing_claims.py races/test_load.py races/test_interleavings.py",
        sql(
            "jobs/claim",
            "and j.status = any(c_waiting) and j.run_at <= _lock_merged.due",
            "and j.run_at <= _lock_merged.due",
        ),
    ),
    mutant(
        "expired-job-claimed",
        "A claim that knows where its lane begins does not see that a job has expired.",
        "sql/maintenance/test_expiry.py",
        sql("jobs/claim", "j.expires_at <= v_now as is_expired", "false as is_expired"),
    ),
    mutant(
        "expired-job-claimed-from-two-queues",
        "A claim of several queues does not see that a job has expired.",
        "sql/maintenance/test_expiry.py",
        sql(
            "jobs/claim",
            "case when j.expires_at <= _lock_merged.due then -j.id else j.id end",
            "j.id",
        ),
    ),
    mutant(
        "expired-job-ended-while-it-runs",
        "A job that expires while it runs is taken from its worker.",
        "sql/maintenance/test_expiry.py",
        sql(
            "maintenance/sweep",
            """\
        return array(
            select j.id from rota.jobs as j
            where j.locked_until is null and j.expires_at""",
            """\
        return array(
            select j.id from rota.jobs as j
            where j.expires_at""",
        ),
        sql(
            "maintenance/sweep",
            """\
        select j.expires_at into v_first from rota.jobs as j
        where j.locked_until is null and j.expires_at""",
            """\
        select j.expires_at into v_first from rota.jobs as j
        where j.expires_at""",
        ),
    ),
    mutant(
        "heartbeat-beyond-the-time-limit",
        "A worker that lives keeps the job of a handler that hangs, as long as it likes.",
        "sql/jobs/test_lease.py sql/maintenance/test_sweep.py",
        sql(
            "jobs/lease",
            """\
                        rota._queue_lease(j.queue))))),
                updated_at = v_now
            where j.id = any(_extend_leases.job_ids)""",
            """\
                        rota._queue_lease(j.queue)))))
                    + coalesce(v_now - j.overdue_at, '0'),
                updated_at = v_now
            where j.id = any(_extend_leases.job_ids)""",
        ),
    ),
    mutant(
        "claim-beyond-the-time-limit",
        "A claim gives the whole lease, however short the time limit is.",
        "sql/jobs/test_claim.py sql/maintenance/test_sweep.py",
        sql(
            "jobs/claim",
            """\
                coalesce(j.time_limit, (v_settings -> j.queue ->> 1)::interval) + '30 s')),""",
            "                null)),",
        ),
    ),
    mutant(
        "claim-in-the-order-of-a-session",
        "A setting of the session lets a claim read the table, and tell its jobs as they lie.",
        "sql/jobs/test_claim.py",
        sql(
            "jobs/claim",
            "set enable_sort = off set enable_nestloop = on",
            "set enable_sort = off",
        ),
    ),
    mutant(
        "claim-of-lanes-in-the-order-of-ids",
        "The jobs of a walk through several lanes come by their numbers.",
        "sql/jobs/test_claim.py",
        sql(
            "jobs/claim",
            "where j.id = any(v_ids)"
            " order by coalesce(j.own_lane, j.priority), coalesce(j.own_place, j.run_at), j.id",
            "where j.id = any(v_ids) order by j.id",
        ),
    ),
    mutant(
        "hint-of-two-queues-in-the-order-of-ids",
        "The jobs of several queues, found where the last claim was, come by their numbers.",
        "sql/jobs/test_scan_start.py sql/jobs/test_claim.py",
        sql(
            "jobs/claim",
            "array_agg(j.ctid order by coalesce(j.own_place, j.run_at), j.id)",
            "array_agg(j.ctid order by j.id)",
        ),
    ),
    mutant(
        "claim-in-a-subquery",
        "The update chooses its rows itself, and a plan that looks twice takes too many.",
        "sql/jobs/test_claim.py",
        sql(
            "jobs/claim",
            "    from (select unnest(v_rows) as row_id) as r where j.ctid = r.row_id returning",
            """\
        where j.id in (
            select w.id
            from rota.jobs as w
            where w.queue = any(claim_jobs.queues)
              and w.hold is null
              and w.status in ('queued', 'failed')
              and w.run_at <= v_now
              and (claim_jobs.job_types is null or w.job_type = any(claim_jobs.job_types))
            order by w.priority, w.run_at, w.id
            limit claim_jobs.max_jobs
            for update skip locked
        )
        returning""",
        ),
    ),
    mutant(
        "claim-before-its-time",
        "A job is claimed before its run_at.",
        "sql/jobs/test_claim.py",
        sql(
            "jobs/claim",
            """\
              and coalesce(j.own_place, j.run_at) <= _lock_lanes.ends[1]
              and j.run_at <= _lock_lanes.due
""",
            "",
        ),
    ),
    mutant(
        "claim-with-a-hint-before-its-time",
        "A claim that begins at its hint takes jobs of later.",
        "sql/jobs/test_scan_start.py",
        sql(
            "jobs/claim",
            "and coalesce(j.own_place, j.run_at) <= v_end and j.run_at <= v_now",
            "",
        ),
    ),
    mutant(
        "claim-of-many-queues-before-its-time",
        "A claim from several queues takes jobs of later.",
        "sql/jobs/test_claim.py",
        sql(
            "jobs/claim",
            """\
                  and coalesce(j.own_place, j.run_at) <= c.until
                  and j.run_at <= _lock_merged.due
                  and (coalesce(j.own_place, j.run_at), j.id)""",
            """\
                  and (coalesce(j.own_place, j.run_at), j.id)""",
        ),
        sql(
            "jobs/claim",
            """\
              and j.run_at <= _lock_merged.due
              and coalesce""",
            """\
              and coalesce""",
        ),
    ),
    mutant(
        "claim-a-moment-late",
        "A job that is due this very microsecond is not claimed.",
        "sql/jobs/test_claim.py",
        sql(
            "jobs/claim",
            "and j.run_at <= _lock_lanes.due",
            "and j.run_at < _lock_lanes.due",
        ),
    ),
    mutant(
        "claim-from-a-paused-queue",
        "A paused queue goes on.",
        "sql/jobs/test_pauses.py",
        sql("jobs/claim", "or not rota._is_paused(c.queue, due)", "or true"),
    ),
    mutant(
        "claim-of-a-paused-type",
        "A job type that is paused goes on.",
        "sql/jobs/test_pauses.py",
        sql("jobs/claim", "if v_has_pauses or 0 >", "if 0 >"),
    ),
    mutant(
        "claim-with-a-hint-of-a-paused-type",
        "A job type that is paused goes on for who has a hint.",
        "sql/jobs/test_pauses.py",
        sql(
            "jobs/claim",
            "join rota.pauses as p on p.job_type = j.job_type",
            "join rota.pauses as p on false",
        ),
    ),
    mutant(
        "pause-without-end",
        "A pause whose time is over stops claims until a tick deletes it.",
        "sql/jobs/test_pauses.py",
        sql(
            "jobs/pauses",
            "p.until is null or p.until > _is_paused.due",
            "true",
        ),
    ),
    mutant(
        "pause-of-a-type-without-end",
        "A claim holds jobs although the pause of their type is over.",
        "sql/jobs/test_pauses.py",
        sql(
            "jobs/claim",
            "p.until is null or p.until > _unfit_hold.due",
            "true",
        ),
    ),
    mutant(
        "held-by-a-pause-without-a-check",
        "A claim that does not see a pause end holds jobs for ever.",
        "sql/jobs/test_pauses.py",
        sql(
            "jobs/claim",
            "where v_unfit.hold like 'pause %'",
            "where false",
        ),
    ),
    mutant(
        "breaker-opens-behind-an-operator",
        "A breaker opens, as if it would try again, while an operator keeps its type paused.",
        "sql/jobs/test_retries.py",
        sql("maintenance/breakers", "if v_set_by is null then", "if true then"),
    ),
    mutant(
        "breaker-over-operator",
        "A breaker gives an end to the pause of an operator.",
        "sql/jobs/test_pauses.py",
        sql(
            "jobs/pauses",
            "where excluded.set_by = 'operator' or p.set_by = excluded.set_by",
            "",
        ),
    ),
    mutant(
        "rule-over-breaker",
        "The pause of a retry rule takes the place of that of a breaker.",
        "sql/jobs/test_retries.py",
        sql("jobs/pauses", "or p.set_by = excluded.set_by", "or p.set_by <> 'operator'"),
    ),
    mutant(
        "rule-pauses-too-late",
        "A failure pauses its type from now on, however long ago it was.",
        "sql/jobs/test_retries.py",
        sql(
            "maintenance/breakers",
            "v_failed.failed_at + c_rule.pause_for, 'rule'",
            "c_now + c_rule.pause_for, 'rule'",
        ),
    ),
    mutant(
        "claim-without-isolation",
        "A claim from an old snapshot is let through.",
        "sql/jobs/test_claim.py sql/jobs/test_round_trip.py",
        sql("jobs/claim", "    perform rota._check_isolation('claim_jobs');\n", ""),
    ),
    mutant(
        "hint-for-ever",
        "A session never looks again from the start of a lane.",
        "sql/jobs/test_scan_start.py",
        sql(
            "jobs/claim",
            "rota._is_full_scan_due(v_start[2], _lock_lanes.due);",
            "v_start[2] is null;",
        ),
    ),
    mutant(
        "full-scan-told-to-nobody",
        "Each session walks by itself past what one of them has walked past.",
        "sql/jobs/test_scan_start.py",
        sql("jobs/claim", "and v_walked >= 10000 then", "and false then"),
    ),
    mutant(
        "full-scan-by-all-at-once",
        "All sessions walk past the same while the first of them is at it.",
        "sql/jobs/test_scan_start.py",
        sql(
            "jobs/claim",
            "not rota._try_lock(concat('rota.scan ', v_call))",
            "rota._try_lock(concat('rota.scan ', v_call)) is null",
        ),
    ),
    mutant(
        "full-scan-left-to-a-stranger",
        "A forgotten claim that has made a full scan keeps all others from making one.",
        "sql/jobs/test_scan_start.py",
        sql(
            "jobs/claim",
            "if v_told[2] between c_due - 5000000 and c_due + 3000000\n",
            "if v_told[2] <= c_due + 3000000\n",
        ),
    ),
    mutant(
        "full-scan-of-a-clock-that-went-back",
        "A full scan that was made before the clock went back keeps others from theirs.",
        "sql/jobs/test_scan_start.py",
        sql("jobs/claim", "and c_due + 3000000\n", "and 9e18\n"),
    ),
    mutant(
        "lane-that-no-full-scan-comes-to",
        "A full scan that has enough before a lane keeps it from being looked at.",
        "sql/jobs/test_scan_start.py",
        sql(
            "jobs/claim",
            "case when not v_is_full then v_start[v_next:26] end",
            "v_start[v_next:26]",
        ),
    ),
    mutant(
        "start-of-other-queues",
        "Where the jobs of open queues begin is taken for where those of full ones do.",
        "sql/jobs/test_scan_start.py",
        sql(
            "jobs/claim", "if cardinality(v_queues) < cardinality(queues) then", "if false then"
        ),
    ),
    mutant(
        "place-moves-on-without-jobs",
        "What comes in behind the last job of a lane waits for a full scan.",
        "sql/jobs/test_scan_start.py",
        sql(
            "jobs/claim",
            "case v_from[2] when 0 then c_due - 100000 else v_from[2] end",
            "c_due - 100000",
        ),
    ),
    mutant(
        "let-in-together-by-id",
        "What a limit lets in at once where dead entries pile up begins in the order of ids.",
        "sql/jobs/test_scan_start.py",
        sql(
            "waiting/limits",
            "+ array_position(_open_for.job_ids, j.id) * interval",
            "+ 0 * interval",
        ),
    ),
    mutant(
        "let-in-at-front-without-need",
        "What a limit lets in loses its place where no dead entries are.",
        "sql/jobs/test_scan_start.py",
        sql(
            "waiting/fairness",
            "            is not null then v_place",
            "            is null or true then v_place",
        ),
    ),
    mutant(
        "let-in-behind-where-claims-begin",
        "What a limit lets in beside younger jobs waits for a full scan.",
        "sql/jobs/test_scan_start.py",
        sql("waiting/limits", "if v_start is not null and v_room > 0 then", "if false then"),
    ),
    mutant(
        "place-close-behind-what-is-late",
        "What is committed a moment late waits for a full scan.",
        "sql/jobs/test_scan_start.py",
        sql("jobs/claim", "30 * (c_due - v_from[2])", "0"),
    ),
    mutant(
        "hint-that-is-over",
        "The place that a hint tells is good after its end.",
        "sql/jobs/test_scan_start.py",
        sql(
            "jobs/claim",
            "if v_from[1] > c_moment and ",
            "if ",
        ),
    ),
    mutant(
        "hint-from-the-future",
        "The clock went back, and the hint is good until it is there again.",
        "sql/jobs/test_scan_start.py",
        sql(
            "jobs/claim",
            "and v_from[1] <= c_moment + 3000000",
            "and true",
        ),
    ),
    mutant(
        "hint-of-another-call",
        "What another claim remembers is taken for this one's.",
        "sql/jobs/test_scan_start.py",
        sql(
            "base/scan_start",
            "= hashtext(split_part(current_setting(rota._scan_setting(name), true), '#', 1)"
            " || name)::text",
            "<> ''",
        ),
    ),
    mutant(
        "hint-before-the-urgent",
        "Who has a hint does not see a more urgent lane.",
        "sql/jobs/test_scan_start.py",
        sql(
            "jobs/claim",
            "and coalesce(u.own_lane, u.priority) < v_from[3]::integer",
            "and false",
        ),
    ),
    mutant(
        "hint-of-two-queues-before-the-urgent",
        "Who has a hint of two queues does not see a more urgent lane.",
        "sql/jobs/test_scan_start.py",
        sql(
            "jobs/claim",
            "elsif rota._next_lane(v_open, -32769, v_from[3]) = v_from[3] then",
            "else",
        ),
    ),
    mutant(
        "hint-of-two-queues-and-the-expired",
        "Who has a hint of two queues takes what has expired for the number of another job.",
        "sql/jobs/test_scan_start.py",
        sql(
            "jobs/claim",
            "case when (0 > any(v_ids)) is not true then"
            " array_agg(j.ctid order by coalesce(j.own_place, j.run_at), j.id) end",
            "array_agg(j.ctid order by coalesce(j.own_place, j.run_at), j.id)",
        ),
    ),
    mutant(
        "hint-of-a-second-queue-that-ages",
        "Of several queues the walk ends at the same place, however they are set.",
        "sql/jobs/test_scan_start.py",
        sql("jobs/claim", "case when o.ends[1] = all(o.ends) then o.ends[1] end", "v_now"),
    ),
    mutant(
        "hint-of-a-queue-that-is-full",
        "Where the walk of several queues begins is taken for that of those that are open.",
        "sql/jobs/test_scan_start.py",
        sql(
            "jobs/claim",
            "if cardinality(v_open) < cardinality(queues) then",
            "if false then",
        ),
    ),
    mutant(
        "claim-from-a-fair-queue-forgets-what-is-set",
        "A queue with fair shares is taken for one that has no other settings.",
        "sql/jobs/test_scan_start.py",
        sql("jobs/claim", "        limit 3\n", "        order by c.source limit 1\n"),
    ),
    mutant(
        "full-queue-walked-past-slots-that-are-gone",
        "Under a held snapshot a claim looks for a slot of a full queue from the first on.",
        "sql/waiting/test_limits.py",
        sql(
            "jobs/claim",
            ">= coalesce((rota._begin_scan('free ' || b.limit_name)).start, 0)",
            ">= 0",
        ),
    ),
    mutant(
        "settings-of-the-first-queue-for-all",
        "A claim of several queues reads the settings of the first.",
        "sql/jobs/test_claim.py sql/jobs/test_queues.py",
        sql(
            "jobs/claim",
            "v_configured <@ '{fair_queues,queues}' and cardinality(queues) = 1",
            "v_configured <@ '{fair_queues,queues}'",
        ),
    ),
    mutant(
        "hint-of-all-there-is",
        "What was found in the lane of the hint is taken for all that is due.",
        "sql/jobs/test_scan_start.py",
        sql(
            "jobs/claim",
            "              and coalesce(j.own_lane, j.priority) > v_from[3]::integer\n",
            "and false\n",
        ),
    ),
    mutant(
        "clock-of-the-transaction",
        "All functions take the begin of the transaction for the time of day.",
        "sql/jobs/test_claim.py sql/jobs/test_lease.py",
        sql("base/clock", "return clock_timestamp();", "return now();"),
    ),
    mutant(
        "lease-of-the-transaction",
        "A lease begins with the transaction, and may be over when it is given.",
        "sql/jobs/test_claim.py",
        sql(
            "jobs/claim",
            "locked_until = v_now + greatest(",
            "locked_until = now() + greatest(",
        ),
    ),
    mutant(
        "heartbeat-of-the-transaction",
        "A heartbeat in a long transaction extends the lease by less than it says.",
        "sql/jobs/test_lease.py",
        sql("jobs/lease", "    v_now := rota.now();\n", "    v_now := now();\n"),
    ),
    mutant(
        "lease-before-the-wait",
        "The lease of a heartbeat begins before the wait for the row.",
        "races/test_ending.py sql/jobs/test_lease.py",
        sql(
            "jobs/lease",
            """\
    perform rota._lock_lease(job_id, lease_token);
    v_now := rota.now();
""",
            """\
    v_now := rota.now();
    perform rota._lock_lease(job_id, lease_token);
""",
        ),
    ),
    mutant(
        "heartbeat-waits-for-strangers",
        "A worker that lost its lease learns it when the job's next claim is committed.",
        "sql/jobs/test_lease.py",
        sql(
            "jobs/lease",
            "    perform rota._lock_lease(job_id, lease_token);\n",
            "    perform from rota.jobs as j where j.id = heartbeat.job_id for update;\n",
        ),
    ),
    mutant(
        "heartbeat-keeps-quiet",
        "A worker is not told that its job shall be cancelled.",
        "sql/jobs/test_lease.py",
        sql(
            "jobs/lease",
            "returning j.locked_until, j.cancel_requested_at is not null",
            "returning j.locked_until, false",
        ),
    ),
    mutant(
        "heartbeats-fail-together",
        "A job that a trigger refuses costs the other jobs of its worker their leases.",
        "sql/jobs/test_lease.py",
        sql(
            "jobs/lease",
            "if rota._is_no_fault_of_a_row(sqlstate) then raise",
            "if true then raise",
        ),
    ),
    mutant(
        "heartbeats-told-before-they-are-written",
        "A heartbeat is told before one beside it fails, and once more when it is repeated.",
        "sql/jobs/test_lease.py",
        sql(
            "jobs/lease",
            "select b.* from beaten as b order by b.id;",
            "select b.* from beaten as b;",
        ),
    ),
    mutant(
        "heartbeats-keep-quiet",
        "A worker of many jobs is not told that one of them shall be cancelled.",
        "sql/jobs/test_lease.py client/test_worker.py",
        sql(
            "jobs/lease",
            "coalesce(b.is_cancel_requested, false)",
            "false",
        ),
    ),
    mutant(
        "claim-of-any-type",
        "A worker gets jobs for which it has no handler.",
        "sql/jobs/test_claim.py sql/waiting/test_pipelines.py client/test_worker.py",
        sql(
            "jobs/claim",
            "and (_lock_lanes.job_types is null or j.job_type = any(_lock_lanes.job_types))",
            "and true",
        ),
    ),
    mutant(
        "claim-with-a-hint-of-any-type",
        "A worker that has a hint gets jobs for which it has no handler.",
        "sql/jobs/test_scan_start.py",
        sql(
            "jobs/claim",
            "and (claim_jobs.job_types is null or j.job_type = any(claim_jobs.job_types))",
            "and true",
        ),
    ),
    mutant(
        "claim-of-one-too-many",
        "A claim takes one job more than was asked for.",
        "sql/jobs/test_claim.py",
        sql(
            "jobs/claim",
            "limit _lock_lanes.max_jobs - cardinality(v_ids) for",
            "limit _lock_lanes.max_jobs + 1 - cardinality(v_ids) for",
        ),
    ),
    mutant(
        "claim-of-the-least-urgent",
        "The lane with the highest number goes first.",
        "sql/jobs/test_claim.py",
        sql("jobs/claim", "select min(l.lane)", "select max(l.lane)"),
    ),
    mutant(
        "claim-in-any-order",
        "A worker gets the jobs of its claim in the order of the table.",
        "sql/jobs/test_claim.py",
        sql(
            "jobs/claim",
            "from (select unnest(v_rows) as row_id) as r where j.ctid = r.row_id returning",
            "where j.ctid = any(v_rows) returning",
        ),
    ),
)
