#!/usr/bin/env bash
# Makes a virtual environment with torch and the build tools, and installs the system packages that are missing.
# Does nothing, and quickly, when all is there.
#   tools/setup.sh VENV TORCH_VERSION [clang|docs|browser]     (PYTHON: the Python to make VENV with)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 torch=$2 part=${3:-}
python=${PYTHON:-python3}

say() { echo "brimful set-up: $*" >&2; }
fail() { say "$@"; exit 1; }

missing=()
need() { # need PACKAGE COMMAND...: the system package is missing unless the command succeeds
  local package=$1
  shift
  "$@" >/dev/null 2>&1 || missing+=("$package")
}

# 1. The stamp holds what the environment was made for; without a matching one it is made, or brought up to date.
stamp="$venv/brimful-setup"
key="$torch $(cat "$0" tools/requirements.txt | cksum)"
fresh=no
if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && "$venv/bin/python" -c '' 2>/dev/null &&
  compgen -G "$venv/lib/python3*/site-packages/torch-$torch[.+]*dist-info" >/dev/null; then
  fresh=yes
fi

# 2. System packages.
if [ $fresh = no ] && [ ! -x "$venv/bin/python" ]; then
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python is not Python 3.11 or newer; name one that is, such as: make PYTHON=python3.11"
  need python3-venv "$python" -c 'import ensurepip'
  need python3-dev "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")'
fi
need catch2 test -e /usr/include/catch2/catch.hpp
need nlohmann-json3-dev test -e /usr/include/nlohmann/json.hpp
need libgloo-dev test -e /usr/include/gloo/rendezvous/store.h
need ccache command -v ccache
need dataset-fashion-mnist test -e /usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz
case $part in
  clang) need clang command -v clang++ ;;
  docs) need doxygen command -v doxygen ;;
  browser) need chromium command -v chromium ;;
esac
if [ ${#missing[@]} -gt 0 ]; then
  root=()
  if [ "$(id -u)" != 0 ]; then
    root=(sudo -n)
  fi
  if ! command -v apt-get >/dev/null || ! "${root[@]}" true 2>/dev/null; then
    fail "these system packages are missing, and installing them needs root: ${missing[*]}"
  fi
  say "installing ${missing[*]}"
  "${root[@]}" apt-get update -qq
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi

pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

# What writes the documentation is in a folder that only `make docs` looks at.
install_docs() {
  [ "$part" = docs ] || return 0
  local wanted
  wanted=$(cksum <tools/requirements-docs.txt)
  [ "$(cat "$venv/docs/stamp" 2>/dev/null)" != "$wanted" ] || return 0
  say "installing sphinx in $venv/docs"
  rm -rf "$venv/docs"
  pip install --target "$venv/docs" -r tools/requirements-docs.txt
  echo "$wanted" >"$venv/docs/stamp"
}
if [ $fresh = yes ]; then
  install_docs
  exit
fi

# 3. The environment.
say "installing torch $torch and the build tools in $venv (some minutes the first time)"
"$venv/bin/python" -c '' 2>/dev/null || "$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check install "torch==$torch" -r tools/requirements.txt

# The CUDA headers that torch pulls in are incomplete: what they lack depends on the torch. Where neither a toolkit nor pip has
# it, brimful is built without its CUDA sources.
ask=$(mktemp -d)
"$venv/bin/cmake" -S cmake/ask -B "$ask" -G Ninja -DCMAKE_MAKE_PROGRAM="$(realpath "$venv")/bin/ninja" \
  -DPython_EXECUTABLE="$(realpath "$venv")/bin/python" -DBRIMFUL_CUDA=AUTO >/dev/null
if [ -s "$ask/answers/cuda_packages" ]; then
  pip install --no-deps -r "$ask/answers/cuda_packages" || say "$(cat "$ask/answers/cuda_warning")"
fi
rm -r "$ask"
echo "$key" >"$stamp"
install_docs
