"""See a shop outgrow one Postgres: two servers, four databases, a front, and failures.

    python -m faults.scale_demo [--seconds N]

Producers call the front, and one worker process works in all databases.  Meanwhile a server is
killed and comes back, a queue moves to another database, and the other server dies for good and
its standby takes over.  At the end each order that a producer was told of has been done once,
and those of a customer in order.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import LiteralString

import psycopg

from support.server import INSTALL, Server

NUMBERS = {"a": (1, 2), "b": (3, 4)}
WORDS = {1: "one", 2: "two", 3: "three", 4: "four"}
PRODUCERS = 4
CUSTOMERS = 10
HANDLERS = """\
import rota

registry = rota.Registry()


@registry.handler("ship_order")
def ship_order(job: rota.Job) -> None:
    with job.transaction() as connection:
        connection.execute(
            "insert into shipped (job_id, customer, number) values (%s, %s, %s)",
            (job.job_id, job.payload["customer"], job.payload["number"]),
        )
"""


class Producer(threading.Thread):
    """Orders of some customers, one after the other; it asks the front until that answers."""

    def __init__(self, front: str, name: int) -> None:
        super().__init__(daemon=True)
        self._front, self._dice = front, random.Random(name)
        self._customers = [f"customer {name}.{n}" for n in range(CUSTOMERS)]
        self._connection: psycopg.Connection[object] | None = None
        self.told: Counter[str] = Counter()
        self.job_ids: list[int] = []
        self.mails: set[tuple[str, int]] = set()
        self.refused: Counter[str] = Counter()
        self.stopping = threading.Event()

    def run(self) -> None:
        while not self.stopping.is_set():
            customer = self._dice.choice(self._customers)
            number = self.told[customer] + 1
            while (job_id := self._order(customer, number)) is None:
                time.sleep(0.1)
            self.told[customer] = number
            self.job_ids.append(job_id)

    def _order(self, customer: str, number: int) -> int | None:
        return self._ask(
            "select rota.enqueue('ship_order',"
            " jsonb_build_object('customer', %s::text, 'number', %s::int), 'orders',"
            " idempotency_key => %s, unique_for => '1 hour', ordering_key => %s,"
            " shard_key => %s)",
            (customer, number, f"{customer}:{number}", customer, customer),
        )

    def _ask(self, query: LiteralString, parameters: tuple[object, ...]) -> int | None:
        try:
            if self._connection is None or self._connection.closed:
                self._connection = psycopg.connect(self._front, autocommit=True)
            row = self._connection.execute(query, parameters).fetchone()
            return row[0] if row else None  # type: ignore[index]
        except psycopg.Error as error:
            self.refused[error.sqlstate or "no answer"] += 1
            if self._connection is not None and self._connection.broken:
                self._connection = None
            return None


class Mailer(Producer):
    """Mails for later in database 3, without keys, which then move to database 4."""

    def _order(self, customer: str, number: int) -> int | None:
        time.sleep(0.01)
        return self._ask(
            "select rota.enqueue_to(3, 'ship_order',"
            " jsonb_build_object('customer', %s::text, 'number', %s::int), 'mails',"
            " delay => '6 seconds', ordering_key => %s)",
            (customer, number, customer),
        )

    def run(self) -> None:
        number = 0
        while not self.stopping.is_set():
            # A call that failed may have been done, so each has a number of its own.
            number += 1
            customer = "mail " + self._dice.choice(self._customers)
            if (job_id := self._order(customer, number)) is not None:
                self.mails.add((customer, number))
                self.job_ids.append(job_id)
            else:
                time.sleep(0.1)


class Shop:
    """Two servers with two databases each, a standby of the first, a front and a worker."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._stack = stack
        self._began = time.monotonic()
        password_file = folder / "passwords"
        self.a = self._server(folder / "a", ["synchronous_commit=on", "fsync=on"])
        self.b = self._server(folder / "b", ["fsync=on"])
        self.standby = self.a.copy(folder / "standby")
        stack.callback(self.standby.destroy)
        self.a.configure(synchronous_standby_names="*")
        # One password for a role everywhere: a front has one mapping for each.
        for server in (self.a, self.b):
            server.execute("create role shop superuser login password 'shop'")
        both = (
            f"postgresql://shop:shop@127.0.0.1:{self.a.port},127.0.0.1:{self.standby.port}/"
            "{}?target_session_attrs=read-write&connect_timeout=3"
        )
        alone = f"postgresql://shop:shop@127.0.0.1:{self.b.port}/{{}}?connect_timeout=3"
        self.urls = {
            number: (both if number in NUMBERS["a"] else alone).format(word)
            for number, word in WORDS.items()
        }
        self.front = both.format("front")
        self._make_databases()
        self.file = folder / "databases"
        self.file.write_text("\n".join(self.urls.values()) + "\n")
        password_file.write_text("shop:shop\n")
        words = ["front", "make", "--front", self.front, "--databases", str(self.file)]
        words += ["--role", "shop=producer", "--role", "shop=operator"]
        if self.command(*words, "--passwords", str(password_file)):
            raise SystemExit("no front could be made")
        (folder / "shop.py").write_text(HANDLERS)
        self._worker(folder)

    def _server(self, home: Path, settings: list[str]) -> Server:
        home.mkdir()
        server = Server.create(home, settings)
        self._stack.callback(server.destroy)
        return server

    def _make_databases(self) -> None:
        admins = {"a": self.urls[1].replace("/one?", "/postgres?"),
                  "b": self.urls[3].replace("/three?", "/postgres?")}  # fmt: skip
        for name, numbers in NUMBERS.items():
            with psycopg.connect(admins[name], autocommit=True) as admin:
                for number in numbers:
                    admin.execute(f"create database {WORDS[number]}".encode())
                if name == "a":
                    admin.execute("create database front")
        for number, url in self.urls.items():
            words = ["psql", "-qX", "-v", f"database_number={number}", "-f", str(INSTALL), url]
            subprocess.run(words, check=True)
            with psycopg.connect(url, autocommit=True) as db:
                db.execute(
                    "create table shipped (job_id bigint, customer text, number int,"
                    " at timestamptz default clock_timestamp())"
                )

    def _worker(self, folder: Path) -> None:
        words = [
            "--databases",
            str(self.file),
            "--queue",
            "orders",
            "--queue",
            "mails",
            "--concurrency",
            "16",
        ]
        words += ["--lease", "5", "--log-level", "error"]
        worker = subprocess.Popen(
            [sys.executable, "-m", "rota", "worker", "shop:registry", *words],
            cwd=folder, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._stack.callback(worker.wait)
        self._stack.callback(worker.terminate)

    def command(self, *words: str) -> int:
        """Run a command of rota as an operator would, and say how it went."""
        return subprocess.run([sys.executable, "-m", "rota", *words], check=False).returncode

    def say(self, what: str) -> None:
        shipped = self.shipped()
        counts = "  ".join(
            f"{number}:{'away' if rows is None else len(rows):>6}"
            for number, rows in shipped.items()
        )
        print(f"{time.monotonic() - self._began:6.1f} s  {what:<58} {counts}", flush=True)

    def shipped(self) -> dict[int, list[tuple[int, str, int]] | None]:
        found: dict[int, list[tuple[int, str, int]] | None] = {}
        for number, url in self.urls.items():
            try:
                with psycopg.connect(url) as db:
                    found[number] = db.execute(
                        "select job_id, customer, number from shipped order by at, job_id"
                    ).fetchall()
            except psycopg.OperationalError:
                found[number] = None
        return found

    def left(self) -> int:
        """How many jobs are still to be done."""
        count = 0
        for url in self.urls.values():
            with psycopg.connect(url) as db:
                row = db.execute("select count(*) from rota.jobs").fetchone()
                count += row[0] if row else 0
        return count


def play(shop: Shop, seconds: float) -> list[Producer]:
    """Let everything fail that can, while producers order."""
    producers = [Producer(shop.front, name) for name in range(PRODUCERS)]
    producers.append(Mailer(shop.front, PRODUCERS))
    for producer in producers:
        producer.start()
    print(f"{'':10}{'':58} orders shipped in each database")
    time.sleep(seconds)
    shop.say("producers order through the front")
    shop.b.stop(signal.SIGKILL)
    time.sleep(min(3, seconds))
    shop.say("server b was killed with -9: databases 3 and 4 are away")
    shop.b.start()
    time.sleep(seconds)
    shop.say("server b is back, and its jobs go on")
    words = ["--from", "3", "--to", "4", "--databases", str(shop.file)]
    code = shop.command("queue", "move", "mails", *words)
    time.sleep(seconds)
    shop.say(f"queue mails of database 3 has moved to 4 (exit code {code})")
    shop.a.stop(signal.SIGQUIT)
    shop.standby.execute("select pg_promote()")
    shop.standby.configure(synchronous_standby_names="")
    time.sleep(seconds)
    shop.say("server a is gone for good, its standby took over")
    for producer in producers:
        producer.stopping.set()
    for producer in producers:
        producer.join(60)
    return producers


def judge(shop: Shop, producers: list[Producer]) -> list[str]:
    """Say what is broken of: all that was told is done, once, in order, by ids of its own."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        with suppress(psycopg.OperationalError):
            if not shop.left():
                break
        time.sleep(0.5)
    shop.say("the producers have stopped, and all jobs are done")
    told = {(c, n) for p in producers for c, last in p.told.items() for n in range(1, last + 1)}
    mails = {mail for producer in producers for mail in producer.mails}
    done = [(row[1], row[2]) for rows in shop.shipped().values() for row in rows or []]
    orders: dict[tuple[int, str], list[int]] = defaultdict(list)
    for number, rows in shop.shipped().items():
        for _, customer, order in rows or []:
            orders[number, customer].append(order)
    ids = [job_id for producer in producers for job_id in producer.job_ids]
    refused = sum((producer.refused for producer in producers), Counter())
    figures = {
        "orders that a producer was told of": len(told),
        "mails for later that a producer was told of": len(mails),
        "calls that failed meanwhile, and were repeated": f"{refused.total()} {dict(refused)}",
        "lost": len((told | mails) - set(done)),
        "done twice": len(done) - len(set(done)),
        "out of order": sum(o != sorted(o) for o in orders.values()),
        "ids given to two jobs": len(ids) - len(set(ids)),
        "not done after two minutes": shop.left(),
    }
    print()
    for name, figure in figures.items():
        print(f"{name:<52}{figure}")
    return [name for name in list(figures)[3:] if figures[name]] + [
        name for name in list(figures)[:2] if not figures[name]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="between two events")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rota-scale-"))
    folder.chmod(0o755)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        print(
            "two servers with two databases each, a synchronous standby, a front ...",
            flush=True,
        )
        shop = Shop(folder, stack)
        broken = judge(shop, play(shop, arguments.seconds))
    print("\nNothing was lost." if not broken else f"\nBROKEN: {', '.join(broken)}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
