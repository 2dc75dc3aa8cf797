"""Where a microbatch of one row does not fit, a stage saves nothing in forward and runs it once more in backward."""

import itertools
import threading
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from models import gradients_of, same_bits, used
from torch import nn

import brimful
from brimful.pipeline import pop, stash

ROWS, WIDTH, STAGES = 6, 32, 4


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()

    def forward(self, x):
        return x + self.norm(self.down(torch.relu(self.drop(self.up(x)))))


def net(norm=False, blocks=3):
    torch.manual_seed(0)
    return [nn.Sequential(*(Block(norm) for _ in range(blocks))) for _ in range(STAGES)]


def data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, WIDTH, generator=generator) for _ in range(2)]


def pipeline_of(stages, recompute, schedule="gpipe", devices=STAGES, **options):
    return brimful.Pipeline(
        stages,
        devices=["cpu"] * devices,
        schedule=schedule,
        microbatches=ROWS,
        loss_fn=F.mse_loss,
        recompute=recompute,
        batch_norm="rescale",
        **options,
    )


def train(stages, pipeline, room=None, steps=3):
    """The last step's outcome, with so much room, what it and those before it left, and the bytes that it took."""
    torch.manual_seed(5)
    x, y = data()
    for step in range(steps):
        for stage in stages:
            stage.zero_grad()
        if room is not None and step == steps - 1:
            brimful.memory.set_limit("cpu", used() + room)
        before = used()
        try:
            outcome = pipeline.step(x, y)
        finally:
            brimful.memory.set_limit("cpu", None)
    taken = outcome.peak_bytes[0][1] - before
    values = [gradients_of(stage) for stage in stages]
    buffers = [buffer.clone() for stage in stages for buffer in stage.buffers()]
    return outcome, (values, buffers, torch.get_rng_state()), taken


SCHEDULES = [
    ("gpipe", STAGES),
    ("1f1b", STAGES),
    ("zb_h2", STAGES),
    ("interleaved_1f1b", 2),
    ("zbv", 2),
]


def equal(one, two):
    (gradients, buffers, state), (other_gradients, other_buffers, other_state) = one, two
    return (
        all(same_bits(a, b) for a, b in zip(gradients, other_gradients, strict=True))
        and all(torch.equal(a, b) for a, b in zip(buffers, other_buffers, strict=True))
        and torch.equal(state, other_state)
    )


@pytest.mark.parametrize("schedule, devices", SCHEDULES)
@pytest.mark.parametrize("norm", [False, True], ids=["dropout", "batch_norm"])
def test_recomputed_stages_give_the_same_bits(schedule, devices, norm):
    found = {}
    for recompute in ("never", "all"):
        stages = net(norm)
        outcome, found[recompute], _ = train(
            stages, pipeline_of(stages, recompute, schedule, devices), steps=2
        )
        assert [note.recomputed for note in outcome.stages] == [recompute == "all"] * STAGES
    assert equal(found["never"], found["all"])


def room_between(share):
    """So much of the way from what a step takes whose stages all recompute to one in which none does."""
    least, most = (train(s := net(), pipeline_of(s, how))[2] for how in ("all", "never"))
    return least + int(share * (most - least))


def test_as_many_stages_recompute_as_are_needed(no_limit, caplog):
    stages = net()
    _, expected, _ = train(stages, pipeline_of(stages, "never"))
    counts = []
    for share in (0.35, 0.85):
        stages = net()
        pipeline = pipeline_of(stages, "auto")
        with caplog.at_level("WARNING", "brimful"):
            outcome, values, _ = train(stages, pipeline, room_between(share))
        assert equal(values, expected)
        assert outcome.microbatches == ROWS and outcome.retries > 0
        notes = [note.recomputed for note in outcome.stages]
        counts.append(sum(notes))
        assert "runs its forward once more in backward from now" in caplog.text
        outcome = pipeline.step(*data())  # stays so
        assert [note.recomputed for note in outcome.stages] == notes and outcome.retries == 0
    assert counts[0] > counts[1] > 0, counts


def test_never_ends_as_before(no_limit):
    stages = net()
    with pytest.raises(brimful.BatchTooLarge):
        train(stages, pipeline_of(stages, "never"), room_between(0.35))
    stages = net()
    with pytest.raises(brimful.BatchTooLarge):  # nothing helps
        train(stages, pipeline_of(stages, "auto"), room=16 << 10)
    with pytest.raises(ValueError, match="recompute: some"):
        pipeline_of(net(), "some")


class Faulty(nn.Module):
    """Runs out of memory in its n-th call of all, or in the n-th of its backwards."""

    lock = threading.Lock()
    calls: ClassVar = {"forward": 0, "backward": 0}
    at: ClassVar = {"forward": -1, "backward": -1}

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    @classmethod
    def count(cls, part):
        with cls.lock:
            cls.calls[part] += 1
            if cls.calls[part] == cls.at[part]:
                raise torch.OutOfMemoryError("planted")

    def forward(self, x):
        self.count("forward")
        out = self.inner(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: self.count("backward"))
        return out


