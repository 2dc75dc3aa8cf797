"""Process groups over NCCL on devices without arithmetic: nothing of their memory moves, and ranks meet as ever."""

import os
from pathlib import Path

import pytest
import torch
from simulation import without_arithmetic

HERE = str(Path(__file__).parent)
VALUES = f"libsim_cuda_values-{'.'.join(torch.__version__.split('.')[:2])}.so"
RANKS = f"import sys; sys.path.insert(0, {HERE!r})\nimport ranks_without_arithmetic as ranks\n"


needs_values = pytest.mark.skipif(
    not (Path(os.environ["LD_PRELOAD"].split(":")[0]).parent / VALUES).exists(),
    reason="values are known with the torch that the libraries were built with",
)


@pytest.mark.parametrize(
    "name",
    ["meeting", "other_counts", "peer_dies", pytest.param("values", marks=needs_values)],
)
def test_two_ranks(name):
    status, said = without_arithmetic(
        f"{RANKS}if __name__ == '__main__':\n    ranks.run({name!r})", "h200"
    )
    assert status == 0, said


TWO_DEVICES = """
import torch
from torch.cuda import nccl

xs = [torch.empty(1 << 30, device=device) for device in ("cuda:0", "cuda:1")]
nccl.all_reduce(xs)
nccl.broadcast(xs)
nccl.reduce(xs, root=0)
nccl.all_gather(xs, [torch.empty(2 << 30, device=x.device) for x in xs])
nccl.reduce_scatter([torch.empty(2 << 30, device=x.device) for x in xs], xs)
model = torch.nn.DataParallel(torch.nn.Linear(64, 64).cuda())
model(torch.ones(8, 64, device="cuda")).sum().backward()
for device in (0, 1):
    torch.cuda.synchronize(device)
print(model.module.weight.grad.shape, *(torch.cuda.max_memory_allocated(d) >> 30 for d in (0, 1)))
"""


def test_two_devices_of_one_process():
    status, said = without_arithmetic(TWO_DEVICES, "h200")
    assert status == 0, said
    assert said.split()[0:2] == ["torch.Size([64,", "64])"]
