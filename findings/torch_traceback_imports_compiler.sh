#!/usr/bin/env bash
# torch 2.11.0 for Linux: the first traceback that torch puts into words imports torch's compiler, and Triton and SymPy with it.
#
# torch records tracebacks cheaply (pointers to frames) and puts them into words later. That step asks torch._inductor
# for frames of compiled code, by an attribute of the module torch that is loaded when it is first asked for. So
# CapturedTraceback.summary(), and torch.cuda.memory._snapshot() with a history, import some 900 modules in a program that compiles
# nothing: two seconds and more than 100 MB of the host, the first time, which is when somebody asks where memory went. Nor does a
# later version do without it (2.15.0). No GPU is needed to see it.
#
#   findings/torch_traceback_imports_compiler.sh       (Linux x86-64; python3 with pip; downloads torch and what it needs)
#
# It printed, with Python 3.11 on two cores of an AMD EPYC:
#   torch 2.11.0+cu130
#   modules before, of the compiler: 0
#   modules after, of the compiler, Triton and SymPy: all three
#   modules more: over 800
#   resident MB more: over 60
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --target "$work" torch==2.11.0
cd "$work"
cat >program.py <<'PY'
import sys

import torch
from torch.utils._traceback import CapturedTraceback


def resident_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) // 1024


def there():
    return [name for name in ("torch._inductor", "triton", "sympy") if name in sys.modules]


print("torch", torch.__version__)
failed = False


def expect(what, wanted, found):
    global failed
    print(f"{what}: {found}")
    if found != wanted:
        failed = True
        print(f"  changed: it was {wanted}")


modules, memory = len(sys.modules), resident_mb()
expect("modules before, of the compiler", 0, len(there()))
recorded = CapturedTraceback.extract()
expect("modules of the compiler after a traceback is recorded", 0, len(there()))
recorded.summary()
expect("modules after, of the compiler, Triton and SymPy", "all three", "all three" if len(there()) == 3 else there())
more = len(sys.modules) - modules
expect("modules more", "over 800", "over 800" if more > 800 else more)
more = resident_mb() - memory
expect("resident MB more", "over 60", "over 60" if more > 60 else more)
sys.exit(failed)
PY
PYTHONPATH="$work" python3 -W ignore program.py
