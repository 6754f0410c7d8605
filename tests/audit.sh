#!/bin/sh
# Ask PyPI for known holes in what the client depends on, with all its extras but those of
# development, in the versions that are installed.  An audit that could not be made says so and
# fails with 2, it never passes: `make test`, which works without a network, then skips it.
set -eu
cd "$(dirname "$0")/.."
bin=${BIN:-.venv/bin}
list=$(mktemp)
trap 'rm -f "$list"' EXIT

"$bin/python" - >"$list" <<'END'
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement

found: dict[str, str] = {}
seen = set()
todo = [("rota", frozenset({"binary", "demo", "rich"}))]
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
        if not need.marker or any(need.marker.evaluate({"extra": e}) for e in ("", *extras)):
            todo.append((need.name, frozenset(need.extras)))
del found["rota"]
for name, version in sorted(found.items()):
    print(f"{name}=={version}")
END
[ -s "$list" ] || {
    echo "audit: found no dependency at all" >&2
    exit 1
}
echo "Auditing: $(tr '\n' ' ' <"$list")"
code=0
told=$("$bin/pip-audit" --requirement "$list" --disable-pip --no-deps --strict --timeout 20 2>&1) ||
    code=$?
echo "$told"
case $code:$told in
    0:*) ;;
    *:*" known vulnerabilit"*) exit 1 ;;
    *)
        echo "AUDIT NOT MADE: the index of PyPI did not answer, so nothing is known" >&2
        exit 2
        ;;
esac
