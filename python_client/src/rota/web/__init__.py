"""The page: what runs, what waits and why, what failed, and what an operator can do about it.

``rota web`` serves it alone; `app` returns it for mounting in an application, and `apps` one
for several databases.  It queries the database of the jobs, and needs no other service.
"""

from .access import User
from .app import app, apps

__all__ = ["User", "app", "apps"]
