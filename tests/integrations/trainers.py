"""What ranks of several tests share: data, a model, and what torchrun would have set."""

import os

import torch
from models import classes

import brimful


def under_torchrun(rank):
    """The default group is there already: trainers take it, and ask the environment who they are."""
    os.environ.update(
        RANK=str(rank.index),
        LOCAL_RANK=str(rank.index),
        GROUP_RANK="0",
        WORLD_SIZE=str(rank.size),
        LOCAL_WORLD_SIZE=str(rank.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        TORCHELASTIC_RUN_ID="test",
    )


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))


def dataset(rows=64):
    return torch.utils.data.TensorDataset(*classes(rows))


class Memory:
    """Where memory runs out: a forward of more rows, in training, on one rank; or late, when the step is over."""

    def __init__(self, rows, here=True, late=False):
        self.rows, self.here, self.late, self.refusals = rows, here, late, 0

    def check(self, x):
        if self.here and torch.is_grad_enabled() and len(x) > self.rows:
            self.refusals += 1
            raise torch.OutOfMemoryError("planted")


def same(first, second):
    return list(first) == list(second) and all(
        torch.allclose(a, second[name], atol=1e-6) for name, a in first.items()
    )


def is_ours(model):
    return isinstance(model, brimful.DistributedDataParallel)
