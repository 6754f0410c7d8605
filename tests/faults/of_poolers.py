"""A fault that is a way of life: everybody shares two sessions through pgbouncer."""

from __future__ import annotations

from faults.fault_run import Scene, fault
from support.pooler import find_pgbouncer, pooled

JOBS_A_ROUND = 1000


def lacks_pgbouncer() -> str:
    """Say what this machine lacks for a pooler, or nothing."""
    return "" if find_pgbouncer() else "needs pgbouncer"


@fault("pooler", "thousand jobs through two sessions by 32 clients", 100, minutes=4,
       lacks=lacks_pgbouncer)  # fmt: skip
def pooler(scene: Scene) -> None:
    """Let eight workers with their connections, and some producers, share two sessions."""
    direct = scene.url()
    url = scene.stack.enter_context(pooled(direct))
    with scene.load(
        url,
        observed=direct,
        workers=8,
        producers=4,
        backlog=500,
        worker_options={"batch": 20},
        producer_options={"pause": 0},
    ) as load:
        for number in scene.rounds():
            while load.enqueued() < JOBS_A_ROUND * (number + 1):
                load.pause(0.2)
        sessions = load.ask("select count(*) from pg_stat_activity where datname = "
                            "current_database() and pid <> pg_backend_pid()")  # fmt: skip
    scene.counts["sessions"] = int(sessions)
