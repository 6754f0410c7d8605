"""Who may call and read what: the one table that the grants are measured against.

A line is a function, an x in the column of each role that may call it.  What is not in the
table, which is every function whose name begins with _, is for nobody but the owner; and
nobody is a role that has no grant at all.  Views and tables are read, never written.

Functions that only read need no line: those that grants.sql has in its list for observers are
for observers and operators, and the matrix wants each of them to be stable.
"""

from __future__ import annotations

import re
from pathlib import Path

SQL = Path(__file__).resolve().parents[2] / "sql"
ROLES = ("producer", "worker", "operator", "observer", "nobody")

_CALLS = """
                      producer  worker  operator  observer
    enqueue               x       .         .         .
    enqueue_many          x       .         .         .
    enqueue_to            x       .         .         .
    find_live_keys        x       .         .         .
    start_pipeline        x       .         .         .
    wait_for_result       x       .         .         .

    waiting_forwards      .       x         .         .
    take_forwards         .       x         .         .
    end_forwards          .       x         .         .
    receive_jobs          .       x         .         .
    waiting_moves         .       x         .         .
    take_moves            .       x         .         .
    receive_moves         .       x         .         .
    end_moves             .       x         .         .
    claim_jobs            .       x         .         .
    complete_effect       .       x         .         .
    effect_result         .       x         .         .
    end_jobs              .       x         .         .
    fail_job              .       x         .         .
    finish_and_claim      .       x         .         .
    finish_job            .       x         .         .
    finish_jobs           .       x         .         .
    deregister_worker         .       x         .         .
    heartbeat             .       x         .         .
    heartbeat_jobs        .       x         .         .
    record_effect         .       x         .         .
    release_jobs          .       x         .         .
    report_worker         .       x         .         .
    set_progress          .       x         .         .
    snooze_job            .       x         .         .
    stop_waiting          .       x         .         .
    untaken_jobs          .       x         .         .
    wait_for_jobs         .       x         .         .
    withdraw_effect       .       x         .         .

    grant_queue           .       .         .         .
    revoke_queue          .       .         .         .

    set_database_number   .       .         .         .
    front_statements      .       .         .         .

    sweep_stale_leases    .       x         x         .
    tick                  .       x         x         .
    tick_loop             .       x         x         .

    cancel_job            .       .         x         .
    act_on_jobs           .       .         x         .
    plan_queue_move       .       .         x         .
    queue_move_facts      .       .         x         .
    receive_plan          .       .         x         .
    begin_queue_move      .       .         x         .
    end_queue_move        .       .         x         .
    queue_move_status     .       .         x         .
    define_pipeline       .       .         x         .
    disable_schedule      .       .         x         .
    drop_pipeline         .       .         x         .
    enable_schedule       .       .         x         .
    grant_statements      .       .         x         .
    pause_queue           .       .         x         .
    pause_type            .       .         x         .
    pause_all             .       .         x         .
    resume_type           .       .         x         .
    resume_all            .       .         x         .
    restart_pipeline      .       .         x         .
    reschedule_job        .       .         x         .
    resume_ordering_key            .       .         x         .
    resume_queue          .       .         x         .
    retry_job             .       .         x         .
    run_schedule_now      .       .         x         .
    schedule_job          .       .         x         .
    set_archive           .       .         x         .
    set_limit             .       .         x         .
    set_breaker           .       .         x         .
    set_priority          .       .         x         .
    set_queue             .       .         x         .
    set_retry_rule        .       .         x         .
    retry_with_dependants .       .         x         .
    set_type              .       .         x         .
    settle_effect         .       .         x         .
    start_ticker          .       .         x         .
    stop_ticker           .       .         x         .
    unschedule_job        .       .         x         .

    database_number       x       x         x         x
    database_number_of    x       x         x         x
    describe_schedule     x       x         x         x
    next_run              x       x         x         x
    now                   x       x         x         x
    upcoming_runs         x       x         x         x
    version               x       x         x         x
"""

