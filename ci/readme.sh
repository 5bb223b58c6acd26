#!/usr/bin/env bash
# Runs every command of README.md's code blocks in a fresh clone, but for the slow ones, and prints which passed.
#   bash ci/readme.sh                      installs an environment in the clone, as a reader would
#   bash ci/readme.sh --env .tox/harness   takes one that is there
#   bash ci/readme.sh --all                the slow ones too
# The head of ci/readme.py says how a block of README.md is marked.
source "$(dirname "$0")/tox.sh"

in_harness python ci/readme.py "$@"
