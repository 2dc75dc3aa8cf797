"""One operator on samples of torch's OpInfo: what the simulated device gives, beside what the CPU gives."""

import contextlib
import importlib
import importlib.util
import itertools
import sys
import types
import unittest

import torch
from simulation import sim
from torch.utils._pytree import tree_flatten, tree_map

# The operators' samples lie in a module that imports expecttest for things that are not used here.
if importlib.util.find_spec("expecttest") is None:
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    sys.modules["expecttest"] = stand_in
op_db = importlib.import_module("torch.testing._internal.common_methods_invocations").op_db

DEVICES = ("cpu", "cuda", "cuda:0")
OF_NUMBERS = ("arange", "linspace", "logspace")  # without a device their result is on the CPU
DTYPES = (torch.float32, torch.bfloat16)


def name_of(op):
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def moved(values, device):
    """The sample's values there: tensors, and the arguments that name a device."""

    def move(value):
        if isinstance(value, torch.Tensor):
            return value.detach().to(device).requires_grad_(value.requires_grad)
        if isinstance(value, torch.device) or (isinstance(value, str) and value in DEVICES):
            return torch.device(device)
        return value

    return tree_map(move, values)


def tensors_in(values):
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


def forward_and_backward(op, sample, device):
    """The results and the gradients, from the same random numbers on both devices."""
    first, args, kwargs = moved((sample.input, sample.args, sample.kwargs), device)
    torch.manual_seed(0)
    results = op(first, *args, **kwargs)
    leaves = [t for t in tensors_in((first, args, kwargs)) if t.requires_grad]
    roots = [t for t in tensors_in(results) if t.requires_grad]
    if not leaves or not roots:
        return results, []
    ones = [torch.ones_like(root) for root in roots]
    return results, torch.autograd.grad(roots, leaves, ones, allow_unused=True)


@contextlib.contextmanager
def every_kernel_stood_in_for(op):
    """Kernels without a stand-in are counted, so that one of them fails a test, not the process."""
    sim.sim_cuda_set_strict(0)
    before = sim.sim_cuda_kernels_not_run()
    try:
        yield
    finally:
        sim.sim_cuda_set_strict(1)
        for device in range(torch.cuda.device_count()):
            sim.sim_cuda_plant_error(device, 0)
    missed = sim.sim_cuda_kernels_not_run() - before
    assert missed == 0, f"{name_of(op)}: {missed} kernels without a stand-in"


def samples(op, dtype, count):
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    return itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=differentiable), count)


def compare(op, dtype, count=None, **tolerance):
    """Checks up to `count` samples; how many there were."""
    compared = 0
    for sample in samples(op, dtype, count):
        expected = forward_and_backward(op, sample, "cpu")
        with every_kernel_stood_in_for(op):
            found = forward_and_backward(op, sample, "cuda")
        for theirs, ours in zip(tree_flatten(expected)[0], tree_flatten(found)[0], strict=True):
            if not isinstance(theirs, torch.Tensor):
                assert theirs == ours
                continue
            assert ours.is_cuda or op.name in OF_NUMBERS
            torch.testing.assert_close(ours.cpu(), theirs, equal_nan=True, **tolerance)
        compared += 1
    return compared
