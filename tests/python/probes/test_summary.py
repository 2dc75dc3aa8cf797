from __future__ import annotations

import gc
import json
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import brimful

ROWS = 256


class Reused(nn.Module):
    def __init__(self, times=50):
        super().__init__()
        self.times = times
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.split = nn.Linear(64, 192)
        self.out = nn.Linear(64, 64)

    def forward(self, x):
        a, b, c = self.split(x).view(x.shape[0], 3, 64).unbind(1)
        return self.out((a * b.sigmoid()).transpose(0, 1).transpose(0, 1) + c)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant=False):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(64, 128)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(3)
        )

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class Heads(nn.Module):
    """Returns a dict with a tuple in it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 128)
        self.heads = nn.ModuleDict(
            {"a": nn.Linear(128, 8), "b": nn.LSTM(128, 16, batch_first=True)}
        )

    def forward(self, x):
        y = torch.relu(self.body(x))
        return {"a": self.heads["a"](y), "b": self.heads["b"](y.unsqueeze(1))}


def in_place():
    layers = [nn.Linear(64, 256), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(256, 64)]
    return nn.Sequential(*layers, nn.ReLU(inplace=True))


def convolutions():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 64, 10))


def encoder():
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


MODELS = {
    "reused": (Reused, (64,)),
    "views": (Views, (64,)),
    "in place": (in_place, (64,)),
    "checkpointed": (Checkpointed, (64,)),
    "reentrant": (lambda: Checkpointed(True), (64,)),
    "tied": (Tied, (64,)),
    "heads": (Heads, (64,)),
    "convolutions": (convolutions, (3, 16, 16)),
    "encoder": (encoder, (12, 64)),
}
WAYS = {
    "train": {},
    "adam": {"optimizer": torch.optim.Adam},
    "eval": {"train": False},
    "autocast": {"autocast": torch.bfloat16},
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def loss_of(model, batch):
    output = model(batch)
    return sum(t.sum() for t in torch.utils._pytree.tree_leaves(output))


def plain_peak(model, batch, optimizer=None, train=True, autocast=None):
    """The allocator's peak of the last of three steps, by nothing but its own counters."""
    model.train(train)
    for _ in range(3):
        brimful.memory.reset_peak("cpu")
        with torch.set_grad_enabled(train):
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                loss = loss_of(model, batch)
            if train:
                loss.backward()
            del loss
            if optimizer:
                optimizer.step()
        peak = brimful.memory.stats("cpu").peak_bytes
        model.zero_grad()
    return peak


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_step_is_the_allocators(name, way, request):
    if way == "autocast":  # with bfloat16 the buffers of several threads jump with the rows
        request.getfixturevalue("one_thread")
    make, shape = MODELS[name]
    model, batch = make(), torch.randn(ROWS, *shape)
    if name == "reentrant":
        batch.requires_grad_()
    options = dict(WAYS[way])
    if "optimizer" in options:
        options["optimizer"] = options["optimizer"](model.parameters())
    gc.collect()
    found = brimful.summary(model, batch, loss_fn=loss_of, **options)
    used = brimful.memory.stats("cpu").used_bytes
    gc.collect()
    assert brimful.memory.stats("cpu").used_bytes == used  # no cycles were left
    batch.grad = None
    peak = plain_peak(model, batch, **options)
    assert found.peak_bytes == peak
    assert abs(found.predicted_bytes - peak) <= 0.05 * peak
    phases = found.forward_peak_bytes, found.backward_peak_bytes, found.optimizer_peak_bytes
    assert found.peak_bytes == max(phases)
    assert 0 < found.modules[0].forward_peak_bytes <= found.forward_peak_bytes
    assert (found.modules[0].backward_peak_bytes > 0) == options.get("train", True)


def test_the_optimizers_part_is_exact_too():
    model, batch = Tied(), torch.randn(4, 64)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    found = brimful.summary(model, batch, loss_fn=loss_of, optimizer=optimizer)
    for _ in range(2):
        model.zero_grad()
        loss_of(model, batch).backward()
        brimful.memory.reset_peak("cpu")
        optimizer.step()
    assert found.optimizer_peak_bytes == brimful.memory.stats("cpu").peak_bytes


def test_gradients_from_before_are_not_counted():
    model, batch = in_place(), torch.randn(ROWS, 64)
    peak = brimful.summary(model, batch).peak_bytes
    loss_of(model, batch).backward()
    assert brimful.summary(model, batch).peak_bytes == peak


class Fallback(nn.Module):
    """Catches what a module inside it raises."""

    def __init__(self):
        super().__init__()
        self.fails = Drawing()
        self.works = nn.Linear(8, 8)
        self.fails.fails_at = 8

    def forward(self, x):
        try:
            return self.fails(x)
        except ArithmeticError:
            return self.works(x)


