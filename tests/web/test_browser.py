"""The page in a browser: what is seen, heard by a screen reader, typed and clicked."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    Page,
    Route,
    expect,
    sync_playwright,
)

from rota import Registry
from rota.testing.server import memory
from rota.web import app
from rota.web.acts import ACTS, BULK
from support.server import Server
from support.started_workers import BackgroundWorker
from support.waiting import wait_until
from web.conftest import PATIENCE, serving
from web.sample_jobs import Scene

AXE = Path(__file__).with_name("axe.min.js").read_text()
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--force-prefers-reduced-motion",  # each frame of a motion is drawn, by the CPU
]  # fmt: skip
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
HALF = {"width": 800, "height": 900}
"""A window beside another one, or a tablet."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None and "CI" not in os.environ, reason="no chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser, which has an event loop in this thread and so is closed before other tests."""
    assert CHROMIUM, "there is no chromium: tests/setup.sh brings it"
    with sync_playwright() as playwright:
        expect.set_options(timeout=PATIENCE * 1000)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


def opened(context: BrowserContext) -> Page:
    """Open a page that fails the test when a script does, or when the browser complains."""
    page = context.new_page()
    page.set_default_timeout(PATIENCE * 1000)
    page.complaints = []  # type: ignore[attr-defined]
    page.on("pageerror", lambda error: page.complaints.append(str(error)))  # type: ignore[attr-defined]
    page.on(
        "console",
        lambda said: (
            page.complaints.append(said.text)  # type: ignore[attr-defined]
            if said.type in ("error", "warning") and "404" not in said.text
            else None
        ),
    )
    page.on("dialog", lambda dialog: page.complaints.append(dialog.message))  # type: ignore[attr-defined]
    return page


@pytest.fixture
def wide(browser: Browser, page: str) -> Iterator[Page]:
    context = browser.new_context(viewport=WIDE, base_url=page)  # type: ignore[arg-type]
    found = opened(context)
    yield found
    assert found.complaints == []  # type: ignore[attr-defined]
    context.close()


def screens(scene: Scene) -> list[str]:
    return [
        "/", "/jobs", "/jobs?status=dead&q=", f"/jobs/{scene.jobs['dead']}",
        f"/jobs/{scene.jobs['running']}", f"/jobs/{scene.jobs['hostile']}", "/errors",
        "/schedules", "/schedules/changes", "/workers", "/waiting", "/audit",
        "/all/retry?queue=mail&status=dead",
        f"/act/retry_job?job_id={scene.jobs['dead']}",
        f"/jobs/{scene.jobs['pipeline']}", "/?since=90d", "/act/pause_all", "/act/set_limit",
        "/jobs?col=payload.customer.name&col=key", "/jobs?payload=password%3Dx",
        "/undo?audit=1", "/audit?act=pause", "/schedules/weekly",
        f"/jobs/{scene.jobs['parent']}", f"/all/retry?id={scene.jobs['parent']}",
        "/act/schedule_job?name=changes", "/act/settle_effect?scope=mails&key=x",
        "/jobs?queue=nowhere", "/jobs/999999",
    ]  # fmt: skip


def hurt(shown: Page) -> list[str]:
    """Return what keeps somebody from using what is shown, as axe sees it."""
    found = shown.evaluate(
        "axe.run(document, {resultTypes: ['violations']})"
        ".then(r => r.violations.map(v => [v.impact, v.id, v.nodes[0].html,"
        " v.nodes[0].failureSummary]))"
    )
    return [f"{one}" for one in found if one[0] in ("serious", "critical")]


def too_wide(shown: Page) -> list[str]:
    """Return what makes a screen wider than the window."""
    found: list[str] = shown.evaluate(
        "() => document.documentElement.scrollWidth <= innerWidth ? [] :"
        " [...document.querySelectorAll('main *')].filter(e => "
        "e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.scroll, table, pre'))"
        ".map(e => `${innerWidth}: ${e.outerHTML.slice(0, 200)}`).concat(['wide']).slice(0, 3)"
    )
    return found


@pytest.mark.timeout(300)
def test_every_screen_fits_and_can_be_used_by_all(
    browser: Browser, page: str, scene: Scene
) -> None:
    """Each screen fits all widths, and axe sees it wide and light or on a phone and dark.

    `make web-report` shows all of them to axe.
    """
    context = browser.new_context(base_url=page)
    context.add_init_script(AXE)
    shown = opened(context)
    wrong = []
    for number, path in enumerate(screens(scene)):
        shown.goto(path)
        # What is folded is a part of the screen.
        shown.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        for box in shown.locator("main tbody input[name=id]").all()[:1]:
            box.check()
        show_as(shown, HALF, "light")
        found = too_wide(shown)
        show_as(shown, WIDE, "light")
        found += too_wide(shown) + (hurt(shown) if number % 2 else [])
        show_as(shown, PHONE, "dark")
        found += too_wide(shown) + too_small(shown) + ([] if number % 2 else hurt(shown))
        wrong += [f"{path}: {one}" for one in found]
    assert not wrong, "\n".join(wrong)
    assert shown.complaints == []  # type: ignore[attr-defined]
    context.close()


def show_as(shown: Page, size: dict[str, int], colors: str) -> None:
    shown.set_viewport_size(size)  # type: ignore[arg-type]
    shown.emulate_media(color_scheme=colors)  # type: ignore[arg-type]


def too_small(shown: Page) -> list[str]:
    """Return what a finger does not hit: less than 24 pixels high or wide."""
    found: list[str] = shown.evaluate(
        "() => [...document.querySelectorAll('a, button, input, select, summary')].filter("
        "e => {"
        "const r = e.getBoundingClientRect();"
        "return r.width && (r.height < 23.5 || r.width < 23.5) && !e.closest('.skip, svg, p')"
        "}).map(e => `small: ${e.outerHTML.slice(0, 160)}`).slice(0, 3)"
    )
    return found


def test_trouble_can_be_read_by_all(
    browser: Browser, make_page: Callable[..., Any], web_url: str, scene: Scene
) -> None:
    """A lock, a database that is away, and a page that only shows."""
    away = app("postgresql://u:p@127.0.0.1:1/x", observer_role=None, read_time=0.3)
    with (
        serving(make_page(read_time=0.3)) as address,
        serving(away) as nowhere,
        psycopg.connect(web_url, autocommit=True) as db,
    ):
        shown = browser.new_page()
        shown.add_init_script(AXE)
        wrong = []
        for number, (path, says) in enumerate(
            (
                (f"{address}/act/pause_all", "This page is read-only"),
                (f"{nowhere}/", "The database does not answer"),
                (f"{address}/", "read only"),
                (f"{address}/jobs", "The server cancelled the query"),
                (f"{address}/jobs/{scene.jobs['dead']}", "The server cancelled the query"),
            )
        ):
            size, colors = ((WIDE, "light"), (PHONE, "dark"))[number % 2]
            show_as(shown, size, colors)
            with db.transaction():
                if "cancelled" in says:
                    db.execute(
                        "lock table rota.jobs, rota.finished_jobs in access exclusive mode"
                    )
                shown.goto(path)
            expect(shown.locator("body")).to_contain_text(says)
            wrong += [f"{path}: {one}" for one in too_wide(shown) + hurt(shown)]
        assert not wrong, "\n".join(wrong)
        shown.close()


def test_the_page_of_a_standby_can_be_read_by_all(browser: Browser, tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir=memory()))
    folder.chmod(0o755)
    (folder / "primary").mkdir()
    primary = Server.create(folder / "primary")
    try:
        with psycopg.connect(primary.url(), autocommit=True) as db:
            db.execute("select rota.enqueue('send', delay => '1 hour')")
        standby = primary.copy(folder / "standby")
        page = app(standby.url(), allow_acts=True, observer_role=None, operator_role=None)
        try:
            with serving(page) as address:
                shown = browser.new_page()
                shown.add_init_script(AXE)
                for number, path in enumerate(("/", "/jobs", "/jobs/1", "/waiting", "/audit")):
                    size, colors = ((WIDE, "light"), (PHONE, "dark"))[number % 2]
                    show_as(shown, size, colors)
                    shown.goto(address + path)
                    expect(shown.locator("footer")).to_contain_text("standby, read only")
                    assert too_wide(shown) + hurt(shown) == []
                shown.close()
        finally:
            standby.destroy()
    finally:
        primary.destroy()
        shutil.rmtree(folder)


def test_all_can_be_read_without_a_script(browser: Browser, page: str, scene: Scene) -> None:
    """The narrowest window is the hardest to fit, and one screen of a kind is enough."""
    context = browser.new_context(java_script_enabled=False, base_url=page, viewport=PHONE)  # type: ignore[arg-type]
    shown = context.new_page()
    for path in {
        re.sub(r"\d+|\?.*", "", path): path for path in reversed(screens(scene))
    }.values():
        shown.goto(path)
        assert shown.locator("main").inner_text().strip()
        assert too_wide(shown) == [], path
    shown.set_viewport_size(WIDE)  # type: ignore[arg-type]
    shown.goto("/")
    expect(shown.locator("svg.plot")).to_have_count(3)
    expect(shown.locator("svg.plot").first).to_be_visible()
    shown.get_by_role("link", name="Jobs", exact=True).click()
    shown.get_by_role("searchbox").fill(f"{scene.jobs['dead']}")
    shown.keyboard.press("Enter")
    shown.get_by_role("link", name=str(scene.jobs["dead"]), exact=True).click()
    expect(shown.locator("pre").first).to_contain_text("Traceback")
    expect(shown.get_by_role("button", name="Copy").first).to_be_hidden()
    # What is selected can be acted on, too.
    shown.goto("/jobs?status=dead&queue=mail")
    shown.locator("main input[name=id]").first.check()
    shown.get_by_role("button", name="Retry", exact=True).click()
    expect(shown.locator("h1")).to_contain_text("Retry")
    context.close()


def test_the_longest_names_are_read_whole_on_a_phone(
    browser: Browser, page: str, web_url: str
) -> None:
    name = "W" * 63
    with psycopg.connect(web_url, autocommit=True) as db:
        db.execute(
            "select rota.enqueue(%(name)s, queue => %(name)s, delay => '1 day')", {"name": name}
        )
    context = browser.new_context(viewport={"width": 360, "height": 740}, base_url=page)
    shown = opened(context)

    shown.goto(f"/jobs?queue={name}")

    expect(shown.locator("main tbody tr")).to_have_count(1)
    width = "box => box.scrollWidth - box.clientWidth"
    assert shown.locator(".scroll:has(.jobs)").evaluate(width) == 0
    context.close()


def test_a_new_job_appears_by_itself(wide: Page, web_url: str) -> None:
    wide.goto("/jobs?type=appears")
    expect(wide.locator("main")).to_contain_text("No job matches")
    expect(wide.locator("#live")).to_have_text("live")

    with psycopg.connect(web_url, autocommit=True) as db:
        db.execute("select rota.enqueue('appears', queue => 'appears', delay => '1 day')")

    expect(wide.locator("main tbody tr")).to_have_count(1)


def test_a_page_that_hears_nothing_looks_by_itself(
    wide: Page, make_page: Any, web_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a proxy that keeps all events until there are more."""
    monkeypatch.setattr("rota.web.live.SHORTEST", 1e6)
    monkeypatch.setattr("rota.web.live.LONGEST", 1e6)
    wide.clock.install()
    with serving(make_page()) as address:
        wide.goto(f"{address}/jobs?type=unheard")
        expect(wide.locator("#live")).to_have_text("live")

        with psycopg.connect(web_url, autocommit=True) as db:
            db.execute("select rota.enqueue('unheard', queue => 'unheard', delay => '1 day')")
        wide.clock.fast_forward("02:00")

        expect(wide.locator("main tbody tr")).to_have_count(1)
        wide.clock.fast_forward("00:10")
        expect(wide.locator("#live")).to_have_text("live")
        wide.goto("about:blank")


