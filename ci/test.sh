#!/usr/bin/env bash
# Installs what is needed and checks everything: lint, format, types, tests. Arguments go to pytest.
#   bash ci/test.sh                     everything
#   bash ci/test.sh impl/tests -k pack  some tests only (lint and types still run)
source "$(dirname "$0")/tox.sh"

bash ci/lint.sh
in_harness pytest "$@"
