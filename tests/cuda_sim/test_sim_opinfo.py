"""Every operator that torch has samples of: the same values and gradients as on the CPU, or a reason in the list."""

import pytest
import sweep
import torch
from simulation import set_delay

pytestmark = pytest.mark.filterwarnings("ignore")  # of operators that torch has newer names for

UNINITIALISED = "its values are whatever the memory held"
NOT_DENSE = "sparse tensors are not simulated"
NOT_FOR_BOTH = "it is there for one kind of device only"
MOVED = "it wants its other tensor on the CPU, or a view that moving its tensors makes a tensor"

EXCEPTIONS = {
    "as_strided.partial_views": MOVED,
    "empty": UNINITIALISED,
    "empty_like": UNINITIALISED,
    "empty_permuted": UNINITIALISED,
    "empty_strided": UNINITIALISED,
    "jiterator_2inputs_2outputs": NOT_FOR_BOTH,
    "jiterator_4inputs_with_extra_args": NOT_FOR_BOTH,
    "jiterator_binary": NOT_FOR_BOTH,
    "jiterator_binary_return_by_ref": NOT_FOR_BOTH,
    "jiterator_unary": NOT_FOR_BOTH,
    "linalg.eig": "it raises for this gradient: eigenvectors have any phase",
    "new_empty": UNINITIALISED,
    "new_empty_strided": UNINITIALISED,
    "sparse.mm.reduce": NOT_DENSE,
    "sparse.sampled_addmm": NOT_DENSE,
    "tensor_split": MOVED,
    "to_sparse": NOT_DENSE,
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": NOT_FOR_BOTH,
}

ADDED_LATER = {"torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"}  # behind torch 2.11

# On CUDA torch multiplies half types with a result in 32 bits here.
TOLERANCES = {
    "nn.functional.linear_cross_entropy.chunked": {"rtol": 0.1, "atol": 0.01},
    "nn.functional.linear_cross_entropy.chunked_none": {"rtol": 0.1, "atol": 0.1},
}

CASES = [
    pytest.param(op, dtype, id=f"{sweep.name_of(op)}-{str(dtype).removeprefix('torch.')}")
    for op in sweep.op_db
    for dtype in sweep.DTYPES
    if dtype in op.supported_dtypes("cpu") and dtype in op.supported_dtypes("cuda")
    if sweep.name_of(op) not in EXCEPTIONS
]


@pytest.mark.parametrize("op, dtype", CASES)
def test_three_samples(op, dtype):
    assert sweep.compare(op, dtype, 3, **TOLERANCES.get(sweep.name_of(op), {})) > 0


@pytest.mark.parametrize("op, dtype", [case for case in CASES if case.values[1] == torch.float32])
def test_a_sample_behind_the_host_s_back(op, dtype):
    set_delay(0)
    assert sweep.compare(op, dtype, 1, **TOLERANCES.get(sweep.name_of(op), {})) > 0


@pytest.mark.slow
@pytest.mark.parametrize("op, dtype", CASES)
def test_all_samples(op, dtype):
    assert sweep.compare(op, dtype, **TOLERANCES.get(sweep.name_of(op), {})) > 0


def test_the_list_of_exceptions_has_no_others():
    assert set(EXCEPTIONS) - ADDED_LATER <= {sweep.name_of(op) for op in sweep.op_db}