def test_a_search_that_has_found_nothing_yet_goes_on_by_itself(
    wide: Page, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rota.web.pages.FIRST_TIME", -1.0)

    wide.goto("/jobs?error=has+no+currency")

    expect(wide.locator("table.jobs")).to_contain_text(str(scene.jobs["dead"]))


def test_an_act_on_all_that_match_is_shown_while_it_is_still_counted(
    wide: Page, web_url: str, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rota.web.acts.FIRST_TIME", -1.0)

    wide.goto("/all/retry?error=has+no+currency&status=dead")

    expect(wide.locator("#found b").first).to_have_text("2 jobs")
    expect(wide.locator("#found")).to_contain_text(str(scene.jobs["dead"]))
    assert wide.locator("[form=acts]").input_value() == "2"


@pytest.fixture
def waiting_for_news(wide: Page) -> Callable[[str], Callable[[], None]]:
    """Open a screen whose news are on their way; return what lets them arrive."""

    def opened_with_news(path: str) -> Callable[[], None]:
        held: list[Route] = []

        def hold(route: Route) -> None:
            if "rota-live" in route.request.headers:
                held.append(route)
            else:
                route.continue_()

        wide.route(f"**{path}", hold)
        wide.goto(path)
        with wide.expect_request(lambda asked: "rota-live" in asked.headers):
            wide.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

        def let_arrive() -> None:
            wide.evaluate(
                "window.news = new Promise((tell) => document.addEventListener("
                "'htmx:finally:request', () => tell(null), {once: true})); 0"
            )
            for route in held:
                route.continue_()
            wide.evaluate("window.news")

        return let_arrive

    return opened_with_news


def test_a_key_counts_that_is_pressed_while_news_are_on_their_way(
    wide: Page, waiting_for_news: Callable[[str], Callable[[], None]]
) -> None:
    let_arrive = waiting_for_news("/jobs?status=dead&queue=mail")
    wide.keyboard.press("j")
    marked = wide.locator("main tbody tr.at a").first.get_attribute("href")

    let_arrive()

    assert wide.locator("main tbody tr.at a").first.get_attribute("href") == marked
    wide.keyboard.press("Enter")
    wide.wait_for_url(f"**{marked}")


def test_a_choice_stays_that_is_made_while_news_are_on_their_way(
    wide: Page, waiting_for_news: Callable[[str], Callable[[], None]]
) -> None:
    let_arrive = waiting_for_news("/jobs?status=dead&queue=mail")
    wide.locator("main tbody input[name=id]").first.check()
    wide.locator("main details.filters summary").click()

    let_arrive()

    expect(wide.locator("main tbody input:checked")).to_have_count(1)
    expect(wide.locator("main details.filters")).to_have_attribute("open", "")
    expect(wide.locator("#live")).to_have_text("paused")


def test_what_a_proxy_answers_takes_no_place_on_a_page_which_goes_on_by_itself(
    wide: Page, web_url: str
) -> None:
    def refuse(route: Route) -> None:
        if is_away and ("rota-live" in route.request.headers or "/events" in route.request.url):
            route.fulfill(status=502, content_type="text/html", body="<h1>Bad Gateway</h1>")
        else:
            route.continue_()

    wide.route(re.compile("."), refuse)
    is_away = True
    wide.goto("/jobs?type=goes_on")
    expect(wide.locator("#live")).to_have_text("paused")
    is_away = False
    expect(wide.locator("#live")).to_have_text("live")

    is_away = True
    with psycopg.connect(web_url, autocommit=True) as db:
        db.execute("select rota.enqueue('goes_on', queue => 'goes_on', delay => '1 day')")
    expect(wide.locator("#live")).to_have_text("paused")
    expect(wide.locator("main")).to_contain_text("No job matches")
    is_away = False

    expect(wide.locator("main tbody tr")).to_have_count(1)
    wide.complaints[:] = [each for each in wide.complaints if "502" not in each]  # type: ignore[attr-defined]


def test_a_selection_is_not_taken_away_and_is_acted_on(wide: Page, web_url: str) -> None:
    with psycopg.connect(web_url, autocommit=True) as db:
        for _ in range(3):
            db.execute("select rota.enqueue('picked', queue => 'picked', delay => '1 day')")
        wide.goto("/jobs?type=picked")
        expect(wide.locator("#selected")).to_be_hidden()
        wide.keyboard.press("j")
        wide.keyboard.press("x")
        wide.keyboard.press("j")
        wide.keyboard.press("x")
        expect(wide.locator("#selected output")).to_have_text("2")
        db.execute("select rota.enqueue('picked', queue => 'picked', delay => '1 day')")
        expect(wide.locator("#live")).to_have_text("paused")
        expect(wide.locator("main tbody input:checked")).to_have_count(2)

        wide.get_by_role("button", name="Cancel").click()
        wide.get_by_label("Reason").fill("not needed")
        wide.get_by_role("button", name="Cancel 2").click()

        expect(wide.get_by_role("status")).to_have_text("Done: 2 changed")
        wide.get_by_role("link", name="Undo").click()
        wide.get_by_role("button", name="Undo").click()
        expect(wide.get_by_role("status")).to_have_text("Done: 2 changed")
        found = db.execute(
            "select count(*) from rota.jobs where job_type = 'picked' and status = 'queued'"
        ).fetchone()
    assert found == (4,)


def test_a_second_click_does_not_act_again(wide: Page, web_url: str) -> None:
    """Not while the first is still on its way; who goes back may act again."""
    wide.on("request", lambda asked: sent.append(asked) if asked.method == "POST" else None)
    sent: list[Any] = []
    with psycopg.connect(web_url, autocommit=True) as db:
        db.execute("select rota.schedule_job('browser/twice', '@yearly', 'twice')")
        wide.goto("/act/run_schedule_now?name=browser/twice")
        button = wide.get_by_role("button", name="Run now")
        box = button.bounding_box()
        assert box is not None
        with db.transaction():
            db.execute("select from rota.job_definitions where name like '%/twice' for update")
            for _ in range(2):
                wide.mouse.click(box["x"] + 5, box["y"] + 5)
                wait_until(lambda: db.execute(LOCKED).fetchone(), "the act to wait")
        expect(wide.get_by_role("status")).to_have_text("Done")
        assert len(sent) == 1
        db.execute("select rota.cancel_job(id) from rota.jobs where job_type = 'twice'")
        wide.go_back()
        button.click()
        expect(wide.get_by_role("status")).to_have_text("Done")
        db.execute("select rota.unschedule_job('browser/twice')")


LOCKED = "select 1 from pg_locks where not granted"
FRESH = """
    () => new Promise(done => document.addEventListener("rota:fresh", done, {once: true}))
    """


def test_what_is_marked_closed_and_old_is_so_after_a_refresh(
    wide: Page, web_url: str, scene: Scene
) -> None:
    with psycopg.connect(web_url, autocommit=True) as db:
        for _ in range(3):
            db.execute("select rota.enqueue('marked', queue => 'marked', delay => '1 day')")
        wide.goto("/jobs?type=marked")
        wide.keyboard.press("j")
        wide.keyboard.press("j")
        link = wide.locator("main tbody tr.at th a")
        expect(link).to_be_focused()
        name = link.inner_text()
        db.execute("select rota.enqueue('marked', queue => 'marked', delay => '1 day')")
        expect(wide.locator("main tbody tr")).to_have_count(4)
        expect(link).to_have_text(name)
        expect(link).to_be_focused()
        expect(wide.locator("main tbody tr").nth(2)).to_have_class("at")

        wide.goto(f"/jobs/{scene.jobs['dead']}")
        stack = wide.locator("details", has_text="Traceback")
        expect(stack).to_have_attribute("open", "")
        stack.locator("summary").click()
        wide.evaluate(f"window.fresh = ({FRESH})()")
        db.execute("select rota.enqueue('marked', queue => 'marked', delay => '1 day')")
        wide.evaluate("window.fresh")
        expect(stack).not_to_have_attribute("open", "")


def test_times_go_on_while_no_answer_comes(wide: Page, scene: Scene) -> None:
    wide.clock.install()
    wide.route("**/events", lambda route: route.fulfill(status=204))
    wide.goto(f"/jobs/{scene.jobs['dead']}")
    ended = wide.locator(".story time").last
    expect(ended).to_contain_text("ago")
    wide.clock.fast_forward("03:00:00")
    expect(ended).to_contain_text("3 h")
    wide.complaints.clear()  # type: ignore[attr-defined]


DRAWN = "over => over.parentElement.querySelector('canvas').toDataURL()"


def test_plots_are_read_and_zoomed_and_stay_so(
    browser: Browser, page: str, wide: Page, web_url: str, scene: Scene
) -> None:
    wide.goto("/")
    ended = wide.locator("figure", has_text="What ended")
    told, over = ended.locator(".told"), ended.locator(".u-over")
    expect(wide.locator(".chart canvas")).to_have_count(3)
    expect(wide.locator("svg.plot").first).to_be_hidden()
    # Until a button is let go: with a new minute all bars would move.
    wide.locator(".chart").first.evaluate("chart => chart.toggleAttribute('data-held', true)")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    plot = json.loads(ended.locator(".chart").get_attribute("data-plot") or "")
    assert box is not None
    left, width, y = box["x"], box["width"], box["y"] + 30

    def at(moment: float) -> float:
        return left + (moment - plot["begin"]) / (plot["step"] * len(plot["values"][0])) * width

    # What is under the pointer, in the zone that was chosen.
    wide.mouse.move(at(plot["begin"] + 30.5 * plot["step"]), y)
    succeeded, failed, dead = (values[30] for values in plot["values"])
    assert min(succeeded, failed) > dead > 0
    expect(told).to_contain_text(f": succeeded {succeeded}, failed {failed}, dead {dead}")
    wide.mouse.move(at(plot["marks"][-1][0]), y)
    expect(told).to_contain_text("4 workers started, 0.1.9")
    wide.keyboard.press("u")
    expect(told).to_contain_text(" UTC: succeeded")
    drawn = over.evaluate(DRAWN)
    wide.keyboard.press("t")
    assert over.evaluate(DRAWN) != drawn

    # A part of it stays chosen while the page stays fresh.
    wide.mouse.move(at(plot["begin"] + 10 * plot["step"]), y)
    wide.mouse.down()
    wide.mouse.move(at(plot["begin"] + 30 * plot["step"]), y, steps=4)
    wide.mouse.up()
    wide.mouse.move(5, 5)
    expect(told).to_have_text("Double-click to see everything again")
    with psycopg.connect(web_url, autocommit=True) as db:
        db.execute("update rota.job_stats set total = total + 7000 where outcome = 'failed'")
        paused = wide.get_by_role("heading", name="Paused")
        for act, count in (("resume_queue", 0), ("pause_queue", 1)):  # above the plots
            expect(paused).to_have_count(1 - count)
            db.execute(f"select rota.{act}('reports')")
            expect(paused).to_have_count(count)
            expect(told).to_have_text("Double-click to see everything again")
    wide.mouse.move(left + width / 2, y)
    expect(told).to_contain_text("failed 7\N{NARROW NO-BREAK SPACE}")
    over.dblclick()
    wide.mouse.move(5, 5)
    expect(told).to_have_text("Point at a bar to read it, drag over a part to zoom")

    # A finger reads it, too.
    phone = browser.new_context(viewport=PHONE, base_url=page, has_touch=True, is_mobile=True)  # type: ignore[arg-type]
    shown = opened(phone)
    shown.goto("/")
    told = shown.locator(".told").first
    expect(told).to_have_text("Move a finger over the bars to read them")
    shown.locator(".u-over").first.tap()
    expect(told).to_contain_text("succeeded")
    assert too_wide(shown) == []
    assert shown.complaints == []  # type: ignore[attr-defined]
    phone.close()


def test_keys_do_what_the_help_says(wide: Page) -> None:
    wide.goto("/")
    wide.keyboard.press("?")
    expect(wide.get_by_role("dialog")).to_be_visible()
    wide.keyboard.press("Escape")
    wide.keyboard.press("2")
    wide.wait_for_url("**/jobs")
    wide.keyboard.press("/")
    wide.keyboard.type("dead queue:mail")
    wide.keyboard.press("Enter")
    wide.wait_for_url("**/jobs?status=dead&queue=mail")
    wide.keyboard.press("j")
    wide.keyboard.press("j")
    wide.keyboard.press("k")
    expect(wide.locator("main tbody tr.at")).to_have_count(1)
    wide.keyboard.press("Enter")
    expect(wide.locator("h1")).to_contain_text("send_invoice")
    wide.go_back()
    assert wide.url.endswith("/jobs?status=dead&queue=mail")


def test_theme_and_zone_are_chosen_and_kept(wide: Page, scene: Scene) -> None:
    wide.goto(f"/jobs/{scene.jobs['done']}")
    wide.keyboard.press("t")
    color = wide.evaluate("getComputedStyle(document.body).backgroundColor")
    wide.get_by_role("button", name="Local time or UTC").click()
    expect(wide.locator(".facts time").first).to_contain_text("UTC")
    wide.reload()
    assert wide.evaluate("getComputedStyle(document.body).backgroundColor") == color
    expect(wide.locator(".facts time").first).to_contain_text("UTC")


def test_the_sql_is_copied(wide: Page, scene: Scene) -> None:
    wide.context.grant_permissions(["clipboard-read", "clipboard-write"])
    wide.goto(f"/jobs/{scene.jobs['dead']}")
    wide.get_by_role("button", name="Copy").first.click()
    expect(wide.get_by_role("button", name="Copied")).to_be_visible()
    copied = wide.evaluate("navigator.clipboard.readText()")
    assert copied == f"select rota.retry_job({scene.jobs['dead']});"


def test_a_remedy_is_a_button(wide: Page) -> None:
    wide.goto("/")
    # There may be more findings than are shown at once.
    wide.locator(".verdict details").evaluate_all("all => all.forEach(d => { d.open = true; })")
    finding = wide.locator(".sql", has_text="rota.resume_queue('reports')")
    finding.get_by_role("link", name="Resume").click()
    expect(wide.locator("code").first).to_have_text(
        "select * from rota.resume_queue(queue => 'reports');"
    )
    wide.get_by_role("button", name="Resume").click()
    expect(wide.get_by_role("status")).to_have_text("Done")
    wide.get_by_role("link", name="Undo").click()
    wide.get_by_role("button", name="Undo").click()
    expect(wide.get_by_role("status")).to_have_text("Done: 1 changed")


@pytest.mark.timeout(300)
@pytest.mark.long
def test_every_act_is_done_in_a_browser_beside_a_worker(
    browser: Browser, page: str, web_url: str
) -> None:
    registry = Registry()
    registry.add("acted", lambda job: None)
    with psycopg.connect(web_url, autocommit=True) as db:
        addresses = prepared(db)
        assert {path.split("/")[2].partition("?")[0] for path in addresses} == {*ACTS, *BULK}
        worker = BackgroundWorker(web_url, registry, queues=["acted"], tick=False)
        try:
            context = browser.new_context(base_url=page)
            shown = opened(context)
            for number, (path, given) in enumerate(addresses.items()):
                shown.goto(path)
                for name, value in given.items():
                    field = shown.locator(f'main [name="{name}"]')
                    if field.evaluate("e => e.tagName") == "SELECT":
                        field.select_option(value)
                    else:
                        field.fill(value)
                # Each is looked at wide and on a phone, and done in one of them, by turns.
                for size in (WIDE, PHONE)[:: (1, -1)[number % 2]]:
                    shown.set_viewport_size(size)  # type: ignore[arg-type]
                    assert too_wide(shown) == [], (path, size)
                shown.locator("main form button:not([name=look])").first.click()
                expect(shown.get_by_role("status")).to_contain_text("Done")
                assert shown.locator("main [role=alert]").count() == 0, path
                assert shown.complaints == []  # type: ignore[attr-defined]
            context.close()
            db.execute("select rota.resume_all()")
            left = "select count(*) from rota.jobs where job_type = 'acted' and run_at <= now()"
            wait_until(lambda: db.execute(left).fetchone() == (0,), "the worker's jobs to end")
        finally:
            worker.stop()


def prepared(db: psycopg.Connection[Any]) -> dict[str, dict[str, str]]:
    """Make something for each act; return its address, and what is to be filled in."""

    def one(query: str, *values: Any) -> int:
        row = db.execute(query, values).fetchone()  # type: ignore[arg-type]
        assert row is not None
        return int(row[0])

    def waiting() -> int:
        return one("select rota.enqueue('acted', queue => 'acted', delay => '1 day')")

    def dead() -> int:
        job_id = waiting()
        db.execute("select rota.cancel_job(%s)", [job_id])
        return job_id

    def claimed(**options: Any) -> tuple[int, int]:
        given = "".join(f", {name} => %({name})s" for name in options)
        db.execute(f"select rota.enqueue('held', queue => 'held'{given})", options)
        row = db.execute(
            "select job_id, lease_token from rota.claim_jobs('w', '{held}')"
        ).fetchone()
        assert row is not None
        return row[0], row[1]

    fail = "select rota.fail_job(%s, %s, 'e', fatal => true)"
    effect = claimed()
    db.execute(
        "select rota.record_effect(job_id => %s, lease_token => %s, scope => 'browser',"
        " key => 'key')",
        effect,
    )
    db.execute(fail, effect)
    db.execute(fail, claimed(ordering_key="browser"))
    died = claimed()
    db.execute(fail, died)
    schedule = "select rota.schedule_job(%s, '@daily', 'acted', queue => 'acted')"
    for name in ("run", "edit", "end"):
        db.execute(f"{schedule}", [f"browser/{name}"])
    return {
        f"/act/retry_job?job_id={dead()}": {},
        f"/act/retry_with_dependants?job_id={dead()}": {},
        f"/act/cancel_job?job_id={waiting()}": {"reason": "tests"},
        f"/act/reschedule_job?job_id={waiting()}": {"delay": "0"},
        f"/act/set_priority?job_id={waiting()}": {"priority": "3"},
        "/act/pause_queue?queue=acted": {"reason": "tests"},
        "/act/resume_queue?queue=acted": {},
        "/act/pause_type?job_type=browser": {"reason": "tests"},
        "/act/resume_type?job_type=browser": {},
        "/act/pause_all": {"reason": "tests"},
        "/act/resume_all": {},
        "/act/schedule_job?name=browser/edit": {"schedule": "@hourly"},
        "/act/run_schedule_now?name=browser/run": {},
        "/act/disable_schedule?name=browser/run": {},
        "/act/enable_schedule?name=browser/run": {},
        "/act/unschedule_job?name=browser/end": {},
        "/act/resume_ordering_key?ordering_key=browser": {},
        "/act/settle_effect?scope=browser&key=key": {"outcome": "done"},
        "/act/set_limit": {"queue": "browser", "max_running": "3"},
        "/act/tick": {},
        "/act/sweep_stale_leases": {},
        f"/all/retry?id={dead()}": {},
        f"/all/cancel?id={waiting()}": {"to.reason": "tests"},
        f"/all/discard?id={died[0]}": {},
        f"/all/reschedule?id={waiting()}": {"to.delay": "0"},
        f"/all/set_priority?id={waiting()}": {"to.priority": "2"},
        f"/all/move?id={waiting()}": {"to.queue": "browser"},
        f"/all/purge?id={dead()}": {},
    }