def test_what_runs_behind_a_module_that_raised_is_not_its_own():
    found = brimful.summary(Fallback(), torch.randn(8, 8))
    assert row(found, "works").activation_bytes == 8 * 8 * 4
    assert row(found, "fails").backward_peak_bytes == 0


def test_what_is_put_in_the_place_of_an_optimizers_step_is_not_called():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    optimizer.step = lambda: calls.append(1)
    brimful.summary(model, torch.randn(8, 8), optimizer=optimizer)
    assert not calls
    optimizer.step()
    assert calls


def row(found, name):
    return next(row for row in found.modules if row.name == name)


def test_a_layer_that_is_called_50_times_has_50_outputs():
    found = brimful.summary(Reused(), torch.randn(ROWS, 64))
    layer = row(found, "layer")
    assert layer.calls == 50
    assert layer.output_bytes == layer.activation_bytes == 50 * ROWS * 64 * 4
    assert layer.trainable == found.modules[0].trainable == 64 * 65
    assert found.modules[0].saved_bytes == 50 * ROWS * 64 * 4  # what tanh gave, once each
    assert layer.outputs == [[ROWS, 64]]


@pytest.mark.smoke
def test_multiply_adds_are_those_of_torchs_counter():
    model, batch = convolutions(), torch.randn(ROWS, 3, 16, 16)
    with FlopCounterMode(display=False) as counter:
        model(batch)
    found = brimful.summary(model, batch)
    assert found.modules[0].multiply_adds == counter.get_total_flops() // 2
    rows = {row.name: row for row in found.modules}
    assert rows["0"].multiply_adds == ROWS * 16 * 16 * 8 * 3 * 9
    assert rows["0"].inputs == [[ROWS, 3, 16, 16]]
    wide = brimful.summary(Checkpointed(), torch.randn(ROWS, 64)).modules[0]
    assert wide.multiply_adds == ROWS * (64 * 128 + 3 * 2 * 128 * 512), "forward, once"


def test_a_row_for_each_call():
    model, batch = Reused(3), torch.randn(ROWS, 64)
    together = brimful.summary(model, batch)
    each = brimful.summary(model, batch, by_call=True)
    assert [row.name for row in each.modules] == ["", "layer", "layer", "layer"]
    assert [row.calls for row in each.modules] == [1] * 4
    assert [row.shares for row in each.modules] == [False, False, True, True]
    calls = each.modules[1:]
    for name in ("multiply_adds", "activation_bytes", "output_bytes", "saved_bytes"):
        assert sum(getattr(row, name) for row in calls) == getattr(together.modules[1], name)
    assert max(row.backward_peak_bytes for row in calls) == together.modules[1].backward_peak_bytes
    assert each.peak_bytes == together.peak_bytes
    checkpointed = brimful.summary(Checkpointed(), torch.randn(ROWS, 64), by_call=True)
    assert [row.calls for row in checkpointed.modules] == [1] * len(checkpointed.modules)


def test_a_loss_that_calls_parts_of_the_model_has_their_rows():
    model = convolutions()
    found = brimful.summary(
        model, torch.randn(ROWS, 3, 16, 16), loss_fn=lambda m, b: m[0](b).mean(), by_call=True
    )
    assert [(row.name, row.calls) for row in found.modules] == [("", 0), ("0", 1)]


class Opaque:
    def __init__(self, data):
        self.data = data


def test_batches_that_only_their_own_functions_can_split():
    batch = Opaque(torch.randn(ROWS, 3, 16, 16))
    model = convolutions()
    with pytest.raises(TypeError, match="register_split"):
        brimful.summary(model, batch, loss_fn=lambda m, b: m(b.data).mean())
    found = brimful.summary(
        model,
        batch,
        loss_fn=lambda m, b: m(b.data).mean(),
        size_fn=lambda b: len(b.data),
        split_fn=lambda b, begin, end: Opaque(b.data[begin:end]),
    )
    assert found.rows == ROWS
    assert found.predicted_bytes == pytest.approx(found.peak_bytes, rel=0.01)
    turned = torch.randn(3, ROWS, 16, 16)
    found = brimful.summary(
        model, turned, loss_fn=lambda m, b: m(b.transpose(0, 1)).mean(), batch_dim=1
    )
    assert found.rows == ROWS


def test_what_is_kept_and_saved_by_hand():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(inplace=True), nn.Linear(256, 8))
    found = brimful.summary(model, torch.randn(ROWS, 64))
    first, relu, last = found.modules[1:]
    assert [m.activation_bytes for m in (first, relu, last)] == [ROWS * 1024, 0, ROWS * 32]
    assert [m.saved_bytes for m in (first, relu, last)] == [0, ROWS * 1024, 0]
    assert first.parameter_bytes == 65 * 1024
    # The peak of backward is where the gradients of the first layer are made.
    assert max(m.backward_peak_bytes for m in found.modules[1:]) <= found.backward_peak_bytes
    assert found.modules[0].backward_peak_bytes == found.backward_peak_bytes


