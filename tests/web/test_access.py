"""Who is let in, and where a page can be mounted."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from fastapi import FastAPI
from starlette.requests import Request

from rota.__main__ import main
from rota.web import User, access, app, apps
from support.server import free_port
from web.conftest import OBSERVER, OPERATOR, serving
from web.sample_jobs import Scene

Make = Callable[..., Any]


def asked(
    page: Any,
    path: str = "/",
    *,
    peer: str = "127.0.0.1",
    host: str = "localhost",
    **headers: str,
) -> httpx.Response:
    """Ask a page as somebody at that address; only what is refused may be asked for."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=page, client=(peer, 5000))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as http:
            told = {name.replace("_", "-"): value for name, value in headers.items()}
            return await http.get(path, headers=told)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("peer", "host", "status"),
    [
        ("127.0.0.1", "localhost", 200),
        ("::1", "[::1]", 200),
        ("192.0.2.7", "localhost", 403),
        ("127.0.0.1", "evil.example", 403),
        ("127.0.0.1", "localhost.evil.example", 403),
        ("127.0.0.1", "evil.example:99999", 403),
        ("127.0.0.1", "evil.example/", 403),
        ("127.0.0.1", "", 403),
    ],
)
def test_without_passwords_only_this_machine_is_answered(
    make_page: Make, scene: Scene, peer: str, host: str, status: int
) -> None:
    for path in ("/static/rota.css", "/static/htmx.min.js", "/static/uplot.min.js"):
        assert asked(make_page(), path, peer=peer, Host=host).status_code == status


@pytest.mark.parametrize(
    "header",
    [
        "Forwarded",
        "X-Forwarded-For",
        "X-Forwarded-Host",
        "X-Forwarded-User",
        "X-Real-IP",
        "Via",
    ],
)
def test_without_passwords_what_a_proxy_passes_on_is_refused(
    make_page: Make, scene: Scene, header: str
) -> None:
    """All that comes through a proxy of this machine comes from this machine."""
    answer = asked(make_page(), "/static/rota.css", **{header: "203.0.113.9"})
    assert answer.status_code == 403
    assert "proxy" in answer.text


def test_without_passwords_a_proxy_that_names_nobody_is_refused(
    make_page: Make, scene: Scene
) -> None:
    """For years nginx sent HTTP/1.0, the host of its proxy_pass and no header of its own."""
    with serving(make_page()) as address:
        url = httpx.URL(address)
        with socket.create_connection((url.host, url.port)) as proxy:
            proxy.sendall(
                f"GET /static/rota.css HTTP/1.0\r\nHost: {url.netloc.decode()}\r\n\r\n".encode()
            )
            answer = proxy.makefile().readline()

    assert " 403 " in answer


def users(path: Path, *, allow_acts: bool, name: str, password: str) -> str:
    command = [sys.executable, "-m", "rota", "web", "--passwords", str(path)]
    command += ["--add-user", name, *(["--allow-acts"] if allow_acts else [])]
    done = subprocess.run(
        command, input=f"{password}\n", capture_output=True, text=True, check=True
    )
    return done.stdout


