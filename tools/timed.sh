#!/usr/bin/env bash
# Runs a command, prints how long it took, and ends as it ended.
#   tools/timed.sh NAME [VARIABLE=VALUE...] COMMAND...
name=$1
shift
env "$@"
status=$?
echo "$name took $((SECONDS / 60)) min $((SECONDS % 60)) s"
exit $status
