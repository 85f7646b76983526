#!/usr/bin/env bash
# bash launch/env.sh [COMMAND ARGUMENT...]: runs a command inside gyre's environment, building it if it is missing.
# Without a command it builds what is missing and prints where the environment lies.

source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

enter_environment
if (($# == 0)); then
    printf '%s\n' "$ENVIRONMENT"
    exit
fi
exec "$@"
