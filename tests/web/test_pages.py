"""What the screens say, without a browser."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urljoin

import httpx
import psycopg
import pytest
from psycopg import sql

import rota.web
from rota.__main__ import main
from rota.client.listing import FEW, listed
from rota.web import queries
from rota.web.database import NOTHING
from rota.web.filters import BadFilterError, Filter, age, contained
from rota.web.plots import TIMES, ended, times
from rota.web.show import MASKED_KEYS, Json
from rota.web.site import Answer, Site
from support.odd_rows import MOMENTS, add_odd_and_good
from support.waiting import wait_until
from web.conftest import LOGIN, OBSERVER, OPERATOR, serving
from web.sample_jobs import BIG, HOSTILE, Scene

MANY_DIGITS = "9" * 5000
SCREENS = (
    "/",
    "/jobs",
    "/errors",
    "/schedules",
    "/schedules/weekly",
    "/workers",
    "/waiting",
    "/audit",
)
WRITTEN = "select pg_current_wal_insert_lsn(), pg_snapshot_xmax(pg_current_snapshot())"
TEMPLATES = Path(rota.web.__file__).parent / "templates"


def told(http: httpx.Client, path: str, status: int = 200) -> str:
    """Return the page as text, with what it has of the scene."""
    answer = http.get(path, follow_redirects=True)
    assert answer.status_code == status, answer.text
    return answer.text


class Markup(HTMLParser):
    """Refuses what a text of somebody else could bring into a page."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at a tag as a browser does."""
        assert tag not in ("img", "iframe", "style", "object", "base")
        names = [name for name, _ in attrs]
        assert tag != "script" or "src" in names
        assert not [name for name in names if name.startswith("on") or name == "style"], attrs
        assert len(names) == len(set(names)), attrs


def check_markup(text: str) -> None:
    """See that a page has only what its templates have."""
    parser = Markup()
    parser.feed(text)
    parser.close()


@pytest.mark.parametrize("path", SCREENS)
def test_a_screen_answers_and_carries_what_keeps_scripts_out(
    http: httpx.Client, path: str
) -> None:
    answer = http.get(path)

    assert answer.status_code == 200
    rule = answer.headers["content-security-policy"]
    assert "default-src 'none'" in rule
    assert "unsafe" not in rule
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    check_markup(answer.text)


def test_a_job_that_has_moved_is_said_to_be_elsewhere(
    http: httpx.Client, web_url: str, scene: Scene
) -> None:
    with psycopg.connect(web_url, autocommit=True) as db:
        db.execute("insert into rota.moved_jobs values (77, 1, 6, 77)")
        page = told(http, "/jobs/77", 404)
        db.execute("delete from rota.moved_jobs")

    assert "job 77 is in database 6 now, as job 77" in page
    assert "There is no job 78" in told(http, "/jobs/78", 404)


def test_hostile_texts_are_escaped_everywhere(http: httpx.Client, scene: Scene) -> None:
    paths = [*SCREENS, *(f"/jobs/{job_id}" for job_id in scene.jobs.values())]
    paths += [f"/jobs?q={HOSTILE}", "/jobs?queue=" + HOSTILE, "/jobs?col=payload." + HOSTILE]
    for path in paths:
        answer = http.get(path, follow_redirects=True)

        check_markup(answer.text)


def test_the_first_thing_said_is_the_verdict_of_the_doctor(http: httpx.Client) -> None:
    page = told(http, "/")

    assert page.index("queue reports was paused") < page.index("<h2>Queues</h2>")
    assert "select rota.resume_queue(&#39;reports&#39;);" in page


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("status=dead&worker=host-1:4711", {"dead", "dead2", "hostile", "head", "sender"}),
        ("status=dead&status=failed&queue=mail", {"dead", "dead2", "failed"}),
        ("type=send_mail", {"failed", "queued"}),
        ("key=invoice:7", {"done"}),
        ("error=no+currency", {"dead", "dead2"}),
        ("error=no%25currency", set()),
        ("error_type=TimeoutError", {"failed"}),
        ("group=order+N+has+no+currency+%27...%27", {"dead", "dead2"}),
        ("payload=customer.id%3D7&status=succeeded", {"done"}),
        ("payload=customer.id%3D%227%22", set()),
        (f"payload=amount%3D{BIG}&status=failed", {"failed"}),
        ("header=tenant%3Dacme", {"queued"}),
        ("worker=host-1:4711&status=running", {"running", "shared"}),
        ("older=1+h", set()),
        ("newer=1+h&status=blocked", {"child", "behind"}),
    ],
)
def test_jobs_are_found_by_what_the_address_says(
    http: httpx.Client, scene: Scene, asked: str, found: set[str]
) -> None:
    page = told(http, f"/jobs?{asked}")

    ids = {int(job_id) for job_id in re.findall(r'<th scope="row"><a href="/jobs/(\d+)"', page)}
    assert ids == {scene.jobs[name] for name in found}


def test_the_list_tells_how_many_there_are_and_what_can_be_asked_for(
    http: httpx.Client, scene: Scene
) -> None:
    page = told(http, "/jobs?queue=hostile")

    assert re.search(r">dead <b>3</b></a>", page)
    assert re.search(r">blocked <b>1</b></a>", page)
    assert ">dead</a>" in told(http, "/jobs?queue=hostile&type=stock")
    assert '<option value="send_mail">' in page.split('<datalist id="known-type">')[1]
    assert '<option value="mail">' in page.split('<datalist id="known-queue">')[1]


def test_the_list_tells_why_jobs_were_cancelled(http: httpx.Client, db_of_page: Any) -> None:
    db_of_page.execute("select rota.enqueue('why', queue => 'why')")
    db_of_page.execute(
        "select rota.fail_job(c.job_id, c.lease_token, 'disk full', retry_in => '1 hour')"
        " from rota.claim_jobs('w', queues => array['why']) as c"
    )
    assert "disk full" in told(http, "/jobs?queue=why")
    db_of_page.execute(
        "select rota.cancel_job(j.id, 'ordered <twice>') from rota.jobs as j"
        " where j.queue = 'why'"
    )

    page = told(http, "/jobs?queue=why")

    assert "ordered &lt;twice&gt;" in page
    assert "disk full" not in page


