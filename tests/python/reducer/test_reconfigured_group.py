"""A process group whose members change in place: wrappers, sizers and samplers go on with those that are in it."""

import datetime
import os
import signal

import pytest
import torch
import torch.distributed as dist
from models import seed
from rank_processes import raised
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import brimful

pytestmark = pytest.mark.skipif(
    not hasattr(distributed_c10d, "_reconfigure"), reason="torch's groups cannot change in place"
)
TorchDDP = torch.nn.parallel.DistributedDataParallel
PATIENCE = datetime.timedelta(seconds=15)


class Changing:
    """The default process group, of members that are known by their first ranks."""

    def __init__(self, rank, members):
        self.store = distributed_c10d._get_default_store()
        dist.destroy_process_group()
        self.own, self.changes = rank.index, 0
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("changing", self.store),
            rank=rank.index,
            world_size=rank.size,
            timeout=PATIENCE,
            enable_reconfigure=True,
        )
        self.members = []
        self.become(members)

    def become(self, members, change=None):
        self.changes = self.changes + 1 if change is None else change
        self.members = members
        if self.own not in members:
            return
        place = f"change {self.changes}"
        self.store.set(f"{place}/{self.own}", distributed_c10d._get_reconfigure_handle())
        handles = [self.store.get(f"{place}/{member}").decode() for member in members]
        distributed_c10d._reconfigure(self.changes, handles, timeout=PATIENCE).wait()


def net():
    seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def batch_of(member, step):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + member))


def loss_of(model, batch):
    return model(batch).square().mean()


class Plain:
    def __init__(self, **options):
        self.model = brimful.DistributedDataParallel(net(), **options)

    def step(self, batch):
        loss_of(self.model, batch).backward()


class Scope(Plain):
    def step(self, batch):
        with self.model.step():
            super().step(batch)


class Hooked(Plain):
    def __init__(self, **options):
        super().__init__(**options)
        self.model.register_comm_hook(None, allreduce_hook)


class Two(Plain):
    """The second model's gradients are thrown away."""

    def __init__(self, **options):
        super().__init__(**options)
        self.other = brimful.DistributedDataParallel(net(), **options)

    def step(self, batch):
        super().step(batch)
        loss_of(self.other, batch).backward()
        self.other.zero_grad()


class Sized(Plain):
    def __init__(self, **options):
        super().__init__(**options)
        self.sizer = brimful.BatchSizer(self.model)

    def step(self, batch):
        self.sizer.step(batch, loss_of)


class SizedTorchs(Sized):
    def __init__(self, **options):
        self.model = TorchDDP(net(), **options)
        self.sizer = brimful.BatchSizer(self.model)


def expected(members, step):
    """The mean over the members, in one process."""
    model = net()
    for member in members:
        (loss_of(model, batch_of(member, step)) / len(members)).backward()
    return [p.grad for p in model.parameters()]


def require_mean(loop, group, step):
    loop.step(batch_of(group.own, step))
    gradients = zip(loop.model.parameters(), expected(group.members, step), strict=True)
    for parameter, gradient in gradients:
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)
    loop.model.zero_grad()


def changing_job(rank, kind, changes, dies):
    """The errors of the steps in which a member died, by change."""
    group = Changing(rank, changes[0])
    loop = kind() if group.own in group.members else None
    errors, step = [], 0
    for later in [*changes[1:], None]:
        for _ in range(3):
            if group.own in group.members:
                require_mean(loop, group, step)
            step += 1
        if later is None:
            return errors
        lost = [member for member in group.members if member not in later]
        if dies and group.own in lost:
            os.kill(os.getpid(), signal.SIGKILL)
        if dies and lost and group.own in group.members:
            errors.append(raised(loop.step, batch_of(group.own, step)))
            loop.model.zero_grad()
            assert all(parameter.grad is None for parameter in loop.model.parameters())
        joins = group.own not in group.members
        group.become(later)
        if joins and group.own in later:
            loop = kind(init_sync=False)


KINDS = [Plain, Scope, Hooked, Two, Sized, SizedTorchs]
ids = [kind.__name__ for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_survivors_of_a_reconfigured_group_have_their_mean(ranks, kind):
    results = ranks(changing_job, kind, [[0, 1, 2], [0, 2]], True, size=3, lost=(1,), timeout_s=5)
    for errors in (results[0], results[2]):
        kinds = RuntimeError if kind is Hooked else brimful.RankFailed  # the hook's own error
        assert len(errors) == 1 and isinstance(errors[0], kinds), errors
        assert errors[0].seconds < 10 or kind is SizedTorchs


@pytest.mark.parametrize("kind", [Plain, Hooked, Two, Sized], ids=lambda kind: kind.__name__)
def test_members_may_leave_return_in_another_order_and_join(ranks, kind):
    changes = [[0, 1], [1, 0], [1], [1, 2], [2, 0, 1]]
    ranks(changing_job, kind, changes[:4] if kind is Two else changes, False, size=3)


def sampled_job(rank):
    """Rows of an epoch that each member trained on, where rank 1 dies in the third step."""
    group = Changing(rank, [0, 1, 2])
    loop = Sized()
    sampler = brimful.GlobalSampler(48, batch_size=12, shuffle=False)
    rows = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
    trained, error = [], None
    data = [(rows[i], i) for i in range(48)]
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)

    def epoch():
        for batch in loop.sizer.batches(loader):
            if len(trained) == 2 and group.own == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loop.sizer.step(batch, lambda model, piece: loss_of(model, piece[0]))
            loop.model.zero_grad()
            trained.append(batch[1].tolist())

    error = raised(epoch)
    group.become([0, 2])
    refused = raised(lambda: list(zip(sampler, range(1), strict=False)))
    epoch()
    return trained, error, refused, sampler._core.handed_out


def test_a_sampler_cuts_what_was_not_trained_on_among_the_members_that_are_left(ranks):
    first, _, second = ranks(sampled_job, size=3, lost=(1,), timeout_s=5)
    for _, error, refused, handed_out in (first, second):
        assert isinstance(error, brimful.RankFailed), error
        assert refused is None and handed_out == 0
    both = [sorted(a + b) for a, b in zip(first[0], second[0], strict=True)]
    assert both[2:] == [list(range(24, 36)), list(range(36, 48))]  # by two ranks
    assert all(len(rows) < 12 for rows in both[:2])  # rank 1 had the others


def passing_job(rank):
    """The group changes while rows are handed out that have the shares of before."""
    group = Changing(rank, [0, 1])
    sampler = brimful.GlobalSampler(16, batch_size=4, shuffle=False)
    rows = iter(sampler)
    first = next(rows)
    sampler.note(None)
    group.become([0])
    if group.own == 1:
        return None
    alone = next(rows)  # nothing was under way
    group.become([0])
    refused = raised(next, rows)
    return first, alone, refused, next(iter(sampler))


def test_a_pass_over_a_sampler_goes_on_where_nothing_is_under_way_and_else_says_what_to_do(ranks):
    first, alone, refused, again = ranks(passing_job)[0]
    assert (first, alone, again) == ([0, 1], [4, 5, 6, 7], [4, 5, 6, 7])
    assert isinstance(refused, RuntimeError)
    assert "begin another one, which goes on after the last step" in str(refused)
