"""Who may look, and who may act.

Nobody is let in by default.  There are three ways: a file of passwords, a header that a proxy
sets after it has authenticated the user, or a function of the application that mounts the page.
Without any of them the page answers only requests from this machine that address it by a local
name: a foreign site that is open in the same browser could reach it by another name.

A request to act needs a token that only the page's own forms contain, and has to come from
one of them.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from inspect import isawaitable
from pathlib import Path

from starlette.requests import Request

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
ROLES = ("observer", "operator")
FORWARDED = ("forwarded", "via", "x-real-ip", "x-forwarded-")
"""How the headers begin that proxies send."""
logger = logging.getLogger("rota")

SCRYPT = {"n": 1 << 14, "r": 8, "p": 1}
MAX_KNOWN = 1000


@dataclass(frozen=True, slots=True)
class User:
    """A user of the page; with *is_operator* they may act, if the page allows acts."""

    name: str
    is_operator: bool = False


class RefusedError(Exception):
    """Not let in; *asks* tells the browser to ask for a name and a password.

    Where *is_broken* nobody is let in, until the operator of the page has repaired it.
    """

    def __init__(self, message: str, *, asks: bool = False, is_broken: bool = False) -> None:
        super().__init__(message)
        self.asks, self.is_broken = asks, is_broken


Authenticate = Callable[[Request], User | Awaitable[User | None] | None]


def check_name(name: str) -> None:
    """Raise ValueError unless a line of the file of passwords can begin with a name."""
    is_plain = name.isprintable() and name == name.strip()
    if not name or not is_plain or ":" in name or name.startswith("#"):
        raise ValueError(
            "must be a name without a colon, a line break, a # in front, or a space around it"
        )


def password_line(name: str, role: str, password: str) -> str:
    """Return a line of the file of passwords."""
    check_name(name)
    if role not in ROLES:
        raise ValueError("must be observer or operator")
    salt = secrets.token_bytes(16)
    return f"{name}:{role}:{salt.hex()}:{_hash(password, salt).hex()}"


class PasswordFile:
    """Names and passwords of a file, one a line, as ``rota web --add-user`` writes them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_at = 0
        self._users: dict[str, tuple[str, bytes, bytes]] = {}
        self._key = secrets.token_bytes(32)
        self._known: dict[bytes, User] = {}
        self._one_at_a_time = asyncio.Lock()
        self._read()

    async def __call__(self, request: Request) -> User | None:
        """Return who the request is from; raise RefusedError where the browser has to ask."""
        try:
            self._read()
        except (OSError, ValueError) as error:
            logger.error("nobody is let in by the passwords in %s: %s", self._path, error)
            raise RefusedError(
                "the page cannot read its passwords, and its log says why", is_broken=True
            ) from None
        scheme, _, told = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "basic":
            raise RefusedError("name and password, please", asks=True)
        try:
            name, _, password = base64.b64decode(told).decode().partition(":")
        except ValueError:
            raise RefusedError("name and password, please", asks=True) from None
        # To hash takes a while on purpose; who was right once is known for as long as we run.
        mark = hmac.digest(self._key, f"{name}:{password}".encode(), "sha256")
        if (user := self._known.get(mark)) is not None:
            return user
        known = self._users.get(name)
        role, salt, wanted = known or ("", b"nobody", b"")
        async with self._one_at_a_time:
            found = await asyncio.to_thread(_hash, password, salt)
        # The file may have been read again meanwhile.
        if not hmac.compare_digest(found, wanted) or self._users.get(name) != known:
            raise RefusedError("wrong name or password", asks=True)
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[mark] = user = User(name, role == "operator")
        return user

    def _read(self) -> None:
        changed_at = self._path.stat().st_mtime_ns
        if changed_at == self._read_at:
            return
        users = {}
        for number, line in enumerate(self._path.read_text().splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            try:
                name, role, salt, wanted = line.strip().split(":")
                if role not in ROLES:
                    raise ValueError(role)
                users[name] = (role, bytes.fromhex(salt), bytes.fromhex(wanted))
            except ValueError:
                raise ValueError(
                    f"{self._path}:{number} is not a line as rota web --add-user writes it"
                ) from None
        self._users, self._read_at = users, changed_at
        self._known.clear()


class TrustedHeader:
    """The name that a proxy has put into a header, believed of its own addresses alone."""

    def __init__(
        self, header: str, *, proxies: Collection[str], operators: Collection[str]
    ) -> None:
        self._header = header
        self._proxies = [ipaddress.ip_network(proxy) for proxy in proxies]
        self._operators = operators

    async def __call__(self, request: Request) -> User | None:
        """Return whom the proxy names; raise RefusedError if it is not the proxy that asks."""
        address = _address(request)
        if address is None or not any(address in proxy for proxy in self._proxies):
            raise RefusedError("reach this page through its proxy")
        # Two lines of the header: the client's own, and the proxy's.  Which is which?
        told = request.headers.getlist(self._header)
        if len(told) != 1 or not told[0].strip():
            raise RefusedError(f"the proxy sent no user name in {self._header}")
        name = told[0].strip()
        with suppress(UnicodeDecodeError):  # proxies send UTF-8, which a header is not read as
            name = name.encode("latin-1").decode()
        name = name[:255]
        return User(name, "*" in self._operators or name in self._operators)


async def only_this_machine(request: Request) -> User | None:
    """Let in who is on this machine and asks for it by its own name."""
    address = _address(request)
    # Not the host of the URL: for a name that is none, that is the address of this server.
    name = re.sub(r":\d+$", "", request.headers.get("host", "").lower()).strip("[]")
    if address is None or not address.is_loopback or name not in LOOPBACK_NAMES:
        raise RefusedError("without passwords this page serves only its own machine: localhost")
    # No browser has sent HTTP/1.0 for long; nginx does, and tells nothing else of itself.
    is_old = request.scope["http_version"] == "1.0"
    if is_old or any(header.startswith(FORWARDED) for header in request.headers):
        raise RefusedError(
            "this request came through a proxy: configure passwords or trusted_header"
        )
    return User("", is_operator=True)


async def identify(authenticate: Authenticate, request: Request) -> User:
    """Return who is there; raise RefusedError."""
    found = authenticate(request)
    user = await found if isawaitable(found) else found
    if user is None:
        raise RefusedError("you may not see this page")
    return user


class Tokens:
    """What shows that an act comes from a page of ours: it belongs to a user and a process."""

    def __init__(self, secret: str | None) -> None:
        self._key = secret.encode() if secret else secrets.token_bytes(32)

    def of(self, user: User) -> str:
        """Return the token for the forms of a user."""
        return hmac.new(self._key, f"form of {user.name}".encode(), "sha256").hexdigest()

    def check(self, request: Request, user: User, token: str) -> None:
        """Raise RefusedError unless the form was ours."""
        if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
            raise RefusedError("this act came from another site")
        if not hmac.compare_digest(self.of(user).encode(), token.encode()):
            raise RefusedError("this form is from before a restart: load the page again")


def _address(request: Request) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(request.client.host if request.client else "")
    except ValueError:
        return None


def _hash(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, dklen=32, **SCRYPT)
