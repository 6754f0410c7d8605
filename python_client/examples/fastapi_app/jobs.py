"""What the shop does in the background:  rota worker jobs:registry --queue mail."""

from __future__ import annotations

from models import Order, Session

import rota

registry = rota.Registry()


@registry.task(queue="mail", idempotency_key="receipt:{order_id}")
def send_receipt(job: rota.Job, order_id: int) -> None:
    """Send the receipt once, and remember it in the transaction that ends the job."""
    with Session() as session:
        order = session.get_one(Order, order_id)
    with job.effect("receipt", str(order_id)) as effect:
        if effect.is_due:
            deliver(order.email, f"You have paid {order.total}.")
    with Session.begin() as session:
        session.get_one(Order, order_id).has_receipt = True
        job.finish_in(session)


@registry.task()
def count_orders() -> int:
    """Return how many orders there are: the result of the job."""
    with Session() as session:
        return session.query(Order).count()


def deliver(address: str, text: str) -> None:
    """Send a mail; here it is only printed."""
    print(f"mail to {address}: {text}", flush=True)
