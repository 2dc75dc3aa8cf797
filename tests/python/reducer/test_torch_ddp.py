"""torch's own DistributedDataParallel under a BatchSizer."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import (
    classes,
    cross_entropy,
    dropout_net,
    gradients_of,
    noisy_cross_entropy,
    rng_states,
    same_bits,
    seed,
    values_of,
    wrap,
)
from rank_processes import raised

import brimful

TorchDDP = torch.nn.parallel.DistributedDataParallel
STEPS = 4


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _beside_torchs_loop(rank, options):
    torch.manual_seed(3)
    plain = torch.nn.Sequential(
        torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12), torch.nn.Tanh(), torch.nn.Linear(12, 3)
    )
    theirs, ours = TorchDDP(copy.deepcopy(plain), **options), TorchDDP(plain, **options)
    their_optimizer, our_optimizer = optimizer_of(theirs), optimizer_of(ours)
    sizer = brimful.BatchSizer(ours, our_optimizer)
    for step in range(STEPS):
        batch = classes(8, seed=10 * step + rank.index)
        pieces = list(zip(*(t.split([4, 4]) for t in batch), strict=True))
        with theirs.no_sync():
            (cross_entropy(theirs, pieces[0]) / 2).backward()
        (cross_entropy(theirs, pieces[1]) / 2).backward()
        sizer.step(batch, cross_entropy, split=[4, 4])
        assert same_bits(gradients_of(ours), gradients_of(theirs)), step
        for optimizer in (their_optimizer, our_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    ours(torch.randn(4, 6)).sum().backward()  # and it goes on in a plain loop
    theirs(torch.randn(4, 6)).sum().backward()
    return values_of(ours), {n: p.detach() for n, p in theirs.module.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
        {"find_unused_parameters": True},
        {"broadcast_buffers": False},
    ],
    ids=["plain", "views", "unused", "own buffers"],
)
def test_the_same_gradients_as_in_torchs_loop(ranks, options):
    (values, theirs), (others, _) = ranks(_beside_torchs_loop, options)
    ours = {name: values[name] for name in theirs}
    assert same_bits(ours, theirs)
    assert same_bits(ours, {name: others[name] for name in theirs})


class Planter:
    """An OOM, once, in the second step of a rank; at a place that `point` names."""

    def __init__(self, model, point, here):
        self.point, self.armed = point, here
        self.handles = [model.module[0].register_forward_pre_hook(self.at("model"))]
        for index, parameter in enumerate(model.parameters()):
            self.handles.append(parameter.register_hook(self.at(index)))

    def at(self, point):
        def reached(*_):
            if self.armed and self.step == 1 and point == self.point:
                self.armed = False
                raise torch.OutOfMemoryError(f"planted at {point}")

        return reached

    def loss(self, model, piece):
        self.at("loss")()
        loss = noisy_cross_entropy(model, piece)
        self.at("end")()
        return loss


def _train(rank, initial, point=None, splits=None):
    model = TorchDDP(dropout_net(), bucket_cap_mb=0.0005)
    model.module.load_state_dict(initial)
    optimizer = optimizer_of(model)
    sizer = brimful.BatchSizer(model, optimizer)
    seed(rank.index)
    planter = Planter(model, point, point is not None and rank.index == 1)
    outcomes = []
    for step in range(STEPS):
        planter.step = step
        batch = classes(8 + 3 * rank.index, seed=10 * step + rank.index)
        split = splits[step] if splits else None
        outcomes.append(sizer.step(batch, planter.loss, split=split))
        optimizer.step()
        optimizer.zero_grad()
    assert not planter.armed
    losses = [outcome.loss for outcome in outcomes]
    return values_of(model), rng_states(), [o.split for o in outcomes], losses


def _shortage(rank, point):
    seed(7)
    initial = dropout_net().state_dict()
    faulty = _train(rank, initial, point)
    clean = _train(rank, initial, splits=faulty[2])
    assert same_bits(faulty[0], clean[0]), "another result than with the same split"
    assert faulty[1:] == clean[1:]
    return faulty


@pytest.mark.parametrize("point", ["loss", "model", "end", 0, 3, 7])
def test_memory_that_runs_out_anywhere_is_repeated(ranks, point):
    """Before the model, in its forward, behind it, and in backward at the first, a middle and the last gradient."""
    (values, _, splits, losses), (others, _, their_splits, their_losses) = ranks(_shortage, point)
    assert same_bits(values, others)
    assert losses == their_losses
    assert splits == [[8]] * STEPS  # the rank that did not run out goes on as it was
    assert their_splits == [[11], *[[6, 5]] * (STEPS - 1)]


def _refused_allocations(rank, count):
    model = TorchDDP(dropout_net(), bucket_cap_mb=0.0005)
    sizer = brimful.BatchSizer(model)
    batch = classes(8, seed=rank.index)
    initial = copy.deepcopy(model.module.state_dict())

    def one_step(split, fault=None):
        model.module.load_state_dict(initial)
        model.zero_grad()
        seed(rank.index)
        with fault or contextlib.nullcontext():
            outcome = sizer.step(batch, noisy_cross_entropy, split=split)
        return outcome, gradients_of(model), values_of(model), rng_states()

    one_step([8])
    retried = 0
    for index in range(count):
        fault = brimful._C._FaultAt(index) if rank.index == 1 else None
        outcome, *faulty = one_step([8], fault)
        retried += outcome.retries
        assert fault is None or fault.fired or outcome.retries == 0, index
        clean = one_step(outcome.split)[1:]
        assert same_bits(faulty[0], clean[0]) and same_bits(faulty[1], clean[1]), index
        assert faulty[2] == clean[2], index
    return retried, gradients_of(model)


def test_any_allocation_of_a_step_may_be_refused(ranks):
    (none, gradients), (retried, others) = ranks(_refused_allocations, 60)
    assert none == 0 and retried > 40
    assert same_bits(gradients, others)


def heavy_cross_entropy(model, piece):
    """With a weight that is not known beforehand."""
    return cross_entropy(model, piece), 3.0 * len(piece[1])


def _beside_brimful(rank):
    results = []
    for wrapper in (wrap, TorchDDP):
        model = wrapper(net())
        optimizer = optimizer_of(model)
        sizer = brimful.BatchSizer(model, optimizer)
        data = [classes(4 + step + 5 * rank.index, seed=step) for step in range(3 - 2 * rank.index)]
        losses = []
        for batch in sizer.batches(data):
            losses.append(sizer.step(batch, heavy_cross_entropy).loss)
            optimizer.step()
            optimizer.zero_grad()
        assert len(losses) == 3  # the last two without data on rank 1
        results.append((values_of(model), losses))
    return results


def test_uneven_data_as_with_brimfuls_own(ranks):
    first, second = ranks(_beside_brimful)
    for (values, losses), (others, their_losses) in (first, second):
        assert losses == their_losses
        for name in values:
            torch.testing.assert_close(values[name], others[name], rtol=1e-6, atol=1e-7)
    assert same_bits(first[1][0], second[1][0])


class Unused(torch.nn.Module):
    """A table with sparse gradients, and parameters that no rank, or one rank, uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(9, 6, sparse=True)
        self.out = torch.nn.Linear(6, 3)
        self.seldom = torch.nn.Parameter(torch.ones(3))
        self.never = torch.nn.Parameter(torch.ones(3))

    def forward(self, rows, seldom):
        hidden = self.out(self.table(rows))
        return hidden + self.seldom if seldom else hidden


