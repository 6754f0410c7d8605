"""Random producers, workers, operators and movers around a front.

Each step is one call of one of them, and no two run at once: what is held here is that keys,
lines and jobs stay whole while queues move, movers fail and databases are added.
"""

from __future__ import annotations

import json
import random
from typing import Any

import psycopg
import pytest

from sql.access.test_front import Front
from sql.access.test_front import _plproxy as _plproxy
from sql.access.test_front import front as front
from sql.access.test_front import made_once as made_once
from sql.helpers import call, rows, scalar, value

STEPS = 200
# What a call may answer to random arguments.
REFUSALS = {"RT001", "RT003", "RT004", "RT007", "RT016", "22023"}
LIVE = """
    select (payload ->> 'n')::integer as n from rota.jobs
    union all
    select (job -> 'payload' ->> 'n')::integer from rota.moved_jobs where new_job_id is null
"""
# A key is free in a database from which its job moves, and whoever takes it there follows.
LIVE_KEYS = """
    select j.idempotency_key as key from rota.jobs as j
    where j.idempotency_key is not null and not exists (
        select from rota.queue_moves as m where m.queue = j.queue and m.direction = 'out'
    )
"""
FOLLOWED = """
    select m.database from rota.queue_moves as m where m.direction = 'out'
"""

pytestmark = [pytest.mark.own_session, pytest.mark.plain_session, pytest.mark.long]


