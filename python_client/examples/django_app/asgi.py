"""The shop and the page of its jobs: ``uvicorn asgi:application``."""

import os

from django.core.asgi import get_asgi_application
from starlette.applications import Starlette
from starlette.routing import Mount

import rota.web

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
django = get_asgi_application()
application = Starlette(
    routes=[
        Mount(
            "/ops/rota",
            rota.web.app(os.environ["DATABASE_URL"], trusted_header="X-Remote-User"),
        ),
        Mount("/", django),
    ]
)
