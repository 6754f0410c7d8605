"""The rules of the SQL that no tool checks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

SQL = Path(__file__).resolve().parents[2] / "sql"
UPGRADES = sorted(SQL.glob("upgrades/*.sql"))
PARTS = sorted({*SQL.glob("*/*.sql")} - {*UPGRADES})
MANIFESTS = [SQL / "install.sql", SQL / "uninstall.sql", SQL / "front.sql"]
# Names of partitions, views, roles and servers cannot be arguments of a statement, pg_cron may
# be missing, and doctor() goes through a list of functions.
DYNAMIC = [
    "all.sql",
    "drop_code.sql",
    "give_grants.sql",
    "encoding.sql",
    "visible_rows.sql",
    "ids.sql",
    "archive.sql",
    "first_run.sql",
    "retention.sql",
    "pg_cron.sql",
    "doctor.sql",
    "grants.sql",
    "front.sql",
]
# A routine with a setting of its own cannot commit; this one begins each transaction with it.
COMMITTING = {"rota.tick_loop": "perform pg_catalog.set_config("}
# What may hide anything: strings, quoted names, comments.  Dollar quotes hold code.
HIDDEN = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|--[^\n]*|/\*.*?\*/", re.DOTALL)
KEYWORDS = re.compile(
    r"\b(select|insert|update|delete|from|where|and|or|not|null|create|replace|function|table"
    r"|returns|language|begin|end|if|then|else|declare|return|raise|with|order|by|limit|join"
    r"|on|set|values|into|exists|as|is|in|case|when|grant|revoke|do|perform|for|loop)\b",
    re.IGNORECASE,
)
FUNCTION = re.compile(
    r"^create (?P<replace>or replace )?(?:function|procedure) (?P<name>[\w.]+)\("
    r"(?P<rest>.*?)^(?:end )?\$\$;$",
    re.DOTALL | re.MULTILINE,
)


def code(path: Path) -> str:
    """The text with what is not code blanked out, line for line."""
    return HIDDEN.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), path.read_text())


def numbered(text: str, pattern: str, flags: re.RegexFlag = re.IGNORECASE) -> list[str]:
    lines = enumerate(text.splitlines(), 1)
    return [f"{number}: {line}" for number, line in lines if re.search(pattern, line, flags)]


def of_each(paths: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Let a test judge all these files, and tell what is wrong with each."""

    def decorate(judge: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            wrong = []
            for path in paths:
                try:
                    judge(path)
                except AssertionError as error:
                    error.add_note(f"in {path.relative_to(SQL)}")
                    wrong.append(error)
            if wrong:
                raise ExceptionGroup("style", wrong)

        return test

    return decorate


every_file, every_part = of_each(PARTS + UPGRADES + MANIFESTS), of_each(PARTS)


@every_file
def test_lines_are_plain_and_short(path: Path) -> None:
    text = path.read_text()

    assert text.isascii()  # a database need not be in UTF-8
    assert numbered(text, r"\t|\s$|.{97}") == []
    assert "\n\n\n" not in text
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


@every_file
def test_keywords_are_lower_case(path: Path) -> None:
    found = [word for word in KEYWORDS.findall(code(path)) if word != word.lower()]

    assert found == []


@every_file
def test_a_file_begins_with_its_name_and_purpose(path: Path) -> None:
    name = path.relative_to(SQL).as_posix()

    assert path.read_text().startswith(f"/*\n * {name} -- ")


@every_file
def test_forbidden_words_are_absent(path: Path) -> None:
    text = code(path)

    assert numbered(text, r"returning \*") == []
    if path.name not in DYNAMIC:
        assert numbered(text, r"\bexecute\b(?! on\b)(?!.*\bfunction\b)") == []
    assert numbered(text, r"\bas enum\b") == []
    assert numbered(text, r"(?<!::)\btimestamp\b(?! with(out)? time zone)") == []
    assert numbered(text, r"\b(varchar|char|serial|bigserial|money)\b") == []


@every_file
def test_only_strings_with_an_e_have_a_backslash(path: Path) -> None:
    """What it means in others is a setting of the session: standard_conforming_strings."""
    text = path.read_text()
    plain = [
        found[0]
        for found in HIDDEN.finditer(text)
        if found[0][0] == "'" and text[found.start() - 1] != "E" and "\\" in found[0]
    ]

    assert plain == []


@every_part
def test_the_manifest_runs_every_part(path: Path) -> None:
    assert f"\\ir {path.relative_to(SQL).as_posix()}\n" in (SQL / "install.sql").read_text()


@every_part
def test_every_function_is_seen_by_these_tests(path: Path) -> None:
    made = re.findall(r"^create .*(?:function|procedure) ", path.read_text(), re.MULTILINE)

    assert len(made) == len(FUNCTION.findall(path.read_text()))


@every_part
def test_functions_can_be_replayed_and_are_pinned_if_public(path: Path) -> None:
    for found in FUNCTION.finditer(path.read_text()):
        name = found["name"]
        head = re.split(r"\s+as \$\$$", found["rest"], maxsplit=1, flags=re.MULTILINE)[0]
        assert found["replace"], name
        assert name.startswith("rota.")
        if name in COMMITTING:
            first = COMMITTING[name]
            begins = re.findall(r"\b(?:begin|read committed;)\n +(.*)", found["rest"])
            assert [line.startswith(first) for line in begins] == [True, True]
            assert not re.search(r"\b(?:rollback|exception$)", found["rest"])
        elif name.startswith("rota._") and "returns trigger" not in found["rest"]:
            # The public function that calls it has set owner and path, at a third of the cost.
            assert "security definer" not in found["rest"], name
            assert "set search_path" not in found["rest"], name
        else:
            assert " set search_path = pg_catalog, pg_temp" in head, name
        assert "strict" not in code_of(found["rest"]).split("$$")[0], name


@every_part
def test_arguments_have_plain_names(path: Path) -> None:
    for found in FUNCTION.finditer(path.read_text()):
        arguments = re.split(r"\n(?:\)|   ) (?:returns|language) ", found["rest"])[0]
        assert re.findall(r"\b(?:p|i|in|v)_\w+", arguments) == [], found["name"]
        assert re.findall(r"^\s*_\w+", arguments, re.MULTILINE) == [], found["name"]


def test_upgrades_change_tables_and_never_functions() -> None:
    for path in UPGRADES:
        assert numbered(code(path), r"create (or replace )?(function|procedure|view)") == []


def code_of(text: str) -> str:
    return HIDDEN.sub(" ", text)
