"""Book the entries of each account in order, and different accounts at the same time.

DATABASE_URL=postgresql://localhost/shop python ledger.py
"""

import os
from collections import Counter

import psycopg

import rota

registry = rota.Registry()
balances: Counter[str] = Counter()
tried: set[str] = set()


@registry.handler("deposit")
def deposit(job: rota.Job) -> None:
    """Add to an account; the bank's computer is down at the first try."""
    account = job.payload["account"]
    if account not in tried:
        tried.add(account)
        raise rota.RetryIn(0.1, "the bank is down")
    balances[account] += job.payload["cents"]


@registry.handler("withdraw")
def withdraw(job: rota.Job) -> None:
    """Take from an account; no deposit that was booked before is still on its way."""
    account, cents = job.payload["account"], job.payload["cents"]
    if balances[account] < cents:
        raise rota.FatalError(f"{account} has only {balances[account]} cents")
    balances[account] -= cents
    print(f"{account} has {balances[account]} cents left")


if __name__ == "__main__":
    database = os.environ.get("DATABASE_URL", "")
    with psycopg.connect(database, autocommit=True) as connection:
        client = rota.Client(connection)
        for account in ("ada", "bob"):
            for job_type, cents in (("deposit", 500), ("withdraw", 200), ("withdraw", 100)):
                client.enqueue(
                    job_type, {"account": account, "cents": cents}, ordering_key=account
                )
    waiting = (
        "select 1 from rota.job_runs where ordering_key is not null and finished_at is null"
    )
    with psycopg.connect(database, autocommit=True) as connection:
        while connection.execute(waiting).fetchone():
            rota.Worker(database, registry).run(drain=True)
