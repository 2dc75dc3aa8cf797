"""Tensors in reference cycles, which Python finds late, are collected before a split becomes finer."""

import gc

import pytest
import torch

import brimful

ROWS = 2048


class Box:
    pass


class Cyclic(torch.nn.Module):
    """Each forward leaves a copy of what it saw in a cycle."""

    def __init__(self, leaves=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(64, 512), torch.nn.Linear(512, 1)
        self.leaves = leaves

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        if self.leaves:
            box = Box()
            box.itself, box.seen = box, hidden.detach().clone()
        return self.last(hidden)


def loss_fn(model, piece):
    return model(piece).square().mean()


@pytest.fixture
def no_collector():
    """Python's own collector comes when enough objects were made, which differs."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.fixture
def room(no_limit):
    """room(work): the limit is what `work` takes, and a third of what one forward leaves."""

    def limit(work):
        brimful.memory.reset_peak("cpu")
        work()
        gc.collect()
        brimful.memory.set_limit(
            "cpu", brimful.memory.stats("cpu").peak_bytes + ROWS * 512 * 4 // 3
        )

    return limit


def train(model, room, steps=6, **options):
    x = torch.randn(ROWS, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    room(lambda: loss_fn(model, x).backward())
    model.zero_grad()
    sizer = brimful.BatchSizer(model, optimizer, predict=False, **options)
    outcomes = []
    for _ in range(steps):
        outcomes.append(sizer.step(x, loss_fn))
        optimizer.step()
        optimizer.zero_grad()
    return sizer, outcomes


def test_garbage_in_cycles_is_collected_before_a_finer_split(no_collector, room):
    sizer, outcomes = train(Cyclic(), room)
    assert [outcome.pieces for outcome in outcomes] == [1] * 6
    collected = [outcome.attempts[0].garbage_bytes for outcome in outcomes]
    times = sum(bytes > 0 for bytes in collected)
    assert times > 0 and all(bytes == 0 or bytes >= ROWS * 512 * 4 for bytes in collected)
    assert sizer.report().garbage_collections == times
    assert f"garbage collected: {times})" in str(sizer.report())


def test_a_program_that_disabled_the_collector_and_leaves_nothing_is_split(no_collector, room):
    model = Cyclic(leaves=False)
    sizer, (outcome,) = train(
        model,
        lambda work: brimful.memory.set_limit(
            "cpu", brimful.memory.stats("cpu").used_bytes + ROWS * 512 * 4
        ),
        steps=1,
    )
    assert outcome.pieces > 1 and sizer.report().garbage_collections == 0


def test_a_step_collects_once(no_collector, no_limit, monkeypatch):
    calls = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append(None))
    model = torch.nn.Linear(4, 1)
    failed = []

    def fails(model, piece):
        if len(failed) < 3:
            failed.append(len(piece))
            raise torch.OutOfMemoryError("planted")
        return loss_fn(model, piece)

    outcome = brimful.BatchSizer(model).step(torch.randn(8, 4), fails)
    assert failed == [8, 4, 2] and outcome.pieces == 8 and len(calls) == 1


def test_inference_in_pieces_collects_too(no_collector, room):
    model, x = Cyclic(), torch.randn(ROWS, 64)
    sizes = []

    def forward(piece):
        sizes.append(len(piece))
        return model(piece)

    with torch.no_grad():
        room(lambda: model(x))
        for _ in range(4):
            brimful.map_batches(forward, x)
    assert set(sizes) == {ROWS} and len(sizes) > 4


def test_a_pipeline_collects_too(no_collector, room):
    model, x, target = Cyclic(), torch.randn(ROWS, 64), torch.zeros(ROWS, 1)
    pipe = brimful.Pipeline([model], microbatches=1, loss_fn=torch.nn.functional.mse_loss)
    room(lambda: pipe.step(x, target))
    model.zero_grad()
    outcomes = []
    for _ in range(4):
        outcomes.append(pipe.step(x, target))
        model.zero_grad()
    assert {outcome.pieces for outcome in outcomes} == {1}
    assert sum(outcome.retries for outcome in outcomes) > 0
