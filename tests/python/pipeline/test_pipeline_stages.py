"""What a stage may be, and what holds inside it."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from models import gradients_of, relative_difference
from test_pipeline import check, data, net, whole
from torch import nn
from torch.utils.checkpoint import checkpoint

import brimful
from brimful import Pipeline, Schedule, split_sequential
from brimful._modules import entries_of

pytestmark = pytest.mark.usefixtures("no_limit")


def scripted(module):
    with warnings.catch_warnings():  # newer versions of torch advise against it
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_script_modules_are_stages(schedule):
    model = net(3)
    stages = split_sequential(model, [2, 2, 2])
    stages[1] = scripted(stages[1])
    pipe = check(model, stages, *data(), schedule=schedule)
    assert "RecursiveScriptModule" in repr(pipe) or "Sequential" in repr(pipe)


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant, self.calls = inner, reentrant, 0

    def _run(self, x):
        self.calls += 1
        return self.inner(x)

    def forward(self, x):
        return checkpoint(self._run, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_stage_is_computed_anew_once_and_says_so_once(reentrant, caplog):
    model = net(3)
    parts = split_sequential(model, [2, 2, 2])
    x, y = data()
    _, gradients = whole(model, x, y)
    middle = Checkpointed(parts[1], reentrant)
    pipe = Pipeline(
        [parts[0], middle, parts[2]], schedule="zb_h1", microbatches=4, loss_fn=F.mse_loss
    )
    with caplog.at_level("WARNING"):
        outcome = pipe.step(x, y)
    assert caplog.text.count("the backward of stage 1 (Checkpointed) is not split") == 1
    caplog.clear()
    assert relative_difference(gradients_of(model), gradients) < 1e-12
    # Forward, and once more in each backward; of the first alone in both of its parts, where that shows.
    assert middle.calls == 4 + 4 + (0 if reentrant else 1)
    assert [bool(stage.split_note) for stage in outcome.stages] == [False, True, False]
    assert "checkpoint" in outcome.stages[1].split_note
    middle.calls = 0
    model.zero_grad()
    outcome = pipe.step(x, y)
    assert middle.calls == 8 and not caplog.text
    assert "checkpoint" in outcome.stages[1].split_note
    assert relative_difference(gradients_of(model), gradients) < 1e-12
    assert "backward not split" in repr(pipe)
    model.zero_grad()
    pipe = Pipeline([parts[0], middle, parts[2]], microbatches=4, loss_fn=F.mse_loss)
    assert not any(stage.split_note for stage in pipe.step(x, y).stages)  # B splits nothing


def test_a_compiled_stage_runs_its_backward_whole_with_a_note(caplog, fresh_compiler):
    torch.manual_seed(0)
    model = net(3)
    parts = split_sequential(model, [2, 2, 2])
    x, y = data(12)
    _, gradients = whole(model, x, y)
    middle = torch.compile(parts[1], backend="aot_eager")
    pipe = Pipeline(
        [parts[0], middle, parts[2]], schedule="zb_h1", microbatches=4, loss_fn=F.mse_loss
    )
    with caplog.at_level("WARNING"):
        outcome = pipe.step(x, y)
        pipe.step(x, y)
    assert "CompiledFunctionBackward" in outcome.stages[1].split_note
    assert not outcome.stages[0].split_note and not outcome.stages[2].split_note
    assert caplog.text.count("the backward of stage 1") == 1
    twice = {name: 2 * gradient for name, gradient in gradients.items()}
    assert relative_difference(gradients_of(model), twice) < 1e-12


def test_hooks_of_parameters_fire_in_w():
    model = net(2)
    stages = split_sequential(model, [2, 2])
    x, y = data()
    done = []
    action = ["none"]
    model[0].weight.register_post_accumulate_grad_hook(lambda _: done.append(action[-1]))
    model[2].weight.register_hook(lambda g: g * 2)
    pipe = Pipeline(stages, schedule="zb_h1", microbatches=3, loss_fn=F.mse_loss)
    pipe.step(x, y)
    reference = net(2)
    F.mse_loss(reference(x), y).backward()
    expected = gradients_of(reference)
    expected["2.weight"] = expected["2.weight"] * 2
    assert relative_difference(gradients_of(model), expected) < 1e-12
    del pipe, done[:]
    # The same with a look at which action runs.
    model.zero_grad()
    core = brimful._C.Pipeline(
        stages=[
            (f"{i}", s, list(s.parameters()), entries_of(s.modules()), [], [])
            for i, s in enumerate(stages)
        ],
        devices=[torch.device("cpu")] * 2,
        schedule="zb_h1",
        microbatches=3,
        max_retries=0,
        threads_per_rank=0,
        trace=False,
        batch_norm="warn",
        scaler=None,
        keepers=[],
        before_action=lambda rank, index, text: action.append(text) if rank == 0 else None,
        patience_s=5,
        splitter=brimful._C.Splitter(),
        group=None,
        reducers=[],
        tied=[],
        recompute=False,
        recomputed=[],
        hidden_state=None,
    )
    core.step(x, y, F.mse_loss, None)
    assert done == ["0W0", "0W1", "0W2"]


def test_autocast_and_a_scaler_train_as_the_whole_model_does():
    torch.manual_seed(0)
    model = net(2, torch.float32)
    twin = copy.deepcopy(model)
    x, y = data(8, torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    their_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)

    def loss_fn(output, target):
        return F.mse_loss(output.float(), target)

    pipe = Pipeline(split_sequential(model, [2, 2]), microbatches=2, loss_fn=loss_fn, scaler=scaler)
    for step in range(6):
        bad = step == 3  # an overflow skips the update on both sides
        inputs = x * float("inf") if bad else x
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(inputs, y)
            loss = loss_fn(twin(inputs), y)
        their_scaler.scale(loss).backward()
        for scale, optim in ((scaler, optimizer), (their_scaler, theirs)):
            scale.step(optim)
            scale.update()
            optim.zero_grad()
        assert scaler.get_scale() == their_scaler.get_scale()
    for ours, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=0.02, atol=2e-3)


def test_bad_input_says_both_sides():
    x, y = data()
    stages = split_sequential(net(), [2, 2])
    with pytest.raises(ValueError, match="1f1b"):  # fewer devices than stages
        Pipeline(stages, devices=["cpu"], loss_fn=F.mse_loss)
    wide = [stages[0], nn.Linear(5, 6, dtype=torch.float64)]
    with pytest.raises(RuntimeError, match="5x6") as caught:
        Pipeline(wide, microbatches=3, loss_fn=F.mse_loss).step(x, y)
    assert "in stage 1" in caught.value.__notes__[0]
    assert "[4, 6] Double" in caught.value.__notes__[0]
    for order in (Schedule("1f1b", 3, 4), Schedule("zbv", 2, 4, stages_per_rank=2)):
        with pytest.raises(ValueError, match="the schedule is for another pipeline"):
            Pipeline(stages, schedule=order, loss_fn=F.mse_loss)


def test_casts_are_not_kept_where_the_caller_keeps_none():
    model = net(dtype=torch.float32)
    x, y = data(dtype=torch.float32)
    pipe = Pipeline(split_sequential(model, [2, 2]), microbatches=2, loss_fn=F.mse_loss)
    losses = []
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        for _ in range(2):
            losses.append(pipe.step(x, y).loss)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
        torch.clear_autocast_cache()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.div_(2)
        assert pipe.step(x, y).loss == pytest.approx(losses[1], rel=1e-6)
