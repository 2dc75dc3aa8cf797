"""The C++ Autocast guard beside torch.autocast: the same dtypes, and the same bits, forward and backward."""

import pytest
import torch

from brimful import _C


class Net(torch.nn.Module):
    """Operations that run in the low precision, in float32, and in the widest of their inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(20, 12)
        self.convolution = torch.nn.Conv1d(12, 16, 3, padding=1)
        self.attention = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.norm = torch.nn.LayerNorm(16)
        self.head = torch.nn.Linear(16, 5)
        self.dtypes = []

    def forward(self, x):
        self.dtypes = []
        y = self.noted(self.convolution(self.words(x).transpose(1, 2))).transpose(1, 2)
        y = self.noted(self.attention(y))
        y = self.noted(self.norm(y + self.words(x).mean()))
        y = self.noted(torch.einsum("bld,bmd->blm", y, y).softmax(-1)) @ y
        rough = self.noted(torch.nn.functional.mse_loss(y, y.roll(1, 1)))
        return self.noted(self.head(y).flatten(0, 1)) + rough

    def noted(self, tensor):
        self.dtypes.append(tensor.dtype)
        return tensor


def trained(guard):
    """Three steps, two backwards under one guard in each: casts of parameters are kept within it."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randint(20, (4, 7), generator=generator)
        y = torch.randint(5, (28,), generator=generator)
        with guard():
            losses = [torch.nn.functional.cross_entropy(net(part), y) for part in (x, x.flip(0))]
        assert not torch.is_autocast_enabled("cpu")
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [*losses, *(p.detach().clone() for p in net.parameters())]
    return found, net.dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_under_the_cpp_guard_equals_training_under_torchs(dtype):
    theirs, their_dtypes = trained(lambda: torch.autocast("cpu", dtype))
    ours, our_dtypes = trained(lambda: _C._Autocast(dtype))
    assert our_dtypes == their_dtypes and dtype in our_dtypes and torch.float32 in our_dtypes
    assert all(
        a.dtype == b.dtype and a.detach().numpy().tobytes() == b.detach().numpy().tobytes()
        for a, b in zip(ours, theirs, strict=True)
    )
