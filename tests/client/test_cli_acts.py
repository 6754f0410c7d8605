"""The commands that change many jobs, and those that pause and tell who did what."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from rota import Client
from rota.cli import main
from rota.cli.jobs import STATUSES

pytestmark = pytest.mark.slow

Run = Callable[..., str]
Db = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def _just_installed(db: psycopg.Connection[Any]) -> None:
    """A database in which nobody is late with the first tick, however long the tests run."""
    db.execute("update rota.upgrade_log set applied_at = clock_timestamp() where id = 0")


@pytest.fixture
def partly(run: Run, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command that is not done to all; return what it printed."""

    def call(*words: str) -> str:
        assert main(words) == 1
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    return call


def die(client: Client, error: str = "card 7 declined", **job: Any) -> int:
    job_id = client.enqueue(**{"job_type": "charge", "payload": {"cents": 5}, **job}).job_id
    (claimed,) = client.claim_jobs("w", queues=[job.get("queue", "default")])
    client.fail_job(job_id, claimed.lease_token, error, fatal=True)
    return job_id


def statuses(db: Db, ids: list[int]) -> list[str]:
    rows = db.execute(
        "select status from rota.job_runs where id = any(%s) order by id", [ids]
    ).fetchall()
    return [status for (status,) in rows]


def test_retry_with_dependants_tells_how_many_come_back(run: Run, client: Client) -> None:
    job_id = die(client)
    client.enqueue("after", depends_on=[job_id])
    client.enqueue("after", depends_on=[job_id])
    client.tick()

    stay = "; 2 jobs cancelled because of it stay so (--with-dependants restores these, too)"
    assert run("retry", str(job_id)) == f"job {job_id} is queued{stay}\n"
    told = run("retry", str(job_id), "--with-dependants")
    come = "; 2 jobs cancelled because of it come back, too"
    assert told == f"job {job_id} is to run again{come}\n"
    client.tick()
    assert run("retry", str(job_id), "--with-dependants") == f"job {job_id} is to run again\n"


def test_who_may_only_cancel_single_jobs_cancels_one(
    dsn: str, db: Db, run: Run, client: Client
) -> None:
    role = f"canceller_{db.info.dbname}"
    job_id = client.enqueue("charge").job_id
    name = sql.Identifier(role)
    db.execute(sql.SQL("create role {} login password 'w'").format(name))
    try:
        for statement in client.grant_statements("observer", role):
            db.execute(statement.encode())
        db.execute(sql.SQL("grant execute on function rota.cancel_job to {}").format(name))
        url = make_conninfo(dsn, user=role, password="w")
        assert run("cancel", str(job_id), "-d", url) == f"job {job_id} is cancelled\n"
    finally:
        db.execute(sql.SQL("drop owned by {0}; drop role {0}").format(name))


def test_a_retry_of_many_tells_of_what_was_cancelled_because_of_them(
    run: Run, client: Client, db: Db
) -> None:
    dead = [die(client) for _ in range(2)]
    children = [client.enqueue("after", depends_on=[job_id]).job_id for job_id in dead]
    client.enqueue("later", depends_on=[children[0]])
    for _ in range(2):
        client.tick()
    group = ["retry", "--type", "charge"]
    stay = "; 3 jobs cancelled because of them stay so (--with-dependants restores these, too)"
    come = "; 3 jobs cancelled because of them come back, too"

    assert f"2 jobs would be changed{stay}, such as" in run(*group, "--dry-run")
    assert json.loads(run(*group, "--dry-run", "--json"))["dependants"] == 3
    assert f"retry 2 jobs{stay}: confirm it" in run(*group, code=2)
    assert f"retry 2 jobs{come}: confirm it" in run(*group, "--with-dependants", code=2)
    assert run(*group, "--yes") == f"2 jobs put back to run now{stay}\n"
    client.tick()
    assert statuses(db, children) == ["cancelled"] * 2
    ids = [str(job_id) for job_id in dead]
    told = run("retry", *ids, "--with-dependants", "--set", "a=1")
    assert told == f"2 jobs put back to run now{come}\n"
    client.tick()
    assert statuses(db, children) == ["blocked"] * 2


def test_many_jobs_are_retried_over_a_time(run: Run, client: Client, db: Db) -> None:
    ids = [die(client) for _ in range(3)]

    told = run("retry", "--type", "charge", "--spread", "1 hour", "--yes")

    assert told == "3 jobs put back to run now, spread over 1 hour\n"
    assert statuses(db, ids) == ["queued"] * 3
    moved = run("reschedule", "--all", "--delay", "1 day", "--spread", "1 hour", "--yes")
    assert moved == "3 jobs moved to another time, spread over 1 hour\n"


