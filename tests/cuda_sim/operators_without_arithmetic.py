"""Which of torch's operators run on a device without arithmetic: its own samples for CUDA, forward and backward.

As a program there: operators_without_arithmetic.py EVERY FIRST - every EVERYth operator from the number FIRST on; for
each a line when it begins, and a line with its outcome, in JSON.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).resolve()
RUN = HERE.parents[2] / "csrc" / "cuda_sim" / "run.py"
SENTENCE = "on a device without arithmetic"
NO_KERNEL = re.compile(
    r"NotImplementedError: Could not run '.*' with arguments from the '\w*CUDA' backend"
)
SAMPLES = 3
TIMEOUT_S = 600


def outcomes(libraries, python=sys.executable, every=1, device="h200"):
    """Returns (operator, outcome, words) of each operator.

    The outcome is "runs", "sentence" (it needs what is not there), "none" (torch has no samples or no kernel of it for
    CUDA), "error", or "ends" if the process ended.
    """
    found = {}
    number = 0
    while True:
        done = subprocess.run(
            [python, RUN, "--libraries", libraries, "--", python, HERE, str(every), str(number)],
            env={**_environment(), "SIM_CUDA_ARITHMETIC": "0", "SIM_CUDA_DEVICE": device},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        found.update({name: (outcome, words) for _, name, outcome, words in lines})
        if done.returncode == 0:
            return [(name, *rest) for name, rest in found.items()]
        if not lines or lines[-1][2] != "begins":
            raise RuntimeError(f"the operators ended with {done.returncode}: {done.stderr[-2000:]}")
        at, name = lines[-1][:2]
        found[name] = ("ends", f"status {done.returncode}: {done.stderr[-300:]}")
        number = at + every


def _environment():
    left_out = ("LD_PRELOAD", "SIM_CUDA_MEMORY_MB", "SIM_CUDA_DEVICE")
    return {name: value for name, value in os.environ.items() if name not in left_out}


def _samples(op):
    """Of the usual type, or of the first one that the operator has; made on the device, as torch's own tests make them.

    They are made on the CPU and copied if making them needs what the device has not.
    """
    import sweep
    import torch

    supported = op.supported_dtypes("cuda")
    order = (torch.float32, torch.int64, torch.bool, torch.complex64, *sorted(supported, key=str))
    dtype = next((dtype for dtype in order if dtype in supported), None)
    if dtype is None:
        return []
    gradients = op.supports_autograd and dtype in op.supported_backward_dtypes("cuda")

    def made_on(device):
        samples = itertools.islice(
            op.sample_inputs(device, dtype, requires_grad=gradients), SAMPLES
        )
        return [(sample.input, sample.args, sample.kwargs) for sample in samples]

    try:
        return made_on("cuda:0")
    except RuntimeError:
        return [sweep.moved(sample, "cuda:0") for sample in made_on("cpu")]


def _forward_and_backward(op, first, args, kwargs):
    import sweep
    import torch

    results = op(first, *args, **kwargs)
    leaves = [t for t in sweep.tensors_in((first, args, kwargs)) if t.requires_grad]
    roots = [t for t in sweep.tensors_in(results) if t.requires_grad and t.layout == torch.strided]
    if leaves and roots:
        ones = [torch.ones_like(root) for root in roots]
        torch.autograd.grad(roots, leaves, ones, allow_unused=True)


def _outcome(op):
    import torch

    ran = 0
    try:
        for sample in _samples(op):
            _forward_and_backward(op, *sample)
            torch.cuda.synchronize()
            ran += 1
    except Exception as error:
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        if SENTENCE in words:
            return "sentence", words
        return "none" if NO_KERNEL.match(words) else "error", words
    return ("runs", "") if ran else ("none", "no samples for CUDA")


def main():
    every, first = map(int, sys.argv[1:])
    import sweep

    warnings.simplefilter("ignore")
    for number in range(first, len(sweep.op_db), every):
        op = sweep.op_db[number]
        name = sweep.name_of(op)
        print(json.dumps([number, name, "begins", ""]), flush=True)
        print(json.dumps([number, name, *_outcome(op)]), flush=True)


if __name__ == "__main__":
    main()
