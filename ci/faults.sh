#!/usr/bin/env bash
# Plants every fault of the catalogue, one at a time, and checks that the test named beside it fails (some minutes).
# Arguments choose faults by words of their rules.
source "$(dirname "$0")/tox.sh"

in_harness python impl/tests/mutations/run.py "$@"
