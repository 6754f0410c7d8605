"""What all screens share: the database connection, the rendering, and the security headers."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, LiteralString
from urllib.parse import urlsplit, urlunsplit

import psycopg
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from psycopg import sql
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..client.connecting import one_line
from . import queries, show
from .access import Authenticate, RefusedError, Tokens, User, identify
from .database import NOTHING, Database, Row, TooSlowError, Values
from .live import Pulse
from .show import WORDS

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


MISSING = (
    psycopg.errors.InvalidSchemaName,
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.UndefinedFunction,
)
"""What a database says that has no rota, or another version of it."""
KEPT_FOR, MAX_KEPT = 3600.0, 200
ESSENTIAL = 0.7
"""Seconds for that without which there is no page: a question of no table."""


_LIMIT = re.compile(r"limit (\d+)\s*$")


class Words:
    """The words of the page by their names."""

    def __getattr__(self, name: str) -> str:
        try:
            return WORDS[name]
        except KeyError:
            raise AttributeError(name) from None

    def __call__(self, name: str, default: str = "") -> str:
        """Return a word by a name that is computed."""
        return WORDS.get(name, default or name)


@dataclass
class Answer:
    """What a question found, or why it found nothing."""

    rows: list[Row] = field(default_factory=list)
    problem: str | None = None
    looked_to: int | None = None
    cut_at: int | None = None
    """How many rows were asked for, if there may be more."""


class Results:
    """What acts have answered, for a while, so that their addresses can be loaded again."""

    def __init__(self, *, is_only_process: bool) -> None:
        self._is_only = is_only_process
        self._kept: dict[str, tuple[float, User, Response]] = {}

    def keep(self, user: User, answer: Response) -> str | None:
        """Return a key for an answer; None where another process may be asked for it."""
        if not self._is_only:
            return None
        old = time.monotonic() - KEPT_FOR
        newest = list(self._kept.items())[-MAX_KEPT:]
        self._kept = {key: one for key, one in newest if one[0] > old}
        key = secrets.token_urlsafe(12)
        self._kept[key] = (time.monotonic(), user, answer)
        return key

    def get(self, key: str, user: User) -> Response | None:
        """Return an answer to the user that it was given to."""
        _, of, answer = self._kept.get(key, (0.0, None, None))
        return answer if of == user else None


@dataclass
class Site:
    """A page with its database and its rules."""

    database: Database
    json: show.Json
    tokens: Tokens
    authenticate: Authenticate
    allow_acts: bool
    pulse: Pulse
    results: Results

    addresses: Callable[[str | None], str | None]
    place_name: str | None = None
    """What this database is called, where the page shows several."""

    def __post_init__(self) -> None:
        """Read the templates when they are wanted, and escape all that goes into them."""
        self._templates = Environment(
            loader=FileSystemLoader(Path(__file__).parent / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals["w"] = Words()
        self._templates.filters.update(
            show.FILTERS,
            address=self.addresses,
            json=self.json.pretty,
            json_line=self.json.line,
        )

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Read all templates before the first page is asked for; close the connections."""
        for name in self._templates.list_templates(["html"]):
            self._templates.get_template(name)
        yield
        await self.database.close()

    async def ask(
        self, query: LiteralString | sql.Composed, values: Values = NOTHING
    ) -> Answer:
        """Return what a question finds; one that is stopped leaves the rest of a page alone."""
        try:
            rows = await self.database.rows(query, values)
        except TooSlowError:
            return Answer(problem=self.too_slow())
        except psycopg.errors.InsufficientPrivilege as error:
            return Answer(problem=WORDS["no_right"].format(one_line(error)))
        except psycopg.DatabaseError as error:
            if isinstance(error, psycopg.DataError) or (error.sqlstate or "")[:2] == "RT":
                raise  # what was asked for is wrong, and not the database
            hint = WORDS["not_up_to_date"] if isinstance(error, MISSING) else ""
            return Answer(problem=f"{WORDS['refused']}: {one_line(error)}. {hint}".strip())
        limit = _LIMIT.search(query) if isinstance(query, str) else None
        most = int(limit[1]) if limit else None
        return Answer(rows, cut_at=most if most and len(rows) >= most > 1 else None)

    async def ask_cached(self, query: LiteralString, seconds: float) -> Answer:
        """Return an answer that many pages share for a while."""
        try:
            answer: Answer = await self.database.cached(query, seconds, lambda: self.ask(query))
        except TooSlowError:
            return Answer(problem=self.too_slow())
        return answer

    def too_slow(self) -> str:
        """Say that a question was stopped."""
        return WORDS["too_slow"].format(self.database.read_time)

    async def place(self) -> Row:
        """Return which database this is, and whether it can be written to."""
        row: Row | None = await self.database.cached(
            "place", 5, lambda: self.database.row(queries.PLACE, least=ESSENTIAL)
        )
        return row or {}

    def reads_as(self, place: Row) -> str | None:
        """Return the login that reads, where the role that it should take is not to be had."""
        wanted = self.database.observer
        return place["login"] if wanted and place["reads_as"] == place["login"] else None

    async def may_act(self, request: Request) -> bool:
        """Whether the user may act, and the database can be written to."""
        user: User = request.state.user
        if not (self.allow_acts and user.is_operator):
            return False
        return not (await self.place())["is_standby"]

    async def render(
        self, request: Request, template: str, status: int = 200, **context: Any
    ) -> Response:
        """Return a screen."""
        place = await self.place()
        now = await self.database.row("select rota.now() as now", least=ESSENTIAL)
        may_act = await self.may_act(request)
        return self.plain(
            request,
            template,
            status,
            place=place,
            now=now["now"] if now else place["now"],
            may_act=may_act,
            reads_as=self.reads_as(place),
            token=self.tokens.of(request.state.user) if may_act else "",
            **context,
        )

    def plain(
        self, request: Request, template: str, status: int = 200, **context: Any
    ) -> Response:
        """Return a screen that asks nothing of the database."""
        base = request.scope.get("root_path", "")
        text = self._templates.get_template(template).render(
            {
                "base": base,
                "path": request.url.path.removeprefix(base),
                "query": request.url.query,
                "user": request.state.user,
                "allow_acts": self.allow_acts,
                "payloads": self.json.payloads,
                "place_name": self.place_name,
                **context,
            }
        )
        return HTMLResponse(text, status, {"cache-control": "no-store"})