def test_numbers_lead_to_as_many_jobs(
    make_page: Callable[..., Any], scene: Scene, db_of_page: Any
) -> None:
    """A job that is due to be tried again is ready, and failed; a discarded one is dead."""
    db_of_page.execute(
        "select rota.enqueue('numbers', queue => 'numbers', delay => '1 day')"
        " from generate_series(1, 2)"
    )
    db_of_page.execute(
        "select rota.enqueue('numbers', queue => 'numbers', max_attempts => m)"
        " from unnest(array[5, 1, 1]) as m"
    )
    db_of_page.execute(
        "select rota.fail_job(c.job_id, c.lease_token, 'x', retry_in => '0')"
        " from rota.claim_jobs('w', queues => array['numbers'], max_jobs => 3) as c"
    )
    db_of_page.execute(
        "select rota.enqueue('numbers', queue => 'numbers') from generate_series(1, 4)"
    )
    db_of_page.execute(
        "select rota.fail_job(c.job_id, c.lease_token, 'x', retry_in => '1 day')"
        " from rota.claim_jobs('w', queues => array['numbers'], max_jobs => 4) as c"
        " where c.attempt = 1"
    )
    (dead,) = db_of_page.execute(
        "select min(id) from rota.dead_jobs where queue = 'numbers'"
    ).fetchone()
    db_of_page.execute(
        "select rota.act_on_jobs('discard', jsonb_build_object('ids', array[%s::bigint]))",
        [dead],
    )

    with serving(make_page()) as address, httpx.Client(base_url=address) as http:
        page = told(http, "/jobs?queue=numbers")
        counts = dict(re.findall(r'">(\w+) <b>(\d+)</b></a>', page))
        assert counts == {"queued": "3", "running": "1", "failed": "3", "dead": "1"}
        overview = told(http, "/")
        (row,) = re.findall(r">numbers</a>.*?</tr>", overview, flags=re.S)
        links = re.findall(r'<a href="(/jobs\?[^"]*)">(\d+)</a>', row)
        assert [number for _, number in links] == ["1", "1", "2", "3", "1"]
        cards = re.findall(
            r'<a href="(/jobs\?status[^"]*)"><span>(?:Ready|Running|Retrying|Blocked)</span>'
            r"<strong>(\d+)</strong>",
            overview,
        )
        assert len(cards) == 4
        for address, number in (*links, *cards):
            listed = told(http, f"{unescape(address)}&size=200")
            assert listed.count('<th scope="row">') == int(number), address
        link = links[-1][0]
        (tab,) = re.findall(r'href="([^"]*)">dead <b>1</b>', page)
        for address in (link, tab):
            listed = told(http, unescape(address))
            assert listed.count('<th scope="row">') == 1
            assert ">dead <b>1</b></a>" in listed
        both = told(http, "/jobs?queue=numbers&status=dead")
        assert both.count('<th scope="row">') == 2
        assert 'aria-current="true">dead</a>' in both
        (off,) = re.findall(r'href="([^"]*)" aria-current="true">dead', listed)
        assert off == "/jobs?queue=numbers"


def test_chosen_columns_stay_while_filters_change(http: httpx.Client) -> None:
    view = "col=key&amp;col=payload.n"

    listed = http.get("/jobs?status=dead&before=999999&col=key&col=payload.n").text

    links = re.findall(r'href="(/jobs\?[^"]*)"', listed)
    assert len(links) >= 7 + 1 + 1 + 1  # each status, the filter, all filters, the newest
    assert [link for link in links if view not in link] == []


def test_errors_say_that_there_are_more(db: psycopg.Connection[Any], dsn: str) -> None:
    add = """
        insert into rota.job_errors (job_id, lease_token, attempt, queue, job_type, worker,
            started_at, failed_at, message)
        select n, n, 1, 'q', 'x' || n, 'w', now(), now(), 'boom'
        from generate_series(%s::integer, %s) as n
    """
    with serving(rota.web.app(dsn)) as address, httpx.Client(base_url=address) as http:
        db.execute(add, [1, 200])
        assert "there are more" not in told(http, "/errors")
        db.execute(add, [201, 201])
        assert "The first 200: there are more." in told(http, "/errors")


def test_the_order_of_errors_stays_while_filters_change(http: httpx.Client) -> None:
    told = http.get("/errors?queue=mail&type=charge&since=7d&order=jobs").text

    without = [link for link in re.findall(r'href="/errors\?([^"]*)"', told)
               if not link.endswith("&amp;order=jobs")]  # fmt: skip
    assert without == ["queue=mail&amp;type=charge&amp;since=7d"]  # the other order


def test_what_counts_no_more_than_some_says_so(db: psycopg.Connection[Any], dsn: str) -> None:
    """Neither all that died in a day nor all that runs is read for a number."""
    db.execute("""
        insert into rota.finished_jobs (id, queue, job_type, payload, priority, max_attempts,
            status, run_at, attempts, lease_token, created_at, updated_at, finished_at)
        select n, 'q', 'x', '{}', 0, 1, 'dead', now(), 1, n, now(), now(), now()
        from generate_series(1, 10001) as n
    """)
    db.execute("""
        insert into rota.jobs (id, queue, job_type, payload, priority, max_attempts, status,
            run_at, attempts, lease_token, limit_key, locked_by, locked_until, started_at)
        overriding system value
        select n, 'q', 'x', '{}', 0, 1, 'running', now(), 1, n, 'k', 'w',
            now() + interval '1 hour', now()
        from generate_series(20001, 21001) as n
    """)

    with serving(rota.web.app(dsn)) as address, httpx.Client(base_url=address) as http:
        assert "<strong>≥ 10\N{NARROW NO-BREAK SPACE}000</strong>" in told(http, "/")
        assert "Only 1000 of the running jobs" in told(http, "/waiting")
        db.execute("delete from rota.jobs where id < 20101")
        assert "Only 1000" not in told(http, "/waiting")


def test_what_is_typed_becomes_an_address(http: httpx.Client, scene: Scene) -> None:
    typed = 'dead queue:mail "no currency" payload.customer.id:7'

    answer = http.get("/jobs", params={"q": typed})

    assert answer.status_code == 303
    assert answer.headers["location"] == (
        "/jobs?status=dead&queue=mail&error=no+currency&payload=customer.id%3D7"
    )
    assert http.get("/jobs", params={"q": f"{scene.jobs['dead']}"}).headers["location"] == (
        f"/jobs?id={scene.jobs['dead']}"
    )


