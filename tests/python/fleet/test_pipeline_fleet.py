"""Replicas of a pipeline that lose a rank: the others go on, and the parameters are those of one process."""

import os
import signal

import pytest
import torch
from fleet_ranks import Plan, Ranks
from pipeline_fleet_ranks import PipelineRank, pipelines_bad
from torch import nn

import brimful

POINTS = ["before", "forward", "backward", "accepted", "stepped", "between"]


def require_healed(ranks, plan, killed=1, left_out=0, steps=8):
    answers = ranks.answers()
    ended = [answer for how, answer in answers if how == "ended"]
    assert [how for how, _ in answers].count("killed") == killed, answers
    raised = [error for how, error in answers if how == "raised"]
    assert len(raised) == left_out and all(kind == "LeftOut" for kind, _ in raised), answers
    assert {result["progress"] for result in ended} == {steps}
    assert ranks.rows_bad(plan) == 0
    assert pipelines_bad(plan, ended, 1e-12) == 0
    return ended, raised


def start(ranks, victim, dies, **others):
    for index in range(others["world_size"]):
        ranks.start(Plan(dies=dies if index == victim else None, **others))
    return Plan(**others)


@pytest.mark.parametrize("place, point", list(enumerate(POINTS)))
def test_a_process_that_has_a_whole_pipeline_dies(place, point):
    with Ranks(PipelineRank) as ranks:
        plan = start(ranks, place % 3, (point, 3), world_size=3)
        ended, _ = require_healed(ranks, plan)
        assert all(result["epoch"] >= 2 for result in ended)


@pytest.mark.parametrize(
    "victim, point",
    [(v, point) for place, point in enumerate(POINTS) for v in (place % 2, 3 - place % 2)],
)
def test_a_rank_takes_its_replica_out(victim, point):
    with Ranks(PipelineRank) as ranks:
        plan = start(ranks, victim, (point, 3), world_size=4, pipeline_size=2)
        ended, raised = require_healed(ranks, plan, left_out=1)
        assert all(result["epoch"] >= 2 for result in ended)
        dead = f"replica {victim // 2} cannot go on without its rank {victim % 2}, which died (r{victim})"
        assert dead in raised[0][1]


def test_replicas_that_nothing_happens_to_stay_in_one_group():
    with Ranks(PipelineRank) as ranks:
        plan = start(ranks, None, None, world_size=4, pipeline_size=2)
        ended, _ = require_healed(ranks, plan, killed=0)
        assert all(result["epoch"] == 1 for result in ended)


def test_one_more_dies_while_the_others_form_a_group():
    with Ranks(PipelineRank) as ranks:
        for index in range(6):
            dies = {2: ("before", 3), 5: ("compare", 0)}.get(index)
            ranks.start(Plan(world_size=6, pipeline_size=2, dies=dies))
        plan = Plan(world_size=6, pipeline_size=2)
        ended, raised = require_healed(ranks, plan, killed=2, left_out=2)
        assert len(ended) == 2 and all("cannot go on without" in text for _, text in raised)


def test_without_a_whole_replica_all_ranks_are_left_out():
    with Ranks(PipelineRank) as ranks:
        start(ranks, 0, ("backward", 3), world_size=2, pipeline_size=2)
        (killed, _), (how, error) = ranks.answers()
        assert killed == "killed" and how == "raised" and error[0] == "LeftOut", error
        assert "replica 0 cannot go on without its rank 0" in error[1]


def test_a_replica_joins_with_all_its_ranks():
    with Ranks(PipelineRank) as ranks:
        plan = start(ranks, None, None, world_size=2, pipeline_size=2, holds=True)
        ranks.go_on_with_more(plan, count=2)
        ended, _ = require_healed(ranks, plan, killed=0)
        assert {result["epoch"] for result in ended} == {2} and len(ended) == 4
        assert any(line[0] == "s" for line in ranks.lines(2))  # it did its share


def test_a_part_of_a_replica_stops_no_step():
    with Ranks(PipelineRank) as ranks:
        start(ranks, None, None, world_size=2, pipeline_size=2, holds=True)
        ranks.wait_for(0, "s 1")
        ranks.start(Plan(world_size=2, pipeline_size=2, options={"patience_ms": 1}))
        assert ranks.pipes[2].poll(40)  # it has asked for nothing when it gives up
        ranks.store.set("go on", "")
        *ended, (how, error) = ranks.answers()
        assert how == "raised" and "no group was formed within the patience" in error[1], error
        assert all(how == "ended" and result["epoch"] == 1 for how, result in ended)


def test_a_rank_that_is_stopped_takes_its_replica_out():
    with Ranks(PipelineRank) as ranks:
        for index in range(4):
            stops = ("before", 3) if index == 3 else None
            ranks.start(Plan(world_size=4, pipeline_size=2, stops=stops))
        ranks.wait_for(0, "s 7")
        os.kill(ranks.processes[3].pid, signal.SIGCONT)
        plan = Plan(world_size=4, pipeline_size=2)
        ended, _ = require_healed(ranks, plan, killed=0, left_out=2)
        assert all(result["epoch"] == 2 for result in ended)


def test_what_a_rank_raises_in_its_own_step_ends_the_job_on_all():
    with Ranks(PipelineRank) as ranks:
        start(ranks, 3, ("raises", 3), world_size=4, pipeline_size=2)
        answers = ranks.answers()
        kinds = [error[0] for _, error in answers]
        assert kinds == ["RankFailed", "RankFailed", "RankFailed", "KeyError"], answers


def test_a_last_step_of_fewer_rows_than_replicas():
    with Ranks(PipelineRank) as ranks:
        plan = start(ranks, None, None, world_size=4, pipeline_size=2, rows=49)
        ended, _ = require_healed(ranks, plan, killed=0, steps=6)
        assert len(ended) == 4


class WithWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, output, target):
        return ((output - target) * self.weight).square().mean()


def fleet_of_one(loss_fn, stages=None, **place):
    stages = stages or [nn.Linear(6, 4), nn.Linear(4, 3)]
    members = brimful.Members(torch.distributed.HashStore(), world_size=1, **place)
    data = torch.utils.data.TensorDataset(torch.randn(16, 6), torch.randn(16, 3))
    tensors = [p for module in [*stages, loss_fn] for p in getattr(module, "parameters", list)()]
    optimizer = torch.optim.SGD(tensors, lr=0.1)
    return brimful.PipelineFleet(
        members, stages, optimizer, data, batch_size=8, loss_fn=loss_fn
    ), optimizer


def test_a_loss_function_with_parameters_is_trained():
    loss_fn = WithWeight()
    fleet, optimizer = fleet_of_one(loss_fn)

    def step(batch):
        outcome = fleet.pipe.step(*batch)
        optimizer.step()
        return outcome

    assert len(list(fleet.steps(step, epochs=1))) == 2
    assert (loss_fn.weight != 1).all()


def test_a_step_is_one_call():
    fleet, _ = fleet_of_one(nn.functional.mse_loss)
    with pytest.raises(RuntimeError, match=r"must call pipe.step once \(calls: 0\)"):
        next(fleet.steps(lambda _: None, epochs=1))


def test_stages_that_are_no_modules_are_refused():
    with pytest.raises(TypeError, match=r"stage must be a torch\.nn\.Module"):
        fleet_of_one(nn.functional.mse_loss, [torch.nn.Linear(6, 3), torch.relu])
