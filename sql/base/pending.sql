/*
 * base/pending.sql -- leave a check for maintenance.
 *
 * What one transaction makes possible it opens itself.  But two open transactions do not see
 * each other: a job ends while another comes in that waits for it.  Then the one that comes in,
 * or the one that could not lock what it would have opened, adds a check in its own
 * transaction; maintenance does it after the commit, when both are to be seen
 * (maintenance/pending.sql).  To add one is an insert, which never waits.
 */

/* Leave a check of each subject, due at once unless a time is given; never waits. */
create or replace function rota._add_checks(
    kind text, subjects text[], due_at timestamptz default null
)
    returns void language plpgsql as $$
begin
    insert into rota.pending_checks (kind, subject, due_at)
    select distinct _add_checks.kind, s.subject,
        coalesce(_add_checks.due_at, timestamptz '-infinity')
    from unnest(_add_checks.subjects) as s (subject);
    if found and due_at is null then perform rota._notify(''); end if;
end;
$$;
