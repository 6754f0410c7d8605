"""The screens in the docs are those that the commands show."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from contract.screens import PAGE, folded, page, shown, stage

pytestmark = [pytest.mark.slow, pytest.mark.own_session, pytest.mark.plain_session]


@pytest.mark.usefixtures("unnumbered")
def test_the_docs_show_what_the_commands_show(db: psycopg.Connection[Any], dsn: str) -> None:
    """`make screens` writes the page anew."""
    screens = shown(dsn, stage(db))

    name = db.info.dbname
    now = {
        command: text.replace(f" in {name}", " in shop") for command, text in screens.items()
    }
    assert folded(page(now)) == folded(PAGE.read_text())
    for text in now.values():
        statements = (
            "select ",
            "do ",
            "20",
        )  # what is to be pasted is one line, and so are moments
        assert [
            line for line in text.split("\n")
            if len(line) > 80 and not line.strip().startswith(statements)
        ] == []  # fmt: skip
