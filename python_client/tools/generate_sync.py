"""Write the sync client from the async one.

python tools/generate_sync.py            write src/rota/client/sync_client.py
python tools/generate_sync.py --check    exit 1 if it is not fresh
"""

import re
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "rota" / "client"
SOURCE = PACKAGE / "async_client.py"
TARGET = PACKAGE / "sync_client.py"
NOTE = "# Written by tools/generate_sync.py from async_client.py: change that file instead.\n"
REPLACEMENTS = (
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAsync(Client|Connection|Cursor|Caller)\b", r"\1"),
    (r"\badapt_async\b", "adapt"),
    (r"\bimport asyncio\n", ""),
    (r"\basyncio\.sleep\b", "time.sleep"),
)


def to_sync(source: str) -> str:
    """Return the sync form of async source text."""
    for pattern, replacement in REPLACEMENTS:
        source = re.sub(pattern, replacement, source)
    return NOTE + source


def main(argv: list[str]) -> int:
    """Write the file, or check it; return the exit code."""
    fresh = to_sync(SOURCE.read_text())
    if "--check" in argv:
        if TARGET.is_file() and TARGET.read_text() == fresh:
            return 0
        print(f"{TARGET} is not fresh: run {Path(__file__).name}", file=sys.stderr)
        return 1
    TARGET.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
