"""Upkeep, wake-ups and rights: what nobody sees until it is missing."""

from __future__ import annotations

from mutants.mutant import mutant, sql

UPKEEP = (
    mutant(
        "tick-has-a-leader",
        "A tick that hangs with the lock keeps all others from ticking.",
        "sql/test_53_tick.py",
        sql(
            "53_tick",
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
        "sql/test_53_tick.py sql/test_50_sweep.py",
        sql("53_tick", "jobs_swept := rota.sweep_stale_leases(1000);", "jobs_swept := 0;"),
    ),
    mutant(
        "tick-stops-at-a-failure",
        "Where firing fails, a tick does nothing at all.",
        "sql/test_53_tick.py",
        sql(
            "53_tick",
            "raise warning 'firing failed and will be tried again: %', sqlerrm;",
            "raise;",
        ),
    ),
    mutant(
        "stale-lease-not-looked-for",
        "A tick does not see that there is something to take back.",
        "sql/test_53_tick.py sql/test_62_wakeups.py",
        sql("53_tick", "return rota._has_stale_leases() or exists (", "return exists ("),
    ),
    mutant(
        "own-notes-taken-away",
        "A transaction that looks takes away its own notes, before others see what it did.",
        "races/test_waiting.py",
        sql("55_rechecks", "\n      and r.made_by <> v_me;", ";"),
    ),
    mutant(
        "head-freed-beside-its-parent",
        "The next of a line starts though it was just made to wait for a job.",
        "races/test_games.py",
        sql("56_order", "and not rota._has_parents(v_job_id)\n", "and true\n"),
    ),
    mutant(
        "forgotten-run-waited-for",
        "Who comes after a run that is being forgotten never gets an answer.",
        "races/test_pipelines.py",
        sql(
            "59_pipelines",
            "exit when v_status is distinct from 'live';",
            "exit when v_status <> 'live';",
        ),
    ),
    mutant(
        "rerun-before-its-time",
        "A job that was asked for again, for later, runs when the try under way has failed.",
        "sql/test_49_keys.py",
        sql("45_fail", "run_at := greatest(run_at, job.rerun_run_at);", "null;"),
    ),
    mutant(
        "note-lost",
        "A note that cannot be dealt with just now is taken away.",
        "races/test_waiting.py sql/test_56_order.py",
        sql("55_rechecks", "    elsif v_is_settled then\n", "    elsif true then\n"),
    ),
    mutant(
        "history-forgotten-early",
        "Retention deletes what is to be kept.",
        "sql/test_52_retention.py",
        sql(
            "52_retention",
            "r.statuses, r.queue, v_now - r.keep from",
            "r.statuses, r.queue, v_now from",
        ),
    ),
    mutant(
        "key-forgotten-early",
        "Retention forgets keys that are still unique.",
        "sql/test_49_keys.py",
        sql("52_retention", "where o.kept_until < rota.now()", "where true"),
    ),
    mutant(
        "nobody-is-rung",
        "A job comes, and the workers sleep on until their next poll.",
        "sql/test_62_wakeups.py",
        sql("40_enqueue", "perform rota._ring_doors(enqueue.queue, 1, '');", "null;"),
    ),
    mutant(
        "everybody-is-rung",
        "One job wakes all workers that sleep.",
        "sql/test_62_wakeups.py",
        sql("62_wakeups", "exit when v_rung >= _ring_doors.max_doors;", "null;"),
    ),
    mutant(
        "sure-beside-a-writer",
        "A worker goes to sleep, sure to hear of a job that has rung before it came.",
        "sql/test_62_wakeups.py",
        sql(
            "62_wakeups",
            "is_sure := age(pg_snapshot_xmin(pg_current_snapshot())::xid) = 0;",
            "is_sure := true;",
        ),
    ),
    mutant(
        "short-retry-not-rung",
        "Who sleeps does not hear of a retry that is due before the next poll.",
        "sql/test_62_wakeups.py client/test_wakeups.py",
        sql("45_fail", "perform rota._ring_for(array[job.id]);", "null;"),
    ),
    mutant(
        "next-time-without-notes",
        "When a line may go on is not told to who asks for the next time.",
        "sql/test_65_next_due.py client/test_wakeups.py",
        sql("65_next_due", "where r.due_at > _next_note_at.since", "where false"),
    ),
    mutant(
        "round-trip-hides-the-lost",
        "The call that finishes and claims does not tell what was lost.",
        "sql/test_63_round_trip.py",
        sql("63_round_trip", "where f.outcome in ('lost', 'busy');", "where false;"),
    ),
    mutant(
        "public-may-execute",
        "Whoever may connect may call every function.",
        "sql/test_90_grants.py contract/test_catalog.py",
        sql("90_grants", "    revoke all on all routines in schema rota from public;\n", ""),
    ),
    mutant(
        "observer-may-cancel",
        "Who may only look can cancel jobs.",
        "sql/test_90_grants.py contract/test_docs.py",
        sql(
            "90_grants",
            "('operator', 'function', 'cancel_job')",
            "('observer', 'function', 'cancel_job')",
        ),
    ),
    mutant(
        "old-grants-stay",
        "What was granted once to one of our roles is never taken back.",
        "sql/test_90_grants.py",
        sql(
            "90_grants",
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
            "43_heartbeat",
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
        "sql/test_90_grants.py contract/test_catalog.py",
        sql(
            "43_heartbeat",
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
