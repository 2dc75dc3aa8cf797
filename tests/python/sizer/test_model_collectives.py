"""A model that makes collectives of its own: the ranks take as many pieces each, and fail together."""

import pytest
import torch
from models import (
    SyncedNorm,
    classes,
    cross_entropy,
    gradients_of,
    relative_difference,
    require_equal_replicas,
    same_bits,
    values_of,
    wrap,
)
from rank_processes import raised

import brimful


def normed_net(norm):
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), norm(8), torch.nn.Linear(8, 3)).double()


def whole_batch_gradients(size):
    reference = normed_net(torch.nn.BatchNorm1d)
    batches = [classes(5 + 7 * r, seed=r, dtype=torch.float64) for r in range(size)]
    whole = tuple(torch.cat(part) for part in zip(*batches, strict=True))
    cross_entropy(reference, whole).backward()
    return batches, gradients_of(reference), reference[1].running_var


def lockstep_job(rank):
    batches, expected, variance = whole_batch_gradients(rank.size)
    model = wrap(normed_net(SyncedNorm))
    sizer = brimful.BatchSizer(model)
    outcome = sizer.step(batches[rank.index], cross_entropy)
    assert outcome.pieces == 1
    gradients = gradients_of(model)
    assert (
        relative_difference(
            {n: g for n, g in gradients.items() if n != "0.bias"},
            {n: g for n, g in expected.items() if n != "0.bias"},  # 0 but for rounding
        )
        < 1e-10
    )
    assert torch.allclose(model.module[1].running_var, variance, rtol=1e-12)
    model.zero_grad()
    pieces = brimful.BatchSizer(model, pieces=1 + 5 * rank.index)  # rank 0 wants 1, rank 1 wants 6
    taken = pieces.step(batches[rank.index], cross_entropy)
    finite = all(bool(g.isfinite().all()) for g in gradients_of(model).values())
    model.zero_grad()
    require_equal_replicas(model)
    return taken.pieces, finite, taken.weight


def test_collectives_in_the_model_match_and_give_the_gradients_of_the_whole_batch(ranks):
    # rank 0 has fewer rows than pieces: some of its pieces are empty
    assert ranks(lockstep_job) == [(6, True, 17.0)] * 2


def lockstep_shortage_job(rank, point):
    model = wrap(normed_net(SyncedNorm))
    batch = classes(8, seed=rank.index, dtype=torch.float64)
    sizer = brimful.BatchSizer(model)
    sizer.step(batch, cross_entropy)
    model.zero_grad()
    before = values_of(model)

    def planted(*_):
        raise torch.OutOfMemoryError("planted")

    if rank.index == 1:
        if point == "forward":
            model.module[1].register_forward_pre_hook(planted)
        else:
            model.module[2].weight.register_hook(planted)
    error = raised(sizer.step, batch, cross_entropy)
    assert same_bits(values_of(model), before)
    return error


@pytest.mark.parametrize("point", ["forward", "backward"])
def test_a_shortage_between_collectives_of_the_model_fails_on_all_ranks(ranks, point):
    healthy, failed = ranks(lockstep_shortage_job, point, timeout_s=5)
    assert type(failed) is brimful.BatchTooLarge and "planted" in str(failed)
    assert type(healthy) is brimful.RankOutOfMemory, healthy
    assert healthy.rank == 1 and "planted" in str(healthy)
    assert max(healthy.seconds, failed.seconds) < 8
