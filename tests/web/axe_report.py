"""What axe says of each screen, at both widths, dark and light: ``make web-report``.

One line a screen: how many rules it keeps, and how many it breaks by how bad that is.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import psycopg
from playwright.sync_api import sync_playwright

from rota.testing.server import EmbeddedPostgres, memory
from rota.web import app
from web.conftest import serving
from web.sample_jobs import set_scene
from web.test_browser import AXE, CHROMIUM, FLAGS, PHONE, WIDE, screens

ROOT = Path(__file__).resolve().parents[2]
IMPACTS = ("critical", "serious", "moderate", "minor")
FOUND = """
    () => axe.run(document).then(r => ({
        version: r.testEngine.version, kept: r.passes.map(p => p.id),
        broken: r.violations.map(v => [v.impact, v.id])}))
    """


def main() -> int:
    """Print the report; return 1 if anything serious is found."""
    totals: Counter[str] = Counter()
    with EmbeddedPostgres(directory=memory()) as server:
        url = server.url()
        install = ["psql", "-X", "-q", "-d", url, "-f", str(ROOT / "sql" / "install.sql")]
        subprocess.run(install, check=True)
        with psycopg.connect(url, autocommit=True) as db:
            scene = set_scene(db)
        with serving(app(url, allow_acts=True)) as address, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            for path in screens(scene):
                kept: set[str] = set()
                broken: Counter[tuple[str, str]] = Counter()
                for size in (WIDE, PHONE):
                    for colors in ("light", "dark"):
                        page = browser.new_page(
                            viewport=size,  # type: ignore[arg-type]
                            color_scheme=colors,  # type: ignore[arg-type]
                        )
                        page.goto(address + path)
                        page.evaluate(
                            "document.querySelectorAll('details')"
                            ".forEach(d => { d.open = true; })"
                        )
                        page.evaluate(AXE)
                        found = page.evaluate(FOUND)
                        kept |= set(found["kept"])
                        broken.update(map(tuple, found["broken"]))
                        page.close()
                told = ", ".join(
                    f"{impact} {rule} ({times} of 4)"
                    for (impact, rule), times in sorted(broken.items())
                )
                totals.update(impact for impact, _ in broken)
                say(f"{path:44} {len(kept):3} rules kept; {told or 'none broken'}")
            browser.close()
    counts = ", ".join(f"{totals[impact]} {impact}" for impact in IMPACTS)
    say(f"axe {found['version']}, 1280 and 390 px, light and dark: {counts}")
    return 1 if totals["critical"] + totals["serious"] else 0


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
