"""The web half of the shop:  uvicorn app:app."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import models
from fastapi import Depends, FastAPI
from jobs import send_receipt
from models import Order
from pydantic import BaseModel
from sqlalchemy.orm import Session

app = FastAPI()


class NewOrder(BaseModel):
    """What a customer sends."""

    email: str
    total: int


def transaction() -> Iterator[Session]:
    """Lend the session of a request, which is committed before the answer is sent."""
    with models.Session.begin() as session:
        yield session


Transaction = Annotated[Session, Depends(transaction, scope="function")]


@app.post("/orders", status_code=201)
def create_order(new: NewOrder, session: Transaction) -> dict[str, int]:
    """Store an order, and the job that sends its receipt: both or neither."""
    order = Order(**new.model_dump())
    session.add(order)
    session.flush()  # which gives it its id
    send_receipt.enqueue(session, order_id=order.id)
    return {"id": order.id}


@app.get("/orders/{order_id}")
def show_order(order_id: int, session: Transaction) -> dict[str, object]:
    """Tell whether the receipt is out."""
    order = session.get_one(Order, order_id)
    return {"email": order.email, "total": order.total, "has_receipt": order.has_receipt}
