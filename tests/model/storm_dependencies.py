"""Dependencies: jobs after jobs and before jobs, some of which die, are cancelled or retried.

The model is the list of who waits for whom, as the calls that were committed have asked for it,
and the lives of those jobs.  What must be true:

1. A job starts, which is to stop being blocked, once; and only when each of its parents has
   succeeded since it was enqueued or was so then; with `run` dead or cancelled will do.
2. Only with `cancel` is it cancelled for them, and only when one is dead or cancelled.
3. Who names a job in `blocks` is one of its parents, or is refused.
4. Each job comes to its end, and it is left on record who waits for whom only of jobs that were
   cancelled: so that a retry waits for those parents again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg

from model import storm_work
from model.storm import Call, History, Player, Step, Violation
from model.storm_work import BACKOFF, ENDED, REFUSALS, is_start

ASKING = {"enqueue", "enqueue_many"}
POLICIES = ["cancel", "run", "wait"]
# Of who is named in `blocks`: it has ended, or it has started.
REFUSED = {asking: {"RT003", "RT013"} for asking in ASKING}
# So few that they are soon parents and children of each other.
RECENT = "select id from rota.jobs order by id desc limit 12"
BLOCKED = "select id from rota.jobs where status = 'blocked' order by id desc limit 6"
FAILED = """
    select distinct d.parent_id from rota.dependencies as d
    join rota.jobs as j on j.id = d.job_id
    join rota.finished_jobs as p on p.id = d.parent_id
    order by d.parent_id
