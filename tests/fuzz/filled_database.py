"""The database that the arguments are thrown at: jobs, runs and schedules in every state.

The clock stands still, or where the setting rota_fuzz.now says; so ids and tokens are the same
in every run, and what is found can be typed again.
"""

from __future__ import annotations

from typing import Any

import psycopg

from fuzz.judge import JUDGE
from support.clock import now_is

NOW = "2026-01-12 10:00:00+00"

CLOCK = "create schema rota_fuzz;" + now_is(
    f"coalesce(nullif(current_setting('rota_fuzz.now', true), ''), '{NOW}')::timestamptz"
)

WORLD = """
create table rota_fuzz.world (label text primary key, job_id bigint, lease_token bigint);

create function rota_fuzz.started(
    label text, lease interval default '30 days', fields jsonb default '{}'
)
    returns void
    language sql
as $$
    select rota.enqueue_many(jsonb_build_array(fields
        || '{"job_type": "x", "queue": "build", "priority": -9}'));
    insert into rota_fuzz.world
    select label, c.job_id, c.lease_token
    from rota.claim_jobs('builder', '{build}', 1, lease) as c;
$$;

create function rota_fuzz.ended(label text, how text)
    returns void
    language plpgsql
as $$
declare
    v_job rota_fuzz.world;
begin
    perform rota_fuzz.started(label, fields => case label
        when 'succeeded' then jsonb '{"idempotency_key": "k:ended"}'
        when 'dead in front' then '{"ordering_key": "stuck"}' else '{}' end);
    select * into v_job from rota_fuzz.world as w where w.label = ended.label;
    if how = 'finish' then
        perform rota.finish_job(v_job.job_id, v_job.lease_token, '{"ok": true}');
    elsif how = 'cancel' then
        perform rota.cancel_job(v_job.job_id, 'because');
        perform rota.fail_job(v_job.job_id, v_job.lease_token, 'stopped');
    else
        perform rota.fail_job(v_job.job_id, v_job.lease_token, 'it broke',
            retry_in => '1 hour', fatal => how = 'die');
    end if;
end;
$$;

do $$
begin
    perform rota.set_queue(
        'mail', lease => '5 minutes', ageing => '1 minute', max_attempts => 3);
    perform rota.set_limit(queue => 'slow', max_starts => 10, per => '1 minute');
    perform rota.set_limit(job_type => 'charge', max_running => 2);
    perform rota.set_limit(limit_key => 'shop:*', max_running => 1, weight => 2);
    perform rota.define_pipeline('order', '[{"stage": "check", "job_type": "check"},
        {"stage": "charge", "job_type": "charge"}, {"stage": "ship", "job_type": "x"}]');
    perform rota.define_pipeline('old', '[{"stage": "check", "job_type": "check"}]');
    perform rota.drop_pipeline('old');
    perform rota.schedule_job('nightly', '0 2 * * *', 'clean_up', time_zone => 'Europe/Warsaw');
    perform rota.schedule_job('often', 'every 90 seconds', 'x', catch_up => 'all');
    perform rota.schedule_job('chain', 'after 10 minutes', 'x', overlap => 'skip');
    perform rota.schedule_job('off', '@daily', 'x');
    perform rota.disable_schedule('off');
    perform rota.tick();
    perform rota.report_worker('w1', 'box', 1, '1.0', '{default}');
    perform rota_fuzz.started('running');
    perform rota_fuzz.started('running too');
    perform rota_fuzz.started('keyed', fields =>
        '{"idempotency_key": "k:running", "ordering_key": "o", "limit_key": "shop:1"}');
    perform rota_fuzz.started('cancelling');
    perform rota.cancel_job(w.job_id) from rota_fuzz.world as w where w.label = 'cancelling';
    perform rota_fuzz.started('stale', '1 second');
    perform rota_fuzz.ended('succeeded', 'finish');
    perform rota_fuzz.ended('cancelled', 'cancel');
    perform rota_fuzz.ended('dead', 'die');
    perform rota_fuzz.ended('failed', 'fail');
    perform rota_fuzz.ended('dead in front', 'die');
end;
$$;

insert into rota_fuzz.world
select 'in stage', c.job_id, c.lease_token
from rota.start_pipeline('order', idempotency_key => 'k:run'),
    rota.claim_jobs('builder', '{default}', 1, '30 days', '{check}') as c;
insert into rota_fuzz.world
select 'ended run', c.job_id, c.lease_token
from rota.start_pipeline('order'),
    rota.claim_jobs('builder', '{default}', 1, '30 days', '{check}') as c;
select rota.fail_job(w.job_id, w.lease_token, 'it broke', fatal => true)
from rota_fuzz.world as w where w.label = 'ended run';
insert into rota_fuzz.world
select 'stage before', c.job_id, c.lease_token
from rota.start_pipeline('order', ordering_key => 'run'),
    rota.claim_jobs('builder', '{default}', 1, '30 days', '{check}') as c;
select rota.finish_job(w.job_id, w.lease_token, '{"n": 1}')
from rota_fuzz.world as w where w.label = 'stage before';
insert into rota_fuzz.world
select 'second stage', c.job_id, c.lease_token
from rota.claim_jobs('builder', '{default}', 1, '30 days', '{charge}') as c;
select rota.pause_queue('paused') from rota.enqueue('x', queue => 'paused');
select rota.record_effect('mail', e.key, w.job_id, w.lease_token)
from rota_fuzz.world as w, unnest('{open,done}'::text[]) as e (key) where w.label = 'running';
select rota.complete_effect('mail', 'done', w.job_id, w.lease_token, '{"sent": 1}')
from rota_fuzz.world as w where w.label = 'running';
select rota.record_effect('mail', 'unknown', w.job_id, w.lease_token)
from rota_fuzz.world as w where w.label = 'stale';
insert into rota_fuzz.world values
    ('queued', rota.enqueue('x'), 0),
    ('keyed too', rota.enqueue('x', idempotency_key => 'k'), 0),
    ('later', rota.enqueue(
        'send', queue => 'mail', delay => '1 hour', idempotency_key => 'k:later'), 0),
    ('limited', rota.enqueue('charge', limit_key => 'shop:1'), 0),
    ('behind the dead', rota.enqueue('x', ordering_key => 'stuck'), 0),
    ('behind the running', rota.enqueue('x', ordering_key => 'o'), 0),
    ('never', 4711, 4711);
insert into rota_fuzz.world
select 'blocked', rota.enqueue('x', depends_on => array[w.job_id]), 0
from rota_fuzz.world as w where w.label = 'running';
"""


def build(db: psycopg.Connection[Any]) -> None:
    """Put the world into a database that has rota."""
    db.execute(CLOCK)
    db.execute("set rota_fuzz.now = '2026-01-12 09:59:00+00'")
    db.execute(WORLD)
    db.execute("reset rota_fuzz.now")
    db.execute(JUDGE)
    db.execute("vacuum analyze")
