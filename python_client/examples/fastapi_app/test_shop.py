"""What the shop promises:  pytest."""

from __future__ import annotations

import jobs
import pytest
from fastapi.testclient import TestClient
from jobs import count_orders, registry, send_receipt
from sqlalchemy import Connection

from rota.testing import assert_enqueued, assert_not_enqueued, drain, run_job

ORDER = {"email": "ada@example.org", "total": 25}


def test_an_order_gets_its_receipt(
    web: TestClient, connection: Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    order_id = web.post("/orders", json=ORDER).json()["id"]
    assert web.get(f"/orders/{order_id}").json() == {**ORDER, "has_receipt": False}

    drain(connection, registry)

    assert web.get(f"/orders/{order_id}").json()["has_receipt"] is True
    assert capsys.readouterr().out == "mail to ada@example.org: You have paid 25.\n"


def test_an_order_that_is_refused_has_no_job(web: TestClient, connection: Connection) -> None:
    response = web.post("/orders", json={"email": "ada@example.org"})

    assert response.status_code == 422
    assert_not_enqueued(connection, send_receipt)


def test_a_receipt_is_sent_again_after_the_mail_server_was_away(
    web: TestClient, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.post("/orders", json=ORDER)
    sent: list[str] = []

    def deliver(address: str, text: str) -> None:
        sent.append(address)
        if len(sent) == 1:
            raise ConnectionRefusedError

    monkeypatch.setattr(jobs, "deliver", deliver)

    outcomes = drain(connection, registry, with_later=True, raise_errors=False)

    assert [outcome.status for outcome in outcomes] == ["failed", "succeeded"]
    assert len(sent) == 2


def test_an_order_asks_for_one_receipt_in_the_mail_queue(
    web: TestClient, connection: Connection
) -> None:
    order_id = web.post("/orders", json=ORDER).json()["id"]

    send_receipt.enqueue(connection, order_id=order_id)

    assert_enqueued(connection, send_receipt.job(order_id=order_id), queue="mail", count=1)


def test_orders_are_counted(web: TestClient, connection: Connection) -> None:
    web.post("/orders", json=ORDER)

    assert run_job(registry, count_orders, connection=connection).result == 1
