"""Pipelines of Python stages, against the model that is not cut."""

import copy
import dataclasses
import json
import os
import random
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from models import gradients_of, relative_difference, rng_states, seed, used
from torch import nn

import brimful
from brimful import Pipeline, split_sequential
from brimful.pipeline import pop, stash

pytestmark = pytest.mark.usefixtures("no_limit")

SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("looped_bfs", 2),
    ("zb_h1", 1),
    ("zb_h2", 1),
    ("zbv", 2),
    ("dualpipev", 2),
]


def net(stages=2, dtype=torch.float64):
    torch.manual_seed(0)
    layers = []
    for _ in range(stages):
        layers += [nn.Linear(6, 6, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers)


def data(rows=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 6, generator=generator, dtype=dtype)
    return x, torch.randn(rows, 6, generator=generator, dtype=dtype)


def whole(model, x, y, loss_fn=F.mse_loss):
    """Loss and gradients of the model in one piece; it has none afterwards."""
    loss = loss_fn(model(x), y)
    loss.backward()
    gradients = gradients_of(model)
    model.zero_grad()
    return loss.item(), gradients


def check(model, stages, x, y, loss_fn=F.mse_loss, steps=2, reference=None, **options):
    loss, gradients = whole(reference or model, x, y, loss_fn)
    pipe = Pipeline(stages, **{"microbatches": 4, "loss_fn": loss_fn, **options})
    for _ in range(steps):
        outcome = pipe.step(x, y)
        assert outcome.loss == pytest.approx(loss, rel=1e-12)
        assert relative_difference(gradients_of(model), gradients) < 1e-12
        model.zero_grad()
    return pipe


@pytest.mark.smoke
@pytest.mark.parametrize("schedule, per_rank", SCHEDULES)
def test_every_schedule_gives_the_gradients_of_the_whole_model(schedule, per_rank):
    count = 2 * per_rank
    model = net(count)
    stages = split_sequential(model, [2] * count)
    pipe = check(model, stages, *data(), schedule=schedule, devices=["cpu"] * 2)
    x, _ = data()
    with torch.no_grad():
        torch.testing.assert_close(pipe.forward(x), model(x), rtol=1e-12, atol=0)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("schedule, per_rank", [*SCHEDULES, ("of its own", 1), ("function", 1)])
def test_a_short_last_batch_has_fewer_microbatches(schedule, per_rank, rows):
    count = 2 * per_rank
    model = net(count)
    own = brimful.Schedule("zb_h1", 2, 4).with_communication()
    chosen = {"of its own": own, "function": lambda m: brimful.Schedule("1f1b", 2, m)}
    x, y = data(rows)
    cut = []
    head, *others = split_sequential(model, [2] * count)

    def first(x):
        cut.append(len(x))
        return head(x)

    pipe = Pipeline(
        [first, *others],
        schedule=chosen.get(schedule, schedule),
        devices=["cpu"] * 2,
        microbatches=4,
        loss_fn=F.mse_loss,
    )
    for _ in range(2):
        for batch in (data(8), (x, y), data(8)):  # the end of an epoch, and the next one
            loss, gradients = whole(model, *batch)
            cut.clear()
            outcome = pipe.step(*batch)
            assert outcome.loss == pytest.approx(loss, rel=1e-12)
            assert relative_difference(gradients_of(model), gradients) < 1e-12
            assert outcome.pieces == len(outcome.split) == len(cut) == min(len(batch[0]), 4)
            assert sorted(cut) == sorted(outcome.split)
            model.zero_grad()
            with torch.no_grad():
                torch.testing.assert_close(pipe.forward(batch[0]), model(batch[0]))
    pipe.step(x, y)
    assert f"{rows} microbatches" in repr(pipe)
    slices = {e["name"] for e in json.loads(pipe.trace())["traceEvents"] if e["ph"] == "X"}
    assert {name for name in slices if name.endswith("0")} and "0F3" not in slices
    with pytest.raises(ValueError, match="the batch is empty"):
        pipe.step(x[:0], y[:0])


def test_gradients_are_added_to_those_that_are_there():
    model = net()
    x, y = data()
    _, gradients = whole(model, x, y)
    pipe = Pipeline(split_sequential(model, [2, 2]), microbatches=3, loss_fn=F.mse_loss)
    pipe.step(x, y)
    pipe.step(x, y)
    twice = {name: 2 * gradient for name, gradient in gradients.items()}
    assert relative_difference(gradients_of(model), twice) < 1e-12


@dataclasses.dataclass
class Parts:
    h: torch.Tensor
    words: str
    rows: torch.Tensor


class Head(nn.Module):
    """Gives the form that it was asked for, with a tensor, integers and what is no tensor."""

    def __init__(self, form):
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)
        self.form = form

    def forward(self, x):
        h, mask = self.linear(x), x > 0
        if self.form == "tuple":
            return h, mask, 3
        if self.form == "list":
            return [h, [mask, None], 3]
        if self.form == "dict":
            return {"h": h, "mask": mask, "factor": 3}
        return Parts(h, "three", mask)


