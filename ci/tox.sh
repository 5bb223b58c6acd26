# Sourced by the other scripts: defines in_harness, which runs a command in the harness environment. tox makes and keeps
# that one, and a virtual environment holds tox; nothing is installed into the system's Python. HARNESS_PYTHON=... names
# an interpreter that has everything already: then nothing is installed at all, and this checkout comes before what is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -n "${HARNESS_PYTHON:-}" ]; then
    harness="$(command -v "$HARNESS_PYTHON")" || {
        echo "error: HARNESS_PYTHON=$HARNESS_PYTHON is no program: name a Python that has what the harness needs" >&2
        exit 2
    }
    harness="$(cd "$(dirname "$harness")" && pwd)"
    in_harness() {
        env PATH="$harness:$PATH" PYTHONPATH="$PWD/impl:$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 "$@"
    }
    return
fi

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
    # tox makes the environment and keeps it; the command runs beside tox, which would join its lines into one.
    .venv/bin/tox run -qq -e harness -- bash -c : || return
    env PATH="$PWD/.tox/harness/bin:$PATH" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONIOENCODING=utf-8 \
        OMP_NUM_THREADS=1 "$@"
}
