"""The application, which brings the command."""

from __future__ import annotations

from django.apps import AppConfig


class RotaConfig(AppConfig):  # type: ignore[misc]  # untyped
    """The name of the package, django, would be a label that means something else."""

    name = "rota.contrib.django"
    label = "rota"
