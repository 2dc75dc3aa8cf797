"""A stage's backward in two: gradients of its inputs, then of its parameters."""

from __future__ import annotations

import pytest
import torch
from split_models import STAGES, Stage, Twice
from torch import nn

from brimful import _C


def make(name: str, dtype: torch.dtype | None = None) -> Stage:
    torch.manual_seed(3)
    return STAGES[name]()


def run_forward(stage: Stage) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns a stage's inputs, cut off from before, and its outputs."""
    torch.manual_seed(4)
    inputs = [
        x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) for x in stage.inputs
    ]
    forward = stage.forward or (lambda module, *x: module(*x))
    outputs = forward(stage.module, *inputs)
    return inputs, [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def gradients_for(outputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(y.shape, generator=generator, dtype=y.dtype) if y.requires_grad else None
        for y in outputs
    ]


def parameter_gradients(stage: Stage) -> list[torch.Tensor | None]:
    return [p.grad for p in stage.module.parameters()]


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    return a.dtype == b.dtype and torch.equal(a, b)


def assert_same(ours, theirs, what: str) -> None:
    assert [same(a, b) for a, b in zip(ours, theirs, strict=True)] == [True] * len(ours), what


def reference(name: str, steps: int = 2):
    """torch's own backward: gradients of the inputs of each step, and of the parameters."""
    stage = make(name)
    inputs = []
    for _ in range(steps):
        leaves, outputs = run_forward(stage)
        grads = gradients_for(outputs)
        pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if g is not None]
        torch.autograd.backward(*zip(*pairs, strict=True))
        inputs.append([x.grad for x in leaves])
    return inputs, parameter_gradients(stage)


@pytest.mark.parametrize("name", STAGES)
def test_split_gradients_are_those_of_the_whole_backward(name):
    their_inputs, their_parameters = reference(name)
    stage = make(name)
    for step in range(2):  # the second accumulates
        leaves, outputs = run_forward(stage)
        before = [None if p.grad is None else p.grad.clone() for p in stage.module.parameters()]
        result = _C._backward_input(outputs, gradients_for(outputs), leaves)
        assert result.split == stage.split
        assert stage.note in result.note and bool(stage.note) == bool(result.note)
        assert result.recomputed == (name == "checkpointed")
        if stage.split:
            assert_same(parameter_gradients(stage), before, "touched before W")
        assert result.empty == (stage.frozen or not stage.split)
        assert_same(result.input_gradients, their_inputs[step], "inputs")
        assert all(x.grad is None for x in leaves)
        result.run_weight()
        assert result.empty
    assert_same(parameter_gradients(stage), their_parameters, "parameters")


@pytest.mark.parametrize("name", STAGES)
def test_the_full_backward_is_torchs(name):
    their_inputs, their_parameters = reference(name)
    stage = make(name)
    for step in range(2):
        leaves, outputs = run_forward(stage)
        grads = _C._backward_full(outputs, gradients_for(outputs), leaves)
        assert_same(grads, their_inputs[step], "inputs")
        assert all(x.grad is None for x in leaves)
    assert_same(parameter_gradients(stage), their_parameters, "parameters")


def count_hooks(stage: Stage, leaves: list[torch.Tensor]) -> list[str]:
    """Hooks of all kinds, which write down that they ran; those on parameters and modules change gradients."""
    ran: list[str] = []

    def note(text: str, result=None):
        ran.append(text)
        return result

    def watch_output(name: str):
        def hook(_, __, y):
            y.register_hook(lambda g: note(f"y {name}", g + 1))

        return hook

    for name, module in stage.module.named_modules():
        if not list(module.children()):
            module.register_full_backward_hook(
                lambda _, gin, __, name=name: note(
                    f"module {name}", tuple(None if g is None else g * 1.5 for g in gin)
                )
            )
            module.register_full_backward_pre_hook(
                lambda _, gout, name=name: note(f"pre {name}", tuple(g * 0.75 for g in gout))
            )
            module.register_forward_hook(watch_output(name))
    for name, parameter in stage.module.named_parameters():
        parameter.register_hook(lambda g, name=name: note(f"p {name}", g * 2))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: note(f"post {name}"))
    leaves[0].register_hook(lambda g: note("input", g * 3))
    return ran


@pytest.mark.parametrize("name", ["mlp", "transformer", "convolution", "own_function", "dropout"])
def test_hooks_run_once_and_change_what_they_change(name):
    def run(split: bool):
        stage = make(name)
        leaves = [x.detach().requires_grad_() for x in stage.inputs]
        ran = count_hooks(stage, leaves)
        torch.manual_seed(4)
        outputs = [(stage.forward or (lambda m, *x: m(*x)))(stage.module, *leaves)]
        outputs[0].retain_grad()
        ran.clear()
        gradients = gradients_for(outputs)
        if not split:
            result = _C._backward_full(outputs, gradients, leaves)
            return result, parameter_gradients(stage), sorted(ran), outputs[0].grad
        result = _C._backward_input(outputs, gradients, leaves)
        assert result.split and not any(text.startswith("post") for text in ran)
        first = len(ran)
        result.run_weight()
        assert any(text.startswith("post") for text in ran[first:])
        return result.input_gradients, parameter_gradients(stage), sorted(ran), outputs[0].grad

    ours, whole = run(True), run(False)
    assert ours[2] == whole[2]
    assert_same(ours[0], whole[0], "inputs")
    assert_same(ours[1], whole[1], "parameters")
    assert same(ours[3], whole[3])


