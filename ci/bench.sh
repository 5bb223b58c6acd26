#!/usr/bin/env bash
# Installs what is needed and runs the main job: the smoke matrix, naive side against optimised side, on this machine.
# Arguments go to `python -m bench run`, e.g. --suite throughput, --lengths FILE, --matrix NAME.
source "$(dirname "$0")/tox.sh"

in_harness python -m bench run "$@"
