/*
 * tables/pipelines.sql -- the stages of pipelines.
 *
 * A row is never deleted.  A stage that a new definition leaves out is retired: no run enters
 * it any more, but the runs that are in it still find here where they go on to.  So a pipeline
 * can be defined anew at any moment, and no run is lost by it or has to be waited for.
 */

create table rota.pipeline_stages (
    pipeline text not null,
    stage text not null,
    ordinal integer,
    next_stage text,
    job_type text not null,
    queue text not null,
    priority smallint,
    max_attempts integer,
    lease interval,
    backoff jsonb,

    constraint pipeline_stages_pkey primary key (pipeline, stage),
    constraint pipeline_stages_ordinal_key unique (pipeline, ordinal),
    constraint pipeline_stages_stage_check
        check (octet_length(stage) between 1 and 63 and stage <> 'end')
);

comment on table rota.pipeline_stages is 'The stages of each pipeline, in their order.';
comment on column rota.pipeline_stages.ordinal is
    'Place in the order, from 1; null for a stage that is not part of the pipeline any more.';
comment on column rota.pipeline_stages.next_stage is
    'Where a job goes on to unless it says otherwise; null after the last stage.';
comment on column rota.pipeline_stages.priority is
    'Null means that of the stage before, and for the first that of start_pipeline().';
comment on column rota.pipeline_stages.max_attempts is 'Null means the queue''s.';
comment on column rota.pipeline_stages.lease is 'Null means the queue''s.';
comment on column rota.pipeline_stages.backoff is 'Null means the queue''s.';