def _unused(rank):
    gradients = []
    for wrapper in (wrap, TorchDDP):
        model = wrapper(Unused())
        sizer = brimful.BatchSizer(model)
        rows = torch.arange(6) + rank.index

        def loss_fn(m, piece):
            return F.cross_entropy(m(piece, rank.index == 1), piece % 3)

        sizer.step(rows, loss_fn, split=[2, 4])
        gradients.append(gradients_of(model))
        sizer.step(rows, loss_fn, split=[6], accumulate=True)
        gradients.append(gradients_of(model))
    for ours, theirs in zip(gradients[:2], gradients[2:], strict=True):
        assert ours.pop("never") is None and theirs.pop("never") is None
        assert theirs["table.weight"].is_sparse
        for name in ours:
            a, b = ours[name].to_dense(), theirs[name].to_dense()
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_sparse_gradients_and_parameters_that_nobody_uses(ranks):
    ranks(_unused)


def _error(rank, kind):
    model = TorchDDP(net())
    optimizer = optimizer_of(model)
    sizer = brimful.BatchSizer(model, optimizer, max_retries=1)
    before = values_of(model)

    def loss_fn(m, piece):
        loss = cross_entropy(m, piece)
        if rank.index == 1:
            raise kind("planted")
        return loss

    bad = raised(sizer.step, classes(8) if rank.index == 0 else None, cross_entropy)
    assert "the batch is None" in str(bad)
    error = raised(sizer.step, classes(8), loss_fn)
    assert same_bits(values_of(model), before)
    assert all(p.grad is None for p in model.parameters())
    sizer.step(classes(8, seed=rank.index), cross_entropy)
    optimizer.step()
    return type(error), str(error), error.seconds, values_of(model)