def test_no_more_dependants_are_told_than_are_counted(run: Run, client: Client) -> None:
    parent = client.enqueue("charge").job_id
    client.enqueue_many([{"job_type": "after", "depends_on": [parent]}] * 1001)
    more = "; at least 1000 jobs that wait for it are cancelled with it"

    assert run("cancel", str(parent), "--dry-run").startswith(
        "1 job would be changed; at least"
    )
    assert run("cancel", str(parent)) == f"job {parent} is cancelled{more}\n"


def test_a_cancel_tells_of_what_is_cancelled_with_it(run: Run, client: Client) -> None:
    first, second, running = (client.enqueue("charge").job_id for _ in range(3))
    for parents in ([first], [second], [second, running]):
        client.enqueue("after", depends_on=parents)
    more = "; 3 jobs that wait for them are cancelled with them"
    cancel = ["cancel", "--type", "charge"]

    assert f"3 jobs would be changed{more}, such as" in run(*cancel, "--dry-run")
    assert f"cancel 3 jobs{more}: confirm it" in run(*cancel, code=2)
    one = "; 1 job that waits for it is cancelled with it"
    assert run("cancel", str(first)) == f"job {first} is cancelled{one}\n"
    told = run(*cancel, "--yes")
    assert told.endswith(
        "asked to stop if running; 2 jobs that wait for them are cancelled with them\n"
    )


def test_a_job_is_changed_and_retried_with_its_dependants(
    run: Run, client: Client, db: Db
) -> None:
    job_id = die(client)
    child = client.enqueue("after", depends_on=[job_id]).job_id
    client.tick()

    told = run("retry", str(job_id), "--with-dependants", "--set", "cents=1")

    come = "; 1 job cancelled because of it comes back, too"
    assert told == f"job {job_id} is queued{come}\n"
    client.tick()
    assert statuses(db, [child]) == ["blocked"]


def test_retry_of_a_group_counts_asks_and_edits(run: Run, client: Client, db: Db) -> None:
    ids = [die(client) for _ in range(3)] + [die(client, "no route to host")]
    group = ["retry", "--type", "charge", "--error", "card 99 declined"]

    counted = run(*group, "--dry-run")
    assert counted.startswith("3 jobs would be changed, such as\n")
    assert str(ids[0]) in counted
    assert "this would retry 3 jobs: confirm it with --yes" in run(*group, code=2)
    assert statuses(db, ids) == ["dead"] * 4
    told = run(*group, "--set", "currency=EUR", "--set", "cents=6", "--yes")

    assert told == "3 jobs put back to run now\n"
    assert statuses(db, ids) == ["queued"] * 3 + ["dead"]
    jobs = client.claim_jobs("w", max_jobs=5)
    assert [job.payload for job in jobs] == [{"cents": 6, "currency": "EUR"}] * 3
    seen = run("retry", *map(str, ids[1:]), "--dry-run")
    assert re.fullmatch(
        rf"1 job would be changed, such as\n.*\n{ids[3]} .*\n2 jobs could not .*\n2 jobs  .*\n",
        seen,
    )
    assert "running" in seen
    db.execute("insert into rota.moved_jobs values (4294967, 1, 8, 4294967)")
    seen = run("retry", str(ids[3]), "4294967", "4294968", "--dry-run")
    assert seen.startswith("1 job would be changed, such as\n")
    assert "in database 8 now" in seen


def test_several_ids_and_conflicts(run: Run, partly: Run, client: Client, db: Db) -> None:
    ids = [die(client) for _ in range(2)]
    busy = client.enqueue("slow").job_id
    client.claim_jobs("w")

    told = partly("retry", *map(str, ids), str(busy), "999999999")

    assert told.startswith("2 jobs put back to run now\n2 jobs could not be changed:\n")
    assert f"\n1 job  such as job {busy}: it is running: force " in told
    assert "not found" in told
    assert statuses(db, ids) == ["queued"] * 2
    found = json.loads(run("cancel", *map(str, ids), "--reason", "wrong", "--json"))
    assert found == {"act": "cancel", "matched": 2, "changed": 2} | {
        "conflicts": [],
        "dependants": 0,
    }


