"""A fleet over NCCL: communicators of a group that lost a rank are aborted, and new ones made."""

import pytest
import torch
from fleet_ranks import Plan, Ranks, exact_bad

pytestmark = pytest.mark.gpu
needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason="needs two CUDA devices (torch.cuda.device_count() < 2)",
)


@pytest.fixture(autouse=True)
def errors_abort(monkeypatch):
    """As docs/data-parallel.md says: torch's watchdog ends no process."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")


def plan_of(index, world_size=2, **options):
    return Plan(
        world_size=world_size,
        dtype=torch.float32,
        device=f"cuda:{index}",
        options={"timeout_ms": 8000},
        **options,
    )


def test_a_fleet_of_one_trains():
    plan = plan_of(0, world_size=1)
    with Ranks() as ranks:
        ranks.start(plan)
        ((how, ended),) = ranks.answers()
        assert how == "ended" and ended["progress"] == 8 and ended["epoch"] == 1
        assert ranks.rows_bad(plan) == 0
        assert exact_bad(plan, [ended], 1e-5) == 0


@needs_two
@pytest.mark.parametrize("point", ["before", "piece1", "accepted", "stepped"])
def test_the_other_goes_on_alone(point):
    with Ranks() as ranks:
        for index in range(2):
            ranks.start(plan_of(index, dies=(point, 3) if index == 1 else None))
        (how, ended), (other, _) = ranks.answers()
        assert (how, other) == ("ended", "killed")
        assert ended["progress"] == 8 and ended["epoch"] == 2
        assert ranks.rows_bad(plan_of(0)) == 0
        assert exact_bad(plan_of(0), [ended], 1e-5) == 0


@needs_two
def test_another_one_joins_on_the_device_of_the_dead_one():
    with Ranks() as ranks:
        for index in range(2):
            dies = ("piece0", 2) if index == 1 else None
            ranks.start(plan_of(index, dies=dies, pause_s=0.5))
        ranks.wait_for(0, "s 2")
        ranks.start(plan_of(1))
        (_, first), _, (how, joined) = ranks.answers()
        assert how == "ended" and joined["progress"] == first["progress"] == 8
        assert ranks.rows_bad(plan_of(0)) == 0
        assert exact_bad(plan_of(0), [first, joined], 1e-5) == 0
