"""What the shop promises:  python manage.py test."""

from unittest.mock import patch

from django.core import mail
from django.db import connection
from django.test import TestCase

from rota.testing import assert_enqueued, assert_not_enqueued, drain, run_job

from .jobs import registry, send_receipt
from .models import Order

ORDER = {"email": "ada@example.org", "total": 25}


class ShopTest(TestCase):
    """Each test is one transaction, which Django rolls back."""

    def order(self) -> int:
        """Order something, as a customer does."""
        answer = self.client.post("/orders", ORDER, content_type="application/json")
        return int(answer.json()["id"])

    def test_an_order_gets_its_receipt(self) -> None:
        """The job runs in the transaction of the test."""
        order_id = self.order()

        drain(connection, registry)

        assert mail.outbox[0].to == ["ada@example.org"]
        assert self.client.get(f"/orders/{order_id}").json()["has_receipt"]

    def test_an_order_that_fails_has_no_job(self) -> None:
        """Both or neither."""
        with (
            patch("shop.views.send_receipt.job", side_effect=OSError),
            self.assertRaises(OSError),
        ):
            self.order()

        assert not Order.objects.exists()
        assert_not_enqueued(connection, send_receipt)

    def test_a_receipt_is_sent_again_after_the_mail_server_was_away(self) -> None:
        """With with_later the retry need not be waited for."""
        order_id = self.order()

        with patch("shop.jobs.send_mail", side_effect=[ConnectionRefusedError, 1]) as send:
            outcomes = drain(connection, registry, with_later=True, raise_errors=False)

        assert [o.status for o in outcomes] == ["failed", "succeeded"]
        assert send.call_count == 2
        assert Order.objects.get(pk=order_id).has_receipt

    def test_a_receipt_is_asked_for_once_in_the_mail_queue(self) -> None:
        """The task has the queue, and the key that makes it one."""
        order_id = self.order()

        send_receipt.enqueue(connection, order_id=order_id)

        assert_enqueued(connection, send_receipt, {"order_id": order_id}, queue="mail", count=1)

    def test_a_second_attempt_sends_no_second_mail(self) -> None:
        """The first attempt died after the mail."""
        order = Order.objects.create(**ORDER)

        for attempt in (1, 2):
            task = send_receipt.job(order_id=order.pk)
            run_job(registry, task, attempt=attempt, connection=connection)

        assert len(mail.outbox) == 1