def test_a_dry_run_promises_no_more_than_it_has_looked_at(
    run: Run, partly: Run, db: Db, connect: Callable[..., Db]
) -> None:
    db.execute("select rota.enqueue('a') from generate_series(1, 1001)")
    other = connect(autocommit=False)
    other.execute("select from rota.jobs order by id desc limit 1 for update")
    asked = ["cancel", "--type", "a"]

    told = run(*asked, "--dry-run")
    assert run(*asked, "--dry-run", "--limit", "1000").startswith("1000 jobs would be changed")
    assert [
        json.loads(run(*asked, "--dry-run", "--json", "--limit", limit))["has_all_conflicts"]
        for limit in ("1000", "1001")
    ] == [True, False]

    assert told.startswith("at most 1001 jobs would be changed, such as\n")
    assert partly(*asked, "--yes").startswith("1000 jobs cancelled")


def test_a_move_to_a_queue_that_nobody_takes_says_so(run: Run, client: Client) -> None:
    job_ids = [str(client.enqueue("charge").job_id) for _ in range(2)]
    client.report_worker("w", "host", 1, "0.2.0", ["mail"])
    untaken = "; no live worker takes queue mial"

    assert f"2 jobs would be changed{untaken}, such as" in run(
        "move", "--to", "mial", *job_ids, "--dry-run"
    )
    assert f"move 2 jobs{untaken}: confirm" in run("move", "--to", "mial", "--all", code=2)
    assert run("move", "--to", "mial", *job_ids) == f"2 jobs moved to queue mial{untaken}\n"
    assert run("move", "--to", "mail", *job_ids) == "2 jobs moved to queue mail\n"


def test_a_locked_job_is_told_with_its_holder(
    partly: Run, client: Client, connect: Callable[..., Db]
) -> None:
    ids = [client.enqueue("a").job_id for _ in range(2)]
    other = connect(autocommit=False)
    other.execute("select from rota.jobs where id = %s for update", [ids[0]])

    told = json.loads(partly("cancel", "--queue", "default", "--yes", "--json"))

    assert told["changed"] == 1
    (conflict,) = told["conflicts"]
    assert (conflict["job_id"], conflict["pid"]) == (ids[0], other.info.backend_pid)
    told = partly("cancel", "--queue", "default", "--yes")
    assert conflict["reason"] in " ".join(told.split())
    assert told.endswith(f" select pg_terminate_backend({other.info.backend_pid});\n")


def test_the_other_acts(run: Run, client: Client, db: Db) -> None:
    dead, waiting = die(client), client.enqueue("report").job_id

    assert "1 job acknowledged" in run("discard", "--all", "--yes")
    run("priority", str(waiting), "--to", "-7")
    assert run("move", str(waiting), "--to", "slow") == (
        "1 job moved to queue slow; no live worker takes queue slow\n"
    )
    run("reschedule", str(waiting), "--delay", "1 hour")
    shown = db.execute("select queue, priority, run_at > now() from rota.jobs").fetchall()
    assert shown == [("slow", -7, True)]
    assert "confirm it with --yes" in run("purge", str(dead), code=2)
    assert run("purge", str(dead), "--yes") == "1 job deleted\n"
    assert statuses(db, [dead]) == []
    erased = run("erase", "--payload", "{}", "--type", "report", "--yes")
    assert erased == "1 job erased\n"
    assert statuses(db, [waiting]) == ["cancelled"]


def test_a_limit_holds_for_all_calls_together(run: Run, client: Client, db: Db) -> None:
    ids = [client.enqueue("a").job_id for _ in range(5)]

    assert run("cancel", "--all", "--limit", "3", "--dry-run").startswith("3 jobs would")
    run("cancel", "--all", "--limit", "3", "--yes")

    assert statuses(db, ids) == ["cancelled"] * 3 + ["queued"] * 2


def test_more_jobs_than_a_call_takes(run: Run, db: Db) -> None:
    db.execute("select rota.enqueue('a') from generate_series(1, 2100)")

    told = run("cancel", "--queue", "default", "--yes")

    assert told == "2100 jobs cancelled, or asked to stop if running\n"
    assert db.execute("select count(*) from rota.jobs").fetchone() == (0,)


