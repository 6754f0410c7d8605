"""The page: what runs, what waits and why, what failed, and what an operator can do about it.

``rota web`` serves it alone; `app` returns it as an ASGI application for mounting in another,
and `apps` one for several databases.  It queries the database of the jobs, and needs no other
service.

With several databases each has a site of its own, and the first screen queries all of them at
the same time.  It names one that does not answer, and waits for it no longer than the time
limit of one page.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ..client.connecting import name_of, named, one_line
from . import acts, pages, queries
from .access import Authenticate, PasswordFile, Tokens, TrustedHeader, User, only_this_machine
from .database import READ_TIME, Database, Row, TooSlowError, UnreachableError
from .live import Pulse, events
from .show import MASKED_KEYS, WORDS, Json, Payloads
from .site import Guard, Results, Site, site_of

__all__ = ["User", "app", "apps"]

HERE = Path(__file__).parent


def app(
    dsn: str,
    *,
    allow_acts: bool = False,
    passwords: str | Path | None = None,
    trusted_header: str | None = None,
    trusted_proxies: Collection[str] = ("127.0.0.0/8", "::1/128"),
    operators: Collection[str] = (),
    authenticate: Authenticate | None = None,
    observer_role: str | None = "rota_observer",
    operator_role: str | None = "rota_operator",
    payloads: Payloads = "mask",
    masked_keys: Collection[str] = MASKED_KEYS,
    read_time: float = READ_TIME,
    secret: str | None = None,
) -> Starlette:
    """Return the page of a database, to be mounted under any path.

    It is read-only; with *allow_acts* operators may act.  It knows its users by a file of
    *passwords*, by the *trusted_header* of a proxy at one of the *trusted_proxies* (then
    *operators* are the names that may act, or ``*``), or by *authenticate*, which returns a
    `User` or None.  Without any of these it answers only this machine.

    It reads as *observer_role* and acts as *operator_role*, if the role that connects is a
    member of them.  It masks *payloads* by key, hides or shows them.  Several processes that
    serve one page need the same *secret*.
    """
    ways = [way for way in (passwords, trusted_header, authenticate) if way is not None]
    if len(ways) > 1:
        raise ValueError("choose one of passwords, trusted_header and authenticate")
    if passwords is not None:
        authenticate = PasswordFile(Path(passwords))
    elif trusted_header is not None:
        authenticate = TrustedHeader(
            trusted_header, proxies=trusted_proxies, operators=operators
        )
    if payloads not in ("hide", "mask", "show"):
        raise ValueError("payloads are to hide, mask or show")
    database = Database(
        dsn, observer=observer_role, operator=operator_role, read_time=read_time
    )
    site = Site(
        database=database,
        json=Json(payloads, masked_keys),
        tokens=Tokens(secret),
        authenticate=authenticate or only_this_machine,
        allow_acts=allow_acts,
        pulse=Pulse(database),
        results=Results(is_only_process=secret is None),
        addresses=acts.address_of,
    )
    made = Starlette(
        routes=[
            *(Route(path, endpoint, name=endpoint.__name__) for path, endpoint in pages.ROUTES),
            Route("/act/{function}", acts.act, methods=["GET", "POST"]),
            Route("/all/{act}", acts.act_on_all, methods=["GET", "POST"]),
            Route("/undo", acts.undo, methods=["GET", "POST"]),
            Route("/events", events),
            Mount("/static", StaticFiles(directory=HERE / "static")),
        ],
        exception_handlers=pages.HANDLERS,
        lifespan=site.lifespan,
    )
    made.add_middleware(Guard, site=site)
    made.state.site = site
    return made


@dataclass
class State:
    """What a database says of itself, or why it says nothing."""

    number: int
    name: str
    worst: str = "unknown"
    findings: list[Row] = field(default_factory=list)
    totals: dict[str, int] = field(default_factory=dict)
    problem: str | None = None


def apps(dsns: Sequence[str], **options: Any) -> Starlette:
    """Return a page of several databases; each is at a number of its own, from 0 on.

    The *options* are those of `app()`, for all of them.
    """
    parts = [app(dsn, **options) for dsn in dsns]
    sites: list[Site] = [each.state.site for each in parts]
    names = [name_of(named(dsn)) for dsn in dsns]
    for number, site in enumerate(sites):
        site.place_name = f"{number} {names[number]}"

    async def databases(request: Request) -> Response:
        """Tell which database has trouble, and which is silent."""
        states = await asyncio.gather(
            *(
                _state(n, name, site)
                for n, (name, site) in enumerate(zip(names, sites, strict=True))
            )
        )
        order = ["unknown", *pages.SEVERITIES]
        worst = min((state.worst for state in states), key=order.index)
        return site_of(request).plain(
            request, "databases.html", states=states, worst=worst, allow_acts=False
        )

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        for site in sites:
            await site.database.close()

    made = Starlette(
        routes=[
            Route("/", databases),
            Mount("/static", StaticFiles(directory=HERE / "static")),
            *(Mount(f"/{number}", each) for number, each in enumerate(parts)),
        ],
        exception_handlers=pages.HANDLERS,
        lifespan=lifespan,
    )
    made.add_middleware(Guard, site=sites[0])
    made.state.site = sites[0]
    return made


async def _state(number: int, name: str, site: Site) -> State:
    state = State(number, name)
    await site.database.open()
    try:
        found = await site.ask_cached(queries.DOCTOR, 5)
        queues = await site.ask_cached(queries.QUEUES, 2)
    except UnreachableError:
        state.problem = WORDS["unreachable"]
    except (psycopg.Error, TooSlowError) as error:
        state.problem = one_line(error) or site.too_slow()
    else:
        state.problem = found.problem or queues.problem
        state.findings = [row for row in found.rows if row["severity"] != "ok"]
        state.worst = found.rows[0]["severity"] if found.rows else "unknown"
        state.totals = {} if queues.problem else queries.totals(queues.rows)
    return state
