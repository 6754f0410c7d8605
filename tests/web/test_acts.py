"""What an operator does from the page, and who cannot."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qsl

import httpx
import psycopg
import pytest
from psycopg.rows import dict_row

from rota.web import User, app
from rota.web.acts import ACTS, address_of
from rota.web.queries import UNDOABLE
from rota.web.undo import undo_of
from support.waiting import wait_until
from web.conftest import LOGIN, OBSERVER, OPERATOR, serving
from web.sample_jobs import BIG, HOSTILE, Scene

Db = psycopg.Connection[Any]


@pytest.fixture
def db_of_page(web_url: str) -> Iterator[Db]:
    with psycopg.connect(web_url, autocommit=True) as connection:
        yield connection


def enqueue(db: Db, job_type: str = "act", **options: Any) -> int:
    names = "".join(f", {name} => %({name})s" for name in options)
    row = db.execute(
        f"select rota.enqueue(job_type => %(job_type)s, queue => 'acts'{names})",
        {"job_type": job_type, **options},
    ).fetchone()
    assert row is not None
    return int(row[0])


def status_of(db: Db, job_id: int) -> tuple[Any, ...]:
    row = db.execute(
        "select status, priority, run_at > now() from rota.job_runs where id = %s", [job_id]
    ).fetchone()
    assert row is not None
    return row


def act(http: httpx.Client, path: str, **more: str) -> httpx.Response:
    """Do what the form of an act does."""
    form = http.get(path)
    assert form.status_code == 200, form.text
    found = re.findall(r'<input type="hidden" name="([\w.]+)" value="([^"]*)"', form.text)
    # As browsers send lines.
    given = {name: html.unescape(value).replace("\n", "\r\n") for name, value in found}
    return http.post(path.partition("?")[0], data={**given, **more}, follow_redirects=True)


def test_what_takes_an_act_back_reads_later_acts_once(db_of_page: Db) -> None:
    """A policy of the table keeps observers from its indexes."""
    with db_of_page.transaction(force_rollback=True):
        ((first,),) = db_of_page.execute("""
            insert into rota.audit_log (act, before, job_ids)
            select 'set_priority', '{"priority": 0}', array(
                select rota.enqueue('undone', queue => 'acts') from generate_series(1, 300))
            returning id
        """).fetchall()
        db_of_page.execute(
            "insert into rota.audit_log (act, job_ids) select 'cancel', array[-n]"
            " from generate_series(1, 300) as n"
        )
        db_of_page.execute(f"set local role {OBSERVER}")
        asked = {"ids": [first], "limit": 1}
        row = db_of_page.cursor(row_factory=dict_row).execute(UNDOABLE, asked).fetchone()
        ((plan,),) = db_of_page.execute(
            "explain (analyze, format json) " + UNDOABLE, asked
        ).fetchall()

    assert row is not None
    assert len(row["left_ids"]) == 300
    nodes, removed = [plan[0]["Plan"]], 0
    for node in nodes:
        nodes += node.get("Plans", [])
        removed += node.get("Rows Removed by Join Filter", 0)
        if node.get("Relation Name") == "audit_log":
            removed += node.get("Rows Removed by Filter", 0) * node["Actual Loops"]
    assert removed <= 1000


def test_nothing_acts_on_get(http: httpx.Client, db_of_page: Db) -> None:
    job_id = enqueue(db_of_page)

    for path in (
        f"/act/cancel_job?job_id={job_id}",
        f"/act/cancel_job?job_id={job_id}&token=x",
    ):
        assert http.get(path).status_code == 200

    assert status_of(db_of_page, job_id)[0] == "queued"


def test_a_job_is_cancelled_retried_and_moved_in_time(
    http: httpx.Client, db_of_page: Db
) -> None:
    job_id = enqueue(db_of_page)

    answer = act(http, f"/act/set_priority?job_id={job_id}", priority="7")
    assert f"rota.set_priority(job_id =&gt; {job_id}, priority =&gt; 7)" in answer.text
    act(http, f"/act/reschedule_job?job_id={job_id}", delay="2 hours")
    assert status_of(db_of_page, job_id) == ("queued", 7, True)
    answer = act(http, f"/act/cancel_job?job_id={job_id}", reason=HOSTILE)
    assert "Done" in answer.text
    assert status_of(db_of_page, job_id)[0] == "cancelled"
    assert "Done: 1 changed" in undone(http, answer).text
    # Planned for later, as it was.
    assert status_of(db_of_page, job_id) == ("queued", 7, True)


def test_who_acts_may_have_a_name_that_the_database_lacks(in_latin1: str) -> None:
    async def authenticate(_: object) -> User:
        return User("Łukasz Noël", is_operator=True)

    page = app(in_latin1, allow_acts=True, authenticate=authenticate)
    with (
        psycopg.connect(in_latin1, autocommit=True, client_encoding="utf8") as db,
        serving(page) as address,
        httpx.Client(base_url=address) as http,
    ):
        job_id = enqueue(db)
        answer = act(http, f"/act/cancel_job?job_id={job_id}")
        newest = db.execute("select actor from rota.audit_log order by id desc limit 1")

        assert "Done" in answer.text
        assert newest.fetchone() == (r"\u0141ukasz Noël",)


def undone(http: httpx.Client, answer: httpx.Response) -> httpx.Response:
    """Take back what an answer tells of."""
    (path,) = re.findall(r'href="(/undo[^"]*)"', answer.text)
    return act(http, html.unescape(path))


def test_an_undo_runs_nothing_again_that_succeeds_while_it_looks(
    http: httpx.Client, db_of_page: Db
) -> None:
    job_id = enqueue(db_of_page, "undone")
    act(http, "/all/cancel?type=undone")
    audited = "select max(a.id) from rota.audit_log as a"
    with db_of_page.cursor(row_factory=dict_row) as cursor:
        ids = [row["max"] for row in cursor.execute(audited)]
        (row,) = cursor.execute(UNDOABLE, {"ids": ids, "limit": 1})
    (call,) = undo_of(row, lambda value: value).calls
    db_of_page.execute("select rota.retry_job(%s)", [job_id])
    claimed = "rota.claim_jobs('w', '{acts}', job_types => '{undone}')"
    db_of_page.execute(f"select rota.finish_job(c.job_id, c.lease_token) from {claimed} as c")

    db_of_page.execute(call)

    assert status_of(db_of_page, job_id)[0] == "succeeded"


def test_a_cancel_is_taken_back_for_its_own_jobs_alone(
    http: httpx.Client, db_of_page: Db
) -> None:
    before, mine, retried = (enqueue(db_of_page, "undone", delay="1 day") for _ in range(3))
    run_at = "select run_at from rota.job_runs where id = %s"
    planned = db_of_page.execute(run_at, [mine]).fetchone()
    db_of_page.execute("select rota.cancel_job(%s)", [before])
    answer = act(http, "/all/cancel?type=undone")
    db_of_page.execute("select rota.retry_job(%s)", [retried])

    form = http.get(html.unescape(re.findall(r'href="(/undo[^"]*)"', answer.text)[0])).text
    assert "1 of 2 jobs are unchanged since" in form
    assert status_of(db_of_page, mine)[0] == "cancelled"
    assert "Done: 1 changed" in undone(http, answer).text
    assert [status_of(db_of_page, i)[0] for i in (before, mine, retried)] == [
        "cancelled", "queued", "queued"
    ]  # fmt: skip
    assert db_of_page.execute(run_at, [mine]).fetchone() == planned
    again = http.get(html.unescape(re.findall(r'href="(/undo[^"]*)"', answer.text)[0])).text
    assert "There is nothing to undo" in again
    assert 'method="post"' not in again


def test_an_undo_that_cannot_read_the_audit_leaves_nothing_out(
    make_page: Callable[..., Any], db_of_page: Db
) -> None:
    job_id = enqueue(db_of_page, delay="1 day")
    page = make_page(allow_acts=True, read_time=0.3)
    with serving(page) as address, httpx.Client(base_url=address, timeout=30) as http:
        answer = act(http, f"/act/set_priority?job_id={job_id}", priority="7")
        (path,) = re.findall(r'href="(/undo[^"]*)"', answer.text)
        form = fields_of(http.get(path).text)
        with db_of_page.transaction():
            db_of_page.execute("lock table rota.audit_log in access exclusive mode")
            stopped = http.post("/undo", data=form).text

        assert "The server cancelled the query" in stopped
        assert "Done" not in stopped
        assert "data-goes-on" not in stopped
        http.post("/undo", data=fields_of(stopped))
    assert status_of(db_of_page, job_id)[1] == 0


def test_an_undo_restores_what_was_cancelled_because_of_it(
    http: httpx.Client, db_of_page: Db
) -> None:
    parent = enqueue(db_of_page, "parent", delay="1 day")
    child = enqueue(db_of_page, "child", depends_on=[parent])
    answer = act(http, f"/act/cancel_job?job_id={parent}")
    db_of_page.execute("select * from rota.tick()")
    (path,) = re.findall(r'href="(/undo[^"]*)"', answer.text)

    assert "come back with the next tick, and wait" in http.get(path).text
    undone(http, answer)
    db_of_page.execute("select * from rota.tick()")
    assert status_of(db_of_page, child)[0] == "blocked"


def test_a_cancel_of_all_says_what_it_takes_along(http: httpx.Client, db_of_page: Db) -> None:
    parents = [enqueue(db_of_page, "leading", delay="1 day") for _ in range(2)]
    enqueue(db_of_page, "following", depends_on=parents)

    form = http.get("/all/cancel?type=leading").text

    assert "Jobs that wait for these and are cancelled with them: 1<" in form


def test_what_a_job_had_before_is_given_back(http: httpx.Client, db_of_page: Db) -> None:
    job_id = enqueue(db_of_page, "given_back", delay="1 day", priority=4)
    had = "select queue, priority, run_at from rota.jobs where id = %s"
    before = db_of_page.execute(had, [job_id]).fetchone()
    for path, more in (
        (f"/act/set_priority?job_id={job_id}", {"priority": "9"}),
        (f"/act/reschedule_job?job_id={job_id}", {"delay": "0"}),
        (f"/all/move?id={job_id}", {"to.queue": "elsewhere"}),
        (f"/all/set_priority?id={job_id}", {"to.priority": "9"}),
    ):
        answer = act(http, path, **more)
        assert db_of_page.execute(had, [job_id]).fetchone() != before
        assert "Done: 1 changed" in undone(http, answer).text, path
        assert db_of_page.execute(had, [job_id]).fetchone() == before
    answer = act(http, f"/act/set_priority?job_id={job_id}", priority="9")
    (path,) = re.findall(r'href="(/undo[^"]*)"', answer.text)
    db_of_page.execute("select rota.set_priority(%s, 2)", [job_id])
    assert "There is nothing to undo" in http.get(path).text


def test_the_time_of_a_retry_is_not_that_of_an_earlier_act(
    http: httpx.Client, db_of_page: Db
) -> None:
    job_id = enqueue(db_of_page, "retried", delay="1 minute")
    answer = act(http, f"/act/reschedule_job?job_id={job_id}", delay="0")
    path = html.unescape(re.findall(r'href="(/undo[^"]*)"', answer.text)[0])
    db_of_page.execute(
        "select rota.fail_job(c.job_id, c.lease_token, 'down', retry_in => '1 day')"
        " from rota.claim_jobs('w', '{acts}', job_types => '{retried}') as c"
    )

    assert "There is nothing to undo" in http.get(path).text


def test_what_a_setting_was_before_it_is_again(http: httpx.Client, db_of_page: Db) -> None:
    enqueue(db_of_page)
    schedule = (
        "select rota.schedule_job(name => 'undone', schedule => '0 2 * * *',"
        " job_type => 'clean', queue => 'acts', payload => %s)"
    )
    db_of_page.execute(schedule, [f'{{"n": {BIG}, "none": null, "in": {{"none": null}}}}'])
    db_of_page.execute(
        "select rota.set_limit(job_type => 'undone', max_running => 3, max_starts => 9)"
    )
    db_of_page.execute("select rota.pause_queue('acts', 'the reason', '2999-01-01 UTC')")
    changing = "{paused_at,paused_by,updated_at,disabled_at,anchored_at,created_at}"

    def settings() -> Any:
        return db_of_page.execute(
            "select jsonb_agg(to_jsonb(p) - %(no)s::text[] order by p.pause_name) from"
            " rota.pauses as p union all select jsonb_agg(to_jsonb(d) - %(no)s::text[]) from"
            " rota.job_definitions as d where d.name = 'undone' union all"
            " select jsonb_agg(to_jsonb(l) - %(no)s::text[] order by l.limit_name)"
            " from rota.limits as l",
            {"no": changing},
        ).fetchall()

    before = settings()
    try:
        for path, more in (
            ("/act/resume_queue?queue=acts", {}),
            ("/act/pause_queue?queue=acts", {"reason": "another"}),
            ("/act/pause_type?job_type=undone", {"reason": "x", "queue": "acts"}),
            ("/act/pause_all", {"reason": "x"}),
            ("/act/disable_schedule?name=undone", {}),
            ("/act/schedule_job?name=undone", {"schedule": "0 3 * * *"}),
            ("/act/unschedule_job?name=undone", {}),
            ("/act/set_limit", {"job_type": "undone", "max_running": "5"}),
            ("/act/set_limit", {"job_type": "undone_new", "max_running": "5"}),
        ):
            form = fields_of(http.get(path).text)
            answer = act(http, path, **{**form, **more})
            assert settings() != before, path
            assert "Done: 1 changed" in undone(http, answer).text, path
            assert settings() == before, path
        answer = act(http, "/act/resume_queue?queue=acts")
        db_of_page.execute("select rota.pause_queue('acts', 'somebody else')")
        path = html.unescape(re.findall(r'href="(/undo[^"]*)"', answer.text)[0])
        assert "There is nothing to undo" in http.get(path).text
    finally:
        db_of_page.execute("select rota.resume_all()")
        db_of_page.execute("select rota.resume_queue('acts')")


def test_what_is_no_id_is_told_and_no_error(http: httpx.Client) -> None:
    for job_id in ("abc", "1,2", "\u00b2", "99999999999999999999"):
        answer = http.get("/all/retry", params={"id": job_id})
        assert (answer.status_code, f"there is no job {job_id}" in answer.text) == (200, True)


def test_no_later_change_is_taken_back_with_a_schedule(
    http: httpx.Client, db_of_page: Db
) -> None:
    put = "select rota.schedule_job('moved', '0 2 * * *', 'clean', queue => %s)"
    db_of_page.execute(put, ["acts"])
    form = fields_of(http.get("/act/schedule_job?name=moved").text)
    answer = act(http, "/act/schedule_job?name=moved", **{**form, "schedule": "0 3 * * *"})
    (path,) = re.findall(r'href="(/undo[^"]*)"', answer.text)
    assert "There is nothing to undo" not in http.get(path).text
    db_of_page.execute(put.replace("2", "3"), ["elsewhere"])

    assert "There is nothing to undo" in http.get(path).text


@pytest.mark.parametrize(
    ("path", "is_final"),
    [
        ("/act/pause_all?", False),
        ("/act/unschedule_job?name=weekly", False),
        ("/all/cancel?status=queued", False),
        ("/all/purge?status=succeeded", True),
        ("/act/settle_effect?scope=mails&key=x", True),
    ],
)
def test_only_what_has_no_undo_is_called_final(
    http: httpx.Client, path: str, is_final: bool
) -> None:
    asked = http.get(path)

    assert asked.status_code == 200
    assert ("You cannot undo this." in asked.text) is is_final


def test_no_undo_is_offered_where_there_is_none(http: httpx.Client, db_of_page: Db) -> None:
    job_id = enqueue(db_of_page, delay="1 day")
    assert "/undo" not in act(http, f"/act/retry_job?job_id={job_id}").text
    assert "/undo" not in act(http, "/act/tick").text
    for priority in range(101):
        enqueue(db_of_page, "mixed", priority=priority)
    answer = act(http, "/all/set_priority?type=mixed", **{"to.priority": "500"})
    assert "Done: 101 changed" in answer.text
    assert "/undo" not in answer.text
    newest = http.get("/audit").text.split('<th scope="row">')[1]
    assert "Cannot be undone: the jobs had too many values" in newest


def test_the_pause_of_a_breaker_is_not_made_one_without_an_end(
    http: httpx.Client, db_of_page: Db
) -> None:
    db_of_page.execute(
        "select rota._pause('acts', 'broken', 'it tries again at 03:00 UTC', null, 'breaker')"
    )
    try:
        answer = act(http, "/act/pause_type?job_type=broken", queue="acts", reason="mine")
        row = db_of_page.execute("select max(id) from rota.audit_log").fetchone()
        assert row is not None
        assert "/undo" not in answer.text
        assert "There is nothing to undo" in http.get(f"/undo?audit={row[0]}").text
    finally:
        db_of_page.execute("select rota.resume_type('broken', queue => 'acts')")


def test_an_act_of_more_than_can_be_undone_at_once_says_so(
    http: httpx.Client, db_of_page: Db
) -> None:
    """Its last steps may leave no row: what is too much stays too much."""
    first, _ = (enqueue(db_of_page, "large", delay="1 day") for _ in range(2))
    (path,) = re.findall(r"/undo[^\"]*", act(http, f"/all/cancel?id={first}").text)
    rows = ",".join([path.partition("=")[2], *map(str, range(1_000_001, 1_000_501))])
    for after_id in (1 << 50, 0):
        answer = act(http, "/all/cancel?type=large", audit=rows, after_id=str(after_id))
        assert "/undo" not in answer.text
        assert "Undo it in the audit" in answer.text


def test_acts_on_more_jobs_than_can_be_undone_at_once_say_so(
    http: httpx.Client, db_of_page: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rota.web.acts.MAX_ROWS", 5)
    for number, is_told in ((5, False), (6, True)):
        ids = [str(enqueue(db_of_page, "many", delay="1 day")) for _ in range(number)]
        token = fields_of(http.get(f"/act/cancel_job?job_id={ids[0]}").text)["token"]
        given = {"token": token, "job_id": ids}
        answer = http.post("/act/cancel_job", data=given, follow_redirects=True)
        assert f"{number} jobs" in answer.text
        assert ("/undo" in answer.text) is not is_told
        assert ("Undo it in the audit" in answer.text) is is_told


def test_jobs_that_had_different_values_get_each_its_own_again(
    http: httpx.Client, db_of_page: Db
) -> None:
    for number in range(6):
        enqueue(db_of_page, "various", priority=number % 3, delay=f"{number + 1} hours")
    last = enqueue(db_of_page, "various", priority=7, delay="9 hours")
    had = "select id, queue, priority, run_at from rota.jobs where job_type = 'various'"
    jobs = sorted(db_of_page.execute(had).fetchall())
    for path, more in (
        ("/all/set_priority?type=various", {"to.priority": "50"}),
        ("/all/reschedule?type=various", {"to.delay": "3 days"}),
    ):
        answer = act(http, path, **more)
        assert "Done: 7 changed" in answer.text
        assert sorted(db_of_page.execute(had).fetchall()) != jobs
        assert "Done: 7 changed" in undone(http, answer).text
        assert sorted(db_of_page.execute(had).fetchall()) == jobs
    answer = act(http, "/all/set_priority?type=various", **{"to.priority": "50"})
    act(http, f"/act/set_priority?job_id={last}", priority="60")
    assert "Done: 6 changed" in undone(http, answer).text
    jobs = [(*job[:2], 60, job[3]) if job[0] == last else job for job in jobs]
    assert sorted(db_of_page.execute(had).fetchall()) == jobs


def test_jobs_of_queues_first_and_last_get_their_own_queue_again(
    http: httpx.Client, db_of_page: Db
) -> None:
    """The audit has the first and the last of times under these names."""
    had = "select queue from rota.jobs where job_type = 'ends' order by queue"
    for queue in ("first", "last"):
        db_of_page.execute(
            "select rota.enqueue('ends', queue => %s, delay => '1 day')", [queue]
        )
    answer = act(http, "/all/move?type=ends", **{"to.queue": "acts"})
    assert db_of_page.execute(had).fetchall() == [("acts",)] * 2

    undone(http, answer)

    assert db_of_page.execute(had).fetchall() == [("first",), ("last",)]


def test_an_answer_can_be_loaded_again_and_does_nothing_again(
    http: httpx.Client, db_of_page: Db
) -> None:
    job_id = enqueue(db_of_page, delay="1 day")
    answer = act(http, f"/act/set_priority?job_id={job_id}", priority="7")
    assert [one.status_code for one in answer.history] == [303]
    assert answer.request.method == "GET"
    assert "Done" in http.get(str(answer.url)).text
    rows = db_of_page.execute(
        "select count(*) from rota.audit_log where job_ids @> array[%s::bigint]", [job_id]
    ).fetchone()
    assert rows == (1,)
    gone = http.get("/act/set_priority?result=x")
    assert gone.status_code == 404
    assert "the audit shows" in gone.text


def test_what_cannot_be_done_is_told_and_the_rest_is_done(
    http: httpx.Client, db_of_page: Db
) -> None:
    one, two = enqueue(db_of_page), enqueue(db_of_page)
    act(http, f"/act/cancel_job?job_id={one}")
    form = http.get(f"/act/set_priority?id={one}&id={two}")
    token = re.findall(r'name="token" value="(\w+)"', form.text)[0]

    answer = http.post(
        "/act/set_priority",
        data={"token": token, "id": [str(one), str(two)], "priority": "3"},
        follow_redirects=True,
    )

    assert "1 of 2 done" in answer.text
    assert f'<a href="/jobs/{one}">{one}</a>: ' in answer.text
    assert status_of(db_of_page, two)[1] == 3


def test_a_queue_is_paused_and_resumed(http: httpx.Client, db_of_page: Db) -> None:
    enqueue(db_of_page)

    answer = act(http, "/act/pause_queue?queue=acts", reason="it's \\ late")
    assert "Done" in answer.text
    assert "queue acts was paused" in http.get("/").text
    act(http, "/act/resume_queue?queue=acts")
    assert "queue acts was paused" not in http.get("/").text


def test_a_schedule_is_run_disabled_and_removed(http: httpx.Client, db_of_page: Db) -> None:
    db_of_page.execute(
        "select rota.schedule_job(name => 'shop/nightly', schedule => '0 2 * * *',"
        " job_type => 'clean', queue => 'acts')"
    )
    act(http, "/act/run_schedule_now?name=shop/nightly")
    page = http.get("/jobs?schedule=shop/nightly").text
    assert page.count('<th scope="row">') == 1
    act(http, "/act/disable_schedule?name=shop/nightly")
    assert "disabled" in http.get("/schedules/shop/nightly").text
    act(http, "/act/unschedule_job?name=shop/nightly")
    assert http.get("/schedules/shop/nightly").status_code == 404


def test_a_schedule_is_edited_after_a_look_at_what_comes(
    http: httpx.Client, db_of_page: Db
) -> None:
    db_of_page.execute(
        "select rota.schedule_job(name => 'shop/weekly', schedule => '0 2 * * SUN',"
        " job_type => 'clean', payload => %s, queue => 'acts', time_zone => 'Europe/Berlin',"
        " lease => '5 min', headers => %s, overlap => 'skip', jitter => '10 s',"
        " source => 'shop', ends_at => '2090-01-01')",
        [f'{{"n": {BIG}}}', '{"tenant": "7"}'],
    )
    changing = "{schedule,next_run_at,anchored_at,updated_at}"
    settings = f"select to_jsonb(d) - '{changing}'::text[] from"
    before = db_of_page.execute(f"{settings} rota.job_definitions as d").fetchall()
    address = "/act/schedule_job?name=shop/weekly"
    form = http.get(address).text
    assert str(BIG) in form
    given = fields_of(form)

    look = http.post(
        "/act/schedule_job", data={**given, "schedule": "0 3 * * MON", "look": "1"}
    )
    assert "at 03:00 on Monday" in look.text
    assert look.text.count(" 03:00:00 ") == 5
    wrong = http.post("/act/schedule_job", data={**given, "schedule": "0 3 * *", "look": "1"})
    assert 'role="alert"' in wrong.text
    row = "select schedule from rota.job_definitions where name = 'shop/weekly'"
    assert db_of_page.execute(row).fetchone() == ("0 2 * * SUN",)

    done = http.post(
        "/act/schedule_job",
        data={**given, "schedule": "0 3 * * MON"},
        follow_redirects=True,
    )
    assert "0 3 * * MON" in done.text
    assert db_of_page.execute(row).fetchone() == ("0 3 * * MON",)
    # All that the form did not change is as it was.
    assert db_of_page.execute(f"{settings} rota.job_definitions as d").fetchall() == before
    db_of_page.execute("select rota.unschedule_job('shop/weekly')")
    assert http.get(address).status_code == 404


@pytest.mark.parametrize("meanwhile", ["changed", "removed"])
def test_an_old_form_of_a_schedule_undoes_nothing_of_others(
    http: httpx.Client, db_of_page: Db, meanwhile: str
) -> None:
    call = "select rota.schedule_job('shop/old', '0 2 * * SUN', 'clean', queue => %s)"
    db_of_page.execute(call, ["acts"])
    given = fields_of(http.get("/act/schedule_job?name=shop/old").text)
    if meanwhile == "changed":
        db_of_page.execute(call, ["quick"])
    else:
        db_of_page.execute("select rota.unschedule_job('shop/old')")
    rows = "select queue from rota.job_definitions where name = 'shop/old'"
    left = db_of_page.execute(rows).fetchall()

    sent = {**given, "schedule": "0 3 * * MON"}
    shown = http.post("/act/schedule_job", data={**sent, "look": "1"})
    done = http.post("/act/schedule_job", data={**fields_of(shown.text)})

    assert [shown.status_code, done.status_code] == [422, 422]
    assert "was changed or removed after this form was opened" in done.text
    assert db_of_page.execute(rows).fetchall() == left
    if meanwhile == "changed":
        db_of_page.execute("select rota.unschedule_job('shop/old')")


def test_the_form_of_a_schedule_has_all_that_the_function_takes(db_of_page: Db) -> None:
    """What it lacked would be lost by each edit."""
    row = db_of_page.execute(
        "select p.proargnames[:p.pronargs] from pg_proc as p"
        " where p.oid = 'rota.schedule_job'::regproc"
    ).fetchone()
    act = ACTS["schedule_job"]
    assert row is not None
    assert {*act.about, *(field.name for field in act.fields)} == set(row[0])


def fields_of(form: str) -> dict[str, str]:
    """Return what a browser would send."""
    found = re.findall(r'<input [^>]*?name="([\w.]+)" value="([^"]*)"', form)
    found += re.findall(r'<textarea name="([\w.]+)"[^>]*>([^<]*)</textarea>', form)
    for name, options in re.findall(r'<select name="(\w+)".*?>(.*?)</select>', form, re.S):
        found += re.findall(r'<option value="(\w+)" selected', options) and [
            (name, re.findall(r'<option value="(\w+)" selected', options)[0])
        ]
    return {name: html.unescape(value) for name, value in found}


def test_a_payload_is_edited_and_the_job_retried(http: httpx.Client, db_of_page: Db) -> None:
    job_id = enqueue(db_of_page, "edited", payload=f'{{"sum": {BIG}.5, "currency": "XX"}}')
    db_of_page.execute("select rota.cancel_job(%s)", [job_id])

    given = fields_of(http.get(f"/all/retry?id={job_id}").text)
    edited = given["to.payload"].replace("XX", "EUR")
    sent = {**given, "to.payload": edited}
    done = http.post("/all/retry", data=sent, follow_redirects=True).text

    assert "EUR" in html.unescape(done)
    row = db_of_page.execute(
        "select payload::text, status from rota.job_runs where id = %s", [job_id]
    ).fetchone()
    assert row == (f'{{"sum": {BIG}.5, "currency": "EUR"}}', "queued")
    again = http.post("/all/retry", data={**given, "to.payload": "{"})
    assert "this is no JSON" in again.text


def test_a_payload_with_masked_values_is_changed_in_parts(
    http: httpx.Client, db_of_page: Db
) -> None:
    job_id = enqueue(db_of_page, "masked", payload='{"password": "hunter2", "n": 1}')
    form = http.get(f"/all/retry?id={job_id}").text
    assert "hunter2" not in form
    assert fields_of(form)["to.payload"] == ""
    assert "to.merge" in fields_of(form)


def test_an_unknown_effect_is_settled(http: httpx.Client, db_of_page: Db) -> None:
    job_id = enqueue(db_of_page)
    db_of_page.execute("select rota.set_priority(%s, -5)", [job_id])
    lease = db_of_page.execute(
        "select job_id, lease_token from rota.claim_jobs(worker => 'w', queues => '{acts}',"
        " max_jobs => 1)"
    ).fetchone()
    assert lease is not None
    assert lease[0] == job_id
    db_of_page.execute("select rota.record_effect('acts', %s, %s, %s)", [HOSTILE, *lease])
    db_of_page.execute(
        "select rota.fail_job(job_id => %s, lease_token => %s, error => 'gone', fatal => true)",
        list(lease),
    )
    page = http.get("/waiting").text
    (path,) = re.findall(r'href="(/act/settle_effect\?scope=acts[^"]*)"', page)
    address = html.unescape(path)

    assert act(http, address).status_code == 422
    assert "Done" in act(http, address, outcome="done").text
    assert path not in http.get("/waiting").text


def test_what_is_done_to_all_that_match_is_counted_before_and_told_after(
    http: httpx.Client, db_of_page: Db
) -> None:
    ids = [enqueue(db_of_page, "bulk", delay="1 day") for _ in range(12)]
    keyed = enqueue(db_of_page, "bulk", delay="1 day", idempotency_key="bulk:1")
    act(http, "/all/cancel?type=bulk&queue=acts", **{"to.reason": HOSTILE})
    assert {status_of(db_of_page, job_id)[0] for job_id in [*ids, keyed]} == {"cancelled"}
    enqueue(db_of_page, "bulk", delay="1 day", idempotency_key="bulk:1")

    form = http.get("/all/retry?type=bulk&queue=acts&status=cancelled")
    answer = act(
        http,
        "/all/retry?type=bulk&queue=acts&status=cancelled",
        **{"to.merge": '{"currency": "EUR"}'},
    )

    assert "13 jobs" in form.text
    assert "The first 10 of 13 jobs" in form.text
    assert "Done: 12 changed" in answer.text
    assert "1 could not be changed" in answer.text
    assert f'<a href="/jobs/{keyed}">{keyed}</a>' in answer.text
    sent = 'arguments => \'{"merge": {"currency": "EUR"}}\''
    assert sent in html.unescape(answer.text)
    payloads = db_of_page.execute(
        "select distinct payload from rota.jobs where id = any(%s)", [ids]
    ).fetchall()
    assert payloads == [({"currency": "EUR"},)]
    act(http, "/all/move?type=bulk&status=queued", **{"to.queue": "acts2"})
    queues = db_of_page.execute(
        "select distinct queue from rota.jobs where id = any(%s)", [ids]
    ).fetchall()
    assert queues == [("acts2",)]


def test_what_has_several_lines_is_found_and_acted_on(
    http: httpx.Client, db_of_page: Db
) -> None:
    died = enqueue(db_of_page, "lines", ordering_key="two\nlines")
    blocked = enqueue(db_of_page, "lines", ordering_key="two\nlines")
    db_of_page.execute(
        "select rota.fail_job(c.job_id, c.lease_token, %s, error_type => 'E', fatal => true)"
        " from rota.claim_jobs('w', '{acts}', job_types => '{lines}') as c",
        ["no answer\r\n  of 10.0.0.7\n"],
    )

    page = http.get("/errors?type=lines").text
    (address, bulk) = re.findall(r'href="((?:/jobs|/all/retry)\?queue=[^"]*)">', page)[::2]
    listed = http.get(html.unescape(address)).text
    assert f'href="/jobs/{died}"' in listed
    # A field of one line leaves line breaks out.
    (text,) = re.findall(r'<input name="group" value="([^"]*)"', listed)
    assert text == "no answer of N"
    assert "Done" in act(http, "/act/resume_ordering_key?ordering_key=two%0Alines").text
    assert status_of(db_of_page, blocked)[0] == "queued"
    assert "Done: 1 changed" in act(http, html.unescape(bulk)).text
    assert status_of(db_of_page, died)[0] in ("queued", "blocked")


def test_an_error_without_a_text_stands_for_no_other(
    http: httpx.Client, db_of_page: Db
) -> None:
    for text in ("", "with a text"):
        enqueue(db_of_page, "silent")
        db_of_page.execute(
            "select rota.fail_job(c.job_id, c.lease_token, %s, 'E', fatal => true) from"
            " rota.claim_jobs('w', '{acts}', job_types => '{silent}') as c",
            [text],
        )

    page = http.get("/errors?type=silent").text
    for address in re.findall(r'href="(/all/retry\?[^"]*)"', page):
        assert "<b>1 job</b>" in http.get(html.unescape(address)).text
    for error in ("", " "):
        asked = json.dumps({"queue": "acts", "error_type": "E", "error": error})
        remedy = f"select * from rota.act_on_jobs('retry', '{asked}');"
        assert address_of(remedy) is None


def test_thousands_are_done_in_steps_that_tell_how_far_they_are(
    http: httpx.Client, db_of_page: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    db_of_page.execute(
        "select rota.enqueue_many((select jsonb_agg(jsonb_build_object('job_type', 'many',"
        " 'queue', 'many', 'delay', '1 day')) from generate_series(1, 2500)))"
    )
    monkeypatch.setattr("rota.web.acts.STEP_TIME", 0.0001)
    pages = [http.get("/all/cancel?queue=many").text]
    path = "/all/cancel"
    # Counting, too, ends with its time, and tells so.
    while "data-goes-on" in pages[-1] or len(pages) == 1:
        found = re.findall(r'<input type="hidden" name="([\w.]+)" value="([^"]*)"', pages[-1])
        pages.append(
            http.post(
                path,
                data={name: html.unescape(value) for name, value in found},
                follow_redirects=True,
            ).text
        )

    told = [re.findall(r'role="status">([^<]*)', page) for page in pages[1:]]
    assert told[0] == ["1\u202f000 of 2\u202f500 done"]
    assert told[-1] == ["Done: 2\u202f500 changed"]
    assert db_of_page.execute(
        "select count(*) from rota.jobs where queue = 'many'"
    ).fetchone() == (0,)


def test_the_sql_does_the_same_to_all_of_them(http: httpx.Client, db_of_page: Db) -> None:
    db_of_page.execute(
        "select rota.enqueue_many((select jsonb_agg(jsonb_build_object('job_type', 'copied',"
        " 'queue', 'copied', 'delay', '1 day')) from generate_series(1, 1500)))"
    )
    page = http.get(
        "/all/cancel", params={"type": "copied", "to.reason": "it's {x} $$ $act0$"}
    ).text
    (code,) = re.findall(r'<div class="sql"><code>(do .*?)</code>', page, re.S)
    db_of_page.execute(html.unescape(code))
    assert db_of_page.execute(
        "select count(*) from rota.jobs where job_type = 'copied'"
    ).fetchone() == (0,)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/all/retry", "No job or setting was named"),
        ("/all/discard?status=queued", "status"),
        ("/all/cancel?id=1&id=x", "there is no job x"),
    ],
)
def test_what_cannot_be_done_to_all_is_told_before(
    http: httpx.Client, path: str, says: str
) -> None:
    page = http.get(path).text

    assert says in html.unescape(page)
    assert 'method="post"' not in page


def test_an_act_with_wrong_arguments_changes_nothing(
    http: httpx.Client, db_of_page: Db
) -> None:
    job_id = enqueue(db_of_page, "wrong", delay="1 day")

    for path, more in (
        (f"/all/retry?id={job_id}&status=queued", {"to.merge": "{x"}),
        (f"/all/retry?id={job_id}&status=queued", {"to.merge": "[1]"}),
        (f"/all/set_priority?id={job_id}", {"to.priority": "high"}),
        (f"/all/reschedule?id={job_id}", {}),
        (f"/all/move?id={job_id}", {"to.queue": ""}),
    ):
        answer = act(http, path, **more)
        assert answer.status_code == 422, path
        assert 'role="alert"' in answer.text
    assert status_of(db_of_page, job_id) == ("queued", 0, True)


def test_who_did_what_is_told(make_page: Callable[..., Any], db_of_page: Db) -> None:
    def ann(_: Any) -> User:
        return User("ann", is_operator=True)

    job_id = enqueue(db_of_page)
    with (
        serving(make_page(allow_acts=True, authenticate=ann)) as address,
        httpx.Client(base_url=address) as http,
    ):
        act(http, f"/act/cancel_job?job_id={job_id}", reason=HOSTILE)
        assert '<b>ann</b> <span class="quiet">web_login</span>' in http.get("/audit").text
        page = http.get(f"/audit?job={job_id}").text
        assert page.count('<th scope="row">') == 1
        assert "cancel by ann" in http.get(f"/jobs/{job_id}").text


def test_a_type_and_everything_are_paused_and_resumed(http: httpx.Client) -> None:
    act(http, "/act/pause_type?job_type=act", reason="provider", until="2999-01-01 UTC")
    act(http, "/act/pause_all?", reason="restored")
    page = http.get("/").text
    assert "<b>type act</b>" in page
    assert "everything" in page
    act(http, "/act/resume_all?")
    act(http, "/act/resume_type?job_type=act")
    assert "<b>type act</b>" not in http.get("/").text


def test_a_form_of_somebody_else_is_refused(http: httpx.Client, db_of_page: Db) -> None:
    job_id = enqueue(db_of_page)
    form = http.get(f"/act/cancel_job?job_id={job_id}").text
    token = re.findall(r'name="token" value="(\w+)"', form)[0]
    data = {"job_id": str(job_id)}

    answers = [
        http.post("/act/cancel_job", data=data),
        http.post("/act/cancel_job", data={**data, "token": "x"}),
        http.post("/act/cancel_job", data={**data, "token": "é"}),
        http.post(
            "/act/cancel_job",
            data={**data, "token": token},
            headers={"sec-fetch-site": "cross-site"},
        ),
    ]

    assert [answer.status_code for answer in answers] == [403] * 4
    assert status_of(db_of_page, job_id)[0] == "queued"


def test_a_page_only_shows_unless_it_is_told_otherwise(
    make_page: Callable[..., Any], db_of_page: Db
) -> None:
    job_id = enqueue(db_of_page)
    with serving(make_page()) as address, httpx.Client(base_url=address) as http:
        assert "/act/" not in http.get(f"/jobs/{job_id}").text
        assert http.get(f"/act/cancel_job?job_id={job_id}").status_code == 403
        assert http.post("/act/cancel_job", data={"job_id": str(job_id)}).status_code == 403


def test_an_unknown_act_or_a_body_that_is_too_large_is_refused(http: httpx.Client) -> None:
    assert http.get("/act/drop_everything").status_code == 404
    assert http.get("/act/cancel_job?job_id=x").status_code == 404
    assert http.post("/act/cancel_job", content=b"x" * (3 << 20)).status_code == 413


def test_a_nul_in_a_form_is_left_out(http: httpx.Client, db_of_page: Db) -> None:
    job_id = enqueue(db_of_page)
    form = http.get(f"/act/cancel_job?job_id={job_id}").text
    token = re.findall('name="token" value="([^"]*)"', form)[0]

    for reason in ("%00a", "%0%000a"):  # of the second a filter of texts makes the first
        sent = f"token={token}&job_id={job_id}&reason={reason}"
        assert http.post("/act/cancel_job", content=sent).status_code in (200, 303)
    assert status_of(db_of_page, job_id)[0] == "cancelled"


def test_an_act_whose_connection_is_lost_is_told_as_unknown(
    http: httpx.Client, db_of_page: Db, web_url: str
) -> None:
    ids = [enqueue(db_of_page) for _ in range(3)]
    form = http.get(f"/act/cancel_job?job_id={ids[0]}").text
    given = {"token": re.findall('name="token" value="([^"]*)"', form)[0], "job_id": ids}
    ending = (
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name = 'rota web' and wait_event_type = 'Lock'"
    )
    with (
        ThreadPoolExecutor(1) as thread,
        psycopg.connect(web_url, autocommit=True) as other,
    ):
        with db_of_page.transaction():
            db_of_page.execute("lock table rota.jobs in access exclusive mode")
            acting = thread.submit(
                http.post, "/act/cancel_job", data=given, follow_redirects=True
            )
            wait_until(lambda: other.execute(ending).fetchall())
        answer = acting.result()
    assert answer.status_code == 200
    assert answer.text.count("nothing here knows whether it was done") == 3
    assert {status_of(db_of_page, job_id)[0] for job_id in ids} == {"queued"}


def test_what_the_login_may_not_do_is_told_with_what_it_needs(
    make_page: Callable[..., Any], db_of_page: Db
) -> None:
    job_id = enqueue(db_of_page)
    db_of_page.execute(f"revoke {OPERATOR} from {LOGIN}")
    try:
        with (
            serving(make_page(allow_acts=True)) as address,
            httpx.Client(base_url=address) as http,
        ):
            answer = act(http, f"/act/cancel_job?job_id={job_id}")
    finally:
        db_of_page.execute(f"grant {OPERATOR} to {LOGIN}")
    assert "permission denied for function cancel_job" in answer.text
    assert "needs: grant rota_observer, rota_operator to it" in answer.text


@pytest.mark.slow
def test_a_locked_job_is_told_as_locked(http: httpx.Client, db_of_page: Db) -> None:
    job_id = enqueue(db_of_page)
    with db_of_page.transaction():
        db_of_page.execute("select from rota.jobs where id = %s for update", [job_id])
        answer = act(http, f"/act/cancel_job?job_id={job_id}")
    assert "another session has locked it" in answer.text
    assert status_of(db_of_page, job_id)[0] == "queued"


@pytest.mark.parametrize(
    ("remedy", "address"),
    [
        ("select rota.retry_job(17);", "/act/retry_job?job_id=17"),
        ("select rota.resume_queue('it''s');", "/act/resume_queue?queue=it%27s"),
        ("select * from rota.tick();", "/act/tick?"),
        ("select rota.reschedule_job(5, delay => '0');",
         "/act/reschedule_job?job_id=5&delay=0"),
        ("select rota.set_limit(queue => 'a', max_running => 3);",
         "/act/set_limit?queue=a&max_running=3"),
        ("select * from rota.explain_job(5);", "/jobs/5"),
        ("select * from rota.act_on_jobs('retry', '{\"type\": 1}');", None),
        ("select * from rota.act_on_jobs('drop', '{\"queue\": \"q\"}');", None),
        ("select * from rota.act_on_jobs('retry', '{\"queue\": \"it''s\"}');",
         "/all/retry?queue=it%27s"),
        ("select * from rota.unknown_effects order by 1;", "/waiting#effects"),
        ("select rota.act_on_jobs('retry', '{\"queue\": \"q\"}'); select rota.tick();", None),
        ("select pg_terminate_backend(5);", None),
        ("select rota.retry_job(d.id) from (select 1) as d;", None),
        ("select rota.retry_job(17); select rota.retry_job(18);", None),
        ("select rota.retry_job(x => 17);", None),
        (None, None),
    ],
)  # fmt: skip
def test_a_remedy_becomes_an_act_only_if_it_is_one(
    remedy: str | None, address: str | None
) -> None:
    assert address_of(remedy) == address


def test_a_remedy_for_many_jobs_is_done_with_a_button(
    http: httpx.Client, db_of_page: Db
) -> None:
    """The statement that the database itself writes, with all that it may have to quote."""
    ids = [enqueue(db_of_page, "doctored", payload='{"n": 1}') for _ in range(2)]
    error = 'it\'s \\ "bad" {x} $do$ é'
    statement = db_of_page.execute(
        "select rota._retry_all(%s, '{}', 2, true)",
        [
            json.dumps(
                {
                    "queue": "acts", "job_type": "doctored", "status": "dead",
                    "is_discarded": False, "error_type": "E", "error": error,
                    "newer_than": "1 hour",
                },
                ensure_ascii=False,
            )
        ],
    ).fetchone()  # fmt: skip
    assert statement is not None
    assert address_of(statement[0]) is None  # a text in a text is not taken apart
    plain = db_of_page.execute(
        "select rota._retry_all(%s, '{\"force\": true}', 2, true)",
        [
            json.dumps(
                {"worker": "it's \\ é", "status": "running", "error": "rota.E"},
                ensure_ascii=False,
            )
        ],
    ).fetchone()
    assert plain is not None
    told = parse_qsl(str(address_of(plain[0])).partition("?")[2])
    assert sorted(told) == [
        ("group", "rota.E"), ("status", "running"), ("to.force", "true"),
        ("worker", "it's \\ é"),
    ]  # fmt: skip
    db_of_page.execute(
        "select rota.fail_job(c.job_id, c.lease_token, 'order 1 is odd', error_type => 'E',"
        " fatal => true) from rota.claim_jobs('w', '{acts}', job_types => '{doctored}',"
        " max_jobs => 2) as c"
    )
    remedies = [
        html.unescape(href)
        for href in re.findall(r'href="(/all/retry[^"]*)"', http.get("/").text)
        if "doctored" in href
    ]
    assert len(remedies) == 1
    assert "discarded=no" in remedies[0]
    assert "Done: 2 changed" in act(http, remedies[0]).text
    assert [status_of(db_of_page, job_id)[0] for job_id in ids] == ["queued", "queued"]


def test_cancelled_jobs_are_found_by_the_reason(http: httpx.Client, db_of_page: Db) -> None:
    reasons = ("ordered twice", "ordered once")
    ids = [enqueue(db_of_page, "found_cancelled") for _ in reasons]
    for job_id, reason in zip(ids, reasons, strict=True):
        db_of_page.execute("select rota.cancel_job(%s, %s)", [job_id, reason])

    page = http.get("/jobs", params={"q": 'reason:"ordered twice"'}, follow_redirects=True).text

    assert [f">{job_id}</a>" in page for job_id in ids] == [True, False]


def test_discarded_jobs_are_found_by_that(http: httpx.Client, db_of_page: Db) -> None:
    ids = [enqueue(db_of_page, "found_discarded") for _ in range(2)]
    db_of_page.execute(
        "select rota.fail_job(c.job_id, c.lease_token, 'e', fatal => true)"
        " from rota.claim_jobs('w', '{acts}', job_types => '{found_discarded}',"
        " max_jobs => 2) as c"
    )
    act(http, f"/all/discard?id={ids[0]}")
    for told, found in (("yes", ids[0]), ("no", ids[1])):
        page = http.get(f"/jobs?type=found_discarded&discarded={told}").text
        assert re.findall(r'<th scope="row"><a href="/jobs/(\d+)"', page) == [str(found)]
    assert ">1 job<" in http.get("/all/retry?type=found_discarded&discarded=no").text
    for name in ("discarded", "due"):
        assert "Write yes or no" in http.get(f"/jobs?{name}=perhaps").text


def test_the_audit_is_narrowed_and_tells_what_has_changed(
    make_page: Callable[..., Any], http: httpx.Client, db_of_page: Db
) -> None:
    db_of_page.execute(
        "select set_config('rota.actor', 'bea', false); select rota.schedule_job("
        "'audited', '0 2 * * *', 'clean', queue => 'audited',"
        ' payload => \'{"password": "hunter2"}\');'
        " select rota.schedule_job('audited', '0 3 * * *', 'clean', queue => 'audited',"
        ' payload => \'{"password": "hunter3"}\')'
    )
    page = http.get("/audit?who=bea&queue=audited&act=schedule").text
    assert page.count('<th scope="row">') == 2
    newest = page.split('<th scope="row">')[1]
    changes = re.findall(r'<div><span class="quiet">(\w+)</span> (.*?)</div>', newest)
    assert changes[0] == (
        "payload",
        "{&#34;password&#34;: ••••••} → {&#34;password&#34;: ••••••}",
    )
    assert ("schedule", "0 2 * * * → 0 3 * * *") in changes
    assert [name for name, _ in changes] == ["payload", "schedule"]
    assert "<summary>All of it</summary>" in newest
    assert "hunter" not in page
    assert "No acts yet" in http.get("/audit?who=bea&act=pause").text
    with (
        serving(make_page(payloads="hide")) as address,
        httpx.Client(base_url=address) as hiding,
    ):
        page = hiding.get("/audit?who=bea").text
        assert "0 2 * * * → 0 3 * * *" in page
        assert "password" not in page


@pytest.mark.parametrize(("jobs", "told"), [(3, "3"), (23, "the first 20 of 23")])
def test_a_link_from_the_audit_says_how_many_jobs_it_leads_to(
    http: httpx.Client, db_of_page: Db, jobs: int, told: str
) -> None:
    for _ in range(jobs):
        enqueue(db_of_page, f"linked_{jobs}", delay="1 day")
    db_of_page.execute(
        "select rota.act_on_jobs('set_priority', jsonb_build_object('job_type', %s::text),"
        " '{\"priority\": 9}')",
        [f"linked_{jobs}"],
    )
    newest = http.get("/audit?act=set_priority").text.split('<th scope="row">')[1]
    (link,) = re.findall(rf'<a href="(/jobs\?id=[^"]*)">{told}</a>', newest)
    page = http.get(html.unescape(link)).text
    assert page.count('<th scope="row">') == min(jobs, 20)


def test_acts_of_a_whole_screen_have_their_buttons(http: httpx.Client, db_of_page: Db) -> None:
    job_id = enqueue(db_of_page, "buttons", delay="1 day")
    db_of_page.execute(
        "select rota.set_limit(job_type => 'buttons', max_starts => 7, per => '1 minute')"
    )
    overview = http.get("/").text
    assert 'href="/act/pause_all?"' in overview
    assert 'href="/act/tick?"' in overview
    assert 'href="/act/set_limit?"' in http.get("/waiting").text
    assert 'href="/act/pause_type?job_type=buttons"' in http.get(f"/jobs/{job_id}").text
    assert 'href="/act/pause_type?job_type=buttons"' in http.get("/jobs?type=buttons").text
    (edit,) = re.findall(
        r'href="(/act/set_limit\?job_type=buttons[^"]*)"', http.get("/waiting").text
    )
    form = fields_of(http.get(html.unescape(edit)).text)
    assert (form["max_starts"], form["per"]) == ("7", "00:01:00")
    assert not form.get("burst")  # one that nobody has set goes with the rate


@pytest.mark.parametrize(
    "query",
    [
        {"error": "HAS no currency"},
        {"group": "order N has no currency '...'"},
        {"error_type": "BadCurrency"},
        {"key": "invoice:7"},
        {"key": "warehouse:3"},
        {"pipeline": "order", "stage": "pack"},
        {"payload": ["customer.id=7", f"amount={BIG}"]},
        {"header": ["tenant=acme"]},
        {"newer": "1 h", "type": "send_mail"},
        {"worker": "host-1:4711"},
        {"discarded": "no", "status": "dead"},
        {"due": "no", "status": "failed"},
        {"due": "yes", "status": "dead"},
    ],
    ids=str,
)
def test_what_the_list_finds_is_what_is_acted_on(
    http: httpx.Client, db_of_page: Db, scene: Scene, query: dict[str, Any]
) -> None:
    """No filter of the list is one that an act on all that match does not know."""
    every = ("queued", "failed", "blocked", "dead", "succeeded", "cancelled")
    listed = http.get("/jobs", params={"status": every, "size": "200", **query}).text
    ids = {int(found) for found in re.findall(r'name="id" value="(\d+)"', listed)}
    (address,) = re.findall(r'href="(/all/retry\?[^"]*)"', listed)
    page = html.unescape(http.get(html.unescape(address)).text)

    (asked,) = re.findall(r"filter => (E?'(?:[^']|'')*')", page)
    matched = db_of_page.execute(
        f"select array_agg((s ->> 'job_id')::bigint) from rota.act_on_jobs('retry', {asked},"
        " dry_run => true) as a, jsonb_array_elements(a.samples) as s"
    ).fetchone()
    assert ids
    assert matched is not None
    assert matched[0]
    assert ids >= set(matched[0])
    assert re.search(rf'id="count"[^>]*><b>{len(ids)} job', page)


def test_undo_is_of_the_own_acts_where_others_act_at_the_same_time(
    http: httpx.Client, web_url: str, db_of_page: Db
) -> None:
    """Two who act under one name, or none, at once: each takes back what he has done."""
    mine, theirs = enqueue(db_of_page), enqueue(db_of_page)
    form = http.get(f"/act/cancel_job?job_id={mine}").text
    given = dict(re.findall(r'<input type="hidden" name="([\w.]+)" value="([^"]*)"', form))
    with (
        ThreadPoolExecutor(1) as pool,
        psycopg.connect(web_url) as holder,
    ):
        holder.execute("select from rota.jobs where id = %s for update", [mine])
        answer = pool.submit(http.post, "/act/cancel_job", data=given, follow_redirects=True)
        wait_until(
            lambda: db_of_page.execute("select 1 from pg_locks where not granted").fetchone()
        )
        db_of_page.execute("select rota.cancel_job(%s)", [theirs])
        holder.rollback()
    undo = re.findall(r'href="(/undo[^"]*)"', answer.result().text)
    assert len(undo) == 1
    assert undo[0].count(",") == 0