@pytest.mark.parametrize(
    "words",
    [
        ["retry"],
        ["cancel"],
        ["move", "1"],
        ["reschedule", "1"],
        ["retry", "--all", "--set", "currency"],
        ["retry", "1", "2", "--new-payload", "{"],
        ["cancel", "--all", "--limit", "0"],
        ["pause"],
        ["pause", "mail", "--all"],
        ["pause", "mail", "--for", "1 hour", "--until", "2030-01-01"],
    ],
    ids=" ".join,
)
def test_what_is_used_wrongly_is_exit_code_2(
    run: Run, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        run(*words, code=2)
    except SystemExit as exit_:
        assert exit_.code == 2  # noqa: PT017 -- argparse leaves by itself
        capsys.readouterr()


def test_pause_and_resume_a_type_and_all(run: Run, client: Client) -> None:
    client.enqueue("mail")
    client.enqueue("report")

    told = run("pause", "--type", "mail", "--reason", "the server moves", "--for", "2 hours")
    assert told.startswith(
        "type mail is paused: running jobs continue, no more are claimed, until"
    )
    assert "type mail" in run("status")
    assert [job.job_type for job in client.claim_jobs("w", max_jobs=5)] == ["report"]
    client.enqueue("mail", delay=timedelta(hours=1))
    counted = {"due": 1, "later": 1, "is_dry_run": True}
    told = run("pause", "--type", "report", "--dry-run")
    assert told == "this would pause type report, with 0 due jobs and 0 for later (dry run:" \
        " nothing was done)\n"  # fmt: skip
    assert json.loads(run("pause", "--all", "--dry-run", "--json")) == counted
    mail = ["--type", "mail", "--dry-run", "--json"]
    assert json.loads(run("resume", *mail)) == {"job_type": "mail", **counted}
    for verb in ("pause", "resume"):
        assert f"{verb} everything, with 1 due jobs and 1 for later: confirm" in run(
            verb, "--all", code=2
        )
    run("pause", "--all", "--reason", "restored", "--yes")
    told = run("resume", "default")
    assert told == "queue default was not paused; still paused: all, type mail\n"
    told = run("resume", "--type", "report", "default", "--json")
    assert json.loads(told)["still_paused"] == ["all"]
    assert json.loads(run("resume", "--all", "--yes", "--json")) == {
        "was_paused": True, "is_paused": False, "still_paused": ["type mail"],
    }  # fmt: skip
    told = run("resume", "--type", "report")
    assert told == "type report was not paused: workers claim its jobs\n"
    told = run("resume", "--type", "mail", "default", "--json")
    assert json.loads(told)["was_paused"] is False
    assert run("resume", "--type", "mail") == "type mail is resumed: workers claim its jobs\n"
    client.tick()
    assert [job.job_type for job in client.claim_jobs("w")] == ["mail"]


@pytest.mark.parametrize(
    ("answer", "is_paused"), [("n\n", False), ("yes\n", True), ("\x04", False)]
)
def test_a_pause_on_a_terminal_asks_with_the_number(
    client: Client, db: Db, dsn: str, answer: str, is_paused: bool
) -> None:
    for _ in range(3):
        client.enqueue("mail")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "rota", "pause", "default", "-d", dsn],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.write(ours, answer.encode())
        said, complained = process.communicate(timeout=30)
        assert process.returncode == (0 if is_paused else 1)
    os.close(theirs)
    os.close(ours)
    assert "pause queue default, with 3 due jobs and 0 for later? [y/N]" in said + complained
    assert is_paused or complained.endswith("rota: nothing was done\n")
    assert db.execute("select count(*) from rota.pauses").fetchone() == (is_paused,)


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_a_dry_run_of_a_pause_tells_what_would_be_refused(run: Run, db: Db, verb: str) -> None:
    db.execute("select rota.set_queue('mail')")
    db.execute("select rota.pause_queue('mail')")

    told = run(verb, "mial", "--dry-run", code=1)
    assert "queue mial is unknown" in told
    assert run(verb, "mail", "--dry-run").startswith(
        f"this would {verb} queue mail, with 0 due"
    )
    assert db.execute("select queue, reason from rota.pauses").fetchall() == [("mail", None)]
    if verb == "pause":
        assert "--for" in run("pause", "mail", "--for", "soon", "--dry-run", code=2)


