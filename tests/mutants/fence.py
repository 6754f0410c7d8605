"""The fence: each of these lets a worker that lost its lease do something."""

from __future__ import annotations

from mutants.mutant import mutant, sql

FENCE = (
    mutant(
        "finish-without-token",
        "Whoever had the job once may finish it under its new owner.",
        "sql/jobs/test_finish.py races/test_ending.py",
        sql(
            "jobs/finish",
            """\
          and j.lease_token = coalesce(
            v_token, _archive_jobs.lease_tokens[array_position(_archive_jobs.job_ids, j.id)])
""",
            "",
        ),
    ),
    mutant(
        "finish-answered-without-token",
        "A worker that lost its job is told that its own finish counted.",
        "sql/jobs/test_finish.py races/test_ending.py",
        sql("jobs/finish", "and f.lease_token = _is_finished.lease_token", "and true"),
    ),
    mutant(
        "fail-without-token",
        "Whoever had the job once may fail it under its new owner.",
        "sql/jobs/test_finish.py sql/jobs/test_fail.py",
        sql(
            "jobs/fail",
            """\
          and j.lease_token = _fail_running.lease_tokens[
            array_position(_fail_running.job_ids, j.id)]
""",
            "",
        ),
    ),
    mutant(
        "heartbeat-without-token",
        "A worker that was given up for dead goes on as if it had the lease.",
        "sql/jobs/test_finish.py sql/jobs/test_lease.py",
        sql("jobs/lease", "and j.lease_token = heartbeat.lease_token", "and true"),
    ),
    mutant(
        "heartbeats-without-token",
        "One heartbeat for many extends the leases of others.",
        "sql/jobs/test_finish.py sql/jobs/test_lease.py",
        sql(
            "jobs/lease",
            """\
            where j.id = any(_extend_leases.job_ids) and j.lease_token
                = _extend_leases.lease_tokens[array_position(_extend_leases.job_ids, j.id)]""",
            "            where j.id = any(_extend_leases.job_ids)",
        ),
        sql(
            "base/checks",
            """\
              and j.lease_token
                = _hold_jobs.lease_tokens[array_position(_hold_jobs.job_ids, j.id)]
              and j.status = 'running'
              and j.id <> all(v_held)
            for update skip locked
""",
            """\
              and j.status = 'running'
              and j.id <> all(v_held)
            for update skip locked
""",
        ),
    ),
    mutant(
        "old-lease-hides-the-new",
        "A worker that names an old and a new lease of a job is heard for the old one.",
        "sql/jobs/test_finish.py sql/jobs/test_lease.py sql/jobs/test_fail.py",
        sql("base/checks", "partition by r.job_id", "partition by r.ordinal"),
    ),
    mutant(
        "token-that-never-was-hides-the-live",
        "The token of a claim that was rolled back is taken for the newest of its job.",
        "sql/jobs/test_finish.py sql/jobs/test_lease.py sql/jobs/test_fail.py",
        sql(
            "base/checks",
            "where j.id = r.job_id\n                    ) desc",
            "where false\n                    ) desc",
        ),
    ),
    mutant(
        "give-back-without-token",
        "Whoever had the job once may snooze it or give it back under its new owner.",
        "sql/jobs/test_finish.py sql/jobs/test_fail.py",
        sql(
            "jobs/fail",
            """\
      and j.lease_token = _give_back.lease_tokens[array_position(_give_back.job_ids, j.id)]
      and j.status = 'running'
    returning""",
            """\
      and j.status = 'running'
    returning""",
        ),
    ),
    mutant(
        "give-back-cancels-without-token",
        "Whoever had the job once ends it as cancelled, under its new owner.",
        "sql/jobs/test_finish.py sql/jobs/test_fail.py races/test_ending.py",
        sql(
            "jobs/fail",
            """\
          and j.lease_token = _give_back.lease_tokens[array_position(_give_back.job_ids, j.id)]
          and j.status = 'running'
        for update""",
            """\
          and j.status = 'running'
        for update""",
        ),
    ),
    mutant(
        "progress-without-token",
        "The progress of a job is that of a worker that lost it.",
        "sql/jobs/test_finish.py sql/jobs/test_lease.py",
        sql("jobs/lease", "and j.lease_token = set_progress.lease_token", "and true"),
    ),
    mutant(
        "effects-without-token",
        "A worker that lost its lease records effects, and completes and withdraws them.",
        "sql/jobs/test_effects.py races/test_racing_effects.py",
        sql("base/checks", "and j.lease_token = _lock_lease.lease_token", "and true"),
    ),
    mutant(
        "effect-holder-without-token",
        "The record of a lost lease is held as long as anybody runs the job.",
        "sql/jobs/test_effects.py races/test_racing_effects.py",
        sql("base/checks", "and j.lease_token = _is_leased.lease_token", "and true"),
    ),
    mutant(
        "effect-completed-by-another",
        "The next run of a job completes the effect that the one before has recorded.",
        "sql/jobs/test_effects.py races/test_racing_effects.py",
        sql("jobs/effects", "and e.lease_token = _lock_record.lease_token", "and true"),
    ),
    mutant(
        "effect-ended-without-lease",
        "A worker that lost its lease completes and withdraws what it has recorded.",
        "sql/jobs/test_effects.py races/test_racing_effects.py",
        sql("jobs/effects", "    elsif not v_is_leased then\n", "    elsif false then\n"),
    ),
    mutant(
        "effect-settled-while-its-job-runs",
        "An operator settles an effect that a job is just about to cause.",
        "sql/jobs/test_effects.py",
        sql(
            "jobs/effects",
            """\
    elsif rota._is_leased(v_effect.job_id, v_effect.lease_token) then
        perform rota._raise_in_progress(v_effect);
    end if;
    -- Where""",
            """\
    end if;
    -- Where""",
        ),
    ),
    mutant(
        "cancel-without-lock",
        "A cancel that meets a claim says that the job is cancelled, and it runs.",
        "races/test_racing_claims.py races/test_ending.py",
        sql(
            "jobs/control",
            """\
        where j.id = cancel_job.job_id
        for update;
""",
            """\
        where j.id = cancel_job.job_id;
""",
        ),
    ),
    mutant(
        "token-stands-still",
        "The token follows the clock alone: two claims in one moment have the same.",
        "sql/jobs/test_claim.py races/test_racing_claims.py",
        sql("jobs/claim", "least(j.lease_token, 9223372036854775806) + 1,", "j.lease_token,"),
    ),
    mutant(
        "retry-records-what-was",
        "The record of a retry tells of a dead job, and what ran again had succeeded.",
        "races/test_ending.py",
        sql(
            "jobs/control",
            "where f.id = retry_job.job_id for update;",
            "where f.id = retry_job.job_id;",
        ),
    ),
    mutant(
        "token-forgotten-by-retry",
        "A job that is brought back to life begins with a token that it may have had.",
        "sql/jobs/test_control.py sql/jobs/test_claim.py races/test_racing_claims.py",
        sql(
            "jobs/control",
            "case when e.pipeline is null then e.lease_token\n",
            "case when e.pipeline is null then 0::bigint\n",
        ),
    ),
    mutant(
        "token-kept-by-force",
        "The worker of a job that was taken away by force has the token of the waiting job.",
        "sql/jobs/test_control.py sql/jobs/test_claim.py races/test_racing_claims.py",
        sql(
            "jobs/control",
            "lease_token = j.lease_token + (j.status = 'running')::integer,",
            "lease_token = j.lease_token,",
        ),
    ),
    mutant(
        "forced-without-force",
        "A retry takes a running job away from its worker without being told to.",
        "sql/jobs/test_control.py",
        sql(
            "jobs/control", "if v_before.status = 'running' and not retry_job.force", "if false"
        ),
    ),
    mutant(
        "lost-taken-for-held",
        "A job that another one runs by now is told to be busy, and not to be lost.",
        "sql/jobs/test_finish.py sql/jobs/test_lease.py",
        sql(
            "base/checks",
            "return rota._is_leased(job_id, lease_token)",
            "return exists (select from rota.jobs as j where j.id = _is_running.job_id)",
        ),
    ),
    mutant(
        "lost-taken-for-ended",
        "Whoever lost a job that another one has ended is told that he ended it himself.",
        "sql/jobs/test_finish.py sql/jobs/test_fail.py",
        sql("base/checks", "elsif v_lease_token = _raise_lost.lease_token\n", "elsif true\n"),
    ),
    mutant(
        "failure-of-another-is-the-answer",
        "Whoever lost a job that failed again since is told of the failure of another.",
        "sql/jobs/test_fail.py sql/jobs/test_finish.py",
        sql("jobs/fail", "where r.lease_token = _failed_before.lease_token", "where true"),
    ),
    mutant(
        "stage-checked-without-token",
        "A worker that lost its job is told that its stage is wrong, and not that it is lost.",
        "sql/waiting/test_pipelines.py",
        sql("jobs/finish", "and j.lease_token = _check_next_stage.lease_token", "and true"),
    ),
    mutant(
        "dropped-pipeline-has-no-stages",
        "A run of a dropped pipeline that goes to a stage by its name dies.",
        "sql/waiting/test_pipelines.py",
        sql("jobs/finish", "where o.pipeline = v_pipeline and o.ordinal is not null", ""),
    ),
)
