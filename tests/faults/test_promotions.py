"""Jobs that travel while the server that they leave, or that they go to, is promoted.

A synchronous standby has all that was told, so nothing is lost or doubled.  An asynchronous one
has not: what it lacks is lost, and these tests say what of a job that travels that is.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest

from faults.forward_kill import forwarding
from rota.testing.server import memory
from support.server import Server
from support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
WRITTEN = "select pg_current_wal_insert_lsn()"


class Two:
    """Two servers, databases 1 and 2, of which one has a standby."""

    def __init__(self, model: Server, folder: Path, stack: ExitStack) -> None:
        self._stack, self.folder = stack, folder
        self.servers: dict[int, Server] = {}
        self.standby: Server | None = None
        for number in (1, 2):
            self.servers[number] = model.twin(folder / str(number))
            stack.callback(self.servers[number].destroy)
            self.ask(number, "select rota.set_database_number(%s)", number)

    @property
    def urls(self) -> list[str]:
        return [server.url() for server in self.servers.values()]

    def ask(self, number: int, query: str, *values: object) -> object:
        with psycopg.connect(self.servers[number].url(), autocommit=True) as db:
            row = db.execute(query.encode(), values).fetchone()
            return row[0] if row else None

    def send(self, name: str, jobs: int) -> list[int]:
        """Send jobs from 1 to 2, and return the ids of those that carry them."""
        with psycopg.connect(self.servers[1].url(), autocommit=True) as db:
            found = db.execute(
                "select rota.enqueue_to(2, %s, jsonb_build_object('n', g))"
                " from generate_series(1, %s) as g", (name, jobs),
            ).fetchall()  # fmt: skip
        return [row[0] for row in found]

    def follow(self, number: int, *, is_synchronous: bool) -> None:
        """Give a server its standby."""
        server = self.servers[number]
        self.standby = server.copy(self.folder / "standby")
        self._stack.callback(self.standby.destroy)
        if is_synchronous:
            server.configure(synchronous_standby_names="*")

    def cut(self, number: int) -> None:
        """Let the standby get what there is, and nothing any more."""
        assert self.standby is not None
        written = self.ask(number, WRITTEN)
        with psycopg.connect(self.standby.url(), autocommit=True) as copy:
            query = "select pg_last_wal_replay_lsn() >= %s"
            wait_until(lambda: copy.execute(query, (written,)).fetchone() == (True,))
        self.standby.configure(primary_conninfo="")

    def promote(self, number: int) -> None:
        """Let the server die, and its standby be it."""
        assert self.standby is not None
        self.servers[number].stop(signal.SIGQUIT)
        self.standby.execute("select pg_promote()")
        self.standby.configure(synchronous_standby_names="")
        self.servers[number] = self.standby

    def there(self, name: str) -> list[int]:
        """Return the jobs of that name in database 2, each by its number."""
        found = self.ask(
            2, "select coalesce(array_agg((payload ->> 'n')::int), '{}')"
            " from rota.jobs where job_type = %s", name,
        )  # fmt: skip
        assert isinstance(found, list)
        return sorted(found)

    def wait_until_carried(self) -> None:
        wait_until(lambda: self.ask(1, "select count(*) from rota.jobs") == 0, seconds=60)


@pytest.fixture(scope="module")
def model() -> Iterator[Server]:
    """A server that was stopped, for those of each test to begin as."""
    with in_memory() as folder:
        server = Server.create(folder)
        server.stop()
        yield server


@pytest.fixture
def two(model: Server) -> Iterator[Two]:
    with in_memory() as folder, ExitStack() as stack:
        yield Two(model, folder, stack)


@contextmanager
def in_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=memory(), ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o711)  # the servers are another user's
        yield Path(name)


@pytest.mark.parametrize("number", [1, 2], ids=["source", "target"])
def test_a_synchronous_standby_loses_and_doubles_nothing(two: Two, number: int) -> None:
    two.follow(number, is_synchronous=True)
    with forwarding(two.urls):
        for round_ in range(10):
            two.send("x", 20)
            time.sleep(0.02 * round_)
        two.promote(number)
    with forwarding(two.urls):
        two.send("y", 20)
        two.wait_until_carried()

    assert two.there("x") == sorted([*range(1, 21)] * 10)
    assert two.there("y") == [*range(1, 21)]


def test_a_target_that_has_forgotten_gets_its_jobs_again_by_a_retry(two: Two) -> None:
    two.follow(2, is_synchronous=False)
    with forwarding(two.urls):
        known = two.send("known", 20)
        two.wait_until_carried()
        two.cut(2)
        lost = two.send("lost", 20)
        two.wait_until_carried()
        ids = two.ask(2, "select array_agg(id) from rota.jobs")
        assert isinstance(ids, list)
    two.promote(2)
    assert (len(two.there("known")), two.there("lost")) == (20, [])

    with forwarding(two.urls):
        for job_id in known + lost:
            two.ask(1, "select rota.retry_job(%s)", job_id)
        two.send("new", 20)
        two.wait_until_carried()

    for name in ("known", "lost", "new"):
        assert two.there(name) == [*range(1, 21)]
    later = two.ask(2, "select array_agg(id) from rota.jobs where job_type <> 'known'")
    assert isinstance(later, list)
    assert not {*later} & {*ids}


def test_a_source_that_has_forgotten_doubles_nothing(two: Two) -> None:
    two.follow(1, is_synchronous=False)
    waiting = two.send("waiting", 20)
    two.ask(1, "select rota.pause_queue('forward:2')")
    two.cut(1)
    with forwarding(two.urls):
        carried = two.send("carried", 20)
        two.ask(1, "select rota.resume_queue('forward:2')")
        two.wait_until_carried()
    gone = two.send("gone", 20)

    two.promote(1)
    # Where it has forgotten that they went, they are sent again.
    assert two.ask(1, "select count(*) from rota.jobs") == len(waiting)
    with forwarding(two.urls):
        two.ask(1, "select rota.resume_queue('forward:2')")
        new = two.send("new", 20)
        two.wait_until_carried()

    for name in ("waiting", "carried", "new"):
        assert two.there(name) == [*range(1, 21)]
    assert two.there("gone") == []
    assert not {*new} & {*waiting, *carried, *gone}


def test_a_crash_of_a_target_without_synchronous_commit_loses_nothing(two: Two) -> None:
    """Its owner gives up the last transactions there, and not what was safe in the source."""
    two.servers[2].configure(
        synchronous_commit="off", wal_writer_delay="10s", wal_writer_flush_after="1GB"
    )
    two.ask(1, "select count(rota.enqueue('y', queue => 'q')) from generate_series(1, 20)")
    two.ask(1, "select count(*) from rota.claim_jobs('w', '{q}')")
    two.ask(1, "select rota.begin_queue_move('q', 2)")
    with forwarding(two.urls):
        two.send("first", 1)  # what is done once writes the log
        wait_until(lambda: two.there("first"))
        two.send("x", 20)
        wait_until(lambda: two.ask(1, "select count(*) from rota.jobs") == 1, seconds=60)
        moved = "select count(new_job_id) from rota.moved_jobs"
        wait_until(lambda: two.ask(1, moved) == 19, seconds=60)
        two.servers[2].stop(signal.SIGQUIT)
    two.servers[2].start()

    assert two.there("x") == [*range(1, 21)]
    assert two.ask(2, "select count(*) from rota.jobs where queue = 'q'") == 19
