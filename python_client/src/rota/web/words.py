"""The words of the page, which are all in one file: words.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

WORDS: dict[str, str] = tomllib.loads(Path(__file__).with_name("words.toml").read_text())
