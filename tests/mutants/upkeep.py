"""Upkeep, wake-ups and rights: what nobody sees until it is missing."""

from __future__ import annotations

from mutants.mutant import mutant, sql

UPKEEP = (
    mutant(
        "tick-has-a-leader",
        "A tick that hangs with the lock keeps all others from ticking.",
        "sql/maintenance/test_tick.py",
        sql(
            "maintenance/tick",
            """\
        and not pg_try_advisory_xact_lock(hashtextextended('rota.tick', 0))
        and rota._was_ticked();""",
            """\
        and not pg_try_advisory_xact_lock(hashtextextended('rota.tick', 0));""",
        ),
    ),
    mutant(
        "tick-without-sweep",
        "A tick takes nothing back from workers that vanished.",
        "sql/maintenance/test_tick.py sql/maintenance/test_sweep.py",
        sql("maintenance/tick", "jobs_swept := rota.sweep_stale_leases(1000);", "jobs_swept := 0;"),
    ),
    mutant(
        "tick-stops-at-a-failure",
        "Where firing fails, a tick does nothing at all.",
        "sql/maintenance/test_tick.py",
        sql(
            "maintenance/tick",
            "raise warning 'firing failed and will be tried again: %', sqlerrm;",
            "raise;",
        ),
    ),
    mutant(
        "stale-lease-not-looked-for",
        "A tick does not see that there is something to take back.",
        "sql/maintenance/test_tick.py sql/maintenance/test_wakeups.py",
        sql("maintenance/tick", "return rota._has_stale_leases() or exists (", "return exists ("),
    ),
    mutant(
        "own-notes-taken-away",
        "A transaction that looks takes away its own notes, before others see what it did.",
        "races/test_waiting.py",
        sql("waiting/pending", "\n      and r.made_by <> v_me;", ";"),
    ),
    mutant(
        "head-freed-beside-its-parent",
        "The next of a line starts though it was just made to wait for a job.",
        "races/test_games.py",
        sql("waiting/order", "and not rota._has_parents(v_job_id)\n", "and true\n"),
    ),
    mutant(
        "forgotten-run-waited-for",
        "Who comes after a run that is being forgotten never gets an answer.",
        "races/test_pipelines.py",
        sql(
            "waiting/pipelines",
            "exit when v_status is distinct from 'live';",
            "exit when v_status <> 'live';",
        ),
    ),
    mutant(
        "rerun-before-its-time",
        "A job that was asked for again, for later, runs when the try under way has failed.",
        "sql/jobs/test_keys.py",
        sql("jobs/fail", "run_at := greatest(run_at, job.rerun_run_at);", "null;"),
    ),
    mutant(
        "note-lost",
        "A note that cannot be dealt with just now is taken away.",
        "races/test_waiting.py sql/waiting/test_order.py",
        sql("waiting/pending", "    elsif v_is_settled then\n", "    elsif true then\n"),
    ),
    mutant(
        "history-forgotten-early",
        "Retention deletes what is to be kept.",
        "sql/maintenance/test_retention.py",
        sql(
            "maintenance/retention",
            "r.statuses, r.queue, v_now - r.keep from",
            "r.statuses, r.queue, v_now from",
        ),
    ),
    mutant(
        "key-forgotten-early",
        "Retention forgets keys that are still unique.",
        "sql/jobs/test_keys.py",
        sql("maintenance/retention", "where o.kept_until < rota.now()", "where true"),
    ),
    mutant(
        "nobody-is-rung",
        "A job comes, and the workers sleep on until their next poll.",
        "sql/maintenance/test_wakeups.py",
        sql("jobs/enqueue", "perform rota._ring_doors(enqueue.queue, 1, '');", "null;"),
    ),
    mutant(
        "everybody-is-rung",
        "One job wakes all workers that sleep.",
        "sql/maintenance/test_wakeups.py",
        sql("maintenance/wakeups", "exit when v_rung >= _ring_doors.max_doors;", "null;"),
    ),
    mutant(
        "sure-beside-a-writer",
        "A worker goes to sleep, sure to hear of a job that has rung before it came.",
        "sql/maintenance/test_wakeups.py",
        sql(
            "maintenance/wakeups",
            "is_sure := age(pg_snapshot_xmin(pg_current_snapshot())::xid) = 0;",
            "is_sure := true;",
        ),
    ),
    mutant(
        "short-retry-not-rung",
        "Who sleeps does not hear of a retry that is due before the next poll.",
        "sql/maintenance/test_wakeups.py client/test_wakeups.py",
        sql("jobs/fail", "perform rota._ring_for(array[job.id]);", "null;"),
    ),
    mutant(
        "next-time-without-notes",
        "When a line may go on is not told to who asks for the next time.",
        "sql/maintenance/test_next_due.py client/test_wakeups.py",
        sql("maintenance/next_due", "                where j.hold = 'time'\n", "                where false\n"),
    ),
    mutant(
        "round-trip-hides-the-lost",
        "The call that finishes and claims does not tell what was lost.",
        "sql/jobs/test_round_trip.py",
        sql("jobs/round_trip", "where f.outcome in ('lost', 'busy');", "where false;"),
    ),
    mutant(
        "public-may-execute",
        "Whoever may connect may call every function.",
        "sql/access/test_grants.py contract/test_catalog.py",
        sql("access/grants", "    revoke all on all routines in schema rota from public;\n", ""),
    ),
    mutant(
        "observer-may-cancel",
        "Who may only look can cancel jobs.",
        "sql/access/test_grants.py contract/test_docs.py",
        sql(
            "access/grants",
            "('operator', 'function', 'cancel_job')",
            "('observer', 'function', 'cancel_job')",
        ),
    ),
    mutant(
        "old-grants-stay",
        "What was granted once to one of our roles is never taken back.",
        "sql/access/test_grants.py",
        sql(
            "access/grants",
            """\
        execute format('revoke all on all routines in schema rota from %I', 'rota_' || v_role);
""",
            "",
        ),
    ),
    mutant(
        "search-path-of-the-caller",
        "One function finds its operators on the search_path of whoever calls it.",
        "contract/test_catalog.py contract/test_style.py",
        sql(
            "base/clock",
            """\
    stable
    security definer
    set search_path = pg_catalog, pg_temp
""",
            """\
    stable
    security definer
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
    returns void
    language plpgsql
    security definer
""",
            """\
    message text default null
)
    returns void
    language plpgsql
""",
        ),
    ),
)
