"""Index a document once more when it changes, however often and whenever that is.

DATABASE_URL=postgresql://localhost/shop python reindex.py
"""

import os
from datetime import UTC, datetime

import psycopg

import rota

registry = rota.Registry()
documents: dict[int, tuple[str, datetime]] = {}


def save(client: rota.Client, number: int, text: str) -> None:
    """Store a document, and ask for its index.

    A job that waits is enough for any number of changes.  If one is running just now, one more
    run follows it.  A change that arrives late, after a newer one, is ignored.
    """
    documents[number] = (text, changed_at := datetime.now(UTC))
    client.enqueue(
        "index",
        {"document": number},
        idempotency_key=f"document:{number}",
        on_conflict="rerun",
        updated_at=changed_at,
    )


@registry.handler("index")
def index(job: rota.Job) -> None:
    """Index what the document says by now."""
    number = job.payload["document"]
    print(f"index document {number}: {documents[number][0]}")
    if documents[number][0] == "second thoughts":
        with psycopg.connect(database, autocommit=True) as connection:
            save(rota.Client(connection), number, "changed while it was indexed")


if __name__ == "__main__":
    database = os.environ.get("DATABASE_URL", "")
    with psycopg.connect(database, autocommit=True) as connection:
        save(rota.Client(connection), 1, "first words")
        save(rota.Client(connection), 1, "second thoughts")
    rota.Worker(database, registry).run(drain=True)