def test_to_add_a_user_writes_to_no_file_of_another_name(tmp_path: Path) -> None:
    """In a directory like /tmp somebody else may have made it, and would read all."""
    path, other = tmp_path / "users", tmp_path / "other"
    users(path, allow_acts=True, name="ann", password="correct horse")
    other.write_text("precious")
    for name in ("users.new", "users.tmp", "users~"):
        (tmp_path / name).symlink_to(other)

    users(path, allow_acts=False, name="bob", password="battery staple")

    assert other.read_text() == "precious"
    assert not path.is_symlink()
    assert [line.split(":")[0] for line in path.read_text().splitlines()] == ["ann", "bob"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_password_file_stays_with_the_page_that_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "users"
    users(path, allow_acts=True, name="ann", password="correct horse")
    os.chown(path, 12345, 23456)
    path.chmod(0o640)

    users(path, allow_acts=False, name="bob", password="battery staple")

    now = path.stat()
    assert (now.st_uid, now.st_gid, now.st_mode & 0o777) == (12345, 23456, 0o640)


@pytest.mark.slow
def test_the_password_file_lets_in_whom_it_names(
    make_page: Make, scene: Scene, tmp_path: Path
) -> None:
    path = tmp_path / "users"
    told = users(path, allow_acts=True, name="ann", password="correct horse")
    before = path.stat()
    users(path, allow_acts=False, name="bob", password="battery staple")
    assert path.stat().st_ino != before.st_ino  # replaced as a whole, so never half read
    job = f"/jobs/{scene.jobs['dead']}"

    assert told == f"ann is an operator in {path}\n"
    assert path.stat().st_mode & 0o077 == 0
    assert "correct horse" not in path.read_text()
    with (
        serving(make_page(passwords=path, allow_acts=True)) as address,
        httpx.Client(base_url=address) as http,
    ):
        assert http.get("/").status_code == 401
        assert "basic" in http.get("/static/rota.js").headers["www-authenticate"].lower()
        for wrong in (("ann", "x"), ("eve", "correct horse"), ("ann", ""), ("", "")):
            assert http.get("/", auth=wrong).status_code == 401
        assert http.get("/", headers={"authorization": "Basic é!".encode()}).status_code == 401
        assert "/act/" in http.get(job, auth=("ann", "correct horse")).text
        shown = http.get(job, auth=("bob", "battery staple"))
        assert shown.status_code == 200
        assert "/act/" not in shown.text
        path.write_text("\n".join(path.read_text().splitlines()[1:]))
        assert http.get("/", auth=("ann", "correct horse")).status_code == 401
    path.chmod(0o640)  # for a group that the page runs in
    users(path, allow_acts=False, name="eve", password="in the group")
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("text", [None, b"ann:operator:00\n", b"ann\xff:operator:00:00\n"])
def test_without_a_password_file_nobody_is_let_in_and_the_log_says_why(
    make_page: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: bytes | None
) -> None:
    path = tmp_path / "users"
    path.write_text("")
    page = make_page(passwords=path)
    path.unlink()
    if text is not None:
        path.write_bytes(text)

    answer = asked(page, "/static/rota.css")

    assert answer.status_code == 503
    assert "its log says why" in answer.text
    assert str(tmp_path) not in answer.text
    assert str(path) in caplog.text
    path.write_text("")
    assert asked(page, "/static/rota.css").status_code == 401


@pytest.mark.parametrize("name", ["", "a:b", "#ann", "ann\nbob", " ann", "ann\t", "ann\udcff"])
def test_a_name_that_would_break_the_password_file_is_refused_and_the_rest_stays(
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "users"
    path.write_text("eve:observer:00:00\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("correct horse\n"))

    assert main(["web", "--passwords", str(path), "--add-user", name]) == 2

    assert "--add-user: must be a name" in capsys.readouterr().err
    assert path.read_text() == "eve:observer:00:00\n"


def test_who_leaves_the_password_file_while_it_is_asked_is_not_let_in(
    make_page: Make, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ann, hashed = tmp_path / "users", ("ann", "correct horse"), access._hash
    path.write_text(f"{access.password_line(ann[0], 'operator', ann[1])}\n")
    with (
        serving(make_page(passwords=path)) as address,
        httpx.Client(base_url=address) as http,
    ):

        def hash_slowly(password: str, salt: bytes) -> bytes:
            path.write_text("")
            assert httpx.get(address).status_code == 401  # by now it is read again
            return hashed(password, salt)

        monkeypatch.setattr(access, "_hash", hash_slowly)
        assert [http.get("/", auth=ann).status_code for _ in range(2)] == [401, 401]


def test_a_token_is_for_one_user(make_page: Make, scene: Scene) -> None:
    def who(request: Request) -> User | None:
        name = request.headers.get("x-name")
        return User(name, is_operator=True) if name else None

    with (
        serving(make_page(authenticate=who, allow_acts=True)) as address,
        httpx.Client(base_url=address) as http,
    ):
        assert http.get("/").status_code == 403
        form = http.get("/act/pause_queue?queue=mail", headers={"x-name": "ann"}).text
        token = form.split('name="token" value="')[1].split('"')[0]
        answer = http.post(
            "/act/pause_queue",
            data={"queue": "mail", "token": token},
            headers={"x-name": "eve"},
        )
    assert answer.status_code == 403


def test_an_answer_is_for_the_user_who_asked(make_page: Make, scene: Scene) -> None:
    def who(request: Request) -> User:
        return User(request.headers["x-name"], is_operator=True)

    with (
        serving(make_page(authenticate=who, allow_acts=True)) as address,
        httpx.Client(base_url=address, headers={"x-name": "ann"}) as http,
    ):
        form = http.get("/act/tick").text
        token = form.split('name="token" value="')[1].split('"')[0]
        answer = http.post("/act/tick", data={"token": token}, follow_redirects=True)
        assert "Done" in answer.text
        assert http.get(str(answer.url)).status_code == 200
        assert http.get(str(answer.url), headers={"x-name": "eve"}).status_code == 404


def test_a_header_is_believed_of_the_proxy_alone(make_page: Make, scene: Scene) -> None:
    page = make_page(trusted_header="X-Remote-User", trusted_proxies=["10.1.0.0/16"])

    path = "/static/rota.css"
    assert asked(page, path, peer="10.1.2.3", X_Remote_User="ann").status_code == 200
    assert asked(page, path, peer="10.1.2.3").status_code == 403
    assert asked(page, path, peer="10.2.2.3", X_Remote_User="ann").status_code == 403
    assert asked(page, path, peer="127.0.0.1", X_Remote_User="ann").status_code == 403


def test_operators_of_the_proxy_are_named(make_page: Make, scene: Scene) -> None:
    options = {
        "trusted_header": "X-Remote-User",
        "allow_acts": True,
        "operators": ["ann", "zoë"],
    }
    with serving(make_page(**options)) as address, httpx.Client(base_url=address) as http:
        job = f"/jobs/{scene.jobs['dead']}"
        assert "/act/" in http.get(job, headers={"x-remote-user": "ann"}).text
        assert "/act/" not in http.get(job, headers={"x-remote-user": "bob"}).text
        for name in ("zoë".encode(), "zoë".encode("latin-1")):
            shown = http.get(job, headers=[(b"x-remote-user", name)]).text
            assert "/act/" in shown
            assert "zoë" in shown
        both = [("x-remote-user", "ann"), ("x-remote-user", "bob")]
        assert http.get(job, headers=both).status_code == 403


def test_a_page_works_under_any_path_of_an_application(make_page: Make, scene: Scene) -> None:
    outer = FastAPI()
    outer.mount("/ops/rota", make_page(allow_acts=True))
    with serving(outer) as address, httpx.Client(base_url=address) as http:
        page = http.get("/ops/rota/")
        assert page.status_code == 200
        links = [part.split('"')[0] for part in page.text.split('href="')[1:]]
        assert all(link.startswith(("/ops/rota", "#")) for link in links)
        assert http.get("/ops/rota/static/rota.css").status_code == 200
        answer = http.get("/ops/rota/jobs?q=dead")
        assert answer.headers["location"] == "/ops/rota/jobs?status=dead"
        # Without the server that it was asked as, which is not what a proxy is asked as.
        answer = http.get("/ops/rota/jobs/?status=dead")
        assert answer.headers["location"] == "/ops/rota/jobs?status=dead"
        form = http.get(f"/ops/rota/act/retry_job?job_id={scene.jobs['queued']}").text
        assert 'action="/ops/rota/act/retry_job"' in form


DJANGO = """
from django.core.asgi import get_asgi_application
from django.http import HttpResponse
from django.urls import path
SECRET_KEY, ROOT_URLCONF, ALLOWED_HOSTS = "x", __name__, ["127.0.0.1"]
urlpatterns = [path("shop/", lambda request: HttpResponse("the shop"))]
"""


@pytest.mark.slow
def test_a_page_works_beside_django(web_url: str, scene: Scene, tmp_path: Path) -> None:
    """The lines of the docs, as they stand there."""
    docs = Path(__file__).resolve().parents[2] / "python_client" / "docs" / "web.md"
    code = next(
        part for part in docs.read_text().split("```python\n") if "get_asgi_application" in part
    ).partition("```")[0]
    (tmp_path / "settings.py").write_text(DJANGO)
    (tmp_path / "asgi.py").write_text(code)
    environment = {
        **os.environ, "DATABASE_URL": web_url, "DJANGO_SETTINGS_MODULE": "settings"
    }  # fmt: skip
    words = ["-m", "uvicorn", "--port", str(free_port()), "--app-dir", str(tmp_path)]
    server = subprocess.Popen(
        [sys.executable, *words, "asgi:application"], env=environment, cwd=tmp_path
    )
    retrying = httpx.HTTPTransport(retries=8)
    try:
        address = f"http://127.0.0.1:{words[3]}"
        with httpx.Client(base_url=address, transport=retrying, timeout=30) as http:
            page = http.get("/ops/rota/", headers={"x-remote-user": "ann"})
            assert page.status_code == 200
            assert '/ops/rota/jobs"' in page.text
            assert http.get("/ops/rota/").status_code in (401, 403)
            assert http.get("/shop/").text == "the shop"
    finally:
        server.terminate()
        server.wait()


@pytest.mark.slow
def test_several_databases_have_a_site_each_and_a_silent_one_is_named(
    login_url: str, web_url: str, scene: Scene
) -> None:
    nowhere = "postgresql://u:hunter2@127.0.0.1:1/away"
    page = apps(
        [login_url, nowhere, web_url],
        observer_role=OBSERVER,
        operator_role=OPERATOR,
        allow_acts=True,
        read_time=2.0,
    )
    outer = FastAPI()
    outer.mount("/ops", page)
    with (
        serving(outer) as address,
        httpx.Client(base_url=address, timeout=30) as http,
    ):
        first = http.get("/ops/").text
        assert first.count('<th scope="row"') == 3
        silent = first.split('<th scope="row"')[2]
        assert "/away</a>" in silent
        assert "no answer" in silent
        assert "The database does not answer" in silent
        assert "hunter2" not in first
        assert re.search(">(warning|critical)</span>", first.split('<th scope="row"')[1])
        assert http.get("/ops/static/rota.css").status_code == 200
        for number in (0, 2):
            job = f"/ops/{number}/jobs/{scene.jobs['dead']}"
            answer = http.get(job)
            policies = answer.headers.get_list("cross-origin-opener-policy")
            assert policies == ["same-origin"]  # twice it would count for nothing
            shown = answer.text
            assert 'class="place" href="/ops/"' in shown
            assert f'href="/ops/{number}/act/retry_job' in shown
        assert http.get("/ops/1/").status_code == 503
        assert http.get("/ops/3/").status_code == 404
        form = http.get(f"/ops/2/act/set_priority?job_id={scene.jobs['queued']}").text
        token = form.split('name="token" value="')[1].split('"')[0]
        done = http.post(
            "/ops/2/act/set_priority",
            data={"token": token, "job_id": scene.jobs["queued"], "priority": "1"},
            follow_redirects=True,
        )
        assert "Done" in done.text
        http.headers["x-forwarded-for"] = "203.0.113.9"
        assert http.get("/ops/").status_code == 403
        assert http.get("/ops/0/").status_code == 403


def test_a_database_without_rota_is_not_told_as_one_without_jobs(
    web_url: str, scene: Scene
) -> None:
    bare = web_url.rpartition("/")[0] + "/postgres"
    with serving(apps([web_url, bare])) as address:
        rows = httpx.get(address, timeout=30).text.split('<th scope="row"')[1:]
    totals = [re.findall(r'<td class="num"[^>]*>([^<]*)</td>', row) for row in rows]
    assert all(totals[0])
    assert totals[1] == [""] * 4
    assert "schema &#34;rota&#34; does not exist" in rows[1]


@pytest.mark.slow
def test_a_database_that_hangs_keeps_no_page_waiting(
    login_url: str, web_url: str, scene: Scene
) -> None:
    """The page has a session there already, which does not even stop a question."""
    page = apps(
        [f"{login_url}?application_name=hanging", login_url],
        observer_role=OBSERVER,
        operator_role=OPERATOR,
        read_time=1.0,
    )
    with serving(page) as address, httpx.Client(base_url=address, timeout=30) as http:
        assert http.get("/0/jobs").status_code == 200
        with psycopg.connect(web_url) as db:
            sessions = db.execute(
                "select pid from pg_stat_activity where application_name = 'hanging'"
            ).fetchall()
        assert sessions
        try:
            for (pid,) in sessions:
                os.kill(pid, signal.SIGSTOP)
            assert http.get("/0/jobs").status_code == 503
            assert http.get("/1/jobs").status_code == 200
        finally:
            for (pid,) in sessions:
                os.kill(pid, signal.SIGCONT)
        assert http.get("/0/jobs").status_code == 200


@pytest.mark.usefixtures("web_url")
def test_roles_of_another_database_are_not_taken(dsn: str) -> None:
    """They exist in the whole server, and a superuser counts as a member of each."""
    page = app(dsn, observer_role=OBSERVER, operator_role=OPERATOR)

    with serving(page) as address, httpx.Client(base_url=address) as http:
        shown = http.get("/jobs")

    assert shown.status_code == 200
    assert "reads as postgres" in shown.text


@pytest.mark.slow
def test_the_command_serves_one_database_or_several_and_tells_its_rights(web_url: str) -> None:
    retrying = httpx.HTTPTransport(retries=8)
    for several in (False, True):
        port = free_port()
        words = ["--database", web_url, "--database", web_url] if several else ["-d", web_url]
        command = [sys.executable, "-m", "rota", "web", *words, "--port", str(port)]
        page = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert page.stderr is not None
            told = [page.stderr.readline() for _ in range(1 if several else 2)]
            assert told[-1] == f"rota web: http://127.0.0.1:{port}/\n"
            if not several:
                assert "reads as postgres instead of rota_observer and may do more" in told[0]
                assert "(rota install --with-roles, then grant rota_observer to it)" in told[0]
            with httpx.Client(transport=retrying, timeout=30) as http:
                shown = http.get(f"http://127.0.0.1:{port}/")
            assert shown.status_code == 200
            assert ("<th>Database</th>" in shown.text) is several
        finally:
            page.terminate()
            page.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(("path", "link"), [("/", "/jobs"), ("ops/rota/", "/ops/rota/jobs")])
def test_the_command_serves_below_a_path(web_url: str, path: str, link: str) -> None:
    port = free_port()
    words = ["-d", web_url, "--port", str(port), "--root-path", path]
    page = subprocess.Popen(
        [sys.executable, "-m", "rota", "web", *words], stderr=subprocess.DEVNULL
    )
    try:
        with httpx.Client(transport=httpx.HTTPTransport(retries=8), timeout=30) as http:
            shown = http.get(f"http://127.0.0.1:{port}/").text
        assert f'<a href="{link}">' in shown
    finally:
        page.terminate()
        page.communicate()


@pytest.mark.slow
def test_machines_ask_the_doctor(make_page: Make, scene: Scene) -> None:
    with serving(make_page()) as address:
        answer = httpx.get(f"{address}/health")
        worst = answer.json()["status"]
        assert worst in ("warning", "critical")
        assert answer.status_code == (503 if worst == "critical" else 200)
        assert "queues" in [row["finding"] for row in answer.json()["findings"]]
    away = app("postgresql://u:hunter2@127.0.0.1:1/x", observer_role=None, read_time=0.3)
    with serving(away) as address:
        answer = httpx.get(f"{address}/health", timeout=30)
        assert answer.status_code == 503
        assert answer.json()["status"] == "unknown"
        assert "hunter2" not in answer.text


def test_ways_to_let_somebody_in_are_not_mixed(login_url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one of"):
        app(login_url, trusted_header="X", passwords=tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        app(login_url, passwords=tmp_path / "x")
    (tmp_path / "x").write_text("ann:root:00:00\n")
    with pytest.raises(ValueError, match="x:1 is not"):
        app(login_url, passwords=tmp_path / "x")
    with pytest.raises(ValueError, match="hide, mask or show"):
        app(login_url, payloads="all")  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_command_refuses_to_show_the_jobs_to_everybody(login_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rota", "web", "-d", login_url, "--host", "0.0.0.0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "say who may" in done.stderr


@pytest.mark.slow
def test_the_command_says_why_it_serves_nobody(login_url: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, code, text in (
            (["--port", port], 1, f"cannot listen on 127.0.0.1:{port}: Address already in use"),
            (["--passwords", str(tmp_path / "users")], 2, "--add-user NAME"),
            (["--operator", "ann"], 2, "for --trusted-header"),
        ):
            done = subprocess.run(
                [sys.executable, "-m", "rota", "web", "-d", login_url, *words],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == code
            assert text in done.stderr
            assert "http://" not in done.stderr


@pytest.mark.slow
def test_a_database_that_is_away_is_told_and_no_password_with_it(make_page: Make) -> None:
    page = app("postgresql://u:hunter2@127.0.0.1:1/x", observer_role=None, read_time=0.4)
    with serving(page) as address, httpx.Client(base_url=address, timeout=60) as http:
        shown = http.get("/")
    assert shown.status_code == 503
    assert "The database does not answer" in shown.text
    assert "hunter2" not in shown.text
