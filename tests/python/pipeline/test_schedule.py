"""Schedules: against torch.distributed.pipelining's own, and what Python sees of them."""

import csv
import io
import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

import brimful
from brimful import Schedule

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.pipeline import zb_tables  # noqa: E402

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16, 20)]
RUNTIME = {  # classes for several stages a rank
    "looped_bfs": torch_schedules.ScheduleLoopedBFS,
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "zb_h1": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}
SINGLE = {  # for one
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
}


def torch_order(name, ranks, stages_per_rank, microbatches):
    """What torch's schedule does, rank by rank, made without stages or process groups."""
    kind = (RUNTIME | SINGLE)[name]
    schedule = object.__new__(kind)
    schedule._n_microbatches = microbatches
    if name in SINGLE:
        schedule._num_stages = ranks
        order = kind._get_pipeline_order(schedule)
        if name == "1f1b":  # its table's last rank counts forwards from 1; its loop does not
            forward = torch_schedules.FORWARD
            order[ranks - 1] = [
                a._replace(microbatch_index=a.microbatch_index - 1)
                if a and a.computation_type == forward
                else a
                for a in order[ranks - 1]
            ]
        return order
    schedule.pp_group_size = ranks
    schedule.n_local_stages = stages_per_rank
    schedule.num_stages = schedule._num_stages = ranks * stages_per_rank
    schedule._stages = [SimpleNamespace()] * stages_per_rank
    schedule.number_of_rounds = max(1, microbatches // ranks)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    return {r: kind._calculate_single_rank_operations(schedule, r) for r in range(ranks)}


def as_csv(order):
    """Writes torch's actions as its _dump_csv does."""
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    for rank in order:
        writer.writerow(order[rank])
    return file.getvalue()


def torch_takes(name, ranks, microbatches):
    if (
        name == "1f1b"
    ):  # its table names microbatches that there are not if there are fewer than ranks
        return microbatches >= ranks
    if name == "dualpipev":
        return microbatches >= 2 * ranks
    in_rounds = name in ("interleaved_1f1b", "zb_h1")
    return not in_rounds or microbatches % max(1, microbatches // ranks) == 0


def widths_of(name):
    fixed = {"gpipe": [1], "1f1b": [1], "zb_h2": [1], "zbv": [2], "dualpipev": [2]}
    return fixed.get(name, [1, 2, 3, 4])


@pytest.mark.parametrize("name", [*SINGLE, *RUNTIME])
def test_the_order_is_torchs_where_torch_has_one(name):
    compared = 0
    for ranks, microbatches in SIZES:
        for width in widths_of(name):
            if torch_takes(name, ranks, microbatches):
                text = as_csv(torch_order(name, ranks, width, microbatches))
                theirs = Schedule.from_csv(text)
                ours = Schedule(name, ranks, microbatches, stages_per_rank=width)
                assert ours.actions == theirs.actions, (ranks, width, microbatches)
                assert ours == theirs
                assert (theirs.ignored > 0) == ("REDUCE_GRAD" in text)
                compared += 1
    assert compared > 20


@pytest.mark.parametrize("name", RUNTIME)
def test_torchs_files_with_communication_load_and_cannot_deadlock(name):
    for ranks, microbatches in [(2, 4), (4, 8), (3, 6), (4, 16)]:
        for width in set(widths_of(name)) & {1, 2}:
            order = torch_order(name, ranks, width, microbatches)
            stages = Schedule(name, ranks, microbatches, stages_per_rank=width).rank_of_stage
            actions = {r: [a for a in order[r] if a is not None] for r in order}
            complete = torch_schedules._add_send_recv(
                actions, lambda stage, stages=stages: stages[stage], ranks * width
            )
            schedule = Schedule.from_csv(as_csv(complete))
            assert schedule.has_communication
            assert schedule.check(channels="by_stage"), schedule.check()


def test_a_schedule_is_data():
    schedule = Schedule("interleaved_1f1b", 2, 4, stages_per_rank=2)
    assert (schedule.name, schedule.ranks, schedule.stages) == ("interleaved_1f1b", 2, 4)
    assert (schedule.microbatches, schedule.ignored) == (4, 0)
    assert schedule.rank_of_stage == [0, 1, 0, 1]
    assert schedule.actions[0][:5] == ["0F0", "0F1", "2F0", "2F1", "0F2"]
    assert Schedule.from_csv(schedule.to_csv()) == schedule
    assert schedule != Schedule("looped_bfs", 2, 4, stages_per_rank=2)
    assert schedule != "interleaved_1f1b"
    assert repr(schedule) == "Schedule('interleaved_1f1b', ranks=2, stages=4, microbatches=4)"
    assert set(Schedule.names()) == {*SINGLE, *RUNTIME, "zb_h2", "forward_only"}


def test_a_built_in_can_be_printed():
    assert str(Schedule("zb_h1", 2, 2)) == (
        "zb_h1: 2 ranks, 2 stages, 2 microbatches; time 7, bubble 14.3 %\n"
        "rank 0 |F0 F1 ...I0 W0 I1 W1 | 14.3 %\n"
        "rank 1 |...F0 I0 F1 I1 W0 W1 | 14.3 %\n"
    )
    broken = Schedule.from_csv("0F0,0B0\n1B0,1F0", name="mine")
    assert str(broken) == (
        "mine: 1B0 (rank 1, action 0) comes before 1F0 (action 1), which it needs\n"
        "0F0,0B0\n1B0,1F0\n"
    )


def test_a_check_says_what_is_wrong():
    good = Schedule("1f1b", 2, 2).check()
    assert good and good.ok and (good.problems, good.cycle, str(good)) == ([], "", "valid")
    stuck = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1").check()
    assert not stuck and stuck.problems == []
    assert stuck.cycle.startswith("rank 0 waits at 0B0 (action 1) for 1B0 of rank 1, which waits")
    assert repr(stuck) == f"ScheduleCheck(it deadlocks: {stuck.cycle})"
    assert Schedule.from_csv("0F0,0F1\n1F0").check().problems == ["1F1 is missing"]


def test_a_check_counts_the_room_in_channels():
    schedule = Schedule("1f1b", 4, 8)
    late, early = schedule.with_communication(), schedule.with_communication(receives="when_sent")
    assert late.check() and not late.check(channel_capacity=0)
    assert early.check(channel_capacity=0) and early.check(channel_capacity=0, channels="by_stage")
    assert late.check(channel_capacity=8)
    with pytest.raises(ValueError, match=r"channel_capacity: -1"):
        late.check(channel_capacity=-1)
    with pytest.raises(
        ValueError, match=r"'by_rank', 'by_stage' or 'by_message' \(channels: 'tags'\)"
    ):
        late.check(channels="tags")
    with pytest.raises(ValueError, match=r"\(receives: 'soon'\)"):
        schedule.with_communication(receives="soon")


def test_a_simulation_has_times_and_memory():
    schedule = Schedule("1f1b", 4, 8)
    timeline = schedule.simulate(forward=2, backward_input=3, backward_weight=1, activation=10)
    assert timeline.makespan == timeline.period == (8 + 3) * 6
    assert timeline.busy == [48] * 4
    assert timeline.bubble == pytest.approx(3 / 11)
    assert timeline.bubbles == pytest.approx([3 / 11] * 4)
    assert timeline.peak_live == [4, 3, 2, 1]
    assert timeline.peak_bytes == [40, 30, 20, 10]
    assert timeline.actions[3][:2] == [("3F0", 6, 8), ("3B0", 8, 12)]
    assert schedule.simulate(forward=[1, 2, 3, 4], backward=0).busy == [8, 16, 24, 32]
    assert schedule.simulate(hop=0.5).makespan > schedule.simulate().makespan
    early = schedule.with_communication(receives="when_sent")
    assert early.simulate(receives_wait=False).makespan == schedule.simulate().makespan
    assert early.simulate().makespan > schedule.simulate().makespan
    assert Schedule("zb_h1", 2, 4).simulate(input_share=1).peak_live == [2, 1]
    assert repr(timeline) == (
        "Timeline(1f1b: 4 ranks, 4 stages, 8 microbatches; time 66, bubble 27.3 %)"
    )
    assert str(timeline) == timeline.text()
    assert max(map(len, timeline.text(columns=50).splitlines()[1:])) <= 50 + len("rank 0 || 27.3 %")


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": [1, 2]}, r"\(forward: 2 values, stages: 4\)"),
        ({"backward": -1}, r"\(backward: -1\)"),
        ({"hop": math.nan}, r"\(hop: nan\)"),
        ({"input_share": 2}, r"\(input_share: 2\)"),
    ],
)
def test_costs_that_make_no_sense_are_refused(costs, message):
    with pytest.raises(ValueError, match=message):
        Schedule("1f1b", 4, 8).simulate(**costs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 2), r"no schedule of this name \(name: '2f2b'\); take one of gpipe, 1f1b"),
        (("zbv", 2, 2), "defined for 2 stages a rank only"),
        (("gpipe", 0, 2), r"\(ranks: 0,"),
        (("gpipe", 2, -1), r"microbatches: -1\)"),
    ],
)
def test_what_is_not_defined_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Schedule(*arguments)


