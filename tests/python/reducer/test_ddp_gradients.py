"""Gradients that torch's class gives, and what programs do with them between backward and step."""

import copy

import pytest
import torch
import torch.nn.functional as F
from ddp_reference import (
    batch_of,
    mean_gradients,
    require_gradients,
    require_same_everywhere,
    small_net,
    train_once,
    wrap,
)
from models import gradients_of, same_bits
from rank_processes import raised
from torch.nn.parallel import DistributedDataParallel


def gradient_penalty(module, rank):
    """WGAN-GP: the norm of an input's gradient in the loss."""
    x = batch_of(rank)[0].requires_grad_()
    score = module(x).sum()
    (slope,) = torch.autograd.grad(score, x, create_graph=True)
    (score * 0.1 + ((slope.norm(dim=1) - 1) ** 2).mean()).backward()


def create_graph_once(module, rank):
    x, y = batch_of(rank)
    F.cross_entropy(module(x), y).backward(create_graph=True)


def differentiable_step_twice(module, rank):
    """backward(create_graph=True) that accumulates on top of itself."""
    for step in range(2):
        x, y = batch_of(rank, step)
        F.cross_entropy(module(x), y).backward(create_graph=True)


def inputs_too(module, rank):
    x, y = batch_of(rank)
    x.requires_grad_()
    F.cross_entropy(module(x), y).backward()
    assert x.grad is not None


def grad_first(module, rank):
    """autograd.grad and backward(inputs=...) on the way leave .grad and the reducer undisturbed."""
    x, y = batch_of(rank)
    loss = F.cross_entropy(module(x), y)
    parameters = list(module.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    assert len(first) == 4 and all(p.grad is None for p in parameters)
    x.requires_grad_()
    F.cross_entropy(module(x), y).backward(inputs=[x])
    loss.backward()


def two_losses(module, rank):
    """One backward over two roots."""
    x, y = batch_of(rank)
    output = module(x)
    torch.autograd.backward([F.cross_entropy(output, y), output.sum() * 0.1])


CASES = [
    gradient_penalty,
    create_graph_once,
    differentiable_step_twice,
    inputs_too,
    grad_first,
    two_losses,
]


def case_job(rank, index):
    expected = mean_gradients(small_net(), rank.size, CASES[index])
    model = wrap(small_net())
    for _ in range(2):
        CASES[index](model, rank.index)
        require_gradients(model, expected)
        require_same_everywhere(rank, {n: p.grad for n, p in model.named_parameters()})
        model.zero_grad()


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.__name__ for case in CASES])
def test_gradients_are_the_mean_of_what_ranks_get_alone(ranks, index):
    ranks(case_job, index)


def partial_job(rank):
    """backward(inputs=...) of some parameters gives their local gradients on one rank alone, and no collective."""
    model = wrap(small_net())
    weight = model.module[0].weight
    if rank.index == 0:
        x, y = batch_of(0)
        F.cross_entropy(model(x), y).backward(inputs=[weight])
        alone = small_net()
        train_once(alone, 0)
        assert torch.equal(weight.grad, alone[0].weight.grad)
        assert model.module[2].weight.grad is None
        assert model.reducer.counters.launches == 0
        model.zero_grad()
    train_once(model, rank.index)
    require_gradients(model, mean_gradients(small_net(), rank.size, train_once))


def test_a_backward_of_chosen_inputs_is_no_step(ranks):
    ranks(partial_job)


def penalty_of_gradients(gradients):
    return sum((g**2).sum() for g in gradients)


def through_gradients_job(rank, keep):
    """A loss of p.grad: with a graph, its gradient is that of the mean over ranks."""
    nets = [small_net() for _ in range(rank.size)]
    for r, net in enumerate(nets):
        create_graph_once(net, r)
    means = [
        sum(p.grad for p in parameters) / rank.size
        for parameters in zip(*(net.parameters() for net in nets), strict=True)
    ]
    firsts = [mean.detach().clone() for mean in means]
    second = [
        sum(
            torch.autograd.grad(
                penalty_of_gradients(means),
                list(net.parameters()),
                retain_graph=True,
                allow_unused=True,
            )[i]
            for net in nets
        )
        for i in range(4)
    ]

    model = wrap(small_net())
    create_graph_once(model, rank.index)
    gradients = [p.grad for p in model.parameters()]
    for gradient, first in zip(gradients, firsts, strict=True):
        assert gradient.grad_fn is not None
        assert torch.allclose(gradient, first, rtol=1e-12)
    loss = penalty_of_gradients(gradients)
    if not keep:
        model.zero_grad()
    loss.backward()
    for parameter, first, further in zip(model.parameters(), firsts, second, strict=True):
        expected = further + first if keep else further
        assert torch.allclose(parameter.grad, expected, rtol=1e-12, atol=1e-15)
    require_same_everywhere(rank, {n: p.grad for n, p in model.named_parameters()})
    model.zero_grad()
    train_once(model, rank.index)
    require_gradients(model, mean_gradients(small_net(), rank.size, train_once))
    assert all(p.grad.grad_fn is None for p in model.parameters())


