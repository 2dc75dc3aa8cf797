"""`brimful::checkpoint` of C++ programs against torch.utils.checkpoint and against neither, bit for bit."""

import copy
from contextlib import nullcontext

import pytest
import torch
from models import cpu_runs_half_lstm
from torch import nn
from torch.utils.checkpoint import checkpoint

from brimful import _C


class Squared(torch.autograd.Function):
    """One of the program's own, which saves what it likes."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return 2 * gradient * x * weight, (gradient * x * x).sum(0)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x):
        return Squared.apply(x.tanh(), self.weight) + self.weight


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 16, num_layers=2, dropout=0.2)

    def forward(self, x):
        return self.lstm(x.unsqueeze(0))[0].squeeze(0)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.layer(x.unsqueeze(0)).squeeze(0)


class Convolving(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.convolution(x.unsqueeze(1))).relu().sum(1)


class Tied(nn.Module):
    """Uses one weight three times."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(self.linear(self.linear(x).tanh()).tanh())


MODELS = {
    "dropout": lambda: nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 16)
    ),
    "attention": Attending,
    "convolution": Convolving,
    "recurrent": Recurrent,
    "own function": Own,
    "tied": Tied,
}


def of_cpp(model, x):
    return _C._checkpoint(lambda given: [model(given)], [x])[0]


def of_torch(model, x):
    return checkpoint(model, x, use_reentrant=False)


def without(model, x):
    return model(x)


def run(through, model, low_precision):
    model = copy.deepcopy(model)
    torch.manual_seed(5)
    leaf = torch.randn(6, 16, requires_grad=True)
    context = torch.autocast("cpu", torch.bfloat16) if low_precision else nullcontext()
    with context:
        output = through(model, through(model, leaf * 2) + leaf)
    output.float().square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [output, leaf.grad, torch.get_rng_state(), *gradients], list(model.buffers())


@pytest.mark.parametrize("low_precision", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_it_has_the_bits_of_torchs_checkpoint_and_of_none(name, low_precision):
    if low_precision and MODELS[name] is Recurrent and not cpu_runs_half_lstm():
        pytest.skip("torch has no bfloat16 LSTM for this processor")
    torch.manual_seed(1)
    model = MODELS[name]()
    found, buffers = run(of_cpp, model, low_precision)
    for other in (of_torch, without):
        expected, expected_buffers = run(other, model, low_precision)
        assert all(map(torch.equal, found, expected)) and len(found) == len(expected), other
        if other is without:  # torch's moves BatchNorm's statistics twice
            assert all(map(torch.equal, buffers, expected_buffers))


def test_an_error_of_the_function_arrives_as_it_is():
    class Once:
        runs = 0

        def __call__(self, x):
            self.runs += 1
            if self.runs == 2:
                raise KeyError("of the function")
            return [x.sin()]

    (output,) = _C._checkpoint(Once(), [torch.ones(3, requires_grad=True)])
    with pytest.raises(KeyError, match="of the function"):
        output.sum().backward()


def test_a_changed_input_is_a_value_error():
    x = torch.ones(3, requires_grad=True) * 2
    (output,) = _C._checkpoint(lambda given: [given.sin()], [x])
    x.detach().add_(1)
    with pytest.raises(ValueError, match=r"\(tensor: input 0, shape: \[3\]\)"):
        output.sum().backward()
