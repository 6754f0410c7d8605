"""The page as an ASGI application, to be served alone or mounted in another."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from starlette.applications import Starlette
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from . import acts, pages
from .access import Authenticate, PasswordFile, Tokens, TrustedHeader, only_this_machine
from .database import READ_TIME, Database
from .live import Pulse, events
from .show import MASKED_KEYS, Json, Payloads
from .site import Guard, Results, Site

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

    It only shows; with *allow_acts* operators may act as well.  Who is there is told by a file
    of *passwords*, by the *trusted_header* of a proxy at one of the *trusted_proxies* (then
    *operators* are the names that may act, or ``*``), or by *authenticate*, which returns a
    `User` or None.  Without any of them only this machine is answered.

    It reads as *observer_role* and acts as *operator_role*, where the role that connects is a
    member of them.  *payloads* are masked by key, hidden or shown.  Several processes that
    serve one page share a *secret*.
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