def test_a_function_of_ones_own_runs_once():
    stage = make("own_function")
    leaves, outputs = run_forward(stage)
    Twice.calls = 0
    result = _C._backward_input(outputs, gradients_for(outputs), leaves)
    assert Twice.calls == 1
    result.run_weight()
    assert Twice.calls == 1


@pytest.mark.parametrize("trained", [True, False])
def test_a_compiled_stage_is_not_split(trained, fresh_compiler):
    torch.manual_seed(3)
    eager = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    eager.requires_grad_(trained)
    compiled = torch.compile(eager[1:3], backend="aot_eager")
    value = torch.randn(3, 8)
    stage = Stage(eager, [value], lambda m, x: m[3](compiled(m[0](x))))
    whole = Stage(eager, [value])
    leaves, outputs = run_forward(whole)
    expected = _C._backward_full(outputs, gradients_for(outputs), leaves)
    expected_parameters = parameter_gradients(whole)
    eager.zero_grad()
    leaves, outputs = run_forward(stage)
    result = _C._backward_input(outputs, gradients_for(outputs), leaves)
    assert result.split == (not trained)
    assert ("compiled" in result.note) == trained
    assert result.empty
    result.run_weight()
    assert torch.allclose(result.input_gradients[0], expected[0])
    for a, b in zip(parameter_gradients(stage), expected_parameters, strict=True):
        assert (a is None and b is None) or torch.allclose(a, b)


def test_checkpointed_blocks_are_computed_anew_for_each_half():
    stage = make("checkpointed")
    forwards = []
    stage.module[0].register_forward_pre_hook(lambda *_: forwards.append(1))
    leaves, outputs = run_forward(stage)
    result = _C._backward_input(outputs, gradients_for(outputs), leaves)
    assert result.split and result.recomputed
    result.run_weight()
    assert len(forwards) == 3


def test_an_error_in_the_graph_keeps_its_type_and_the_next_backward_works():
    class Refusal(Exception):
        pass

    def refuse(_):
        raise Refusal("planted")

    stage = make("transformer")
    for place in ("input", "weight"):
        leaves, outputs = run_forward(stage)
        target = leaves[0] if place == "input" else next(stage.module.parameters())
        handle = target.register_hook(refuse)
        with pytest.raises(Refusal, match="planted"):
            result = _C._backward_input(outputs, gradients_for(outputs), leaves)
            result.run_weight()
        handle.remove()
        if place == "weight":
            assert result.empty
    stage.module.zero_grad()
    their_inputs, their_parameters = reference("transformer", 1)
    leaves, outputs = run_forward(stage)
    result = _C._backward_input(outputs, gradients_for(outputs), leaves)
    result.run_weight()
    assert_same(result.input_gradients, their_inputs[0], "inputs")
    assert_same(parameter_gradients(stage), their_parameters, "parameters")


def test_a_graph_that_was_used_before_is_split_and_is_used_up_then():
    stage = make("transformer")
    leaves, outputs = run_forward(stage)
    outputs[0].square().mean().backward(retain_graph=True)
    before = parameter_gradients(stage)
    assert leaves[0].grad is not None
    leaves[0].grad = None
    stage.module.zero_grad()
    assert before[0] is not None
    result = _C._backward_input(outputs, gradients_for(outputs), leaves)
    result.run_weight()
    their_inputs, their_parameters = reference("transformer", 1)
    assert_same(result.input_gradients, their_inputs[0], "inputs")
    assert_same(parameter_gradients(stage), their_parameters, "parameters")
    with pytest.raises(RuntimeError, match="second time"):
        outputs[0].backward(torch.ones_like(outputs[0]))


def test_autocasts_cached_weights_serve_several_microbatches():
    def run(split: bool):
        stage = make("autocast")
        left = []
        with torch.autocast("cpu", torch.bfloat16):
            cut = [run_forward(stage) for _ in range(3)]
        for leaves, outputs in cut:
            if split:
                left.append(_C._backward_input(outputs, gradients_for(outputs), leaves))
            else:
                _C._backward_full(outputs, gradients_for(outputs), leaves)
        for result in left:
            result.run_weight()
        return parameter_gradients(stage)

    assert_same(run(True), run(False), "parameters")


def test_wrong_arguments_are_value_errors():
    x = torch.randn(2, requires_grad=True)
    y = x * 2
    with pytest.raises(ValueError, match="input: 0, from: MulBackward0"):
        _C._backward_input([y.sin()], [y.detach()], [y])
    with pytest.raises(ValueError, match=r"output: 0, shape: \[2\]"):
        _C._backward_full([y], [], [x])
