"""Split a job into parts, run them on all workers, and put the results together at the end.

DATABASE_URL=postgresql://localhost/shop python fan_out.py
"""

import os

import psycopg
from psycopg.types.json import Jsonb

import rota

registry = rota.Registry()


@registry.handler("count_words")
def count_words(job: rota.Job) -> None:
    """Enqueue a part for each page, and the sum after them.

    The transaction also finishes this job, so the parts are enqueued once.  For more than
    fits in one transaction, enqueue in several, with an idempotency_key for each job.
    """
    with job.transaction() as connection:
        client = rota.Client(connection)
        total = client.enqueue("add_up", {"document": job.job_id}, depends_on=[job.job_id])
        client.enqueue_many(
            [
                {
                    "job_type": "count_page",
                    "payload": {"document": job.job_id, "page": page},
                    "blocks": total.job_id,
                }
                for page in job.payload["pages"]
            ]
        )


@registry.handler("count_page")
def count_page(job: rota.Job) -> int:
    """Count the words of one page; the number is the result of the job."""
    return len(job.payload["page"].split())


@registry.handler("add_up")
def add_up(job: rota.Job) -> None:
    """Run once, after the last part.

    To read results a worker needs the rights of an observer.  Many or large ones belong in a
    table of your own.
    """
    with job.transaction() as connection:
        row = connection.execute(
            "select sum(result::int) from rota.job_runs"
            " where id > %(document)s and job_type = 'count_page' and payload @> %(part)s",
            {**job.payload, "part": Jsonb(job.payload)},
        ).fetchone()
    print(f"{row[0] if row else 0} words")


if __name__ == "__main__":
    database = os.environ.get("DATABASE_URL", "")
    pages = ["the quick brown fox", "jumps over", "the lazy dog"]
    with psycopg.connect(database, autocommit=True) as connection:
        rota.Client(connection).enqueue("count_words", {"pages": pages})
    rota.Worker(database, registry).run(drain=True)
