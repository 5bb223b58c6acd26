#!/usr/bin/env bash
# Lint, format and types: what ci/test.sh does before the tests.
source "$(dirname "$0")/tox.sh"

in_harness bash -c 'ruff check . && ruff format --check . && mypy'
