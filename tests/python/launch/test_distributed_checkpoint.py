"""torch.distributed.checkpoint: a run that was interrupted in the middle of an epoch goes on as if it had not been."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import classes, cross_entropy, same_bits, values_of, wrap
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import brimful
from brimful.checkpoint import BucketPlan, PerRank, load, save_on_rank0

EPOCH = 8


def net(seed, width=16):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, 3),
    )


class Run:
    """What one start of a training program has."""

    def __init__(self, seed, plan="auto"):
        self.model = wrap(net(seed), plan=plan)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        self.sizer = brimful.BatchSizer(self.model, self.optimizer, scaler=self.scaler)
        self.run_out = False

    def loss(self, model, piece):
        if self.run_out and len(piece[1]) > 4:
            raise torch.OutOfMemoryError("planted")
        return cross_entropy(model, piece)

    def train(self, loader, stop=None):
        for number, batch in enumerate(self.sizer.batches(loader)):
            self.sizer.step(batch, self.loss)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            if number + 1 == stop:
                break

    def values(self):
        return values_of(self.model)

    def state(self):
        values, optimizer = get_state_dict(self.model.module, self.optimizer)
        return {
            "model": values,
            "optimizer": optimizer,
            "plan": BucketPlan(self.model),
            "scaler": self.scaler,
            "sizer": PerRank(self.sizer),
        }


def batches(rank):
    """Rank 1 has less data: its loader ends first."""
    count = EPOCH - 4 * rank.index
    return [classes(8, seed=100 * rank.index + number) for number in range(count)]


def resumed(path, module_seed):
    plan = BucketPlan()
    dcp.load({"plan": plan}, checkpoint_id=path)
    run = Run(module_seed, plan.of(net(0)))
    state = run.state()
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        run.model.module,
        run.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return run


def interrupted_job(rank, path):
    whole = Run(0)
    whole.run_out = rank.index == 0
    whole.train(batches(rank))

    first = Run(0)
    first.run_out = rank.index == 0
    first.train(batches(rank), stop=6)
    dcp.save(first.state(), checkpoint_id=path)

    second = resumed(path, module_seed=1)
    found = second.sizer.state_dict()
    assert found == first.sizer.state_dict()
    assert found["steps"] == 6 and found["consumed"] == (6, 4)[rank.index]
    assert found["piece_rows"] == (4, 0)[rank.index]
    assert second.model.plan == first.model.plan
    assert second.scaler.state_dict() == first.scaler.state_dict()
    second.run_out = rank.index == 0
    rest = itertools.islice(batches(rank), int(found["consumed"]), None)
    second.train(rest)
    step = second.sizer.report().history[0]
    assert (step.pieces, step.retries) == (2 if second.run_out else 0, 0)  # what fits was loaded
    assert same_bits(second.values(), whole.values())
    return second.values()


def test_a_run_that_was_interrupted_within_an_epoch_ends_with_the_same_bits(ranks, tmp_path):
    first, second = ranks(interrupted_job, str(tmp_path))
    assert same_bits(first, second)


def other_model_job(rank, path):
    model = wrap(net(0))
    dcp.save({"plan": BucketPlan(model)}, checkpoint_id=path)
    plan = BucketPlan()
    assert plan.of(net(0)) == "auto"
    dcp.load({"plan": plan}, checkpoint_id=path)
    assert plan.of(net(1)) == model.plan
    with pytest.raises(brimful.PlanMismatch, match=r"here: 0\.weight \[17, 6\].*0\.weight \[16, 6"):
        plan.of(net(0, width=17))
    with pytest.raises(brimful.PlanMismatch, match=r"here: none, in the plan: 1\.weight \[16\]"):
        plan.of(torch.nn.Sequential(torch.nn.Linear(6, 16)))
    again = BucketPlan()
    again.load_state_dict(plan.state_dict())
    assert again.of(net(1)) == model.plan


def test_a_plan_of_another_model_is_refused_with_both_parameters(ranks, tmp_path):
    ranks(other_model_job, str(tmp_path))


@pytest.mark.parametrize("state", [{}, {"plan": "no"}, {"plan": None}, {"plan": '{"plan": ""}'}])
def test_what_is_no_plan_is_a_value_error(state):
    with pytest.raises(ValueError, match=r"no bucket plan that state_dict gave.*; load what"):
        BucketPlan().load_state_dict(state)


def elastic_job(rank, path):
    alone = dist.new_group([0])
    model = net(0)
    if rank.index == 1:
        with pytest.raises(ValueError, match=r"this rank is not in the group \(rank: 1\)"):
            brimful.DistributedDataParallel(net(0), process_group=alone)
        for call in (
            lambda: save_on_rank0({}, f"{path}/state", group=alone),
            lambda: load(f"{path}/state", group=alone),
            lambda: PerRank(net(0), group=alone),
            lambda: brimful.Pipeline([net(0)], microbatches=1, group=alone),
        ):
            with pytest.raises(ValueError, match=r"this rank is not in the group \(rank: 1\)"):
                call()
    sizer = brimful.BatchSizer(model, local=True)
    if rank.index == 0:
        dcp.save({"sizer": PerRank(sizer)}, checkpoint_id=path, process_group=alone)
    dist.barrier()
    with pytest.raises(CheckpointException, match=r"sizer\.rank1"):  # on both ranks
        dcp.load({"sizer": PerRank(sizer)}, checkpoint_id=path)


def test_another_number_of_ranks_finds_nothing_of_its_own(ranks, tmp_path):
    ranks(elastic_job, str(tmp_path))


def trained(wrapper, seed):
    model = torch.nn.Sequential(net(seed), wrapper(net(seed + 1)))  # wrapped as a part
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rows = torch.randn(4, 6)
    (model[0](rows) + model[1](rows)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def alike_job(rank):
    theirs, ours = torch.nn.parallel.DistributedDataParallel, wrap
    for parts in (slice(None), 1):
        for source, target in ((theirs, ours), (ours, theirs), (ours, ours)):
            (model, optimizer), (other, other_optimizer) = trained(source, 0), trained(target, 5)
            if parts == 1:
                model, other = model[1], other[1]
                optimizer, other_optimizer = (
                    torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, other)
                )
            values, state = get_state_dict(model, optimizer)
            assert not [name for name in [*values, *state["state"]] if "module" in name]
            assert values.keys() == get_state_dict(other, other_optimizer)[0].keys()
            found = set_state_dict(
                other, other_optimizer, model_state_dict=values, optim_state_dict=state
            )
            assert found == ([], [])
            assert same_bits(values_of(other), values_of(model))
    assert all(name.startswith("module.") for name in wrap(net(0)).state_dict())


def test_a_state_of_torchs_wrapper_loads_into_ours_and_the_reverse(ranks):
    ranks(alike_job)
