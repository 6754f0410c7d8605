"""Endings: each of these loses how a job ended, counts it wrongly, or ends what still runs."""

from __future__ import annotations

from mutants.mutant import mutant, sql

_STALE = "from rota.jobs as j where j.status = 'running'"
ENDINGS = (
    mutant(
        "stage-left-out-by-a-hand",
        "A job whose stage a hand has left out keeps the jobs beside it from ending.",
        "sql/waiting/test_pipelines.py",
        sql("jobs/finish", "coalesce(j.stage, '')", "j.stage"),
    ),
    mutant(
        "batch-waits-for-a-run",
        "A batch of endings waits for a run of a pipeline that another session has locked.",
        "races/test_racing_pipelines.py",
        sql(
            "jobs/finish",
            "for update skip locked\n    )\n    select array_agg(h.id)",
            "for update\n    )\n    select array_agg(h.id)",
        ),
    ),
    mutant(
        "batch-waits-for-what-is-held",
        "A batch that holds some jobs waits for another: two of them may deadlock.",
        "races/test_ending.py",
        sql(
            "base/checks",
            """\
              and j.id <> all(v_held)
            for update skip locked
""",
            """\
              and j.id <> all(v_held)
            for update
""",
        ),
    ),
    mutant(
        "batch-tries-once",
        "What a claim holds until its commit is told to be busy at once.",
        "races/test_ending.py",
        sql("base/checks", "exit when v_try = 11 or", "exit when true or"),
    ),
    mutant(
        "finish-apart",
        "The job is written to the history first and deleted after it, so two may write it.",
        "races/test_ending.py",
        sql(
            "jobs/finish",
            """\
        delete from rota.jobs as j
        where j.id = any(_archive_jobs.job_ids)""",
            """\
        select j.*
        from rota.jobs as j
        where j.id = any(_archive_jobs.job_ids)""",
        ),
        sql(
            "jobs/finish",
            "        returning j.*\n",
            "",
        ),
        sql(
            "jobs/finish",
            "    if v_keyed is not null then",
            """\
    delete from rota.jobs as j where j.id = any(v_ended);
    if v_keyed is not null then""",
        ),
    ),
    mutant(
        "finish-without-flush",
        "The commit of a finish is answered before it is on the disk.",
        "faults/test_sessions.py",
        sql(
            "jobs/finish",
            "begin\n    with ended as (",
            """\
begin
    perform set_config('synchronous_commit', 'off', true);
    with ended as (""",
        ),
    ),
    mutant(
        "finish-waits-for-a-locked-row",
        "One row that somebody holds keeps a worker from finishing all its jobs.",
        "sql/jobs/test_finish.py client/test_locked_rows.py",
        sql(
            "jobs/finish",
            "_finish_running.results, _finish_running.next_stages, true);",
            "_finish_running.results, _finish_running.next_stages);",
        ),
    ),
    mutant(
        "finish-in-the-order-given",
        "Two batches that share jobs lock them in the order in which they were named.",
        "sql/jobs/test_finish.py races/test_load.py",
        sql(
            "jobs/finish",
            """\
        delete from rota.jobs as j
        where j.id = any(_archive_jobs.job_ids)""",
            """\
        delete from rota.jobs as j
        using unnest(_archive_jobs.job_ids) as i (id)
        where j.id = i.id""",
        ),
    ),
    mutant(
        "finish-of-what-waits",
        "A job that waits is ended as if it ran.",
        "sql/jobs/test_finish.py",
        sql("jobs/finish", "and j.status = _archive_jobs.old_status", "and true"),
    ),
    mutant(
        "rerun-lost",
        "The run that was asked for while the job ran never comes.",
        "sql/jobs/test_keys.py races/test_racing_keys.py",
        sql("jobs/finish", "    if v_keyed is not null then", "    if false then"),
    ),
    mutant(
        "finish-of-lists-with-nulls",
        "A list with a null in it is taken for one of jobs.",
        "sql/jobs/test_finish.py",
        sql(
            "jobs/finish",
            "and array_position(lease_tokens, null) is null) is not true",
            ") is not true",
        ),
    ),
    mutant(
        "finish-of-lists-from-zero",
        "Lists that do not begin at one are taken for plain ones.",
        "sql/jobs/test_finish.py",
        sql(
            "jobs/finish",
            "and array_lower(job_ids, 1) = 1 and cardinality(job_ids)",
            "and cardinality(job_ids)",
        ),
    ),
    mutant(
        "attempts-counted-by-fail",
        "An attempt counts when a failure is told, and who dies tells nothing.",
        "sql/jobs/test_claim.py sql/jobs/test_fail.py",
        sql("jobs/claim", "least(j.attempts, 2147483646) + 1,", "j.attempts,"),
        sql(
            "jobs/fail",
            "run_at = coalesce(_fail_running.run_at, j.run_at),",
            "run_at = coalesce(_fail_running.run_at, j.run_at), attempts = j.attempts + 1,",
        ),
        sql("jobs/fail", "then 0 else j.attempts - 1 end", "then 0 else j.attempts end"),
    ),
    mutant(
        "one-attempt-more",
        "A job has one attempt more than it may have.",
        "sql/jobs/test_fail.py sql/jobs/test_claim.py",
        sql(
            "jobs/fail",
            "v_job.attempts >= v_job.max_attempts",
            "v_job.attempts > v_job.max_attempts",
        ),
    ),
    mutant(
        "fatal-tried-again",
        "What can never succeed is tried again.",
        "sql/jobs/test_fail.py",
        sql(
            "jobs/fail",
            "when _fail_running.fatals[v_n] or v_job.attempts",
            "when v_job.attempts",
        ),
    ),
    mutant(
        "cancelled-tried-again",
        "A job whose cancel was asked for is tried again when it fails.",
        "sql/jobs/test_control.py sql/maintenance/test_sweep.py",
        sql("jobs/fail", "if v_job.cancel_requested_at is not null then", "if false then"),
    ),
    mutant(
        "refused-child-keeps-its-parent",
        "A child whose release a trigger refuses keeps its parent from finishing.",
        "sql/waiting/test_dependencies.py",
        sql("waiting/order", "if cardinality(job_ids) = 1 then", "raise; if true then"),
    ),
    mutant(
        "child-that-a-trigger-keeps-is-forgotten",
        "A child that a trigger keeps blocked, without an error, is never looked at again.",
        "sql/waiting/test_dependencies.py",
        sql("waiting/order", "return v_opened;", "return job_ids;"),
    ),
    mutant(
        "refused-child-keeps-its-siblings",
        "A child that a trigger does not let cancel keeps all others of a dead job waiting.",
        "sql/waiting/test_dependencies.py",
        sql("waiting/dependencies", "v_doubtful := v_cancelled;", "raise;"),
    ),
    mutant(
        "cancel-of-an-operator-taken-for-a-parents",
        "A retry brings back a job that an operator has cancelled, by how his reason begins.",
        "sql/waiting/test_dependencies.py",
        sql(
            "waiting/dependencies",
            "f.cancel_reason = any(rota._parent_reasons(p.id))",
            "f.cancel_reason like format('parent %s %%', p.id)",
        ),
    ),
    mutant(
        "refused-held-job-keeps-the-others",
        "A held job that a trigger refuses takes each slot that is given back, for nothing.",
        "sql/waiting/test_limits.py",
        sql("waiting/limits", "cardinality(v_refused) < 20", "cardinality(v_refused) < 1"),
    ),
    mutant(
        "refused-held-job-keeps-its-limit",
        "A held job that a trigger refuses keeps all others of its limit from finishing.",
        "sql/waiting/test_limits.py",
        sql(
            "waiting/limits",
            "if rota._is_no_fault_of_a_row(sqlstate) then raise; end if;",
            "raise;",
        ),
    ),
    mutant(
        "one-ending-stops-all",
        "One ending that a trigger refuses keeps all others of its call from being stored.",
        "sql/jobs/test_end.py client/test_locked_rows.py",
        sql("jobs/end", "    if c_count = 1 then", "    if true then"),
    ),
    mutant(
        "endings-wait-in-each-part",
        "A call with many refused endings waits for the rows that are held, part by part.",
        "sql/jobs/test_end.py",
        sql("base/checks", "v_try = 11 or rota.now() > until or not", "v_try = 11 or not"),
    ),
    mutant(
        "endings-wait-for-a-locked-row",
        "A call that ends many jobs waits for a row that somebody holds.",
        "sql/jobs/test_end.py",
        sql(
            "jobs/end",
            """\
    v_held := rota._hold_jobs(
        array(
            select case when t.outcome <> 'succeeded' then t.newest_id end
            from unnest(v_outcomes, rota._newest_refs(v_ids, v_tokens))
                with ordinality as t (outcome, newest_id, n)
            order by t.n
        ),
        v_tokens, until);
""",
            """\
    v_held := rota._newest_refs(v_ids, v_tokens);
""",
        ),
    ),
    mutant(
        "full-disk-is-refused",
        "A failure of the server is told of each ending as its own.",
        "sql/jobs/test_end.py",
        sql("jobs/end", "if rota._is_no_fault_of_a_row(error_code) then", "if false then"),
    ),
    mutant(
        "ending-given-twice-is-busy",
        "A worker that gives two endings of a job asks for ever what became of the second.",
        "sql/jobs/test_end.py",
        sql("jobs/end", "when t.held_id is null and rota._is_running", "when rota._is_running"),
    ),
    mutant(
        "failure-told-twice",
        "A failure that is told again, because the answer was lost, is refused.",
        "sql/jobs/test_fail.py client/test_worker.py",
        sql("jobs/fail", "and r.status in ('failed', 'dead', 'cancelled')", "and false"),
    ),
    mutant(
        "snooze-uses-an-attempt",
        "A job that is put off or given back has lost an attempt.",
        "sql/jobs/test_fail.py",
        sql("jobs/fail", "then 0 else j.attempts - 1 end", "then 0 else j.attempts end"),
    ),
    mutant(
        "rerun-with-the-attempts-of-before",
        "What was asked for while the job ran has only the attempts that were left to that.",
        "sql/jobs/test_keys.py",
        sql(
            "jobs/keys",
            "set attempts = 0, payload = r.job",
            "set payload = r.job",
        ),
    ),
    mutant(
        "failure-waited-before-its-job",
        "A failed attempt has waited since a time at which its job was not there.",
        "sql/maintenance/test_statistics.py",
        sql("jobs/fail", "greatest(v_job.run_at, v_job.created_at)", "v_job.run_at"),
    ),
    mutant(
        "give-back-forgets-the-cancel",
        "A job whose cancel was asked for is given back and runs again.",
        "sql/jobs/test_fail.py sql/jobs/test_control.py races/test_ending.py",
        sql(
            "jobs/fail",
            "array_agg(h.id) filter (where h.cancel_requested_at is not null),",
            "array_agg(h.id) filter (where false),",
        ),
    ),
    mutant(
        "release-waits-for-what-is-held",
        "Who gives jobs back waits for one and holds the others: two may deadlock.",
        "races/test_ending.py",
        sql(
            "jobs/fail",
            """\
    v_ids := rota._hold_jobs(
        rota._newest_refs(release_jobs.job_ids, release_jobs.lease_tokens),
        release_jobs.lease_tokens);
""",
            """\
    v_ids := rota._newest_refs(release_jobs.job_ids, release_jobs.lease_tokens);
""",
        ),
    ),
    mutant(
        "sweep-of-live-leases",
        "The sweep takes jobs whose lease is not over.",
        "sql/maintenance/test_sweep.py",
        sql(
            "maintenance/sweep",
            f"select j.id {_STALE} and j.locked_until < v_now",
            f"select j.id {_STALE}",
        ),
    ),
    mutant(
        "sweep-a-moment-early",
        "A lease that ends this very microsecond is taken back.",
        "sql/maintenance/test_sweep.py",
        sql(
            "maintenance/sweep",
            f"select j.id {_STALE} and j.locked_until < v_now",
            f"select j.id {_STALE} and j.locked_until <= v_now",
        ),
        sql(
            "maintenance/sweep",
            f"into v_first {_STALE} and j.locked_until < v_now",
            f"into v_first {_STALE} and j.locked_until <= v_now",
        ),
    ),
    mutant(
        "sweep-before-workers-come-back",
        "Jobs that ended while the server was away are run again, where another ticks.",
        "client/test_away.py",
        sql(
            "maintenance/sweep",
            "interval '0' and interval '3 seconds';\n",
            "interval '0' and interval '0';\n",
        ),
    ),
    mutant(
        "sweep-after-a-crash-by-the-start-of-the-postmaster",
        "Leases that ended while the server fell down are taken back before workers return.",
        "faults/test_sessions.py",
        sql(
            "maintenance/sweep",
            "where a.backend_type = 'walwriter'\n",
            "where false\n",
        ),
    ),
    mutant(
        "sweep-without-lock",
        "A heartbeat that comes while the sweep looks saves the job no more.",
        "races/test_ending.py",
        sql(
            "maintenance/sweep",
            "order by j.locked_until limit _lock_late.max_jobs for update skip locked",
            "order by j.locked_until limit _lock_late.max_jobs",
        ),
    ),
    mutant(
        "sweep-waits",
        "The sweep waits for a row that somebody holds, and all others with it.",
        "sql/maintenance/test_sweep.py races/test_ending.py",
        sql(
            "maintenance/sweep",
            "order by j.locked_until limit _lock_late.max_jobs for update skip locked",
            "order by j.locked_until limit _lock_late.max_jobs for update",
        ),
    ),
    mutant(
        "sweep-stops-at-a-bad-row",
        "One row that cannot be swept keeps all others.",
        "sql/maintenance/test_sweep.py sql/maintenance/test_tick.py",
        sql(
            "maintenance/sweep",
            "    foreach v_job_id in array",
            "    return 0;\n    foreach v_job_id in array",
        ),
    ),
    mutant(
        "sweep-hint-for-ever",
        "A session never looks again from the first lease on.",
        "sql/jobs/test_scan_start.py",
        sql(
            "maintenance/sweep",
            "rota._from_micros(c_scan.start); v_first timestamptz;",
            "rota._from_micros((string_to_array(rota._scan_start(kind), ' '))[2]::bigint);"
            " v_first timestamptz;",
        ),
    ),
    mutant(
        "backoff-without-cap",
        "The next try is put off without bounds.",
        "sql/base/test_backoff.py",
        sql(
            "base/backoff",
            "v_delay := least(v_delay, v_cap / (1 + v_jitter));",
            "null;",
        ),
    ),
    mutant(
        "backoff-above-its-cap",
        "The jitter goes beyond the cap.",
        "sql/base/test_backoff.py",
        sql("base/backoff", "v_cap / (1 + v_jitter)", "v_cap"),
    ),
    mutant(
        "backoff-without-jitter",
        "What failed together comes back together.",
        "sql/base/test_backoff.py",
        sql("base/backoff", "v_delay * (1 + v_jitter * (2 * random() - 1))", "v_delay"),
    ),
    mutant(
        "backoff-without-bounds",
        "After a thousand attempts a job that fails cannot even fail.",
        "sql/base/test_backoff.py",
        sql(
            "base/backoff",
            "power(2, least(v_attempt - 1, 62))",
            "power(2, v_attempt - 1)",
        ),
    ),
    mutant(
        "results-shifted",
        "Each job of a batch gets the result of the next one.",
        "sql/jobs/test_finish.py client/test_worker.py",
        sql(
            "jobs/finish",
            "(array_position(_archive_jobs.job_ids, e.id) - 1)",
            "array_position(_archive_jobs.job_ids, e.id)",
        ),
    ),
    mutant(
        "duration-of-an-object",
        "Five minutes that are given as an object are five seconds.",
        "sql/jobs/test_enqueue.py sql/jobs/test_end.py sql/waiting/test_pipelines.py",
        sql(
            "jobs/enqueue",
            "      and jsonb_typeof(e.item -> k.key) in ('object', 'array') limit 1;",
            "      and false;",
        ),
    ),
    mutant(
        "age-of-an-object",
        "An operator purges what is older than 30 seconds, and meant 30 days.",
        "sql/operations/test_acts.py",
        sql(
            "operations/acts",
            "if jsonb_typeof(value) in ('object', 'array') then raise data_exception; end if;",
            "",
        ),
    ),
    mutant(
        "null-of-another-outcome",
        "An ending whose worker writes all keys is refused, and its job runs again.",
        "sql/jobs/test_end.py",
        sql(
            "jobs/end",
            "jsonb_object_keys(jsonb_strip_nulls(ending - v_keys))",
            "jsonb_object_keys(ending - v_keys)",
        ),
    ),
)
