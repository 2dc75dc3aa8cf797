"""Stages that run their forward again in backward, where one row does not fit: bit-equal to a step with room."""

import copy
import dataclasses
import random

import pytest
import torch
import torch.nn.functional as F
from models import gradients_of, recomputed_stages, rng_states, seed, used
from torch import nn
from torch.utils.checkpoint import checkpoint

import brimful
from brimful import Pipeline
from brimful.pipeline import pop, stash

pytestmark = pytest.mark.usefixtures("no_limit", "one_thread")

ROWS, LENGTH, WIDTH = 4, 1024, 32
#: Names, stages and ranks, such that peaks depend little on how the threads meet.
SCHEDULES = [
    ("gpipe", 2, 2),
    ("1f1b", 4, 4),
    ("interleaved_1f1b", 4, 2),
    ("zb_h1", 4, 4),
    ("zbv", 4, 2),
]


class Block(nn.Module):
    """Holds several times what it returns."""

    def __init__(self, *extra):
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), *copy.deepcopy(extra))
                for _ in range(4)
            )
        )

    def forward(self, x):
        return self.layers(x)


class ChannelNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def blocks(count, *extra):
    torch.manual_seed(0)
    return [Block(*extra) for _ in range(count)]


def data(rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, LENGTH, WIDTH, generator=generator) for _ in range(2)]


def pipeline_of(stages, schedule="gpipe", devices=None, **options):
    return Pipeline(
        stages,
        devices=devices,
        schedule=schedule,
        loss_fn=F.mse_loss,
        **{"microbatches": ROWS, "batch_norm": "rescale", **options},
    )


def state_of(stages):
    model = nn.ModuleList([s for s in stages if isinstance(s, nn.Module)])
    return gradients_of(model), {name: b.clone() for name, b in model.named_buffers()}, rng_states()


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def run(make, limit=None, steps=1, **options):
    """Outcomes of steps from the same beginning, and what they have left; their peak."""
    stages = make()
    pipe = pipeline_of(stages, **options)
    x, y = data()
    seed(3)
    before = used()
    if limit is not None:
        brimful.memory.set_limit("cpu", before + limit)
    outcomes = [pipe.step(x, y) for _ in range(steps)]
    brimful.memory.set_limit("cpu", None)
    peak = max(o.peak_bytes for o in outcomes) - before
    return outcomes, state_of(stages), peak, pipe


def between(make, steps=1, **options):
    """A limit that a step has no room under, but with its stages recomputed; and what a step with room leaves."""
    _, state, plain, _ = run(make, steps=steps, **options)
    outcomes, recomputed, least, _ = run(make, steps=steps, recompute="all", **options)
    assert same(recomputed, state)
    assert recomputed_stages(outcomes[0]) == list(range(len(outcomes[0].stages)))
    assert least < 0.8 * plain
    return (plain + least) // 2, state


@pytest.mark.parametrize(("schedule", "count", "ranks_here"), SCHEDULES)
def test_a_row_that_does_not_fit_is_run_with_stages_recomputed(schedule, count, ranks_here):
    def make():
        return blocks(count)

    options = {"schedule": schedule, "devices": ["cpu"] * ranks_here}
    limit, state = between(make, steps=2, **options)
    with pytest.raises(brimful.BatchTooLarge):
        run(make, limit, ladder="split", **options)
    brimful.memory.set_limit("cpu", None)
    outcomes, found, _, pipe = run(make, limit, steps=2, **options)
    assert same(found, state)
    assert 1 <= outcomes[0].retries <= 2
    assert recomputed_stages(outcomes[0]) and outcomes[0].pieces == ROWS
    assert recomputed_stages(outcomes[1])[: len(recomputed_stages(outcomes[0]))]
    recomputed = [i for i, note in enumerate(outcomes[1].stages) if note.recomputed]
    assert recomputed == recomputed_stages(outcomes[1])
    assert "recomputed" in repr(pipe)
    if schedule.startswith("zb"):
        notes = [outcomes[1].stages[i].split_note for i in recomputed]
        assert all(note.startswith("not split: the stage is recomputed") for note in notes)


