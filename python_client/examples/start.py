"""Start one of the two applications here:  python start.py fastapi_app  (or django_app).

It runs on the database that DATABASE_URL names, or else on a throw-away server: it makes the
tables, and then starts the web server and a worker, until Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from rota.testing import EmbeddedPostgres

APPS = {
    "fastapi_app": {
        "prepare": [["-m", "rota", "install"], ["-c", "import models; models.create_tables()"]],
        "run": [
            ["-m", "uvicorn", "app:app", "--port", os.environ.get("PORT", "8000")],
            ["-m", "rota", "worker", "jobs:registry", "--queue", "mail"],
        ],
    },
    "django_app": {
        "prepare": [["manage.py", "migrate"]],
        "run": [
            ["manage.py", "runserver", "--noreload", os.environ.get("PORT", "8000")],
            ["manage.py", "rota_worker", "--registry", "shop.jobs:registry", "--queue", "mail"],
        ],
    },
}


def main(name: str) -> None:
    """Run an application until one of its processes ends, or a signal comes."""
    folder, app = Path(__file__).parent / name, APPS[name]
    with ExitStack() as stack:
        if "DATABASE_URL" not in os.environ:
            os.environ["DATABASE_URL"] = stack.enter_context(EmbeddedPostgres()).url()
        for arguments in app["prepare"]:
            subprocess.run([sys.executable, *arguments], cwd=folder, check=True)
        running = [subprocess.Popen([sys.executable, *a], cwd=folder) for a in app["run"]]
        try:
            while all(process.poll() is None for process in running):
                time.sleep(0.2)
        except KeyboardInterrupt:
            pass  # Ctrl-C has reached them too
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main(sys.argv[1])
