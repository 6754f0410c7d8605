"""What the shop does in the background:  manage.py rota_worker."""

from __future__ import annotations

from collections.abc import Iterator

from django.core.mail import send_mail
from django.db import close_old_connections, connection, transaction

import rota

from .models import Order

registry = rota.Registry()


@registry.middleware
def fresh_connections(job: rota.Job | rota.AsyncJob) -> Iterator[None]:
    """Keep no connection that is broken or old, as Django does around a request."""
    is_in_test = connection.in_atomic_block  # of a TestCase, which needs its connection
    try:
        if not is_in_test:
            close_old_connections()
        yield
    finally:
        if not is_in_test:
            close_old_connections()


@registry.task(queue="mail", idempotency_key="receipt:{order_id}")
def send_receipt(job: rota.Job, order_id: int) -> None:
    """Send the receipt once, and remember it in the transaction that ends the job."""
    order = Order.objects.get(pk=order_id)
    with job.effect("receipt", str(order_id)) as effect:
        if effect.is_due:
            send_mail("Receipt", f"You have paid {order.total}.", None, [order.email])
    with transaction.atomic():
        Order.objects.filter(pk=order_id).update(has_receipt=True)
        job.finish_in(connection)
