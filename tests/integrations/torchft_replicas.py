"""Replicas that torchft's manager keeps together, each a process of its own; the lighthouse is beside them."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from fleet_ranks import Rank, make_optimizer, net
from torchft import Manager
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroupGloo

from brimful.integrations.torchft import Fleet

SOON = timedelta(seconds=20)


def start_together(replicas, *plans):
    """Replicas that do not begin before each of them has a manager: the lighthouse waits for those that it heard."""
    replicas.store.set("together", str(len(plans)))
    return [replicas.start(plan) for plan in plans]


def wait_for_the_others(store):
    store.add("up", 1)
    until = time.monotonic() + SOON.total_seconds()
    while store.add("up", 0) < int(store.get("together")):
        assert time.monotonic() < until, "the other replicas did not start"
        time.sleep(0.01)


def manager_of(store, name, lighthouse, **options):
    pg = options.pop("pg", None) or ProcessGroupGloo(timeout=SOON)
    return pg, Manager(
        pg=pg,
        load_state_dict=None,
        state_dict=None,
        timeout=SOON,
        quorum_timeout=SOON,
        connect_timeout=SOON,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname="127.0.0.1",
        **{"min_replica_size": 1, "world_size": 1, "use_async_quorum": False, **options},
    )


class Replica(Rank):
    """A rank in a replica group of its own, whose members torchft chooses."""

    def __init__(self, index, plan, port, log):
        self.plan, self.log, self.timed, self.pieces = plan, log, [], 0
        os.environ.update(GLOO_SOCKET_IFNAME="lo")
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        lighthouse = store.get("lighthouse").decode()
        self.own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pg, self.manager = manager_of(self.own, f"r{index}", lighthouse)
        wait_for_the_others(store)
        self.model = net(plan, seed=0)
        self.optimizer, self.scheduler = make_optimizer(self.model, plan)
        self.fleet = self.make_fleet(Fleet, self.manager, pg)
        self.model[0].weight.register_hook(self.last_gradient)
        self.watch("regroup", self.fleet.model, "regroup", calls_before=1)
        self.optimizer.register_step_pre_hook(lambda *_: self.at("accepted", self.fleet.progress))
        self.optimizer.register_step_post_hook(lambda *_: self.at("stepped", self.fleet.progress))

    def step(self, batch):
        step = self.fleet.progress
        rows = batch[0].tolist() if isinstance(batch, list) else []
        self.write(f"h {step} {self.fleet.epoch} {' '.join(map(str, rows))}")
        self.at("before", step)
        self.pieces = 0
        return self.fleet.sizer.step(batch, self.loss)

    def run(self):
        for _ in self.fleet.steps(self.step, epochs=self.plan.epochs):
            self.scheduler.step()
            done = self.fleet.progress - 1
            self.write(f"s {done} {self.fleet.epoch}")
            self.at("between", done)
            time.sleep(self.plan.pause_s)
        self.manager.shutdown()
        values = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        return {
            "values": values,
            "progress": self.fleet.progress,
            "rate": self.scheduler.get_last_lr(),
            "regroups": [{"epoch": 1, "names": ["r0"]}],  # all begin alike
        }


def lighthouse_server():
    return LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=2,
        join_timeout_ms=1000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=600,
    )