def test_splitting_comes_first():
    def make():
        return blocks(2)

    limit, _ = between(make)
    outcomes, _, _, _ = run(make, limit, microbatches=2)
    assert outcomes[0].pieces == ROWS and recomputed_stages(outcomes[0])


@pytest.mark.parametrize("policy", ["warn", "freeze", "rescale"])
@pytest.mark.parametrize(("schedule", "count", "ranks_here"), SCHEDULES)
def test_random_numbers_and_batch_norms_are_as_without(schedule, count, ranks_here, policy):
    def make():
        return blocks(count, nn.Dropout(0.3), ChannelNorm())

    options = {"schedule": schedule, "devices": ["cpu"] * ranks_here, "batch_norm": policy}
    limit, state = between(make, steps=3, **options)
    outcomes, found, _, _ = run(make, limit, steps=3, **options)
    assert same(found, state)
    assert recomputed_stages(outcomes[-1])


class Skips(nn.Module):
    """Leaves for a later stage, and for itself, and takes what was left."""

    def __init__(self, leave=None, take=None):
        super().__init__()
        self.block, self.leave, self.take = Block(), leave, take

    def forward(self, x, scale=None):
        stash("own", x * 2)
        if self.take is not None:
            x = x + pop(self.take)
        x = self.block(x) + pop("own")
        if scale is not None:
            x = x * scale
        if self.leave is not None:
            stash(self.leave, self.block.layers[0](x))
        return x


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_skips_and_keywords(schedule):
    def gradients(**options):
        torch.manual_seed(0)
        stages = [Skips(leave="far"), Skips(leave="near"), Skips(take="near"), Skips(take="far")]
        pipe = pipeline_of(stages, schedule, **options)
        x, y = data()
        scale = torch.full((ROWS, 1, WIDTH), 0.5).requires_grad_()
        x.requires_grad_()
        outcomes = [pipe.step(x, y, scale=scale) for _ in range(2)]
        return [gradients_of(nn.ModuleList(stages)), x.grad, scale.grad], outcomes

    wanted, _ = gradients()
    for recompute in ("all", [1], [0, 3]):
        found, outcomes = gradients(recompute=recompute)
        assert same(found, wanted)
        numbers = [0, 1, 2, 3] if recompute == "all" else recompute
        assert recomputed_stages(outcomes[1]) == numbers


@dataclasses.dataclass
class Parts:
    hidden: torch.Tensor
    many: dict
    label: str


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        if isinstance(x, Parts):
            x = x.hidden + x.many["sum"] * x.many["frozen"]
        y = self.block(x)
        return Parts(
            y, {"sum": y.sum(-1, True), "frozen": x.detach().sign(), "none": None}, "parts"
        )


def test_several_outputs():
    def gradients(**options):
        torch.manual_seed(0)
        stages = [Several(), Several(), Several()]
        x, y = data()
        pipe = Pipeline(
            stages,
            schedule="1f1b",
            microbatches=ROWS,
            loss_fn=lambda out, target: F.mse_loss(out.hidden, target),
            **options,
        )
        outcome = pipe.step(x, y)
        return gradients_of(nn.ModuleList(stages)), recomputed_stages(outcome)

    wanted, none = gradients()
    found, every = gradients(recompute="all")
    assert same(found, wanted)
    assert (none, every) == ([], [0, 1, 2])


