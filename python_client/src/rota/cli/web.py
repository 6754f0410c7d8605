"""The command ``rota web``: serve the page."""

from __future__ import annotations

import argparse
import getpass
import shutil
import socket
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from urllib.parse import quote

import psycopg

from ..client.connecting import connect
from .output import CommandError, UsageError, conninfo, conninfos, url_of


def web(arguments: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C; with *add_user* write a line of the password file."""
    try:
        import uvicorn

        from ..web import app, apps
        from ..web.access import LOOPBACK_NAMES
    except ImportError as error:
        raise CommandError(
            str(error), "Install what the page needs: pip install 'rota[web]'"
        ) from None
    if arguments.add_user is not None:
        _add_user(arguments)
        return
    if (arguments.operator or arguments.proxy) and not arguments.trusted_header:
        raise UsageError("--operator and --proxy are for --trusted-header NAME")
    has_way = arguments.passwords or arguments.trusted_header
    if arguments.host not in LOOPBACK_NAMES and not has_way:
        raise UsageError(
            f"anyone could see the jobs on {arguments.host}: say who may,"
            " with --passwords FILE or --trusted-header NAME"
        )
    _check_address(arguments.host, arguments.port)
    several = conninfos(arguments)
    dsn = several[0] if several else conninfo(arguments)
    if len(several) < 2:
        with connect(dsn, "rota web") as connection:
            _tell_roles(connection, allow_acts=arguments.allow_acts)
    try:
        options: dict[str, Any] = {
            "allow_acts": arguments.allow_acts,
            "passwords": arguments.passwords,
            "trusted_header": arguments.trusted_header,
            "operators": arguments.operator or (),
            "payloads": arguments.payloads,
            **({"trusted_proxies": arguments.proxy} if arguments.proxy else {}),
        }
        page = apps(several, **options) if len(several) > 1 else app(dsn, **options)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except FileNotFoundError:
        raise UsageError(
            f"no such file: {arguments.passwords}",
            f"Make it with a first user: rota web --passwords {arguments.passwords} "
            "--add-user NAME",
        ) from None
    path = (arguments.root_path or "").strip("/")
    root = f"/{quote(path)}" if path else ""  # a / alone would make of /jobs a host
    below = f", for a proxy that serves it at {root}/" if root else ""
    print(f"rota web: {url_of(arguments.host, arguments.port)}/{below}", file=sys.stderr)
    uvicorn.run(
        page,
        host=arguments.host,
        port=arguments.port,
        root_path=root,
        log_level="warning",
        # The address of who asks is that of the connection: a header could say anything.
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )


def _check_address(host: str, port: int) -> None:
    """Say why nobody could be answered there, before anybody is told to go there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as there:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            there.bind((host, port))
        except OSError as error:
            raise CommandError(
                f"cannot listen on {host}:{port}: {error.strerror}",
                "Choose another: --port PORT, --host HOST",
            ) from None


ROLES = """
    select n.name, session_user::text as login
    from unnest(array['rota_observer', 'rota_operator']) as n (name)
    where not exists (
        select from pg_roles as r
        where r.rolname = n.name and pg_has_role(session_user, r.oid, 'member')
          and has_schema_privilege(r.oid, to_regnamespace('rota'), 'usage')
    )
    """


def _tell_roles(connection: psycopg.Connection[Any], *, allow_acts: bool) -> None:
    """Say when the page has more rights than it needs, for want of a role."""
    for name, login in connection.execute(ROLES).fetchall():
        does = {"rota_observer": "reads", "rota_operator": "acts" if allow_acts else ""}[name]
        if does:
            print(
                f"rota web: {does} as {login} instead of {name} and may do more "
                f"(rota install --with-roles, then grant {name} to it)",
                file=sys.stderr,
            )


def _add_user(arguments: argparse.Namespace) -> None:
    from ..web.access import check_name, password_line

    if not arguments.passwords:
        raise UsageError("name the file: --passwords FILE")
    try:
        check_name(arguments.add_user)
    except ValueError as error:
        raise UsageError(f"--add-user: {error}") from None
    role = "operator" if arguments.allow_acts else "observer"
    if sys.stdin.isatty():
        password = getpass.getpass(f"Password of {arguments.add_user}: ")
    else:
        password = sys.stdin.readline().rstrip("\n")
    if len(password) < 8:
        raise UsageError("a password has at least 8 characters")
    line = password_line(arguments.add_user, role, password)
    path = Path(arguments.passwords).resolve()
    path.touch(mode=0o600, exist_ok=True)
    others = [
        line
        for line in path.read_text().splitlines()
        if line.split(":")[0] != arguments.add_user
    ]
    # A page reads all of the file or the old one; and nobody else has made this one before us.
    with NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as written:
        written.write("\n".join([*others, line]) + "\n")
    with suppress(PermissionError):  # only root can leave it to the user of the page
        shutil.chown(written.name, path.stat().st_uid, path.stat().st_gid)
    shutil.copymode(path, written.name)
    Path(written.name).replace(path)
    print(f"{arguments.add_user} is an {role} in {arguments.passwords}")
