"""Replicas that torchft's manager keeps together: one is killed, one comes back, another model is refused."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fleet_ranks import BATCH, Data, Plan, Rank, Ranks, exact_bad, make_optimizer, net

pytest.importorskip("torchft")
from torchft import Manager
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroupBabyGloo, ProcessGroupGloo

from brimful.integrations.torchft import Fleet

SOON = timedelta(seconds=20)


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
        lighthouse = dist.TCPStore("127.0.0.1", port, is_master=False).get("lighthouse").decode()
        self.own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pg, self.manager = manager_of(self.own, f"r{index}", lighthouse)
        self.model = net(plan, seed=0)
        self.optimizer, self.scheduler = make_optimizer(self.model, plan)
        self.fleet = Fleet(
            self.manager,
            pg,
            self.model,
            self.optimizer,
            Data(plan.rows, plan.dtype),
            batch_size=BATCH,
            seed=5,
            state=[self.scheduler],
            version=plan.version,
            sizes={"pieces": 2},
            wrap={"bucket_cap_mb": 1e-4},
        )
        self.model[0].weight.register_hook(self.last_gradient)
        self.watch("regroup", self.fleet.model, "regroup", after_first=True)
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


@pytest.fixture
def replicas():
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=2,
        join_timeout_ms=1000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=600,
    )
    with Ranks(Replica) as ranks:
        ranks.store.set("lighthouse", lighthouse.address())
        yield ranks
    lighthouse.shutdown()


def require_whole(replicas, plan, killed):
    answers = replicas.answers()
    ended = [answer for how, answer in answers if how == "ended"]
    assert [how for how, _ in answers].count("killed") == killed, answers
    assert len(ended) == len(answers) - killed, answers
    assert {result["progress"] for result in ended} == {8}
    assert replicas.rows_bad(plan) == 0
    assert exact_bad(plan, ended, 1e-12) == 0
    assert len({tuple(result["rate"]) for result in ended}) == 1


@pytest.mark.parametrize("point", ["before", "piece1", "exchange", "accepted", "stepped"])
def test_the_batch_stays_whole_when_a_replica_is_killed(replicas, point):
    for index in range(3):
        replicas.start(Plan(dies=(point, 3) if index == 1 else None))
    require_whole(replicas, Plan(), killed=1)


def test_a_replica_that_comes_back_takes_its_share_again(replicas):
    for index in range(3):
        replicas.start(Plan(dies=("piece0", 2) if index == 2 else None, pause_s=0.7))
    replicas.wait_for(0, "s 3")
    back = replicas.start(Plan())
    require_whole(replicas, Plan(), killed=1)
    assert any(line[0] == "s" for line in replicas.lines(back))


def test_a_replica_with_another_program_is_refused(replicas):
    for _ in range(2):
        replicas.start(Plan(pause_s=0.5))
    replicas.wait_for(0, "s 1")
    replicas.start(Plan(version="two"))
    *others, (how, error) = replicas.answers()
    assert (how, error[0]) == ("raised", "PlanMismatch")
    assert "there: version one" in error[1] and "here: version two" in error[1]
    assert [how for how, _ in others] == ["ended", "ended"]
    assert replicas.rows_bad(Plan()) == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pg": ProcessGroupBabyGloo}, "process group: ProcessGroupBabyGloo"),
        ({"use_async_quorum": True}, "use_async_quorum: True"),
        ({"world_size": 2}, "its ranks: 2"),
    ],
)
def test_what_cannot_keep_the_batch_is_refused(replicas, options, text):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if "pg" in options:
        options = {"pg": options["pg"](timeout=SOON)}
    pg, manager = manager_of(store, "r", replicas.store.get("lighthouse").decode(), **options)
    plan = Plan()
    model = net(plan, seed=0)
    with pytest.raises(ValueError, match=text):
        Fleet(manager, pg, model, make_optimizer(model, plan)[0], Data(8, plan.dtype), batch_size=4)
    manager.shutdown()
