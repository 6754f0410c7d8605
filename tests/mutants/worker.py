"""The worker: each of these loses a lease, a job or its end on the side of Python."""

from __future__ import annotations

from mutants.mutant import client, mutant, sql

WORKER = (
    mutant(
        "heartbeat-not-sent",
        "The worker keeps the lease of no job.",
        "client/test_transaction.py client/test_worker_process.py client/test_worker.py",
        client("worker/executor", "self.heartbeat.add(jobs)", "self.heartbeat.add([])"),
    ),
    mutant(
        "heartbeat-too-late",
        "The first heartbeat comes when the lease is over.",
        "client/test_leases.py client/test_worker_process.py client/test_worker.py",
        client("worker/heartbeat", "BEATS_PER_LEASE = 3", "BEATS_PER_LEASE = 0.8"),
    ),
    mutant(
        "log-ends-a-worker",
        "What a handler of the log raises ends the worker.",
        "client/test_worker_log.py",
        client(
            "worker/events", "logger.handle = _guard(logger.handle)", "_guard(logger.handle)"
        ),
    ),
    mutant(
        "isolation-asked-once",
        "A worker ends when another client of its pooler has set the isolation level.",
        "client/test_pooler.py",
        client(
            "worker/connection",
            "            if self._must_begin:\n                raise\n",
            "            raise\n",
        ),
    ),
    mutant(
        "heartbeat-ends-with-the-claims",
        "A worker that leaves keeps no lease while its last jobs run.",
        "client/test_worker_process.py",
        client(
            "worker/worker",
            "reporting = asyncio.create_task(self._presence.go_on())",
            "self._heartbeat.stop()\n            reporting = "
            "asyncio.create_task(self._presence.go_on())",
        ),
    ),
    mutant(
        "heartbeat-gives-up",
        "After one error no lease is kept any more.",
        "client/test_leases.py faults/test_killed_workers.py client/test_worker_process.py",
        client(
            "worker/heartbeat",
            "self._not_before = self._beaten_at + self._retry.fail(failure)\n",
            "self._not_before = inf\n",
        ),
    ),
    mutant(
        "claim-as-old-as-its-lease",
        "A job whose claim took as long as its lease loses the attempt.",
        "client/test_leases.py",
        client("worker/executor", "self._completer.give_back(late)\n        ", ""),
    ),
    mutant(
        "loss-not-told",
        "A handler goes on with a job that is somebody else's by now.",
        "client/test_leases.py client/test_worker.py",
        client(
            "worker/heartbeat",
            "                    job.is_lease_gone = True\n",
            "                    pass\n",
        ),
    ),
    mutant(
        "cancel-not-told",
        "A handler never learns that its job shall be cancelled.",
        "client/test_worker.py",
        client(
            "worker/heartbeat",
            "job.is_cancel_requested |= beat.is_cancel_requested",
            "pass",
        ),
    ),
    mutant(
        "lease-without-end",
        "A worker that reaches no database believes in its leases for ever.",
        "client/test_worker_process.py client/test_throughput.py",
        client(
            "job",
            "is_lease_gone or (self.seconds_left < 0 and not self.may_be_finished)",
            "is_lease_gone",
        ),
    ),
    mutant(
        "lease-counted-from-the-answer",
        "A heartbeat that was long under way makes the lease look longer than it is.",
        "client/test_leases.py client/test_worker.py",
        client(
            "worker/heartbeat",
            "job.confirmed_at = sent_at",
            "job.confirmed_at = time.monotonic()",
        ),
    ),
    mutant(
        "active-poller-of-few",
        "A worker that has once seen many jobs looks a hundred times a second for few.",
        "client/test_woken_workers.py",
        client("worker/fetcher", "self._rate < ACTIVE_UNTIL or ", ""),
    ),
    mutant(
        "full-worker-wakes-the-next",
        "A job for a worker of one place wakes another one, that finds nothing.",
        "client/test_woken_workers.py",
        client("worker/fetcher", "if is_full and self._was_notified", "if is_full and False"),
    ),
    mutant(
        "full-worker-keeps-the-notifications",
        "A job that comes while the first worker is full waits until it is free.",
        "client/test_woken_workers.py",
        client("worker/fetcher", "self._poller.step_aside()", "pass"),
    ),
    mutant(
        "full-worker-asks-as-if-it-had-claimed-all",
        "Of jobs that came together, the second waits for the worker of the first.",
        "client/test_woken_workers.py",
        client("worker/fetcher", "go(Place.IDLE, claimed=False)", "go(Place.IDLE)"),
    ),
    mutant(
        "full-worker-sleeps-through-the-next",
        "A job whose time comes while the first worker is full waits until it is free.",
        "client/test_woken_workers.py",
        client("worker/fetcher", "if is_free or self._poller.is_waiting:", "if is_free:"),
    ),
    mutant(
        "active-poller-at-once",
        "A worker looks hundreds of times a second for jobs of which fifty come.",
        "client/test_woken_workers.py",
        client("worker/fetcher", "self._rate >= ACTIVE_FROM", "self._rate >= 20.0"),
    ),
    mutant(
        "claim-counted-from-the-answer",
        "A claim that was long under way makes the leases look longer than they are.",
        "client/test_leases.py client/test_throughput.py client/test_worker.py",
        client("worker/fetcher", "accept(claims, sent_at)", "accept(claims, time.monotonic())"),
    ),
    mutant(
        "start-without-lease",
        "A handler is started though its lease was lost while the job waited.",
        "client/test_throughput.py",
        client("worker/events", "    job.check()\n", ""),
    ),
    mutant(
        "finish-with-another-token",
        "A finish that is repeated speaks with another token.",
        "client/test_worker.py",
        client(
            "worker/completer",
            "        tokens = [report.job.lease_token for report in part]\n",
            "        tokens = [r.job.lease_token + self._retry.failures for r in part]\n",
        ),
    ),
    mutant(
        "end-told-once",
        "An end whose answer is lost is not told again.",
        "client/test_worker.py client/test_worker_process.py",
        client(
            "worker/completer",
            "                    self._pending = part + self._pending\n",
            "",
        ),
    ),
    mutant(
        "busy-is-finished",
        "A job whose row was locked is taken for finished.",
        "client/test_locked_rows.py client/test_poison.py",
        client("worker/completer", '        if row.answer == "busy":', "        if False:"),
    ),
    mutant(
        "lost-is-success",
        "A job that was lost is logged as a success.",
        "client/test_worker_process.py client/test_worker.py",
        client(
            "worker/completer",
            "event = EVENTS.get(row.answer, row.answer)",
            'event = "succeeded"',
        ),
    ),
    mutant(
        "refused-result-keeps-the-job",
        "A result that the database refuses keeps all jobs beside it from ending.",
        "client/test_worker.py client/test_poison.py",
        client("worker/completer", "            if len(part) > 1:", "            if False:"),
    ),
    mutant(
        "refused-end-keeps-its-lease",
        "The lease of a job whose end is refused is kept for as long as the worker lives.",
        "client/test_locked_rows.py",
        client(
            "worker/completer",
            "            self._heartbeat.remove([job])\n            text",
            "            text",
        ),
    ),
    mutant(
        "leaves-with-its-jobs",
        "A worker that is told to stop keeps the jobs that it has not begun.",
        "client/test_worker_process.py client/test_worker.py",
        client(
            "worker/executor", "                self._completer.give_back(self._held)\n", ""
        ),
    ),
    mutant(
        "leaves-with-running-jobs",
        "A worker whose grace is over gives back nothing.",
        "client/test_worker_process.py client/test_worker.py",
        client(
            "worker/executor",
            "        self._completer.give_back(left)\n",
            "",
        ),
    ),
    mutant(
        "stopped-is-failed",
        "A handler that ends because the worker leaves has used an attempt.",
        "client/test_worker_process.py client/test_worker.py",
        client(
            "worker/events",
            '            return Outcome("released")\n',
            "            return failure(error)\n",
        ),
    ),
    mutant(
        "stopped-tasks-are-failed",
        "Tasks of a handler that are told at once that the worker leaves use an attempt.",
        "client/test_worker.py client/test_tasks.py",
        client("exceptions", "(STOP_ERRORS, Snooze,", "(Snooze,"),
    ),
    mutant(
        "kept-lease-is-cancelled",
        "A handler is cancelled though a heartbeat has kept its lease.",
        "client/test_leases.py",
        client("worker/executor", " or job.is_wanted", ""),
    ),
    mutant(
        "fatal-is-failed",
        "FatalError is an error like any other.",
        "client/test_worker.py",
        client("worker/events", "fatal or isinstance(error, FatalError)", "fatal"),
    ),
    mutant(
        "given-up-is-retried",
        "A job is tried again after an exception that its task gives up on.",
        "client/test_tasks.py",
        client("worker/events", "failure(error, fatal=job.is_given_up)", "failure(error)"),
    ),
    mutant(
        "own-errors-are-given-up",
        "A task with retry_on gives up on an effect that another job is at.",
        "client/test_tasks.py",
        client("tasks", "JobCancelled, RotaError, ", "JobCancelled, "),
    ),
    mutant(
        "unread-arguments-enqueued",
        "A job is enqueued whose payload the worker will not be able to read.",
        "client/test_tasks.py",
        client("tasks", "arrived = self._decode(payload)", "arrived = dict(bound.arguments)"),
    ),
    mutant(
        "cancelled-ends-nothing",
        "An async handler that is cancelled leaves its job without an end.",
        "client/test_worker.py",
        client(
            "worker/events",
            "except BaseException as error:  # also CancelledError: this task ends here anyway",
            "except Exception as error:",
        ),
    ),
    mutant(
        "claim-lost-to-a-payload",
        "One payload that Python cannot read costs all jobs of its claim.",
        "client/test_poison.py",
        client(
            "client/statement",
            "    return Unreadable(_reason(data, error))\n",
            "    raise error\n",
        ),
    ),
    mutant(
        "unreadable-is-run",
        "A handler gets a stand-in for a payload that could not be read.",
        "client/test_poison.py client/test_stage_handlers.py",
        client("worker/events", "if isinstance(value, Unreadable):", "if False:"),
    ),
    mutant(
        "transaction-writes-twice",
        "The writes of a transaction are committed though an earlier one has finished the job.",
        "client/test_transaction.py",
        client("job", 'if outcome != "finished":', "if False:"),
    ),
    mutant(
        "effect-done-by-an-error",
        "An effect whose block raised counts as done.",
        "client/test_effect_blocks.py",
        client("job", "        elif error is None:\n", "        elif True:\n"),
    ),
    mutant(
        "worker-never-ticks",
        "Workers leave the maintenance to others, and there are no others.",
        "client/test_worker.py",
        client("worker/maintenance", "inf if every is None else 0.0", "inf"),
    ),
    mutant(
        "lease-extended-by-a-locked-row",
        "A heartbeat that could not extend a lease counts as if it had.",
        "client/test_leases.py client/test_locked_rows.py",
        client("worker/heartbeat", "beat.locked_until is None and not beat.is_lost", "False"),
    ),
    mutant(
        "finished-is-lost",
        "A heartbeat that finds a job gone, because it was just finished, cancels its handler.",
        "client/test_leases.py client/test_transaction.py",
        client(
            "worker/heartbeat",
            "if not job.may_be_finished:",
            "if True:",
        ),
    ),
    mutant(
        "late-claim-kept",
        "A claim that comes through while the worker leaves keeps its jobs.",
        "client/test_worker.py client/test_worker_process.py",
        client(
            "worker/executor",
            "            self._held.extend(claimed)\n",
            "            if not self._job_context.is_leaving:\n"
            "                self._held.extend(claimed)\n",
        ),
    ),
    mutant(
        "hoarded",
        "A worker that got slow keeps jobs which others had time for.",
        "client/test_throughput.py",
        client(
            "worker/executor", "            if last in self._held:", "            if False:"
        ),
    ),
    mutant(
        "place-of-another-database",
        "A thread goes on with the jobs of its database while another waits for a place.",
        "client/test_many_databases.py",
        client(
            "worker/executor",
            "            and len(self._share.places.shares) == 1  # else all are asked\n",
            "",
        ),
    ),
    mutant(
        "place-of-a-hung-handler",
        "A handler that was given up goes on with a job in a place that is another's by now.",
        "client/test_throughput.py",
        client("worker/executor", "            ended in self._running  # else", "True  # else"),
    ),
    mutant(
        "one-locked-row-holds-all",
        "An end that waits for a locked row keeps all others waiting.",
        "client/test_locked_rows.py client/test_poison.py",
        sql("base/checks", "            for update skip locked\n", "            for update\n"),
    ),
    mutant(
        "connection-kept-after-an-error",
        "A connection that broke is used again and again.",
        "client/test_worker_process.py faults/test_killed_workers.py client/test_throughput.py",
        client(
            "worker/connection",
            "                await self._close()\n                if task",
            "                if task",
        ),
        client(
            "worker/connection",
            "if self._connection is None or self._connection.closed:",
            "if self._connection is None:",
        ),
    ),
    mutant(
        "refused-delay-keeps-the-job",
        "A handler asks for a delay that SQL refuses, and its job never ends.",
        "client/test_worker.py client/test_poison.py",
        client("worker/completer", "if is_wrong(row.error_code) and", "if False and"),
    ),
    mutant(
        "notification-lost-in-a-claim",
        "A job that comes while the worker looks waits until the next poll.",
        "client/test_woken_workers.py",
        client(
            "worker/fetcher",
            "self.claim_at = min(self.claim_at, now + pause)",
            "self.claim_at = now + pause",
        ),
    ),
    mutant(
        "waits-without-a-look",
        "A job that came before the worker waited is found at the next poll.",
        "client/test_woken_workers.py",
        client(
            "worker/fetcher",
            "        if seconds <= 0.0:\n            self.hurry()\n        elif",
            "        if",
        ),
    ),
    mutant(
        "tick-before-the-reports",
        "After an outage a worker sweeps its own finished jobs before it reports them.",
        "client/test_leases.py",
        client(
            "worker/fetcher", "            if executor.is_behind:\n", "            if False:\n"
        ),
    ),
    mutant(
        "completion-told-once",
        "An effect is done and its completion gets lost on the way.",
        "client/test_effect_blocks.py",
        client(
            "job",
            "if is_over or is_wrong(error.sqlstate):\n",
            "if True:\n",
        ),
    ),
    mutant(
        "next-time-not-asked",
        "A retry, or the next start at a rate, waits for a poll when its time has come.",
        "client/test_woken_workers.py",
        client(
            "worker/fetcher",
            "            self.claim_at = max(now + seconds,",
            "            max(now + seconds,",
        ),
    ),
    mutant(
        "lease-not-watched",
        "An async handler runs on without a lease while the database does not answer.",
        "client/test_leases.py",
        client(
            "worker/heartbeat",
            "        if not job.is_wanted:\n",
            "        if job.is_overdue or job.is_cancel_requested:\n",
        ),
    ),
    mutant(
        "time-limit-not-told",
        "A plain handler is not told that its time is over.",
        "client/test_time_limit.py",
        client("job", "        if self.is_overdue:\n", "        if False:\n"),
    ),
    mutant(
        "hung-handler-keeps-its-place",
        "A worker goes on beside a handler that nobody can end.",
        "client/test_time_limit.py",
        client("worker/worker", "        if self._executor.hung:\n", "        if False:\n"),
    ),
    mutant(
        "swallowed-error-succeeds",
        "A job succeeds whose error a middleware has swallowed.",
        "client/test_middleware.py",
        client("registry", "        if failure is not None:", "        if False:"),
    ),
    mutant(
        "call-without-end",
        "A call waits for its answer for as long as the server hangs.",
        "client/test_connection.py",
        client(
            "worker/connection",
            "            cancels += 1\n            task.cancel()\n",
            "            cancels += 1\n",
        ),
    ),
    mutant(
        "cancelled-claims-on",
        "A worker whose task was cancelled goes on claiming.",
        "client/test_run_async.py",
        client(
            "worker/worker",
            "        if self._stop.is_set() or self.is_retiring:\n",
            "        if self.is_retiring:\n",
        ),
        client("worker/worker", "        await end_task(fetching)\n", ""),
    ),
    mutant(
        "session-lent-as-it-is",
        "A handler gets the session of another with all its settings.",
        "client/test_transaction.py",
        client(
            "worker/lending",
            "        if self._resets:\n            #",
            "        if False:\n            #",
        ),
    ),
    mutant(
        "deaf-after-an-outage",
        "A worker whose places are all taken hears of no cancel once its notifier was away.",
        "client/test_woken_workers.py",
        client("worker/notifier", "self._channels &= {RUNNING}", "self._channels = set()"),
    ),
    mutant(
        "lent-past-its-block",
        "A task that goes on after a transaction writes in that of the next job.",
        "client/test_transaction.py",
        client(
            "worker/lending",
            "        ours, pgconn = self.connection, self.connection.pgconn\n",
            "        yield self.connection\n        return\n"
            "        ours, pgconn = self.connection, self.connection.pgconn\n",
        ),
    ),
    mutant(
        "reset-taken-on-trust",
        "A session is lent again whose reset has failed.",
        "client/test_transaction.py",
        client(
            "worker/lending",
            "all(each.status != ExecStatus.FATAL_ERROR for each in answers)",
            "True",
        ),
    ),
    mutant(
        "call-without-limit",
        "A handler waits as long as a server hangs that it calls.",
        "client/test_frozen.py",
        client("worker/lending", "        elif now >= lent.until:\n", "        elif False:\n"),
    ),
    mutant(
        "lent-past-its-lease",
        "A handler waits for a server that hangs, though its lease is over.",
        "client/test_frozen.py",
        client(
            "worker/lending",
            "        if (reason := _reason(job, lent.has_last_word)) is not None:\n",
            "        if (reason := None) is not None:\n",
        ),
    ),
    mutant(
        "no-last-word",
        "A job records an effect as its time ends, and the mail is lost, which was not begun.",
        "client/test_effect_blocks.py",
        client(
            "worker/lending",
            "lent.has_last_word = job.last_words > 0 and not self._resets",
            "lent.has_last_word = False",
        ),
    ),
    mutant(
        "lent-without-bound",
        "A handler opens as many sessions as it makes calls at once.",
        "client/test_lending.py",
        client("worker/lending", "            if self._free:\n", "            if True:\n"),
    ),
    mutant(
        "refused-mail-is-unknown",
        "A mail server that was down for a while has cost its mails for ever.",
        "client/test_effect_blocks.py",
        client("job", " or isinstance(error, effect._withdraw_on)", ""),
    ),
    mutant(
        "lost-record-is-unknown",
        "A connection that breaks before the block of an effect has cost its mail for ever.",
        "client/test_effect_blocks.py",
        client("job", "if is_in_doubt and is_first", "if False and is_first"),
    ),
    mutant(
        "lost-record-sends-twice",
        "A mail that an earlier block may have sent is sent again after a lost answer.",
        "client/test_effect_blocks.py",
        client("job", " and not was_sent", ""),
    ),
    mutant(
        "client-commits",
        "The client commits the transaction of its caller.",
        "client/test_client.py client/test_transaction.py",
        client(
            "client/sync_client",
            "            return cursor.fetchall()",
            "            connection.commit()\n            return cursor.fetchall()",
        ),
    ),
    mutant(
        "refusal-without-its-class",
        "A lost lease reaches the handler as any error of the database.",
        "client/test_client.py client/test_transaction.py",
        client(
            "exceptions", "    if ours is None:\n", "    if ours in {None, LeaseLostError}:\n"
        ),
    ),
    mutant(
        "success-without-its-transaction",
        "A job is done though its handler has rolled back what ends it, and all that it wrote.",
        "client/test_finish_in.py",
        client(
            "worker/completer",
            '            if outcome.kind == "succeeded":\n'
            "                report.outcome = outcome = NOT_COMMITTED\n",
            "",
        ),
    ),
    mutant(
        "finish-without-a-transaction",
        "A job ends by itself, before or after what its handler writes.",
        "client/test_finish_in.py",
        client("client/adapters", "    if is_alone:\n", "    if False:\n"),
    ),
    mutant(
        "job-before-the-transaction",
        "A job that is enqueued first in a session is committed, or lost, by itself.",
        "client/test_own_connection.py",
        client(
            "client/adapters",
            "    if not connection.in_transaction():\n        connection.begin()\n",
            "",
        ),
    ),
    mutant(
        "second-finish-hides-the-first",
        "A job is done though its handler rolled back, after a second end was refused.",
        "client/test_finish_in.py",
        client("job", "self.state = before", "self.state = State.RUNNING"),
    ),
    mutant(
        "number-of-two-databases",
        "Jobs travel to whichever of two databases with one number answers first.",
        "faults/test_forward_kill.py",
        client("forwarding", "each.told if len(same) == 1 else None", "each.told"),
    ),
    mutant(
        "movers-without-a-limit",
        "Queues that move take all connections of both servers.",
        "faults/test_move_kill.py",
        client("forwarding", "MAX_MOVERS)", "10**6)"),
    ),
    mutant(
        "movers-keep-their-places",
        "A few queues that cannot move yet keep all others from moving.",
        "faults/test_move_kill.py",
        client("forwarding", "(self._places.locked() and", "(False and"),
    ),
)
