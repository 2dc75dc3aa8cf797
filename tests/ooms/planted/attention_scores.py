import torch
from oom_loop import allow
from torch import nn

project = nn.Linear(64, 3 * 64)
allow(44)


def attend(x):
    q, k, v = project(x).split(64, -1)
    scores = torch.einsum("bqd,bkd->bqk", q, k)
    scores = scores.masked_fill(torch.ones(1, dtype=torch.bool), 0.0)
    return scores.softmax(-1) @ v  # cause: activations


row = torch.randn(1, 2000, 64)
for _ in range(3):
    row = attend(row)
# advice: scaled_dot_product_attention
# not: BatchSizer
