/*
 * tables/pipelines.sql -- the stages of pipelines.
 *
 * pipeline_stages: a row is never deleted.  A stage that a new definition leaves out is
 * retired: no run enters it any longer, but the runs that are in it still find their next stage
 * here.  So a pipeline can be redefined at any moment, without losing a run or waiting for
 * one.
 */

create table rota.pipeline_stages (
    pipeline text collate "C" not null,
    stage text collate "C" not null,
    ordinal integer,
    next_stage text collate "C",
    job_type text collate "C" not null,
    queue text collate "C" not null,
    priority smallint,
    max_attempts integer,
    lease interval,
    time_limit interval,
    backoff jsonb,

    constraint pipeline_stages_pkey primary key (pipeline, stage),
    constraint pipeline_stages_ordinal_key unique (pipeline, ordinal),
    constraint pipeline_stages_stage_check
        check (octet_length(stage) between 1 and 63 and stage <> 'end')
);

comment on table rota.pipeline_stages is
    'The stages of each pipeline, in their order; where a setting is null it is the queue''s.';
comment on column rota.pipeline_stages.ordinal is 'From 1; null for a stage that is retired.';
comment on column rota.pipeline_stages.next_stage is
    'The stage that follows unless the job names another; null after the last stage.';
comment on column rota.pipeline_stages.priority is
    'Null means that of the stage before, and for the first that of start_pipeline().';

create table rota.stage_runs (
    job_id bigint not null,
    lease_token bigint not null,
    pipeline text collate "C" not null,
    stage text collate "C" not null,
    status text collate "C" not null,
    queue text collate "C" not null,
    job_type text collate "C" not null,
    attempts integer not null,
    worker text collate "C",
    queued_at timestamptz not null,
    started_at timestamptz,
    finished_at timestamptz not null,
    stage_input jsonb,
    result jsonb,
    ended_by xid not null default pg_current_xact_id()::xid,

    constraint stage_runs_pkey primary key (job_id, lease_token)
);

create index stage_runs_pipeline_idx on rota.stage_runs (pipeline, finished_at);

comment on table rota.stage_runs is
    'How each job of a pipeline ended in each stage that it has left.';
comment on column rota.stage_runs.lease_token is
    'The last lease of the job in this stage; grows from stage to stage.';
comment on column rota.stage_runs.status is
    'How the stage ended: succeeded, dead or cancelled.';
comment on column rota.stage_runs.worker is
    'The worker of the last attempt; null if the stage ended while the job waited.';
comment on column rota.stage_runs.started_at is
    'Begin of the latest attempt; null if there was none.';