class Checkpointing(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.block, self.reentrant = Block(nn.Dropout(0.2)), reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_stages_that_checkpoint_inside(reentrant, schedule, caplog):
    def make():
        torch.manual_seed(0)
        return [nn.Linear(WIDTH, WIDTH), Checkpointing(reentrant), Checkpointing(reentrant)]

    options = {"schedule": schedule, "devices": ["cpu"] * 3}
    _, wanted, _, _ = run(make, steps=2, **options)
    with caplog.at_level("WARNING", "brimful"):
        outcomes, found, _, _ = run(make, steps=2, recompute=[1, 2], **options)
    assert same(found, wanted)
    assert recomputed_stages(outcomes[1]) == ([] if reentrant else [1, 2])
    refused = [r.message for r in caplog.records if "cannot be recomputed" in r.message]
    assert len(refused) == (2 if reentrant else 0)
    assert all("it has a reentrant checkpoint" in text for text in refused)


def test_a_compiled_stage():
    def make():
        return [torch.compile(block, backend="aot_eager") for block in blocks(2)]

    _, wanted, plain, _ = run(make)
    outcomes, found, least, _ = run(make, recompute="all")
    assert same(found, wanted) and least < plain
    assert recomputed_stages(outcomes[0]) == [0, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_autocast(dtype):
    def make():
        return blocks(2, nn.Dropout(0.1))

    with torch.autocast("cpu", dtype):
        limit, state = between(make, steps=2)
        outcomes, found, _, _ = run(make, limit, steps=2)
    assert same(found, state)
    assert recomputed_stages(outcomes[1])


class InPlace(Block):
    def forward(self, x):
        return super().forward(x.relu_())


class OtherRandom(Block):
    def forward(self, x):
        return super().forward(x) * random.choice([1.0, 1.0])


class Counting(Block):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (InPlace, "in place"),
        (OtherRandom, "random numbers that are not torch's"),
        (Counting, "other values"),
    ],
)
def test_a_stage_that_cannot_be_recomputed_is_left_alone(kind, why, caplog):
    def gradients(**options):
        torch.manual_seed(0)
        stages = [Block(), kind()]
        # Of one thread: Python's random numbers are all threads'.
        pipe = pipeline_of(stages, "interleaved_1f1b", ["cpu"], **options)
        x, y = data()
        random.seed(0)
        outcomes = [pipe.step(x, y) for _ in range(2)]
        return gradients_of(nn.ModuleList(stages)), random.getstate(), outcomes

    wanted = gradients()
    with caplog.at_level("WARNING", "brimful"):
        found = gradients(recompute="all")
    if kind is not Counting:  # which counts the attempts, too
        assert same(found[:2], wanted[:2])
    assert [recomputed_stages(outcome) for outcome in found[2]] == [[0], [0]]
    named = [r.message for r in caplog.records if "cannot be recomputed" in r.message]
    assert len(named) == 1
    assert f"stage 1 ({kind.__name__})" in named[0] and why in named[0]


def test_a_step_that_no_stage_can_save_fails_as_before(caplog):
    def make():
        torch.manual_seed(0)
        return [OtherRandom(), OtherRandom()]

    _, _, peak, _ = run(make)
    stages = make()
    pipe = pipeline_of(stages, ladder=["split", "recompute"])
    x, y = data()
    before = used()
    brimful.memory.set_limit("cpu", before + peak // 2)
    with (
        caplog.at_level("WARNING", "brimful"),
        pytest.raises(brimful.BatchTooLarge, match="no number of microbatches fits"),
    ):
        pipe.step(x, y)
    assert set(gradients_of(nn.ModuleList(stages)).values()) == {None}
    assert used() - before <= torch.get_rng_state().nbytes  # that a repeated step begins with
    named = [r.message for r in caplog.records if "cannot be recomputed" in r.message]
    assert named and len({text[:7] for text in named}) == len(named)


def test_what_begins_is_logged_once(caplog):
    def make():
        return blocks(2)

    limit, _ = between(make)
    with caplog.at_level("WARNING", "brimful"):
        outcomes, _, _, _ = run(make, limit, steps=2)
    begun = [r.message for r in caplog.records if "recomputed in backward" in r.message]
    assert len(begun) == sum(outcome.retries for outcome in outcomes)
    assert "microbatches are as small as they can be" in begun[0] and "(Block)" in begun[0]


@pytest.mark.parametrize(
    "ladder", ["split", ["split"], "auto", ["split", "recompute"], ["split", "offload"]]
)
@pytest.mark.parametrize("max_retries", [0, 8])
def test_the_ladder_says_whether_stages_are_recomputed(ladder, max_retries):
    def make():
        return blocks(2)

    limit, state = between(make)
    if max_retries == 0 or ladder in ("split", ["split"]):
        with pytest.raises(brimful.BatchTooLarge) as caught:
            run(make, limit, ladder=ladder, max_retries=max_retries)
        assert "recomputed (stage" not in str(caught.value)
        assert ("allow retries" in str(caught.value)) == (ladder not in ("split", ["split"]))
        assert len(caught.value.tried) == 1
    else:
        _, found, _, _ = run(make, limit, ladder=ladder, max_retries=max_retries)
        assert same(found, state)


def test_a_schedule_that_is_fixed():
    def make():
        return blocks(2)

    limit, state = between(make)
    schedule = brimful.Schedule("gpipe", 2, ROWS)
    _, found, _, _ = run(make, limit, schedule=schedule, microbatches=None)
    assert same(found, state)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ladder": ["split", "recompute", "state"]}, "'recompute' and 'offload' that begins"),
        ({"ladder": "offload"}, "begins with 'split'"),
        ({"ladder": ["recompute"]}, "begins with 'split'"),
        ({"ladder": "none"}, "a ladder is 'auto', 'split', or"),
        ({"recompute": "some"}, "recompute is 'all'"),
        ({"recompute": [2]}, "no such stage to recompute"),
        ({"recompute": [-1]}, "a stage to recompute"),
    ],
)
def test_what_is_no_ladder_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        pipeline_of(blocks(2), **options)


