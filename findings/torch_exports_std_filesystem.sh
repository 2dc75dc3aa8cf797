#!/usr/bin/env bash
# torch 2.11.0 for Linux: libtorch.so exports std::filesystem's functions, and a C++ program that names torch's libraries
# before libstdc++, as CMake does, is bound to these. Its remove_all calls a function that no library has.
#
# From PyPI: torch 2.11.0, 530 MB, without the packages that it needs. No program is run: the dynamic linker only says
# what it would bind (as `ldd -r` does), since a call of that remove_all on a folder jumps to the address 0.
# torch 2.12.1, 2.13.0, 2.14.1 and 2.15.0 export none of them from libtorch.so, and 114 from libtorch_cpu.so too, whose
# remove_all works in 2.15.0.
#
#   findings/torch_exports_std_filesystem.sh       (x86-64; python3 with pip, g++, binutils)
#
# It printed, with g++ 12.2 of Debian 12:
#   torch 2.11.0+cu130
#   strong symbols of std::filesystem in libtorch.so: 64
#   strong symbols of std::filesystem in libtorch_cpu.so: 114
#   weak reference of libtorch.so to the function that erases an entry: 1
#   libraries of torch, or libstdc++, that have it: 0
#   torch before libstdc++: exists and remove_all are those of: libtorch.so libtorch.so
#   libstdc++ before torch: exists and remove_all are those of: libstdc++.so.6 libstdc++.so.6
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-deps --target "$work" torch==2.11.0
lib=$work/torch/lib
cd "$work"

changed=0
# expect WHAT WANTED FOUND: prints what was found; another than what is wanted is a change.
expect() {
  echo "$1: $3"
  [ "$2" = "$3" ] || { echo "  changed: it was $2"; changed=1; }
}
count() { grep -c "$@" || true; }
fs=_ZNSt10filesystem
remove_all=${fs}10remove_allERKNS_7__cxx114pathE
exists=${fs}6statusERKNS_7__cxx114pathE # which exists() calls
erase=${fs}7__cxx1128recursive_directory_iterator7__eraseEPSt10error_code

echo "torch $(sed -n "s/^__version__ = '\(.*\)'/\1/p" torch/version.py)"
for name in libtorch.so:64 libtorch_cpu.so:114; do
  strong=$(nm -DC --defined-only "$lib/${name%:*}" | count ' T std::filesystem::')
  expect "strong symbols of std::filesystem in ${name%:*}" "${name#*:}" "$strong"
done
expect "weak reference of libtorch.so to the function that erases an entry" 1 "$(nm -D "$lib/libtorch.so" | count " w $erase\$")"
defining=$(nm -D --defined-only "$lib"/*.so "$(g++ -print-file-name=libstdc++.so.6)" 2>/dev/null | count " $erase\\b")
expect "libraries of torch, or libstdc++, that have it" 0 "$defining"

cat >program.cpp <<'CPP'
#include <filesystem>
int main(int, char** argv) {
  return std::filesystem::exists(argv[1]) ? static_cast<int>(std::filesystem::remove_all(argv[1])) : 0;
}
CPP
g++ -std=c++17 -c program.cpp

# bound NAME LIBRARY...: links the program with these, in this order, and says what its two calls are bound to.
bound() {
  local name=$1
  shift
  g++ program.o -o "$name" -Wl,--no-as-needed "$@" -Wl,--unresolved-symbols=ignore-in-shared-libs -Wl,-rpath,"$lib"
  # The dynamic linker lists and binds, and does not start it. Libraries of packages that were left out are missing.
  env LD_TRACE_LOADED_OBJECTS=1 LD_WARN=yes LD_BIND_NOW=yes LD_DEBUG=bindings LD_DEBUG_OUTPUT="$work/log" \
    "./$name" >/dev/null 2>&1 || true
  local symbol to=()
  for symbol in "$exists" "$remove_all"; do
    to+=("$(sed -n "s#.*binding file ./$name \[0\] to \([^ ]*\) .*\`$symbol'.*#\1#p" log.* | head -n 1)")
  done
  rm log.*
  basename -a "${to[@]}" | paste -s -d ' '
}
torch=("$lib/libtorch.so" "$lib/libtorch_cpu.so" "$lib/libc10.so")
expect "torch before libstdc++: exists and remove_all are those of" "libtorch.so libtorch.so" "$(bound torch_first "${torch[@]}")"
expect "libstdc++ before torch: exists and remove_all are those of" "libstdc++.so.6 libstdc++.so.6" \
  "$(bound standard_first -lstdc++ "${torch[@]}")"
exit $changed