@pytest.mark.parametrize("kind", [ValueError, torch.OutOfMemoryError])
def test_a_rank_that_fails_is_noticed(ranks, kind):
    told, own = ranks(_error, kind)
    memory = kind is torch.OutOfMemoryError
    assert told[0] is (brimful.RankOutOfMemory if memory else brimful.RankFailed)
    assert "failed on rank 1: " in told[1] and "planted" in told[1]
    assert own[0] is (brimful.BatchTooLarge if memory else ValueError)
    assert max(told[2], own[2]) < 2
    assert same_bits(told[3], own[3])


def _inside_torch(rank):
    model = TorchDDP(net())
    sizer = brimful.BatchSizer(model)

    def hook(state, bucket):
        if rank.index == 1:
            raise torch.OutOfMemoryError("planted in the hook")
        return (
            dist.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda future: future.value()[0])
        )

    model.register_comm_hook(None, hook)
    error = raised(sizer.step, classes(8), cross_entropy)
    return type(error), str(error), error.seconds


def test_what_fails_inside_torchs_reduction_is_named_on_all_ranks(ranks):
    """Nothing can be repeated then, and the others find out when their group's timeout is over."""
    from rank_processes import run_ranks

    (told, words, _), (own, own_words, seconds) = run_ranks(_inside_torch, timeout_s=3)
    assert issubclass(told, brimful.RankFailed) and issubclass(own, brimful.RankFailed)
    for text in (words, own_words):
        assert "could not be reduced by the module's own DistributedDataParallel" in text
    assert "planted in the hook" in own_words and seconds < 2


def _left(rank):
    model = TorchDDP(net())
    sizer = brimful.BatchSizer(model)
    sizer.step(classes(8), cross_entropy)
    if rank.index == 1:
        return None
    error = raised(sizer.step, classes(8), cross_entropy)
    return type(error), str(error)


def test_a_rank_that_left_its_loop_is_missed(ranks):
    from rank_processes import run_ranks

    (kind, words), _ = run_ranks(_left, timeout_s=3)
    assert kind is brimful.RankFailed
    assert "the ranks could not agree on step 1 (rank 0); a rank left its loop" in words


def _refused(rank):
    errors = []
    for model, options in (
        (TorchDDP(net(), static_graph=True), {}),
        (TorchDDP(net()), {"lockstep": True}),
    ):
        errors.append(raised(brimful.BatchSizer, model, **options))
    return [(type(error), str(error)) for error in errors]


def test_what_cannot_be_put_off_is_refused(ranks):
    for static, lockstep in ranks(_refused):
        assert static[0] is NotImplementedError and "(name: static_graph)" in static[1]
        assert lockstep[0] is ValueError and "(lockstep: True)" in lockstep[1]


def _sharded(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(net(), mesh=mesh)
    error = raised(brimful.DistributedDataParallel, model)
    return [(type(error), str(error))]


def test_sharded_parameters_are_refused(ranks):
    for errors in ranks(_sharded):
        for kind, words in errors:
            assert kind is TypeError
            assert words.startswith("DTensor parameters") and "(parameter: 0.weight)" in words
