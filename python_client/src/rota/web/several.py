"""Several databases on one page: a site for each, and a first screen that asks them all.

Each database is asked by itself and at the same time: one that is silent is named as that, and
keeps no other waiting for longer than one page may take.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ..client.connecting import name_of, named, one_line
from . import queries
from .app import HERE, app
from .database import Row, TooSlowError, UnreachableError
from .pages import HANDLERS, SEVERITIES
from .site import Guard, Site, site_of
from .words import WORDS


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
    pages = [app(dsn, **options) for dsn in dsns]
    sites: list[Site] = [page.state.site for page in pages]
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
        order = ["unknown", *SEVERITIES]
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
            *(Mount(f"/{number}", page) for number, page in enumerate(pages)),
        ],
        exception_handlers=HANDLERS,
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
        state.totals = {
            name: sum(row[name] for row in queues.rows)
            for name in ("ready", "running", "retrying", "dead")
        }
    return state
