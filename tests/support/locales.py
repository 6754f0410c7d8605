"""Databases of other languages and encodings: what initdb makes them with.

ROTA_TEST_LOCALE names the one that the servers of the tests have.  Locales of the C library
that the machine lacks are generated for the run, which leaves the machine as it was.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from psycopg.types.json import set_json_dumps

UTF8 = ("-E", "UTF8")
LOCALES: dict[str, tuple[str, ...]] = {
    "en_US": (*UTF8, "--locale=en_US.UTF-8"),
    "tr_TR": (*UTF8, "--locale=tr_TR.UTF-8"),
    "icu en-US": (*UTF8, "--locale=C", "--locale-provider=icu", "--icu-locale=en-US"),
    "icu tr": (*UTF8, "--locale=C", "--locale-provider=icu", "--icu-locale=tr"),
    "LATIN1": ("-E", "LATIN1", "--locale=en_US.ISO-8859-1"),
    "EUC_JP": ("-E", "EUC_JP", "--locale=ja_JP.EUC-JP"),
    "SQL_ASCII": ("-E", "SQL_ASCII", "--locale=C"),
}


def chosen() -> tuple[str, ...]:
    """Return the options of initdb for the databases of this run."""
    name = os.environ.get("ROTA_TEST_LOCALE")
    # What is told in another language is for `test_front.py`.
    return (*LOCALES[name], "--lc-messages=C") if name else ()


def has_utf8() -> bool:
    """Return whether the databases of this run hold any text, and nothing else."""
    return not chosen() or chosen()[:2] == UTF8


@contextmanager
def generated() -> Iterator[None]:
    """Let the servers that are started meanwhile find the locale of this run."""
    wanted = [option[9:] for option in chosen() if option.startswith("--locale=")]
    known = subprocess.check_output(["locale", "-a"], text=True) if wanted else ""
    names = {_plain(line) for line in known.splitlines()}
    missing = [name for name in wanted if _plain(name) not in names]
    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patch:
        Path(home).chmod(0o755)  # the server may be another user
        for name in missing:
            language, _, charmap = name.partition(".")
            command = ["localedef", "-i", language, "-f", charmap, f"{home}/{name}"]
            subprocess.run(command, check=True)
            patch.setenv("LOCPATH", home)
        if not has_utf8():
            # The encoding of psycopg and psql, which else have that of the database.
            patch.setenv("PGCLIENTENCODING", "UTF8")
            # SQL_ASCII takes no escapes of other characters.
            set_json_dumps(partial(json.dumps, ensure_ascii=False))
        yield


def _plain(name: str) -> str:
    return name.lower().replace("-", "")
