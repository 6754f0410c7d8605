"""The settings of the shop, as few as Django can do with."""

import os

from psycopg.conninfo import conninfo_to_dict

_given = conninfo_to_dict(os.environ.get("DATABASE_URL", "dbname=shop"))

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _given.get("dbname", ""),
        "USER": _given.get("user", ""),
        "PASSWORD": _given.get("password", ""),
        "HOST": _given.get("host", ""),
        "PORT": _given.get("port", ""),
        "TEST": {"TEMPLATE": "template0"},
    }
}
DEBUG = True
EMAIL_BACKEND = "django.core.mail.backends.console.EmailBackend"
SECRET_KEY = "only for an example"
INSTALLED_APPS = ["rota.contrib.django", "shop"]
ROOT_URLCONF = "shop.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
