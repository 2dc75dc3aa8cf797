#!/usr/bin/env bash
# Makes VENV-integrations with what tests/integrations needs; the packages of VENV are seen there, and stay as they are.
#   tools/setup_integrations.sh VENV
set -euo pipefail
cd "$(dirname "$0")/.."
base=$1 venv=$1-integrations
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

key="$(cat "$0" tools/requirements-integrations.txt "$base/brimful-setup" | cksum)"
[ "$(cat "$venv/brimful-setup" 2>/dev/null)" != "$key" ] || exit 0

echo "brimful set-up: installing $(grep -v '^#' tools/requirements-integrations.txt | xargs) in $venv" >&2
"$base/bin/python" -m venv --clear "$venv"
echo "import site; site.addsitedir('$(packages "$base")')" >"$(packages "$venv")/brimful-base.pth"
"$base/bin/python" -m pip list --format freeze --disable-pip-version-check |
  grep -v -e '^pip=' -e '^brimful=' >"$venv/constraints.txt"
# Compiling all of it would take as long as the rest: Python compiles what is imported.
"$venv/bin/python" -m pip --quiet --disable-pip-version-check install --no-compile \
  -c "$venv/constraints.txt" -r tools/requirements-integrations.txt
echo "$key" >"$venv/brimful-setup"
