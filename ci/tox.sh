# Sourced by the other scripts: makes a virtual environment with tox in it, once, and runs a command in the harness
# environment that tox keeps. Nothing is installed into the system's Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || {
    echo "error: $python is $("$python" --version 2>&1): Python 3.11 to 3.13 is needed; name one with PYTHON=..." >&2
    exit 2
}
if [ ! -x .venv/bin/tox ]; then
    "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check 'tox>=4.23'
fi

[ -d .tox/harness ] || echo "Installing torch, megatron-core and the harness into .tox/ (once, some minutes) ..." >&2

in_harness() {
    .venv/bin/tox run -qq -e harness -- "$@"
}