@pytest.mark.parametrize("keep", [False, True])
def test_a_loss_of_the_gradients_has_the_right_gradient(ranks, keep):
    ranks(through_gradients_job, keep)


def kept_job(rank, wrapper, through_step):
    """Gradient surgery: the gradients of several losses are kept side by side."""
    model = (DistributedDataParallel if wrapper == "torch" else wrap)(small_net())
    kept, copies = [], []
    for step in range(3):
        train_once(model, rank.index, step)
        kept.append([p.grad for p in model.parameters()])
        copies.append([g.clone() for g in kept[-1]])
        if through_step:
            model.zero_grad()
        else:
            for parameter in model.parameters():
                parameter.grad = None
    for mine, other in zip(kept, copies, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    for parameter, *parts in zip(model.parameters(), *kept, strict=True):
        parameter.grad = sum(parts)
    train_once(model, rank.index, 3)

    def all_four(module, r):
        for step in range(4):
            train_once(module, r, step)

    require_gradients(model, mean_gradients(small_net(), rank.size, all_four))


@pytest.mark.parametrize("through_step", [False, True])
@pytest.mark.parametrize("wrapper", ["ours", "torch"])
def test_a_gradient_that_the_program_keeps_is_not_overwritten(ranks, wrapper, through_step):
    ranks(kept_job, wrapper, through_step)


class Large(torch.nn.Module):
    """A parameter of 4 MiB: its gradient is reduced where it lies."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1024, 1024), 0.5))

    def forward(self, rank):
        return (self.weight**2).sum() * (rank + 1)  # the gradient: 2 * 0.5 * (rank + 1)


def large_job(rank):
    model = wrap(Large())
    weight = model.module.weight
    model(rank.index).backward(create_graph=True)
    first = weight.grad
    assert bool((first == 1.5).all()) and first.grad_fn is not None
    model.zero_grad()
    (first**2).sum().backward()  # 2 * 1.5 * the mean of 2 * (rank + 1)
    second = weight.grad
    assert bool((second == 9).all()) and second.grad_fn is None
    model.zero_grad()
    model(rank.index).backward()
    assert bool((weight.grad == 1.5).all())
    assert bool((first == 1.5).all()) and bool((second == 9).all())


def test_large_gradients_are_kept_and_have_a_graph_too(ranks):
    ranks(large_job)


def kept_unused_job(rank):
    """The same where the next step finds the parameter unused here, used elsewhere."""
    torch.manual_seed(0)
    branches = wrap(torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)]))
    x = torch.ones(1, 2)

    def train(used):
        branches.module.forward = lambda x: sum(branch(x) for branch in used).sum()
        branches(x).backward()

    train(list(branches.module))
    kept = branches.module[0].weight.grad
    copied = kept.clone()
    branches.zero_grad()
    train([branches.module[rank.index]])
    assert torch.equal(kept, copied)
    assert torch.equal(branches.module[0].weight.grad, torch.full((2, 2), 0.5))


def test_a_kept_gradient_outlives_a_step_that_does_not_use_its_parameter(ranks):
    ranks(kept_unused_job)


def kept_in_failed_step_job(rank):
    model = wrap(small_net())
    train_once(model, rank.index)
    kept = gradients_of(model), {n: p.grad for n, p in model.module.named_parameters()}
    model.zero_grad()
    handle = None
    if rank.index == 1:

        def fail(_):
            raise ValueError("planted")

        handle = model.module[2].weight.register_hook(fail)
    assert raised(train_once, model, rank.index, 1) is not None
    if handle:
        handle.remove()
    model.zero_grad()
    train_once(model, rank.index, 1)
    assert same_bits(*kept)
    require_gradients(
        model, mean_gradients(small_net(), rank.size, lambda m, r: train_once(m, r, 1))
    )


def test_a_kept_gradient_outlives_a_failed_step(ranks):
    ranks(kept_in_failed_step_job, timeout_s=5)


def hooks_job(rank):
    """Tensor hooks and post-accumulate hooks see this rank's gradient, as under torch's class."""
    results = {}
    for name, wrapper in (("ours", wrap), ("torch", DistributedDataParallel)):
        model = wrapper(small_net())
        seen = []
        for parameter in model.parameters():
            parameter.register_hook(lambda g: g * 2)
            parameter.register_post_accumulate_grad_hook(lambda p, s=seen: s.append(p.grad.clone()))
        model.module[1].register_full_backward_hook(lambda m, i, o, s=seen: s.append(i[0].clone()))
        for _ in range(2):
            train_once(model, rank.index)
            results.setdefault(name, []).append((list(seen), list(gradients_of(model).values())))
            seen.clear()
            model.zero_grad()
    for (our_seen, ours), (their_seen, theirs) in zip(
        results["ours"], results["torch"], strict=True
    ):
        assert len(our_seen) == len(their_seen) == 5
        assert all(torch.equal(a, b) for a, b in zip(our_seen, their_seen, strict=True))
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(ours, theirs, strict=True))


def test_hooks_of_the_user_see_what_torchs_class_shows_them(ranks):
    ranks(hooks_job)


class WithLeaf(torch.nn.Module):
    """Gives its parameter away beside its output, as models with tied or shared heads do."""

    def __init__(self):
        super().__init__()
        self.net = small_net()

    def forward(self, x):
        return {"scores": self.net(x), "weight": self.net[0].weight, "input": x}


def with_leaf_once(module, rank):
    x, y = batch_of(rank)
    found = module(x.requires_grad_())
    (F.cross_entropy(found["scores"], y) + found["weight"].square().sum()).backward()


def leaf_job(rank):
    expected = mean_gradients(WithLeaf(), rank.size, with_leaf_once)
    model = wrap(WithLeaf())
    for _ in range(2):
        with_leaf_once(model, rank.index)
        require_gradients(model, expected)
        model.zero_grad()


def test_leaves_among_the_outputs_change_nothing(ranks):
    ranks(leaf_job)


def undefined_job(rank):
    """A custom function that returns None on one rank: no gradient there, the other's on both."""

    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, gives):
            ctx.gives = gives
            return weight * 2

        @staticmethod
        def backward(ctx, gradient):
            return (gradient * 2 if ctx.gives else None), None

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.other = torch.nn.Parameter(torch.ones(3))
            self.givers = [0]

        def forward(self):
            return (Half.apply(self.weight, rank.index in self.givers) + self.other).sum()

    model = wrap(Net())
    model().backward()
    assert model.module.weight.grad.tolist() == [1, 1, 1]
    assert model.module.other.grad.tolist() == [1, 1, 1]
    model.zero_grad()
    model.module.givers = []
    model().backward()
    assert model.module.weight.grad is None


