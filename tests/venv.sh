#!/bin/sh
# Make the virtual environment that the Makefile uses:  venv.sh DIRECTORY EXTRA[,EXTRA]
set -eu
directory=$1 extras=$2
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

lacks() {
    echo "make needs $1; on Debian and Ubuntu: apt install $2" >&2
    exit 1
}
command -v "$python" >/dev/null || lacks "Python 3.11 or newer" "python3 python3-venv"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || lacks "Python 3.11 or newer" python3
"$python" -c 'import ensurepip, venv' 2>/dev/null || lacks "Python's venv module" python3-venv

[ -x "$directory/bin/python" ] || "$python" -m venv "$directory"
"$directory/bin/python" -m pip install --quiet --disable-pip-version-check \
    --editable "./python_client[$extras]"
