"""The page: what runs, what waits and why, what failed, and what an operator can do about it.

``rota web`` serves it alone; `app` makes it to be mounted in an application.  It asks the
database that the jobs are in, and needs no other service.
"""

from .access import User
from .app import app

__all__ = ["User", "app"]
