"""What the shop does in the background:  manage.py rota_worker."""

from __future__ import annotations

from django.core.mail import send_mail
from django.db import connection, transaction

import rota
from rota.contrib.django import fresh_connections

from .models import Order

registry = rota.Registry()
registry.middleware(fresh_connections)  # none that is broken or old, as for a request


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
