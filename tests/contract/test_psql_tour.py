"""rota from psql alone, with the scripts that stand beside this file."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.databases import Psql

pytestmark = pytest.mark.plain_session

HERE = Path(__file__).parent

TOUR = """\
A web request asks for a mail, twice; the key makes it one job.
is_the_same_job
t
A worker claims it and gets a lease with a token.
job_type|payload|attempt|max_attempts|locked_for
send_mail|{"user_id": 7}|1|3|00:00:30
status|attempts|locked_by|is_locked
running|1|worker-1|t
It needs longer, and says so.
has_more_time|is_cancel_requested
t|f
The mail server is down: the attempt fails and waits for its next one.
status|is_later
failed|t
claimable
0
An operator knows that it is up again, and does not wait.
is_due
t
Another worker claims it, under a new token, and finishes it.
attempt|token_has_grown
2|t
finish_job
finished
asked_again
already_finished
What is left: one row of history, and one error.
job_type|status|attempts|locked_by|last_error|result|has_duration
send_mail|succeeded|2|worker-2|connection refused|{"message_id": "m-1"}|t
attempt|worker|error_type|message
1|worker-1|ConnectionError|connection refused
live_jobs
0
"""


@pytest.mark.slow
def test_tour_shows_the_life_of_a_job(empty: str, psql: Psql, sql_dir: Path) -> None:
    psql(empty, "-f", sql_dir / "install.sql")

    done = psql(empty, "-A", "-f", HERE / "tour.sql")

    assert done.stdout == TOUR
    assert done.stderr == ""


def test_tour_can_be_taken_twice(dsn: str, psql: Psql) -> None:
    psql(dsn, "-f", HERE / "tour.sql")

    psql(dsn, "-f", HERE / "tour.sql")


def test_zombie_is_refused_at_every_turn(dsn: str, psql: Psql) -> None:
    done = psql(dsn, "-f", HERE / "zombie.sql")

    lines = done.stdout.splitlines()
    assert len(lines) == 22
    assert [line for line in lines if not line.startswith("PASS ")] == []
    assert done.stderr == ""


def test_zombie_script_fails_when_a_stale_end_is_accepted(dsn: str, psql: Psql) -> None:
    """A check that cannot fail proves nothing: let finish_job take any token."""
    psql(
        dsn,
        "-c",
        """
        create or replace function rota.finish_job(
            job_id bigint, lease_token bigint, result jsonb default null
        )
            returns text
            language plpgsql
        as $$
        begin
            delete from rota.jobs as j where j.id = finish_job.job_id;
            return 'finished';
        end;
        $$
        """,
    )

    done = psql(dsn, "-f", HERE / "zombie.sql", check=False)

    assert done.returncode == 3
    assert "FAIL A, while nobody has the job: rota.finish_job" in done.stderr
