"""What one is told whose psycopg finds no libpq, or who lacks what an extra brings."""

import os
import subprocess
import sys
from pathlib import Path

import rota


def test_missing_libpq_is_one_line_that_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "psycopg.py").write_text(
        'raise ImportError("no pq wrapper available.\\nAttempts made:\\n- none")\n'
    )
    path = os.pathsep.join([str(tmp_path), str(Path(rota.__file__).parents[1])])

    done = subprocess.run(
        [sys.executable, "-c", "import rota"],
        env={**os.environ, "PYTHONPATH": path},
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.stderr.splitlines()[-1] == (
        "ImportError: psycopg cannot be loaded, no pq wrapper available: "
        "pip install 'rota[binary]' installs one with its libpq"
    )
    assert "Attempts" not in done.stderr


def test_missing_server_for_tests_is_one_line_that_names_the_remedy() -> None:
    hidden = "import sys; sys.modules['testing.postgresql'] = None; import rota.testing.pytest"

    done = subprocess.run(
        [sys.executable, "-c", hidden], check=False, capture_output=True, text=True
    )

    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: import of testing.postgresql halted; None in sys.modules: "
        "pip install 'rota[testing]' installs it"
    )