class Tail(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)
        self.form = form

    def forward(self, got):
        if self.form == "tuple":
            assert type(got) is tuple
            h, mask, factor = got
        elif self.form == "list":
            assert type(got) is list
            h, (mask, none), factor = got
            assert none is None
        elif self.form == "dict":
            h, mask, factor = got["h"], got["mask"], got["factor"]
        else:
            assert got.words == "three"
            h, mask, factor = got.h, got.rows, 3
        assert mask.dtype == torch.bool and not mask.requires_grad
        return self.linear(h * mask * factor)


@pytest.mark.parametrize("form", ["tuple", "list", "dict", "dataclass"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_structures_move_between_stages(form, schedule):
    seed(0)
    model = nn.Sequential(Head(form), Tail(form))
    check(model, list(model), *data(), schedule=schedule)


def test_batch_and_target_may_be_structures():
    model = nn.Linear(6, 6, dtype=torch.float64)
    x, y = data()

    def first(batch):
        return model(batch["x"]) * batch["scale"]

    def loss_fn(output, target):
        return F.mse_loss(output, target[0]), len(output)

    def joined(output, target):
        return F.mse_loss(output, target)

    _, gradients = whole(nn.Sequential(model), x, y, lambda out, t: joined(out * 2.0, t))
    pipe = Pipeline([first, lambda h: h], microbatches=3, loss_fn=loss_fn, max_retries=0)
    pipe.step({"x": x, "scale": 2.0}, (y, ["row"] * 11))
    assert relative_difference(gradients_of(nn.Sequential(model)), gradients) < 1e-12


def test_skip_connections_have_a_backward():
    torch.manual_seed(0)
    a, b, c = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))
    model = nn.ModuleList([a, b, c])

    def first(x):
        h = a(x)
        stash("h", h)
        return torch.tanh(h)

    def last(x):
        return c(x + pop("h"))

    x, y = data()
    h = a(x)
    F.mse_loss(c(b(torch.tanh(h)) + h), y).backward()
    gradients = gradients_of(model)
    model.zero_grad()
    for schedule in ("gpipe", "1f1b", "zb_h1"):
        stages = [first, b, last]
        pipe = Pipeline(stages, microbatches=4, schedule=schedule, loss_fn=F.mse_loss)
        pipe.step(x, y)
        assert relative_difference(gradients_of(model), gradients) < 1e-12
        model.zero_grad()


class _Call(nn.Module):
    def __init__(self, function, module):
        super().__init__()
        self.function, self.module = function, module

    def forward(self, x):
        return self.function(x)


