"""Optimizers whose state has no room: it lies in a file, or on the host, and all else is as PyTorch's users know it."""

import copy
import functools
import gc
import logging
import os
import resource
from contextlib import contextmanager

import pytest
import torch
from rank_processes import raised
from torch import nn

import brimful
from brimful import _C
from brimful.sizer._ladder import has_state

pytestmark = pytest.mark.usefixtures("no_limit")
LADDER = ["split", "state"]
ROWS = 4
WIDTH = {"cpu": 64, "cuda": 512}  # on a device a limit is one of segments, of 2 MiB and more
LAYERS = 12
FILLER = 4 << 20  # so that a limit is above what parameters, gradients and state take by themselves
BESIDE_ON_DEVICE = 36 << 20  # what is left for blocks that are free and of no use
BESIDE = 60_000  # for a row: its activations, and a layer's gradient before it is added

KINDS = {
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adam, L2, maximize": (
        torch.optim.Adam,
        {"lr": 0.01, "weight_decay": 0.1, "maximize": True, "betas": (0.8, 0.9)},
    ),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "AdamW, lr of a tensor": (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
    "SGD, momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD, nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    "SGD, dampening": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True},
    ),
}


class NoWorkspace(nn.Linear):
    """Without cuBLAS, whose workspace is larger than all that these tests have."""

    def forward(self, x):
        return (x[:, None, :] * self.weight).sum(-1) + self.bias


