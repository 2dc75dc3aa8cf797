"""One replica's program under torchft: with brimful's fleet, and with torchft's own wrapper."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from fleet_ranks import BATCH, Data, Rank, loss_of, make_optimizer, net
from torchft import DistributedDataParallel, Optimizer
from torchft_replicas import Replica, manager_of


class Ours(Replica):
    """Where each step begins is timed, too."""

    sizes: ClassVar[dict[str, Any]] = {}
    wrap: ClassVar[dict[str, Any]] = {}

    def step(self, batch: Any) -> Any:
        self.timed.append(time.perf_counter())
        return super().step(batch)

    def run(self) -> dict[str, Any]:
        return {**super().run(), "step_s": _between(self.timed)}


class Theirs(Rank):
    """Each replica has a fixed third of the rows, as torchft's sampler gives it."""

    def __init__(self, index: int, plan: Any, port: int, log: int) -> None:
        self.plan, self.log, self.timed, self.pieces = plan, log, [], 0
        os.environ.update(GLOO_SOCKET_IFNAME="lo")
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        self.own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        _, self.manager = manager_of(
            self.own, f"r{index}", store.get("lighthouse").decode(), use_async_quorum=True
        )
        model = net(plan, seed=0)
        self.model = DistributedDataParallel(self.manager, model)
        optimizer, _ = make_optimizer(model, plan)
        self.optimizer = Optimizer(self.manager, optimizer)
        self.manager.register_state_dict_fn(
            "job",
            lambda state: (
                model.load_state_dict(state["model"]),
                optimizer.load_state_dict(state["optimizer"]),
            ),
            lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        )
        self.data, self.index = Data(plan.rows, plan.dtype), index

    def run(self) -> dict[str, Any]:
        steps = self.plan.epochs * self.plan.rows // BATCH
        share = BATCH // self.plan.world_size
        while (step := self.manager.current_step()) < steps:
            self.timed.append(time.perf_counter())
            self.optimizer.zero_grad()
            first = (step * BATCH + self.index * share) % self.plan.rows
            rows = range(first, first + share)
            batch = torch.utils.data.default_collate([self.data[row] for row in rows])
            loss = loss_of(self.model, batch)
            loss.register_hook(lambda _, step=step: self.at("piece0", step))
            quorum = self.manager._quorum_id
            self.write(f"h {step} {quorum} {' '.join(map(str, rows))}")
            loss.backward()
            self.optimizer.step()
            if self.manager.current_step() > step:
                self.write(f"s {step} {quorum}")
        self.manager.shutdown()
        return {"step_s": _between(self.timed)}


def _between(moments: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(moments)]
