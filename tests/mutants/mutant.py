"""A mutant: the product with one guard taken out, and who should notice.

The text that is taken out must stand in its file once.  So a list that has fallen behind the
product says so, and no mutant is the product itself.  How the lines of the SQL are broken does
not matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from support.mutation import in_sql


@dataclass(frozen=True, slots=True)
class Edit:
    """*old* in one file becomes *new*."""

    path: str
    old: str
    new: str

    def problem(self, root: Path) -> str | None:
        """Say why it cannot be applied to the tree at *root*, if it cannot."""
        try:
            found = len(self._places(root))
        except FileNotFoundError:
            return f"there is no {self.path}"
        if found != 1:
            return f"{self.path} has {found} times {self.old!r}"
        if self.path.endswith(".py"):
            try:
                compile(self.changed(root), self.path, "exec")
            except SyntaxError as error:
                return f"{self.path} would be no Python: {error}"
        return None if self.old != self.new else f"nothing is changed in {self.path}"

    def apply(self, root: Path) -> None:
        """Change the file below *root*."""
        if problem := self.problem(root):
            raise ValueError(problem)
        file = root / self.path
        file.write_text(self.changed(root))
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()

    def changed(self, root: Path) -> str:
        """Return what the file below *root* would be."""
        text, [(start, end)] = (root / self.path).read_text(), self._places(root)
        new = self.new.strip() if self.path.endswith(".sql") else self.new
        return text[:start] + new + text[end:]

    def _places(self, root: Path) -> list[tuple[int, int]]:
        text = (root / self.path).read_text()
        pattern = in_sql(self.old) if self.path.endswith(".sql") else re.escape(self.old)
        return [found.span() for found in re.finditer(pattern, text)]


@dataclass(frozen=True, slots=True)
class Mutant:
    """What it *breaks*, in a sentence, and the test files that should tell, likeliest first."""

    name: str
    breaks: str
    killers: tuple[str, ...]
    edits: tuple[Edit, ...]


def mutant(name: str, breaks: str, killers: str, *edits: Edit) -> Mutant:
    """Make a mutant; *killers* are separated by spaces."""
    return Mutant(name, breaks, tuple(killers.split()), edits)


def sql(part: str, old: str, new: str) -> Edit:
    """Edit a part of the SQL, by its name without the ending."""
    return Edit(f"sql/{part}.sql", old, new)


def client(module: str, old: str, new: str) -> Edit:
    """Edit a module of the Python client, by its path in the package without the ending."""
    return Edit(f"python_client/src/rota/{module}.py", old, new)
