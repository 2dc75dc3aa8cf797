"""What a step calls of the CUDA runtime, on a simulated device: python -m benchmarks.cuda.call_counts CASE WRAPPER

One wrapper in a process of its own, alone over NCCL with all its collectives, or `--ranks 2`; a plain loop, or
`--sizer`. Prints a line of JSON: calls a step, by function.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from tools.gpu import racer
from tools.gpu.device import alone_over_nccl
from torch import nn

#: Functions in which the host waits for the device; "pageable" counts copies of memory that is not pinned.
WAITS = (
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaDeviceSynchronize",
    "cudaMemcpy",
    "cudaMemset",
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "cudaFreeHost",
    "pageable",
)
#: Functions that put work into a stream. "operator": without kernels of its own, on a device with arithmetic.
LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
    "operator",
)
OTHERS = (
    "cudaEventRecord",
    "cudaEventRecordWithFlags",
    "cudaEventQuery",
    "cudaEventCreate",
    "cudaEventCreateWithFlags",
    "cudaEventDestroy",
    "cudaStreamWaitEvent",
    "cudaStreamQuery",
    "cudaStreamIsCapturing",
    "cudaStreamGetCaptureInfo",
    "cudaStreamGetCaptureInfo_v2",
    "cudaStreamGetCaptureInfo_v3",
    "cudaThreadExchangeStreamCaptureMode",
    "cudaPointerGetAttributes",
    "cudaGetDevice",
    "cudaSetDevice",
)
SETTLED = 12  # steps, in which bucket plans are tried and events made


def counter() -> Callable[[], dict[str, int]]:
    """Calls of each function so far."""
    calls = ctypes.CDLL(None).sim_cuda_calls
    calls.restype = ctypes.c_long
    return lambda: {name: calls(name.encode()) for name in (*WAITS, *LAUNCHES, *OTHERS)}


def collectives() -> int:
    """Of the default group so far, as its backend numbers them."""
    number: int = dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()
    return number


def sizer_step(case: racer.Case, wrapper: str, weighs: bool) -> racer.Step:
    """As `racer.make_step`, with the step of a sizer that has room. `weighs`: rows are counted on the device."""
    import brimful

    torch.manual_seed(0)
    module, x = case.make().cuda(), case.batch().cuda()
    model = racer.WRAPPERS[wrapper](module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    sizer = brimful.BatchSizer(model, optimizer)

    labels = torch.arange(len(x)).cuda()  # integers, which a device without arithmetic knows

    def weighed(net: nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return case.loss(net, rows), (labels >= 0).sum()

    def step() -> None:
        sizer.step(x, weighed if weighs else case.loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def counts(args: argparse.Namespace) -> dict[str, float]:
    """Calls a step, by function."""
    small = args.case.startswith("small ")
    case = racer.SMALL_CASES[args.case[6:]] if small else racer.CASES[args.case]
    if args.sizer:
        step = sizer_step(case, args.wrapper, args.weights)
    else:
        _, step = racer.make_step(case, args.wrapper)
    steps: int = args.steps
    for _ in range(SETTLED):
        step()
    torch.cuda.synchronize()
    so_far = counter()
    before, issued = so_far(), collectives()
    for _ in range(steps):
        step()
    after, made = so_far(), collectives() - issued
    calls = {name: (number - before[name]) / steps for name, number in after.items()}
    return {
        **{name: number for name, number in calls.items() if number},
        "collectives": made / steps,
    }


def in_group(args: argparse.Namespace) -> None:
    """As one of several ranks, each on its own device."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(args.rank)
    store = dist.FileStore(args.store, args.ranks)
    dist.init_process_group("nccl", store=store, rank=args.rank, world_size=args.ranks)
    found = counts(args)
    torch.cuda.synchronize()
    dist.barrier()
    if args.rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def spawn(ranks: int) -> int:
    """This program once for each rank; the worst status."""
    with tempfile.TemporaryDirectory() as folder:
        own = [sys.executable, "-m", "benchmarks.cuda.call_counts", *sys.argv[1:]]
        ends = [
            subprocess.Popen([*own, "--rank", str(rank), "--store", f"{folder}/store"])
            for rank in range(ranks)
        ]
        return max(abs(end.wait()) for end in ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    cases = (*racer.CASES, *(f"small {name}" for name in racer.SMALL_CASES))
    parser.add_argument("case", choices=cases)
    parser.add_argument("wrapper", choices=racer.WRAPPERS)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--sizer", action="store_true")
    parser.add_argument("--weights", action="store_true", help="of the sizer's rows, on the device")
    args = parser.parse_args()
    if args.ranks > 1 and args.rank is None:
        sys.exit(spawn(args.ranks))
    if args.rank is not None:
        in_group(args)
        return
    with alone_over_nccl():
        print(json.dumps(counts(args)))


if __name__ == "__main__":
    main()
