"""Weights that a device counts: a step does not read them, and its mean is exact."""

import ctypes

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.cuda.call_counts import WAITS
from models import gradients_of, relative_difference, wrap
from rank_processes import raised
from torch import nn

import brimful
from brimful.reducer._between_hosts import between_hosts

IGNORED = -100
ROWS, SPLIT = 8, [3, 1, 4]
two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices (torch.cuda.device_count() < 2)"
)
pytestmark = [pytest.mark.gpu, two_devices]
simulation = ctypes.CDLL(None)
counted = pytest.mark.skipif(
    not hasattr(simulation, "sim_cuda_calls"), reason="only the simulated device counts"
)
A_STANDS_IN = 2  # waits of each operator that takes the place of kernels on the simulated device


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).to("cuda", dtype)


def labelled(seed, ignored=0.4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 6, generator=generator).to(dtype)
    y = torch.randint(5, (ROWS,), generator=generator)
    y[torch.rand(ROWS, generator=generator) < ignored] = IGNORED
    return x.cuda(), y.cuda()


def late(count):
    return count


def known(count):
    return count.item()


def mean_loss(weight):
    """Torch's mean over the labels that count: of none it is NaN, and its gradient 0."""

    def loss_fn(model, piece):
        x, y = piece
        return F.cross_entropy(model(x), y, ignore_index=IGNORED), weight((y != IGNORED).sum())

    return loss_fn


def divided_loss(model, piece):
    """The same by hand: of none its gradient is NaN too."""
    x, y = piece
    counts = y != IGNORED
    each = F.cross_entropy(model(x), y.clamp(min=0), reduction="none")
    return (each * counts).sum() / counts.sum(), counts.sum()


def over_nccl(rank, **options):
    torch.cuda.set_device(rank.index)
    group = dist.new_group(backend="nccl")
    return lambda module: wrap(module, process_group=group, **options)


def train(model, weight, seed, steps=4, dtype=torch.float32):
    """What each step leaves: gradients, loss and weight."""
    sizer = brimful.BatchSizer(model)
    found = []
    for step in range(steps):
        batch = labelled(seed + step, ignored=0.1 + 0.2 * step, dtype=dtype)
        outcome = sizer.step(batch, mean_loss(weight), split=SPLIT)
        gradients = {name: g.cpu().clone() for name, g in gradients_of(model).items()}
        found.append((gradients, outcome.loss, outcome.weight))
        model.zero_grad()
    return found, sizer.state_dict()


def require_same(ours, expected, tolerance):
    (found, state), (reference, its_state) = ours, expected
    for (own, loss, weight), (gradients, its_loss, its_weight) in zip(
        found, reference, strict=True
    ):
        assert relative_difference(own, gradients) <= tolerance
        assert weight == its_weight
        assert loss == pytest.approx(its_loss, rel=1e-6)
    assert state == its_state


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 2e-2)],
    ids=["float", "double", "bfloat16"],
)
def test_one_process_has_the_exact_mean(dtype, tolerance):
    found = train(net(dtype), late, 1, dtype=dtype)
    require_same(found, train(net(dtype), known, 1, dtype=dtype), tolerance)


def trained_job(rank, hosts):
    with between_hosts(hosts):
        wrapped = over_nccl(rank)
        found = train(wrapped(net()), late, 10 * rank.index)
        return found, train(wrapped(net()), known, 10 * rank.index)


@pytest.mark.parametrize("hosts", [True, False], ids=["between hosts", "in the bucket"])
@pytest.mark.parametrize("size", [1, 2])
def test_ranks_have_the_exact_mean(ranks, size, hosts):
    results = ranks(trained_job, hosts, size=size)
    for found, reference in results:
        require_same(found, reference, 1e-6)
    for found, _ in results:
        for step, (gradients, *_) in enumerate(found[0]):
            assert relative_difference(gradients, results[0][0][0][step][0]) == 0