@pytest.mark.parametrize(
    ("typed", "address"),
    [
        ("send_mail", "type=send_mail"),
        ("#17 dead", "id=17&status=dead"),
        ("timed out", "error=timed+out"),
        ("dead queue:mail timed out", "status=dead&queue=mail&error=timed+out"),
        ("order 21 is dead", "error=order+21+is+dead"),
        ('relation "orders" does not exist', "error=relation+%22orders%22+does+not+exist"),
        ("""'relation "orders"'""", "error=relation+%22orders%22"),
        ("""key:'a "b"' key:don't""", "key=don%27t"),
        ("""dead "" key:"" key:''""", "status=dead"),
    ],
)
def test_words_without_a_name_are_text_of_an_error(
    http: httpx.Client, typed: str, address: str
) -> None:
    answer = http.get("/jobs", params={"q": typed})

    assert answer.headers["location"] == f"/jobs?{address}"


@pytest.mark.parametrize(
    "asked",
    [
        "status=sleeping",
        "id=x",
        "id=99999999999999999999",
        "older=soon",
        "payload=%7Bx",
        "payload=x",
    ],
)
def test_a_filter_that_means_nothing_is_said_so(http: httpx.Client, asked: str) -> None:
    page = told(http, f"/jobs?{asked}")

    assert 'role="alert"' in page
    assert '<th scope="row"' not in page


def test_the_list_goes_on_where_it_ended(http: httpx.Client, db_of_page: Any) -> None:
    db_of_page.execute(
        "select rota.enqueue_many((select jsonb_agg(jsonb_build_object('job_type', 'page',"
        " 'queue', 'pages', 'delay', '1 day')) from generate_series(1, 60)))"
    )
    first = told(http, "/jobs?type=page")
    (following,) = re.findall(r'rel="next" href="([^"]+)"', first)
    second = told(http, following.replace("&amp;", "&"))

    ids = [re.findall(r'<th scope="row"><a href="/jobs/(\d+)"', p) for p in (first, second)]
    assert [len(found) for found in ids] == [50, 10]
    assert not set(ids[0]) & set(ids[1])


def test_what_was_chosen_for_a_list_stays(http: httpx.Client, db_of_page: Any) -> None:
    """On the next page, and in the form of the filters, also what that has no field for."""
    db_of_page.execute(
        "select rota.enqueue('stays', queue => 'stays', delay => '1 day', priority => 7)"
        " from generate_series(1, 60)"
    )
    chosen = [("col", "priority"), ("col", "payload.a")]
    chosen += [("type", "stays"), ("header", "a=1"), ("header", "b=2")]
    kept = [("id", "5"), ("id", "6"), ("discarded", "no"), ("header", "b=2")]

    first = told(http, "/jobs?type=stays&col=priority&col=payload.a")
    (following,) = re.findall(r'rel="next" href="([^"]+)"', first)
    assert {("col", "priority"), ("col", "payload.a")} <= set(parse_qsl(unescape(following)))
    typed = http.get("/jobs?q=dead&col=priority").headers["location"]
    assert ("col", "priority") in parse_qsl(typed)
    form = told(http, f"/jobs?{urlencode([*chosen, *kept])}").split('class="grid">')[1]
    hidden = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', form)
    assert sorted(hidden) == sorted(kept)


