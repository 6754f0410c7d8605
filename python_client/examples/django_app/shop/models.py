"""The tables of the shop."""

from django.db import models


class Order(models.Model):
    """An order, whose receipt goes out in the background."""

    email = models.EmailField()
    total = models.IntegerField()
    has_receipt = models.BooleanField(default=False)
