"""Ranks of a fleet of pipelines, each a process that has one stage, or all of them."""

import contextlib
import os

import torch
import torch.distributed as dist
from fleet_ranks import (
    BATCH,
    HELD,
    PATIENT,
    Data,
    Rank,
    expected,
    make_optimizer,
    net,
    values_of,
)

import brimful

MICROBATCHES = 2


class PipelineRank(Rank):
    """Its points: see `Rank`; "forward" and "backward" are of the second microbatch, in this rank's last stage."""

    def __init__(self, index, plan, port, log):
        self.plan, self.log, self.timed = plan, log, []
        self.metrics = contextlib.nullcontext()
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        self.store = store = dist.TCPStore("127.0.0.1", port, is_master=False)
        size = plan.pipeline_size
        replica, self.pipeline_rank = divmod(index, size)
        members = brimful.Members(
            store,
            f"r{index}",
            world_size=plan.world_size,
            replica=f"replica {replica}",
            pipeline_rank=self.pipeline_rank,
            pipeline_size=size,
            **{**PATIENT, **plan.options},
        )
        stages = brimful.split_sequential(net(plan, seed=replica), [2, 1])
        stages = stages if size == 1 else [stages[self.pipeline_rank]]
        self.model = torch.nn.ModuleList(stages)
        self.optimizer, self.scheduler = make_optimizer(self.model, plan)
        self.watch("regroup", members, "enter", calls_before=1)
        self.fleet = brimful.PipelineFleet(
            members,
            stages,
            self.optimizer,
            Data(plan.rows, plan.dtype),
            batch_size=BATCH,
            loss_fn=torch.nn.functional.mse_loss,
            seed=5,
            state=[self.scheduler],
            version=plan.version,
            wrap={"bucket_cap_mb": 1e-4},
            options={"microbatches": MICROBATCHES},
        )
        self.forwards = self.backwards = 0
        stages[-1].register_forward_pre_hook(self.forward)
        next(stages[-1].parameters()).register_hook(self.backward)
        self.watch("first_heal", self.fleet, "_transfer", calls_before=0)
        self.watch("heal", self.fleet, "_transfer", calls_before=1)
        self.watch("compare", self.fleet, "_compare", calls_before=1)

    def forward(self, *_):
        self.forwards += 1
        if self.plan.dies == ("raises", self.fleet.progress):
            raise KeyError("planted")
        if self.forwards == MICROBATCHES:
            self.at("forward", self.fleet.progress)

    def backward(self, _):
        self.backwards += 1
        if self.backwards == MICROBATCHES:
            self.at("backward", self.fleet.progress)

    def step(self, batch):
        fleet, step = self.fleet, self.fleet.progress
        rows, x, y = batch
        if self.plan.holds and step == HELD:
            self.store.wait(["go on"])
        counts = fleet.pipe._loss_fn is fleet._loss_fn  # else a row that stands for none
        self.write(f"h {step} {fleet.epoch} {' '.join(map(str, rows.tolist())) if counts else ''}")
        self.at("before", step)
        self.forwards = self.backwards = 0
        outcome = fleet.pipe.step(x, y)
        self.at("accepted", step)
        self.optimizer.step()
        self.at("stepped", step)
        self.scheduler.step()
        self.optimizer.zero_grad()
        return outcome

    def result(self):
        return {**super().result(), "rank": self.pipeline_rank}


def pipelines_bad(plan, results, tolerance):
    """Ranks whose parameters are not those of one process that has the whole model."""
    found = [0] * plan.pipeline_size
    for seed in range(plan.world_size // plan.pipeline_size):
        _, values = expected(plan, seed=seed)
        model = net(plan, seed)
        torch.nn.utils.vector_to_parameters(values, model.parameters())
        stages = brimful.split_sequential(model, [2, 1])
        parts = [model] if plan.pipeline_size == 1 else stages
        bad = [
            sum(
                (result["values"] - values_of(part)).abs().max().item() > tolerance
                for result in results
                if result["rank"] == rank
            )
            for rank, part in enumerate(parts)
        ]
        found = bad if seed == 0 or sum(bad) < sum(found) else found
    return sum(found)
