"""The page: what runs, what waits and why, what failed, and what an operator can do about it.

``rota web`` serves it alone; `app` makes it to be mounted in an application, and `apps` one of
several databases.  It asks the database that the jobs are in, and needs no other service.
"""

from .access import User
from .app import app, apps

__all__ = ["User", "app", "apps"]
