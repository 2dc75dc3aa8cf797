"""torch.compile of the wrapped module, around the wrapper, and by block: right gradients, nothing compiled twice."""

import copy
import shutil

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from ddp_reference import (
    batch_of,
    mean_gradients,
    require_gradients,
    require_same_everywhere,
    wrap,
)
from rank_processes import raised
from torch._dynamo.utils import counters


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh())
            for _ in range(2)
        )
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def inner(module, backend):
    return wrap(torch.compile(module, backend=backend))


def in_place(module, backend):
    module.compile(backend=backend)
    return wrap(module)


def around(module, backend):
    return torch.compile(wrap(module), backend=backend)


def around_in_place(module, backend):
    model = wrap(module)
    model.compile(backend=backend)
    return model


def by_block(module, backend):
    for block in module.blocks:
        block.compile(backend=backend)
    return wrap(module)


def step_function(module, backend):
    """The compiled function calls the wrapped module."""
    model = wrap(module)

    @torch.compile(backend=backend)
    def call(x):
        return model(x) * 1.0

    call.parameters = model.parameters
    call.zero_grad = model.zero_grad
    return call


WAYS = {
    "inner": (inner, 1),
    "in place": (in_place, 1),
    "around": (around, 1),
    "around in place": (around_in_place, 1),
    "by block": (by_block, 2),
    "step function": (step_function, 2),
}


def batch(rank, step):
    x, y = batch_of(0, step, torch.float32)
    return x + rank, y


def train(model, rank, step):
    x, y = batch(rank, step)
    F.cross_entropy(model(x), y).backward()


def compile_job(rank, way, backend):
    torch._dynamo.reset()
    counters.clear()
    net = Blocks()
    model = WAYS[way][0](copy.deepcopy(net), backend)
    alone = [copy.deepcopy(net) for _ in range(rank.size)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, *alone)]
    stance = torch.compiler.set_stance
    for step in range(5):
        stance("fail_on_recompile" if step >= 2 else "default")
        train(model, rank.index, step)
        for r, one in enumerate(alone):
            stance("default")
            train(one, r, step)
        means = [
            sum(p.grad for p in parameters) / rank.size
            for parameters in zip(*(one.parameters() for one in alone), strict=True)
        ]
        for parameter, mean in zip(model.parameters(), means, strict=True):
            assert torch.allclose(parameter.grad, mean, rtol=1e-4, atol=1e-6)
        for one in alone:
            for parameter, mean in zip(one.parameters(), means, strict=True):
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    stance("default")
    require_same_everywhere(rank, {str(i): p for i, p in enumerate(model.parameters())})
    return counters["stats"]["unique_graphs"], list(counters["graph_break"])


@pytest.mark.parametrize("way", WAYS)
def test_compiled_models_get_the_same_gradients_and_are_compiled_once(ranks, way):
    for graphs, breaks in ranks(compile_job, way, "aot_eager", watchdog_s=60):
        assert graphs == WAYS[way][1]
        assert len(breaks) <= (1 if way == "step function" else 0), breaks


def inductor_job(rank):
    torch._dynamo.reset()
    torch.manual_seed(1)
    net = torch.nn.Linear(6, 3)
    model = wrap(torch.compile(copy.deepcopy(net)))
    for step in range(2):
        train(model, rank.index, step)
        expected = mean_gradients(net, rank.size, lambda m, r, s=step: train(m, r, s))
        require_gradients(
            model, {f"_orig_mod.{name}": gradient for name, gradient in expected.items()}, 1e-5
        )
        model.zero_grad()


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
def test_inductors_code_gets_the_same_gradients(ranks):
    ranks(inductor_job, timeout_s=90, watchdog_s=100)


def fullgraph_job(rank):
    torch._dynamo.reset()
    net = Blocks()
    expected = mean_gradients(net, rank.size, lambda m, r: train(m, r, 0))
    model = wrap(copy.deepcopy(net))
    model.module.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    for _ in range(2):
        train(model, rank.index, 0)
        require_gradients(model, expected, 1e-4)
        model.zero_grad()


def test_the_wrapped_module_compiles_without_a_graph_break(ranks):
    ranks(fullgraph_job, watchdog_s=60)


def compiled_autograd_job(rank):
    torch._dynamo.reset()
    net = torch.nn.Linear(6, 3)
    model = wrap(copy.deepcopy(net))

    def under_compiled_autograd():
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            train(model, rank.index, 0)

    error = raised(under_compiled_autograd)
    model.zero_grad()
    train(model, rank.index, 0)
    require_gradients(model, mean_gradients(net, rank.size, lambda m, r: train(m, r, 0)), 1e-6)
    return error


def test_compiled_autograd_is_refused_with_a_remedy(ranks):
    for error in ranks(compiled_autograd_job, watchdog_s=60):
        assert type(error) is NotImplementedError, error
        assert "compiled autograd would leave out the reduction of gradients" in str(error)