def perceptron(device="cpu"):
    torch.manual_seed(0)
    kind, width = nn.Linear if device == "cpu" else NoWorkspace, WIDTH[device]
    layers = [nn.Sequential(kind(width, width), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to(device)


def weight_of(model, layer=0):
    return model[layer][0].weight


def square(model, piece):
    return model(piece).square().mean()


def batch(step, device="cpu"):
    return torch.randn(ROWS, WIDTH[device], generator=torch.Generator().manual_seed(step)).to(
        device
    )


def used(device="cpu"):
    gc.collect()
    return brimful.memory.stats(device).used_bytes


def bytes_of(tensors):
    return sum(t.nbytes for t in tensors)


def units(optimizer, model):
    """Bytes of the state, in those of the parameters."""
    group = optimizer.param_groups[0]
    if isinstance(optimizer, torch.optim.SGD):
        return int(group["momentum"] != 0) * bytes_of(model.parameters())
    return (3 if group["amsgrad"] else 2) * bytes_of(model.parameters())


@contextmanager
def room(bytes, device="cpu"):
    filler = torch.empty(FILLER if device == "cpu" else 0, dtype=torch.uint8)
    brimful.memory.set_limit(device, used(device) + bytes)
    try:
        yield
    finally:
        brimful.memory.set_limit(device, None)
        del filler


def steps_of(model, optimizer, sizer, steps, device="cpu"):
    for step in steps:
        sizer.step(batch(step, device), square, split=[1] * ROWS)
        optimizer.step()
        optimizer.zero_grad()


def values(model, optimizer):
    return [p.detach().clone() for p in model.parameters()], copy.deepcopy(
        optimizer.state_dict()["state"]
    )


def assert_same(these, those):
    assert all(map(torch.equal, these[0], those[0]))
    assert list(these[1]) == list(those[1])
    for number, state in these[1].items():
        assert list(state) == list(those[1][number])
        for name, value in state.items():
            assert torch.equal(value, those[1][number][name]), (number, name)


@functools.cache
def plain(kind, steps=5):
    """As torch's fused optimizer on the CPU does it, with all the room."""
    model = perceptron()
    make, given = KINDS[kind]
    optimizer = make(model.parameters(), **{**given, "fused": True})
    steps_of(model, optimizer, brimful.BatchSizer(model, optimizer), range(steps))
    return values(model, optimizer)


def with_state_away(kind, ladder=LADDER, **options):
    model = perceptron()
    make, given = KINDS[kind]
    optimizer = make(model.parameters(), **{**given, **options})
    return model, optimizer, brimful.BatchSizer(model, optimizer, ladder=ladder)


def files():
    """Addresses of memory that is of files without a name."""
    with open("/proc/self/maps") as maps:
        lines = [line for line in maps if "(deleted)" in line]
    return [[int(text, 16) for text in line.split()[0].split("-")] for line in lines]


def lies_in_a_file(tensor, ranges=None):
    address = tensor.data_ptr()
    return any(begin <= address < end for begin, end in ranges or files())


def in_files(optimizer):
    ranges = files()
    state = [value for state in optimizer.state.values() for value in state.values()]
    return sum(lies_in_a_file(value, ranges) for value in state if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("share", [0.1, 0.6])
@pytest.mark.parametrize("kind", KINDS)
def test_training_without_room_for_the_state_has_the_bits_of_the_fused_optimizer(kind, share):
    expected = plain(kind)
    model, optimizer, sizer = with_state_away(kind, ladder="split")
    bytes = bytes_of(model.parameters())
    enough = bytes + int(share * units(optimizer, model)) + BESIDE
    with room(enough):
        assert type(raised(sizer.step, batch(0), square)) is brimful.BatchTooLarge
        del sizer
        sizer = brimful.BatchSizer(model, optimizer, ladder=LADDER)
        before = used()
        steps_of(model, optimizer, sizer, range(5))
        assert used() - before <= int(share * units(optimizer, model)) + BESIDE
    assert_same(values(model, optimizer), expected)
    large = sum(p.nbytes >= 4096 for p in model.parameters())
    found = in_files(optimizer) * bytes // units(optimizer, model)
    assert 1 <= found < large // 2 if share == 0.6 else found > large // 2


def test_parameters_that_fit_keep_their_state_and_one_line_says_so(caplog):
    model, optimizer, sizer = with_state_away("Adam")
    with caplog.at_level(logging.INFO, logger="brimful"), room(int(1.35 * units(optimizer, model))):
        steps_of(model, optimizer, sizer, range(3))
    moved = in_files(optimizer)
    assert 0 < moved < LAYERS and lies_in_a_file(optimizer.state[weight_of(model)]["exp_avg"])
    lines = [r for r in caplog.records if "optimizer's state" in r.getMessage()]
    assert len(lines) == 1 and lines[0].levelname == "INFO"
    assert (
        f"from here on the optimizer's state lies in a file (parameters moved: {moved // 2} of 24, bytes: "
        f"{moved * 16}.0 KiB); torch's fused kernel for the CPU makes the step of all parameters"
        in lines[0].getMessage()
    )


def test_the_largest_parameters_go_first_and_a_plan_knows_what_is_left():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 512), nn.Linear(512, 64))
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    sizer = brimful.BatchSizer(model, optimizer, ladder=LADDER)
    state = 2 * bytes_of(p for p in model.parameters() if p.requires_grad)
    inputs = batch(0)
    with room(state // 2 + state - 20_000):
        before = sizer.plan(inputs, square).optimizer_bytes
        sizer.step(inputs, square)
        optimizer.step()
        optimizer.zero_grad()
        after = sizer.plan(inputs, square).optimizer_bytes
    assert in_files(optimizer) == 2
    assert lies_in_a_file(optimizer.state[model[1].weight]["exp_avg"])
    left = state - 2 * model[1].weight.nbytes
    assert left <= before <= left + 100 and left <= after <= left + 100


def test_where_there_is_room_nothing_is_moved_and_the_optimizer_steps_by_itself():
    results = []
    for ladder in ("split", LADDER):
        model, optimizer, sizer = with_state_away("Adam", ladder)
        with room(4 * units(optimizer, model)):
            steps_of(model, optimizer, sizer, range(3))
        assert in_files(optimizer) == 0
        results.append(values(model, optimizer))
    assert_same(*results)
    assert not has_state("auto") and not has_state("split") and has_state(LADDER)


def state_room():
    """Bytes that stay after a step of Adam: with its state in a file, over without."""
    stays = []
    inputs = torch.randn(2, 512)
    for ladder in ("split", LADDER):
        before = used()
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        optimizer = torch.optim.Adam(model.parameters())
        sizer = brimful.BatchSizer(model, optimizer, ladder=ladder)
        bytes = bytes_of(model.parameters())
        with room(100_000 + (8 if ladder == "split" else 1) * bytes):
            sizer.step(inputs, square)
            optimizer.step()
            stays.append(used() - before - FILLER)
        del model, optimizer, sizer
    return stays[1] / stays[0]


def test_half_of_the_memory_stays_in_use():
    state_room()  # what is made once
    assert state_room() <= 0.55


def test_state_is_placed_before_it_is_made_and_only_for_parameters_with_gradients():
    model, optimizer, _ = with_state_away("Adam")
    frozen = weight_of(model).requires_grad_(False)
    unused = nn.Parameter(torch.zeros(200, 200))
    optimizer.add_param_group({"params": [unused]})
    sizer = brimful.BatchSizer(model, optimizer, ladder=LADDER)
    with room(bytes_of(model.parameters()) + unused.nbytes + BESIDE):
        sizer.step(batch(0), square)
        assert not optimizer.state
        optimizer.step()
    assert set(optimizer.state) == set(model.parameters()) - {frozen}


def test_a_limit_that_falls_later_moves_what_is_there():
    expected = plain("Adam")
    model, optimizer, sizer = with_state_away("Adam", fused=True)
    steps_of(model, optimizer, sizer, range(2))
    before = used()
    with room(units(optimizer, model) // 2 - 100_000):
        steps_of(model, optimizer, sizer, range(2, 5))
    assert in_files(optimizer) > 0
    assert used() < before
    assert_same(values(model, optimizer), expected)


@pytest.mark.parametrize("kind", ["AdamW, amsgrad", "SGD, dampening"])
def test_a_checkpoint_is_resumed_with_or_without_room(kind, tmp_path):
    expected = plain(kind)
    model, optimizer, sizer = with_state_away(kind)
    bytes = bytes_of(model.parameters()) + BESIDE
    with room(bytes):
        steps_of(model, optimizer, sizer, range(3))
        torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "checkpoint")
    del model, optimizer, sizer

    def load():
        return torch.load(tmp_path / "checkpoint", mmap=True)

    model, optimizer, sizer = with_state_away(kind)
    model.load_state_dict(load()[0])
    with room(bytes):
        optimizer.load_state_dict(load()[1])
        steps_of(model, optimizer, sizer, [3])
        assert in_files(optimizer) > 0
        before = used()
        optimizer.load_state_dict(load()[1])  # once more, now that places are chosen
        assert in_files(optimizer) > 0 and used() - before < 1000
        model.load_state_dict(load()[0])
        steps_of(model, optimizer, sizer, range(3, 5))
    assert_same(values(model, optimizer), expected)
    other = perceptron()
    make, given = KINDS[kind]
    theirs = make(other.parameters(), **{**given, "fused": True})
    other.load_state_dict(load()[0])
    theirs.load_state_dict(load()[1])
    theirs.param_groups[0]["fused"] = True  # which a state dict has as well
    steps_of(other, theirs, brimful.BatchSizer(other, theirs), range(3, 5))
    assert_same(values(other, theirs), expected)


def test_what_is_loaded_is_left_alone():
    model, optimizer, sizer = with_state_away("Adam")
    with room(bytes_of(model.parameters()) + BESIDE):
        steps_of(model, optimizer, sizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    steps_of(model, optimizer, sizer, range(2))
    for number, state in kept["state"].items():
        if state["exp_avg"].dim() == 2:  # the others torch itself steps in place
            assert torch.equal(state["exp_avg"], saved["state"][number]["exp_avg"])


def test_state_that_the_program_throws_away_begins_anew():
    expected = plain("SGD, dampening", steps=2)
    model, optimizer, sizer = with_state_away("SGD, dampening")
    with room(bytes_of(model.parameters()) + BESIDE):
        steps_of(model, optimizer, sizer, range(2))
        for state in optimizer.state.values():
            state.clear()
        model.load_state_dict(perceptron().state_dict())
        steps_of(model, optimizer, sizer, range(2))
    assert_same(values(model, optimizer), expected)


def test_groups_schedulers_and_closures_are_as_ever():
    def train(ladder, bytes, **options):
        model = perceptron()
        groups = [
            {"params": model[:4].parameters(), "lr": 0.1, "betas": (0.5, 0.7)},
            {"params": model[4:7].parameters(), "weight_decay": 0.3, "amsgrad": True},
            {"params": model[7:].parameters()},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, **options)
        before = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        sizer = brimful.BatchSizer(model, optimizer, ladder=ladder)
        after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        losses = []
        with room(bytes):
            for step in range(4):

                def closure(step=step):
                    optimizer.zero_grad()
                    return sizer.step(batch(step), square, split=[1] * ROWS).loss

                losses.append(
                    optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
                )
                before.step()
                after.step()
        return model, optimizer, losses

    bytes = bytes_of(perceptron().parameters())
    ours, optimizer, losses = train(LADDER, bytes + BESIDE)
    assert in_files(optimizer) > 0
    theirs, other, expected = train("split", 100 * bytes, fused=True)
    assert losses == expected
    assert_same(values(ours, optimizer), values(theirs, other))


@pytest.mark.parametrize("fused", [True, None])
def test_a_scaler_unscales_and_leaves_steps_out(fused):
    def train(ladder, bytes, **options):
        model = perceptron()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        sizer = brimful.BatchSizer(model, optimizer, ladder=ladder, scaler=scaler)
        with room(bytes):
            for step in range(5):
                sizer.step(batch(step), square, split=[1] * ROWS)
                if step in (0, 3):
                    weight_of(model).grad[0, 0] = float("inf")
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()], optimizer, scaler.get_scale()

    bytes = bytes_of(perceptron().parameters())
    ours, optimizer, scale = train(LADDER, bytes + BESIDE, fused=fused)
    assert in_files(optimizer) > 0
    theirs, other, expected = train("split", 100 * bytes, fused=True)
    assert scale == expected == 256.0
    assert all(map(torch.equal, ours, theirs))
    for state, others in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert state["step"] == others["step"] == 3


def test_hooks_of_a_step_see_gradients_and_what_they_do_with_them_stays():
    model, optimizer, sizer = with_state_away("Adam")
    seen = []

    def before(*_):
        seen.append(all(p.grad is not None for p in model.parameters()))

    def after(*_):
        seen.append(all(p.grad is not None for p in model.parameters()))
        optimizer.zero_grad()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    with room(bytes_of(model.parameters()) + BESIDE):
        for step in range(2):
            sizer.step(batch(step), square)
            optimizer.step()
            assert all(p.grad is None for p in model.parameters())
    assert seen == [True] * 4


def test_an_error_in_a_step_leaves_gradients_in_sight():
    model, optimizer, sizer = with_state_away("Adam")
    with room(bytes_of(model.parameters()) + BESIDE):
        steps_of(model, optimizer, sizer, range(2))
        sizer.step(batch(0), square)
    weight_of(model, -1).grad = weight_of(model, -1).grad.to_sparse()
    gradients = [p.grad for p in model.parameters()]
    error = raised(optimizer.step)
    assert type(error) is brimful.HalfStepError
    assert "a gradient is sparse, and the optimizer's state lies elsewhere" in str(error)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


def test_state_stays_in_its_file_when_the_sizer_is_gone():
    expected = plain("Adam", steps=4)
    model, optimizer, sizer = with_state_away("Adam")
    with room(bytes_of(model.parameters()) + BESIDE):
        steps_of(model, optimizer, sizer, range(3))
        del sizer
        gc.collect()
        for row in batch(3).split(1):
            (square(model, row) / ROWS).backward()
        optimizer.step()
    torch.testing.assert_close(values(model, optimizer)[0], expected[0])
    assert in_files(optimizer) > 0


def test_layouts_of_parameters_are_kept():
    both = []
    for ladder, free in (("split", 100), (LADDER, 1)):
        torch.manual_seed(0)
        model = nn.Conv2d(8, 64, 3).to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        sizer = brimful.BatchSizer(model, optimizer, ladder=ladder)
        with room(free * bytes_of(model.parameters()) + BESIDE):
            for _ in range(3):
                sizer.step(torch.ones(2, 8, 5, 5), square, split=[1, 1])
                optimizer.step()
                optimizer.zero_grad()
        both.append(values(model, optimizer))
        moment = optimizer.state[model.weight]["exp_avg"]
        assert moment.stride() == model.weight.stride() != moment.contiguous().stride()
        assert lies_in_a_file(moment) == (ladder is LADDER)
    assert_same(*both)
    model.weight.grad = torch.randn(model.weight.shape)  # in another layout
    before, expected = model.weight.detach().clone(), nn.Parameter(model.weight.detach().clone())
    other = torch.optim.Adam([expected], lr=0.01)
    expected.grad = model.weight.grad
    other.load_state_dict({**other.state_dict(), "state": {0: both[0][1][0]}})
    optimizer.step()
    other.step()
    torch.testing.assert_close(model.weight, expected)
    assert not torch.equal(model.weight, before)


class Sliced(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(64, 64)
        self.sliced = nn.Parameter(torch.randn(64, 128)[:, ::2] * 0.1)

    def forward(self, x):
        return self.dense(x) @ self.sliced


def test_a_parameter_that_is_not_dense_is_left_to_the_optimizer():
    both = []
    for ladder, free in (("split", 100), (LADDER, 2.5)):
        model = Sliced()
        optimizer = torch.optim.SGD([model.sliced, *model.dense.parameters()], 0.1, momentum=0.9)
        sizer = brimful.BatchSizer(model, optimizer, ladder=ladder)
        with room(int(free * bytes_of(model.dense.parameters())) + 20_000):
            for step in range(3):
                sizer.step(batch(step), square, split=[1] * ROWS)
                optimizer.step()
                optimizer.zero_grad()
        assert lies_in_a_file(optimizer.state[model.dense.weight]["momentum_buffer"]) == (
            ladder is LADDER
        )
        both.append(model)
    for p, q in zip(both[0].parameters(), both[1].parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_row_that_needs_the_room_of_the_state_gets_it():
    model, optimizer, sizer = with_state_away("Adam")
    state = units(optimizer, model)

    def greedy(model, piece):
        torch.empty(int(0.9 * state), dtype=torch.uint8)
        return square(model, piece)

    with room(state // 2 + state + state // 4):
        sizer.step(batch(0), greedy)
        optimizer.step()
        optimizer.zero_grad()
        assert in_files(optimizer) > 2
        sizer.step(batch(1), greedy)


def test_a_step_that_lacks_room_for_its_temporaries_alone_is_fused(caplog):
    expected = plain("Adam, L2, maximize", steps=2)
    model, optimizer, sizer = with_state_away("Adam, L2, maximize")
    other = brimful.BatchSizer(model, optimizer)
    inputs = torch.randn(ROWS, WIDTH["cpu"])
    enough = bytes_of(model.parameters()) + units(optimizer, model) + 40_000
    with caplog.at_level(logging.INFO, logger="brimful"), room(enough):
        assert type(raised(other.step, inputs, square)) is brimful.BatchTooLarge
        del other
        steps_of(model, optimizer, sizer, range(2))
    assert in_files(optimizer) == 0
    assert "lies where it was (parameters moved: 0 of 24, bytes: 0 B); torch's" in caplog.text
    assert_same(values(model, optimizer), expected)


def test_momentum_0_has_no_state_to_move():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizer = brimful.BatchSizer(model, optimizer, ladder=LADDER)
    with room(2 * bytes_of(model.parameters())):
        steps_of(model, optimizer, sizer, range(2))
    assert not any(optimizer.state.values())
    inputs = batch(0)
    with room(2000):
        assert type(raised(sizer.step, inputs, square)) is brimful.BatchTooLarge


def test_the_error_names_the_rung_only_where_it_would_help():
    model, optimizer, sizer = with_state_away("Adam", ladder="split")
    bytes = bytes_of(model.parameters())
    with room(2 * bytes):
        error = raised(sizer.step, batch(0), square)
        assert type(error) is brimful.BatchTooLarge
        (advice,) = [a for a in error.advice if '"state"' in a]
        assert advice.startswith("keep the optimizer's state in a file (ladder=[")
    del sizer, optimizer, model
    model, optimizer, sizer = with_state_away("Adam", ladder="split")
    inputs = batch(0)
    with room(bytes // 2):  # not even gradients
        error = raised(sizer.step, batch(0), square)
        assert type(error) is brimful.BatchTooLarge
        assert not any('"state"' in a for a in error.advice)
        on = brimful.BatchSizer(model, optimizer, ladder=LADDER)
        error = raised(on.step, inputs, square)
        assert type(error) is brimful.BatchTooLarge
        assert not any('"state"' in a for a in error.advice)
    brimful.memory.set_limit("cpu", used() + bytes)
    if brimful.memory.stats("cpu").limit_bytes < 4 * bytes:
        error = raised(sizer.step, batch(0), square)
        assert type(error) is ValueError and '(ladder=[..., "state"])' in str(error)
    brimful.memory.set_limit("cpu", None)
    other = perceptron()
    sizer = brimful.BatchSizer(other, torch.optim.Adagrad(other.parameters()))
    with room(2000):
        error = raised(sizer.step, batch(0), square)
        assert not any('"state"' in a for a in error.advice)


class Home(torch.optim.Adam):
    def step(self, closure=None):
        return super().step(closure)


def test_optimizers_of_other_kinds_are_refused():
    model = perceptron()
    for make in (torch.optim.Adagrad, torch.optim.NAdam, Home):
        with pytest.raises(TypeError, match=rf"\(optimizer: {make.__name__}, ladder: 'state'\)"):
            brimful.BatchSizer(model, make(model.parameters()), ladder=LADDER)
    with pytest.raises(ValueError, match=r"\(optimizer: None, ladder: 'state'\)"):
        brimful.BatchSizer(model, ladder=LADDER)
    differentiable = torch.optim.Adam(model.parameters(), differentiable=True)
    with pytest.raises(ValueError, match=r"\(differentiable: True, ladder: 'state'\)"):
        brimful.BatchSizer(model, differentiable, ladder=LADDER)


def nothing_is_moved(model, optimizer, sizer, caplog):
    inputs = batch(0)
    with room(bytes_of(model.parameters()) + BESIDE):
        for _ in range(2):
            error = raised(sizer.step, inputs, square)
            assert type(error) is brimful.BatchTooLarge and not optimizer.state
    warnings = [r for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    return warnings[0].getMessage()


def test_without_a_disk_one_warning_and_the_error_as_ever(monkeypatch, caplog):
    monkeypatch.setenv("BRIMFUL_SCRATCH_DIR", "/proc")
    text = nothing_is_moved(*with_state_away("Adam"), caplog)
    assert "the optimizer's state stays where it is: no directory" in text


def test_a_disk_without_room_is_found_before_the_step(caplog):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        text = nothing_is_moved(*with_state_away("Adam"), caplog)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "the disk has no room for a tensor" in text


def test_files_have_no_name(monkeypatch, tmp_path):
    monkeypatch.setenv("BRIMFUL_SCRATCH_DIR", str(tmp_path))
    open_before = len(os.listdir("/proc/self/fd"))
    model, optimizer, sizer = with_state_away("Adam")
    with room(bytes_of(model.parameters()) + BESIDE):
        steps_of(model, optimizer, sizer, range(2))
    assert in_files(optimizer) > 0
    assert os.listdir(tmp_path) == []  # so that a process that is killed leaves none
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_file_takes_the_layout_and_no_memory_and_goes_with_its_tensor():
    like = torch.randn(300, 200, dtype=torch.bfloat16).t()
    before = used()
    tensor = _C._scratch_zeros_like(like)
    assert used() == before
    assert tensor.stride() == like.stride() and tensor.dtype == like.dtype
    assert not tensor.any() and lies_in_a_file(tensor)
    tensor.copy_(like)
    assert torch.equal(tensor, like)
    with pytest.raises(ValueError, match=r"dense tensors that are not empty \(shape: \[200, 150\]"):
        _C._scratch_zeros_like(like[:, ::2])


def ranks_train(rank):
    model = brimful.DistributedDataParallel(perceptron())
    optimizer = torch.optim.Adam(
        model.parameters(), lr=0.01
    )  # whose own kernel differs in the last bit
    sizer = brimful.BatchSizer(model, optimizer, ladder=LADDER)
    bytes = bytes_of(model.parameters())
    free = bytes + BESIDE if rank.index == 1 else 100 * bytes
    filler = torch.empty(FILLER, dtype=torch.uint8)
    brimful.memory.set_limit("cpu", used() + free)
    for step in range(4):
        sizer.step(batch(10 * rank.index + step), square, split=[1] * ROWS)
        optimizer.step()
        optimizer.zero_grad()
    del filler
    return in_files(optimizer), [p.detach().clone() for p in model.parameters()]


def test_each_rank_has_its_state_where_it_has_room(ranks):
    (none, parameters), (some, others) = ranks(ranks_train)
    assert none == 0 and some > 0
    assert all(map(torch.equal, parameters, others))


def on_device(kind, ladder, bytes, steps=3, start=None, fused=None, scaler=None):
    """Parameters and state at the end, on the CPU, and what stays in use of the device; nothing is left on it."""
    model = perceptron("cuda")
    make, given = KINDS[kind]
    optimizer = make(model.parameters(), **{**given, "fused": fused})
    sizer = brimful.BatchSizer(model, optimizer, ladder=ladder, scaler=scaler)
    # 32 MiB on some devices, of each thread that has called it in another test: the room is less than twice that.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    with room(bytes, "cuda"):
        before = used("cuda")
        if start is not None:
            model.load_state_dict(start[0])
            optimizer.load_state_dict(copy.deepcopy(start[1]))  # torch steps its counters
        for step in range(steps):
            sizer.step(batch(step, "cuda"), square, split=[1] * ROWS)
            give_gradients(model, step, 1 if scaler is None else scaler.get_scale())
            if scaler is None:
                optimizer.step()
            else:
                if step == 1:
                    weight_of(model).grad[0, 0] = float("inf")
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        stays = used("cuda") - before
    moments = [v for s in optimizer.state.values() for n, v in s.items() if n != "step"]
    hosted = [v for v in moments if v.is_cpu]
    assert all(v.is_pinned() for v in hosted)
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry.update({name: value.cpu() for name, value in entry.items()})
    parameters = {name: value.cpu() for name, value in model.state_dict().items()}
    return (parameters, state), stays, bytes_of(moments), bytes_of(hosted)


def give_gradients(model, step, scale):
    """The same in each training: what differs in the last bit makes others of the next ones."""
    drawn = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad.copy_(torch.randn(p.shape, generator=drawn) * scale)


def assert_close(these, those):
    for name, value in these[0].items():
        assert (value - those[0][name]).abs().max() <= 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [k for k in KINDS if "tensor" not in k])
def test_on_a_device_the_state_lies_on_the_host(kind):
    on_device(kind, "split", 1 << 30, steps=1)  # what is made once
    expected, all_of_it, moments, hosted = on_device(kind, "split", 1 << 30)
    assert hosted == 0
    bytes = bytes_of(expected[0].values())
    most = moments
    for share in (0.1, 0.6):
        free = bytes + int(share * moments) + BESIDE_ON_DEVICE
        found, stays, _, hosted = on_device(kind, LADDER, free)
        assert 0 < hosted < most
        assert stays <= all_of_it - hosted
        assert_close(found, expected)
        most = hosted
    more, *_ = on_device(kind, "split", 1 << 30, 1, expected)
    resumed, _, _, hosted = on_device(kind, LADDER, free, 1, expected)
    assert hosted > 0
    assert_close(resumed, more)
    elsewhere, *_ = on_device(kind, "split", 1 << 30, 1, found)
    assert_close(elsewhere, more)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, None])
def test_on_a_device_a_scaler_is_obeyed(fused):
    results = []
    for ladder, share in (("split", 100), (LADDER, 1)):
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        free = int(share * 12.02 * (1 << 20)) + BESIDE_ON_DEVICE
        results.append(on_device("Adam", ladder, free, 3, None, fused, scaler))
        assert scaler.get_scale() == 512.0
        assert all(s["step"] == 2 for s in results[-1][0][1]["state"].values())
    assert results[1][3] > 0 == results[0][3]
    assert_close(results[0][0], results[1][0])


def ranks_train_on_device(rank, backend):
    torch.cuda.set_device(rank.index)
    device = torch.device("cuda", rank.index)
    group = torch.distributed.new_group(backend=backend)
    model = brimful.DistributedDataParallel(perceptron("cuda"), process_group=group)
    make, given = KINDS["AdamW, amsgrad"]
    optimizer = make(model.parameters(), **given)  # whose kernels on the device are others
    sizer = brimful.BatchSizer(model, optimizer, ladder=LADDER)
    bytes = bytes_of(model.parameters())
    free = bytes + BESIDE_ON_DEVICE if rank.index == 1 else 100 * bytes
    brimful.memory.set_limit(device, brimful.memory.stats(device).reserved_bytes + free)
    replicas = []
    for step in range(4):
        sizer.step(batch(10 * rank.index + step, "cuda"), square, split=[1] * ROWS)
        optimizer.step()
        optimizer.zero_grad()
        replicas.append([p.detach().cpu() for p in model.parameters()])
    moments = [v for s in optimizer.state.values() for n, v in s.items() if n != "step"]
    return bytes_of(v for v in moments if v.is_cpu) / bytes_of(moments), replicas


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl"])
def test_on_devices_replicas_stay_equal_bit_by_bit(ranks, backend):
    (share, steps), (other_share, others) = ranks(ranks_train_on_device, backend)
    assert share == other_share > 0.9  # all of it but what is too small: room or not
    assert not torch.equal(steps[0][0], steps[-1][0])
    for parameters, same in zip(steps, others, strict=True):
        assert all(map(torch.equal, parameters, same))
