"""Random calls of all functions that write, each compared with the model.

A step is one call.  Its answer or SQLSTATE and all rows of the tables must be what the model
says.  Workers crash by being rolled back or by never coming back, and any lease that there ever
was may report again at any time.  Calls may share a transaction, which ends either way.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any, ClassVar
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, note, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.internal.conjecture.engine import ConjectureRunner
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from model.acts import KINDS, MOST, OPERATES, REPORTS, SHAPES, STAGES, START, call_of
from model.comparison import differences
from model.database import Database
from model.limits import PATIENCE
from model.rows import SECOND, Divergence, Job, Ref, Refused
from model.timetable import Timetable

STEPS = 50
READY = "no_worker"
"""What explain_job() tells of a job that only waits for a claim: no worker is connected."""
ENTERS = ("enqueue", "enqueue_many", "start_pipeline")


class Machine(RuleBasedStateMachine):
    """See the module; `database` and `found` are set by `machine_on`."""

    database: Database
    found: ClassVar[list[str]]

    def __init__(self) -> None:
        super().__init__()
        self.database.empty()
        self.model = Timetable(START)
        self.leases: list[Ref] = []
        self.backup: bytes | None = None  # the model when the open transaction began
        self.told: list[str] = []
        self.database.now = START

    def teardown(self) -> None:
        """See whether the last calls, if they were refused, have changed anything."""
        if sys.exception() is None:
            self.database.look()
            self.compare("the last call", {})

    def play(self, function: str, said: dict[str, Any] | None = None, /, **given: Any) -> None:
        """Call the function and hold all against the model; *said* is what that is told."""
        code, answer = self.database.call(function, **given)
        self.model.transaction += self.backup is None
        # Of several new jobs the last may be refused.
        before = pickle.dumps(self.model) if function in ENTERS else b""
        self.model.seen = self.database.seen()
        self.model.seen.claimed = claimed(function, answer)
        try:
            expected = getattr(self.model, function)(**(given if said is None else said))
            wanted = ""
        except Refused as refused:
            wanted, expected = str(refused), None
        except Divergence as wrong:
            raise Divergence(f"{function}({given}) gave {code} {answer}: {wrong}") from None
        if wanted and self.backup is not None:
            self.undo()
        elif wanted and before:
            self.model = pickle.loads(before)
        if (code, answer if not code else None) != (wanted, expected):
            raise Divergence(
                f"{function}({given}) gave {code} {answer}, not {wanted} {expected}"
            )
        self.compare(function, given)
        for job in self.model.jobs.values():
            if job.status == "running" and (job.id, job.lease_token) not in self.leases:
                self.leases.append((job.id, job.lease_token))

    def compare(self, function: str, given: Any) -> None:
        problems = differences(self.model, self.database.shown)
        if problems:
            raise Divergence(f"after {function}({given}): " + "; ".join(problems))

    def undo(self) -> None:
        """What a transaction that is rolled back has done never was."""
        assert self.backup is not None
        now, latest, self.model = self.model.now, self.model.latest, pickle.loads(self.backup)
        self.model.now, self.model.latest, self.backup = now, latest, None

    def job(self, pick: int, wanted: Callable[[Job], Any] = lambda job: True) -> int:
        """A job, the newest first, mostly one that is wanted; 15 is one that never was."""
        ids = sorted(self.model.jobs)
        ids = [i for i in ids if pick % 3 and wanted(self.model.jobs[i])] or ids
        return 0 if not ids or pick == 15 else ids[-1 - pick % len(ids)]

    def lease(self, pick: int) -> Ref:
        """A live lease, every third time any that there ever was; 15 is one that never was."""
        live = [ref for ref in self.leases if pick % 3 and self.model.holds(*ref)]
        pool = live or self.leases
        return pool[-1 - pick // 3 % len(pool)] if pool and pick < 15 else (self.job(pick), 1)

    def refs(self, picks: list[int]) -> tuple[list[Ref], dict[str, list[int]]]:
        refs = [self.lease(pick) for pick in picks]
        ids, tokens = [ref[0] for ref in refs], [ref[1] for ref in refs]
        return refs, {"job_ids": ids, "lease_tokens": tokens}

    @initialize(kind=st.sampled_from(["work", "work", *KINDS]))
    def begin_history(self, kind: str) -> None:
        self.kind = kind

    @rule(act=st.integers(0, MOST), number=st.integers(0, MOST))
    def do(self, act: int, number: int) -> None:
        self.step(*call_of(self.kind, act, number))

    def step(self, act: str, given: dict[str, Any]) -> None:
        """Do it, or what has to come before it."""
        if act in REPORTS and not self.leases:
            act, given = "claim", {"worker": "w1", "queues": ["default", "mail"], "max_jobs": 9}
        if act in OPERATES | {"claim"} and not self.model.jobs:
            act, given = "enqueue", {"job": SHAPES[0]}
        if act == "start" and not self.model.pipelines:
            act, given = "define", {"stages": STAGES[0]}
        if act in ("begin", "end") and (act == "end") != (self.backup is not None):
            return
        self.told.append(f"{act} {given}")
        note(self.told[-1])
        try:
            getattr(self, act)(**given)
        except Divergence:
            self.found.append("\n".join(self.told))
            raise

    def enqueue(self, job: dict[str, Any]) -> None:
        self.play("enqueue", **job)

    def enqueue_many(self, jobs: list[dict[str, Any]]) -> None:
        self.play("enqueue_many", jobs=jobs)

    def enqueue_after(
        self, picks: list[int], rule: str, blocks: int | None, more: dict[str, Any],
        is_batch: bool,
    ) -> None:  # fmt: skip
        after = [job_id for job_id in map(self.job, picks) if job_id]
        job = {"job_type": "t", "depends_on": after, "if_parent_dead": rule, **more}
        if blocks is not None:
            job["blocks"] = self.job(blocks, lambda job: job.status == "blocked")
        if is_batch:
            self.play("enqueue_many", jobs=[job, {"job_type": "u"}])
        else:
            self.play("enqueue", **job)

    def claim(self, **claim: Any) -> None:
        """Claim, and half of the time hold what explain_job() tells against what is given."""
        told = self.database.told() if claim["worker"] == "w2" else {}
        if self.backup is not None:  # which has locked what it has changed, for all others
            told = {
                i: READY if reason == "row_locked" else reason for i, reason in told.items()
            }
        self.play("claim_jobs", **claim)
        claimed = self.model.seen.claimed
        wrong = {i: told.get(i) for i in claimed if told.get(i) != READY}
        if len(claimed) < claim["max_jobs"] and not self.model.limits:
            wrong |= {
                job.id: READY
                for job in self.model.jobs.values()
                if told.get(job.id) == READY and job.id not in claimed
                and job.queue in claim["queues"]
                and (claim.get("job_types") is None or job.job_type in claim["job_types"])
            }  # fmt: skip
        if told and wrong:
            raise Divergence(f"claim({claim}) gave {claimed}, but explained was {wrong}")

    def finish(self, pick: int, result: Any, next_stage: str | None) -> None:
        job_id, lease_token = self.lease(pick)
        self.play(
            "finish_job", job_id=job_id, lease_token=lease_token, result=result,
            next_stage=next_stage,
        )  # fmt: skip

    def finish_many(
        self, picks: list[int], has_results: bool, next_stages: list[str | None]
    ) -> None:
        refs, given = self.refs(picks)
        more = {
            "results": [{"n": n} for n in range(len(refs))] if has_results else None,
            "next_stages": next_stages[: len(refs)] if any(next_stages) else None,
        }
        self.play("finish_jobs", {"refs": refs, **more}, **given, **more)

    def finish_and_claim(self, picks: list[int], kept: list[int], lease: int | None) -> None:
        refs, given = self.refs(picks)
        kept_refs, kept_given = self.refs(kept)
        claim = {"worker": "w1", "max_jobs": 1, "lease": lease}
        given |= {f"kept_{name}": value for name, value in kept_given.items()}
        said = {"refs": refs, "kept": kept_refs, **claim}
        self.play("finish_and_claim", said, **given, **claim)

    def end_many(self, picks: list[int], kinds: list[dict[str, Any]]) -> None:
        refs, _ = self.refs(picks)
        asked = dict(zip(refs, kinds, strict=False))
        endings = [
            {"job_id": job_id, "lease_token": token, **kind}
            for (job_id, token), kind in asked.items()
        ]
        said = {"refs": list(asked), "kinds": list(asked.values())}
        self.play("end_jobs", said, endings=endings)

    def fail(self, pick: int, error: str, retry_in: int | None, fatal: bool) -> None:
        job_id, lease_token = self.lease(pick)
        self.play(
            "fail_job", job_id=job_id, lease_token=lease_token, error=error, error_type="E",
            retry_in=retry_in, fatal=fatal,
        )  # fmt: skip

    def snooze(self, pick: int, delay: int) -> None:
        job_id, lease_token = self.lease(pick)
        self.play("snooze_job", job_id=job_id, lease_token=lease_token, delay=delay)

    def release(self, picks: list[int]) -> None:
        refs, given = self.refs(picks)
        self.play("release_jobs", {"refs": refs}, **given)

    def heartbeat(self, pick: int, lease: int | None) -> None:
        job_id, lease_token = self.lease(pick)
        self.play("heartbeat", job_id=job_id, lease_token=lease_token, lease=lease)

    def heartbeat_many(self, picks: list[int], lease: int | None) -> None:
        refs, given = self.refs(picks)
        self.play("heartbeat_jobs", {"refs": refs, "lease": lease}, **given, lease=lease)

    def progress(self, pick: int, percent: int, message: str | None) -> None:
        job_id, lease_token = self.lease(pick)
        self.play(
            "set_progress", job_id=job_id, lease_token=lease_token, percent=percent,
            message=message,
        )  # fmt: skip

    def maintenance(self, max_jobs: int | None) -> None:
        if max_jobs is None:
            self.play("tick")
        else:
            self.play("sweep_stale_leases", max_jobs=max_jobs)

    def retry(self, pick: int, force: bool) -> None:
        self.play("retry_job", job_id=self.job(pick), force=force)

    def cancel(self, pick: int, reason: str | None) -> None:
        self.play("cancel_job", job_id=self.job(pick), reason=reason)

    def change(self, pick: int, change: dict[str, int]) -> None:
        function = "set_priority" if "priority" in change else "reschedule_job"
        self.play(function, job_id=self.job(pick), **change)

    def brake(self, function: str, queue: str, reason: str | None) -> None:
        given = {"reason": reason} if function.startswith("pause") else {}
        if function.endswith("queue"):
            given["queue"] = queue
        self.play(function, **given)

    def set_queue(self, settings: dict[str, Any], queue: str, reset: bool) -> None:
        self.play("set_queue", queue=queue, **settings, reset=reset)

    def schedule(self, **schedule: Any) -> None:
        self.play("schedule_job", **schedule)

    def limit(self, whose: dict[str, str], bound: dict[str, Any]) -> None:
        self.play("set_limit", **whose, **bound)

    def settle(self) -> None:
        """Tick, claim and finish until nothing comes any more and nothing has room."""
        if self.backup is not None:
            return
        idle = 0
        for _ in range(20):
            behind = max(0, self.model.latest - self.model.now) / SECOND
            for step in (behind + 3, 4):
                self.let_time_pass(step)
                self.play("tick")
            self.model.settle()
            before = len(self.leases)
            self.play("claim_jobs", worker="w1", queues=["default", "mail"], max_jobs=10)
            if given := self.leases[before:]:
                ids, tokens = [list(part) for part in zip(*given, strict=True)]
                more = {"results": None, "next_stages": None}
                self.play(
                    "finish_jobs", {"refs": given, **more}, job_ids=ids, lease_tokens=tokens,
                    **more,
                )  # fmt: skip
                idle = 0
            elif not self.model.late:
                return
            else:
                idle += 1
            if idle == PATIENCE:
                raise Divergence(f"{[job.id for job in self.model.late]} were passed over")

    def crowd_in(self, jobs: list[dict[str, Any]]) -> None:
        self.play("enqueue_many", jobs=jobs)

    def define(self, stages: list[dict[str, Any]]) -> None:
        self.play("define_pipeline", pipeline="p", stages=stages)

    def drop(self) -> None:
        self.play("drop_pipeline", pipeline="p")

    def start(self, given: dict[str, Any]) -> None:
        self.play("start_pipeline", pipeline="p", **given)

    def restart_pipeline(self, pick: int, stage: str) -> None:
        job_id = self.job(pick, lambda job: job.pipeline and not job.is_live)
        self.play("restart_pipeline", job_id=job_id, stage=stage)

    def resume_ordering_key(self, ordering_key: str) -> None:
        self.play("resume_ordering_key", ordering_key=ordering_key)

    def effect(self, function: str, key: str, pick: int, word: str) -> None:
        job_id, lease_token = self.lease(pick)
        its = {"scope": "mail", "key": key, "job_id": job_id, "lease_token": lease_token}
        if function == "record_effect":
            its["if_unknown"] = word
        elif function == "complete_effect":
            its["result"] = {"said": word}
        elif function == "settle_effect":
            is_done = word == "skip"
            its = {"scope": "mail", "key": key, "outcome": "done" if is_done else "again"}
            its["result"] = {"said": word} if is_done else None
        self.play(function, **its)

    def operate_schedule(self, name: str, function: str) -> None:
        self.play(function, name=name)

    def ask_wrongly(self, wrong: dict[str, Any]) -> None:
        """What is refused for its arguments changes nothing, whatever there is."""
        given = {name: value for name, value in wrong.items() if name != "function"}
        code, _ = self.database.call(wrong["function"], **given)
        if self.backup is not None:
            self.undo()
        if code != "22023":
            raise Divergence(f"{wrong} gave {code}")
        self.compare("a wrong call of " + wrong["function"], given)

    def let_time_pass(self, step: float) -> None:
        self.model.now += int(step * SECOND)
        self.model.latest = max(self.model.latest, self.model.now)
        self.database.now = self.model.now

    def begin(self) -> None:
        self.backup = pickle.dumps(self.model)
        self.model.transaction += 1
        self.database.begin()

    def end(self, is_committed: bool) -> None:
        """Commit, or crash before it."""
        if is_committed:
            self.database.commit()
            self.backup = None
        else:
            self.database.rollback()
            self.undo()


def claimed(function: str, answer: Any) -> list[int]:
    """Return the ids of the jobs that an answer gives to a worker."""
    if function == "claim_jobs" and isinstance(answer, list):
        return [row[0] for row in answer]
    if function == "finish_and_claim" and isinstance(answer, list):
        return [row[1] for row in answer if row[0] == "claimed"]
    return []


def machine_on(its_database: Database) -> type[Machine]:
    class OnDatabase(Machine):
        database = its_database
        found: ClassVar[list[str]] = []  # the steps to each divergence

    return OnDatabase


def play(
    database: Database,
    number: int,
    examples: int,
    steps: int = STEPS,
    *,
    can_shrink: bool = True,
) -> None:
    """Play so many examples, for a number always the same; raise the shortest that is wrong."""
    machine = machine_on(database)
    # Hypothesis would let five follow each example that repeat parts of it: too much alike.
    with patch.object(ConjectureRunner, "generate_mutations_from", lambda *_: None):
        try:
            run_state_machine_as_test(
                seed(number)(machine),
                settings=settings(
                    max_examples=examples, stateful_step_count=steps, deadline=None,
                    database=None, suppress_health_check=list(HealthCheck), print_blob=False,
                    report_multiple_bugs=False,
                    phases=[Phase.generate] + [Phase.shrink] * can_shrink,
                ),
            )  # fmt: skip
        except Flaky as flaky:
            flaky.add_note("It came once, after these:\n" + "".join(machine.found[:1]))
            raise
