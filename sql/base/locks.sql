/*
 * base/locks.sql -- locks of what has no row yet.
 *
 * Any login of a database can take any advisory lock, and keep it, with no right in rota.  So
 * where that would hold up jobs, the lock is a row or a table of ours, which needs a right.
 * An ordering key before its first job, a part of a limit before its first slot and a cell of
 * a rate have no row to lock.  The keys of their advisory locks come from a random number that
 * only the owner can read: so a login can take none that it has not seen another hold.
 *
 * Those that only say who waits need no such number: base/notify.sql.
 */

/* Try to lock a name until the end of the transaction.  A function reads the sequence in a
 * tenth of the time of a query.  Volatile, as what it calls, so that it is inlined. */
create or replace function rota._try_lock(name text)
    returns boolean language sql as $$
select pg_try_advisory_xact_lock(hashtextextended(
    name, coalesce(pg_sequence_last_value('rota.lock_seed'::regclass), 0)))
$$;
