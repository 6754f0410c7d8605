"""A setting that is changed in a transaction that stays open is, for all others, as it was.

The jobs of the same queue and type are claimed, finished, failed and retried meanwhile, and
what ticks do by the setting goes on: breakers open and close, retries begin within their
budget, limits let the next job start, pauses end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import sql

from races.harness import Session
from races.instrument import PAUSE, stopped
from rota.testing.server import EmbeddedPostgres
from support.clock import Clock
from support.mutation import mutate, some_of

STAGES = """'[{"stage": "a", "queue": "go"}, {"stage": "b", "queue": "go"}]'"""
LIMITED = ("job_type => 'limited'", "limit_key => 'c:*'", "limit_key => 'k'")
NEW = ("job_type => 'new'", "job_type => 'ended'", "limit_key => 'n:*'")
KEYS = {"of_class": "c:1", "of_key": "k", "of_new": "n:1"}


def _enqueue(job_type: str) -> str:
    key = f"'{KEYS[job_type]}'" if job_type in KEYS else "null"
    return f"select rota.enqueue('{job_type}', queue => 'go', limit_key => {key})"


def _running(job_type: str) -> str:
    return f"from rota.jobs as j where j.job_type = '{job_type}' and j.status = 'running'"


def _finish(job_type: str) -> str:
    return f"select rota.finish_job(j.id, j.lease_token) {_running(job_type)}"


def _fail(job_type: str, more: str) -> str:
    return f"select rota.fail_job(j.id, j.lease_token, 'bad', {more}) {_running(job_type)}"


# A queue with settings of each kind, and what goes on in it, up to where a tick is to go on.
GOING = (
    "create schema kept authorization rota_installer",
    "select rota.set_archive('kept')",
    """select rota.set_queue('go', keep_finished => '1 second',
        retry_budget => '{"per_minute": 600}')""",
    "select rota.set_type('plain', time_limit => '1 hour')",
    "select rota.set_retry_rule('Quota', 'quota', 'go', pause_for => '1 hour')",
    "select rota.set_breaker('opened', 'go', max_failures => 1)",
    "select rota.set_breaker('closed', 'go', max_failures => 1)",
    *[f"select rota.set_limit({subject}, max_running => 1)" for subject in LIMITED],
    "select rota.set_limit(queue => 'go', max_running => 100)",
    f"select rota.define_pipeline('p', {STAGES})",
    "select rota.schedule_job('planned', 'every 1 hour', 'planned', queue => 'go')",
    "select rota.schedule_job('own', 'every 1 hour', 'own', queue => 'go')",
    "select rota.schedule_job('disabled', '@daily', 'own', queue => 'go')",
    "select rota.disable_schedule('disabled')",
    "select rota.grant_queue('pg_monitor', 'go', 'worker')",
    "select rota.start_pipeline('p')",
    *map(_enqueue, ("opened", "closed", "quota", "retried", "limited", "new", "ended", *KEYS)),
    "select from rota.claim_jobs('v', '{go}', 20, lease => '1 day')",
    _fail("closed", "retry_in => '1 day'"),
    *map(_enqueue, ("closed", "closed", "limited", "new", "ended", *KEYS, "over", "plain")),
    "select rota.pause_type('stopped', 'go')",
    "select rota.pause_type('over', 'go', until => now() + interval '1 hour')",
    "select from rota.tick()",
    # These leave their lanes.
    "select from rota.claim_jobs('v', '{go}', 20,"
    " job_types => '{closed,limited,of_class,of_key,over}')",
    _fail("retried", "retry_in => '0'"),
    # What runs already is to be counted by the next tick, though some has ended by then.
    *[f"select rota.set_limit({subject}, max_running => 2)" for subject in NEW],
    _finish("ended"),
    "select rota.set_limit(queue => 'go', max_running => 99)",
    # All that waits is to get another place.
    "select rota.set_queue('go', ageing => '1 hour')",
)
# What workers report meanwhile, and what they then claim, by the settings as they were.
REPORTED = (
    _fail("opened", "retry_in => '1 day'"),
    _fail("quota", "'Quota', retry_in => '1 day'"),
    *map(_finish, ("a", "limited", "of_class", "of_key")),
)
CLAIMED = {"b": 1, "closed": 2, "limited": 1, "new": 1, "of_class": 1, "of_key": 1}
CLAIMED |= {"ended": 1, "of_new": 1, "over": 1, "plain": 1, "planned": 1, "retried": 1}
PAUSED = ["type opened of go", "type quota of go"]

# Each is left open by itself.
CHANGES = {
    "set_queue('go', {})": (
        "lease => '1 hour'",
        "max_attempts => 3",
        """backoff => '{"kind": "fixed", "base_seconds": 60}'""",
        "keep_finished => '0'",
        "keep_dead => '1 day'",
        "ageing => '1 minute'",
        "time_limit => '1 hour'",
        """retry_budget => '{"per_minute": 6}'""",
        "expires_after => '1 day'",
        "reset => true",
    ),
    "set_type('plain', {})": ("time_limit => '2 h'", "expires_after => '1 h'", "reset => true"),
    **{
        f"set_limit({subject}, {{}})": (
            "max_running => 10",
            "max_starts => 10, per => '1 s', burst => 2",
            "reset => true",
        )
        for subject in (*LIMITED, *NEW, "limit_key => 'c:1'", "queue => 'go'")
    },
    "set_limit(limit_key => 'k', {})": ("weight => 2",),
    "set_retry_rule('Quota', 'quota', 'go', {})": (
        "retry_in => '1 h'",
        "fatal => true",
        "pause_for => '2 h'",
        "reset => true",
    ),
    **{
        f"set_breaker('{job_type}', 'go', {{}})": (
            "failed_percent => 99, min_attempts => 9, span => '1 h'",
            "max_failures => 9, error_type => 'E', pause_for => '1 h', probes => 9",
            "reset => true",
        )
        for job_type in ("opened", "closed")
    },
    "set_archive({})": ("'kept'", "null"),
    "pause_queue({})": ("'go'",),
    "resume_queue({})": ("'go'",),
    **{
        f"{act}_type({{}})": ("'plain', 'go'", "'plain'", "'stopped', 'go'", "'over', 'go'")
        for act in ("pause", "resume")
    },
    "pause_all({})": ("",),
    "resume_all({})": ("",),
    "define_pipeline({})": ("""'p', '[{"stage": "b", "queue": "go"}]'""",),
    "drop_pipeline({})": ("'p'",),
    "schedule_job({})": ("'own', '@daily', 'own', queue => 'go'",),
    "run_schedule_now({})": ("'own'",),
    "unschedule_job({})": ("'own'",),
    "disable_schedule({})": ("'own'",),
    "enable_schedule({})": ("'disabled'",),
    "grant_queue('pg_monitor', 'go', {})": ("'producer'",),
    "revoke_queue('pg_monitor', 'go', {})": ("'worker'",),
}
ACTS = [call.format(change) for call, changes in CHANGES.items() for change in changes]


@pytest.fixture(scope="module")
def template(template: str, server: EmbeddedPostgres, admin: psycopg.Connection[Any]) -> str:
    """The database that every test gets a copy of."""
    admin.execute(sql.SQL("create database going template {}").format(sql.Identifier(template)))
    with psycopg.connect(server.url("going"), autocommit=True) as connection:
        for statement in GOING:
            connection.execute(statement.encode())
    return "going"


@pytest.mark.parametrize("act", some_of(["now()", *ACTS], every=2))
def test_a_setting_that_stays_open_is_as_it_was(
    session: Callable[[], Session], clock: Clock, act: str
) -> None:
    """A changes a setting and stays open; B works and ticks, and all goes on."""
    a, b = session(), session()
    clock.advance("61 minutes")
    b.fetch("set statement_timeout = '10s'")
    a.fetch("begin")
    a.fetch(f"select rota.{act}".encode())

    for statement in REPORTED:
        b.fetch(statement.encode())
    claimed: Counter[str] = Counter()
    for _ in range(4):
        clock.advance("10 s")
        for _ in range(2):
            b.fetch("select from rota.tick()")
        jobs = b.fetch(
            "select c.job_type, rota.finish_job(c.job_id, c.lease_token)"
            " from rota.claim_jobs('v', '{go}', 50) as c"
        )
        claimed += Counter(job_type for job_type, _ in jobs)
    paused = b.fetch(
        "select p.pause_name from rota.pauses as p where p.set_by in ('breaker', 'rule')"
        " order by p.pause_name"
    )

    archived = b.fetch("select row_as ->> 'job_type' from kept.rota_rows")

    # Of the schedule that A has changed a tick makes no job.
    del claimed["own"]
    assert claimed == CLAIMED
    assert [name for (name,) in paused] == PAUSED
    assert {job_type for (job_type,) in archived} >= {"limited", "plain"}


def test_each_setting_and_each_argument_is_left_open(db: psycopg.Connection[Any]) -> None:
    functions = db.execute(
        "select proname::text, proargnames, pronargs from pg_proc"
        " where pronamespace = 'rota'::regnamespace and provolatile = 'v' and proname ~"
        " '^(set|pause|resume|drop|define|grant|revoke|enable|disable|schedule|unschedule)_'"
        " and proname !~ '(database_number|priority|progress|ordering_key)$'"
    ).fetchall()
    given: dict[str, set[str]] = {}
    for act in ACTS:
        named = given.setdefault(act.partition("(")[0], set())
        named |= set(re.findall(r"(\w+) =>", act))

    assert {name for name, _, _ in functions} == {*given} - {"run_schedule_now"}
    for name, arguments, number in functions:
        if name in ("set_queue", "set_type", "set_limit", "set_retry_rule", "set_breaker"):
            subjects = {"queue", "job_type", "error_type"}
            assert set(arguments[:number]) - subjects <= given[name], name


CLAIM_OPENED = "select from rota.claim_jobs('v', '{go}', 20, job_types => '{opened}')"
STATE = "select s.times_opened, s.retry_at is not null from rota.breaker_states as s"


@pytest.fixture
def failing(db: psycopg.Connection[Any]) -> Any:
    """A database in which the next tick opens the only breaker."""
    db.execute("delete from rota.breakers where job_type <> 'opened'")
    db.execute("select from rota.tick()")
    db.execute(_fail("opened", "retry_in => '1 day'").encode())
    return db


def test_two_ticks_at_once_open_a_breaker_once(failing: Any, a: Session, b: Session) -> None:
    """Both find that it has to open, and B that A has locked its row."""
    a.fetch("begin")
    a.fetch("select rota._check_breakers()")
    b.fetch("select rota._check_breakers()")
    a.fetch("commit")
    b.fetch("select rota._check_breakers()")

    assert b.fetch(STATE) == [(1, True)]


@pytest.mark.parametrize("seconds", [0, 16])
def test_a_forgotten_tick_keeps_no_breaker_from_others(
    failing: Any, a: Session, b: Session, seconds: int
) -> None:
    """One that is not alone in its transaction leaves breakers to those that are, if any."""
    alone = "update rota.maintenance set done_at = rota.now() - %s * interval '1 s'"
    b.fetch(f"{alone} where task = 'tick alone'", [seconds])
    with a.transaction():
        a.fetch("select 1")
        a.fetch("select from rota.tick()")
        b.fetch("select from rota.tick()")
        assert (b if seconds == 0 else a).fetch(STATE) == [(1, True)]


@pytest.mark.parametrize("is_set_anew", [False, True])
def test_a_breaker_that_is_removed_while_a_tick_opens_it_leaves_nothing(
    failing: Any, a: Session, b: Session, is_set_anew: bool
) -> None:
    """A opens it; B removes it and may set another, and waits for nothing; A commits."""
    b.fetch("set statement_timeout = '10s'")
    a.fetch("begin")
    a.fetch("select rota._check_breakers()")
    b.fetch("select rota.set_breaker('opened', 'go', reset => true)")
    if is_set_anew:
        b.fetch("select rota.set_breaker('opened', 'go', max_failures => 1)")
    a.fetch("commit")
    assert b.fetch("select from rota.pauses where set_by = 'breaker'") == [()]
    b.fetch("select rota._check_breakers()")

    assert b.fetch(STATE) == [(0, False)] * is_set_anew
    assert b.fetch("select from rota.pauses where set_by = 'breaker'") == []


def test_a_tick_that_is_late_changes_no_breaker(failing: Any, a: Session, b: Session) -> None:
    """B reads the state; A opens the breaker; what B has read is no more."""
    (read,) = b.fetch("select s::text from rota.breaker_states as s")
    a.fetch("select rota._check_breakers()")

    late = b.fetch(
        "select rota._set_breaker_state(%s::rota.breaker_states, rota.now(), null, 2)", read
    )

    assert late == [(False,)]
    assert b.fetch(STATE) == [(1, True)]


@pytest.fixture
def trying(failing: Any, clock: Clock) -> Any:
    """A database in which a breaker is half open: its probe runs, and another job waits."""
    for _ in range(2):
        failing.execute(_enqueue("opened").encode())
    for _ in range(2):
        failing.execute("select rota._check_breakers()")
        failing.execute(CLAIM_OPENED)
        clock.advance("31 seconds")
    return failing


def test_a_pause_of_an_operator_outlives_a_breaker_that_closes_meanwhile(
    trying: Any, a: Session, b: Session
) -> None:
    """A finds the pause of the breaker; B pauses the type; A closes the breaker."""
    trying.execute(_finish("opened").encode())
    trying.execute(PAUSE)
    mutate(trying, "_check_breaker", "v_succeeded :=", "perform race.pause(''); v_succeeded :=")

    with stopped(trying, a, "select rota._check_breakers()"):
        b.fetch("select rota.pause_type('opened', 'go', 'by hand')")

    paused = "select p.set_by from rota.pauses as p where p.pause_name = 'type opened of go'"
    assert b.fetch(paused) == [("operator",)]


def test_a_probe_that_fails_while_a_tick_counts_is_the_last(
    trying: Any, a: Session, b: Session
) -> None:
    """A has found no failure; the probe fails; A lets as many in as do not run."""
    trying.execute(PAUSE)
    mutate(trying, "_check_breaker", "v_succeeded :=", "perform race.pause(''); v_succeeded :=")

    with stopped(trying, a, "select rota._check_breakers()"):
        b.fetch(_fail("opened", "retry_in => '1 day'").encode())

    assert b.fetch(CLAIM_OPENED) == []


def test_what_a_late_tick_holds_for_a_breaker_is_let_in_again(
    trying: Any, a: Session, b: Session
) -> None:
    """A finds the pause of a breaker; B ends it, and ticks; A holds what a stranger had."""
    trying.execute(_fail("opened", "retry_in => '1 day'").encode())
    trying.execute("select rota._check_breakers()")
    let_through = "update rota.jobs set hold = null, opened_for = 'try type opened of go'"
    trying.execute(f"{let_through} where hold = 'pause type opened of go'".encode())
    trying.execute(PAUSE)
    mutate(
        trying,
        "_check_breaker",
        "perform rota._hold_probes",
        "perform race.pause(''); perform rota._hold_probes",
    )

    with stopped(trying, a, "select rota._check_breakers()"):
        b.fetch("select rota.resume_type('opened', 'go')")
        b.fetch("select from rota.tick()")
    b.fetch("select from rota.tick()")

    assert b.fetch(CLAIM_OPENED) == [()]


def test_a_breaker_that_is_set_again_stays_open(failing: Any, a: Session) -> None:
    a.fetch("select rota._check_breakers()")

    a.fetch("select rota.set_breaker('opened', 'go', max_failures => 9)")
    a.fetch("select rota._check_breakers()")

    assert a.fetch(STATE) == [(1, True)]


def test_a_budget_that_is_set_again_is_spent_as_far_as_before(
    db: psycopg.Connection[Any], clock: Clock, a: Session, b: Session
) -> None:
    """A tick has spent it; A sets it anew and stays open; neither it nor its end refills it."""
    clock.advance("61 minutes")
    db.execute("select from rota.tick()")
    spent = db.execute("select tokens from rota.retry_budgets").fetchall()
    a.fetch("begin")
    a.fetch("""select rota.set_queue('go', retry_budget => '{"per_minute": 6}')""")
    b.fetch("select rota._spend_budgets()")
    a.fetch("commit")

    assert spent == [(99,)]
    assert db.execute("select tokens from rota.retry_budgets").fetchall() == spent
