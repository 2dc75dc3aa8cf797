#!/usr/bin/env bash
# torch 2.15.0, gloo: a wait for a message that gives up ends the connection to its sender, for the whole process group.
#
# Work.wait(timeout) of dist.irecv looks like a question that may be asked again: nothing has come so far, a later wait may have
# it. gloo takes the end of that wait for an application that is stuck, and closes the pair of sockets. The sender, which is well
# and not late by the group's timeout, is informed that its peer has closed the connection, "typically caused by a remote worker
# crashing"; a later wait for the same message, and every collective of the group, fails on both ranks. The same wait for
# dist.all_reduce(async_op=True) gives up without harm. Two ranks on one machine, without a GPU.
#
#   findings/gloo_short_wait_ends_the_connection.sh       (Linux x86-64; python3 with pip; downloads torch and what it needs)
#
# It printed, with Python 3.11 (the ranks' lines as they come):
#   torch 2.15.0+cu132
#   all_reduce, a wait of 100 ms: RuntimeError, another wait: done
#   irecv, a wait of 100 ms: Timed out
#   send of the sender: Connection closed by peer
#   barrier of the sender: fails
#   irecv, another wait: Application timeout caused pair closure
#   barrier of the receiver: fails
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --target "$work" torch==2.15.0
cd "$work"
cat >program.py <<'PY'
import datetime
import sys
import time

import torch
import torch.distributed as dist

SHORT = datetime.timedelta(milliseconds=100)
rank = int(sys.argv[1])
failed = False


def expect(what, wanted, found):
    global failed
    ok = wanted in found
    print(f"{what}: {wanted if ok else found}", flush=True)
    if not ok:
        failed = True
        print(f"  changed: it was {wanted}", flush=True)


def error_of(call):
    try:
        call()
    except RuntimeError as error:
        return str(error) or "RuntimeError"
    return "done"


dist.init_process_group(
    "gloo",
    init_method=f"file://{sys.argv[2]}/store",
    rank=rank,
    world_size=2,
    timeout=datetime.timedelta(seconds=30),
)
numbers = torch.zeros(4)
if rank == 0:
    print("torch", torch.__version__, flush=True)
    summing = dist.all_reduce(numbers, async_op=True)
    first = "RuntimeError" if error_of(lambda: summing.wait(SHORT)) != "done" else "done"
    found = f"{first}, another wait: {error_of(summing.wait)}"
    expect("all_reduce, a wait of 100 ms", "RuntimeError, another wait: done", found)
    coming = dist.irecv(numbers, src=1)
    expect("irecv, a wait of 100 ms", "Timed out", error_of(lambda: coming.wait(SHORT)))
    time.sleep(2)
    text = "Application timeout caused pair closure"
    expect("irecv, another wait", text, error_of(coming.wait))
    barrier = "fails" if error_of(dist.barrier) != "done" else "passes"
    expect("barrier of the receiver", "fails", barrier)
else:
    time.sleep(1)
    dist.all_reduce(numbers)
    time.sleep(1)
    expect("send of the sender", "Connection closed by peer", error_of(lambda: dist.send(numbers, dst=0)))
    barrier = "fails" if error_of(dist.barrier) != "done" else "passes"
    expect("barrier of the sender", "fails", barrier)
sys.exit(failed)
PY
export PYTHONPATH="$work"
python3 -W ignore program.py 0 "$work" &
changed=0
python3 -W ignore program.py 1 "$work" || changed=1
wait $! || changed=1
exit $changed