class Game:
    def __init__(self, front: Front, dice: random.Random) -> None:
        self.front, self.dice = front, dice
        self.databases = [1, 2]
        self.jobs: list[dict[str, Any]] = []  # as sent; payload n is the place here
        self.ids: dict[int, int] = {}  # of the jobs that are new, to n
        self.free: set[int] = set()  # those to which no order applies any more
        self.ended: set[int] = set()
        self.moves: dict[str, tuple[int, int, int]] = {}
        self.log: list[str] = []

    def attempt(self, what: str, db: Any, function: str, **arguments: Any) -> Any:
        """What a function returned, or None if it refused."""
        try:
            answer = call(db, function, **arguments)
        except psycopg.Error as error:
            self.log.append(f"{what} -> {error.sqlstate} {error.diag.message_primary}")
            if error.sqlstate not in REFUSALS:
                raise
            return None
        self.log.append(f"{what} -> {answer}")
        return answer

    def live(self) -> set[int]:
        return {row.n for shard in self.front.shards.values() for row in rows(shard, LIVE)}

    def enqueue(self) -> None:
        """A job of a customer, whose keys and line are in one queue."""
        queue = self.dice.choice("qr")
        customer = f"{queue}{self.dice.randrange(3)}"
        n = len(self.jobs)
        job: dict[str, Any] = {"job_type": "x", "queue": queue, "max_attempts": 1}
        if self.dice.random() < 0.4:
            job["idempotency_key"] = f"{customer} key {self.dice.randrange(2)}"
        if self.dice.random() < 0.6:
            job["ordering_key"] = f"{customer} line"
        if len(job) > 3:
            job["headers"] = {"shard_key": customer}
        if self.ids and self.dice.random() < 0.1:
            job["depends_on"] = [self.dice.choice([*self.ids])]
        self.jobs.append(job)
        sent = [job | {"payload": {"n": n}}]
        if "idempotency_key" in job and self.dice.random() < 0.2:
            sent *= 2
        answer = self.attempt(
            f"enqueue {sent}", self.front.db, "enqueue_many", jobs=json.dumps(sent)
        )
        if answer and answer[0].is_new:
            self.ids[answer[0].job_id] = n

    def claim(self) -> None:
        self.claim_at(self.dice.choice(self.databases))

    def claim_at(self, number: int) -> None:
        shard = self.front.shards[number]
        for job in call(
            shard, "claim_jobs", worker="w", queues=["q", "r"],
            max_jobs=self.dice.choice((1, 3)), lease="1 hour",
        ):  # fmt: skip
            n = job.payload["n"]
            self.log.append(f"database {number} gives {job.job_id}: {n}")
            line = self.jobs[n].get("ordering_key")
            if line and n not in self.free:
                before = {
                    m for m in self.live() - self.free
                    if m < n and self.jobs[m].get("ordering_key") == line
                }  # fmt: skip
                assert not before, (line, n, before)
            lease = {"job_id": job.job_id, "lease_token": job.lease_token}
            if self.dice.random() < 0.8:
                call(shard, "finish_job", **lease)
            else:
                call(shard, "fail_job", **lease, error="no", fatal=True)
            self.ended.add(n)

    def retry(self) -> None:
        """What comes back is behind those that came after it, or before them."""
        for job_id, n in self._any_job():
            if self.attempt(f"retry {n}", self.front.db, "retry_job", job_id=job_id):
                self.free.add(n)
                self.ended.discard(n)

    def cancel(self) -> None:
        for job_id, n in self._any_job():
            if self.attempt(f"cancel {n}", self.front.db, "cancel_job", job_id=job_id):
                self.ended.add(n)

    def _any_job(self) -> list[tuple[int, int]]:
        return self.dice.sample([*self.ids.items()], min(1, len(self.ids)))

    def begin_move(self) -> None:
        queue = self.dice.choice("qr")
        source, target = self.dice.sample(self.databases, 2)
        if queue not in self.moves and (
            answer := self.attempt(
                f"move {queue} from {source} to {target}", self.front.shards[source],
                "begin_queue_move", queue=queue, database=target,
            )
        ):  # fmt: skip
            self.moves[queue] = (source, target, answer[0].begin_queue_move)

    def go_on_with_move(self, killed: float = 0.15) -> None:
        """One transaction of a mover, or what is left of it when it is killed."""
        if not self.moves:
            return
        queue = self.dice.choice(sorted(self.moves))
        number, to, move_id = self.moves[queue]
        source, target = self.front.shards[number], self.front.shards[to]
        with source.transaction() as transaction:
            max_jobs = self.dice.choice((1, 3))
            ((job_ids, jobs, above, _),) = call(
                source, "take_moves", move_id=move_id, max_jobs=max_jobs
            )
            self.log.append(f"mover of {queue}: {job_ids} {jobs and len(jobs)} {above}")
            if jobs is None:
                return
            received = call(
                target, "receive_moves", move_id=move_id, from_database=number, queue=queue,
                jobs=jobs, settle_above=above,
            )  # fmt: skip
            if self.dice.random() < killed:
                self.log.append("which was killed")
                raise psycopg.Rollback(transaction)
            call(
                source, "end_moves", move_id=move_id, job_ids=job_ids,
                endings=json.dumps([row._asdict() for row in received]),
            )  # fmt: skip

    def end_move(self) -> None:
        """As documented: first the front is made again, if the move has settled."""
        for queue, (source, target, _) in self.dice.sample(
            sorted(self.moves.items()), min(1, len(self.moves))
        ):
            state = "select state from rota.queue_moves where queue = %s"
            if scalar(self.front.shards[source], state, queue) == "settled":
                self.make()
            ended = f"end of {queue}"
            shards = self.front.shards
            if self.attempt(ended, shards[source], "end_queue_move", queue=queue):
                self.attempt(ended, shards[target], "end_queue_move", queue=queue)
                del self.moves[queue]

    def make(self) -> None:
        """As `rota front make`."""
        self.front.make(*self.databases)
        for number in self.databases:
            for (target,) in rows(self.front.shards[number], FOLLOWED):
                scalar(self.front.db, "select rota_front.follow_move(%s, %s)", number, target)
        self.front.rebalance()
        self.log.append(f"front of {self.databases}")

    def add_database(self) -> None:
        self.databases = [1, 2, 3, 4][: len(self.databases) + 1]
        self.make()

    def tick(self) -> None:
        for number in self.databases:
            call(self.front.shards[number], "tick")

    def play(self) -> None:
        acts = {
            self.enqueue: 52, self.claim: 20, self.retry: 8, self.cancel: 8,
            self.begin_move: 4, self.go_on_with_move: 30, self.end_move: 3,
            self.add_database: 1, self.tick: 4,
        }  # fmt: skip
        for act in self.dice.choices([*acts], [*acts.values()], k=STEPS):
            act()
            shards = self.front.shards.values()
            keys = [row.key for shard in shards for row in rows(shard, LIVE_KEYS)]
            assert len(keys) == len(set(keys)), keys

    def play_to_the_end(self) -> None:
        """All jobs end, but those that wait for a dead one, and none is gone.

        One whose key was taken while it moved has ended with that, and one whose parent is
        dead with it.
        """
        for _ in range(60):
            for _ in range(8):
                self.go_on_with_move(killed=0)
            self.tick()
            for number in self.databases:
                self.claim_at(number)
            for shard in self.front.shards.values():
                for (key,) in rows(shard, "select ordering_key from rota.halted_keys"):
                    value(shard, "resume_ordering_key", ordering_key=key)
        live = self.live()
        waiting = {n for n in live if "depends_on" in self.jobs[n]}
        lines = {self.jobs[n].get("ordering_key", n) for n in waiting}
        left = {n for n in live - waiting if self.jobs[n].get("ordering_key") not in lines}
        gone = {
            n for n in {*self.ids.values()} - self.ended - live
            if not self.jobs[n].keys() & {"depends_on", "idempotency_key"}
        }  # fmt: skip
        assert (left, gone) == (set(), set())


@pytest.mark.parametrize("seed", range(20))
def test_keys_lines_and_jobs_stay_whole(front, seed):
    game = Game(front, random.Random(seed))
    try:
        game.play()
        game.play_to_the_end()
    except (AssertionError, psycopg.Error) as error:
        error.add_note("\n".join(game.log))
        raise
