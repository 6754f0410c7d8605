"""Enqueue a job in the same transaction as the row it is about.

DATABASE_URL=postgresql://localhost/shop python enqueue.py
"""

import os

import psycopg

import rota


def sign_up(connection: psycopg.Connection, email: str) -> None:
    """Add a user, and the mail that welcomes them; both or neither."""
    connection.execute("create table if not exists users (email text primary key)")
    connection.execute("insert into users values (%s) on conflict do nothing", [email])
    job = rota.Client(connection).enqueue(
        "send_welcome", {"email": email}, idempotency_key=f"welcome:{email}"
    )
    print(f"job {job.job_id} is {'new' if job.is_new else 'there already'}")


if __name__ == "__main__":
    with psycopg.connect(os.environ.get("DATABASE_URL", "")) as connection:
        sign_up(connection, "ada@example.org")
