#!/usr/bin/env bash
# Asks a GPU all that is open, in a quarter of an hour: tools/gpu/ask.sh OUT [--minutes 10] [--only ddp]
# PYTHON is one that has torch for that GPU, pytest, pytest-timeout and NumPy; brimful is what it imports, else a wheel of
# dist/ for it, else built from the source. No network is needed.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,4s/^# //p' "$0"; exit 2; }
out=$(realpath -m "$1")
shift
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" -m tools.gpu.ask "$out" "$@"
