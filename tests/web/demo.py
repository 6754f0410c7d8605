"""A shop whose mail provider fails, live on the page: ``make web-demo``.

Everything is real: a throw-away server, a worker, jobs that come in all the time, and the page.
``--pictures DIR`` takes the pictures of the docs instead, when the shop has run for a while.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

import rota
from rota.testing.server import EmbeddedPostgres, memory
from web.sample_jobs import set_past

ROOT = Path(__file__).resolve().parents[2]
registry = rota.Registry()
_random = random.Random(7)


class BadCurrencyError(Exception):
    """An order in a currency that nobody knows."""


@registry.handler("send_invoice")
def send_invoice(job: rota.Job) -> dict[str, Any]:
    """Send a mail, by a provider that does not always answer."""
    time.sleep(_random.uniform(0.01, 0.2))
    if job.payload["currency"] not in ("EUR", "PLN"):
        currency, order = job.payload["currency"], job.payload["order"]
        raise rota.FatalError(f"order {order} has no currency '{currency}'")
    if _random.random() < 0.3:
        raise TimeoutError(f"no answer from smtp.shop.example in {_random.randint(10, 30)} s")
    return {"message_id": f"<{job.payload['order']}@shop.example>"}


@registry.handler("import_orders")
def import_orders(job: rota.Job) -> None:
    """Take a while, and tell how far it is."""
    for page in range(1, 41):
        job.set_progress(page * 2.5, f"page {page} of 40")
        time.sleep(1)


@registry.handler("sync_stock")
def sync_stock(job: rota.Job) -> None:
    """Fail for one warehouse."""
    if job.payload.get("warehouse") == 3:
        raise rota.FatalError("the stock of article 4711 is negative")


@registry.handler("poll_provider")
def poll_provider(job: rota.Job) -> None:
    """Do nothing."""


def fill(db: psycopg.Connection[Any]) -> None:
    """Put in what is there from the first moment."""
    db.execute(
        "select rota.schedule_job(name => 'nightly-cleanup', schedule => '0 2 * * *',"
        " job_type => 'clean_up', time_zone => 'Europe/Warsaw', queue => 'reports')"
    )
    db.execute(
        "select rota.schedule_job(name => 'sunday-report', schedule => '30 2 * * 0',"
        " job_type => 'weekly_report', time_zone => 'Europe/Berlin', queue => 'reports')"
    )
    db.execute(
        "select rota.schedule_job(name => 'poll-provider', schedule => 'every 10 seconds',"
        " job_type => 'poll_provider', queue => 'mail')"
    )
    db.execute("select rota.set_limit(queue => 'mail', max_running => 8)")
    db.execute("select rota.set_limit(limit_key => 'provider:*', max_starts => 20)")
    for _ in range(5):
        db.execute(
            "select rota.enqueue('sync_stock', '{\"warehouse\": 3}', queue => 'mail',"
            " ordering_key => 'warehouse:3')"
        )
    db.execute("select rota.enqueue('import_orders', '{\"shop\": 7}', queue => 'mail')")
    row = db.execute("select rota.enqueue('build_report', queue => 'reports')").fetchone()
    db.execute(
        "select rota.enqueue('mail_report', queue => 'reports', depends_on => %s)",
        [[row[0] if row else 0]],
    )
    db.execute("select set_config('rota.actor', 'ann', false)")
    db.execute("select rota.pause_queue('reports', 'the data warehouse moves')")
    db.execute("select rota.set_breaker('send_invoice', 'mail', failed_percent => 80)")
    db.execute("select set_config('rota.actor', 'bea', false)")
    db.execute("select rota.set_limit(queue => 'mail', max_running => 6)")
    db.execute("select rota.reschedule_job(%s, delay => '1 hour')", [row[0] if row else 0])
    db.execute(
        "select rota.schedule_job(name => 'nightly-cleanup', schedule => '30 3 * * *',"
        " job_type => 'clean_up', time_zone => 'Europe/Warsaw', queue => 'reports')"
    )
    db.execute("select set_config('rota.actor', '', false)")


def produce(url: str, stop: threading.Event) -> None:
    """Enqueue invoices until stopped, one in thirty of them wrong."""
    with psycopg.connect(url, autocommit=True) as db:
        order = 1000
        while not stop.is_set():
            order += 1
            payload = {
                "order": order,
                "customer": {"id": order % 50, "name": "Ada Lovelace"},
                "currency": "XX" if order % 30 == 0 else _random.choice(["EUR", "PLN"]),
                "amount": 12345678901234567890,
                "api_token": "not to be seen",
            }
            db.execute(
                "select rota.enqueue('send_invoice', %s, queue => 'mail', limit_key =>"
                " 'provider:smtp', headers => '{\"tenant\": \"acme\"}')",
                [Jsonb(payload)],
            )
            stop.wait(_random.expovariate(4))


def pictures(address: str, folder: Path, db: psycopg.Connection[Any]) -> None:
    """Take a picture of each screen."""
    from playwright.sync_api import sync_playwright

    from web.test_browser import CHROMIUM, FLAGS

    row = db.execute(
        "select max(id) from rota.dead_jobs where job_type = 'send_invoice'"
    ).fetchone()
    dead = row[0] if row else 0
    # Where the shop lies on this machine is of no interest.
    db.execute(
        "update rota.job_errors set stack = replace(stack, %s, '/srv/shop')", [str(ROOT)]
    )
    shots = [
        ("overview", "/", 1280, "light"), ("overview-phone", "/", 390, "dark"),
        ("job-phone", f"/jobs/{dead}", 390, "light"),
        ("jobs", "/jobs?queue=mail", 1280, "dark"), ("job", f"/jobs/{dead}", 1280, "light"),
        ("errors", "/errors?since=1h", 1280, "light"),
        ("schedule", "/schedules/sunday-report", 1280, "light"),
        ("schedules", "/schedules", 1280, "light"), ("workers", "/workers", 1280, "dark"),
        ("waiting", "/waiting", 1280, "light"), ("audit", "/audit", 1280, "light"),
        ("retry", "/all/retry?type=send_invoice&status=dead", 1280, "light"),
        ("waiting-phone", "/waiting", 390, "dark"),
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for name, path, width, colors in shots:
            page = browser.new_page(
                viewport={"width": width, "height": 800},
                color_scheme=colors,  # type: ignore[arg-type]
            )
            page.goto(address + path)
            page.screenshot(path=folder / f"{name}.png", full_page=name == "overview")
            page.close()
        browser.close()


def main() -> None:
    """Play the shop until Ctrl-C, or until the pictures are taken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8025)
    parser.add_argument("--pictures", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    with EmbeddedPostgres(directory=memory(), settings=["max_connections=100"]) as server:
        url = server.url()
        install = [
            "psql",
            "-X",
            "-q",
            "-v",
            "with_roles=1",
            "-d",
            url,
            "-f",
            str(ROOT / "sql" / "install.sql"),
        ]
        subprocess.run(install, check=True)
        stop = threading.Event()
        worker = rota.Worker(url, registry, name="shop-1", queues=["mail"], concurrency=8)
        page = [sys.executable, "-m", "rota", "web", "-d", url, "--allow-acts"]
        page += ["--port", str(arguments.port)]
        with psycopg.connect(url, autocommit=True) as db:
            fill(db)
            threads = [
                threading.Thread(target=worker.run, daemon=True),
                threading.Thread(target=produce, args=(url, stop)),
            ]
            for thread in threads:
                thread.start()
            serving = subprocess.Popen(page)
            try:
                if arguments.pictures:
                    time.sleep(20)
                    set_past(db)
                    address = f"http://127.0.0.1:{arguments.port}"
                    pictures(address, arguments.pictures, db)
                else:
                    serving.wait()
            except KeyboardInterrupt:
                pass
            finally:
                stop.set()
                worker.stop()
                for thread in threads:
                    thread.join(timeout=10)
                serving.terminate()
                serving.wait()


if __name__ == "__main__":
    main()
