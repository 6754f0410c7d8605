"""The documents say what is so: their examples run, and the reference is the catalog's."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

pytestmark = pytest.mark.plain_session

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(
    r"^#### `(?P<name>\w+)\((?P<arguments>.*?)\)(?: -> (?P<result>.*))?`\n\n"
    r"(?P<sentence>.*)\.\n\*Raises:\* (?P<raises>.*)\. \*Role:\* (?P<roles>.*)\.$",
    re.MULTILINE,
)

Psql = Callable[..., subprocess.CompletedProcess[str]]


def blocks(document: str, *languages: str) -> list[tuple[str, str]]:
    """Return the marked blocks of a document, in order."""
    found = BLOCK.findall((ROOT / document).read_text())
    return [(language, text) for language, text in found if language in languages]


def table(text: str) -> list[str]:
    """Return the lines of psql's output without what psql adds for the eye."""
    lines = (line.rstrip() for line in text.splitlines())
    return [line for line in lines if line and not re.fullmatch(r"\(\d+ rows?\)", line)]


@pytest.mark.slow
@pytest.mark.parametrize("document", ["README.md", "sql/README.md"])
@pytest.mark.usefixtures("unnumbered")
def test_sql_examples_run_and_print_what_is_shown(document: str, dsn: str) -> None:
    shown: str | None = None

    for language, text in blocks(document, "sql", "text"):
        if language == "sql":
            done = subprocess.run(
                ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", dsn],
                input=text,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{text}\n{done.stderr}"
            shown = done.stdout
        elif "---+---" in text:
            assert shown is not None
            assert table(text) == table(shown)


@pytest.mark.parametrize("document", ["README.md", "python_client/README.md"])
def test_python_examples_run(
    document: str, dsn: str, db: psycopg.Connection, capfd: pytest.CaptureFixture[str]
) -> None:
    names = {"DATABASE_URL": dsn}

    for _, text in blocks(document, "python"):
        code = text.replace("postgresql://localhost/shop", dsn)
        exec(compile(code, document, "exec"), names)

    jobs = db.execute("select job_type, status, result from rota.job_runs").fetchall()
    if document == "README.md":
        assert "report for user 8 attempt 1" in capfd.readouterr().out
        assert jobs == [("send_report", "succeeded", {"sent": True})]
    else:
        assert sorted(jobs) == [
            ("send_mail", "queued", None),
            *[("send_receipt", "queued", None)] * 4,
        ]


def test_reference_has_each_public_function_as_the_catalog_has_it(
    db: psycopg.Connection,
) -> None:
    public = db.execute(
        """
        select
            p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid),
            obj_description(p.oid),
            array(select a.access from rota._access() as a where a.name = p.proname order by 1)
        from pg_proc as p
        where p.pronamespace = 'rota'::regnamespace
          and p.proname !~ '^_'
        """
    ).fetchall()

    entries = {m["name"]: m for m in ENTRY.finditer((ROOT / "sql/README.md").read_text())}

    assert set(entries) == {row[0] for row in public}
    for name, arguments, result, comment, roles in public:
        entry = entries[name]
        assert entry["arguments"] == plain(arguments), name
        assert entry["result"] == (result and plain(result)), name
        raises = "" if entry["raises"] == "nothing" else f"; raises {entry['raises']}"
        assert f"{entry['sentence']}{raises}." == comment, name
        assert entry["roles"].split(", ") == (roles or ["owner"]), name


def test_a_comment_names_the_refusal_of_null(db: psycopg.Connection) -> None:
    public = db.execute(
        """
        select
            p.proname, obj_description(p.oid),
            (
                select string_agg(format('null::%s', a.type::regtype), ', ' order by a.ordinal)
                from unnest(p.proargtypes::oid[]) with ordinality as a (type, ordinal)
                where a.ordinal <= p.pronargs - p.pronargdefaults
            )
        from pg_proc as p
        where p.pronamespace = 'rota'::regnamespace
          and p.proname !~ '^_'
          and p.pronargs > p.pronargdefaults
        """
    ).fetchall()

    unnamed = []
    for name, comment, arguments in public:
        try:
            db.execute(f"select * from rota.{name}({arguments})")
        except psycopg.Error as error:
            if str(error.sqlstate) not in comment.partition("; raises ")[2]:
                unnamed.append((name, error.sqlstate))

    assert unnamed == []


def plain(signature: str) -> str:
    """Return the catalog's spelling of a signature as a user would write it."""
    signature = signature.replace("timestamp with time zone", "timestamptz")
    signature = signature.replace("timestamp without time zone", "timestamp")
    signature = re.sub(r"::[a-z]+(\[\])?", "", signature)
    signature = re.sub(r"\bIN ", "", signature)  # of procedures
    for word in ("DEFAULT", "NULL", "TABLE", "SETOF"):
        signature = signature.replace(word, word.lower())
    return signature


def test_reference_lists_each_part_and_each_view(db: psycopg.Connection) -> None:
    text = (ROOT / "sql/README.md").read_text()

    sql = ROOT / "sql"
    parts = [path.relative_to(sql).as_posix() for path in sql.glob("[!u]*/*.sql")]
    views = db.execute(
        "select viewname from pg_views where schemaname = 'rota' and left(viewname, 1) <> '_'"
    ).fetchall()

    assert [part for part in parts if f"({part})" not in text] == []
    assert [view for (view,) in views if f"| `{view}` |" not in text] == []


def test_reference_lists_each_table_that_observers_read(db: psycopg.Connection) -> None:
    (line,) = re.findall(
        r"^Observers also read the tables (.*)\. Only",
        (ROOT / "sql/README.md").read_text(),
        re.M,
    )
    tables = db.execute(
        """
        select a.name from rota._access() as a
        join pg_class as c on c.relname = a.name and c.relnamespace = 'rota'::regnamespace
        where a.access = 'observer' and a.kind = 'view' and c.relkind <> 'v'
        """
    ).fetchall()

    assert sorted(set(re.findall("`([a-z_]+)`", line))) == sorted(name for (name,) in tables)


def test_links_lead_to_a_page_and_a_heading_in_it() -> None:
    pages = [
        path
        for path in ROOT.rglob("*.md")
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    ]

    dead = []
    for page in pages:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for file, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", prose):
            there = page.parent / file if file else page
            if not there.exists() or (anchor and anchor not in anchors(there)):
                dead.append((page.relative_to(ROOT).as_posix(), file, anchor))

    assert dead == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_reference_lists_each_error_code_that_the_sql_raises() -> None:
    raised = {
        code
        for path in (ROOT / "sql").glob("*/*.sql")
        for code in re.findall(r"'(RT\d{3})'", path.read_text())
    }

    listed = set(re.findall(r"^\| `(RT\d{3})` \|", (ROOT / "sql/README.md").read_text(), re.M))

    assert listed == raised
