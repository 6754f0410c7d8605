"""The recipes are so: their code runs, or is a piece of what runs elsewhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

from contract.test_docs import BLOCK, ROOT
from rota.cli.parser import Misuse, make_parser

pytestmark = [pytest.mark.plain_session, pytest.mark.own_session, pytest.mark.slow]

DOCS = ROOT / "python_client/docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
EXAMPLES = ROOT / "python_client/examples"
OF_THE_READER = {
    "README.md": """
DATABASE_URL: str
send_mail: Callable[[int], None]
""",
    "python_client/README.md": """
import httpx
from opentelemetry.trace import Tracer

deliver: Callable[..., str]
rates: Callable[[], Awaitable[dict[str, float]]]
remove_what_is_older_than: Callable[..., None]
tracer: Tracer
page: Callable[..., None]
""",
    "from-other-queues.md": "deliver: Callable[..., None]",
    "pytest.md": "import psycopg",
}
"""What the code of a document uses and leaves to the reader."""
# With the same settings each time, else nothing of the cache is used again.
CONFIG = str(ROOT / "python_client/pyproject.toml")
# With what it has read for tests/lint.sh, which has the same settings.
MYPY = ["--config-file", CONFIG, "--cache-dir", ROOT / ".mypy_cache"]


def code_of(page: str, *languages: str) -> list[str]:
    found = BLOCK.findall((DOCS / page).read_text())
    return [text for language, text in found if language in languages]


def sources_of_examples() -> list[str]:
    """Return all sources of the examples, whose own tests run them."""
    sources = EXAMPLES.glob("*_app/**/*.py")
    return [path.read_text() for path in sources]


def run(page: str, dsn: str) -> dict[str, Any]:
    """Run the blocks of a page one after the other; return the names that they define."""
    sources, names = sources_of_examples(), {"psycopg": psycopg}
    for text in code_of(page, "python"):
        if not any(text in source for source in sources):
            for driver in ("", "+psycopg"):
                text = text.replace(
                    f"postgresql{driver}://localhost/shop",
                    dsn.replace("postgresql", f"postgresql{driver}", 1),
                )
            exec(compile(text, page, "exec"), names)
    return names


@pytest.mark.parametrize("page", PAGES)
def test_python_of_a_recipe_runs_or_is_of_an_example(
    page: str, dsn: str, db: psycopg.Connection[Any]
) -> None:
    run(page, dsn)

    jobs = db.execute("select job_type, payload from rota.job_runs").fetchall()
    wanted: dict[str, list[tuple[str, Any]]] = {
        "fastapi-sqlalchemy.md": [("send_welcome", {"user_id": 7})],
        "from-other-queues.md": [("send_receipt", {"order_id": 7})],
    }
    assert jobs == wanted.get(page, [])


@pytest.mark.filterwarnings("ignore:Using `httpx`")
def test_a_worker_runs_within_the_lifespan_of_fastapi(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    from fastapi.testclient import TestClient

    app = run("fastapi-sqlalchemy.md", dsn)["app"]

    with TestClient(app):
        while db.execute("select from rota.jobs").fetchall():
            pass

    ended = db.execute("select job_type, status from rota.finished_jobs").fetchall()
    assert ended == [("send_welcome", "succeeded")]

    db.execute("alter schema rota rename to elsewhere")
    with ExitStack() as stack, pytest.raises(psycopg.Error, match="rota"):
        stack.enter_context(TestClient(app))


@pytest.mark.parametrize("page", PAGES)
def test_sql_of_a_recipe_runs(page: str, dsn: str) -> None:
    for text in code_of(page, "sql"):
        done = subprocess.run(
            ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", dsn],
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stderr}"


def test_the_worker_of_another_language_is_the_one_that_is_tested() -> None:
    (shown,) = code_of("another-language.md", "js")

    assert shown == (ROOT / "tests/contract/node/worker.mjs").read_text()


def test_statements_with_casts_take_texts_of_any_driver(dsn: str) -> None:
    """Also of one that calls each text a text and each number a bigint, as few do."""
    (shown,) = code_of("another-language.md", "text")
    add, claim, end = shown.strip().removesuffix(";").split(";")
    with psycopg.connect(dsn, autocommit=True, cursor_factory=psycopg.RawCursor) as db:
        db.adapters.register_dumper(str, psycopg.types.string.StrDumper)
        db.adapters.register_dumper(int, psycopg.types.numeric.Int8Dumper)
        for parent in (None, "{1}"):
            db.execute(add, ["mail", '{"user_id": 7}', "mail", "0 minutes", parent, 3])
        (found,) = db.execute(claim, ["w", "{mail,default}", 10]).fetchall()
        job_id, lease_token, job_type, payload, attempt, seconds = found
        ending = {"job_id": job_id, "lease_token": lease_token, "outcome": "succeeded"}
        ended = db.execute(end, [json.dumps([ending])]).fetchall()

    assert (job_type, payload, attempt, seconds) == ("mail", '{"user_id": 7}', 1, 60.0)
    assert ended == [("finished", None)]


@pytest.fixture(scope="module")
def told() -> str:
    """What the command says of itself."""
    return subprocess.check_output([sys.executable, "-m", "rota", "--help"], text=True)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_commands_of_a_recipe_exist(page: str, told: str) -> None:
    text = (DOCS / page).read_text()
    prose = BLOCK.sub("", text)

    links = re.findall(r"\]\(([^)#:]+)[^):]*\)", prose)
    commands = set(re.findall(r"(?:^\$|`)\s*rota ([a-z]+)", text, re.MULTILINE))

    assert [link for link in links if not (DOCS / link).exists()] == []
    assert commands <= set(re.findall(r"^    ([a-z]+) ", told, re.MULTILINE))


@pytest.mark.parametrize("document", ["README.md", "python_client/README.md", *PAGES])
def test_commands_of_a_document_are_used_rightly(document: str) -> None:
    """Those in a text may leave out what has no default."""
    text = (DOCS / document if document in PAGES else ROOT / document).read_text()
    shown = re.findall(r"^\$ (rota .*?)(?: +#.*)?$", text, re.MULTILINE)
    told = re.findall(r"`(rota [^`]* --[^`]*)`", text)

    wrong = {}
    for command in [*shown, *told]:
        words = [word.replace("ID", "1") for word in shlex.split(command) if word != "..."]
        try:
            _, unknown = make_parser().parse_known_args(words[1:])
        except Misuse as error:
            unknown = [] if command in told and "required" in str(error) else [str(error)]
        if unknown:
            wrong[command] = unknown

    assert wrong == {}


def test_code_of_documents_has_the_right_types(tmp_path: Path) -> None:
    """The blocks of each are one module; those of an example are checked with it."""
    documents = ["README.md", "python_client/README.md", *PAGES]
    for document in documents:
        path = DOCS / document if document in PAGES else ROOT / document
        known = "from collections.abc import Awaitable, Callable\n" + OF_THE_READER.get(
            document, ""
        )
        blocks = [
            text for language, text in BLOCK.findall(path.read_text()) if language == "python"
        ]
        own = [text for text in blocks if not any(text in s for s in sources_of_examples())]
        # Not under its own name, or that about Django would hide the package.
        module = re.sub(r"\W", "_", f"page {document.removesuffix('.md')}")
        (tmp_path / f"{module}.py").write_text("\n\n".join([known, *own]))

    assert_right_types(tmp_path)


@pytest.mark.parametrize("directory", [".", "fastapi_app", "django_app"])
def test_an_example_has_the_right_types(directory: str) -> None:
    chosen = EXAMPLES.glob("*.py") if directory == "." else [EXAMPLES / directory]

    assert_right_types(EXAMPLES / directory, *map(str, chosen))


def assert_right_types(directory: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *MYPY, *(arguments or ["."])],
        cwd=directory,
        env={**os.environ, "MYPYPATH": str(ROOT / "python_client/src")},
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr
