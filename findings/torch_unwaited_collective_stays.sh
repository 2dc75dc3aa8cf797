#!/usr/bin/env bash
# torch 2.15.0: the result of a functional collective that no one waits for is never freed, though its last reference is gone.
#
# torch.distributed._functional_collectives, DTensor and tensor parallelism make their collectives through it. The collective returns
# a tensor at once, and a table of the process keeps the work until wait_tensor() is called for that tensor. If an exception
# passes between the two, as an out-of-memory error in the layer does that would have used the result, the tensor is gone and
# nothing can wait for it any more; the work stays in the table, and with it the result's memory. Each attempt that fails there
# keeps as much again: whoever catches the error, frees all he has and tries once more has less memory than before. Only at the
# process's end does torch warn of collectives that were not waited for. One rank, without a GPU.
#
#   findings/torch_unwaited_collective_stays.sh       (Linux x86-64; python3 with pip; downloads torch and what it needs)
#
# It printed, with Python 3.11:
#   torch 2.15.0+cu132
#   three attempts that fail after the wait keep 0 works, less than one result: True
#   three attempts that fail before it keep 3 works, at least two results: True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --target "$work" torch==2.15.0
cat >"$work/program.py" <<'PY'
import gc
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

RESULT_BYTES = 256 << 20
changed = False


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def attempt(values, waits):
    total = functional.all_reduce(values, "sum", dist.group.WORLD)
    if waits:
        total = functional.wait_tensor(total)
    raise MemoryError("the layer that would have used it has no room")


def works_of_three(values, waits):
    before = resident_bytes()
    for _ in range(3):
        try:
            attempt(values, waits)
        except MemoryError:
            pass
    gc.collect()
    return torch._C._distributed_c10d._get_work_registry_size(), resident_bytes() - before


def expect(what, wanted, found):
    global changed
    print(f"{what}: {found}")
    if found != wanted:
        changed = True
        print(f"  changed: it was {wanted}")


print("torch", torch.__version__)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
values = torch.ones(RESULT_BYTES // 4)
attempts = "three attempts that fail"
works, more_bytes = works_of_three(values, waits=True)
expect(f"{attempts} after the wait keep {works} works, less than one result", True, works == 0 and more_bytes < RESULT_BYTES)
works, more_bytes = works_of_three(values, waits=False)
expect(f"{attempts} before it keep {works} works, at least two results", True, works == 3 and more_bytes >= 2 * RESULT_BYTES)
sys.stdout.flush()
os._exit(changed)
PY
PYTHONPATH="$work" python3 -W ignore "$work/program.py"
