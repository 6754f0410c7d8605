"""A queue that moves: each job is run once and in order, however often movers are killed."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from faults.forward_kill import ask, forwarding
from faults.move_kill import play, two_servers
from faults.test_forward_kill import urls
from rota.__main__ import main
from rota.cli import databases as moves
from rota.forwarding import MAX_MOVERS
from rota.rows import MoveStatus
from support.mutation import mutate
from support.server import free_port
from support.waiting import wait_until

__all__ = ["urls"]


@dataclass
class Done:
    """What a command ended with, and said."""

    returncode: int
    stdout: str
    stderr: str


def rota(*words: str) -> Done:
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as errors:
        code = main(words)
    return Done(code, out.getvalue(), errors.getvalue())


def make_known(url: str) -> None:
    """Let there be a queue, though it has no jobs."""
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("select rota.set_queue('q')")


def test_jobs_run_once_and_in_order_however_often_movers_are_killed(urls):
    with psycopg.connect(urls[0], autocommit=True) as db:
        db.execute("select nextval('rota.jobs_id_seq') from generate_series(1, 1000)")

    game = play(urls, jobs=300, kills=4, seed=5, pause=0.4)

    assert game.committed > 200
    assert +game.problems == {}


def test_rota_queue_move_tells_moves_and_ends(urls):
    both = [word for url in urls for word in ("--database", url)]
    words = ["queue", "move", "q", "--to", "2", *both]
    with psycopg.connect(urls[0], autocommit=True) as db:
        db.execute("select rota.enqueue('x', queue => 'q', ordering_key => 'k')")
        db.execute("select rota.set_limit(queue => 'q', max_running => 1)")
    with psycopg.connect(urls[1], autocommit=True) as there:
        refused = rota(*words, "--dry-run")
        there.execute("select rota.set_limit(queue => 'q', max_running => 1)")
        can = rota(*words, "--dry-run", "--json")
        moved = rota(*words)
        both[3] = make_conninfo(urls[1], port=free_port())
        status = rota(*words[:5], *both, "--from", "1", "--status", "--json")
        ended = rota(*words, "--end")
        again = rota(*words, "--status")

        wait_until(lambda: ask(there, "select count(*) from rota.jobs") == 1)
    assert (refused.returncode, can.returncode) == (1, 0)
    assert "refused limits  limit queue q is not set in the other database" in refused.stdout
    assert "\n                set it there with set_limit(), by its part\n" in refused.stdout
    assert json.loads(can.stdout)["can_move"]
    assert moved.returncode == 0, moved.stderr
    assert "settled: 1 moved" in moved.stdout
    assert json.loads(status.stdout)["state"] == "settled"
    assert ended.returncode == 0, ended.stderr
    assert again.returncode == 1


def test_rota_queue_move_tells_once_what_it_waits_for(urls, monkeypatch):
    words = ["queue", "move", "q", "--to", "2", *[w for u in urls for w in ("--database", u)]]
    looks, look_once = 0, moves._status
    with psycopg.connect(urls[0]) as writer:
        writer.execute("select rota.enqueue('x', queue => 'q')")
        writer.commit()
        writer.execute("select rota.enqueue('x', queue => 'q')")

        def look(database: str, queue: str) -> MoveStatus | None:
            nonlocal looks
            looks += 1
            status = look_once(database, queue)
            if looks == 5:
                writer.commit()
            return status

        monkeypatch.setattr(moves, "_status", look)
        monkeypatch.setattr(moves, "WATCH_INTERVAL", 0.0)
        pid = writer.info.backend_pid
        moved = rota(*words)

    assert moved.returncode == 0, moved.stderr
    assert moved.stderr.count(f"the oldest of them that of pid {pid}\n") == 1
    assert "settled: 2 moved" in moved.stdout


def test_rota_queue_move_knows_a_queue_whose_jobs_are_not_counted_yet(urls):
    """Where there are very many jobs, ticks count them now and then."""
    both = [word for url in urls for word in ("--database", url)]
    with psycopg.connect(urls[0], autocommit=True) as here:
        here.execute(
            "select rota.enqueue('x', jsonb_build_object('a', repeat('a', 1000)), queue => 'r')"
            " from generate_series(1, 5000)"
        )
        while here.execute("select has_more from rota.tick()").fetchone() == (True,):
            pass
        here.execute("select rota.enqueue('x', queue => 'q')")
        assert ask(here, "select count(*) from rota.queue_stats where queue = 'q'") == 0

        can = rota("queue", "move", "q", "--to", "2", *both, "--dry-run")

    assert "queue q can move to database 2" in can.stdout


def test_rota_queue_move_goes_on_and_says_end_only_when_nothing_waits(urls):
    both = [word for url in urls for word in ("--database", url)]
    words = ["queue", "move", "q", "--to", "2", *both]
    unknown = rota(*words)
    with psycopg.connect(urls[0], autocommit=True) as db:
        make_known(urls[0])
        done = rota(*words)
        db.execute("select rota.enqueue('x', queue => 'r', ordering_key => 'k')")
        db.execute("select rota.enqueue('x', queue => 'q', ordering_key => 'k')")
        db.execute("select rota.set_limit(queue => 'q', max_running => 1)")
    waits = rota(*words)

    assert unknown.returncode == 1
    assert "it has neither settings nor jobs here" in unknown.stdout
    assert "then run it with --end" in done.stdout
    assert waits.returncode == 0, waits.stderr
    assert "info limits         limit queue q is not set in the other database" in waits.stdout
    assert "waits for ordering key 'k', behind job" in waits.stdout
    assert "--end" not in waits.stdout


def test_rota_queue_move_refuses_to_move_a_queue_to_where_it_is(urls):
    same = rota("queue", "move", "q", "--to", "1", "--from", "1", "--database", urls[0])

    assert same.returncode == 2
    assert "--to and --from are the same" in same.stderr


def test_rota_queue_move_ends_what_a_killed_command_has_ended_here_only(urls):
    make_known(urls[0])
    both = [word for url in urls for word in ("--database", url)]
    words = ["queue", "move", "q", "--to", "2", *both]
    rota(*words)
    with psycopg.connect(urls[0], autocommit=True) as db:
        db.execute("select rota.end_queue_move('q')")

    ended = rota(*words, "--end")
    again = rota(*words, "--end")

    assert ended.returncode == 0, ended.stderr
    assert again.returncode == 1
    assert "RT004" in again.stderr or "does not move" in again.stderr
    with psycopg.connect(urls[1], autocommit=True) as there:
        assert ask(there, "select count(*) from rota.queue_moves") == 0


def test_rota_queue_move_ends_and_tells_of_no_other_move(urls):
    make_known(urls[0])
    both = [word for url in urls for word in ("--database", url)]
    rota("queue", "move", "q", "--to", "2", *both)

    for option in ("--end", "--status"):
        back = rota("queue", "move", "q", "--to", "1", *both, option)

        assert back.returncode == 1
        assert "queue q does not move from database 2 to database 1" in back.stderr
    with psycopg.connect(urls[1], autocommit=True) as there:
        assert ask(there, "select state from rota.queue_moves") == "settled"


def test_a_move_that_was_ended_there_first_takes_late_jobs_and_can_be_ended(urls):
    make_known(urls[0])
    both = [word for url in urls for word in ("--database", url)]
    words = ["queue", "move", "q", "--to", "2", *both]
    rota(*words)
    keyed = "select rota.enqueue('x', queue => 'q', ordering_key => 'k')"
    with (
        psycopg.connect(urls[0], autocommit=True) as here,
        psycopg.connect(urls[1], autocommit=True) as there,
        forwarding(urls),
    ):
        for n in range(1, 3):
            there.execute("select rota.end_queue_move('q')")
            here.execute(keyed)
            wait_until(
                lambda n=n: (
                    ask(there, "select count(*) from rota.receipts where move_id > 0") == n
                )
            )
            wait_until(lambda: ask(there, "select state from rota.queue_moves") == "settled")
        there.execute(keyed)
        there.execute("select rota.end_queue_move('q')")

        ended = rota(*words, "--end")

        assert ended.returncode == 0, ended.stderr
        assert ask(here, "select count(*) from rota.queue_moves") == 0


def test_a_move_that_is_called_off_is_not_begun_again_by_a_mover(urls):
    both = [word for url in urls for word in ("--database", url)]
    with (
        psycopg.connect(urls[0], autocommit=True) as here,
        psycopg.connect(urls[1], autocommit=True) as there,
        forwarding(urls),
    ):
        here.execute("select rota.enqueue('x', queue => 'q')")
        here.execute("select rota.claim_jobs('w', '{q}')")
        here.execute("select rota.begin_queue_move('q', 2)")
        wait_until(lambda: ask(there, "select count(*) from rota.queue_moves") == 1)

        ended = rota("queue", "move", "q", "--to", "2", *both, "--end")
        here.execute("select rota.enqueue('x', queue => 'q')")
        here.execute("select rota.enqueue_to(2, 'x')")
        wait_until(lambda: ask(there, "select count(*) from rota.jobs") == 1)

        assert ended.returncode == 0, ended.stderr
        assert ask(there, "select count(*) from rota.queue_moves") == 0
        assert len(here.execute("select rota.claim_jobs('w', '{q}')").fetchall()) == 1


def test_a_move_that_is_called_off_beside_a_mover_ends_in_both_databases(urls):
    """The mover has looked here, the command waits for it, and it tells the other one."""
    make_known(urls[0])
    both = [word for url in urls for word in ("--database", url)]
    waits = "select count(*) from pg_locks where locktype = 'transactionid' and not granted"
    with psycopg.connect(urls[0]) as mover, psycopg.connect(urls[1], autocommit=True) as there:
        move_id = ask(mover, "select rota.begin_queue_move('q', 2)")
        mover.commit()
        mover.execute("select from rota.take_moves(%s)", [move_id])
        with ThreadPoolExecutor() as threads:
            ending = threads.submit(rota, "queue", "move", "q", "--to", "2", "--end", *both)
            wait_until(lambda: ask(there, waits))
            there.execute("select rota.receive_moves(%s, 1, 'q', '[]')", [move_id])
            mover.commit()
            ended = ending.result()

        assert ended.returncode == 0, ended.stderr
        assert ask(there, "select count(*) from rota.queue_moves") == 0


def test_rota_queue_move_needs_no_other_database_of_the_list(urls):
    make_known(urls[0])
    away = make_conninfo(urls[1], port=free_port())
    three = [word for url in (away, *urls) for word in ("--database", url)]
    words = ["queue", "move", "q", *three]

    moved = rota(*words, "--to", "2", "--from", "1")
    unsaid = rota(*words, "--to", "2")
    unknown = rota(*words, "--to", "3", "--from", "1")

    assert moved.returncode == 0, moved.stderr
    assert unsaid.returncode == 2
    assert "--from" in unsaid.stderr
    assert unknown.returncode == 1
    assert "refused" in unknown.stderr


def test_rota_queue_move_waits_for_no_other_database_that_hangs(
    admin, template, server, urls, monkeypatch
):
    """As one behind a pooler, which lets clients in while its server is away."""
    monkeypatch.setattr(moves, "PATIENCE", 3.0)
    make_known(urls[0])
    admin.execute(f"create database travel3 template {template}".encode())
    with psycopg.connect(server.url("travel3")) as db:
        db.execute("""create or replace function rota.database_number() returns integer
            language sql as 'select 3 from pg_sleep(25)'""")
    three = [word for url in (server.url("travel3"), *urls) for word in ("--database", url)]
    words = ["queue", "move", "q", "--to", "2", *three]
    began = time.monotonic()

    moved = rota(*words, "--from", "1")
    unsaid = rota(*words)

    assert time.monotonic() - began < 20
    admin.execute("drop database travel3 with (force)")
    assert moved.returncode == 0, moved.stderr
    assert "/travel3: no answer for 3 s" in unsaid.stderr


def test_rota_queue_move_settles_again_what_was_restored(urls):
    """As after a promotion of the other database without its last transactions."""
    make_known(urls[0])
    both = [word for url in urls for word in ("--database", url)]
    words = ["queue", "move", "q", "--to", "2", *both]
    keyed = "select rota.enqueue('x', queue => 'q', ordering_key => 'k')"
    with psycopg.connect(urls[1], autocommit=True) as there:
        rota(*words)
        there.execute("update rota.queue_moves set state = 'moving'")

        again = rota(*words)

        assert again.returncode == 0, again.stderr
        there.execute(keyed)
        there.execute("delete from rota.queue_moves")
        rota(*words)
        assert ask(there, "select state from rota.queue_moves") == "settled"


def test_rota_queue_move_says_why_a_job_waits(urls, caplog):
    """It is sent again and again, and told of once."""
    both = [word for url in urls for word in ("--database", url)]
    with psycopg.connect(urls[0], autocommit=True) as here, psycopg.connect(urls[1]) as other:
        for _ in range(2):
            here.execute("select rota.enqueue('x', queue => 'q')")
        other.execute("""create function fail() returns trigger language plpgsql as
            'begin raise ''not today'' using errcode = ''XX000''; end'""")
        other.execute("""create trigger fail before insert on rota.jobs
            for each row execute function fail()""")
        other.commit()
        with ThreadPoolExecutor() as threads:
            moving = threads.submit(rota, "queue", "move", "q", "--to", "2", *both)
            wait_until(lambda: "not today" in caplog.text)
            other.execute("drop trigger fail on rota.jobs")
            other.commit()
            moved = moving.result()

    assert moved.returncode == 0, moved.stderr
    assert caplog.text.count("jobs of queue q stay for now: not today") == 1


def test_rota_queue_move_says_each_reason_why_a_queue_stays(urls, caplog, monkeypatch):
    """After an outage of the other database, say, that it has another version."""
    monkeypatch.setattr("rota.forwarding.REASON_INTERVAL", 0.0)
    both = [word for url in urls for word in ("--database", url)]
    with psycopg.connect(urls[0], autocommit=True) as here, psycopg.connect(urls[1]) as other:
        here.execute("select rota.enqueue('x', queue => 'q')")
        with ThreadPoolExecutor() as threads:
            for reason in ("no room", "no luck"):
                other.execute(
                    f"""create or replace function fail() returns trigger
                    language plpgsql as
                    'begin raise ''{reason}'' using errcode = ''53100''; end'""".encode()
                )
                if reason == "no room":
                    other.execute("""create trigger fail before insert on rota.jobs
                        for each row execute function fail()""")
                    moving = threads.submit(rota, "queue", "move", "q", "--to", "2", *both)
                other.commit()
                wait_until(lambda: f"queue q stays for now: {reason}" in caplog.text)  # noqa: B023
            other.execute("drop trigger fail on rota.jobs")
            other.commit()
            moved = moving.result()

    assert moved.returncode == 0, moved.stderr
    assert caplog.text.count("stays for now") == 2


def test_rota_queue_move_names_who_keeps_it_from_settling_there(urls, caplog):
    make_known(urls[0])
    words = ["queue", "move", "q", "--to", "2", *[w for u in urls for w in ("--database", u)]]
    with psycopg.connect(urls[1]) as other, ThreadPoolExecutor() as threads:
        other.execute("select rota.enqueue('x')")
        moving = threads.submit(rota, *words)
        pid = other.info.backend_pid
        end = f"travel2 (End it, and try again: select pg_terminate_backend({pid});)"
        wait_until(lambda: end in caplog.text)
        other.commit()
        moved = moving.result()

    assert moved.returncode == 0, moved.stderr


def test_rota_queue_move_moves_on_while_it_asks_how_far_it_is(urls, monkeypatch):
    """Among very many jobs that takes seconds, and the database may be away then."""
    make_known(urls[0])
    words = ["queue", "move", "q", "--to", "2", *[w for u in urls for w in ("--database", u)]]
    looks, look_once = 0, moves._status
    with psycopg.connect(urls[0]) as writer, psycopg.connect(urls[1], autocommit=True) as there:
        writer.execute("select rota.enqueue('x', queue => 'q')")

        def look(database: str, queue: str) -> MoveStatus | None:
            nonlocal looks
            looks += 1
            if looks == 1:
                writer.commit()
                wait_until(lambda: ask(there, "select count(*) from rota.jobs") == 1)
                database = make_conninfo(database, port=free_port())
            return look_once(database, queue)

        monkeypatch.setattr(moves, "_status", look)
        monkeypatch.setattr(moves, "WATCH_INTERVAL", 0.0)
        moved = rota(*words)

    assert moved.returncode == 0, moved.stderr
    assert "settled: 1 moved" in moved.stdout


def test_a_mover_rests_much_longer_than_it_looks(urls):
    """Among very many other jobs a look takes long, and a job may run for hours."""
    looks = """select count(*) from pg_stat_activity
        where application_name = 'rota mover' and state = 'active'"""
    with psycopg.connect(urls[0], autocommit=True) as here:
        here.execute("select rota.enqueue('x', queue => 'q')")
        here.execute("select rota.claim_jobs('w', '{q}')")
        ids = "select coalesce(array_agg(w.id)"
        mutate(here, "_look_on", ids, f"perform pg_sleep(0.6); {ids}")
        here.execute("select rota.begin_queue_move('q', 2)")
        with forwarding(urls):
            wait_until(lambda: ask(here, looks))
            seen = []
            while len(seen) < 120:
                time.sleep(0.05)
                seen.append(ask(here, looks))

    assert sum(seen) < 50


def test_rota_queue_move_tells_no_progress_once_it_has_settled(urls, monkeypatch):
    """An answer that comes late would say that no mover is there."""
    make_known(urls[0])
    look = moves._status
    words = ["queue", "move", "q", "--to", "2", *[w for u in urls for w in ("--database", u)]]
    is_over = """select m.state = 'settled' and not exists (
            select from pg_stat_activity where application_name = 'rota mover')
        from rota.queue_moves as m"""
    with psycopg.connect(urls[0], autocommit=True) as here:

        def look_late(database: str, queue: str) -> MoveStatus | None:
            status = look(database, queue)
            wait_until(lambda: ask(here, is_over))
            time.sleep(0.2)  # its task ends behind its connections
            return status

        monkeypatch.setattr(moves, "_status", look_late)
        monkeypatch.setattr(moves, "WATCH_INTERVAL", 0.0)
        moved = rota(*words)

    assert (moved.returncode, moved.stderr) == (0, "")


@pytest.mark.parametrize("reason", ["running", "refused"])
def test_many_queues_that_move_take_turns_with_a_few_connections(urls, reason):
    """Or they have all that both servers take, and producers are refused."""
    stuck, others = MAX_MOVERS + 1, 15
    seen: list[int] = []

    def are_settled() -> bool:
        seen.append(
            ask(
                here,
                "select count(*) from pg_stat_activity"
                " where application_name in ('rota mover', 'rota receiver')",
            )
        )
        count = "select count(*) from rota.queue_moves where state = 'settled'"
        return ask(here, count) == others

    with psycopg.connect(urls[0], autocommit=True) as here:
        here.execute(
            "select rota.enqueue('x', queue => 'q' || n), case when %s and n <= %s then"
            " (select count(*) from rota.claim_jobs('w', array['q' || n])) end,"
            " rota.begin_queue_move('q' || n, 2) from generate_series(1, %s) as n",
            [reason == "running", stuck, stuck + others],
        )
        if reason == "refused":
            with psycopg.connect(urls[1]) as there:
                there.execute(
                    "insert into rota.queue_moves (move_id, queue, direction, database)"
                    " select n, 'q' || n, 'in', 3 from generate_series(1, %s) as n",
                    [stuck],
                )
        with forwarding(urls):
            wait_until(are_settled)

    assert 0 < max(seen) < stuck + others


def test_a_job_that_takes_the_other_database_long_gets_there(urls, monkeypatch):
    """It may have a hundred thousand effects."""
    monkeypatch.setattr("rota.forwarding.RECEIVE_TIMEOUT", 0.5)
    with psycopg.connect(urls[0]) as here, psycopg.connect(urls[1], autocommit=True) as there:
        here.execute("select rota.enqueue('x', queue => 'q')")
        here.commit()
        there.execute("create function slow() returns trigger language plpgsql as"
            " 'begin perform pg_sleep(1); return new; end'")  # fmt: skip
        there.execute("create trigger slow before insert on rota.jobs"
            " for each row execute function slow()")  # fmt: skip
        both = [word for url in urls for word in ("--database", url)]

        moved = rota("queue", "move", "q", "--to", "2", *both)

        assert moved.returncode == 0, moved.stderr
        assert ask(there, "select count(*) from rota.jobs") == 1


@pytest.mark.long
def test_jobs_run_once_and_in_order_though_both_servers_are_killed():
    with two_servers() as servers:
        urls = [server.url() for server in servers]

        game = play(urls, jobs=300, kills=2, seed=5, servers=servers, crashes=2)

    assert game.crashes == {"the source": 1, "the target": 1}
    assert +game.problems == {}
