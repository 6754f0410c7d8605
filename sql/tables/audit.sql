/*
 * tables/audit.sql -- what operators did.
 *
 * One row for each act: on one job or many, on a setting, a pause, a schedule or an effect.
 * The transaction of the act writes the row, so neither exists without the other.
 */

create table rota.audit_log (
    id bigint generated always as identity primary key,
    acted_at timestamptz not null default rota.now(),
    role text collate "C" not null default session_user,
    actor text default rota._cut(nullif(current_setting('rota.actor', true), ''), 255),
    act text collate "C" not null,
    filter jsonb,
    jobs integer,
    job_ids bigint[],
    before jsonb,
    after jsonb
);

create index audit_log_acted_at_idx on rota.audit_log (acted_at);
create index audit_log_job_ids_idx on rota.audit_log using gin (job_ids);

comment on table rota.audit_log is 'What operators did, by whom, to what; kept for a year.';
comment on column rota.audit_log.actor is
    'The person behind that role: the setting rota.actor of the session; null if it is not '
        'set.';
comment on column rota.audit_log.jobs is 'How many jobs were changed; null for a setting.';
comment on column rota.audit_log.before is
    'The number of jobs by status and by replaced value, for one job the value itself; '
    'for a setting its former row.';
comment on column rota.audit_log.after is
    'The new values of the jobs; for a setting its new row, null if it was removed.';

create trigger queues_audited after insert or update or delete on rota.queues
    for each row execute function rota._audit_setting('set_queue');
create trigger job_types_audited after insert or update or delete on rota.job_types
    for each row execute function rota._audit_setting('set_type');
create trigger limits_audited after insert or update or delete on rota.limits
    for each row execute function rota._audit_setting('set_limit');
create trigger pauses_audited after insert or update or delete on rota.pauses
    for each row execute function rota._audit_setting('pause', 'resume');
create trigger job_definitions_audited
    after insert or delete or update of job_type, payload, schedule, time_zone, is_enabled
    on rota.job_definitions
    for each row execute function rota._audit_setting('schedule', 'unschedule');
create trigger retry_rules_audited after insert or update or delete on rota.retry_rules
    for each row execute function rota._audit_setting('set_retry_rule');
create trigger archive_audited after insert or delete or update of schema on rota.archive
    for each row execute function rota._audit_setting('set_archive');
create trigger breakers_audited after insert or update or delete on rota.breakers
    for each row execute function rota._audit_setting('set_breaker');
