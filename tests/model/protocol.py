"""The lease protocol alone, in every order of events.

A state is small: each job with its status, token, deadline, attempts and request to cancel;
each worker with the lease that it believes in; who sweeps; a backup.  A claim and a sweep look
first and take later, as two sessions may.  Any answer may be lost, any worker may vanish, the
clock stands still for many events, and a backup may come back once.

Ghosts know what no guard may use: which claim owns a job, the highest token ever given, and how
many outcomes were accepted.  A guard named in *broken* is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

QUEUED, RUNNING, FAILED, SUCCEEDED, DEAD, CANCELLED = range(6)
WAITING = (QUEUED, FAILED)
NOBODY, IDLE = 255, (255, 0, 0)
GUARDS = (
    "the token is compared",
    "the status is compared",
    "the token grows with each claim",
    "the token is not below the clock",
    "the token outlives a retry",
    "the token outlives a release",
    "a claim looks again under the lock",
    "a sweep looks again under the lock",
    "the last attempt ends the job",
    "a cancel ends what fails",
    # What nobody can guard against, and is left to whoever restores a backup.
    "the clock goes on after a restore",
)


class Job(NamedTuple):
    """What the database knows of a job, and after it what only we know."""

    status: int = QUEUED
    token: int = 0
    deadline: int = 0
    attempts: int = 0
    is_cancelled: int = 0
    owner: int = 0  # ghost: number of the claim that runs it
    outcomes: int = 0  # ghost: accepted since it was last retried
    claims: int = 0  # ghost
    highest: int = 0  # ghost: token


class State(NamedTuple):
    """One moment."""

    now: int
    sweeper: int  # the job that was seen to be stale
    operations: int  # of an operator, so far
    jobs: tuple[Job, ...]
    workers: tuple[tuple[int, int, int], ...]  # job, token, claim; a claim of 0 only looks
    backup: tuple[Job, ...]
    was_restored: int


class Wrong(Exception):
    """An invariant that does not hold."""


@dataclass(frozen=True)
class Protocol:
    """The size of the world, and the guards that it lacks."""

    jobs: int = 2
    workers: int = 2
    ticks: int = 3
    lease: int = 1
    attempts: int = 2
    claims: int = 3
    operations: int = 1
    broken: frozenset[str] = frozenset()

    def has(self, guard: str) -> bool:
        assert guard in GUARDS
        return guard not in self.broken

    def first(self) -> State:
        workers = (IDLE,) * self.workers
        return State(1, NOBODY, 0, (Job(),) * self.jobs, workers, (), 0)

    def after(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield all that may happen next; what must not raises `Wrong` instead."""
        if state.now < self.ticks:
            yield "the clock ticks", state._replace(now=state.now + 1)
        for n, job in enumerate(state.jobs):
            yield from self.operate(state, n, job)
        yield from self.sweep(state)
        yield from self._restore(state)
        may_go_back = not (state.was_restored and self.has("the clock goes on after a restore"))
        if state.now > 1 and state.operations < self.operations and may_go_back:
            back = state._replace(now=state.now - 1, operations=state.operations + 1)
            yield "the clock steps back", back
        for which, worker in enumerate(state.workers):
            if which and worker == state.workers[which - 1]:
                continue  # as the one before
            if worker == IDLE:
                for n, job in enumerate(state.jobs):
                    if job.status in WAITING and job.claims < self.claims:
                        yield f"a worker sees job {n}", _set(state, which, (n, 0, 0))
            elif worker[2] == 0:
                yield from self.claim(state, which, worker[0])
            else:
                yield from self.report(state, which, worker)

    def claim(self, state: State, which: int, n: int) -> Iterator[tuple[str, State]]:
        job = state.jobs[n]
        if self.has("a claim looks again under the lock") and job.status not in WAITING:
            yield f"job {n} is gone before the claim", _set(state, which, IDLE)
            return
        if job.status == RUNNING:
            raise Wrong(f"job {n} is claimed while lease {job.token} is live")
        if job.status not in WAITING:
            raise Wrong(f"job {n} is claimed after its end")
        token = job.token + 1 if self.has("the token grows with each claim") else job.token
        if self.has("the token is not below the clock"):
            token = max(token, state.now)
        if token <= job.highest:
            raise Wrong(f"job {n} gets token {token} again")
        claimed = job._replace(
            status=RUNNING, token=token, deadline=state.now + self.lease,
            attempts=job.attempts + 1, claims=job.claims + 1, owner=job.claims + 1,
            highest=token,
        )  # fmt: skip
        if claimed.attempts > self.attempts:
            raise Wrong(f"job {n} has attempt {claimed.attempts} of {self.attempts}")
        state = _put(state, n, claimed)
        held = (n, token, claimed.owner)
        yield f"job {n} is claimed with token {token}", _set(state, which, held)
        yield f"... and the answer is lost, job {n}, {token}", _set(state, which, IDLE)

    def report(
        self, state: State, which: int, lease: tuple[int, int, int]
    ) -> Iterator[tuple[str, State]]:
        n, token, claim = lease
        job, gone = state.jobs[n], _set(state, which, IDLE)
        yield f"the worker with token {token} of job {n} vanishes", gone
        is_ours = not self.has("the token is compared") or job.token == token
        is_running = not self.has("the status is compared") or job.status == RUNNING
        if not (is_ours and is_running):
            return  # it is told so, and gone: as if it had vanished
        if job.status == RUNNING and claim != job.owner:
            raise Wrong(f"job {n} takes the word of claim {claim}, but {job.owner} runs it")
        acts: list[tuple[str, Callable[[int, Job], Job]]] = [
            ("finishes", lambda n, job: self._end(n, job, SUCCEEDED)),
            ("fails", self._fail),
            ("releases", self._release),
        ]
        for word, act in acts:
            after = act(n, job)
            yield f"token {token} {word} job {n}", _put(gone, n, after)
            yield f"... and the answer is lost, {word} job {n}", _put(state, n, after)
        beaten = job._replace(deadline=state.now + self.lease)
        if beaten != job:
            yield f"token {token} keeps job {n}", _put(state, n, beaten)

    def _end(self, n: int, job: Job, status: int) -> Job:
        if job.outcomes:
            raise Wrong(f"job {n} has a second outcome")
        return job._replace(status=status, outcomes=1, owner=0, deadline=0)

    def _fail(self, n: int, job: Job) -> Job:
        if job.is_cancelled and self.has("a cancel ends what fails"):
            return self._end(n, job, CANCELLED)
        if job.attempts >= self.attempts and self.has("the last attempt ends the job"):
            return self._end(n, job, DEAD)
        return self._wait(n, job, FAILED)

    def _release(self, n: int, job: Job) -> Job:
        if job.is_cancelled:
            return self._end(n, job, CANCELLED)
        if not self.has("the token outlives a release"):
            job = job._replace(token=job.token - 1)
        return self._wait(n, job._replace(attempts=job.attempts - 1), QUEUED)

    def _wait(self, n: int, job: Job, status: int) -> Job:
        if job.is_cancelled:
            raise Wrong(f"job {n} is to run again, though somebody wanted it cancelled")
        if job.outcomes:
            raise Wrong(f"job {n} has ended and is to run again")
        return job._replace(status=status, owner=0, deadline=0)

    def sweep(self, state: State) -> Iterator[tuple[str, State]]:
        if state.sweeper == NOBODY:
            for n, job in enumerate(state.jobs):
                if job.status == RUNNING and job.deadline < state.now:
                    yield f"a sweep sees job {n}", state._replace(sweeper=n)
            return
        n, job = state.sweeper, state.jobs[state.sweeper]
        state = state._replace(sweeper=NOBODY)
        is_stale = job.status == RUNNING and job.deadline < state.now
        if not is_stale and self.has("a sweep looks again under the lock"):
            yield f"job {n} is alive again before the sweep", state
        elif not is_stale:
            raise Wrong(f"job {n} is swept, though its lease is not over")
        else:
            yield f"job {n} is swept", _put(state, n, self._fail(n, job))

    def operate(self, state: State, n: int, job: Job) -> Iterator[tuple[str, State]]:
        if state.operations == self.operations:
            return
        state = state._replace(operations=state.operations + 1)
        # A running one is taken from its worker, an ended one begins anew.
        token = job.token + (job.status == RUNNING)
        if not self.has("the token outlives a retry"):
            token = 0
        anew = job._replace(
            status=QUEUED, token=token, owner=0, deadline=0, is_cancelled=0, outcomes=0,
            attempts=0 if job.outcomes else min(job.attempts, self.attempts - 1),
        )  # fmt: skip
        yield f"job {n} is retried", _put(state, n, anew)
        if job.status == RUNNING and not job.is_cancelled:
            yield f"job {n} is to be cancelled", _put(state, n, job._replace(is_cancelled=1))
        elif job.status in WAITING:
            yield f"job {n} is cancelled", _put(state, n, self._end(n, job, CANCELLED))

    def _restore(self, state: State) -> Iterator[tuple[str, State]]:
        if not state.backup and not state.was_restored:
            yield "a backup is made", state._replace(backup=state.jobs)
        # It takes longer than the tokens can be ahead of the clock.
        elif state.backup and all(job.highest < state.now for job in state.jobs):
            jobs = tuple(
                old._replace(claims=job.claims, highest=job.highest)
                for old, job in zip(state.backup, state.jobs, strict=True)
            )
            state = state._replace(jobs=jobs, backup=(), was_restored=1, sweeper=NOBODY)
            yield "the backup comes back", state


def _set(state: State, which: int, worker: tuple[int, int, int]) -> State:
    workers = list(state.workers)
    workers[which] = worker
    return state._replace(workers=tuple(sorted(workers)))


def _put(state: State, n: int, job: Job) -> State:
    return state._replace(jobs=(*state.jobs[:n], job, *state.jobs[n + 1 :]))