def test_a_checkpoint_saves_only_what_goes_in():
    found = brimful.summary(Checkpointed(), torch.randn(ROWS, 64))
    block = row(found, "blocks.0")
    assert block.calls == 1
    assert block.saved_bytes == 0
    assert block.backward_peak_bytes > block.forward_peak_bytes > 0


def test_parameters_are_counted_once_and_frozen_ones_apart():
    model = Tied()
    model.first.bias.requires_grad_(False)
    found = brimful.summary(model, torch.randn(ROWS, 64))
    assert (found.modules[0].trainable, found.modules[0].frozen) == (64 * 65, 64)
    assert [row(found, name).shares for name in ("first", "second")] == [False, True]


def test_outputs_in_dicts_and_tuples():
    found = brimful.summary(Heads(), torch.randn(ROWS, 64))
    assert found.modules[0].outputs == [[ROWS, 8], [ROWS, 1, 16], [1, ROWS, 16], [1, ROWS, 16]]
    assert row(found, "heads").calls == 0


def state_of(model, optimizer):
    numbers = torch.get_rng_state(), torch.tensor(random.getstate()[1])
    tensors = [*model.parameters(), *model.buffers()]
    held = [(id(t), t._version, t.detach().clone()) for t in tensors]
    grads = [(id(p.grad), None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    modes = [m.training for m in model.modules()]
    kept = {
        (k, name): value.clone() if isinstance(value, torch.Tensor) else value
        for k, state in enumerate(optimizer.state.values())
        for name, value in state.items()
    }
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return [*numbers, held, grads, hooks, modes, kept, groups, sorted(vars(optimizer))]


def assert_same(one, other):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        assert_same(list(one.values()), list(other.values()))
    else:
        assert one == other


class Drawing(nn.Module):
    """Draws numbers, changes its buffers in both ways, and may fail."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.register_buffer("mean", torch.zeros(8))
        self.fails_at = -1

    def forward(self, x):
        random.random()
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        if x.shape[0] == self.fails_at:
            raise ArithmeticError("as planned")
        return self.body(x)


@pytest.mark.parametrize("fails_at", [-1, 2, 8])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("train", [True, False])
def test_all_is_left_as_it_was(fails_at, steps_before, train):
    model = Drawing()
    model.body[2].eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    batch = torch.randn(8, 8)
    for _ in range(steps_before):
        model(batch).sum().backward()
        optimizer.step()
    model.fails_at = fails_at
    before = state_of(model, optimizer)
    mean = model.mean
    if fails_at == 8:
        with pytest.raises(ArithmeticError, match="as planned"):
            brimful.summary(model, batch, optimizer=optimizer, train=train)
    else:
        found = brimful.summary(model, batch, optimizer=optimizer, train=train)
        assert (found.predicted_bytes is None) == (fails_at == 2)
    assert_same(state_of(model, optimizer), before)
    assert model.mean is mean
    assert scheduler.optimizer is optimizer


class Collecting(nn.Module):
    """Its second forward makes Python look for garbage."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 2:
            gc.set_threshold(1, 1, 1)
            kept = [[] for _ in range(10)]
            del kept
        return self.body(x)


def test_garbage_of_the_program_is_not_the_steps():
    gc.collect()
    threshold = gc.get_threshold()
    gc.set_threshold(1_000_000)
    for _ in range(100):
        cycle = [torch.empty(16)]
        cycle.append(cycle)
    try:
        found = brimful.summary(Collecting(), torch.randn(8, 8))
    finally:
        gc.set_threshold(*threshold)
    assert found.predicted_bytes == found.peak_bytes
    assert gc.isenabled()


def test_a_shortage_at_any_allocation_leaves_all_as_it_was():
    model = Drawing()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    batch = torch.randn(4, 8)
    model(batch).sum().backward()
    optimizer.step()
    before = state_of(model, optimizer)
    raised = place = 0
    fired = True
    while fired:
        with brimful._C._FaultAt(place) as fault:
            try:
                brimful.summary(model, batch, optimizer=optimizer)
            except torch.OutOfMemoryError:
                raised += 1
        fired = fault.fired
        assert_same(state_of(model, optimizer), before)
        place += 1
    assert raised > 100


def test_a_graph_from_before_can_still_go_backward():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(8, 8)
    loss = model(batch).sum()
    brimful.summary(model, batch, optimizer=optimizer)
    loss.backward()


@pytest.fixture
def limit():
    yield lambda more: brimful.memory.set_limit(
        "cpu", brimful.memory.stats("cpu").used_bytes + more
    )
    brimful.memory.set_limit("cpu", None)


def test_the_largest_batch_is_where_a_sizer_begins(limit):
    model, batch = Reused(4), torch.randn(ROWS, 64)
    limit(8 << 20)
    most = brimful.summary(model, batch).largest_rows
    del batch
    x = torch.randn(2 * most, 64)
    limit(8 << 20)  # beside the rows that are not in a piece yet
    for known, retried in ((most, False), (None, True)):
        sizer = brimful.BatchSizer(model, piece_rows=known)
        model.zero_grad()
        outcome = sizer.step(x, lambda model, x: model(x).sum())
        assert (outcome.retries > 0) == retried and outcome.pieces >= 2
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=rf"piece_rows must be positive.*piece_rows: {wrong}"):
            brimful.BatchSizer(model, piece_rows=wrong)
    with pytest.raises(ValueError, match="excludes pieces"):
        brimful.BatchSizer(model, piece_rows=8, pieces=2)


def test_the_largest_batch_fits_and_one_row_more_does_not(limit):
    model, batch = Reused(4), torch.randn(ROWS, 64)
    limit(8 << 20)
    found = brimful.summary(model, batch)
    del batch
    most = found.largest_rows
    assert most > ROWS

    def step(rows):
        model.zero_grad()
        x = torch.randn(rows, 64)
        model(x).sum().backward()

    step(most)
    with pytest.raises(torch.OutOfMemoryError):
        step(most + max(1, most // 50))
    model.zero_grad()


def test_a_batch_that_does_not_fit_says_which_would(limit):
    model, batch = Reused(4), torch.randn(4000, 64)
    limit(3 << 20)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        brimful.summary(model, batch)
    assert "the largest batch that fits: " in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "model, batch, options, kind, words",
    [
        (nn.Linear(8, 1), torch.empty(0, 8), {}, ValueError, "without rows .rows: 0"),
        (nn.Linear(8, 1), "words", {}, TypeError, "no tensor"),
        (nn.Linear(8, 1).requires_grad_(False), torch.ones(4, 8), {}, ValueError, "no gradient"),
        (nn.LazyLinear(8), torch.ones(4, 8), {}, ValueError, "no shape yet"),
        (torch.relu, torch.ones(4, 8), {}, TypeError, "model must be"),
        (nn.Linear(8, 1), torch.ones(4, 8), {"loss_fn": 3}, TypeError, "callable"),
        (nn.Linear(8, 1), torch.ones(4, 8), {"optimizer": 3}, TypeError, "Optimizer"),
        (nn.Linear(8, 1), torch.ones(4, 8), {"autocast": "half"}, TypeError, "autocast"),
        (nn.Linear(8, 1), torch.ones(4, 8), {"loss_fn": lambda m, b: 3}, TypeError, "tensor"),
        (nn.Linear(8, 1), torch.ones(4, 9), {}, RuntimeError, "shapes"),
    ],
)
def test_bad_input_is_refused(model, batch, options, kind, words):
    with pytest.raises(kind, match=words):
        brimful.summary(model, batch, **options)


def test_as_text_as_a_page_and_as_plain_data():
    found = brimful.summary(convolutions(), torch.randn(ROWS, 3, 16, 16))
    table = str(found)
    assert "\n  0 (Conv2d)" in table
    assert f"{ROWS} x 8 x 16 x 16" in table
    assert f"{ROWS} rows on cpu" in table
    assert found._repr_html_().count("<tr>") == 1 + len(found.modules)
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["peak_bytes"] == found.peak_bytes
    assert plain["modules"][1]["type"] == "Conv2d"
    assert plain["modules"][1]["outputs"] == [[ROWS, 8, 16, 16]]


def test_batches_in_tuples_and_dicts():
    model = nn.Bilinear(8, 8, 4)
    one, two = torch.randn(ROWS, 8), torch.randn(ROWS, 8)
    found = [
        brimful.summary(model, batch).peak_bytes
        for batch in ((one, two), {"input1": one, "input2": two})
    ]
    assert found[0] == found[1]


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.linear(x).tanh()


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_module_is_measured_as_a_whole_and_left_as_it_was(inner):
    """Hooks are "not supported on ScriptModules", and its dicts are no dicts."""
    script = torch.jit.script(Counts())
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), script) if inner else script
    before = [value.clone() for value in model.state_dict().values()]
    found = brimful.summary(model, torch.ones(6, 8))
    assert found.peak_bytes > 0 and found.backward_peak_bytes > 0
    assert [row.type for row in found.modules][-2:] == ["Counts", "Linear"]
    assert [row.trainable for row in found.modules][-2:] == [36, 36]
    assert found.modules[0].calls == int(inner)
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert str(found)
