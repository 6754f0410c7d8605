"""Ask PyPI for known holes in what the client depends on, in the versions that are installed.

    audit.py [NAME==VERSION ...]

With all extras but those of development, or of the releases that are named.  Ends with 1 if a
hole is known, and with 2 if PyPI did not answer for all of them: an audit that was not made
never passes.  pip-audit asks for the page of each release.  Some mirrors have only the page of
each project, which tells of the newest release: that answers where it is the one installed.
"""

# ruff: noqa: T201 -- a command talks to its user
from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution
from textwrap import shorten

import requests
from packaging.requirements import Requirement
from packaging.version import Version

# Its command has no switch for another page.
from pip_audit._service import (  # type: ignore[import-untyped]
    PyPIService,
    ResolvedDependency,
    ServiceError,
)

TIMEOUT_S = 20
DEVELOPMENT = {"bench", "lint", "test"}


class Pages(requests.Session):
    """PyPI, with a project's page in place of a page that is missing of its newest release."""

    def get(  # type: ignore[override]
        self, url: str, timeout: int | None = None
    ) -> requests.Response:
        """Get `https://pypi.org/pypi/NAME/VERSION/json`."""
        answer = super().get(url, timeout=timeout)
        if answer.status_code != requests.codes.not_found:
            return answer
        project, version, page = url.rsplit("/", 2)
        newest = super().get(f"{project}/{page}", timeout=timeout)
        is_newest = newest.ok and Version(newest.json()["info"]["version"]) == Version(version)
        return newest if is_newest else answer


def installed() -> dict[str, str]:
    """Return the version of each package that a user of the client gets."""
    found = {}
    seen = set()
    all_extras = distribution("rota").metadata.get_all("Provides-Extra") or []
    todo = [("rota", frozenset(all_extras) - DEVELOPMENT)]
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            package = distribution(name)
        except PackageNotFoundError:  # not for this system, or not installed
            continue
        found[name.lower()] = package.version
        for need in map(Requirement, package.requires or []):
            if not need.marker or any(
                need.marker.evaluate({"extra": e}) for e in ("", *extras)
            ):
                todo.append((need.name, frozenset(need.extras)))
    del found["rota"]
    return found


def audit(releases: dict[str, str]) -> int:
    """Tell of each hole; return what to exit with."""
    service = PyPIService(timeout=TIMEOUT_S)
    service.session = Pages()
    holes, unknown = 0, 0
    for name, version in sorted(releases.items()):
        try:
            answer, known = service.query(ResolvedDependency(name, Version(version)))
        except (ServiceError, requests.RequestException) as error:
            print(f"{name} {version}: not known: {error}")
            unknown += 1
            continue
        if answer.is_skipped():
            print(f"{name} {version}: not known: PyPI has no page of it")
            unknown += 1
        for hole in known:
            fixed = ", ".join(map(str, hole.fix_versions)) or "no version"
            told = shorten(hole.description, 120)
            print(f"{name} {version}: {hole.id}, mended in {fixed}: {told}")
            holes += 1
    print(f"audited {len(releases) - unknown} of {len(releases)} packages: {holes} known holes")
    if holes:
        return 1
    if unknown or not releases:
        print("AUDIT NOT MADE: PyPI did not answer for all", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    named = dict(word.split("==") for word in sys.argv[1:])
    sys.exit(audit(named or installed()))
