/*
 * base/pending.sql -- leave a check for maintenance.
 *
 * A transaction itself makes ready the jobs that it unblocks.  But two open transactions do
 * not see each other: one ends a job while the other enqueues a job that waits for it.  Then
 * the enqueuing transaction, or one that could not lock the job that it would have unblocked,
 * adds a check; maintenance does the check after the commit, when both are visible
 * (maintenance/pending.sql).  Adding one is an insert, which never waits.
 */

/* Leave a check of each subject, due at once unless a time is given; never waits. */
create or replace function rota._add_checks(
    kind text, subjects text[], due_at timestamptz default null
) returns void language plpgsql as $$
begin
    insert into rota.pending_checks (kind, subject, due_at)
    select distinct _add_checks.kind, s.subject,
        coalesce(_add_checks.due_at, timestamptz '-infinity')
    from unnest(_add_checks.subjects) as s (subject);
    if found and due_at is null then perform rota._notify(''); end if;
end $$;

/* Whether all transactions are over that were there when a check of this subject was deferred
 * for the first time: those that come later see what made it necessary. */
create or replace function rota._has_outlasted_others(kind text, subject text)
    returns boolean language plpgsql stable as $$
begin
    return exists (
        select from rota.pending_checks as c
        where c.kind = _has_outlasted_others.kind and c.subject = _has_outlasted_others.subject
          -- Those that have an index by subject: there may be very many for later.
          and c.kind = any('{limit,queue,slots}') and c.due_at > '-infinity' and c.deferrals > 0
          and c.made_by <= pg_snapshot_xmin(pg_current_snapshot())
    );
end $$;