def site_of(request: Request) -> Site:
    """Return the page that a request is for."""
    site: Site = request.app.state.site
    return site


class Guard:
    """Lets in who may see the page, and gives every answer the headers that protect it."""

    def __init__(self, app: ASGIApp, /, site: Site) -> None:
        self._app, self._site = app, site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                had = [
                    (name, _here(value) if name == b"location" else value)
                    for name, value in message.get("headers", ())
                ]
                names = {name for name, _ in had}  # those of a page that is mounted in this one
                own = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                message["headers"] = had + [one for one in own if one[0] not in names]
            await send(message)

        request = Request(scope, receive)
        try:
            user = await identify(self._site.authenticate, request)
        except RefusedError as error:
            await _refusal(error)(scope, receive, send_with_headers)
            return
        scope.setdefault("state", {})["user"] = user
        if "\0" in scope["path"] or b"%00" in scope.get("query_string", b""):
            # No text of the database has it, so there is nothing to be found.
            await PlainTextResponse("not found\n", 404)(scope, receive, send_with_headers)
            return
        await self._site.database.open()
        self._site.database.begin_page()
        await self._app(scope, receive, send_with_headers)


def _here(address: bytes) -> bytes:
    """Return an address of the page without its server, which behind a proxy is another."""
    _, _, path, query, fragment = urlsplit(address)
    return urlunsplit((b"", b"", b"/" + path.lstrip(b"/"), query, fragment))


def _refusal(error: RefusedError) -> Response:
    if error.asks:
        asking = {"www-authenticate": 'Basic realm="rota", charset="UTF-8"'}
        return PlainTextResponse(f"{error}\n", 401, asking)
    return PlainTextResponse(f"{error}\n", 503 if error.is_broken else 403)