def faulty_step(recompute, schedule, devices, part=None, at=-1):
    stages = [Faulty(stage) for stage in net(blocks=1)]
    pipeline = pipeline_of(stages, recompute, schedule, devices)
    Faulty.at = {"forward": -1, "backward": -1}
    train(stages, pipeline, steps=2)
    for stage in stages:
        stage.zero_grad()
    Faulty.calls = {"forward": 0, "backward": 0}
    if part is not None:
        Faulty.at[part] = at
    torch.manual_seed(6)
    outcome = pipeline.step(*data())
    return outcome, [gradients_of(stage) for stage in stages], dict(Faulty.calls)


@pytest.mark.parametrize("schedule, devices", [("1f1b", STAGES), ("zbv", 2)])
def test_a_shortage_in_any_call_costs_an_attempt_and_a_recomputed_stage(schedule, devices):
    _, expected, calls = faulty_step("auto", schedule, devices)
    assert calls == {"forward": ROWS * STAGES, "backward": ROWS * STAGES}
    for part in calls:
        for at in range(1, calls[part] + 1):
            outcome, gradients, _ = faulty_step("auto", schedule, devices, part, at)
            assert outcome.retries >= 1 and sum(n.recomputed for n in outcome.stages) == 1
            assert all(same_bits(a, b) for a, b in zip(gradients, expected, strict=True))


def test_a_shortage_while_all_recompute_ends_the_step_as_it_was():
    _, _, calls = faulty_step("all", "1f1b", STAGES)
    assert calls["forward"] == 2 * ROWS * STAGES
    for at in range(1, calls["forward"] + 1):
        with pytest.raises(brimful.BatchTooLarge):
            faulty_step("all", "1f1b", STAGES, "forward", at)


class Counts(nn.Module):
    """Computes something else each time."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * self.calls


class Stashes(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        stash("side", x * 2)
        return self.inner(x)


class Pops(Stashes):
    def forward(self, x):
        return self.inner(x) + pop("side")


@pytest.mark.parametrize("kind", [Counts, Stashes], ids=["counts", "stashes"])
def test_a_stage_that_cannot_run_once_more_is_left_as_it_is(kind, caplog):
    def stages():
        last = Pops() if kind is Stashes else nn.Linear(WIDTH, WIDTH)
        return [Faulty(kind()), last]

    Faulty.at = {"forward": -1, "backward": -1}
    made = stages()
    with pytest.raises(ValueError, match=r"once more[\s\S]*\(recompute\)"):
        train(made, pipeline_of(made, "all", devices=2), steps=1)
    made = stages()
    pipeline = pipeline_of(made, "auto", devices=2)
    Faulty.calls["forward"], Faulty.at["forward"] = 0, 1
    with caplog.at_level("WARNING", "brimful"):
        outcome, *_ = train(made, pipeline, steps=1)
    assert "which it does no longer" in caplog.text
    assert not any(note.recomputed for note in outcome.stages)


def test_keywords_reach_the_second_run():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, scale):
            return torch.relu(self.inner(x)) * scale

    def gradients(recompute):
        torch.manual_seed(0)
        stages = [Scaled(), Scaled()]
        pipeline = pipeline_of(stages, recompute, devices=2)
        x, y = data()
        pipeline.step(x, y, scale=torch.arange(ROWS * 1.0).view(ROWS, 1, 1))
        return [gradients_of(stage) for stage in stages]

    for a, b in zip(gradients("never"), gradients("all"), strict=True):
        assert same_bits(a, b)


def in_processes(here, share):
    stages = net()
    own = stages[2 * here.index : 2 * here.index + 2]
    pipeline = brimful.Pipeline(
        own,
        group=torch.distributed.group.WORLD,
        schedule="interleaved_1f1b",
        microbatches=ROWS,
        loss_fn=F.mse_loss,
    )
    x, y = data()
    taken = 0
    for step in itertools.count():
        for stage in own:
            stage.zero_grad()
        torch.manual_seed(step)
        before = used()
        if step == 1 and here.index == 1 and share is not None:
            brimful.memory.set_limit("cpu", before + int(share * taken))
        outcome = pipeline.step(x, y)
        brimful.memory.set_limit("cpu", None)
        taken = outcome.peak_bytes[0][1] - before
        if step == 1:
            notes = [note.recomputed for note in outcome.stages]
            return outcome.retries, notes, [gradients_of(stage) for stage in own]


def test_a_rank_that_is_a_process_recomputes_its_own_stages(ranks):
    with_room = ranks(in_processes, None)
    short = ranks(in_processes, 0.7)
    for (_, _, expected), (retries, _, gradients) in zip(with_room, short, strict=True):
        assert retries > 0
        assert all(same_bits(a, b) for a, b in zip(gradients, expected, strict=True))
    assert not any(short[0][1]) and any(short[1][1])
