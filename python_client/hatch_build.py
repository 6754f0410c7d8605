"""Take the SQL parts into the wheel and into the source distribution.

They live beside this folder in the repository (``../sql``) and inside it in an unpacked
source distribution (``./sql``).
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SqlHook(BuildHookInterface):  # type: ignore[type-arg]
    """Add the folder of SQL parts to what is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Map the folder to ``rota/sql`` in a wheel and to ``sql`` in a source distribution."""
        if version == "editable":
            return
        root = Path(self.root)
        source = next(p for p in (root / "sql", root.parent / "sql") if p.is_dir())
        target = "rota/sql" if self.target_name == "wheel" else "sql"
        build_data["force_include"][str(source)] = target
