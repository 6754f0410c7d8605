"""Ask a slow service two questions at a time, and let every customer have a turn.

DATABASE_URL=postgresql://localhost/shop python limits.py
"""

import os
import threading
import time

import psycopg

import rota

registry = rota.Registry()
running: set[int] = set()
most = 0
order: list[str] = []
lock = threading.Lock()


@registry.handler("ask_service")
def ask_service(job: rota.Job) -> None:
    """Ask, and watch how many do so at once."""
    global most
    with lock:
        running.add(job.job_id)
        most = max(most, len(running))
        order.append(job.payload["customer"])
    time.sleep(0.05)
    with lock:
        running.remove(job.job_id)


if __name__ == "__main__":
    database = os.environ.get("DATABASE_URL", "")
    with psycopg.connect(database, autocommit=True) as connection:
        client = rota.Client(connection)
        client.set_limit(job_type="ask_service", max_running=2)
        client.enqueue_many(
            [
                {
                    "job_type": "ask_service",
                    "payload": {"customer": name},
                    "limit_key": f"customer:{name}",
                }
                for name in ["big"] * 10 + ["small"] * 2
            ]
        )
        rota.Worker(database, registry, concurrency=8).run(drain=True)
    print(f"at most {most} at once, in the order {' '.join(order)}")