def test_what_is_no_list_of_stages_is_refused():
    with pytest.raises(TypeError, match="recompute is 'all'"):
        pipeline_of(blocks(2), recompute=3)


def group_pipeline(stage, schedule, group=None, **options):
    options = {"group": group or torch.distributed.group.WORLD, **options}
    return pipeline_of([stage], schedule, **options)


def apart(here, schedule, failing):
    def own():
        return blocks(2, nn.Dropout(0.3), ChannelNorm())[here.index]

    def step(limit=None, **options):
        stage = own()
        pipe = group_pipeline(stage, schedule, **options)
        x, y = data()
        seed(3 + here.index)
        before = used()
        if limit is not None and here.index == failing:
            brimful.memory.set_limit("cpu", before + limit)
        try:
            outcomes = [pipe.step(x, y) for _ in range(2)]
        finally:
            brimful.memory.set_limit("cpu", None)
        peak = max(o.peak_bytes for o in outcomes) - before
        return outcomes, state_of([stage]), peak

    _, state, plain = step()
    outcomes, recomputed, least = step(recompute="all")
    assert same(recomputed, state) and recomputed_stages(outcomes[0]) == [here.index]
    limit = (plain + least) // 2
    here.progress()
    expected = brimful.BatchTooLarge if here.index == failing else brimful.RankOutOfMemory
    with pytest.raises(expected):
        step(limit, ladder="split")
    outcomes, found, _ = step(limit)
    assert same(found, state)
    assert [outcome.retries for outcome in outcomes] == [1, 0]
    assert recomputed_stages(outcomes[0]) == ([failing] if here.index == failing else [])
    return True


@pytest.mark.parametrize(("schedule", "failing"), [("gpipe", 1), ("1f1b", 0), ("zb_h1", 0)])
def test_ranks_that_are_processes(ranks, schedule, failing):
    assert ranks(apart, schedule, failing) == [True, True]


def replicated(here):
    replica, rank = divmod(here.index, 2)
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("dp", "pp")
    )

    def step(limit=None, **options):
        stage = brimful.DistributedDataParallel(
            blocks(2, nn.Dropout(0.3))[rank], process_group=mesh["dp"].get_group()
        )
        pipe = group_pipeline(stage, "gpipe", mesh["pp"].get_group(), **options)
        x, y = (t[replica * ROWS :][:ROWS] for t in data(2 * ROWS))
        seed(here.index)
        before = used()
        if limit is not None and here.index == 0:
            brimful.memory.set_limit("cpu", before + limit)
        outcomes = [pipe.step(x, y) for _ in range(2)]
        brimful.memory.set_limit("cpu", None)
        peak = max(o.peak_bytes for o in outcomes) - before
        return outcomes, state_of([stage]), peak

    _, state, plain = step()
    _, recomputed, least = step(recompute="all")
    assert same(recomputed, state)
    outcomes, found, _ = step((plain + least) // 2)
    assert same(found, state)
    assert [outcome.retries for outcome in outcomes] == [1, 0]
    assert recomputed_stages(outcomes[1]) == ([0] if here.index == 0 else [])
    return True


def test_a_replica_decides_for_itself(ranks):
    assert ranks(replicated, size=4) == [True] * 4
