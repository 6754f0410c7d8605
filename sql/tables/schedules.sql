/*
 * tables/schedules.sql -- schedules: which jobs to make, and when.
 *
 * A definition is a row, with the time of its next run in it.  Only this row decides what is
 * due: every tick, however late and however often, finds the same.
 *
 * occurrences: one row for each planned time that a tick has processed.  Its key guarantees at
 * most one job for a planned time, whatever the clock does and whichever session ticks; and it
 * records the outcome of a planned time without a job.  Retention deletes rows; from then on
 * last_run_at, which never goes back, replaces them.
 */

create table rota.job_definitions (
    name text collate "C" primary key,
    job_type text collate "C" not null,
    queue text collate "C" not null,
    payload jsonb not null,
    schedule text collate "C" not null,
    source text collate "C",
    kind text collate "C" not null generated always as (
        coalesce(
            lower(substring(schedule, '(?i)^[[:space:]]*(every|after)(?![[:alnum:]_])')),
            'cron')
    ) stored,
    time_zone text collate "C" not null,
    priority smallint not null,
    max_attempts integer,
    lease interval,
    time_limit interval,
    headers jsonb,
    backoff jsonb,
    catch_up text collate "C" not null,
    catch_up_window interval,
    catch_up_max integer not null,
    overlap text collate "C" not null,
    jitter interval not null,
    starts_at timestamptz,
    ends_at timestamptz,
    is_enabled boolean not null default true,
    disabled_at timestamptz,
    disabled_by text,
    last_error text,
    anchored_at timestamptz not null,
    next_run_at timestamptz,
    last_run_at timestamptz,
    last_job_id bigint,
    created_at timestamptz not null default rota.now(),
    updated_at timestamptz not null default rota.now(),

    constraint job_definitions_catch_up_check check (catch_up in ('skip', 'one', 'all')),
    constraint job_definitions_catch_up_max_check check (catch_up_max between 1 and 1000),
    constraint job_definitions_overlap_check check (overlap in ('allow', 'skip', 'queue')),
    constraint job_definitions_is_enabled_check
        check (is_enabled = (disabled_at is null) and (is_enabled or next_run_at is null)),
    constraint job_definitions_next_run_at_check
        check (isfinite(next_run_at) and next_run_at > coalesce(last_run_at, '-infinity'))
);

create index job_definitions_next_run_at_idx on rota.job_definitions (next_run_at)
    where next_run_at is not null;

comment on table rota.job_definitions is
    'Schedules: which job to make, and when; a null setting of the jobs means that of the '
    'queue.';
comment on column rota.job_definitions.source is
    'The program whose code declares it, and which removes it once it no longer does; or null.';
comment on column rota.job_definitions.kind is
    'What its times are counted from: cron (a wall clock), every (an anchor) or after (the end '
    'of the last job).';
comment on column rota.job_definitions.catch_up is
    'What happens to planned times that passed without a tick: skip, one or all.';
comment on column rota.job_definitions.catch_up_window is
    'Planned times longer ago make no job; null means 1 minute for skip, else no limit.';
comment on column rota.job_definitions.catch_up_max is 'With all, so many at once, the newest.';
comment on column rota.job_definitions.overlap is
    'While the last job is live: allow another, skip it, or queue it behind.';
comment on column rota.job_definitions.jitter is 'Each job may start up to so much later.';
comment on column rota.job_definitions.disabled_by is
    'The database role that disabled it; null if an error did, which is in last_error.';
comment on column rota.job_definitions.anchored_at is
    'What "every" counts from: starts_at, or when this schedule was given.';
comment on column rota.job_definitions.next_run_at is
    'The next planned time; null while disabled, after ends_at, or until the last job ends.';
comment on column rota.job_definitions.last_run_at is
    'The latest planned time that a tick has processed; never goes back.';

create table rota.occurrences (
    definition text collate "C" not null,
    scheduled_for timestamptz not null,
    outcome text collate "C" not null,
    job_id bigint,
    recorded_at timestamptz not null,

    constraint occurrences_pkey primary key (definition, scheduled_for),
    constraint occurrences_outcome_check check (outcome in ('enqueued', 'skipped', 'missed')
        and (outcome = 'enqueued') = (job_id is not null))
);

create index occurrences_recorded_at_idx on rota.occurrences (recorded_at);

comment on table rota.occurrences is
    'Planned times that a tick has processed: at most one job for each, ever.';
comment on column rota.occurrences.outcome is
    'enqueued: it has a job; skipped: the last job was live; missed: the first of those that '
    'came too late for catch_up.';

-- What _parse_schedule() makes of a text.  A field is a set of bits, one for each value.
create type rota.parsed_schedule as (
    kind text collate "C",
    period interval,
    seconds bigint,
    minutes bigint,
    hours bigint,
    days bigint,
    months bigint,
    weekdays bigint,
    is_both boolean,
    is_fixed boolean
);

comment on type rota.parsed_schedule is 'A schedule text as sets of numbers.';
