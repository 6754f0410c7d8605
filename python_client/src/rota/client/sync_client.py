# Written by tools/generate_sync.py from async_client.py: change that file instead.
r"""The client: one method per stored function, with its name and its argument names.

What a method does is written once, in the comment of the function and in sql/README.md.
An argument that is not given is not sent, so every default is the one in SQL.  Before a method
has variables of its own, `locals()` are its arguments, with the names that SQL has for them.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, TypeVar

import psycopg
from psycopg import Connection, Cursor
from psycopg.rows import scalar_row
from psycopg.types.json import Jsonb

from .. import rows
from ..exceptions import translate
from .adapters import Caller, adapt
from .statement import (
    UNSET,
    Unset,
    blame,
    call,
    factory,
    given,
    outgoing,
    prepared,
    read_forgiving,
    unescaped,
)
from .values import clean, of_one_job

Row = TypeVar("Row")


class Client:
    """The stored functions of rota over a connection, or session, of the caller.

    The caller owns connection and transaction; the client never commits.
    """

    def __init__(self, connection: Caller) -> None:
        self.connection: Any = connection
        self._driver = adapt(connection)

    def enqueue(
        self,
        job_type: str,
        payload: Mapping[str, Any] | Unset = UNSET,
        *,
        queue: str | Unset = UNSET,
        run_at: datetime | Unset | None = UNSET,
        delay: timedelta | Unset | None = UNSET,
        priority: int | Unset = UNSET,
        max_attempts: int | Unset | None = UNSET,
        lease: timedelta | Unset | None = UNSET,
        backoff: Mapping[str, Any] | Unset | None = UNSET,
        idempotency_key: str | Unset | None = UNSET,
        unique_for: timedelta | Unset | None = UNSET,
        on_conflict: str | Unset = UNSET,
        updated_at: datetime | Unset | None = UNSET,
        max_wait: timedelta | Unset | None = UNSET,
        ordering_key: str | Unset | None = UNSET,
        skip_dead: bool | Unset = UNSET,
        depends_on: Sequence[int] | Unset | None = UNSET,
        blocks: int | Unset | None = UNSET,
        if_parent_dead: str | Unset = UNSET,
        limit_key: str | Unset | None = UNSET,
        time_limit: timedelta | Unset | None = UNSET,
        expires_at: datetime | Unset | None = UNSET,
        headers: Mapping[str, str] | Unset | None = UNSET,
        expires_after: timedelta | Unset | None = UNSET,
    ) -> rows.EnqueuedJob:
        """Add a job in the caller's transaction; return its id and whether it is new."""
        job = given(locals())
        with of_one_job():
            return (self.enqueue_many([job]))[0]

    def enqueue_many(self, jobs: Sequence[Mapping[str, Any]]) -> list[rows.EnqueuedJob]:
        """Add many jobs, each a mapping of the arguments of `enqueue`."""
        with outgoing(jobs) as out:
            added = self._rows(rows.EnqueuedJob, "enqueue_many", {"jobs": out.jobs})
            out.ids = [job.job_id for job in added]
        return added

    def enqueue_to(
        self,
        database: int,
        job_type: str,
        payload: Mapping[str, Any] | Unset = UNSET,
        *,
        queue: str | Unset = UNSET,
        run_at: datetime | Unset | None = UNSET,
        delay: timedelta | Unset | None = UNSET,
        priority: int | Unset = UNSET,
        max_attempts: int | Unset | None = UNSET,
        lease: timedelta | Unset | None = UNSET,
        backoff: Mapping[str, Any] | Unset | None = UNSET,
        idempotency_key: str | Unset | None = UNSET,
        unique_for: timedelta | Unset | None = UNSET,
        on_conflict: str | Unset = UNSET,
        updated_at: datetime | Unset | None = UNSET,
        max_wait: timedelta | Unset | None = UNSET,
        ordering_key: str | Unset | None = UNSET,
        skip_dead: bool | Unset = UNSET,
        limit_key: str | Unset | None = UNSET,
        time_limit: timedelta | Unset | None = UNSET,
        expires_at: datetime | Unset | None = UNSET,
        headers: Mapping[str, str] | Unset | None = UNSET,
        expires_after: timedelta | Unset | None = UNSET,
    ) -> int:
        """Add a job to the database of that number, in the caller's transaction here.

        The id is that of the job here that carries it.
        """
        with outgoing([given(locals())]) as out:
            out.ids = [self._value("enqueue_to", out.jobs[0])]
        return out.ids[0]

    def waiting_forwards(self) -> list[int]:
        """Return the numbers of the databases for which jobs wait here."""
        return self._values("waiting_forwards", locals())

    def take_forwards(
        self,
        worker: str,
        database: int,
        max_jobs: int | Unset = UNSET,
        max_bytes: int | Unset = UNSET,
    ) -> list[rows.ForwardJob]:
        """Claim jobs for the database of that number; end them in the same transaction."""
        return self._rows(rows.ForwardJob, "take_forwards", locals())

    def end_forwards(
        self,
        job_ids: Sequence[int],
        lease_tokens: Sequence[int],
        endings: Sequence[Mapping[str, Any]] | Jsonb,
    ) -> None:
        """End taken jobs as they were received."""
        self._value("end_forwards", locals())

    def receive_jobs(
        self,
        database: int,
        job_ids: Sequence[int],
        enqueue_times: Sequence[datetime],
        jobs: Sequence[Mapping[str, Any]] | str,
    ) -> list[rows.ReceivedJob]:
        """Enqueue jobs that were taken from another database, each once.

        They may be given as the text of a JSON array.
        """
        return self._rows(rows.ReceivedJob, "receive_jobs", locals())

    def plan_queue_move(self, queue: str, database: int) -> list[rows.MoveFinding]:
        """Return what keeps a queue from moving to the database of that number."""
        return self._rows(rows.MoveFinding, "plan_queue_move", locals())

    def queue_move_facts(self, queue: str) -> dict[str, Any]:
        """Return what `receive_plan` of the other database has to know."""
        return self._value("queue_move_facts", locals())

    def receive_plan(
        self, queue: str, facts: Mapping[str, Any]
    ) -> list[rows.MoveFinding]:
        """Return what keeps a queue from moving here."""
        return self._rows(rows.MoveFinding, "receive_plan", locals())

    def begin_queue_move(self, queue: str, database: int) -> int:
        """Let a queue move to the database of that number; return the id of the move."""
        return self._value("begin_queue_move", locals())

    def end_queue_move(self, queue: str) -> None:
        """End the move of a queue, once none of its jobs are left, or before any has left."""
        self._value("end_queue_move", locals())

    def queue_move_status(self, queue: str) -> rows.MoveStatus | None:
        """Return how far a queue has moved; None if it does not."""
        return next(
            iter(self._rows(rows.MoveStatus, "queue_move_status", locals())), None
        )

    def waiting_moves(self) -> list[rows.WaitingMove]:
        """Return the moves from here that have something to carry."""
        return self._rows(rows.WaitingMove, "waiting_moves", locals())

    def take_moves(
        self, move_id: int, max_jobs: int | Unset = UNSET, max_bytes: int | Unset = UNSET
    ) -> rows.TakenMoves | None:
        """Return the next jobs of a move to send; end them in the same transaction.

        None while another mover does this.
        """
        return next(iter(self._rows(rows.TakenMoves, "take_moves", locals())), None)

    def receive_moves(
        self,
        move_id: int,
        from_database: int,
        queue: str,
        jobs: str,
        settle_above: int | None = None,
    ) -> list[rows.ReceivedJob]:
        """Take jobs that move here, given as the text of a JSON array, each once."""
        return self._rows(rows.ReceivedJob, "receive_moves", locals())

    def end_moves(
        self, move_id: int, job_ids: Sequence[int], endings: Sequence[Mapping[str, Any]]
    ) -> None:
        """End jobs of `take_moves` as they were received."""
        self._value("end_moves", locals())

    def define_pipeline(self, pipeline: str, stages: Sequence[Mapping[str, Any]]) -> None:
        """Set the stages of a pipeline, each a mapping."""
        self._value("define_pipeline", locals())

    def drop_pipeline(self, pipeline: str) -> None:
        """Let no more runs of a pipeline begin."""
        self._value("drop_pipeline", locals())

    def start_pipeline(
        self,
        pipeline: str,
        payload: Mapping[str, Any] | Unset = UNSET,
        *,
        stage: str | Unset | None = UNSET,
        run_at: datetime | Unset | None = UNSET,
        delay: timedelta | Unset | None = UNSET,
        priority: int | Unset = UNSET,
        idempotency_key: str | Unset | None = UNSET,
        unique_for: timedelta | Unset | None = UNSET,
        ordering_key: str | Unset | None = UNSET,
        skip_dead: bool | Unset = UNSET,
        depends_on: Sequence[int] | Unset | None = UNSET,
        blocks: int | Unset | None = UNSET,
        if_parent_dead: str | Unset = UNSET,
        limit_key: str | Unset | None = UNSET,
        expires_at: datetime | Unset | None = UNSET,
        headers: Mapping[str, str] | Unset | None = UNSET,
    ) -> int:
        """Begin a run in the caller's transaction; return the id of its job."""
        run = given(locals())
        with outgoing([{"job_type": pipeline, **run}]) as out:
            run["headers"] = out.jobs[0].get("headers", UNSET)
            out.ids = [self._value("start_pipeline", run)]
        return out.ids[0]

    def claim_jobs(
        self,
        worker: str,
        queues: Sequence[str] | Unset = UNSET,
        max_jobs: int | Unset = UNSET,
        lease: timedelta | Unset | None = UNSET,
        job_types: Sequence[str] | Unset | None = UNSET,
    ) -> list[rows.ClaimedJob]:
        """Claim due jobs for *worker*, each with a lease token.

        A payload that Python cannot read is an `Unreadable`, so the other jobs are not lost.
        """
        return self._rows(rows.ClaimedJob, "claim_jobs", locals())

    def finish_job(
        self,
        job_id: int,
        lease_token: int,
        result: Any | Unset = UNSET,
        next_stage: str | Unset | None = UNSET,
    ) -> str:
        """End a job as succeeded; return ``finished`` or ``already_finished``."""
        return self._value("finish_job", locals())

    def finish_jobs(
        self,
        job_ids: Sequence[int],
        lease_tokens: Sequence[int],
        results: Sequence[Any] | Jsonb | Unset | None = UNSET,
        next_stages: Sequence[str | None] | Unset | None = UNSET,
    ) -> list[rows.FinishedJob]:
        """End many jobs as succeeded; one row for each, in the order given."""
        return self._rows(rows.FinishedJob, "finish_jobs", locals())

    def finish_and_claim(
        self,
        worker: str,
        job_ids: Sequence[int] | Unset = UNSET,
        lease_tokens: Sequence[int] | Unset = UNSET,
        results: Sequence[Any] | Jsonb | Unset | None = UNSET,
        next_stages: Sequence[str | None] | Unset | None = UNSET,
        endings: Sequence[Mapping[str, Any]] | Jsonb | Unset | None = UNSET,
        kept_job_ids: Sequence[int] | Unset = UNSET,
        kept_lease_tokens: Sequence[int] | Unset = UNSET,
        queues: Sequence[str] | Unset = UNSET,
        max_jobs: int | Unset = UNSET,
        lease: timedelta | Unset | None = UNSET,
        job_types: Sequence[str] | Unset | None = UNSET,
    ) -> list[rows.NextJob]:
        """End jobs, extend the leases of others and claim new ones in one round trip.

        Return the new jobs, and those that did not end or stay as requested.
        """
        return self._rows(rows.NextJob, "finish_and_claim", locals())

    def end_jobs(
        self, endings: Sequence[Mapping[str, Any]] | Jsonb
    ) -> list[rows.EndedJob]:
        """End many jobs, each in its own way; one answer for each, in the order given."""
        return self._rows(rows.EndedJob, "end_jobs", locals())

    def fail_job(
        self,
        job_id: int,
        lease_token: int,
        error: str,
        error_type: str | Unset | None = UNSET,
        stack: str | Unset | None = UNSET,
        retry_in: timedelta | Unset | None = UNSET,
        fatal: bool | Unset = UNSET,
    ) -> rows.FailedJob:
        """Record a failure; return whether the job is retried, and when."""
        error_type = clean(error_type)
        return self._row(rows.FailedJob, "fail_job", locals())

    def snooze_job(
        self, job_id: int, lease_token: int, delay: timedelta
    ) -> datetime | None:
        """Defer a job without using an attempt; None if it was cancelled by request."""
        return self._value("snooze_job", locals())

    def release_jobs(
        self, job_ids: Sequence[int], lease_tokens: Sequence[int]
    ) -> list[rows.ReleasedJob]:
        """Give jobs back without using an attempt."""
        return self._rows(rows.ReleasedJob, "release_jobs", locals())

    def heartbeat(
        self, job_id: int, lease_token: int, lease: timedelta | Unset | None = UNSET
    ) -> rows.Heartbeat:
        """Extend the lease of a job."""
        return self._row(rows.Heartbeat, "heartbeat", locals())

    def heartbeat_jobs(
        self,
        job_ids: Sequence[int],
        lease_tokens: Sequence[int],
        lease: timedelta | Unset | None = UNSET,
    ) -> list[rows.JobHeartbeat]:
        """Extend the leases of many jobs; a lost one is a row, not an error."""
        return self._rows(rows.JobHeartbeat, "heartbeat_jobs", locals())

    def set_progress(
        self,
        job_id: int,
        lease_token: int,
        percent: float | Decimal,
        message: str | Unset | None = UNSET,
    ) -> None:
        """Record how far a running job is."""
        percent = float(percent)
        self._value("set_progress", locals())

    def record_effect(
        self,
        scope: str,
        key: str,
        job_id: int,
        lease_token: int,
        if_unknown: str | Unset = UNSET,
        keep: timedelta | Unset = UNSET,
    ) -> bool:
        """Record that a job is about to cause an effect; return whether it should."""
        return self._value("record_effect", locals())

    def complete_effect(
        self,
        scope: str,
        key: str,
        job_id: int,
        lease_token: int,
        result: Any | Unset = UNSET,
    ) -> str:
        """Record that an effect happened; return ``completed`` or ``already_completed``."""
        return self._value("complete_effect", locals())

    def withdraw_effect(
        self, scope: str, key: str, job_id: int, lease_token: int
    ) -> None:
        """Withdraw the record of an effect that certainly did not happen."""
        self._value("withdraw_effect", locals())

    def settle_effect(
        self, scope: str, key: str, outcome: str, result: Any | Unset = UNSET
    ) -> int:
        """Record the outcome of an unknown effect; return the id of its job.

        *outcome* is ``done``, or ``again``: then it is due again.
        """
        return self._value("settle_effect", locals())

    def effect_result(self, scope: str, key: str) -> rows.EffectResult | None:
        """Return what is known of an effect, None if there is no record."""
        return next(iter(self._rows(rows.EffectResult, "effect_result", locals())), None)

    def schedule_job(
        self,
        name: str,
        schedule: str,
        job_type: str,
        payload: Mapping[str, Any] | Unset = UNSET,
        *,
        queue: str | Unset = UNSET,
        time_zone: str | Unset = UNSET,
        priority: int | Unset = UNSET,
        max_attempts: int | Unset | None = UNSET,
        lease: timedelta | Unset | None = UNSET,
        backoff: Mapping[str, Any] | Unset | None = UNSET,
        catch_up: str | Unset = UNSET,
        catch_up_window: timedelta | Unset | None = UNSET,
        catch_up_max: int | Unset = UNSET,
        overlap: str | Unset = UNSET,
        jitter: timedelta | Unset = UNSET,
        starts_at: datetime | Unset | None = UNSET,
        ends_at: datetime | Unset | None = UNSET,
        source: str | Unset | None = UNSET,
        time_limit: timedelta | Unset | None = UNSET,
        headers: Mapping[str, str] | Unset | None = UNSET,
    ) -> rows.ScheduleChange:
        """Make a job at each time of a schedule; return whether that is new, and the next time.

        An argument that is left out gets its default, even if the schedule exists.
        """
        return self._row(rows.ScheduleChange, "schedule_job", locals())

    def unschedule_job(self, name: str) -> None:
        """Remove a schedule; its jobs stay."""
        self._value("unschedule_job", locals())

    def enable_schedule(self, name: str) -> datetime | None:
        """Let a disabled schedule make jobs again; return its next time."""
        return self._value("enable_schedule", locals())

    def disable_schedule(self, name: str) -> None:
        """Stop a schedule from making jobs."""
        self._value("disable_schedule", locals())

    def run_schedule_now(self, name: str) -> int:
        """Make a job of a schedule now; return its id."""
        return self._value("run_schedule_now", locals())

    def next_run(
        self,
        schedule: str,
        time_zone: str | Unset = UNSET,
        after: datetime | Unset | None = UNSET,
        starts_at: datetime | Unset | None = UNSET,
    ) -> datetime | None:
        """Return the next time that a schedule text names, None if there is none."""
        return self._value("next_run", locals())

    def upcoming_runs(
        self,
        schedule: str | Unset | None = UNSET,
        time_zone: str | Unset = UNSET,
        after: datetime | Unset | None = UNSET,
        max_runs: int | Unset = UNSET,
        name: str | Unset | None = UNSET,
    ) -> list[rows.UpcomingRun]:
        """Return the next times of a schedule text, or of the schedule of that name."""
        return self._rows(rows.UpcomingRun, "upcoming_runs", locals())

    def describe_schedule(self, schedule: str) -> str:
        """Describe in English what a schedule text means."""
        return self._value("describe_schedule", locals())

    def wait_for_jobs(
        self,
        queues: Sequence[str] | Unset = UNSET,
        job_types: Sequence[str] | Unset | None = UNSET,
        poll_interval: timedelta | Unset = UNSET,
        active: bool | Unset = UNSET,
        claimed: bool | Unset = UNSET,
    ) -> rows.Waiting:
        """Let this session be notified of jobs; return channels and when to poll again."""
        return self._row(rows.Waiting, "wait_for_jobs", locals())

    def stop_waiting(self) -> None:
        """Stop notifying this session, and notify another worker instead."""
        self._value("stop_waiting", locals())

    def report_worker(
        self,
        worker: str,
        host: str,
        pid: int,
        version: str,
        queues: Sequence[str],
        job_types: Sequence[str] | Unset | None = UNSET,
        concurrency: int | Unset | None = UNSET,
        backend_pid: int | Unset | None = UNSET,
    ) -> None:
        """Record that a worker is alive, and what it takes.

        Once the server process *backend_pid* of its connection is gone, so is the worker.
        """
        self._value("report_worker", locals())

    def deregister_worker(self, worker: str) -> None:
        """Record that a worker has left."""
        self._value("deregister_worker", locals())

    def sweep_stale_leases(self, max_jobs: int | Unset = UNSET) -> int:
        """Take jobs back from workers whose leases expired; return how many."""
        return self._value("sweep_stale_leases", locals())

    def tick(self) -> rows.TickReport:
        """Do the maintenance that is due, unless another tick is running."""
        return self._row(rows.TickReport, "tick", locals())

    def start_ticker(self, every: timedelta | Unset = UNSET) -> str:
        """Let pg_cron tick; return what was set up."""
        return self._value("start_ticker", locals())

    def stop_ticker(self) -> bool:
        """Remove what `start_ticker` set up; return whether there was anything."""
        return self._value("stop_ticker", locals())

    def retry_job(
        self,
        job_id: int,
        force: bool | Unset = UNSET,
    ) -> str:
        """Run a job again now; return its new status."""
        return self._value("retry_job", locals())

    def retry_with_dependants(self, job_id: int, force: bool | Unset = UNSET) -> int:
        """Run a job again and restore those cancelled because of it; return how many."""
        return self._value("retry_with_dependants", locals())

    def restart_pipeline(self, job_id: int, stage: str) -> int:
        """Continue an ended run from a stage; return the id of its job."""
        return self._value("restart_pipeline", locals())

    def explain_job(self, job_id: int) -> list[rows.Reason]:
        """Return why a job does not run, or how it runs or ended; the first reason decides."""
        return self._rows(rows.Reason, "explain_job", locals())

    def doctor(self) -> list[rows.Finding]:
        """Return what is wrong with the queue and the database under it, the worst first."""
        return self._rows(rows.Finding, "doctor", locals())

    def untaken_jobs(self, queues: Sequence[str]) -> list[rows.UntakenJobs]:
        """Return the types that have due jobs in *queues* and no live worker."""
        return self._rows(rows.UntakenJobs, "untaken_jobs", locals())

    def verify(self, max_rows: int | Unset = UNSET) -> list[rows.Verdict]:
        """Recount the promises on the newest rows of each kind."""
        return self._rows(rows.Verdict, "verify", locals())

    def job_stats(
        self,
        since: datetime | Unset | None = UNSET,
        until: datetime | Unset | None = UNSET,
        step: str | Unset = UNSET,
        queues: Sequence[str] | Unset | None = UNSET,
        job_types: Sequence[str] | Unset | None = UNSET,
        group_by: Sequence[str] | Unset = UNSET,
    ) -> list[rows.JobStats]:
        """Return how many jobs ended, how, and how long they waited and ran."""
        return self._rows(rows.JobStats, "job_stats", locals())

    def job_counts(self) -> list[rows.JobCount]:
        """Return how many live and dead jobs there are."""
        return self._rows(rows.JobCount, "job_counts", locals())

    def rising_failures(self) -> list[rows.RisingFailure]:
        """Return the queues and job types of which more attempts fail than usual."""
        return self._rows(rows.RisingFailure, "rising_failures", locals())

    def fold_error(self, message: str) -> str:
        """Return the text of an error in one line, without what differs from job to job."""
        return self._value("fold_error", locals())

    def visible_queues(self) -> list[str] | None:
        """Return the queues whose jobs this connection may see, None for all."""
        return self._value("visible_queues", locals())

    def sees_all_queues(self) -> bool:
        """Return whether this connection may see the jobs of all queues."""
        return self._value("sees_all_queues", locals())

    def cancel_job(self, job_id: int, reason: str | Unset | None = UNSET) -> str:
        """Cancel a job, or request that while it runs; return its status."""
        return self._value("cancel_job", locals())

    def set_priority(self, job_id: int, priority: int) -> None:
        """Change the priority of a job; lower runs first."""
        self._value("set_priority", locals())

    def reschedule_job(
        self,
        job_id: int,
        run_at: datetime | Unset | None = UNSET,
        delay: timedelta | Unset | None = UNSET,
    ) -> datetime:
        """Move the next run of a job; return its new time."""
        return self._value("reschedule_job", locals())

    def wait_for_result(
        self,
        job_id: int,
        active: bool | Unset = UNSET,
        *,
        timeout: float | None = None,
        listen: bool = True,
    ) -> rows.JobResult:
        """Wait for the end of a job and return it; TimeoutError after *timeout* seconds.

        On a psycopg connection in autocommit it listens, and the transaction that ends the job
        notifies it; other notifications that come meanwhile are lost.  On any other connection,
        on a standby, or with *listen* false (behind a pooler), it polls about once a second.
        With *active* given, true or false, it does not wait but asks once, as the SQL function
        does.
        """
        if not isinstance(active, Unset):
            return self._ask_result(job_id, active)
        if not isinstance(timeout, int | float | None):
            raise TypeError(f"timeout must be a number of seconds, got {timeout!r}")
        driver = self._driver()
        connection: Connection[Any] | None = None
        if listen and isinstance(driver, Connection) and driver.autocommit:
            connection = driver
        active = connection is not None
        until = time.monotonic() + (1e9 if timeout is None else timeout)
        pause = 0.02
        answer = self._ask_result(job_id, active=False)
        if answer.is_ended:
            return answer
        try:
            if connection:
                try:
                    connection.execute(f"listen {answer.channel}".encode())
                except psycopg.errors.ReadOnlySqlTransaction:  # on a standby none can
                    connection, active = None, False
                answer = self._ask_result(job_id, active)
            while not answer.is_ended:
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"job {job_id} has not ended within {timeout} s: "
                        f"it is {answer.status} (rota explain {job_id})"
                    )
                if connection:
                    # A pause now and then is for an end that could not see that we wait.
                    pause = min(pause * 4, 30.0)
                    for _ in connection.notifies(timeout=min(pause, left), stop_after=1):
                        pass
                else:
                    pause = min(pause * 2, 1.0)
                    time.sleep(min(pause, left))
                answer = self._ask_result(job_id, active)
        finally:
            if connection and not connection.closed:
                connection.execute(f"unlisten {answer.channel}".encode())
                if not answer.is_ended:
                    self._ask_result(job_id, active=False)
        return answer

    def _ask_result(self, job_id: int, active: bool) -> rows.JobResult:
        return self._row(rows.JobResult, "wait_for_result", locals())

    def act_on_jobs(
        self,
        act: str,
        filter: Mapping[str, Any],
        arguments: Mapping[str, Any] | Unset = UNSET,
        max_jobs: int | Unset = UNSET,
        after_id: int | Unset = UNSET,
        dry_run: bool | Unset = UNSET,
    ) -> rows.ActReport:
        """Act on a bounded number of the jobs that match a filter and come after an id.

        Call it again with *after_id*, the *next_after_id* of the last call, until it is None.
        """
        return self._row(rows.ActReport, "act_on_jobs", locals())

    def pause_queue(
        self,
        queue: str,
        reason: str | Unset | None = UNSET,
        until: datetime | Unset | None = UNSET,
    ) -> None:
        """Stop claims of a queue, until this time or until it is resumed."""
        self._value("pause_queue", locals())

    def resume_queue(self, queue: str) -> bool:
        """Resume claims of a queue, and return whether it was paused."""
        return self._value("resume_queue", locals())

    def pause_type(
        self,
        job_type: str,
        queue: str | Unset | None = UNSET,
        reason: str | Unset | None = UNSET,
        until: datetime | Unset | None = UNSET,
    ) -> None:
        """Stop claims of a type, in one queue or in all."""
        self._value("pause_type", locals())

    def resume_type(self, job_type: str, queue: str | Unset | None = UNSET) -> bool:
        """Resume claims of a type there, and return whether it was paused there."""
        return self._value("resume_type", locals())

    def pause_all(
        self,
        reason: str | Unset | None = UNSET,
        until: datetime | Unset | None = UNSET,
    ) -> None:
        """Stop all claims."""
        self._value("pause_all", locals())

    def resume_all(self) -> bool:
        """End what `pause_all` began, if it did; separate pauses stay."""
        return self._value("resume_all", locals())

    def set_queue(
        self,
        queue: str,
        lease: timedelta | Unset | None = UNSET,
        max_attempts: int | Unset | None = UNSET,
        backoff: Mapping[str, Any] | Unset | None = UNSET,
        keep_finished: timedelta | Unset | None = UNSET,
        keep_dead: timedelta | Unset | None = UNSET,
        ageing: timedelta | Unset | None = UNSET,
        time_limit: timedelta | Unset | None = UNSET,
        retry_budget: Mapping[str, int] | Unset | None = UNSET,
        expires_after: timedelta | Unset | None = UNSET,
        reset: bool | Unset = UNSET,
    ) -> None:
        """Change the settings of a queue."""
        self._value("set_queue", locals())

    def set_type(
        self,
        job_type: str,
        time_limit: timedelta | Unset | None = UNSET,
        expires_after: timedelta | Unset | None = UNSET,
        reset: bool | Unset = UNSET,
    ) -> None:
        """Change the defaults of new jobs of a type."""
        self._value("set_type", locals())

    def set_limit(
        self,
        queue: str | Unset | None = UNSET,
        job_type: str | Unset | None = UNSET,
        limit_key: str | Unset | None = UNSET,
        max_running: int | Unset | None = UNSET,
        max_starts: int | Unset | None = UNSET,
        per: timedelta | Unset | None = UNSET,
        burst: int | Unset | None = UNSET,
        weight: int | Unset | None = UNSET,
        reset: bool | Unset = UNSET,
    ) -> None:
        """Limit how many jobs of a queue, type or key run at once, or start per period."""
        self._value("set_limit", locals())

    def set_archive(self, schema: str | Unset | None = UNSET) -> None:
        """Let retention move the history to a schema instead of deleting it; None ends that."""
        self._value("set_archive", locals())

    def set_retry_rule(
        self,
        error_type: str,
        job_type: str | Unset | None = UNSET,
        queue: str | Unset | None = UNSET,
        retry_in: timedelta | Unset | None = UNSET,
        fatal: bool | Unset = UNSET,
        pause_for: timedelta | Unset | None = UNSET,
        reset: bool | Unset = UNSET,
    ) -> None:
        """Set when, or whether, to retry jobs that fail with such an error."""
        self._value("set_retry_rule", locals())

    def set_breaker(
        self,
        job_type: str,
        queue: str | Unset = UNSET,
        max_failures: int | Unset | None = UNSET,
        failed_percent: int | Unset | None = UNSET,
        min_attempts: int | Unset = UNSET,
        span: timedelta | Unset = UNSET,
        error_type: str | Unset | None = UNSET,
        pause_for: timedelta | Unset = UNSET,
        probes: int | Unset = UNSET,
        reset: bool | Unset = UNSET,
    ) -> None:
        """Pause a job type automatically when it fails too often, and probe it again."""
        self._value("set_breaker", locals())

    def resume_ordering_key(self, ordering_key: str) -> int:
        """Continue an ordering key without its dead job; return the id of that job."""
        return self._value("resume_ordering_key", locals())

    def version(self) -> str:
        """Return the version of rota in the database."""
        return self._value("version", locals())

    def set_database_number(self, number: int) -> None:
        """Give the database a number, which the lower ten bits of each new id have."""
        self._value("set_database_number", locals())

    def database_number(self) -> int | None:
        """Return the number of the database, None if it has none."""
        return self._value("database_number", locals())

    def database_number_of(self, job_id: int) -> int:
        """Return the number of the database in which a job was enqueued."""
        return self._value("database_number_of", locals())

    def find_live_keys(
        self, jobs: Sequence[Mapping[str, Any]], *, moving: bool = False
    ) -> list[int]:
        """Return the places, from 1, of those jobs that have a key which is live here.

        If *moving*, of those that have a key and whose queue moves from here.
        """
        return self._value("find_live_keys", locals())

    def front_statements(
        self, databases: Sequence[Mapping[str, Any]], time_limit: timedelta | Unset = UNSET
    ) -> list[str]:
        """Return the statements that make another database a front of these."""
        return self._values("front_statements", locals())

    def grant_statements(self, access: str, role: str) -> list[str]:
        """Return the statements that give *role* an access."""
        return self._values("grant_statements", locals())

    def grant_queue(self, role: str, queue: str, access: str | Unset = UNSET) -> bool:
        """Let *role* use a queue, and then only granted ones; false if it already may."""
        return self._value("grant_queue", locals())

    def revoke_queue(self, role: str, queue: str, access: str | Unset = UNSET) -> bool:
        """Revoke what `grant_queue` granted; false if there was nothing to revoke."""
        return self._value("revoke_queue", locals())

    def _rows(
        self, row: type[Row], function: str, arguments: Mapping[str, Any]
    ) -> list[Row]:
        return self._execute(row, function, arguments)

    def _row(self, row: type[Row], function: str, arguments: Mapping[str, Any]) -> Row:
        return (self._execute(row, function, arguments))[0]

    def _values(self, function: str, arguments: Mapping[str, Any]) -> list[Any]:
        return self._execute(None, function, arguments)

    def _value(self, function: str, arguments: Mapping[str, Any]) -> Any:
        return (self._execute(None, function, arguments))[0]

    def _execute(
        self, row: type[Any] | None, function: str, arguments: Mapping[str, Any]
    ) -> list[Any]:
        """Return the rows that a function answers, or its one value, without *row*."""
        arguments = prepared(arguments)
        try:
            driver = self._driver()
            if isinstance(driver, Connection):
                return _fetch(driver, row, call(function, arguments, row), arguments)
            return driver.fetch(row, function, arguments)
        except Exception as error:
            told = translate(error, function)
            if told is not error:
                raise told from error
            if not isinstance(error, psycopg.OperationalError):
                # Maybe for a value that cannot be sent.
                blame(arguments, getattr(type(self), function).__annotations__)
            raise


def _fetch(
    connection: Connection[Any],
    row: type[Any] | None,
    statement: bytes,
    arguments: Mapping[str, Any],
) -> list[Any]:
    row_factory = factory(row) if row else scalar_row
    # Not of the class that the caller's connection may have chosen for its own cursors.
    with Cursor(connection, row_factory=row_factory) as cursor:
        if arguments:
            # In binary, what is read does not depend on DateStyle and IntervalStyle.
            sent = unescaped(connection, arguments)
            cursor.execute(statement, sent, binary=True)
        else:
            # In one message, from which tick() sees that it is all of its transaction.
            cursor.execute(statement, prepare=False)
        try:
            return cursor.fetchall()
        except Exception:  # whatever a value did to its loader
            if cursor.pgresult is None:  # in a pipeline the answer comes only now: an error
                raise
            return read_forgiving(cursor, row_factory(cursor))