_READS = """
                      producer  worker  operator  observer
    dead_jobs             .       .         x         x
    dependencies          .       .         x         x
    effects               .       .         x         x
    error_groups          .       .         x         x
    finished_jobs         .       .         .         .
    finished_jobs_dead    .       .         .         .
    finished_jobs_done    .       .         .         .
    occurrences           .       .         x         x
    hourly_stats          .       .         x         x
    idempotency_keys      .       .         .         .
    job_definitions       .       .         x         x
    job_errors            .       .         x         x
    job_runs              .       .         x         x
    _ends                 .       .         .         .
    _runs                 .       .         .         .
    _barred_runs          .       .         .         .
    _visible_runs         .       .         .         .
    _workers              .       .         .         .
    jobs                  .       .         .         .
    id_timeline           .       .         .         .
    lock_seed             .       .         .         .
    jobs_id_seq           .       .         .         .
    configured_names      .       .         .         .
    fair_queues           .       .         .         .
    limit_parts           .       .         .         .
    limit_slots           .       .         .         .
    limit_slots_version_seq .     .         .         .
    limit_starts          .       .         .         .
    limit_stats           .       .         x         x
    limits                .       .         x         x
    limits_to_count       .       .         .         .
    pipeline_stages       .       .         x         x
    stage_runs            .       .         x         x
    receipts              .       .         .         .
    reruns                .       .         .         .
    reruns_id_seq         .       .         .         .
    queue_moves           .       .         x         x
    moved_jobs            .       .         x         x
    queue_grants          .       .         x         x
    worker_starts         .       .         x         x
    queue_stats           .       .         x         x
    queues                .       .         x         x
    job_types             .       .         x         x
    pauses                .       .         x         x
    archive               .       .         .         .
    retry_rules           .       .         x         x
    breakers              .       .         x         x
    breaker_states        .       .         x         x
    retry_budgets         .       .         x         x
    audit_log             .       .         x         x
    audit_log_id_seq      .       .         .         .
    pending_checks        .       .         .         .
    job_stats             .       .         .         .
    stats_progress        .       .         .         .
    late_xids             .       .         .         .
    restored_ends         .       .         .         .
    counted_jobs          .       .         .         .
    count_progress        .       .         .         .
    pending_checks_id_seq .       .         .         .
    running_jobs          .       .         x         x
    stale_jobs            .       .         x         x
    halted_keys            .       .         x         x
    key_starts             .       .         .         .
    key_starts_id_seq      .       .         .         .
    lane_starts            .       .         .         .
    lane_starts_id_seq     .       .         .         .
    ticker_health         .       .         x         x
    unknown_effects       .       .         x         x
    worker_health         .       .         x         x
    upgrade_log           .       .         .         .
    manifest              .       .         .         .
    maintenance           .       .         .         .
    workers               .       .         x         x
"""


def _read(table: str) -> dict[str, set[str]]:
    heading, *lines = (line.split() for line in table.splitlines() if line.strip())
    return {
        name: {role for role, mark in zip(heading, marks, strict=True) if mark == "x"}
        for name, *marks in lines
    }


def _observed() -> dict[str, str]:
    """Return the functions in the list for observers, and what they take."""
    grants = (SQL / "access" / "grants.sql").read_text()
    pattern = r"\('{observer}', 'function', '{([a-z_,'\s]+)}'\)"
    (names,) = re.findall(pattern, grants)
    sources = "\n".join(path.read_text() for path in SQL.glob("*/*.sql"))
    signature = r"create or replace function rota\.{}\(([^()]*)\)"
    return {
        name: re.findall(signature.format(name), sources)[0]
        for name in re.findall(r"[a-z_]+", names)
    }


OBSERVED = _observed()
CALLERS = {**_read(_CALLS), **{name: {"operator", "observer"} for name in OBSERVED}}
"""Public functions, each with the roles that may call it."""
READERS = _read(_READS)
"""Relations, each with the roles that may read it; partitions by time are left out."""
FUNCTIONS = {role: {name for name, may in CALLERS.items() if role in may} for role in ROLES}
READABLE = {role: {name for name, may in READERS.items() if role in may} for role in ROLES}
