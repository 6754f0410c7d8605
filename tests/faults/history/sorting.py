"""Bring together what belongs together, however much there is of it.

Items are dealt into files by their key, and each file is then read as a whole: so the memory is
that of one file, and the time is that of writing and reading everything once.  What is little
needs no files.
"""

from __future__ import annotations

import marshal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

FILES = 64
TOGETHER = 500


class Sorter:
    """Items by key; what marshal can write, which is much faster than anything else."""

    def __init__(self, folder: Path, name: str) -> None:
        self._paths = [folder / f"{name}-{number}" for number in range(FILES)]
        self._parts: list[list[Any]] = [[] for _ in range(FILES)]
        self._files: list[BinaryIO] = []

    def add(self, key: int | str, item: Any) -> None:
        """Deal out an item."""
        number = hash(key) % FILES
        part = self._parts[number]
        part.append((key, item))
        if len(part) == TOGETHER:
            self._write(number)

    def groups(self) -> Iterator[tuple[Any, list[Any]]]:
        """Yield every key with its items, in the order in which they were added."""
        for number, part in enumerate(self._parts):
            if self._files and part:
                self._write(number)
        for number, part in enumerate(self._parts):
            found: defaultdict[Any, list[Any]] = defaultdict(list)
            for key, item in self._read(number) if self._files else part:
                found[key].append(item)
            yield from found.items()

    def _read(self, number: int) -> Iterator[tuple[Any, Any]]:
        self._files[number].close()
        with self._paths[number].open("rb") as file:
            while file.peek(1):
                yield from marshal.load(file)

    def _write(self, number: int) -> None:
        if not self._files:
            self._files = [path.open("wb") for path in self._paths]
        marshal.dump(self._parts[number], self._files[number])
        self._parts[number].clear()
