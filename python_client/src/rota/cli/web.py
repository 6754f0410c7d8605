"""The command ``rota web``: serve the page."""

from __future__ import annotations

import argparse
import getpass
import sys
from pathlib import Path
from urllib.parse import quote

from ..client.connecting import connect
from .output import CommandError, UsageError, conninfo


def web(arguments: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C; with *add_user* write a line of the password file."""
    try:
        import uvicorn

        from ..web import app
        from ..web.access import LOOPBACK_NAMES
    except ImportError as error:
        raise CommandError(
            str(error), "Install what the page needs: pip install 'rota[web]'"
        ) from None
    if arguments.add_user:
        _add_user(arguments)
        return
    has_way = arguments.passwords or arguments.trusted_header
    if arguments.host not in LOOPBACK_NAMES and not has_way:
        raise UsageError(
            f"anyone could see the jobs on {arguments.host}: say who may,"
            " with --passwords FILE or --trusted-header NAME"
        )
    dsn = conninfo(arguments)
    connect(dsn, "rota web").close()
    try:
        page = app(
            dsn,
            allow_acts=arguments.allow_acts,
            passwords=arguments.passwords,
            trusted_header=arguments.trusted_header,
            operators=arguments.operator or (),
            payloads=arguments.payloads,
            **({"trusted_proxies": arguments.proxy} if arguments.proxy else {}),
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    root = "/" + quote(arguments.root_path.strip("/")) if arguments.root_path else ""
    print(f"rota web: http://{arguments.host}:{arguments.port}{root}/", file=sys.stderr)
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


def _add_user(arguments: argparse.Namespace) -> None:
    from ..web.access import password_line

    if not arguments.passwords:
        raise UsageError("say to which file: --passwords FILE")
    role = "operator" if arguments.allow_acts else "observer"
    if sys.stdin.isatty():
        password = getpass.getpass(f"Password of {arguments.add_user}: ")
    else:
        password = sys.stdin.readline().rstrip("\n")
    if len(password) < 8:
        raise UsageError("a password has at least 8 characters")
    path = Path(arguments.passwords)
    path.touch(mode=0o600, exist_ok=True)
    others = [
        line
        for line in path.read_text().splitlines()
        if line.split(":")[0] != arguments.add_user
    ]
    line = password_line(arguments.add_user, role, password)
    path.write_text("\n".join([*others, line]) + "\n")
    print(f"{arguments.add_user} is an {role} in {path}")
