/*
 * tables/retries.sql -- what failures of a kind cause, as operators have set it.
 */

create table rota.retry_rules (
    error_type text collate "C" not null,
    job_type text collate "C" not null,
    queue text collate "C" not null,
    retry_in interval,
    is_fatal boolean not null,
    pause_for interval,
    updated_at timestamptz not null default rota.now(),

    constraint retry_rules_pkey primary key (error_type, job_type, queue),
    constraint retry_rules_retry_in_check check (retry_in between '0' and '366 days'),
    constraint retry_rules_pause_for_check check (pause_for between '1 second' and '30 days'),
    constraint retry_rules_is_fatal_check check (not (is_fatal and retry_in is not null)),
    constraint retry_rules_given_check check (is_fatal or num_nonnulls(retry_in, pause_for) > 0)
);

comment on table rota.retry_rules is 'What a failure with an error of a type causes.';
comment on column rota.retry_rules.job_type is 'A job type, or * for all.';
comment on column rota.retry_rules.queue is 'A queue, or * for all.';
comment on column rota.retry_rules.retry_in is 'In place of the backoff; or null.';
comment on column rota.retry_rules.pause_for is
    'How long its job type is then paused, in the queue of the rule; null means no pause.';

create table rota.breakers (
    job_type text collate "C" not null,
    queue text collate "C" not null,
    max_failures integer,
    failed_percent integer,
    min_attempts integer not null,
    span interval not null,
    error_type text collate "C",
    pause_for interval not null,
    probes integer not null,
    tag uuid not null default gen_random_uuid(),
    updated_at timestamptz not null default rota.now(),

    constraint breakers_pkey primary key (job_type, queue),
    constraint breakers_tag_key unique (tag),
    constraint breakers_span_check check (span between '1 second' and '1 hour'),
    constraint breakers_pause_for_check check (pause_for between '1 second' and '1 day'),
    constraint breakers_max_failures_check check (max_failures between 1 and 1000),
    constraint breakers_failed_percent_check check (failed_percent between 1 and 100),
    constraint breakers_given_check check (num_nonnulls(max_failures, failed_percent) > 0)
);

comment on table rota.breakers is
    'Job types that are paused automatically when they fail too often.';
comment on column rota.breakers.max_failures is
    'This many failures in a row open it; null means that none do.';
comment on column rota.breakers.failed_percent is
    'This many failures of a hundred attempts in a span open it; null means that none do.';
comment on column rota.breakers.min_attempts is 'With fewer attempts the share does not count.';
comment on column rota.breakers.error_type is 'Only such errors count; null means all.';
comment on column rota.breakers.probes is 'This many have to succeed before all may run again.';
comment on column rota.breakers.tag is
    'That of its state; one that is set anew after a reset has another.';

create table rota.breaker_states (
    tag uuid primary key,
    job_type text collate "C" not null,
    queue text collate "C" not null,
    counts_from timestamptz not null default rota.now(),
    times_opened integer not null default 0,
    retry_at timestamptz,
    probed_at timestamptz,
    updated_at timestamptz not null default rota.now(),

    constraint breaker_states_probed_at_check check (probed_at is null or retry_at is not null)
);

comment on table rota.breaker_states is
    'How breakers stand; the row of one that was removed stays until the next tick.';
comment on column rota.breaker_states.counts_from is 'Attempts that began before do not count.';
comment on column rota.breaker_states.times_opened is
    'How often it has opened in a row; the pause doubles each time.';
comment on column rota.breaker_states.retry_at is
    'When its probes begin, or began; null while it is closed and all may run.';
comment on column rota.breaker_states.probed_at is
    'Since when jobs run as probes; null while it is closed, or open.';

create table rota.retry_budgets (
    queue text collate "C" not null,
    tokens float8 not null default 1000000,
    filled_at timestamptz not null default rota.now(),

    constraint retry_budgets_pkey primary key (queue)
);

comment on table rota.retry_budgets is
    'How many retries may begin in the queues that have, or had, a budget.';
comment on column rota.retry_budgets.tokens is
    'This many could begin at filled_at; more than ten seconds'' worth does not count.';