def test_a_file_that_cannot_be_read_is_reported_by_line_and_cell():
    with pytest.raises(ValueError, match=r"\(line: 2, cell: 2, text: '1X0'\)"):
        Schedule.from_csv("0F0\n1F0,1X0")


@pytest.mark.parametrize("name", Schedule.names())
def test_a_drawing_is_well_formed(name):
    schedule = Schedule(name, 4, 6, stages_per_rank=max(widths_of(name)[:2]))
    root = ElementTree.fromstring(schedule.svg())
    titles = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == sum(map(len, schedule.actions))
    assert brimful.Schedule is Schedule


def test_the_page_shows_what_is_drawn():
    page = (ROOT / "docs" / "schedules.md").read_text()
    head = re.compile(r"(\w+): (\d+) ranks, (\d+) stages, (\d+) microbatches; .*")
    shown = set()
    for block in re.findall(r"```\n(.*?)```", page, re.DOTALL):
        name, ranks, stages, microbatches = head.match(block).groups()
        width = int(stages) // int(ranks)
        assert block == str(Schedule(name, int(ranks), int(microbatches), stages_per_rank=width))
        shown.add(name)
    assert shown == set(Schedule.names())


def test_the_rates_of_the_zero_bubble_papers_tables_are_met():
    figure = next(iter(zb_tables.figures(quick=False)))
    assert len(figure.conditions["rates"]) == 93
    errors = figure.conditions["by_schedule"]
    assert [errors[name] for name in ("1f1b", "zb_h1", "zb_h2")] == [0, 0, 0]
    assert errors["interleaved_1f1b"] <= 0.0051 and errors["zbv"] <= 0.0016
    assert figure.value == pytest.approx(max(errors.values()))
