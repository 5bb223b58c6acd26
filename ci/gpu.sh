#!/usr/bin/env bash
# Weighs everything that GPUs show with what pip gives (no TransformerEngine), within a time, and judges it by the
# reference results of the platform. Prints a short table last; `python -m bench report` reads the records anywhere.
#   bash ci/gpu.sh                              matrix h200x1: one GPU, 8 minutes
#   MATRIX=h100x8 BUDGET=2400 bash ci/gpu.sh    eight GPUs, 40 minutes (seconds, from when everything is installed)
#   bash ci/gpu.sh --dry-run                    only shows the cells; needs no GPU
#   DEVICE=cpu MATRIX=smoke bash ci/gpu.sh      tries this script without one
# Other arguments go to `python -m bench run`, e.g. --only parity. RUNS=folder gets the run instead of results/runs.
#
# Where there is no network: HARNESS_PYTHON=python3 names an interpreter with torch for CUDA, and WHEELS=folder holds as
# wheels what it lacks; nothing is fetched, and nothing is installed into that interpreter. ci/gpu-wheels.txt says how.
#
# Exit codes: 0 fine, 1 a cell failed or the run regressed, 2 bad input or no GPU, 3 cells did not run in time. Without
# reference results of the platform nothing is judged, which is no failure.
set -euo pipefail

fail() {
    echo "error: $1" >&2
    exit 2
}
[ -z "${WHEELS:-}" ] || [ -n "${HARNESS_PYTHON:-}" ] ||
    fail "WHEELS=$WHEELS: also name the interpreter that they are for: HARNESS_PYTHON=python3"

source "$(dirname "$0")/tox.sh"

matrix="${MATRIX:-h200x1}" budget="${BUDGET:-480}" device="${DEVICE:-cuda}"
# What pages, judging and the table need after the run.
reserve=60
[[ "$budget" =~ ^[0-9]+$ && "$budget" -gt "$reserve" ]] ||
    fail "BUDGET=$budget: give whole seconds, more than the $reserve that judging takes"

if [ -n "${WHEELS:-}" ]; then
    compgen -G "$WHEELS/*.whl" >/dev/null || fail "WHEELS=$WHEELS: holds no wheels: see ci/gpu-wheels.txt"
    site="$(mktemp -d)"
    trap 'rm -rf "$site"' EXIT
    in_harness python -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
        --find-links "$WHEELS" --target "$site" "$WHEELS"/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi

if [[ " $* " == *" --dry-run "* ]]; then
    in_harness python -m bench run --matrix "$matrix" "$@"
    exit
fi
[ "$device" = cpu ] || [ "$(in_harness python -c 'import torch; print(torch.cuda.is_available())')" = True ] ||
    fail "torch finds no GPU here, which matrix $matrix needs: run this where nvidia-smi shows one, or add --dry-run"

out="${RUNS:-results/runs}/$(basename "$matrix" .toml)-$(date -u +%Y%m%dT%H%M%SZ)"
in_harness bash -uc '
    matrix="$1" device="$2" budget="$3" out="$4" code=0 judged=0
    python -m bench run --matrix "$matrix" --device "$device" --time-budget "$budget" --out "$out" "${@:5}" || code=$?
    case "$code" in 0 | 1 | 3) ;; *) exit "$code" ;; esac
    said="$(python -m bench gate "$out"/*)" || judged=$?
    echo "$said"
    case "$judged" in 0 | 3) ;; *) code="$judged" ;; esac
    # The verdict belongs at the head of the page, which the run has written without it.
    [[ "$said" != "reference results: "* ]] || python -m bench report "$out"/* --against results/reference >/dev/null || true
    python ci/short_table.py "$out"/*
    exit "$code"
' gpu "$matrix" "$device" "$((budget - reserve))s" "$out" "$@"
