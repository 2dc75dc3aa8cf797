"""Stages that are offloaded where recomputing them is not enough, and rungs that end when there is room again."""

import logging

import pytest
import torch
from models import recomputed_stages, seed, used
from test_pipeline_recompute import (
    ROWS,
    Block,
    ChannelNorm,
    OtherRandom,
    data,
    group_pipeline,
    pipeline_of,
    run,
    same,
    state_of,
)
from torch import nn

import brimful
from brimful.pipeline import pop, stash

pytestmark = pytest.mark.usefixtures("no_limit", "one_thread")


def offloaded_stages(outcome):
    return [number for number, stage in enumerate(outcome.stages) if stage.offloaded]


class Deep(nn.Sequential):
    """Saves several times what all inputs of its stage take."""

    def __init__(self, *extra):
        super().__init__(*(Block(*extra) for _ in range(4)))


def deep(count, *extra):
    torch.manual_seed(0)
    return [Deep(*extra) for _ in range(count)]


def too_small(make, **options):
    """A limit that no second run has room under, and what a step with room leaves.

    A second run takes what one microbatch saves in a stage, beside inputs and gradients.
    """
    (outcome,), state, _, _ = run(make, **options)
    return max(note.peak_live_bytes // note.peak_live for note in outcome.stages), state


class Skipping(Block):
    def __init__(self, first):
        super().__init__()
        self.first = first

    def forward(self, x):
        if self.first:
            stash("x", self.layers[0](x))
            return super().forward(x)
        return super().forward(x) + pop("x")


@pytest.mark.parametrize(
    ("schedule", "count", "ranks_here"), [("gpipe", 2, 2), ("1f1b", 4, 4), ("zb_h1", 4, 4)]
)
def test_stages_are_offloaded_where_recomputing_is_not_enough(schedule, count, ranks_here):
    def make():
        return deep(count, nn.Dropout(0.3), ChannelNorm())

    options = {"schedule": schedule, "devices": ["cpu"] * ranks_here}
    limit, state = too_small(make, **options)
    with pytest.raises(brimful.BatchTooLarge):
        run(make, limit, ladder=["split", "recompute"], **options)
    brimful.memory.set_limit("cpu", None)
    (outcome,), found, _, pipe = run(make, limit, **options)
    assert same(found, state)
    assert outcome.pieces == ROWS
    assert offloaded_stages(outcome) == list(range(count)) and not recomputed_stages(outcome)
    ran_out = [attempt.rungs for attempt in outcome.attempts if attempt.ran_out]
    assert [len(rungs.recomputed) for rungs in ran_out] == [0, 1, count]
    assert not any(rungs.offloaded for rungs in ran_out)
    assert "stage 0 (Deep)" in outcome.rungs.offloaded
    if schedule.startswith("zb"):
        assert "the stage is offloaded" in outcome.stages[0].split_note
    assert "saves for backward is offloaded" in repr(pipe)


def test_skips_and_stages_that_cannot_be_recomputed():
    def make():
        torch.manual_seed(0)
        return [Skipping(True), OtherRandom(), Skipping(False)]

    _, state, peak, _ = run(make)
    for ladder in ("auto", ["split", "offload"]):
        (outcome,), found, _, _ = run(make, peak // 2, ladder=ladder)
        assert same(found, state) and offloaded_stages(outcome) == [0, 1, 2]
        assert ladder == "auto" or outcome.retries == 1


def test_a_rung_ends_where_there_is_more_room(caplog):
    def make():
        return deep(2)

    limit, state = too_small(make)
    stages = make()
    pipe = pipeline_of(stages)
    x, y = data()

    def step(limit):
        for stage in stages:
            stage.zero_grad(set_to_none=True)
        seed(3)
        brimful.memory.set_limit("cpu", None if limit is None else used() + limit)
        try:
            return pipe.step(x, y)
        finally:
            brimful.memory.set_limit("cpu", None)

    assert offloaded_stages(step(limit)) == [0, 1]
    kept = step(limit)
    assert offloaded_stages(kept) == [0, 1] and kept.retries == 0
    tried = step(limit + limit // 16)  # which is not enough: the step tries that once
    assert offloaded_stages(tried) == [0, 1] and tried.retries == 1
    assert same(state_of(stages)[0], state[0])
    again = step(limit + limit // 16)
    assert offloaded_stages(again) == [0, 1] and again.retries == 0
    with caplog.at_level(logging.INFO, "brimful"):
        left = [step(None).rungs for _ in range(4)]
    assert [len(rungs.recomputed) for rungs in left] == [2, 1, 0, 0]
    assert not any(rungs.offloaded for rungs in left)
    assert same(state_of(stages)[0], state[0])
    assert sum("there is more room" in r.message for r in caplog.records) == 3


def test_where_nothing_can_be_put_aside_the_step_fails_as_before(monkeypatch, tmp_path, caplog):
    def make():
        return deep(2)

    limit, _ = too_small(make)
    monkeypatch.setenv("BRIMFUL_SCRATCH_DIR", str(tmp_path / "gone"))
    with caplog.at_level("WARNING", "brimful"), pytest.raises(brimful.BatchTooLarge):
        run(make, limit)
    assert sum("nothing can be put aside" in r.message for r in caplog.records) == 1


def apart(here, schedule, failing):
    def own():
        return deep(2, nn.Dropout(0.3), ChannelNorm())[here.index]

    def step(limit=None):
        stage = own()
        pipe = group_pipeline(stage, schedule)
        x, y = data()
        seed(3 + here.index)
        if limit is not None and here.index == failing:
            brimful.memory.set_limit("cpu", used() + limit)
        try:
            outcome = pipe.step(x, y)
        finally:
            brimful.memory.set_limit("cpu", None)
        return outcome, state_of([stage])

    outcome, state = step()
    note = outcome.stages[here.index]
    here.progress()
    outcome, found = step(note.peak_live_bytes // note.peak_live)
    assert same(found, state)
    assert offloaded_stages(outcome) == ([failing] if here.index == failing else [])
    return True


@pytest.mark.parametrize(("schedule", "failing"), [("gpipe", 1), ("zb_h1", 0)])
def test_ranks_that_are_processes(ranks, schedule, failing):
    assert ranks(apart, schedule, failing) == [True, True]