def test_a_function_with_parameters_that_nobody_knows_of_is_refused():
    weights = [torch.ones(6, requires_grad=True, dtype=torch.float64)]
    last = nn.Linear(6, 6, dtype=torch.float64)
    pipe = Pipeline([lambda x: x * weights[0], last], microbatches=2, loss_fn=F.mse_loss)
    with pytest.raises(ValueError, match="parameters that the pipeline does not know of"):
        pipe.step(*data())
    assert weights[0].grad is None
    pipe = Pipeline([last, lambda x: x * weights[0]], microbatches=2, loss_fn=F.mse_loss)
    with pytest.raises(ValueError, match="parameters that the pipeline does not know of"):
        pipe.step(*data())
    assert last.weight.grad is None


def test_tied_weights_get_the_gradients_of_both_stages():
    torch.manual_seed(0)
    words = nn.Embedding(20, 6, dtype=torch.float64)
    middle = nn.Linear(6, 6, dtype=torch.float64)

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = words

        def forward(self, h):
            return h @ self.words.weight.T

    model = nn.Sequential(words, middle, Logits())
    x = torch.randint(20, (9,))
    check(model, list(model), x, x.roll(1), F.cross_entropy)


def test_copies_of_a_weight_get_the_sum_of_their_gradients():
    """As stages on different devices have them, which cannot share a parameter."""
    torch.manual_seed(0)

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(20, 6, dtype=torch.float64))

        def forward(self, h):
            return h @ self.weight.T

    words, middle, logits = (
        nn.Embedding(20, 6, dtype=torch.float64),
        nn.Linear(6, 6, dtype=torch.float64),
        Logits(),
    )
    x = torch.randint(20, (9,))
    pipe = Pipeline(
        [words, middle, logits],
        microbatches=4,
        loss_fn=F.cross_entropy,
        tied={"words": [words.weight, logits.weight]},
    )
    assert torch.equal(words.weight, logits.weight)  # the first one's values
    shared = words.weight.detach().clone().requires_grad_()
    reference = copy.deepcopy(middle)
    optimizers = [
        torch.optim.SGD([words.weight, logits.weight, *middle.parameters()], 0.1, momentum=0.9),
        torch.optim.SGD([shared, *reference.parameters()], 0.1, momentum=0.9),
    ]
    for _ in range(3):
        loss = F.cross_entropy(reference(F.embedding(x, shared)) @ shared.T, x.roll(1))
        loss.backward()
        assert pipe.step(x, x.roll(1)).loss == pytest.approx(loss.item(), rel=1e-12)
        assert torch.equal(words.weight.grad, logits.weight.grad)
        torch.testing.assert_close(words.weight.grad, shared.grad, rtol=1e-12, atol=1e-15)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(words.weight, logits.weight)
    torch.testing.assert_close(words.weight, shared, rtol=1e-12, atol=1e-15)


class Moved(nn.Module):
    """Says where it was moved to, and stays."""

    def __init__(self, shared=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2)) if shared is None else shared
        self.where = None

    def to(self, device):
        self.where = device
        return self


CONTIGUOUS = "0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0"


@pytest.mark.parametrize(
    "schedule, places",
    [
        ("interleaved_1f1b", (0, 1, 0, 1)),
        ("zbv", (0, 1, 1, 0)),
        (brimful.Schedule("dualpipev", 2, 1, stages_per_rank=2), (0, 1, 1, 0)),
        (lambda count: brimful.Schedule("zbv", 2, count, stages_per_rank=2), (0, 1, 1, 0)),
        (brimful.Schedule.from_csv(CONTIGUOUS), (0, 0, 1, 1)),
    ],
)
def test_modules_are_moved_to_where_the_schedule_has_them(schedule, places):
    devices = [torch.device("cuda:0"), torch.device("cuda:1")]
    stages = [Moved() for _ in range(4)]
    # Nothing has a tensor there: the pipeline asks for the modules after it has moved them.
    with pytest.raises(ValueError, match=r"not on its device .*move them there"):
        Pipeline(stages, devices=devices, schedule=schedule, microbatches=1)
    assert [stage.where for stage in stages] == [devices[place] for place in places]