def mixed_job(rank):
    """One rank reads its weights, the other does not, in every other step; rank 1 has no data in one."""
    model = over_nccl(rank)(net())
    sizer = brimful.BatchSizer(model)
    found = []
    for step in range(5):
        batch = labelled(10 * rank.index + step)
        data = brimful.NO_DATA if (rank.index, step) == (1, 3) else batch
        weight = late if (rank.index + step) % 2 == 0 else known
        outcome = sizer.step(data, mean_loss(weight))
        found.append({name: g.cpu().clone() for name, g in gradients_of(model).items()})
        model.zero_grad()
    return found, outcome.weight


def test_ranks_may_differ_in_who_reads_its_weights(ranks):
    results = ranks(mixed_job)
    for step in range(5):
        model = net()
        all_rows = [labelled(10 * rank + step) for rank in range(2) if (rank, step) != (1, 3)]
        x, y = (torch.cat(parts) for parts in zip(*all_rows, strict=True))
        F.cross_entropy(model(x), y, ignore_index=IGNORED).backward()
        expected = {name: g.cpu() for name, g in gradients_of(model).items()}
        for found, _ in results:
            assert relative_difference(found[step], expected) <= 1e-6
    total = sum((labelled(10 * rank + 4)[1] != IGNORED).sum().item() for rank in range(2))
    assert [weight for _, weight in results] == [total, total]


def waits():
    simulation.sim_cuda_calls.restype = ctypes.c_long
    calls = sum(simulation.sim_cuda_calls(name.encode()) for name in WAITS)
    return calls - A_STANDS_IN * simulation.sim_cuda_calls(b"operator")


def waiting_job(rank, weight):
    model = over_nccl(rank)(net()) if rank else net()
    sizer = brimful.BatchSizer(model)
    batch = labelled(rank.index if rank else 0)

    def step():
        sizer.step(batch, mean_loss(weight), split=SPLIT)
        model.zero_grad()

    for _ in range(12):
        step()
    torch.cuda.synchronize()
    before = waits()
    step()
    return waits() - before


@counted
@pytest.mark.parametrize("size", [0, 1, 2])
def test_a_step_waits_for_no_weight(ranks, size):
    for weight, least in ((late, 0), (known, len(SPLIT))):
        found = ranks(waiting_job, weight, size=size) if size else [waiting_job(None, weight)]
        for number in found:
            assert number == 0 if weight is late else number >= least


def test_a_mean_over_nothing_is_refused_one_step_late():
    model = net()
    sizer = brimful.BatchSizer(model)
    sizer.step(labelled(0), mean_loss(late))
    model.zero_grad()
    outcome = sizer.step(labelled(1, ignored=1.0), mean_loss(late))
    assert all(not g.any() for g in gradients_of(model).values())
    assert (outcome.weight, outcome.loss) == (0, 0)
    torch.cuda.synchronize()
    model.zero_grad()
    with pytest.raises(ValueError, match="the weights of step 1 sum to 0, and a mean over nothing"):
        sizer.step(labelled(2), mean_loss(late))
    assert sizer.step(labelled(2), mean_loss(late)).weight > 0  # it is said once


def nothing_job(rank):
    model = over_nccl(rank)(net())
    sizer = brimful.BatchSizer(model)
    sizer.step(labelled(rank.index, ignored=1.0), mean_loss(late))
    torch.cuda.synchronize()
    model.zero_grad()
    error = raised(lambda: sizer.step(labelled(rank.index), mean_loss(late)))
    model.zero_grad()
    return error, sizer.step(labelled(rank.index), mean_loss(late)).weight