"""
LEFT = "select exists (select from rota.pending_checks) as is_so"


@dataclass
class Child:
    """A job with those that it has to wait for, and the call that asked for each."""

    call: Call
    policy: str
    parents: dict[int, Call] = field(default_factory=dict)


class Dependencies:
    """The feature; see the form in storm.py."""

    name = "dependencies"
    places = ("jobs", "finished_jobs", "dependencies")

    def setup(self, db: psycopg.Connection[Any]) -> None:
        pass

    def step(self, player: Player) -> None:
        steps = [ask, ask_many, split, storm_work.claim, storm_work.end, maintenance, operate]
        player.random.choices(steps, [14, 3, 3, 34, 34, 5, 7])[0](player)

    def drain(self, player: Player) -> bool:
        retry_parents(player)
        has_jobs = storm_work.drain(player)
        return has_jobs or bool((player.connection.execute(LEFT).fetchone() or {})["is_so"])

    def check(self, history: History) -> list[Violation]:
        children = find_children(history)
        for job_id, child in children.items():
            history.families[f"job {job_id}"] = {job_id, *child.parents}
        return [
            *storm_work.check_jobs(history, REFUSALS | REFUSED),
            *(
                found
                for job_id, child in children.items()
                for found in check_child(history, job_id, child)
            ),
            *check_left(history),
        ]


FEATURE = Dependencies()


def retry_parents(player: Player) -> None:
    """Let go on who waits for jobs that are dead or were cancelled."""
    for row in player.connection.execute(FAILED).fetchall():
        player.call("retry_job", job_id=row["parent_id"])


def pick(player: Player, query: str, most: int) -> list[int]:
    """Return some of the jobs that are live just now."""
    found = [row["id"] for row in player.connection.execute(query).fetchall()]
    return player.random.sample(found, min(len(found), player.random.randint(1, most)))


def new_job(player: Player) -> dict[str, Any]:
    """Return the arguments of a job that waits for others, is waited for, or both."""
    job: dict[str, Any] = {"job_type": "t", "max_attempts": 2, "backoff": BACKOFF}
    how = player.random.choices(["plain", "after", "before"], [35, 45, 20])[0]
    blocks = pick(player, BLOCKED, 1) if how == "before" else []
    if blocks and player.chance(0.4):
        blocks = player.memory.get("seen", blocks)[-1:]  # which may have started since
    if blocks:
        job["blocks"] = blocks[0]
    if how == "after":
        parents = pick(player, RECENT, 3)
        if player.memory.get("seen") and player.chance(0.3):
            parents.append(player.random.choice(player.memory["seen"]))
        job["depends_on"] = parents
        job["if_parent_dead"] = player.random.choice(POLICIES)
    return job


def ask(player: Player) -> None:
    job = new_job(player)
    with player.transaction(is_committed=player.chance(0.8)):
        player.call("enqueue", **job)


def ask_many(player: Player) -> None:
    jobs = [new_job(player) for _ in range(player.random.randint(2, 5))]
    with player.transaction(is_committed=player.chance(0.8)):
        player.call("enqueue_many", jobs=jobs)


def split(player: Player) -> None:
    """Be a job that enqueues first the last job, and then the parts before it."""
    held = player.memory.get("held", [])
    if not held:
        return storm_work.claim(player)
    last = player.call(
        "enqueue",
        job_type="t",
        max_attempts=2,
        backoff=BACKOFF,
        depends_on=[held[-1][0]],
        if_parent_dead=player.random.choice(POLICIES),
    )
    part = {"job_type": "t", "max_attempts": 2, "backoff": BACKOFF}
    if last.is_done:
        part["blocks"] = last.rows[0]["enqueue"]
    for _ in range(player.random.randint(0, 2)):
        with player.transaction(is_committed=player.chance(0.8)):
            player.call("enqueue_many", jobs=[part] * player.random.randint(1, 3))
    return None


def maintenance(player: Player) -> None:
    player.call(player.random.choice(["sweep_stale_leases", "tick"]))


def operate(player: Player) -> None:
    """Cancel or retry a job that was seen, or one that waits."""
    player.memory.setdefault("seen", []).extend(pick(player, BLOCKED, 1))
    storm_work.operate(player)


def find_children(history: History) -> dict[int, Child]:
    """Return who waits for whom, by what was asked for and committed."""
    children: dict[int, Child] = {}
    asked: list[tuple[int, dict[str, Any], Call]] = []
    for call in history.calls.values():
        if call.function == "enqueue" and call.is_done:
            asked.append((call.rows[0]["enqueue"], call.arguments, call))
        elif call.function == "enqueue_many" and call.is_done:
            ids = (row["job_id"] for row in call.rows)
            asked += [
                (i, job, call) for i, job in zip(ids, call.arguments["jobs"], strict=True)
            ]
    for job_id, job, call in asked:
        policy = job.get("if_parent_dead", "cancel")
        children[job_id] = Child(call, policy, dict.fromkeys(job.get("depends_on", []), call))
    for job_id, job, call in asked:
        if "blocks" in job:
            children[job["blocks"]].parents[job_id] = call
    return children


def check_child(history: History, job_id: int, child: Child) -> Iterator[Violation]:
    key, steps = f"job {job_id}", history.steps_by_job[job_id]
    starts = 0
    for step in steps:
        problem = ""
        if step.statuses[0] in ENDED:
            if child.policy == "run":
                break  # of those that ended badly it waits for none
            starts = 0
        if is_start(step):
            starts += 1
            waits = [
                parent
                for parent, call in child.parents.items()
                if not has_ended(history, parent, ends_wait(child.policy), call, step)
            ]
            if starts > 1:
                problem = "started once more"
            elif waits:
                problem = f"started before its parents {waits} had ended well"
        elif step.statuses == ("blocked", "cancelled") and step.call.function != "cancel_job":
            is_asked = child.policy == "cancel" and any(
                has_ended(history, parent, {"dead", "cancelled"}, call, step)
                for parent, call in child.parents.items()
            )
            problem = "" if is_asked else "was cancelled for nothing"
        if problem:
            yield Violation(f"job {job_id} {problem}", key, step.call.name)
    if steps[-1].statuses[1] not in ENDED:
        yield Violation(f"job {job_id} is left {steps[-1].statuses[1]}", key)


def ends_wait(policy: str) -> set[str]:
    return ENDED if policy == "run" else {"succeeded"}


def has_ended(history: History, parent: int, how: set[str], asked: Call, until: Step) -> bool:
    """Whether a job may have been so at any moment from the call until that step."""
    steps = history.steps_by_job[parent]
    following = [*steps[1:], None]
    return any(
        step.statuses[1] in how
        and step.number < until.number
        and (after is None or after.call.ended >= asked.began)
        for step, after in zip(steps, following, strict=True)
    )


def check_left(history: History) -> Iterator[Violation]:
    """No row is left that says who waits for whom, but of jobs that were cancelled."""
    left: dict[tuple[int, int], str] = {}
    for change in history.changes:
        if change.place == "dependencies":
            row = change.new or change.old or {}
            pair = (row["parent_id"], row["job_id"])
            left.pop(pair, None)
            if change.new:
                left[pair] = change.call
    for (parent, job_id), call in left.items():
        if history.steps_by_job[job_id][-1].statuses[1] == "cancelled":
            continue
        yield Violation(f"job {job_id} is left to wait for {parent}", f"job {job_id}", call)