def test_nothing_is_moved_for_a_schedule_or_a_weight_that_does_not_fit():
    devices = ["cuda:0", "cuda:1"]
    first = Moved()
    stages = [first, Moved(), Moved(), Moved(first.weight)]
    with pytest.raises(ValueError, match=r"share a parameter \(stages: 0 and 3.*tie the copies"):
        Pipeline(stages, devices=devices, schedule="interleaved_1f1b", microbatches=1)
    with pytest.raises(ValueError, match="another pipeline"):
        Pipeline(stages, devices=devices, schedule=brimful.Schedule("1f1b", 2, 4))
    assert [stage.where for stage in stages] == [None] * 4


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("policy", ["freeze", "rescale"])
def test_batch_norm_is_frozen_and_rescaled_as_asked(schedule, checkpointed, policy):
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=0.1), nn.Linear(6, 6), nn.BatchNorm1d(6)
    )
    x, y = data(14, torch.float32)  # in microbatches of 4, 4, 3 and 3 rows
    twin = copy.deepcopy(model)
    twin(x[: 4 if policy == "freeze" else None])
    first, last = split_sequential(model, [2, 2])
    pipe = Pipeline(
        [lambda x: checkpoint(first, x, use_reentrant=False) if checkpointed else first(x), last],
        schedule=schedule,
        microbatches=4,
        loss_fn=F.mse_loss,
        batch_norm=policy,
    )
    pipe.step(x, y)
    assert model[1].num_batches_tracked == model[3].num_batches_tracked == 1
    torch.testing.assert_close(model[1].running_mean, twin[1].running_mean)
    torch.testing.assert_close(model[1].running_var, twin[1].running_var)
    assert model[1].momentum == 0.1
    before = copy.deepcopy(model.state_dict())
    pipe._loss_fn = lambda output, target: 1 / 0
    with pytest.raises(ZeroDivisionError):
        pipe.step(x, y)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_batch_norm_refuses_to_be_split():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6))
    x, y = data(12, torch.float32)
    with pytest.raises(ValueError, match="BatchNorm"):
        Pipeline(
            split_sequential(model, [2, 2]),
            microbatches=4,
            loss_fn=F.mse_loss,
            batch_norm="refuse",
        ).step(x, y)


def test_frozen_and_checkpointed_stages():
    model = net(3)
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    stages = split_sequential(model, [2, 2, 2])
    from torch.utils.checkpoint import checkpoint

    def checkpointed(x):
        return checkpoint(stages[2], x, use_reentrant=False)

    x, y = data()
    _, gradients = whole(model, x, y)
    for schedule in ("1f1b", "zb_h1"):
        pipe = Pipeline(
            [stages[0], stages[1], _Call(checkpointed, stages[2])],
            microbatches=4,
            schedule=schedule,
            loss_fn=F.mse_loss,
        )
        pipe.step(x, y)
        got = gradients_of(model)
        assert got["2.weight"] is None and got["2.bias"] is None
        kept = {name: g for name, g in got.items() if g is not None}
        assert relative_difference(kept, {name: gradients[name] for name in kept}) < 1e-12
        model.zero_grad()


def test_autocast_of_the_caller_holds_in_the_stages():
    model = net(2, torch.float32)
    dtypes = []

    def look(x):
        out = model[0](x)
        dtypes.append(out.dtype)
        return out

    x, y = data(8, torch.float32)
    pipe = Pipeline([look, model[2]], microbatches=2, loss_fn=lambda o, t: F.mse_loss(o.float(), t))
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(x, y)
    assert dtypes == [torch.bfloat16] * 2
    pipe.step(x, y)
    assert dtypes[2:] == [torch.float32] * 2


