"""NVIDIA's libraries on devices without arithmetic: what goes on without them, and what ends with a sentence."""

import shutil

import pytest
from simulation import without_arithmetic

GOES_ON = """
import os, pathlib, torch
from torch import fft, special

cache = pathlib.Path(os.environ["PYTORCH_KERNEL_CACHE_PATH"])
x = torch.rand(4, 64, 96, device="cuda", requires_grad=True)
half = torch.rand(64, device="cuda", dtype=torch.half)
whole = torch.arange(1, 9, device="cuda")
complex_ = torch.rand(8, device="cuda", dtype=torch.complex64)
for result in (
    *(fft.fft(x).abs(), fft.irfft2(fft.rfft2(x)), fft.hfft(x), fft.fftn(x, dim=(0, 1, 2)).real),
    *(fft.fft(half), torch.stft(x.flatten(1), 64, return_complex=True).abs(), fft.fft(x, 97).real),
    *(special.bessel_j0(x), special.i1e(x), special.zeta(x.detach() + 1, half[0]), torch.lgamma(half)),
    *(torch.gcd(whole, whole), torch.lcm(whole, whole), torch.sinc(complex_), complex_.prod()),
    torch.cuda.jiterator._create_jit_fn("template <typename T> T twice(T x) { return 2 * x; }")(x.detach()),
):
    if result.requires_grad and result.grad_fn is not None:
        x.grad = None
        result.sum().backward()
        assert x.grad.shape == x.shape
torch.cuda.synchronize()
print(*(list(cache.iterdir()) if cache.exists() else []), "went on")
"""


def test_cufft_s_and_jiterator_s_operators_go_on_and_leave_no_kernels_behind(tmp_path):
    """A kernel that was made up must not be there for a device that computes."""
    cache = {"PYTORCH_KERNEL_CACHE_PATH": str(tmp_path / "kernels")}
    status, said = without_arithmetic(GOES_ON, "h200", **cache)
    assert status == 0 and "went on" in said.splitlines(), said


TRANSFORMS = """
import torch
torch.backends.cuda.cufft_plan_cache.max_size = 0
for shape, dtype in (((8, 512), torch.float32), ((8, 512), torch.float64), ((4, 64, 64), torch.complex64)):
    x = torch.empty(shape, dtype=dtype, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = torch.fft.rfft(x) if not x.is_complex() else torch.fft.fft2(x)
    print(torch.cuda.max_memory_allocated() - before - (y.nbytes + 511) // 512 * 512, end=" ")
"""


def test_a_transform_takes_a_complex_number_for_each_point():
    status, said = without_arithmetic(TRANSFORMS, "h200")
    assert status == 0, said
    assert said.split() == [str(8 * 512 * 8), str(8 * 512 * 16), str(4 * 64 * 64 * 8)]


SPARSE = """
import torch

square = torch.ones(4, 4, device="cuda")
indices = torch.arange(4)
rows = torch.sparse_csr_tensor(torch.arange(5), indices, torch.ones(4), (4, 4), device="cuda")
points = torch.sparse_coo_tensor(torch.stack([indices, indices]), torch.ones(4), (4, 4), device="cuda")
results = (
    *(rows @ square, rows @ square[0], rows @ rows, rows + rows, torch.sparse.mm(points, points)),
    *(torch.sparse.sampled_addmm(rows, square, square), points.coalesce(), points.to_sparse_csr()),
    torch.triangular_solve(square, rows).solution,
)
torch.cuda.synchronize()
print(*(tuple(result.shape) for result in results))
"""


def test_products_sums_and_solutions_of_sparse_matrices_go_on():
    status, said = without_arithmetic(SPARSE, "h200")
    assert status == 0, said
    shapes = ["(4, 4)"] * 9
    shapes[1] = "(4,)"
    assert " ".join(shapes) in said.splitlines(), said


SENTENCES = """
import torch

def graph():
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.ones(3, device="cuda")

square = torch.eye(4, device="cuda")
for ask in (
    *(lambda: torch.linalg.eigh(square), lambda: torch.linalg.solve(square, square)),
    *(lambda: torch.linalg.cholesky(square), lambda: torch.linalg.svd(square), lambda: torch.linalg.qr(square)),
    graph,
):
    try:
        ask()
    except RuntimeError as error:
        print("said:", str(error).splitlines()[0])
"""


def test_cusolver_and_graphs_end_with_a_sentence():
    status, said = without_arithmetic(SENTENCES, "h200")
    assert status == 0, said
    *solver, graph = [line for line in said.splitlines() if line.startswith("said:")]
    there_is_none = "simulated CUDA: there is no cuSOLVER on a device without arithmetic: solve and"
    assert len(solver) == 5 and all(there_is_none in line for line in solver), said
    assert (
        "simulated CUDA: there are no CUDA graphs on a device without arithmetic: run the" in graph
    )


KERNEL = """
import torch, triton
from triton import language as tl

@triton.jit
def twice(x, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(x + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

def ask(x):
    twice[(8,)](x, 1000, block=128)
"""
COMPILED = """
import torch

ask = torch.compile(lambda x: x.sin() + 1)
"""
ASK = """
try:
    ask(torch.ones(1000, device="cuda"))
except RuntimeError as error:
    print("said:", str(error).splitlines()[0])
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="Triton builds its launcher with a C compiler")
@pytest.mark.parametrize("asks", [KERNEL, pytest.param(COMPILED, marks=pytest.mark.slow)])
def test_triton_and_torch_compile_end_with_a_sentence(asks, tmp_path):
    file = tmp_path / "program.py"  # where Triton reads its kernel's source
    file.write_text(asks + ASK)
    variables = {
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    run = f"import runpy; runpy.run_path({str(file)!r})"
    status, said = without_arithmetic(run, "h200", **variables)
    assert status == 0, said
    (line,) = [line for line in said.splitlines() if line.startswith("said:")]
    assert "simulated CUDA: compiled kernels are not loaded on a device without arithmetic" in line
