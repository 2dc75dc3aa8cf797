"""A step that fails while a new bucket plan waits to be taken up: all ranks still make the same calls."""

import itertools

import pytest
import torch
from ddp_reference import mean_gradients, require_gradients, train_once, wrap
from rank_processes import raised

import brimful


class Backwards(torch.nn.Module):
    """Layers that are used in the reverse of their registration: the learned order differs from the first plan."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        sizes = [3, 20, 4, 11, 6]
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(into, out) for out, into in itertools.pairwise(sizes)
        )
        self.fails = False

    def forward(self, x):
        if self.fails:
            raise ValueError("planted")
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def failing_job(rank, at):
    net = Backwards().double()
    expected = mean_gradients(net, rank.size, train_once)
    model = wrap(Backwards().double(), plan="ordered", bucket_cap_mb=0.0005)
    plans = {model.plan}

    def step():
        with model.step():
            train_once(model, rank.index)

    for index in range(6):
        model.module.fails = rank.index == 1 and index == at
        error = raised(step)
        if index != at:
            assert error is None, (index, error)
            require_gradients(model, expected)
        else:
            assert type(error) is (ValueError if rank.index == 1 else brimful.RankFailed), error
            assert "planted" in str(error)
        model.zero_grad()
        plans.add(model.plan)
    return len(plans)


@pytest.mark.parametrize("at", range(5))
def test_a_forward_that_fails_when_a_plan_changes_fails_on_all_ranks(ranks, at):
    assert ranks(failing_job, at, timeout_s=5) == [2, 2]
