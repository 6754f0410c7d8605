"""The jobs that the worker holds: those that wait for a free place, and those that run.

All databases of a process share its places.  A database is hungry if jobs of it wait for a
place, if its last claim has found some, or if it is about to claim.  The hungry ones have equal
parts of the places.  So a database with a long backlog has all places while the others are
quiet, and never less than its floor, an equal part among all databases.  A job that comes in
where all was quiet waits for one handler at most.  A database that is lost is never hungry.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextvars import Context
from math import inf
from queue import SimpleQueue
from typing import Any, cast

from ..job import AsyncJob, BaseJob, Job, JobContext
from ..registry import Registry
from ..rows import ClaimedJob
from .completer import Completer
from .connection import Connection, wait_for
from .events import Ends, Outcome, log_job, outcome_of, run_async, run_sync
from .heartbeat import Heartbeat
from .process import LAST_WORDS, call_in_loop

logger = logging.getLogger("rota")

CUT_PAUSE = 0.05
"""Seconds that a handler has to end by itself after its connections were shut down."""
MAX_BATCH = 1000
MAX_ENDED = 100
"""Ends of plain handlers that the loop has not taken, before their threads wait for it."""
AHEAD = 0.05
"""Seconds of work that is claimed in advance, beside what starts during four claims."""
LONGEST_CLAIM = 0.05
"""Seconds that a claim is assumed to take at most."""
WINDOW = 0.05
"""Seconds after which the rate is looked at again."""
PAUSE = 0.005
"""Seconds between two reports, so that more jobs go with each: it costs as much as ten."""
OUTLIVED = (
    "job %s is lost, but its handler of %s continues: it keeps its place until it ends or this "
    "worker is restarted"
)
MAX_USELESS = 60.0
"""Seconds for which handlers without their jobs may have all places of a worker."""
MAX_WAIT = 2.0
"""Seconds after which a job that has not been started is given back."""
MAX_WAIT_IN_BATCH = 10.0
"""The same for one of a batch that has a time limit.  That is counted from the claim where its
lease ends, 30 seconds later."""


class Executor:
    """Runs jobs in the places of its *share*; calls *on_free* when it could do with more.

    A job whose handler has ended takes up no place while its end is reported, unless very many
    wait for that.

    Plain handlers run in threads.  A thread that has ended one takes the next job by itself:
    while jobs wait, it does not wait for the loop.  A lock guards what both change.  The
    threads are daemons: those of an executor would keep the process from leaving.
    """

    def __init__(
        self,
        context: JobContext,
        registry: Registry,
        connection: Connection,
        heartbeat: Heartbeat,
        share: Share,
        prefetch: Prefetch,
        on_free: Callable[[], None],
    ) -> None:
        self._job_context = context
        self._registry = registry
        self.ends = Ends(registry.end_functions)
        self.hung = 0
        """How many handlers were given up, and continue."""
        self._completer = Completer(
            connection,
            heartbeat,
            self.ends,
            share.places.take_turn,
            self._go_on,
            context.close_idle,
        )
        self.heartbeat = heartbeat
        self._share = share
        share.look = self._look
        self._prefetch = prefetch
        self._on_free = on_free
        self._held: deque[BaseJob] = deque()
        self._running: dict[BaseJob, asyncio.Task[Any] | None] = {}
        share.running = self._running
        self.at_rest = asyncio.Event()
        """All running jobs have ended."""
        self.at_rest.set()
        self._will_look = self._has_time = False
        self._lock = threading.Lock()
        self._threads = 0
        self.busy_threads = 0
        """How many threads have a job."""
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._ended: deque[tuple[Job, Outcome]] = deque()
        self._will_take_ends = False

    @property
    def is_idle(self) -> bool:
        """Whether it holds no job."""
        return not (self._held or self._running) and self._completer.is_idle

    @property
    def is_behind(self) -> bool:
        """Whether the database could not be told of ends, and so may take jobs for stale."""
        return self._completer.is_behind

    @property
    def running(self) -> int:
        """How many handlers run, or have ended without the database knowing."""
        return len(self._running) + len(self._completer)

    @property
    def wanted(self) -> int:
        """How many more jobs to claim: none while they would run again elsewhere.

        That is while neither heartbeats nor ends reach the database.
        """
        if self.is_behind or self.heartbeat.failures:
            return 0
        return self._prefetch.wanted(self._places, len(self._held))

    def accept(self, claims: Iterable[ClaimedJob], claimed_at: float) -> None:
        """Hold these claimed jobs, and start those for which there is a place."""
        self._prefetch.claim_time = time.monotonic() - claimed_at
        jobs: list[BaseJob] = []
        for claim in claims:
            kind = AsyncJob if self._registry.is_async(claim.job_type) else Job
            jobs.append(kind(claim, self._job_context, claimed_at))
        self.heartbeat.add(jobs)
        for job in jobs:
            log_job("claimed", job)
        # The claim may have waited as long on its way, and the database counts from its end.
        late = [job for job in jobs if job.is_lost]
        self._completer.give_back(late)
        self._start(job for job in jobs if job not in late)
        self._share.places.tell()
        if jobs and self._held:
            loop = asyncio.get_running_loop()
            loop.call_later(self._prefetch.max_wait, self._give_back_late, jobs[-1])

    def cancel(self, job: BaseJob) -> None:
        """Cancel an async handler, and once more when its lease or its time is over.

        A plain handler, in its thread, asks its job instead.  A handler that still runs when
        this is called a while later, with lease and time both over, is given up; and one whose
        lease alone is over when such have all places for so long that this worker is of no use.

        The `Watch` shuts down the connections that a handler waits for.  The second
        cancellation comes after that: a driver that is cancelled first asks the server, which
        may hang.
        """
        with self._lock:
            if job.is_cancel_requested and job in self._held:
                self._held.remove(job)  # its turn may be far
                self._completer.give_back([job])
        if job not in self._running or job.is_wanted:
            return  # it has ended, or a heartbeat has come through, since this was asked for
        now = time.monotonic()
        if job.over_since < job.confirmed_at and not job.is_overdue:
            job.over_since = inf  # its lease was kept after all, and is over anew
        if job.over_since < inf:
            if job.is_lost and now - job.over_since >= LAST_WORDS:
                if not (job.is_overdue or job.is_outlived):
                    job.is_outlived = True
                    logger.warning(OUTLIVED, job.job_id, job.job_type)
                if job.is_overdue or self.hung or self._is_useless(now):
                    self._give_up_hung(job)
            return
        task = self._running[job]
        if job.is_lost or job.is_overdue:
            job.over_since = now
            if task is not None:
                if job.is_lost:
                    job.is_lease_gone = True  # a heartbeat that comes through is too late
                asyncio.get_running_loop().call_later(CUT_PAUSE, task.cancel)
        elif task is not None and not task.cancelling():
            task.cancel()

    def close(self, *, has_time: bool) -> None:
        """Give back the jobs that have not been started, and tell the others that it leaves.

        *has_time* is whether it waits for these however long that takes.
        """
        self._job_context.is_leaving = True
        self._has_time = has_time
        self._start()

    async def stop_running(self) -> None:
        """Tell the handlers to end, and give back what does not."""
        self._job_context.is_stopping = True
        for job in list(self._running):
            self.cancel(job)
        await wait_for(self.at_rest, LAST_WORDS)
        left = dict(self._running)
        self._running.clear()  # how they end is of no interest any more
        # What they have not committed is rolled back: the jobs run again elsewhere.
        self.heartbeat.watch.cut(left)
        for task in left.values():
            if task is not None:
                task.cancel()
        for _ in range(self._threads):
            self._jobs.put(None)
        self._completer.give_back(left)
        await self._completer.close()

    @property
    def has_waiting(self) -> bool:
        """Whether jobs wait for a place."""
        return bool(self._held)

    def _go_on(self) -> None:
        """Look once for all jobs that end in this turn of the loop whether others can start."""
        if not self._will_look:
            self._will_look = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._will_look = False
        self._start()
        self._share.places.tell()
        if not self.running:
            self.at_rest.set()
        if self.wanted or self.is_idle:
            self._on_free()

    def _start(self, claimed: Iterable[BaseJob] = ()) -> None:
        with self._lock:
            self._held.extend(claimed)
            if self._job_context.is_leaving:
                self._completer.give_back(self._held)
                self._held.clear()
            jobs = [self._take() for _ in range(min(self._places, len(self._held)))]
            if jobs:
                self.at_rest.clear()
        loop = asyncio.get_running_loop()
        for job in jobs:
            if isinstance(job, AsyncJob):  # whose task is kept by _run
                loop.create_task(self._run(job, loop), context=Context())  # noqa: RUF006
            else:
                self._hand_over(cast(Job, job))

    def _take(self) -> BaseJob:
        job = self._held.popleft()
        job.began_at = time.monotonic()
        self._running[job] = None
        return job

    @property
    def _places(self) -> int:
        return 0 if self._completer.is_full else self._share.room()

    async def _run(self, job: AsyncJob, loop: asyncio.AbstractEventLoop) -> None:
        if job not in self._running:
            return  # given back
        self._running[job] = asyncio.current_task(loop)  # until here the loop has kept it
        process = os.getpid()
        handler: Any = self._registry[job.job_type]
        outcome = await run_async(handler, job)
        _leave_if_forked(process, outcome)
        self._end(job, outcome)

    def _hand_over(self, job: Job) -> None:
        """Let a thread run a job, and then the next ones."""
        if self.busy_threads == self._threads:
            target, loop = self._work, asyncio.get_running_loop()
            try:
                threading.Thread(
                    target=target, args=[loop], name="rota-job", daemon=True
                ).start()
            except Exception as error:  # the system has no room for it
                self._end(job, outcome_of(job, error))
                return
            self._threads += 1
        with self._lock:
            self.busy_threads += 1
        self._jobs.put(job)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (job := self._jobs.get()) is not None:
            while job is not None:
                job = self._run_in_thread(job, loop)

    def _run_in_thread(self, job: Job, loop: asyncio.AbstractEventLoop) -> Job | None:
        """Run a plain handler; return the job with which its thread goes on."""
        process = os.getpid()
        try:
            handler: Any = self._registry[job.job_type]
            outcome = Context().run(run_sync, handler, job)
        except BaseException as error:  # whatever it is, the job has to end
            outcome = outcome_of(job, error)
        _leave_if_forked(process, outcome)
        with self._lock:
            following = self._follow(job)
            self.busy_threads -= following is None
        self._ended.append((job, outcome))
        if not self._will_take_ends:  # one call for all that end before the loop takes them
            self._will_take_ends = True
            call_in_loop(loop, self._take_ends)
        return following

    def _follow(self, ended: Job) -> Job | None:
        """Give the place of a job that has ended to the next, where the loop would do so."""
        if (
            ended in self._running  # else its place is another's by now
            and self._held
            and isinstance(self._held[0], Job)
            and len(self._share.places.shares) == 1  # else all are asked
            and len(self._ended) < MAX_ENDED
            and not self._completer.is_full
        ):
            return cast(Job, self._take())
        return None

    def _take_ends(self) -> None:
        self._will_take_ends = False  # first: an end that comes from now on needs another call
        while self._ended:
            self._end(*self._ended.popleft())

    def _is_useless(self, now: float) -> bool:
        """Whether it has long had handlers without their jobs alone, and starts no other."""
        places = self._share.places
        with self._lock:  # where another database has places, too, the loop alone changes them
            running = [job for share in places.shares for job in share.running]
        return (self._has_time or len(running) >= places.total) and all(
            job.is_lost and now - job.over_since >= MAX_USELESS for job in running
        )

    def _give_up_hung(self, job: BaseJob) -> None:
        """Wait no more for a handler that goes on without its job."""
        with self._lock:
            del self._running[job]
        self.heartbeat.remove([job])
        self.hung += 1
        over = f"its time limit of {job.time_limit} and " if job.is_overdue else ""
        text = (
            "job %s: its handler of %s continues after %sits lease; the process has to end it"
        )
        logger.error(text, job.job_id, job.job_type, over)
        self.ends.add("lost", job, time.monotonic() - job.began_at)
        self._go_on()

    def _end(self, job: BaseJob, outcome: Outcome) -> None:
        """Go on to report how a handler ended."""
        if job not in self._running:
            return  # given back
        del self._running[job]
        self._prefetch.ended += 1
        try:
            self._completer.put(job, outcome)
        except BaseException:  # no lease may be kept for a job that nobody ends
            logger.exception("job %s cannot be ended; its lease will expire", job.job_id)
            self.heartbeat.remove([job])
        self._go_on()

    def _give_back_late(self, last: BaseJob) -> None:
        """Release what has waited as long as *last*: somebody else may have time for it."""
        with self._lock:
            if last in self._held:
                count = self._held.index(last) + 1
                late = [self._held.popleft() for _ in range(count)]
                self._held.extendleft(j for j in reversed(late) if self._prefetch.keeps(j))
                self._completer.give_back(j for j in late if not self._prefetch.keeps(j))


def _leave_if_forked(process: int, outcome: Outcome) -> None:
    """End a process that the handler has forked: it is no worker, but has its connections."""
    if os.getpid() != process:
        os._exit(outcome.kind != "succeeded")


class Places:
    """Places for so many handlers, shared by the databases that have a `Share` of them.

    The databases report in turns how their jobs ended, with a pause between any two.  So the
    more of them are busy, the longer each waits for more jobs to end, and many databases cost
    hardly more calls than one.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.shares: list[Share] = []
        self._next_at = 0.0
        self._will_tell = False

    def take_turn(self) -> float:
        """Return how many seconds to wait before a report."""
        now = time.monotonic()
        turn = max(now, self._next_at)
        self._next_at = turn + PAUSE
        return turn - now

    def tell(self) -> None:
        """Tell the databases that had no room to look again, once in a turn of the loop."""
        if len(self.shares) > 1 and not self._will_tell:
            self._will_tell = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._will_tell = False
        for share in self.shares:
            if share.is_short and share.room():
                share.look()


