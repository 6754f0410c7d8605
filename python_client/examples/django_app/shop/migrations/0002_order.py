"""The first tables."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Create them."""

    dependencies = [("shop", "0001_rota")]  # noqa: RUF012
    operations = [  # noqa: RUF012
        migrations.CreateModel(
            "Order",
            [
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("email", models.EmailField(max_length=254)),
                ("total", models.IntegerField()),
                ("has_receipt", models.BooleanField(default=False)),
            ],
        )
    ]
