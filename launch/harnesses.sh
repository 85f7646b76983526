#!/usr/bin/env bash
# bash launch/harnesses.sh [NAME...]: installs agent programs from the npm registry into the cache beside the
# environment, once; all of them when none is named. docs/harnesses.md lists them. Ends with 3 when the registry is
# out of reach.

source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

enter_environment
cd "$CHECKOUT"
exec python -m gyre.harness.install "$@"