def test_a_search_looks_as_far_where_ids_are_far_apart(
    http: httpx.Client, db_of_page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    ask = Site.ask

    async def noting(site: Site, query: Any, values: Any = NOTHING) -> Answer:
        looked.extend([values["from"]] if "from" in values else [])
        return await ask(site, query, values)

    monkeypatch.setattr(Site, "ask", noting)
    monkeypatch.setattr("rota.web.pages.FIRST_STEP", 40)
    monkeypatch.setattr("rota.web.pages.FIRST_TIME", 60.0)
    enqueue = "select rota.enqueue(%s, queue => 'apart', delay => '1 day')"
    db_of_page.execute("alter sequence rota.jobs_id_seq increment by 1024")
    try:
        first = db_of_page.execute(enqueue, ("first_apart",)).fetchone()[0]
        for _ in range(30):
            db_of_page.execute(enqueue, ("apart",))
        page = told(http, "/jobs?type=first_apart")
    finally:
        if "ROTA_TEST_DATABASE_NUMBER" not in os.environ:
            db_of_page.execute("alter sequence rota.jobs_id_seq increment by 1")

    assert f'href="/jobs/{first}"' in page
    assert looked[0] <= first


def test_a_list_that_is_cut_says_so(http: httpx.Client, db_of_page: Any) -> None:
    names = "generate_series(1, 100) as i"
    db_of_page.execute(
        "select rota.schedule_job('cut/' || i, '@yearly', 'cut', queue => 'cut') from " + names
    )
    try:
        page = told(http, "/schedules")
        assert page.count('<th scope="row"') == 100
        assert "The first 100: there are more." in page
        assert "there are more" not in told(http, "/schedules?name=cut/99")
    finally:
        db_of_page.execute(f"select rota.unschedule_job('cut/' || i) from {names}")
    assert "there are more" not in told(http, "/schedules")


def test_numbers_of_a_database_are_those_of_all_its_queues(
    make_page: Callable[..., Any], db_of_page: Any
) -> None:
    ready = "select sum(ready)::bigint from rota.queue_stats"
    db_of_page.execute(
        "select rota.enqueue('cut', queue => 'cut/' || i) from generate_series(1, 210) as i"
    )
    try:
        with serving(make_page()) as address:
            page = httpx.get(address).text
        (number,) = db_of_page.execute(ready).fetchone()
    finally:
        db_of_page.execute("""
            select rota.act_on_jobs('cancel', '{"job_type": "cut"}');
            select rota.act_on_jobs('purge', '{"job_type": "cut"}');
            delete from rota.queues where queue like 'cut/%'
        """)

    assert number > 200
    assert f"<span>Ready</span><strong>{number}</strong>" in page
    assert "The first 200: there are more." in page


def test_the_number_of_workers_is_that_of_all(http: httpx.Client, db_of_page: Any) -> None:
    live = "select count(*) from rota.worker_health where is_live"
    each = "('many:' || i{}) from generate_series(1, 510) as i"
    db_of_page.execute("select rota.report_worker" + each.format(", 'h', i, '1', '{mail}'"))
    try:
        wait_until(lambda: "The first 500" in told(http, "/workers"), "the list to be cut")
        (number,) = db_of_page.execute(live).fetchone()
        assert f"Workers</span><strong>{number}</strong>" in told(http, "/")
    finally:
        db_of_page.execute("select rota.deregister_worker" + each.format(""))


def test_a_schedule_whose_text_is_none_hides_no_other(
    http: httpx.Client, db_of_page: Any
) -> None:
    db_of_page.execute("select rota.schedule_job('broken', '@yearly', 'cut')")
    try:
        db_of_page.execute(
            "update rota.job_definitions set schedule = 'nonsense', is_enabled = false,"
            " disabled_at = now(), last_error = 'no schedule', next_run_at = null"
            " where name = 'broken'"
        )
        page = told(http, "/schedules")
        assert "nonsense" in page
        assert "at 02:30 on Sunday, Europe/Berlin" in page
        assert "no schedule" in told(http, "/schedules/broken")
        # By hand, and no tick has seen it yet.
        db_of_page.execute("select rota.schedule_job('broken', '@yearly', 'cut')")
        db_of_page.execute(
            "update rota.job_definitions set schedule = 'nonsense' where name = 'broken'"
        )
        for path in ("/schedules", "/schedules?name=broken", "/schedules/broken"):
            assert "schedule &#39;nonsense&#39;: " in told(http, path)
        assert "at 02:30 on Sunday, Europe/Berlin" in told(http, "/schedules")
    finally:
        db_of_page.execute("select rota.unschedule_job('broken')")


def test_numbers_of_any_size_are_shown_as_they_are(http: httpx.Client, scene: Scene) -> None:
    page = told(http, f"/jobs/{scene.jobs['done']}")

    assert f'<span class="n">{BIG}</span>' in page
    assert f'<span class="n">{BIG}.5</span>' in page


def test_what_is_masked_is_not_shown_and_cannot_be_guessed(
    http: httpx.Client, scene: Scene
) -> None:
    for path in (f"/jobs/{scene.jobs['done']}", "/jobs?col=payload.password&type=send_invoice"):
        assert "hunter2" not in told(http, path)
    page = told(http, "/jobs?payload=password%3Dhunter2")
    assert "masked" in page
    assert '<th scope="row"' not in page


def test_what_is_masked_is_so_however_its_key_is_written() -> None:
    shown = Json("mask", MASKED_KEYS)

    for key in ("api_key", "X-Api-Key", "apiKey", "creditCard", "private key", "CARD-NUMBER"):
        assert shown.is_masked(key), key
    assert not any(map(shown.is_masked, ("class_name", "api", "key", "card_type")))


@pytest.mark.parametrize(
    "asked",
    [
        'payload={"password": "hunter2"}',
        'payload={"pass\\u0077ord": "hunter2"}',
        'payload={"a": [{"PassWord": "hunter2"}]}',
        'payload={"password": "x", "password": "hunter2"}',
        'payload=customer={"secret": 1}',
        "payload=customer.api_key=x",
        'header={"authorization": "x"}',
    ],
)
@pytest.mark.parametrize("path", ["/jobs", "/all/retry"])
def test_what_is_masked_cannot_be_searched_for(
    http: httpx.Client, path: str, asked: str
) -> None:
    name, _, value = asked.partition("=")
    page = http.get(path, params={name: value, "status": "dead"}).text

    assert "The value of this key is masked" in page
    assert '<th scope="row"' not in page
    assert 'method="post"' not in page


def test_hidden_payloads_are_nowhere(make_page: Callable[..., Any], scene: Scene) -> None:
    page = make_page(payloads="hide", allow_acts=True)
    with serving(page) as address, httpx.Client(base_url=address) as http:
        assert str(BIG) not in told(http, f"/jobs/{scene.jobs['done']}")
        assert str(BIG) not in told(http, "/jobs?col=payload.amount")
        for path in ("/jobs", "/all/retry"):
            page = told(http, f"{path}?payload=customer.id%3D7")
            assert "Payloads are hidden" in page
            assert '<th scope="row"' not in page


def test_a_job_tells_its_story(http: httpx.Client, scene: Scene) -> None:
    page = told(http, f"/jobs/{scene.jobs['dead']}")

    story = ["enqueued", "attempt 1 failed on host-1:4711", "Traceback", "dead after attempt 1"]
    places = [page.index(text) for text in story]
    assert places == sorted(places)
    assert f"select rota.retry_job({scene.jobs['dead']});" in page
    assert str(scene.jobs["parent"]) in told(http, f"/jobs/{scene.jobs['child']}")


def test_each_error_is_one_row(http: httpx.Client) -> None:
    page = told(http, "/errors")

    assert page.count("order N has no currency") == 1
    assert told(http, "/errors?since=1h&type=send_mail").count("BadCurrency") == 0


def test_an_error_in_many_queues_is_one_row(http: httpx.Client, db_of_page: Any) -> None:
    for queue in ("of-a", "of-b"):
        db_of_page.execute("select rota.enqueue('tenants', queue => %s)", [queue])
        db_of_page.execute(
            "select rota.fail_job(c.job_id, c.lease_token, 'boom', fatal => true)"
            " from rota.claim_jobs('w', array[%s]) as c",
            [queue],
        )

    for of_queue, jobs in (("", "2 jobs"), ("&queue=of-a", "1 job")):
        page = told(http, f"/errors?type=tenants{of_queue}")
        assert ("2 queues" in page) == (not of_queue)
        (retry,) = re.findall(r'href="(/all/retry[^"]*)"', page)
        assert f"<b>{jobs}</b>" in told(http, unescape(retry))


def test_a_job_that_failed_with_two_texts_of_one_error_is_one_job(
    http: httpx.Client, db_of_page: Any
) -> None:
    job_id = db_of_page.execute(
        "select rota.enqueue('twice', queue => 'twice', max_attempts => 5)"
    ).fetchone()[0]
    for number in (1, 2, 3):
        db_of_page.execute(
            "select rota.fail_job(c.job_id, c.lease_token, %s)"
            " from rota.claim_jobs('w', '{twice}') as c",
            [f"order {number} is odd"],
        )
        db_of_page.execute("select rota.retry_job(%s)", [job_id])
    page = told(http, "/errors?type=twice")

    assert page.count("order N is odd") == 1
    assert '<td class="num" data-name="Failures">3</td>' in page
    assert '<td class="num" data-name="Jobs">1</td>' in page
    assert f'<a href="/jobs/{job_id}">' in page


def test_a_database_that_counts_bytes_has_no_half_letters(
    of_bytes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with psycopg.connect(of_bytes, autocommit=True, client_encoding="utf8") as db:
        for text in ("\u00e9" * 3000, "x" + "\u00e9" * 3000):
            db.execute(
                "select rota.enqueue('halves', %s::jsonb, ordering_key => %s, queue => 'h')",
                [json.dumps({"a": text}, ensure_ascii=False), text[:2]],
            )
            db.execute(
                "select rota.fail_job(c.job_id, c.lease_token, %s, fatal => true)"
                " from rota.claim_jobs('w', '{h}') as c",
                [text],
            )
    page = rota.web.app(of_bytes, observer_role=None, operator_role=None)

    with serving(page) as address, httpx.Client(base_url=address) as http:
        for path in ("/jobs?type=halves&col=payload.a", "/errors", "/waiting"):
            shown = told(http, path)
            assert 'role="alert"' not in shown
            assert "\u00e9\u00e9" in shown
    for more in ([], ["--json"]):
        assert main(["errors", *more, "-d", of_bytes]) == 0
    assert capsys.readouterr().err == ""


def test_a_schedule_is_told_in_words_with_its_next_runs(http: httpx.Client) -> None:
    assert "at 02:30 on Sunday, Europe/Berlin" in told(http, "/schedules")
    page = told(http, "/schedules/changes")
    assert page.count(":00</th>") == 5
    assert "moved: its time does not exist that day" in page


@pytest.mark.parametrize("name", ["shop/../day", "shop//day", "shop/.", "shop/day/"])
def test_a_link_to_a_schedule_leads_to_it_as_browsers_read_it(
    http: httpx.Client, db_of_page: Any, name: str
) -> None:
    for each in (name, "day", "shop/day"):
        db_of_page.execute("select rota.schedule_job(%s, '0 2 * * *', 'clean')", [each])
    try:
        links = re.findall(r'href="([^"]+)">([^<]+)</a>', http.get("/schedules?name=day").text)
        links += re.findall(
            r'href="([^"]+)">([^<]+)</a>', http.get("/schedules?name=shop/").text
        )
        (link,) = {link for link, told in links if told == name}
        read = urljoin("http://page/schedules", link)  # which leaves .. out, and nginx also //
        path, _, query = read.removeprefix("http://page").partition("?")
        page = http.get(re.sub("/+", "/", path), params=query)
    finally:
        for each in (name, "day", "shop/day"):
            db_of_page.execute("select rota.unschedule_job(%s)", [each])

    assert page.status_code == 200
    assert f"<h1>{name}</h1>" in page.text


def test_who_waits_behind_whom_is_told(http: httpx.Client, scene: Scene) -> None:
    page = told(http, "/waiting")

    assert re.search(r"warehouse:3</a></th><td[^>]*>1</td>", page)
    assert f'/jobs/{scene.jobs["sender"]}"' in page.split('id="effects"')[1]
    assert "queue mail" in page.split('id="limits"')[1]
    assert f'<a href="/jobs/{scene.jobs["parent"]}">' in page
    assert "key customer:7" in page


def test_who_waits_for_whom_is_drawn(http: httpx.Client, db_of_page: Any) -> None:
    def enqueue(parents: list[int]) -> int:
        query = "select rota.enqueue('drawn', queue => 'drawn', depends_on => %s)"
        return int(db_of_page.execute(query, [parents or None]).fetchone()[0])

    parents = [enqueue([]) for _ in range(8)]
    job = enqueue(parents)
    children = [enqueue([job]) for _ in range(2)]

    page = told(http, f"/jobs/{job}")

    picture = page[page.index('<svg class="jobs-graph"') :].partition("</svg>")[0]
    assert picture.count("<a href=") == 6 + 2
    assert picture.count("<path") == 6 + 2
    assert f'<a href="/jobs/{children[1]}"><title>#{children[1]} drawn' in picture
    assert all(f'<li><a href="/jobs/{parent}">' in page for parent in parents)
    assert "<summary>Waits for 8</summary>" in page
    many = told(http, f"/jobs/{enqueue([*parents, *(enqueue([]) for _ in range(52))])}")
    assert "<summary>Waits for ≥ 50</summary>" in many


@contextmanager
def without_autovacuum(db: Any) -> Iterator[None]:
    """What it writes is not the page's."""
    at_work = "select from pg_stat_activity where backend_type = 'autovacuum worker'"
    db.execute("alter system set autovacuum = off")
    db.execute("select pg_reload_conf()")
    try:
        wait_until(lambda: db.execute(at_work).rowcount == 0, "the end of autovacuum")
        yield
    finally:
        db.execute("alter system reset autovacuum")
        db.execute("select pg_reload_conf()")


def test_open_pages_write_nothing(
    make_page: Callable[..., Any], db_of_page: Any, scene: Scene
) -> None:
    """Neither a record of the log, as each row is, nor a transaction id."""
    screens = [*SCREENS, f"/jobs/{scene.jobs['dead']}", "/jobs?error=nowhere"]
    with (
        without_autovacuum(db_of_page),
        serving(make_page()) as address,
        httpx.Client(base_url=address) as http,
    ):
        for path in screens:  # what is read for the first time may be marked
            http.get(path)
        db_of_page.execute("checkpoint")
        with http.stream("GET", "/events") as events:
            lines = events.iter_lines()
            next(lines)
            before = db_of_page.execute(WRITTEN).fetchone()
            for path in screens:
                http.get(path, headers={"rota-live": "1"})
            assert db_of_page.execute(WRITTEN).fetchone() == before


def test_a_worker_that_takes_no_more_jobs_is_told(http: httpx.Client, db_of_page: Any) -> None:
    db_of_page.execute("select rota.report_worker('leaves', 'h', 1, '1', '{mail}', '{}')")
    try:
        assert "none: it is stopping" in told(http, "/workers")
    finally:
        db_of_page.execute("select rota.deregister_worker('leaves')")


def test_workers_are_told_with_what_they_hold(http: httpx.Client, scene: Scene) -> None:
    page = told(http, "/workers")

    assert page.index("host-1:4711") < page.index(f'<a href="/jobs/{scene.jobs["running"]}">')


def test_what_ended_is_plotted_with_what_each_bar_stands_for() -> None:
    now = datetime(2026, 3, 1, 12, 0, 30, tzinfo=UTC)
    row = {
        "starts_at": now.replace(second=0) - timedelta(minutes=5), "succeeded": 120,
        "failures": 3, "dead": 1, "wait_p50": timedelta(seconds=1), "run_p50": None,
        "wait_p95": timedelta(minutes=2), "run_p95": None,
    }  # fmt: skip
    too_old = {**row, "starts_at": now - timedelta(hours=2)}
    mark = {"started_at": now - timedelta(minutes=9), "workers": 4, "versions": "0.2.0"}

    plot = ended([too_old, row], "1h", now, [mark])
    total = {"wait_p50": timedelta(milliseconds=20), "wait_p95": timedelta(seconds=70)}
    waits = times([row], total, TIMES[0], "1h", now, HOSTILE, [])
    runs = times([row], {}, TIMES[1], "1h", now, "ran", [mark])

    assert plot.picture.count("11:55 UTC: 120 succeeded, 3 failed, 1 dead") == 1
    assert plot.picture.count("<rect") == 3
    assert "11:51 UTC: 4 workers started, 0.2.0" in plot.picture
    drawn = json.loads(plot.data)
    assert [values[54] for values in drawn["values"]] == [120, 3, 1]
    assert drawn["begin"] + 54 * drawn["step"] == row["starts_at"].timestamp()
    assert [len(values) for values in drawn["values"]] == [60, 60, 60]
    assert sum(value is None for value in drawn["values"][0]) == 59
    assert drawn["marks"] == [[mark["started_at"].timestamp(), "4 workers started, 0.2.0"]]
    assert plot.scale == ("200", "100", "0")
    assert plot.kinds[:3] == [("succeeded", "120"), ("failed", "3"), ("dead", "1")]
    assert plot.rows == [(row["starts_at"], ["120", "3", "1"])]
    assert "median 1 s, 95th percentile 2 min" in waits.picture
    assert [values[54] for values in json.loads(waits.data)["values"]] == [1, 120]
    assert waits.kinds == [("half", "20 ms"), ("most", "1 min 10 s")]
    assert runs.kinds == [("half", ""), ("most", ""), ("deploy", "")]
    assert waits.scale == ("2 min", "1 min", "0")
    assert "<script>" not in waits.picture
    assert "<rect" not in runs.picture
    assert not runs.rows


@pytest.mark.parametrize(
    "path", ["/jobs/0", "/jobs/999999", "/jobs/x", "/nowhere", "/schedules/nowhere"]
)
def test_what_is_not_there_is_said_so(http: httpx.Client, path: str) -> None:
    assert "Not found" in told(http, path, 404)


@pytest.mark.parametrize(
    "path",
    [
        f"/jobs/{MANY_DIGITS}",
        f"/jobs?before={MANY_DIGITS}",
        f"/audit?job={MANY_DIGITS}",
        f"/audit?before={MANY_DIGITS}",
        f"/undo?audit={MANY_DIGITS}",
    ],
    ids=lambda path: path[:14],
)
def test_a_number_of_thousands_of_digits_is_no_id(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == (404 if path.startswith("/jobs/") else 200)


def test_a_filter_of_very_many_values_is_a_small_page(http: httpx.Client) -> None:
    """No chip of one id has all other ids in its address."""
    asked = urlencode([("id", number) for number in range(9000, 10500)])

    page = told(http, f"/jobs?type=many&{asked}")

    assert "<span>Id</span> 1500 values" in page
    assert 'href="/jobs?type=many"' in page
    assert len(page) < 500_000


def test_a_payload_that_is_too_deep_hides_no_screen(
    http: httpx.Client, db_of_page: Any
) -> None:
    deep = '{"a":' * 700 + "1" + "}" * 700
    (job_id,) = db_of_page.execute(
        "select rota.enqueue('deep', %s::jsonb, run_at => rota.now() + interval '1 day')",
        [deep],
    ).fetchone()
    try:
        for path in (
            "/jobs?type=deep&col=payload.a",
            f"/jobs/{job_id}",
            f"/all/retry?id={job_id}",
        ):
            assert http.get(path).status_code == 200
    finally:
        db_of_page.execute("select rota.cancel_job(%s)", [job_id])
        db_of_page.execute(
            "select rota.act_on_jobs('purge', jsonb_build_object('ids', array[%s::bigint]))",
            [job_id],
        )


def test_deep_json_is_not_a_page_of_blanks() -> None:
    shown = Json("mask", ())
    text = '{"a": ' * 150 + f"[{', '.join('1' * 10_000)}]" + "}" * 150

    for told in (str(shown.pretty(text)), shown.editable(text) or ""):
        assert len(text) < len(told) < 1_000_000
        assert json.loads(unescape(re.sub("<[^>]*>", "", told))) == json.loads(text)


@pytest.mark.parametrize("path", ["/jobs/%00", "/schedules/a%00b", "/jobs?queue=%00", "/%00"])
def test_what_no_text_can_hold_is_not_found(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 404


def test_a_question_that_takes_too_long_is_stopped_and_said_so(
    make_page: Callable[..., Any], db_of_page: Any
) -> None:
    page = make_page(read_time=0.3)
    with serving(page) as address, httpx.Client(base_url=address, timeout=30) as http:
        http.get("/jobs")
        with db_of_page.transaction():
            db_of_page.execute("lock table rota.jobs in access exclusive mode")
            shown = told(http, "/jobs")
    assert "The server cancelled the query after 0.3 s" in shown


@pytest.mark.slow
def test_every_screen_answers_in_its_time_while_all_tables_are_locked(
    make_page: Callable[..., Any], db_of_page: Any, scene: Scene
) -> None:
    paths = [*SCREENS, f"/jobs/{scene.jobs['dead']}", "/jobs?error=x", "/audit?job=1"]
    paths += [f"/act/retry_job?job_id={scene.jobs['dead']}", "/act/schedule_job?name=weekly"]
    tables = db_of_page.execute(
        "select string_agg(c.oid::regclass::text, ', ') from pg_class as c"
        " where c.relnamespace = 'rota'::regnamespace and c.relkind in ('r', 'p')"
    ).fetchone()[0]
    page = make_page(read_time=1.0, allow_acts=True)
    with serving(page) as address, httpx.Client(base_url=address, timeout=30) as http:
        http.get("/jobs")
        with db_of_page.transaction():
            db_of_page.execute(f"lock table {tables} in access exclusive mode")
            for path in paths:
                began = time.monotonic()
                answer = http.get(path)
                took = time.monotonic() - began
                assert answer.status_code in (200, 503), (path, answer.text)
                assert "The server cancelled the query after 1 s" in answer.text, path
                assert took < 1.0 + 1.5, f"{path} took {took:.1f} s"


@pytest.mark.parametrize(
    ("kind", "name", "path", "false"),
    [
        ("function", "doctor()", "/", "checks are fine"),
        ("view", "ticker_health", "/", "<strong>never</strong>"),
        ("view", "worker_health", "/", "Workers</span><strong>0"),
        ("view", "dead_jobs", "/", "<strong></strong>"),
        ("table", "pauses", "/", None),
        ("table", "worker_starts", "/", None),
        ("table", "job_errors", "/errors", "No failed attempts"),
        ("table", "dependencies", "/jobs/{child}", None),
        ("table", "stage_runs", "/jobs/{child}", None),
        ("table", "audit_log", "/audit", "No acts yet"),
        ("table", "breakers", "/waiting", None),
        ("view", "running_jobs", "/workers", "Nothing runs"),
    ],
)
def test_what_is_missing_in_the_database_is_told_beside_the_rest(
    make_page: Callable[..., Any],
    db_of_page: Any,
    scene: Scene,
    kind: str,
    name: str,
    path: str,
    false: str | None,
) -> None:
    """The database is older than the page, and has not yet all that this asks for."""
    bare = name.partition("(")[0]
    with serving(make_page()) as address, httpx.Client(base_url=address) as http:
        db_of_page.execute(f"alter {kind} rota.{name} rename to away")
        try:
            shown = told(http, path.format(**scene.jobs))
        finally:
            away = name.replace(bare, "away")
            db_of_page.execute(f"alter {kind} rota.{away} rename to {bare}")
    problem = re.search(r'<p class="problem" role="alert">(.*?)</p>', shown)
    assert problem is not None
    assert f"rota.{bare}" in problem[1]
    assert "Bring the database up to date with: rota install" in problem[1]
    assert false is None or false not in shown


@pytest.mark.slow
def test_a_server_that_has_restarted_is_asked_by_new_connections(
    make_page: Callable[..., Any], db_of_page: Any, scene: Scene
) -> None:
    ended = (
        "select pg_terminate_backend(pid, 30000) from pg_stat_activity"
        " where application_name = 'rota web' and usename = %s"
    )
    with serving(make_page()) as address, httpx.Client(base_url=address) as http:
        for path in SCREENS:
            told(http, path)
            assert db_of_page.execute(ended, [LOGIN]).fetchall()
            told(http, path)


def test_a_lock_that_the_login_does_not_wait_for_is_told_beside_the_rest(
    make_page: Callable[..., Any], db_of_page: Any, scene: Scene
) -> None:
    db_of_page.execute(f"alter role {LOGIN} set lock_timeout = '1ms'")
    try:
        with (
            serving(make_page()) as address,
            httpx.Client(base_url=address) as http,
            db_of_page.transaction(),
        ):
            db_of_page.execute("lock table rota.breakers in access exclusive mode")
            shown = told(http, "/waiting")
    finally:
        db_of_page.execute(f"alter role {LOGIN} reset lock_timeout")
    assert "canceling statement due to lock timeout" in shown
    assert "Halted keys" in shown


@pytest.mark.slow
def test_pages_that_are_looked_at_again_show_what_is_new(
    make_page: Callable[..., Any], db_of_page: Any
) -> None:
    """While no page listened no change was noticed, so nothing that was told then is shared."""
    with serving(make_page()) as address, httpx.Client(base_url=address) as http:

        def rows() -> int:
            text = http.get("/jobs?type=hidden", headers={"rota-live": "1"}).text
            return text.count('<th scope="row">')

        def listen() -> None:
            with http.stream("GET", "/events") as events:
                for line in events.iter_lines():
                    if line.startswith("event: change"):
                        return

        listen()
        assert rows() == 0
        db_of_page.execute("select rota.enqueue('hidden', queue => 'h', delay => '1 day')")
        assert rows() == 1
        listen()
        db_of_page.execute("select rota.enqueue('hidden', queue => 'h', delay => '1 day')")
        assert rows() == 2


def test_a_page_without_the_role_of_an_observer_says_so(
    login_url: str, web_url: str, scene: Scene
) -> None:
    with serving(rota.web.app(web_url, observer_role="nowhere")) as address:
        assert "reads as postgres" in httpx.get(f"{address}/").text
    with serving(rota.web.app(web_url, observer_role=None)) as address:
        assert "reads as" not in httpx.get(f"{address}/").text


def test_the_page_runs_no_function_that_somebody_has_put_into_public(
    http: httpx.Client, web_url: str
) -> None:
    """Of two functions of one name that fits better which takes what it is given as it is."""
    with psycopg.connect(web_url, autocommit=True) as owner:
        owner.execute(
            "create function public.set_config(text, name, boolean) returns text"
            " language plpgsql as $$ begin raise exception 'run as %', session_user; end $$"
        )
        try:
            answer = http.get("/workers")
        finally:
            owner.execute("drop function public.set_config(text, name, boolean)")

    assert answer.status_code == 200
    assert "run as" not in answer.text


def test_the_page_reads_as_the_observer_and_writes_nothing(
    make_page: Callable[..., Any], db_of_page: Any
) -> None:
    db_of_page.execute(f"revoke {OPERATOR} from web_login")
    try:
        with serving(make_page()) as address, httpx.Client(base_url=address) as http:
            told(http, "/")
            told(http, "/jobs")
    finally:
        db_of_page.execute(f"grant {OPERATOR} to web_login")


def test_a_role_is_taken_as_soon_as_it_is_granted_and_no_longer(
    make_page: Callable[..., Any], db_of_page: Any, scene: Scene
) -> None:
    with serving(make_page()) as address, httpx.Client(base_url=address) as http:
        db_of_page.execute(f"revoke {OBSERVER} from {LOGIN}")
        try:
            assert "permission denied for" in told(http, "/jobs?type=send_mail", 500)
        finally:
            db_of_page.execute(f"grant {OBSERVER} to {LOGIN}")
        told(http, "/jobs?type=send_mail")
    with serving(make_page()) as address, httpx.Client(base_url=address) as http:
        told(http, "/jobs")
        db_of_page.execute(f"revoke {OBSERVER} from {LOGIN}")
        try:
            shown = told(http, "/jobs?type=send_mail", 500)
        finally:
            db_of_page.execute(f"grant {OBSERVER} to {LOGIN}")
        assert "permission denied for" in shown  # and not "to set role"


def test_filters_are_read_as_they_are_written() -> None:
    assert contained("a.b=1") == '{"a": {"b": 1}}'
    assert contained("a=x y") == '{"a": "x y"}'
    assert contained("a=1", is_text=True) == '{"a": "1"}'
    assert contained(f"a={BIG}.10") == f'{{"a": {BIG}.10}}'
    assert age("30 min") == "30 minutes"
    for wrong in ("", "=1", "a..b=1", "{"):
        with pytest.raises(BadFilterError):
            contained(wrong)
    assert Filter.of([("status", "dead"), ("x", "y"), ("queue", "\0 ")]).values == {
        "status": ["dead"]
    }


def test_words_are_the_same_in_every_locale() -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = "from rota.web.show import WORDS; print(ascii(WORDS['search_hint']))"

    said = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)

    assert "key:\\u2026," in said


def test_all_words_are_in_one_file() -> None:
    for template in TEMPLATES.glob("*.html"):
        text = re.sub(
            r"\{%.*?%\}|\{\{.*?\}\}|<[^>]*>|&\w+;", " ", template.read_text(), flags=re.S
        )
        words = set(re.findall(r"[A-Za-z]{2,}", text)) - {"rota", "UTC", "Enter"}
        assert not words, f"{template.name}: {words}"


@pytest.fixture
def db_of_page(web_url: str) -> Any:
    with psycopg.connect(web_url, autocommit=True) as connection:
        yield connection


@pytest.mark.parametrize(
    ("name", "release", "digest"),
    [
        (
            "htmx.min.js",
            "htmx.org@4.0.1 dist/htmx.min.js",
            "a0abb04f2f45a1f89d1d4844023245537e5e6014c87b144553e0607b4cc32130",
        ),
        (
            "uplot.min.js",
            "uplot@1.6.32 dist/uPlot.iife.min.js",
            "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        ),
        (
            "uplot.min.css",
            "uplot@1.6.32 dist/uPlot.min.css",
            "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
        ),
    ],
)
def test_what_others_wrote_is_shipped_as_they_released_it(
    name: str, release: str, digest: str
) -> None:
    static = Path(rota.web.__file__).parent / "static"

    assert hashlib.sha256((static / name).read_bytes()).hexdigest() == digest, release
    assert "WARRANT" in (static / f"{name.partition('.')[0]}.LICENSE.txt").read_text()


@pytest.mark.parametrize("question", [queries.SCHEDULES, queries.HALTED])
def test_jobs_are_looked_for_of_the_rows_only_that_a_list_shows(
    db: psycopg.Connection[Any], question: str
) -> None:
    db.execute("""
        insert into rota.halted_keys (ordering_key, job_id)
        select n::text, n from generate_series(1, 300) as n
    """)
    db.execute("""
        insert into rota.job_definitions (name, job_type, queue, payload, schedule, time_zone,
            priority, catch_up, catch_up_max, overlap, jitter, anchored_at, last_job_id)
        select n, 'x', 'q', '{}', '* * * * *', 'UTC', 0, 'one', 1, 'allow', '0', rota.now(), n
        from generate_series(1, 300) as n
    """)

    ((plan,),) = db.execute(
        f"explain (analyze, format json) {question}",  # type: ignore[arg-type]
        {"text": None},
    ).fetchall()

    loops, nodes = 0, [plan[0]["Plan"]]
    while nodes:
        node = nodes.pop()
        nodes += node.get("Plans", [])
        loops = max(loops, node["Actual Loops"])
    assert loops == 100


def test_the_jobs_of_a_small_queue_are_found_without_those_of_others(
    db: psycopg.Connection[Any],
) -> None:
    """For the planner a queue without jobs is one of the usual size."""
    db.execute("""
        insert into rota.finished_jobs (id, queue, job_type, payload, priority, max_attempts,
            status, run_at, attempts, lease_token, created_at, updated_at, finished_at)
        select n, case when n % 8 = 0 then 'large' else 'q' || n % 150 end, 'x', '{}', 0, 1,
            'succeeded', now(), 1, n, now(), now(), now() from generate_series(1, 100000) as n
    """)
    db.execute("analyze rota.finished_jobs")

    def is_few(queue: str) -> bool:
        ((answer,),) = db.execute(FEW, {"queue": queue}).fetchall()
        return bool(answer)

    def read(queue: str) -> tuple[int, int]:
        question = listed(["queue"], are_few=is_few(queue))
        explain = sql.SQL("explain (analyze, buffers, format json) {}").format(question)
        ((plan,),) = db.execute(explain, {"queue": queue, "limit": 50}).fetchall()
        top = plan[0]["Plan"]
        return top["Actual Rows"], top["Shared Hit Blocks"] + top["Shared Read Blocks"]

    assert is_few("q7")
    assert not is_few("large")
    for queue, rows in (("none", 0), ("large", 50)):
        found, pages = read(queue)
        assert (found, pages < 100) == (rows, True), (queue, pages)


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_python_cannot_hold_hides_no_row_beside_it(
    db: psycopg.Connection[Any], dsn: str, moment: str
) -> None:
    add_odd_and_good(db, moment)
    page = rota.web.app(dsn, observer_role=None, operator_role=None)

    with serving(page) as address, httpx.Client(base_url=address) as http:
        for path in (
            "/jobs",
            "/jobs?status=running",
            "/errors",
            "/schedules",
            "/workers",
            "/audit",
        ):
            shown = told(http, path)
            assert 'role="alert"' not in shown
            assert "good" in shown