def test_a_gradient_that_autograd_leaves_undefined_counts_as_unused(ranks):
    ranks(undefined_job)


def loops(model, rank, kind):
    """Three steps of a usual loop; the parameters after them."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=kind == "scaler")
    norms = []
    for step in range(3):
        x, y = batch_of(rank, step, torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if kind == "clip":
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        if kind == "clip value":
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=kind != "zeros")
    return norms


def loop_job(rank, kind):
    net = small_net(torch.float32)
    ours, theirs = wrap(copy.deepcopy(net)), DistributedDataParallel(copy.deepcopy(net))
    norms = [loops(model, rank.index, kind) for model in (ours, theirs)]
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(*norms, strict=True))
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7), name
    require_same_everywhere(rank, dict(ours.named_parameters()))


@pytest.mark.parametrize("kind", ["plain", "zeros", "clip", "clip value", "scaler", "autocast"])
def test_usual_loops_end_as_with_torchs_class(ranks, kind):
    ranks(loop_job, kind)


def overflow_job(rank):
    """An infinite gradient on one rank makes GradScaler skip the step on both."""
    model = wrap(small_net(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = batch_of(rank.index, 0, torch.float32)
    loss = F.cross_entropy(model(x), y)
    scaler.scale(loss * (float("inf") if rank.index == 1 else 1)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    return scaler.get_scale()


def test_an_overflow_on_one_rank_is_seen_by_all_scalers(ranks):
    assert ranks(overflow_job) == [2.0, 2.0]