def test_a_scaler_scales_the_gradients():
    model = net()
    x, y = data()
    loss, gradients = whole(model, x, y)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    pipe = Pipeline(
        split_sequential(model, [2, 2]), microbatches=4, loss_fn=F.mse_loss, scaler=scaler
    )
    assert pipe.step(x, y).loss == pytest.approx(loss, rel=1e-12)
    scaled = {name: 1024 * gradient for name, gradient in gradients.items()}
    assert relative_difference(gradients_of(model), scaled) < 1e-12


class Planted(nn.Module):
    """Fails at one call, in forward or in backward."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.calls, self.at, self.error, self.backward = 0, None, None, False

    def forward(self, x):
        self.calls += 1
        fails = self.calls - 1 == self.at
        if fails and not self.backward:
            raise self.error
        out = self.inner(x)
        if fails:
            out.register_hook(self._raise)
        return out

    def _raise(self, gradient):
        raise self.error


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_an_error_anywhere_is_raised_with_its_place_and_leaves_nothing(schedule, backward):
    model = net(3)
    stages = [Planted(stage) for stage in split_sequential(model, [2, 2, 2])]
    x, y = data()
    _, gradients = whole(model, x, y)
    for stage in stages:
        stage.calls = 0
    pipe = Pipeline(stages, microbatches=4, schedule=schedule, loss_fn=F.mse_loss)
    pipe.step(x, y)
    before = used()
    for index, stage in enumerate(stages):
        for microbatch in range(4):
            stage.calls, stage.at, stage.backward = 0, microbatch, backward
            stage.error = KeyError("planted")
            states = rng_states()
            began = time.monotonic()
            with pytest.raises(KeyError, match="planted") as caught:
                pipe.step(x, y)
            assert time.monotonic() - began < 1
            (note,) = caught.value.__notes__
            assert f"microbatch {microbatch} in stage {index}" in note
            assert ("backward" if backward else "forward") in note
            assert "inputs: [" in note
            del caught
            stage.at = stage.error = None
            assert rng_states() == states
            assert relative_difference(gradients_of(model), gradients) < 1e-12
    assert used() == before
    pipe.step(x, y)
    twice = {name: 2 * gradient for name, gradient in gradients.items()}
    assert relative_difference(gradients_of(model), twice) < 1e-12


@pytest.mark.parametrize("backward", [False, True])
def test_a_shortage_anywhere_repeats_the_step_with_more_microbatches(backward):
    x, y = data()
    for index in range(3):
        for microbatch in range(3):
            model = net(3)
            stages = [Planted(stage) for stage in split_sequential(model, [2, 2, 2])]
            _, gradients = whole(model, x, y)
            pipe = Pipeline(stages, microbatches=3, loss_fn=F.mse_loss)
            for stage in stages:
                stage.calls = 0
            stages[index].at, stages[index].backward = microbatch, backward
            stages[index].error = torch.OutOfMemoryError("planted")
            outcome = pipe.step(x, y)
            assert (outcome.pieces, outcome.retries) == (6, 1)
            assert relative_difference(gradients_of(model), gradients) < 1e-12


def test_a_limit_of_memory_is_met_by_more_microbatches():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    stages = split_sequential(model, [2, 2])
    x = torch.randn(512, 128)
    pipe = Pipeline(stages, microbatches=2, loss_fn=F.mse_loss)
    pipe.step(x, x)
    gradients = gradients_of(model)
    model.zero_grad()
    before = used()
    peak = pipe.step(x, x).peak_bytes
    model.zero_grad()
    brimful.memory.set_limit("cpu", before + (peak - before) // 2)
    outcome = pipe.step(x, x)
    brimful.memory.set_limit("cpu", None)
    assert outcome.retries > 0
    assert relative_difference(gradients_of(model), gradients) < 1e-5
    model.zero_grad()
    brimful.memory.set_limit("cpu", before + (peak - before) // 2)
    assert pipe.step(x, x).retries <= 1  # the peak depends on how the threads meet
    model.zero_grad()
    brimful.memory.set_limit("cpu", used() + 1000)
    with pytest.raises(brimful.BatchTooLarge, match="no number of microbatches fits") as caught:
        pipe.step(x, x)
    text = str(caught.value)
    assert "in stage" in text and " microbatches of 1 row (peak: " in text
    assert caught.value.tried and caught.value.device == "cpu"
    assert "raise the memory limit (memory.set_limit, now: " in text
    assert "such as 1f1b" not in text  # it is the schedule
    assert "max_retries, or" not in text  # down to one row
    with pytest.raises(brimful.BatchTooLarge) as caught:
        pipe.forward(x)
    assert "checkpoint" not in str(caught.value)  # nothing is held for backward
    assert "freeze" not in str(caught.value)
    brimful.memory.set_limit("cpu", None)


def test_a_pipeline_reports_its_attempts_and_steps_as_a_sizer_does(caplog):
    model = net()
    x, y = data()
    stages = [Planted(stage) for stage in split_sequential(model, [2, 2])]
    pipe = Pipeline(stages, microbatches=2, loss_fn=F.mse_loss)
    pipe.step(x, y)
    stages[0].calls, stages[0].at, stages[0].error = 0, 0, torch.OutOfMemoryError("planted")
    with caplog.at_level("WARNING", "brimful"):
        outcome = pipe.step(x, y)
    assert [(tried.pieces, tried.piece_rows, tried.ran_out) for tried in outcome.attempts] == [
        (2, 6, [0]),
        (4, 3, []),
    ]
    assert "rank 0 ran out of memory in step 1, in the forward of microbatch 0" in caplog.text
    assert "a batch of 11 is repeated in 4 microbatches instead of 2" in caplog.text
    assert outcome.peak_bytes == max(peak for _, peak in outcome.peaks) > 0
    stages[0].calls, stages[0].at, stages[0].error = 0, 0, ValueError("planted")
    with pytest.raises(ValueError, match="planted"):
        pipe.step(x, y)
    pipe.forward(x)  # which is no step
    report = pipe.report()
    assert (report.steps, report.failed, report.retries, report.ooms) == (2, 1, 1, 1)
    assert [(note.pieces, note.stood) for note in report.history] == [
        (2, True),
        (4, True),
        (4, False),
    ]
    assert report.piece_rows == 3 and 0 < report.lost_ms < report.total_ms
    assert "rows of a piece that fits: 3" in str(report)


def test_microbatches_grow_again_when_there_is_room_and_not_before():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    x = torch.randn(4096, 128)
    pipe = Pipeline(split_sequential(model, [2, 2]), microbatches=2, loss_fn=F.mse_loss)
    pipe.step(x, x)
    before = used()
    peak = pipe.step(x, x).peak_bytes
    brimful.memory.set_limit("cpu", before + (peak - before) // 2)
    shrunk = pipe.step(x, x)
    assert shrunk.retries > 0 and shrunk.pieces > 2
    later = [pipe.step(x, x) for _ in range(8)]
    assert sum(outcome.retries for outcome in later) <= 1  # the peak depends on how threads meet
    assert all(outcome.pieces >= shrunk.pieces for outcome in later)
    brimful.memory.set_limit("cpu", before + 4 * (peak - before))
    model.zero_grad()
    outcome = pipe.step(x, x)
    assert (outcome.pieces, outcome.retries) == (2, 0)
    gradients = gradients_of(model)
    model.zero_grad()
    F.mse_loss(model(x), x).backward()
    assert relative_difference(gradients_of(model), gradients) < 1e-5


def test_inference_forgets_no_more_than_a_shortage_of_its_own():
    model = net()
    x, y = data()
    stages = [Planted(stage) for stage in split_sequential(model, [2, 2])]
    pipe = Pipeline(stages, microbatches=2, loss_fn=F.mse_loss)
    stages[0].at, stages[0].error = 0, torch.OutOfMemoryError("planted")
    assert pipe.step(x, y).pieces == 4
    stages[0].calls, stages[0].at = 0, None
    pipe.forward(x)
    assert stages[0].calls == 2  # without graphs there is more room


def test_a_fixed_schedule_is_not_repeated_with_more_microbatches():
    model = net()
    x, y = data()
    _, gradients = whole(model, x, y)
    stages = split_sequential(model, [2, 2])
    full = [True]

    def loss_fn(output, target):
        if full[0]:
            raise torch.OutOfMemoryError("planted")
        return F.mse_loss(output, target)

    # With one stage recomputed, then both, then both offloaded.
    for ladder, attempts in (("auto", 4), (["split", "recompute"], 3), ("split", 1)):
        fixed = Pipeline(
            stages, schedule=brimful.Schedule("1f1b", 2, 3), loss_fn=loss_fn, ladder=ladder
        )
        with pytest.raises(brimful.BatchTooLarge, match="the schedule is fixed") as caught:
            fixed.step(x, y)
        assert [tried[0] for tried in caught.value.tried] == [3] * attempts
    assert "Tried: 3 microbatches of 4 rows" in str(caught.value)
    pipe = Pipeline(
        stages, schedule="gpipe", loss_fn=loss_fn, microbatches=2, ladder="split", max_retries=1
    )
    with pytest.raises(brimful.BatchTooLarge, match="such as 1f1b") as caught:
        pipe.step(x, y)
    assert "raise max_retries, or begin with more microbatches (microbatches=8)" in str(
        caught.value
    )
    assert "memory limit" not in str(caught.value)
    full[0] = False
    model.zero_grad()
    assert fixed.step(x, y).pieces == 3
    assert relative_difference(gradients_of(model), gradients) < 1e-12
    with pytest.raises(ValueError, match="max_retries"):
        Pipeline(stages, schedule=brimful.Schedule("1f1b", 2, 3), max_retries=-1)
    # A function of the number may make another.
    full[0] = True
    pipe = Pipeline(
        stages, schedule=lambda n: brimful.Schedule("1f1b", 2, n), microbatches=3, loss_fn=loss_fn
    )
    with pytest.raises(brimful.BatchTooLarge) as caught:
        pipe.step(x, y)
    assert len(caught.value.tried) > 1 and "fixed" not in str(caught.value)


def test_random_numbers_of_a_repeated_step_begin_anew():
    drawn = []

    def first(x):
        drawn.append(random.random())
        if len(drawn) == 2:
            raise torch.OutOfMemoryError("planted")
        return x * 1.0

    last = nn.Linear(6, 6, dtype=torch.float64)
    random.seed(5)
    Pipeline([first, last], microbatches=3, loss_fn=F.mse_loss).step(*data())
    assert drawn[0] == drawn[2]


def test_the_trace_names_every_action_as_measured_and_as_planned():
    model = net()
    pipe = Pipeline(split_sequential(model, [2, 2]), microbatches=3, loss_fn=F.mse_loss)
    assert pipe.trace() == ""
    pipe.step(*data())
    events = json.loads(pipe.trace())["traceEvents"]
    for process in (0, 1):
        names = [e["name"] for e in events if e["ph"] == "X" and e["pid"] == process]
        assert sorted(names) == sorted(f"{s}{k}{m}" for s in (0, 1) for k in "FB" for m in range(3))
    titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert any(t.startswith("measured: 1f1b") for t in titles)
    assert any(t.startswith("planned: 1f1b") and "idle" in t for t in titles)


def test_a_pipeline_shows_its_stages():
    pipe = Pipeline(split_sequential(net(), [2, 2]), microbatches=3, loss_fn=F.mse_loss)
    assert "stage 1 (Sequential): cpu, 42 parameters" in repr(pipe)
    pipe.step(*data())
    assert "% of the time" in repr(pipe) and "1f1b, 3 microbatches" in repr(pipe)
    assert pipe.schedule().to_csv().splitlines()[1].startswith("1F0,1B0")


def test_a_schedule_may_be_ones_own():
    order = brimful.Schedule("gpipe", 2, 3)
    model = net()
    x, y = data()
    stages = split_sequential(model, [2, 2])
    for schedule in (order, lambda count: brimful.Schedule("zb_h1", 2, count)):
        check(model, stages, x, y, schedule=schedule, microbatches=3)
    check(model, stages, x, y, schedule=order.with_communication(), microbatches=None)
    with pytest.raises(ValueError, match="wanted: 2, 2, 4"):
        Pipeline(stages, schedule=order, microbatches=4, loss_fn=F.mse_loss)
    broken = brimful.Schedule.from_csv("0F0\n1F0,1B0")
    with pytest.raises(ValueError, match="0B0"):
        Pipeline(stages, schedule=broken, microbatches=1, loss_fn=F.mse_loss)
    with pytest.raises(TypeError, match="a name, a Schedule"):
        Pipeline(stages, schedule=3, loss_fn=F.mse_loss)


def test_layers_keep_their_modes_in_stages():
    model = net()
    model[1].eval()
    first, second = split_sequential(model, [2, 2])
    assert first.training and second.training
    assert [layer.training for layer in model] == [True, False, True, True]
    assert not split_sequential(model.eval(), [2, 2])[0].training


@pytest.mark.parametrize("threads", [0, 3])
def test_stages_have_as_many_threads_as_they_were_given(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    seen = set()

    def first(x):
        seen.add(torch.get_num_threads())
        return x

    last = nn.Linear(6, 6, dtype=torch.float64)
    try:
        pipe = Pipeline([first, last], microbatches=2, loss_fn=F.mse_loss, threads_per_rank=threads)
        pipe.step(*data())
        assert seen == {threads or 2}  # the caller's, shared out over two ranks
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("balance", [[1, 2], [5, 1], [4, 0], []])
def test_a_balance_that_does_not_cover_the_model_is_refused(balance):
    with pytest.raises(ValueError, match="layers: 4"):
        split_sequential(net(), balance)


def test_bad_input_is_refused():
    x, y = data()
    stages = split_sequential(net(), [2, 2])
    with pytest.raises(ValueError, match="stages: 0"):
        Pipeline([], loss_fn=F.mse_loss)
    with pytest.raises(TypeError, match="stage: 1"):
        Pipeline([stages[0], 3], loss_fn=F.mse_loss)
    with pytest.raises(TypeError, match="loss_fn must be callable"):
        Pipeline(stages, loss_fn=3)
    with pytest.raises(ValueError, match="stages: 2, devices: 3"):
        Pipeline(stages, devices=["cpu"] * 3, loss_fn=F.mse_loss)
    with pytest.raises(ValueError, match="fastest"):
        Pipeline(stages, schedule="fastest", loss_fn=F.mse_loss)
    with pytest.raises(TypeError, match="loss_fn: None"):
        Pipeline(stages).step(x, y)
    with pytest.raises(ValueError, match="rows: 11 and 5"):
        Pipeline(stages, loss_fn=F.mse_loss).step(x, y[:5])
    with pytest.raises(ValueError, match="not a scalar"):
        Pipeline(stages, loss_fn=lambda o, t: o - t).step(x, y)
    pipe = Pipeline([lambda x: pipe.step(x, x), stages[1]], loss_fn=F.mse_loss)
    with pytest.raises(ValueError, match="another thread is in a call of this pipeline"):
        pipe.step(x, y)


def test_a_pipeline_that_is_alive_at_exit_does_not_hang():
    code = """
import torch, brimful
pipe = brimful.Pipeline([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)], microbatches=2,
                        loss_fn=torch.nn.functional.mse_loss)
pipe.step(torch.ones(4, 4), torch.ones(4, 4))
kept = [pipe]
kept.append(kept)
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
