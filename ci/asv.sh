#!/usr/bin/env bash
# asv on the last two commits: checks the benchmarks, measures both in turns in environments of their own (installed with
# the constraints of ci/), and writes the pages (results/runs/asv/html). Exit code 1: something got slower by more than
# asv's factor. Arguments go to `asv continuous`, e.g. -b Planning. STEELYARD_BENCH_PROFILE=smoke|regular|full chooses the
# sizes.
source "$(dirname "$0")/tox.sh"

in_harness bash -euc '
    config="--config bench/asv.conf.json"
    asv machine $config --yes
    asv check $config -E existing:same
    asv continuous $config --interleave-rounds HEAD~1 HEAD "$@" || code=$?
    asv publish $config
    exit "${code:-0}"
' asv "$@"
