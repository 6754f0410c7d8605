"""One database with a bit of everything, and one page that shows it, for all tests here."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psycopg
import pytest
import uvicorn
from starlette.types import ASGIApp

from rota.web import acts, app, pages
from web.sample_jobs import Scene, set_scene

PATIENCE = 60.0
"""Seconds: how busy this machine is decides nothing."""
OBSERVER, OPERATOR, LOGIN = "web_observer", "web_operator", "web_login"


@contextmanager
def serving(page: ASGIApp) -> Iterator[str]:
    """Serve a page on this machine; yield its address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(page, log_level="warning", timeout_graceful_shutdown=1, lifespan="on")
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the page did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="session")
def web_url(server: Any, admin: psycopg.Connection[Any], template: str) -> Iterator[str]:
    """A database whose visitors are a login that may only take one of two roles."""
    admin.execute(f"create database web template {template}")
    with psycopg.connect(server.url("web"), autocommit=True) as owner:
        for role, access in ((OBSERVER, "observer"), (OPERATOR, "operator")):
            owner.execute(f"create role {role}")
            grants = owner.execute("select rota.grant_statements(%s, %s)", [access, role])
            for (grant,) in grants.fetchall():
                owner.execute(grant)
        owner.execute(
            f"create role {LOGIN} login noinherit password 'web' in role {OBSERVER}, {OPERATOR}"
        )
        owner.execute(f"grant usage on schema rota to {LOGIN}")
        # In which psycopg reads no time: the page has to choose another style.
        owner.execute(f"alter role {LOGIN} set datestyle = 'German, DMY'")
    yield server.url("web")
    admin.execute("drop database web with (force)")
    for role in (LOGIN, OBSERVER, OPERATOR):
        admin.execute(f"drop role {role}")


@pytest.fixture(scope="session")
def scene(web_url: str) -> Iterator[Scene]:
    with psycopg.connect(web_url, autocommit=True) as owner:
        yield set_scene(owner)


@pytest.fixture(scope="session")
def login_url(web_url: str) -> str:
    place = web_url.partition("@")[2]
    return f"postgresql://{LOGIN}:web@{place}"


@pytest.fixture(scope="session")
def make_page(login_url: str) -> Callable[..., Any]:
    """Make a page of that database."""

    def make(**options: Any) -> Any:
        return app(login_url, observer_role=OBSERVER, operator_role=OPERATOR, **options)

    return make


@pytest.fixture(scope="session")
def page(make_page: Callable[..., Any], scene: Scene) -> Iterator[str]:
    """The address of a page on which the operator may act, and which is in no hurry."""
    acts.FIRST_TIME = acts.STEP_TIME = pages.FIRST_TIME = PATIENCE
    with serving(make_page(allow_acts=True, read_time=PATIENCE)) as address:
        yield address


@pytest.fixture
def http(page: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=page, timeout=PATIENCE) as client:
        yield client