class Share:
    """What one database has of the places.

    *running* are its handlers that run, *is_hungry* says whether it wants more; *look* is
    called when there is more room than there was.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        places.shares.append(self)
        self.running: Collection[BaseJob] = ()
        self.is_hungry: Callable[[], bool] = lambda: False
        self.look: Callable[[], None] = lambda: None
        self.is_short = False
        """Whether there was no room for it when it asked the last time."""

    @property
    def floor(self) -> int:
        """How many places are its own."""
        return self._part_of(self.places.shares)

    def room(self) -> int:
        """Return how many more of its handlers may start now."""
        taken = sum(len(share.running) for share in self.places.shares)
        free = max(0, self.places.total - taken)
        if free and len(self.places.shares) > 1:
            hungry = [each for each in self.places.shares if each is self or each.is_hungry()]
            if len(hungry) > 1:
                free = max(0, min(free, self._part_of(hungry) - len(self.running)))
        self.is_short = free == 0
        return free

    def _part_of(self, shares: list[Share]) -> int:
        each, left = divmod(self.places.total, len(shares))
        return each + (shares.index(self) < left)


class Prefetch:
    """How many claimed jobs a worker holds that cannot start at once.

    They are there so that no place is free while the next claim is under way.  But a job that
    waits here waits for this worker alone, and keeps a slot of its limit from others.  So the
    worker takes no more than it is likely to start soon, from the rate at which its jobs have
    ended lately and the time that its last claim took, and gives back what has waited long.
    *batch* is a number of jobs that the user wants to hold anyway.
    """

    def __init__(self, batch: int | None) -> None:
        self.max_wait = MAX_WAIT if batch is None else MAX_WAIT_IN_BATCH
        """How long a job may wait to be started, unless it is one that `keeps` says to keep."""
        self._batch = batch
        self.ended = 0
        """How many handlers have ended since it looked at the rate."""
        self.claim_time = 0.0
        """Seconds that the last claim took."""
        self._rate = 0.0
        self._since = time.monotonic()

    def keeps(self, job: BaseJob) -> bool:
        """Whether a job waits however long that takes, by the user's choice."""
        return self._batch is not None and job.time_limit is None

    def wanted(self, free: int, waiting: int) -> int:
        """Return how many jobs to claim, with so many free places and jobs that wait."""
        batch = self._look_ahead() if self._batch is None else self._batch
        if free - waiting <= 0 and waiting >= batch // 2:
            return 0
        return min(max(free - waiting, batch), MAX_BATCH)

    def _look_ahead(self) -> int:
        elapsed = time.monotonic() - self._since
        if elapsed >= WINDOW:
            # What is long ago says nothing, so after a pause it begins with few again.
            weight = min(elapsed, 0.5) + 0.5
            self._rate = weight * self.ended / elapsed + (1.0 - weight) * self._rate
            self.ended = 0
            self._since += elapsed
        return int(self._rate * (AHEAD + 4 * min(self.claim_time, LONGEST_CLAIM)))
