"""The worker: claim jobs, run their handlers, report how they ended.

The path of a job that succeeds, or fails:

1. `fetcher` calls ``rota.claim_jobs()`` when a place is free and something may be due, over a
   connection of `connection`; `notifier` wakes it when a job arrives.
2. `heartbeat` extends the lease of the job, from a thread.
3. `executor` runs the handler, in a thread or in the loop; `lending` lends connections to
   ``job.transaction()`` and ``job.effect()``, and `own_process` runs functions elsewhere.
4. `events` makes an outcome of what the handler returned or raised, and later its log line.
5. `completer` reports outcomes together, until the database has answered.

`worker` composes the parts and stops them in order, `maintenance` ticks and reports the worker
between two claims, and `process` handles signals and the event loop.  ``cli/supervisor.py``
starts several processes, and ``cli/worker.py`` answers over HTTP.  Jobs for other databases,
and queues that move, take another path: ``forwarding.py``.
"""