def test_ranks_refuse_a_mean_over_nothing_together(ranks):
    for error, weight in ranks(nothing_job):
        assert type(error) in (ValueError, brimful.RankFailed), error
        assert "the weights of step 0 sum to 0" in str(error)
        assert weight > 0


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused_one_step_late(weight):
    model = net()
    sizer = brimful.BatchSizer(model)

    def loss_fn(model, piece):
        return model(piece).square().mean(), torch.tensor(weight, device="cuda")

    x, _ = labelled(0)
    sizer.step(x, loss_fn)
    torch.cuda.synchronize()
    model.zero_grad()
    with pytest.raises(ValueError, match=r"the weights of step 0 sum to (nan|inf)"):
        sizer.step(x, loss_fn)


def test_a_weight_of_several_elements_is_refused():
    sizer = brimful.BatchSizer(net())

    def loss_fn(model, piece):
        return model(piece).square().mean(), torch.ones(3, device="cuda")

    with pytest.raises(ValueError, match=r"the weight of a piece is no number \(shape: \[3\]"):
        sizer.step(labelled(0)[0], loss_fn)


def rows_ignored(places):
    x, y = labelled(3, ignored=0.0)
    y[places] = IGNORED
    return x, y


def test_a_piece_in_which_nothing_counts_adds_nothing():
    """Its loss is NaN, and the gradient of torch's mean is not."""
    whole, pieces = net(), net()
    batch = rows_ignored([3])
    F.cross_entropy(whole(batch[0]), batch[1], ignore_index=IGNORED).backward()
    sizer = brimful.BatchSizer(pieces)
    outcome = sizer.step(batch, mean_loss(late), split=SPLIT)
    assert outcome.loss > 0
    assert relative_difference(gradients_of(pieces), gradients_of(whole)) <= 1e-6
    torch.cuda.synchronize()
    pieces.zero_grad()
    sizer.step(batch, mean_loss(late), split=SPLIT)


def test_a_gradient_that_such_a_piece_made_nan_is_reported():
    model = net()
    sizer = brimful.BatchSizer(model)
    sizer.step(rows_ignored([3]), divided_loss, split=SPLIT)
    torch.cuda.synchronize()
    model.zero_grad()
    with pytest.raises(ValueError, match="the gradient of step 0 was not finite, and one of its"):
        sizer.step(rows_ignored([]), divided_loss, split=SPLIT)


def loaded_job(rank):
    """A rank that has loaded a state divides by another number."""
    model = over_nccl(rank)(net())
    sizer = brimful.BatchSizer(model)
    sizer.step(labelled(rank.index), mean_loss(late))
    model.zero_grad()
    if rank.index == 1:
        sizer.load_state_dict(sizer.state_dict())
    return raised(lambda: sizer.step(labelled(rank.index), mean_loss(late)))


def test_ranks_that_divide_by_different_numbers_are_found(ranks):
    for error in ranks(loaded_job):
        assert type(error) is brimful.PlanMismatch, error


def test_a_shortage_repeats_a_step_with_late_weights():
    models = [net(), net()]
    batch = labelled(5)

    def running_out(model, piece):
        if len(piece[0]) == ROWS:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return mean_loss(late)(model, piece)

    outcome = brimful.BatchSizer(models[0], predict=False).step(batch, running_out)
    assert outcome.retries == 1
    brimful.BatchSizer(models[1], predict=False).step(batch, mean_loss(known))
    assert relative_difference(gradients_of(models[0]), gradients_of(models[1])) <= 1e-6


def pair_loss(towers):
    scores = towers["a"] @ towers["b"].t()
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def test_a_step_over_pairs_behind_one_with_late_weights_is_its_own_mean():
    x = labelled(6)[0]
    gradients = []
    for warms_up in (True, False):
        model = net()
        sizer = brimful.BatchSizer(model)
        if warms_up:
            sizer.step(labelled(5), mean_loss(late), split=SPLIT)
            model.zero_grad()
        sizer.pair_step(x, lambda net, piece: {"a": net(piece), "b": net(piece * 2)}, pair_loss)
        gradients.append(gradients_of(model))
    assert relative_difference(*gradients) <= 1e-6