def test_what_is_listed_is_what_is_acted_on(run: Run, client: Client, db: Db) -> None:
    """By each word of the filter alone, and by several."""
    rest = {"ordering_key": "o", "limit_key": "l:1", "idempotency_key": "k"}
    die(client, "card 7 declined", headers={"tenant": "a"}, **rest)
    die(client, "card 'x' declined", queue="mail", payload={"user": {"id": 7, "name": "b"}})
    client.enqueue("charge", {"user": {"id": 8}}, headers={"tenant": "b", "more": "c"})
    client.enqueue("mail", idempotency_key="o", ordering_key="k", limit_key="k")
    (claimed,) = client.claim_jobs("w2", job_types=["charge"])
    client.fail_job(
        claimed.job_id, claimed.lease_token, "card 9 declined", error_type="E",
        retry_in=timedelta(hours=1),
    )  # fmt: skip
    done = client.enqueue("mail").job_id
    (claimed,) = client.claim_jobs("w3")
    client.finish_job(claimed.job_id, claimed.lease_token)
    client.schedule_job("nightly", "@daily", "mail")
    client.run_schedule_now("nightly")
    client.define_pipeline("p", [{"stage": "s", "job_type": "mail"}])
    client.start_pipeline("p", {})
    client.cancel_job(client.enqueue("mail").job_id, "ordered twice")
    client.act_on_jobs("discard", {"status": "dead", "queue": "mail"})
    # Created long ago, and ended just now; and the reverse cannot be.
    db.execute("update rota.finished_jobs set created_at = created_at - interval '2 hours'")
    db.execute(
        "update rota.jobs set created_at = created_at - interval '2 hours' where id > %s",
        [done],
    )
    kinds = [status for status in STATUSES if status != "running"]
    any_status = [word for status in kinds for word in ("--status", status)]

    nothing = (
        ["declined"], ["N declined"], ["tenant=c"], ["charge", "--older-than", "1 hour"],
        ["ordered"],
    )  # fmt: skip
    for words in (
        ["--queue", "mail"], ["--type", "charge"], ["--error", "card 12 declined"],
        ["--error", "card N declined"], ["--error", "declined"], ["--error-type", "E"],
        ["--error-text", "'X' Declin"], ["--error-text", "N declined"],
        ["--worker", "w"], ["--key", "k"], ["--ordering-key", "o"], ["--limit-key", "l:1"],
        ["--schedule", "nightly"], ["--pipeline", "p"], ["--stage", "s"],
        ["--cancel-reason", "ordered twice"], ["--cancel-reason", "ordered"],
        ["--type", "charge", "--discarded", "no"], ["--discarded", "yes"],
        ["--due", "no"], ["--due", "yes"],
        ["--older-than", "1 hour"], ["--newer-than", "1 hour"],
        ["--payload", '{"user": {"id": 7}}'],
        ["--header", "tenant=b", "--header", "more=c"], ["--header", "tenant=c"],
        ["--type", "charge", "--older-than", "1 hour"], [],
    ):  # fmt: skip
        listed = {job["id"] for job in json.loads(run("jobs", *words, "--json"))}
        chosen = [*words, *any_status] if words else ["--all", *any_status]
        erased = json.loads(run("erase", *chosen, "--dry-run", "--json"))
        assert {job["job_id"] for job in erased["samples"]} == listed, words
        if words[1:] not in nothing:
            assert listed, words
    for status in ("dead", "queued", "failed", "succeeded"):
        listed = {job["id"] for job in json.loads(run("jobs", "--status", status, "--json"))}
        erased = json.loads(run("erase", "--status", status, "--dry-run", "--json"))
        assert {job["job_id"] for job in erased["samples"]} == listed != set()


def test_who_acts_may_have_a_name_that_the_database_lacks(
    in_latin1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "Łukasz")
    with psycopg.connect(in_latin1, autocommit=True, client_encoding="utf8") as db:
        job_id = Client(db).enqueue("named").job_id

        assert main(["cancel", str(job_id), "-d", in_latin1]) == 0

        newest = "select actor from rota.audit_log order by id desc limit 1"
        assert db.execute(newest).fetchone() == (r"\u0141ukasz",)


