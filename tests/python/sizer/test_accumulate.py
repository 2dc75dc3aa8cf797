"""sizer.step(..., accumulate=True): several batches before one optimizer step."""

import pytest
import torch
import torch.nn.functional as F
from models import classes, cross_entropy, gradients_of, same_bits, values_of, wrap
from rank_processes import raised

import brimful


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))


class Mixed(torch.nn.Module):
    """Gradients that share a bucket, a large one that does not, rows of a table, and one that step 1 leaves out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(9, 6, sparse=True)
        self.wide = torch.nn.Linear(6, 1 << 18)
        self.small = torch.nn.Linear(1 << 18, 3)
        self.seldom = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x):
        rows = x.abs().mul(3).long().clamp(max=8)[:, 0]
        hidden = self.wide(x + self.table(rows)).tanh()
        return self.small(hidden / 512) + (self.seldom if self.training else 0)


def test_the_same_as_torchs_accumulation():
    theirs, ours = net(), net()
    sizer = brimful.BatchSizer(ours)
    for step, split in enumerate([[8], [4, 4], [2, 5, 1]]):
        batch = classes(8, seed=step)
        alone = []
        for piece in zip(*(t.split(split) for t in batch), strict=True):
            fresh = net()
            (cross_entropy(fresh, piece) * (len(piece[1]) / 8)).backward()
            alone.append([p.grad for p in fresh.parameters()])
        for parameter, *gradients in zip(theirs.parameters(), *alone, strict=True):
            total = gradients[0]
            for gradient in gradients[1:]:
                total = total + gradient
            parameter.grad = total if parameter.grad is None else parameter.grad + total
        sizer.step(batch, cross_entropy, split=split, accumulate=True)
        assert same_bits(gradients_of(ours), gradients_of(theirs)), step


@pytest.mark.parametrize(
    "error", [ValueError("planted"), torch.OutOfMemoryError("planted")], ids=["error", "memory"]
)
def test_a_step_that_fails_leaves_the_gradients_as_they_were(error):
    model = net()
    sizer = brimful.BatchSizer(model, max_retries=1)
    sizer.step(classes(8), cross_entropy)
    before = gradients_of(model)

    def loss_fn(model, piece):
        loss = cross_entropy(model, piece)
        loss.register_hook(lambda _: None)
        model[2].weight.register_hook(fail)
        return loss

    def fail(_):
        raise error

    with pytest.raises((ValueError, brimful.BatchTooLarge), match="planted"):
        sizer.step(classes(8, seed=1), loss_fn, accumulate=True)
    assert same_bits(gradients_of(model), before)


def test_without_accumulate_gradients_must_be_empty():
    model = net()
    sizer = brimful.BatchSizer(model)
    sizer.step(classes(8), cross_entropy)
    before = gradients_of(model)
    with pytest.raises(ValueError, match="not empty at the step's start"):
        sizer.step(classes(8), cross_entropy)
    assert same_bits(gradients_of(model), before)
    with pytest.raises(ValueError, match="not empty at the step's start"):
        sizer.plan(classes(8), cross_entropy)
    plan = sizer.plan(classes(8), cross_entropy, accumulate=True)
    assert plan.kept_bytes == sum(4 * p.numel() for p in model.parameters())
    assert same_bits(gradients_of(model), before)


def test_gradients_with_a_graph_keep_it():
    x = torch.ones(2, 1)

    def run(accumulate):
        layer = torch.nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            layer.weight.fill_(3.0)
        if accumulate:
            layer.weight.grad = layer.weight * 2  # of a program of its own, with a graph
            brimful.BatchSizer(layer).step(x, lambda m, p: m(p).mean(), accumulate=True)
        return layer.weight

    weight = run(True)
    assert weight.grad.item() == 7.0
    (second,) = torch.autograd.grad(weight.grad.sum(), weight)
    assert second.item() == 2.0


def _alone(model, sizer, batch, split):
    sizer.step(batch, loss_of(model), split=split)
    gradients = gradients_of(model)
    model.zero_grad()
    return gradients


def loss_of(model):
    return lambda m, piece: F.cross_entropy(m(piece[0]), piece[1])


def _sum(*all_gradients):
    sums = {}
    for name in all_gradients[0]:
        there = [g[name] for g in all_gradients if g[name] is not None]
        total = there[0]
        for gradient in there[1:]:
            total = total + gradient
        sums[name] = total
    return sums


def same(first, second):
    return same_bits(
        *({n: g.to_dense() for n, g in gradients.items()} for gradients in (first, second))
    )


def _accumulate(rank, kind):
    model = wrap(Mixed() if kind == "mixed" else net())
    sizer = brimful.BatchSizer(model)
    batches = [classes(8 + rank.index, seed=10 * step + rank.index) for step in range(3)]
    splits = [[8 + rank.index], [4, 4 + rank.index], [3, 5 + rank.index]]
    parts = []
    for step, (batch, split) in enumerate(zip(batches, splits, strict=True)):
        model.train(step != 1)
        parts.append(_alone(model, sizer, batch, split))
    assert kind != "mixed" or parts[1]["seldom"] is None
    for step, (batch, split) in enumerate(zip(batches, splits, strict=True)):
        model.train(step != 1)
        sizer.step(batch, loss_of(model), split=split, accumulate=True)
        assert same(gradients_of(model), _sum(*parts[: step + 1])), step
    expected = (
        model.module.state_dict(),
        torch.nn.utils.get_total_norm([g.to_dense() for g in _sum(*parts).values()]),
    )
    norm = model.clip_grad_norm_(1e9)
    # float32 over a million elements: each library adds in its own order
    assert torch.allclose(norm, expected[1], rtol=1e-3)
    return _sum(*parts)


@pytest.mark.parametrize("kind", ["net", "mixed"])
def test_ranks_add_up_what_each_step_gives_alone(ranks, kind):
    first, second = ranks(_accumulate, kind)
    assert same(first, second)


def _retried(rank, point):
    model = wrap(net(), bucket_cap_mb=0.0001)
    sizer = brimful.BatchSizer(model)
    first, second = (classes(8, seed=step + 5 * rank.index) for step in (0, 1))
    fired = []

    def fail(_):
        if not fired:
            fired.append(True)
            raise torch.OutOfMemoryError("planted")

    split = [4, 4] if rank.index == 1 else [8]
    parts = [_alone(model, sizer, first, [8]), _alone(model, sizer, second, split)]
    sizer.step(first, cross_entropy, split=[8])
    if rank.index == 1:
        handle = list(model.module.parameters())[point].register_hook(fail)
    outcome = sizer.step(second, cross_entropy, split=[8], accumulate=True)
    if rank.index == 1:
        handle.remove()
    assert fired == ([True] if rank.index == 1 else [])
    if rank.index == 1 or point == 0:  # else before a bucket was launched
        assert outcome.retries == 1
    assert same_bits(gradients_of(model), _sum(*parts))
    return gradients_of(model)


@pytest.mark.parametrize("point", range(4))
def test_a_repeated_step_adds_once(ranks, point):
    first, second = ranks(_retried, point)
    assert same_bits(first, second)


def _failed(rank):
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizer = brimful.BatchSizer(model, optimizer)
    sizer.step(classes(8, seed=rank.index), cross_entropy)
    before, values = gradients_of(model), values_of(model)

    def loss_fn(model, piece):
        loss = cross_entropy(model, piece)
        if rank.index == 1:
            raise ValueError("planted")
        return loss

    errors = []
    for bad in (loss_fn, "no function"):
        given = bad if rank.index == 1 or callable(bad) else cross_entropy
        errors.append(raised(sizer.step, classes(8), given, accumulate=True))
        assert same_bits(gradients_of(model), before)
    sizer.step(classes(8, seed=3 + rank.index), cross_entropy, accumulate=True)
    assert not same_bits(gradients_of(model), before)
    assert same_bits(values_of(model), values)
    optimizer.step()
    return [type(error) for error in errors], values_of(model)


def test_a_step_that_fails_on_one_rank_keeps_the_gradients_of_all(ranks):
    (told, values), (own, others) = ranks(_failed)
    assert told == [brimful.RankFailed] * 2
    assert own == [ValueError, TypeError]
    assert same_bits(values, others)


def _mismatch(rank):
    model = wrap(net())
    sizer = brimful.BatchSizer(model)
    batch = classes(8, seed=rank.index)
    error = raised(sizer.step, batch, cross_entropy, accumulate=rank.index == 1)
    sizer.step(batch, cross_entropy)
    return type(error), str(error)


def test_ranks_that_do_not_pass_it_alike_all_raise(ranks):
    for kind, words in ranks(_mismatch):
        assert kind is brimful.PlanMismatch
        assert "(ranks that differ from rank 0: 1); pass the same accumulate on every rank" in words


def _no_room(rank):
    model = wrap(torch.nn.Linear(512, 512), bucket_cap_mb=25)
    sizer = brimful.BatchSizer(model)
    x = torch.randn(4, 512)
    loss_fn = lambda m, piece: m(piece).square().mean()  # noqa: E731
    sizer.step(x, loss_fn)
    before = gradients_of(model)
    if rank.index == 1:  # the copy is of 1 MiB
        used = brimful.memory.stats("cpu").used_bytes
        brimful.memory.set_limit("cpu", used + (1 << 19))
    error = raised(sizer.step, x, loss_fn, accumulate=True)
    brimful.memory.set_limit("cpu", None)
    assert same_bits(gradients_of(model), before)
    sizer.step(x, loss_fn, accumulate=True)
    return type(error), str(error)


def test_a_copy_that_does_not_fit_is_an_error_on_all_ranks(ranks):
    (told, _), (own, words) = ranks(_no_room)
    assert told is brimful.RankOutOfMemory
    assert own is brimful.BatchTooLarge
    assert "(accumulate: true, gradients: 1.0 MiB)" in words


@pytest.mark.parametrize("batches", [2, 3])
def test_steps_that_add_gradients_learn_that_there_is_less_room(batches, no_limit):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(128, 128), torch.nn.GELU()] * 3
    model = torch.nn.Sequential(*layers)  # one Linear, which three places share
    model.append(torch.nn.Linear(128, 512))
    sizer = brimful.BatchSizer(model)
    batch = torch.randn(256, 128)
    gradients = sum(p.nbytes for p in model.parameters())
    used = brimful.memory.stats("cpu").used_bytes
    brimful.memory.set_limit("cpu", used + 3 * gradients + (300 << 10))
    repeated = []
    for step in range(24):
        outcome = sizer.step(
            batch, lambda m, x: m(x).square().mean(), accumulate=step % batches != 0
        )
        if outcome.retries:
            repeated.append(step)
        if step % batches == batches - 1:
            model.zero_grad()
    pieces = [attempt.pieces for attempt in outcome.attempts]
    assert pieces[-1] > 1
    assert 1 <= len(repeated) <= 3 and repeated[-1] <= 4, repeated
