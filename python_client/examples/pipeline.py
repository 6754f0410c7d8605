"""Take orders through a pipeline: check, charge, ship, or refund on the way.

DATABASE_URL=postgresql://localhost/shop python pipeline.py
"""

import os
from typing import Any

import psycopg

import rota

STAGES: list[dict[str, Any]] = [
    {"stage": "check", "job_type": "check_order"},
    {"stage": "charge", "job_type": "charge_card", "max_attempts": 5},
    {"stage": "ship", "job_type": "ship_order", "queue": "warehouse"},
    {"stage": "refund", "job_type": "refund_card"},
]

registry = rota.Registry()


@registry.handler("check_order")
def check_order(job: rota.Job) -> dict[str, int]:
    """Return what the next stage needs; an empty order goes no further."""
    items = job.payload["items"]
    if not items:
        job.next_stage = "end"
    return {"total": sum(items.values())}


@registry.handler("charge_card")
def charge_card(job: rota.Job) -> dict[str, object]:
    """Charge once, however often the job runs: the key is that of the order."""
    total = job.stage_input["total"]
    with job.effect("charge", f"order:{job.payload['order']}") as effect:
        if effect.is_due:
            effect.result = f"receipt-{job.payload['order']}"
    return {"receipt": effect.result, "total": total}


@registry.handler("ship_order")
async def ship_order(job: rota.AsyncJob) -> dict[str, object]:
    """Go to a stage by its name if the order cannot be shipped."""
    can_ship = "unicorn" not in job.payload["items"]
    if can_ship:
        print(f"order {job.payload['order']} shipped, {job.stage_input['receipt']}")
    job.next_stage = "end" if can_ship else "refund"
    return dict(job.stage_input)


@registry.handler("refund_card")
def refund_card(job: rota.Job) -> None:
    """End the run, since no stage follows."""
    print(f"order {job.payload['order']} refunded: {job.stage_input['total']}")


if __name__ == "__main__":
    database = os.environ.get("DATABASE_URL", "")
    with psycopg.connect(database) as connection:
        client = rota.Client(connection)
        client.define_pipeline("order", STAGES)
        for order, items in enumerate([{"tea": 4}, {"unicorn": 900}, {}], start=1):
            client.start_pipeline(
                "order", {"order": order, "items": items}, idempotency_key=f"order:{order}"
            )
    rota.Worker(database, registry, queues=["default", "warehouse"]).run(drain=True)