def test_each_command_that_acts_says_who_did_it(
    run: Run, client: Client, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The role is often one for all, as on a shared machine."""
    monkeypatch.setenv("LOGNAME", "ann")
    job_id = client.enqueue("a").job_id
    (job,) = client.claim_jobs("w")
    client.record_effect("mail", "k", job_id, job.lease_token)
    client.fail_job(job_id, job.lease_token, "e", fatal=True)

    run("effects", "settle", "mail", "k", "--done")
    run("retry", str(job_id))
    run("schedule", "add", "nightly", "0 2 * * *", "report")
    run("schedule", "disable", "nightly")
    run("pause", "default")

    told = db.execute("select act, actor from rota.audit_log order by id").fetchall()
    acts = ["settle_effect", "retry", "schedule", "schedule", "pause"]
    assert told == [(act, "ann") for act in acts]


def test_a_mistaken_cancel_is_undone_without_running_early(
    run: Run, client: Client, db: Db
) -> None:
    due, later = client.enqueue("a").job_id, client.enqueue("a", delay="1 day").job_id
    run("cancel", "--type", "a", "--yes")
    wrong = ["--type", "a", "--status", "cancelled", "--newer-than", "1 hour"]

    assert run("retry", *wrong, "--keep-run-at", "--yes") == "2 jobs put back, due as before\n"
    assert statuses(db, [due, later]) == ["queued"] * 2
    assert run("explain", str(later)).count("not_due") == 1
    run("cancel", str(later), "--reason", "too late")
    told = run("retry", "--cancel-reason", "too late", "--keep-run-at", "--yes")
    assert told == "1 job put back, due as before\n"
    run("cancel", str(later))
    told = run("retry", str(later), "--keep-run-at")
    assert told == f"job {later} is queued\n"
    assert run("explain", str(later)).count("not_due") == 1


def test_running_jobs_of_a_worker_are_taken_by_force(run: Run, client: Client, db: Db) -> None:
    ids = [client.enqueue("a").job_id for _ in range(3)]
    client.claim_jobs("pod-1", max_jobs=2)
    gone = ["retry", "--worker", "pod-1", "--status", "running"]

    assert '["running"], which takes force: true' in run(*gone, code=2)
    assert run(*gone, "--force", "--yes") == "2 jobs put back to run now\n"
    assert statuses(db, ids) == ["queued"] * 3


def test_audit_tells_of_an_act_in_many_steps_once(
    run: Run, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "ann")
    client.enqueue_many([{"job_type": "a"}] * 2001)
    run("pause", "--type", "b", "--yes")
    run("cancel", "--type", "a", "--yes")
    run("cancel", str(client.enqueue("a").job_id))

    *told, more = run("audit", "--limit", "3").splitlines()
    acts = [line for line in told if line[0] != " "]
    assert more == "there may be more: --limit"
    assert [act[20:].partition(":")[0] for act in acts] == [
        "cancel by ann, 1 job",
        "cancel by ann, 2001 jobs",
        "pause by ann",
    ]
    assert [row["jobs"] for row in json.loads(run("audit", "--json"))][:4] == [1, 1, 1000, 1000]


def test_audit_tells_who_did_what(
    run: Run, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "ann")
    job_id = client.enqueue("a").job_id
    run("cancel", str(job_id))
    run("pause", "--all", "--yes")

    lines = run("audit").splitlines()
    assert [lines[0][20:32], lines[-1][20:]] == [
        "pause by ann",
        f"cancel by ann, 1 job: {job_id}",
    ]
    (found,) = json.loads(run("audit", "--job", str(job_id), "--json"))
    assert (found["act"], found["actor"], found["jobs"]) == ("cancel", "ann", 1)
    assert len(json.loads(run("audit", "--by", "ann", "--act", "pause", "--json"))) == 1
    assert run("audit", "--since", "1 hour", "--by", "bob") == "(none)\n"


def test_a_retry_of_one_job_with_a_change(run: Run, client: Client) -> None:
    job_id = str(die(client))

    assert run("retry", job_id, "--set", "cents=9") == f"job {job_id} is queued\n"
    assert client.claim_jobs("w")[0].payload == {"cents": 9}


def test_a_retry_of_a_key_tells_that_other_databases_were_not_asked(
    run: Run, client: Client, db: Db, unnumbered: None
) -> None:
    """Another job may have it there, if a front sends keys to several databases."""
    keyed = str(die(client, idempotency_key="k"))
    assert run("retry", keyed) == f"job {keyed} is queued\n"
    client.cancel_job(int(keyed))
    db.execute("select rota.set_database_number(7)")

    assert run("retry", keyed) == (
        f"job {keyed} is queued; its key may be live in another database: none was asked\n"
    )
    other = str(die(client, queue="other"))
    assert run("retry", other) == f"job {other} is queued\n"
    client.cancel_job(int(keyed))
    client.cancel_job(int(other))
    several = ("retry", "--status", "cancelled", "--yes", "--queue")
    told = "1 job put back to run now; its key may be live in another database: none was asked"
    assert run(*several, "default") == f"{told}\n"
    assert "another" not in run(*several, "other")


def test_a_shell_can_complete_the_commands() -> None:
    pytest.importorskip("shtab")
    done = subprocess.run(
        [sys.executable, "-m", "rota", "completion", "bash"],
        check=True,
        capture_output=True,
        text=True,
    )
    syntax = subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False)

    assert syntax.returncode == 0
    assert "--new-payload" in done.stdout
