"""Replicas that torchft's manager keeps together: one is killed, one comes back, another model is refused."""

import pytest
import torch.distributed as dist
from fleet_ranks import Data, Plan, Ranks, exact_bad, make_optimizer, net

pytest.importorskip("torchft")
from torchft.process_group import ProcessGroupBabyGloo
from torchft_replicas import SOON, Replica, lighthouse_server, manager_of, start_together

from brimful.integrations.torchft import Fleet


@pytest.fixture
def replicas():
    lighthouse = lighthouse_server()
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
    start_together(replicas, Plan(), Plan(dies=(point, 3)), Plan())
    require_whole(replicas, Plan(), killed=1)


def test_a_replica_that_comes_back_takes_its_share_again(replicas):
    start_together(
        replicas, Plan(pause_s=0.7), Plan(pause_s=0.7), Plan(dies=("piece0", 2), pause_s=0.7)
    )
    replicas.wait_for(0, "s 3")
    back = replicas.start(Plan())
    require_whole(replicas, Plan(), killed=1)
    assert any(line[0] == "s" for line in replicas.lines(back))


def test_a_replica_with_another_program_is_refused(replicas):
    start_together(replicas, Plan(pause_s=0.5), Plan(pause_s=0.5))
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
