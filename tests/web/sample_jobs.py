"""A bit of everything that an operator may meet, with texts that would like to be HTML."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, LiteralString

import psycopg
from psycopg.types.json import Jsonb

from rota import __version__

HOSTILE = "\"><img src=x onerror=alert(1)>'</script><script>alert(2)</script>{{ 7*7 }}&amp;"
BIG = 12345678901234567890
STACK = 'Traceback (most recent call last):\n  File "jobs.py", line 4\n</pre>' + HOSTILE


@dataclass
class Scene:
    """The ids of its jobs by what they stand for."""

    jobs: dict[str, int] = field(default_factory=dict)


def set_scene(db: psycopg.Connection[Any]) -> Scene:
    """Fill the database."""
    scene = Scene()

    def one(query: LiteralString, *values: Any) -> Any:
        row = db.execute(query, values).fetchone()
        assert row is not None
        return row[0]

    def enqueue(job_type: str, payload: Any, **options: Any) -> int:
        names = "".join(f", {name} => %({name})s" for name in options)
        row = db.execute(
            f"select rota.enqueue(job_type => %(job_type)s, payload => %(payload)s{names})",
            {"job_type": job_type, "payload": Jsonb(payload), **options},
        ).fetchone()
        assert row is not None
        return int(row[0])

    def claim(queue: str, job_id: int) -> int:
        found = db.execute(
            "select job_id, lease_token from rota.claim_jobs(worker => 'host-1:4711',"
            " queues => %s, max_jobs => 1, lease => '1 hour')",
            [[queue]],
        ).fetchall()
        assert [row[0] for row in found] == [job_id]
        return int(found[0][1])

    def fail(queue: str, job_id: int, error: str, error_type: str, *, fatal: bool) -> None:
        db.execute(
            "select rota.fail_job(job_id => %s, lease_token => %s, error => %s,"
            " error_type => %s, stack => %s, fatal => %s)",
            [job_id, claim(queue, job_id), error, error_type, STACK, fatal],
        )

    db.execute(
        "select rota.report_worker(worker => 'host-1:4711', queues => '{mail,hostile}',"
        " host => 'host-1', pid => 4711, version => %s)",
        [__version__],
    )
    jobs = scene.jobs
    payload = {"customer": {"id": 7, "name": HOSTILE}, "password": "hunter2", "amount": BIG}
    jobs["done"] = enqueue("send_invoice", payload, queue="mail", idempotency_key="invoice:7")
    db.execute(
        "select rota.finish_job(%s, %s, %s)",
        [jobs["done"], claim("mail", jobs["done"]), f'{{"sum": {BIG}.5}}'],
    )
    jobs["dead"] = enqueue("send_invoice", payload, queue="mail")
    fail("mail", jobs["dead"], "order 17 has no currency 'XX'", "BadCurrency", fatal=True)
    jobs["dead2"] = enqueue("send_invoice", payload, queue="mail")
    fail("mail", jobs["dead2"], "order 18 has no currency 'YY'", "BadCurrency", fatal=True)
    jobs["failed"] = enqueue("send_mail", payload, queue="mail")
    fail("mail", jobs["failed"], "no answer in 30 s", "TimeoutError", fatal=False)
    jobs["hostile"] = enqueue("hostile", {HOSTILE: HOSTILE}, queue="hostile")
    fail("hostile", jobs["hostile"], HOSTILE, HOSTILE[:60], fatal=True)
    jobs["running"] = enqueue("import", {"rows": 12}, queue="mail")
    token = claim("mail", jobs["running"])
    db.execute(
        "select rota.set_progress(%s, %s, 42.5, %s)", [jobs["running"], token, HOSTILE[:100]]
    )
    jobs["shared"] = enqueue("import", {}, queue="mail", limit_key="customer:7")
    claim("mail", jobs["shared"])
    jobs["queued"] = enqueue("send_mail", {}, queue="mail", headers='{"tenant": "acme"}')
    jobs["later"] = enqueue("report", {}, queue="reports", delay="2 hours")
    jobs["parent"] = enqueue("extract", {}, queue="reports", delay="1 hour")
    jobs["child"] = enqueue("load", {}, queue="reports", depends_on=[jobs["parent"]])
    jobs["head"] = enqueue("stock", {}, queue="hostile", ordering_key="warehouse:3")
    jobs["behind"] = enqueue("stock", {}, queue="hostile", ordering_key="warehouse:3")
    fail("hostile", jobs["head"], "the stock is negative", "NegativeStock", fatal=True)
    jobs["sender"] = enqueue("send_once", {}, queue="hostile")
    token = claim("hostile", jobs["sender"])
    db.execute(
        "select rota.record_effect(job_id => %s, lease_token => %s, scope => 'mails',"
        " key => %s)",
        [jobs["sender"], token, HOSTILE],
    )
    db.execute(
        "select rota.fail_job(job_id => %s, lease_token => %s, error => 'the worker vanished',"
        " fatal => true)",
        [jobs["sender"], token],
    )
    stages = [
        {"stage": name, "job_type": f"{name}_order"} for name in ("check", "pack", "ship")
    ]
    db.execute("select rota.define_pipeline('order', %s)", [Jsonb(stages)])
    jobs["pipeline"] = one("select rota.start_pipeline('order', %s)", Jsonb(payload))
    db.execute(
        "select rota.finish_job(%s, %s, '{\"is_good\": true}')",
        [jobs["pipeline"], claim("default", jobs["pipeline"])],
    )
    db.execute(
        "select rota.report_worker(worker => 'host-2:17', queues => '{mail}', host => 'host-2',"
        " pid => 17, version => '0.2.0', job_types => '{send_mail}')"
    )
    db.execute(
        "update rota.workers set last_seen_at = last_seen_at - interval '1 hour'"
        " where worker = 'host-2:17'"
    )
    db.execute("select rota.set_breaker('send_mail', 'mail', max_failures => 20)")
    db.execute("select rota.set_limit(queue => 'mail', max_running => 5, max_starts => 100)")
    db.execute("select rota.set_limit(limit_key => 'customer:7', weight => 3)")
    db.execute(
        "select rota.schedule_job(name => 'weekly', schedule => '30 2 * * 0',"
        " queue => 'reports', job_type => 'report', payload => %s,"
        " time_zone => 'Europe/Berlin')",
        [Jsonb({HOSTILE: HOSTILE})],
    )
    db.execute(
        "select rota.schedule_job(name => 'changes', schedule => '30 2 * 3 0',"
        " job_type => 'report', time_zone => 'Europe/Berlin')"
    )
    db.execute(
        "select rota.schedule_job(name => 'often', schedule => 'every 1 minute',"
        " job_type => 'poll', queue => 'poll')"
    )
    # The statistics count a minute when it is over.
    db.execute("select * from rota.tick()")
    set_past(db)
    db.execute("select rota.pause_queue('reports', %s)", [HOSTILE])
    return scene


def set_past(db: psycopg.Connection[Any]) -> None:
    """Give the plots an hour that nothing has run in, with two deploys."""
    now = datetime.now(UTC).replace(second=0, microsecond=0)
    for minutes, version in ((44, "0.1.9"), (19, __version__)):
        db.execute(
            "insert into rota.worker_starts values (date_bin('5 minutes', %s, 'epoch'), %s, 4)"
            " on conflict do nothing",
            [now - timedelta(minutes=minutes), version],
        )
    random = Random(7)
    for minute in range(1, 60):
        bad = 0.6 if 18 < minute < 30 else 0.1
        total = random.randint(180, 260)
        failed = int(total * bad)
        for outcome, count in (("succeeded", total - failed), ("failed", failed), ("dead", 2)):
            db.execute(
                "insert into rota.job_stats (step, starts_at, queue, job_type, outcome, total,"
                " total_wait, longest_wait, wait_buckets, wait_counts, total_run, longest_run,"
                " run_buckets, run_counts, waits, runs) values ('minute', %s, 'mail',"
                " 'send_invoice', %s, %s, '1 s', '9 s', %s, %s, '1 s', '2 s', %s, %s, %s, %s)"
                " on conflict do nothing",
                [
                    now - timedelta(minutes=minute), outcome, count,
                    [60, 80 + int(bad * 20)], [count, count // 8],
                    [50, 70 + random.randint(0, 6)], [count, count // 9],
                    count + count // 8, count + count // 9,
                ],
            )  # fmt: skip
