"""The shop itself: its tables, and how it comes to have jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg import Connection

from rota import Client

from .story import USERS, Part

SHOP_TABLES = """
create table rota_demo.users (
    id bigint primary key,
    name text not null
);
create table rota_demo.sessions (
    user_id bigint not null references rota_demo.users,
    last_seen_at timestamptz not null
);
create table rota_demo.cleanups (
    deleted bigint not null
);
create table rota_demo.exports (
    user_id bigint not null references rota_demo.users
);
"""

OLD_SESSIONS, NEW_SESSIONS = 40, 12


def open_shop(connection: Connection[Any]) -> tuple[str, str, str]:
    """Fill the tables; return today, the Monday of last week, and the one before."""
    with connection.transaction():
        with connection.cursor() as cursor:
            cursor.executemany(
                "insert into rota_demo.users (name, id) values (%s, %s)", list(USERS.items())
            )
        for count, age in ((OLD_SESSIONS, "40 days"), (NEW_SESSIONS, "2 days")):
            connection.execute(
                "insert into rota_demo.sessions (user_id, last_seen_at)"
                " select 1 + n %% 6, rota.now() - %s::interval"
                " from generate_series(1, %s) as n",
                [age, count],
            )
    today, monday, monday_before = connection.execute(
        "select current_date::text, m::text, (m - 7)::text"
        " from (select date_trunc('week', rota.now())::date - 7) as w (m)"
    ).fetchall()[0]
    return today, monday, monday_before


def run_cron(connection: Connection[Any], parts: Sequence[Part]) -> list[bool]:
    """Enqueue what is due tonight; say of each job whether it is new."""
    with connection.transaction():
        rows = Client(connection).enqueue_many([part.job for part in parts])
    return [row.is_new for row in rows]


def click_export(connection: Connection[Any], part: Part) -> None:
    """Store the click of a user and enqueue its job: both are committed, or neither."""
    with connection.transaction():
        connection.execute(
            "insert into rota_demo.exports (user_id) values (%s)", [part.payload["user_id"]]
        )
        Client(connection).enqueue_many([part.job])
