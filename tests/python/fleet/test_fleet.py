"""Ranks that die, are cut off or join: no row is lost or doubled, and the parameters are those of one process."""

import os
import signal
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from fleet_ranks import Plan, Rank, Ranks, exact_bad

from brimful.cli._job import job_table, read_job

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
POINTS = ["before", "piece0", "piece1", "exchange", "accepted", "stepped", "between"]


def same_values(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def require_healed(ranks, plan, killed=1):
    answers = ranks.answers()
    ended = [answer for how, answer in answers if how == "ended"]
    assert [how for how, _ in answers].count("killed") == killed, answers
    assert len(ended) == len(answers) - killed, answers
    assert {result["progress"] for result in ended} == {8}
    assert ranks.rows_bad(plan) == 0
    assert exact_bad(plan, ended, TOLERANCE[plan.dtype]) == 0
    assert len({tuple(result["rate"]) for result in ended}) == 1
    assert all(same_values(r["optimizer"], ended[0]["optimizer"]) for r in ended)
    return ended


def with_one_that_dies(size, victim, dies, **others):
    return [
        Plan(world_size=size, dies=dies if index == victim else None, **others)
        for index in range(size)
    ]


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("point", POINTS)
def test_the_others_go_on_from_the_step_in_which_a_rank_died(point, victim):
    with Ranks() as ranks:
        plans = with_one_that_dies(3, victim, (point, 3))
        for plan in plans:
            ranks.start(plan)
        ended = require_healed(ranks, plans[0])
        assert all(result["epoch"] == 2 for result in ended)


def test_metrics_have_the_rank_in_the_group_that_is_there(tmp_path):
    with Ranks() as ranks:
        for index in range(3):
            dies = ("between", 3) if index == 1 else None
            ranks.start(Plan(metrics=str(tmp_path), dies=dies, pause_s=0.05))
        require_healed(ranks, Plan())
    lines = read_job(tmp_path)
    assert [line["rank"] for line in lines] == [0, 1, 2]
    assert [(line["step"], line["world_size"]) for line in lines[:2]] == [(8, 2)] * 2
    assert "2 of 2 ranks" in job_table(lines, lines[0]["time"])


def test_ranks_that_nothing_happens_to_stay_in_one_group():
    with Ranks() as ranks:
        plan = Plan(world_size=2, dtype=torch.float32)
        for _ in range(2):
            ranks.start(plan)
        ended = require_healed(ranks, plan, killed=0)
        assert all(result["epoch"] == 1 for result in ended)


def test_a_rank_goes_on_alone():
    with Ranks() as ranks:
        plans = with_one_that_dies(2, 0, ("piece1", 2), dtype=torch.float32)
        for plan in plans:
            ranks.start(plan)
        require_healed(ranks, plans[0])


def test_a_rank_that_missed_a_step_gets_the_state_of_one_that_finished_it():
    """One rank is in the middle of its step when the group breaks; the optimizer has not stepped there."""
    with Ranks() as ranks:
        ranks.start(Plan())
        ranks.start(Plan(torn_in=3))
        ranks.start(Plan(dies=("between", 3)))
        ended = require_healed(ranks, Plan())
        healed = [result["regroups"][-1]["healed"] for result in ended]
        assert healed[0] == healed[1] and len(healed[0]) == 1
        assert not any(line[:2] == ["s", "3"] for line in ranks.lines(1))


def test_where_all_ranks_are_in_the_middle_of_a_step_none_has_a_state_to_go_on_with():
    with Ranks() as ranks:
        ranks.start(Plan(torn_in=3))
        ranks.start(Plan(torn_in=3))
        ranks.start(Plan(dies=("between", 3)))
        answers = ranks.answers()
        assert all(error[0] == "HalfStepError" for how, error in answers[:2]), answers


def test_two_die_in_the_same_step():
    with Ranks() as ranks:
        for index in range(4):
            ranks.start(Plan(world_size=4, dies=("piece0", 3) if index in (0, 2) else None))
        require_healed(ranks, Plan(world_size=4), killed=2)


@pytest.mark.parametrize("point", ["regroup", "compare"])
def test_one_more_dies_while_the_others_form_a_group(point):
    with Ranks() as ranks:
        for index in range(4):
            dies = {1: ("before", 3), 2: (point, 0)}.get(index)
            ranks.start(Plan(world_size=4, dies=dies))
        require_healed(ranks, Plan(world_size=4), killed=2)


@pytest.mark.parametrize("victim, point", [(0, "heal"), (2, "heal")])
def test_one_dies_while_a_rank_that_joined_is_given_the_state(victim, point):
    """The source of the state, and the one that gets it."""
    with Ranks() as ranks:
        slow = {"world_size": 2, "pause_s": 0.1, "epochs": 4, "holds": True}
        for index in range(2):
            ranks.start(Plan(dies=(point, 0) if index == victim else None, **slow))
        joins = Plan(**slow)
        ranks.go_on_with_more(replace(joins, dies=("first_heal", 0)) if victim == 2 else joins)
        answers = ranks.answers()
        ended = [result for how, result in answers if how == "ended"]
        assert len(ended) == 2 and {result["progress"] for result in ended} == {16}, answers
        assert ranks.rows_bad(joins) == 0
        assert exact_bad(joins, ended, 1e-12) == 0


def test_a_process_joins_after_a_step_and_has_the_state_of_the_others():
    with Ranks() as ranks:
        plan = Plan(world_size=2, pause_s=0.1, epochs=4, holds=True)
        for _ in range(2):
            ranks.start(plan)
        ranks.go_on_with_more(plan)
        ended = [result for _, result in ranks.answers()]
        assert {result["progress"] for result in ended} == {16}
        assert ranks.rows_bad(plan) == 0 and exact_bad(plan, ended, 1e-12) == 0
        assert {result["epoch"] for result in ended} == {2}
        assert any(line[0] == "s" for line in ranks.lines(2))  # it did its share


@pytest.mark.parametrize(
    "other, says", [({"width": 17}, "model"), ({"version": "two"}, "version two")]
)
def test_a_process_with_another_model_or_version_is_refused_before_it_is_in(other, says):
    with Ranks() as ranks:
        plan = Plan(world_size=2, holds=True)
        for _ in range(2):
            ranks.start(plan)
        ranks.go_on_with_more(Plan(world_size=2, **other))
        *ended, (how, error) = ranks.answers()
        assert how == "raised" and error[0] == "PlanMismatch" and says in error[1], error
        assert all(how == "ended" and result["epoch"] == 1 for how, result in ended)


def test_a_rank_that_was_cut_off_does_not_go_on_by_itself():
    with Ranks() as ranks:
        for index in range(3):
            ranks.start(Plan(stops=("before", 3) if index == 1 else None))
        ranks.wait_for(0, "s 7")
        os.kill(ranks.processes[1].pid, signal.SIGCONT)
        answers = ranks.answers()
        assert answers[1][0] == "raised" and answers[1][1][0] == "LeftOut", answers
        ended = [result for how, result in answers if how == "ended"]
        assert len(ended) == 2 and exact_bad(Plan(), ended, 1e-12) == 0
        assert ranks.rows_bad(Plan()) == 0


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_cut_off_while_state_is_given_is_not_waited_for(victim):
    """One of the two is the source of the state."""
    plan = Plan(world_size=2, pause_s=0.1, epochs=4, holds=True)
    with Ranks() as ranks:
        for index in range(2):
            ranks.start(replace(plan, stops=("broadcast", 0) if index == victim else None))
        ranks.go_on_with_more(plan)
        ranks.wait_for(1 - victim, "s 15")
        os.kill(ranks.processes[victim].pid, signal.SIGCONT)
        answers = ranks.answers()
        assert answers[victim][0] == "raised" and answers[victim][1][0] == "LeftOut", answers
        ended = [result for how, result in answers if how == "ended"]
        assert len(ended) == 2 and exact_bad(plan, ended, 1e-12) == 0
        assert ranks.rows_bad(plan) == 0


def test_without_a_store_a_job_ends_when_a_rank_dies_and_says_so():
    with Ranks() as ranks:
        for index in range(3):
            ranks.start(Plan(pause_s=0.3, dies=("before", 6) if index == 0 else None))
        ranks.wait_for(1, "s 2")
        ranks.store = None  # its server ends
        answers = ranks.answers()
        assert answers[0][0] == "killed"
        assert all(how == "raised" and error[0] == "StoreLost" for how, error in answers[1:]), (
            answers
        )


class RankWithAGroup(Rank):
    """The program has a process group of its own, which it uses between steps."""

    def __init__(self, index, plan, port, log):
        super().__init__(index, plan, port, log)
        own = dist.PrefixStore("own", self.store)
        dist.init_process_group(
            "gloo", store=own, rank=index, world_size=index + 1, enable_reconfigure=True
        )

    def train(self):
        fleet, self.sums = self.fleet, []
        for _ in fleet.steps(self.step, epochs=self.plan.epochs):
            done, epoch = fleet.progress - 1, int(fleet.last_regroup["epoch"])
            self.write(f"s {done} {epoch}")
            self.at("between", done)
            self.timed = [dict(fleet.last_regroup)] if epoch == 1 else self.timed
            self.sums.append((epoch, dist.get_rank(), dist.get_world_size(), self.evaluate()))

    def evaluate(self):
        total = torch.ones(2) * (dist.get_rank() + 1)
        try:
            dist.all_reduce(total)
        except RuntimeError:  # a rank died in the middle
            return None
        return total[0].item()

    def result(self):
        return {**super().result(), "sums": self.sums}


@pytest.mark.skipif(
    not hasattr(dist.distributed_c10d, "_reconfigure"), reason="groups cannot change in place"
)
@pytest.mark.parametrize("joins", [False, True])
def test_the_programs_own_group_has_the_fleets_ranks(joins):
    with Ranks(RankWithAGroup) as ranks:
        if joins:
            plan = Plan(world_size=2, holds=True)
            plans = [plan] * 2
        else:
            plans = with_one_that_dies(3, 1, ("piece1", 3))
        for plan in plans:
            ranks.start(plan)
        if joins:
            ranks.go_on_with_more(Plan(world_size=2))
        ended = require_healed(ranks, plans[0], killed=0 if joins else 1)
    before, after = (2, 3) if joins else (3, 2)
    for result in ended:
        sizes = {(epoch, size, total) for epoch, _, size, total in result["sums"]}
        expected_sums = {(2, after, after * (after + 1) / 2)}
        if any(epoch == 1 for epoch, *_ in sizes):
            expected_sums.add((1, before, before * (before + 1) / 2))
        assert sizes == expected_sums
    assert sorted(result["sums"][-1][1] for result in ended) == list(range(after))
