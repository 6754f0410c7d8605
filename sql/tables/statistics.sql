/*
 * tables/statistics.sql -- how many jobs ended, how, and how long they waited and ran.
 *
 * job_stats has a row per minute, queue, job type and outcome, and such rows for hours and
 * days.  They outlive the jobs that they count.  Times are counted in buckets, each a
 * tenth longer than the one before it, so that any percentile is known within 5 %.
 *
 * maintenance/statistics.sql explains how maintenance counts each end once, and it alone
 * writes these tables, except that functions that take jobs out of the history early leave
 * rows in restored_ends.
 */

create table rota.job_stats (
    step text collate "C" not null,
    starts_at timestamptz not null,
    queue text collate "C" not null,
    job_type text collate "C" not null,
    outcome text collate "C" not null,
    total bigint not null,
    total_wait interval not null,
    longest_wait interval,
    wait_buckets smallint[] not null,
    wait_counts bigint[] not null,
    total_run interval not null,
    longest_run interval,
    run_buckets smallint[] not null,
    run_counts bigint[] not null,
    waits bigint not null default 0,
    runs bigint not null default 0,

    constraint job_stats_pkey primary key (step, starts_at, queue, job_type, outcome),
    -- To add up what a hand has written stops no statistics.
    constraint job_stats_total_wait_check check (total_wait between '0' and '5000000 years'),
    constraint job_stats_total_run_check check (total_run between '0' and '5000000 years')
);

comment on table rota.job_stats is
    'Ended attempts and jobs by minute, hour or day in UTC, queue, job type and outcome.';
comment on column rota.job_stats.outcome is
    'succeeded, dead or cancelled for jobs, and for stages of pipelines; failed for attempts.';
comment on column rota.job_stats.wait_buckets is
    'Waits up to 1.1 to the power of this milliseconds, and longer than the bucket before.';

create table rota.stats_progress (
    counted_until timestamptz not null,
    complete_until timestamptz not null,
    sampled_at timestamptz not null,
    open_xids xid[] not null default '{}',
    hours_until timestamptz not null default 'epoch',
    days_until timestamptz not null default 'epoch',
    is_behind boolean not null default false
);

-- A restore of the data alone would add a second one.
create unique index stats_progress_one_row_idx on rota.stats_progress ((true));

comment on table rota.stats_progress is 'How far the statistics have come; one row.';
comment on column rota.stats_progress.counted_until is
    'Jobs that ended until then are counted, except those that transactions of late_xids '
    'ended.';
comment on column rota.stats_progress.complete_until is
    'Everything that ended until then is counted, whatever commits late.';
comment on column rota.stats_progress.open_xids is
    'Transactions that had ended jobs, or let some wait for others, and were open when it was '
    'last looked, at sampled_at.';
comment on column rota.stats_progress.hours_until is 'Until then hours have what minutes have.';
comment on column rota.stats_progress.days_until is 'The rows of days, what the hours have.';

create table rota.late_xids (
    xid xid not null,
    since timestamptz not null,
    until timestamptz
);

comment on table rota.late_xids is
    'Transactions that ended jobs, or let some wait for others, after this time and went on '
    'for long, to be counted after their end.';
comment on column rota.late_xids.until is
    'Where counting its rows ends; null while the transaction is open.';

create table rota.restored_ends (
    queue text collate "C" not null,
    job_type text collate "C" not null,
    status text collate "C" not null,
    waited interval,
    ran interval,
    finished_at timestamptz not null,
    ended_by xid not null,

    constraint restored_ends_waited_check check (waited < '10000 years'),
    constraint restored_ends_ran_check check (ran < '10000 years')
);

create index restored_ends_finished_at_idx on rota.restored_ends (finished_at);

comment on table rota.restored_ends is
    'What an operator took out of the history before it was counted.';

create table rota.counted_jobs (
    round bigint not null,
    queue text collate "C" not null,
    job_type text collate "C" not null,
    status text collate "C" not null,
    is_due boolean not null,
    jobs bigint not null,
    first_run_at timestamptz,

    constraint counted_jobs_pkey primary key (round, queue, job_type, status, is_due)
);

comment on table rota.counted_jobs is
    'Live and dead jobs by queue, type and status, as maintenance counts them where they are '
    'many.';
comment on column rota.counted_jobs.round is 'Goes over all pages; the last whole one is read.';

create table rota.count_progress (
    round bigint not null default 0,
    counted_at timestamptz not null default 'epoch',
    began_at timestamptz,
    pages_done bigint not null default 0
);

create unique index count_progress_one_row_idx on rota.count_progress ((true));

comment on table rota.count_progress is 'How far the round of counting has come; one row.';
comment on column rota.count_progress.began_at is
    'When the current round began; null between two.';
