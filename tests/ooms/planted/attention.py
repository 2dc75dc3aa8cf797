import torch
from oom_loop import allow
from torch import nn

project = nn.Linear(64, 3 * 64)
allow(44)


def attend(x):
    q, k, v = project(x).split(64, -1)
    weights = (q @ k.transpose(-2, -1) / 8).softmax(-1)  # cause: activations, here
    return weights @ v


row = torch.randn(1, 2000, 64)
for _ in range(3):
    row = attend(row)
# advice: scaled_dot_product_attention
# not: BatchSizer
