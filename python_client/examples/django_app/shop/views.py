"""The web half of the shop."""

import json

from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt

from .jobs import send_receipt
from .models import Order


@csrf_exempt
def create_order(request: HttpRequest) -> JsonResponse:
    """Store an order, and the job that sends its receipt: both or neither."""
    with transaction.atomic():
        order = Order.objects.create(**json.loads(request.body))
        send_receipt.enqueue(connection, order_id=order.pk)
    return JsonResponse({"id": order.pk}, status=201)


def show_order(request: HttpRequest, order_id: int) -> JsonResponse:
    """Tell whether the receipt is out."""
    order = Order.objects.get(pk=order_id)
    return JsonResponse(
        {"email": order.email, "total": order.total, "has_receipt": order.has_receipt}
    )
