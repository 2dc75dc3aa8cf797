"""Ranks whose parameters differ on purpose train as with torch's class, and a message names the switch for others."""

import pytest
import torch
import torch.distributed as dist
from models import relative_difference, seed, values_of
from rank_processes import raised
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

import brimful

STEPS = 12
ROWS = 200
TorchDDP = torch.nn.parallel.DistributedDataParallel


def words_net():
    return torch.nn.Sequential(torch.nn.EmbeddingBag(ROWS, 8), torch.nn.Linear(8, 4))


def batch_of(rank, step):
    words = torch.Generator().manual_seed(100 * step + rank.index)
    return torch.randint(ROWS, (3, 2), generator=words), torch.randint(4, (3,), generator=words)


def loss_of(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


class Loop:
    """A model, its optimizer, and a step of a plain loop or of a sizer."""

    def __init__(self, rank, wrap, sized, optimizer_of, **options):
        seed(0)
        self.rank = rank
        self.model = wrap(words_net(), **options)
        self.parameters = list(self.model.parameters())
        self.optimizer = optimizer_of(self.parameters)
        self.sizer = brimful.BatchSizer(self.model, self.optimizer) if sized else None

    def gradients(self, step):
        self.optimizer.zero_grad()
        if self.sizer is None:
            loss_of(self.model, batch_of(self.rank, step)).backward()
        else:
            self.sizer.step(batch_of(self.rank, step), loss_of)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def fused_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, fused=True)


@torch.no_grad()
def move(parameters, by, sign, behind_the_counter):
    for parameter, distance in zip(parameters, by, strict=True):
        (parameter.data if behind_the_counter else parameter).add_(distance, alpha=sign)


def m_sam(loop, behind_the_counter):
    """Each rank moves by a gradient of its own before the pass whose gradients are reduced."""
    for step in range(STEPS):
        loop.optimizer.zero_grad()
        with loop.model.no_sync():
            loss_of(loop.model, batch_of(loop.rank, step)).backward()
        norm = torch.stack([p.grad.norm() for p in loop.parameters]).norm()
        away = [p.grad * (0.05 / norm) for p in loop.parameters]
        move(loop.parameters, away, 1, behind_the_counter)
        loop.gradients(step)
        move(loop.parameters, away, -1, behind_the_counter)
        loop.optimizer.step()


def perturbed(loop, behind_the_counter):
    """Each rank moves other rows of the table, in every second step, and puts them back."""
    noise = torch.Generator().manual_seed(loop.rank.index)
    for step in range(STEPS):
        kept = loop.parameters[0].detach().clone()
        away = torch.zeros_like(kept)
        away[torch.randint(ROWS, (6,), generator=noise)] = 0.01
        if step % 2 == 1:
            move(loop.parameters[:1], [away], 1, behind_the_counter)
        loop.gradients(step)
        loop.parameters[0].data.copy_(kept)
        loop.optimizer.step()


def post_local_sgd(loop, behind_the_counter):
    """Gradients stay each rank's own after the first steps, and every third step takes the mean of the parameters."""
    alone, _ = dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(None, alone, start_localSGD_iter=3)
    loop.model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=3, warmup_steps=3)
    for step in range(STEPS):
        loop.gradients(step)
        loop.optimizer.step()
        averager.average_parameters(loop.parameters)


def differing_job(rank, ways):
    found = {}
    for way, optimizer_of, behind_the_counter in ways:
        for sized in (False, True):
            for wrap in (TorchDDP, brimful.DistributedDataParallel):
                if sized and (way is post_local_sgd or way is m_sam):
                    continue  # a hook, and a backward beside the step's
                loop = Loop(rank, wrap, sized, optimizer_of)
                way(loop, behind_the_counter)
                found.setdefault((way.__name__, behind_the_counter), []).append(
                    values_of(loop.model.module)
                )
    return found


@pytest.mark.parametrize("way", [m_sam, perturbed, post_local_sgd])
def test_ranks_whose_parameters_differ_on_purpose_train_as_with_torchs_class(ranks, way):
    ways = [(way, sgd, False), (way, fused_sgd, True)]
    for by_way in ranks(differing_job, ways, watchdog_s=60):
        for name, (torchs, *others) in by_way.items():
            assert others
            for values in others:
                difference = relative_difference(values, torchs)
                assert difference < 1e-5, f"{name}: {difference}"


def left_out_job(rank, kind, options):
    """Rank 1 leaves out the update of step 2, and nothing says so. The errors of the steps after it."""
    wrap = TorchDDP if kind == "torch" else brimful.DistributedDataParallel
    seed(0)
    net = torch.nn.Sequential(torch.nn.EmbeddingBag(ROWS, 8), torch.nn.Linear(8, 4))
    model = wrap(net, **(options[rank.index] if kind != "torch" else {}))
    optimizer = fused_sgd(model.parameters())
    sized = options[rank.index] if kind == "torch" else {}
    sizer = brimful.BatchSizer(model, optimizer, **sized) if kind != "plain" else None
    errors = []
    for step in range(5):
        optimizer.zero_grad()
        batch = batch_of(rank, step)
        if sizer is None:
            errors.append(raised(lambda batch=batch: loss_of(model, batch).backward()))
        else:
            errors.append(raised(sizer.step, batch, loss_of))
        if step != 2 or rank.index == 0:
            optimizer.step()
    return [None if error is None else f"{type(error).__name__}: {error}" for error in errors]


ON, OFF = {}, {"check_updates": False}


@pytest.mark.parametrize("kind", ["plain", "sizer", "torch"])
@pytest.mark.parametrize("options", [(ON, ON), (OFF, OFF), (ON, OFF)])
def test_an_update_that_a_rank_leaves_out_raises_unless_that_is_meant(ranks, kind, options):
    owner = "the BatchSizer" if kind == "torch" else "DistributedDataParallel"
    for errors in ranks(left_out_job, kind, options):
        assert errors[:3] == [None] * 3
        if options == (ON, ON):
            for error in errors[3:]:
                assert error.startswith("PlanMismatch: the ranks' parameters differ: "), error
                assert error.endswith(f"pass check_updates=False to {owner}"), error
        else:
            assert errors[3:] == [None] * 2
