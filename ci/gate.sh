#!/usr/bin/env bash
# Runs a matrix and judges it by the reference results of this platform (results/reference/). Exit codes: 0 fine, 1 a cell
# failed, regressed or improved without new reference results, 2 bad input, 3 something could not be compared.
#   bash ci/gate.sh                      matrix gate, as many pairs as the self-test of this platform asks for
#   bash ci/gate.sh --exact              matrix smoke; counts, bytes and predictions only: on any machine
#   MATRIX=planning bash ci/gate.sh      another matrix
# Other arguments go to `python -m bench gate`.
source "$(dirname "$0")/tox.sh"

matrix=gate pairs=auto
[[ " $* " == *" --exact "* ]] && matrix=smoke pairs=3
in_harness bash -euc '
    out="results/runs/gate-$$"
    python -m bench run --matrix "$1" --pairs "$2" --out "$out"
    python -m bench gate "$out"/* "${@:3}"
' gate "${MATRIX:-$matrix}" "$pairs" "$@"
