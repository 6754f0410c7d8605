"""The last act: a customer's server is away for some seconds, with a breaker and without."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from psycopg import Connection

from rota import Client

from .display import Display
from .processes import Processes

PLAIN, GUARDED = "rota_demo_plain", "rota_demo_breaker"
QUEUES = (PLAIN, GUARDED)
WORKERS = {queue: f"worker-of-{queue}" for queue in QUEUES}
JOB_TYPE = "deliver_webhook"
JOBS, AWAY = 20, 6.0
"""How many webhooks wait in each queue, and for how many seconds the server is away."""

PATIENCE = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """What became of the webhooks of one queue."""

    queue: str
    delivered: int
    attempts: int
    late: float
    """How many seconds after the return of the server the last one was delivered."""


class _Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def play_outage(
    connection: Connection[Any], processes: Processes, display: Display
) -> list[Outage]:
    """Let the same webhooks wait in two queues, one of them with a breaker."""
    client = Client(connection)
    client.set_breaker(JOB_TYPE, GUARDED, max_failures=3, pause_for=timedelta(seconds=1))
    # Bound and not listening: every connection is refused.
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Receiver, bind_and_activate=False)
    server.server_bind()
    port = server.server_address[1]
    client.enqueue_many(
        [
            {
                "job_type": JOB_TYPE,
                "queue": queue,
                "payload": {"event_id": f"evt_{number}", "port": port},
                "backoff": {"kind": "fixed", "base_seconds": 0.5},
                "max_attempts": 1000,
            }
            for queue in QUEUES
            for number in range(JOBS)
        ]
    )
    display.say(
        f"a customer's server is away: {JOBS} webhooks wait with a breaker, {JOBS} without"
    )
    for queue, name in WORKERS.items():
        command = f"rota worker demo.handlers:registry --name {name} --queue {queue}"
        processes.start(
            name, [*command.split(), "--concurrency", "4", "--poll-interval", "0.2"]
        )
    begun = time.monotonic()
    while not _attempts_of(connection) and time.monotonic() < begun + PATIENCE / 2:
        time.sleep(0.1)
    time.sleep(AWAY)
    back_at = connection.execute("select clock_timestamp()").fetchone()
    server.server_activate()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    display.say("it is back")
    try:
        while _count(connection) < 2 * JOBS and time.monotonic() < begun + PATIENCE:
            time.sleep(0.1)
        processes.stop(list(WORKERS.values()))
    finally:
        server.shutdown()
        server.server_close()
    return [
        Outage(queue=queue, delivered=delivered, attempts=attempts, late=late)
        for queue, delivered, attempts, late in connection.execute(
            "select q.queue, count(f.id)::int, coalesce(sum(f.attempts), 0)::int,"
            " coalesce(extract(epoch from max(f.finished_at) - %s), 0)::float8"
            " from unnest(%s::text[]) as q (queue) left join rota.finished_jobs as f"
            " on f.queue = q.queue and f.status = 'succeeded' group by 1 order by 1 desc",
            [back_at and back_at[0], list(QUEUES)],
        ).fetchall()
    ]


def forget_breaker(connection: Connection[Any]) -> None:
    """Take the breaker away, and the pause that it may have set."""
    Client(connection).set_breaker(JOB_TYPE, GUARDED, reset=True)


def _attempts_of(connection: Connection[Any]) -> int:
    row = connection.execute(
        "select count(distinct e.queue) = 2 from rota.job_errors as e where e.queue = any(%s)",
        [list(QUEUES)],
    ).fetchone()
    return 0 if row is None else int(row[0])


def _count(connection: Connection[Any]) -> int:
    row = connection.execute(
        "select count(*) from rota.finished_jobs where queue = any(%s)", [list(QUEUES)]
    ).fetchone()
    return 0 if row is None else int(row[0])
