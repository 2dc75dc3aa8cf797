"""When not even one row fits: the error says where, what was tried, what takes the memory, and what to try next."""

import pytest
import torch
import torch.distributed as dist
from models import (
    classes,
    cross_entropy,
    dropout_net,
    gradients_of,
    rng_states,
    same_bits,
    values_of,
    wrap,
)
from rank_processes import raised

import brimful

pytestmark = pytest.mark.usefixtures("no_limit")
ROWS = 4


class Widening(torch.nn.Module):
    """Its work takes much more than it is: 160 KB a row, beside parameters of 8 KB."""

    def __init__(self, width=1000):
        super().__init__()
        self.width = width
        self.inner = torch.nn.Linear(40, 40)
        self.register_buffer("scale", torch.ones(100))

    def forward(self, x):
        return self.inner(x.unsqueeze(1).expand(-1, self.width, -1)) * self.scale[0]


def square(model, piece):
    return model(piece).square().mean()


def used():
    return brimful.memory.stats("cpu").used_bytes


def bytes_of(tensors):
    return sum(t.nbytes for t in tensors)


def trained(optimizer_type, width=1000):
    """A model that has made a step, so that its optimizer has state."""
    model = Widening(width)
    optimizer = optimizer_type(model.parameters())
    sizer = brimful.BatchSizer(model, optimizer, ladder="split")
    sizer.step(torch.randn(ROWS, 40), square)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, sizer


def test_the_error_has_the_facts_in_its_message_and_as_attributes():
    width = max(1000, used() // 400)  # the work counts beside what other tests have left in memory
    room = 400 * width
    model, optimizer, sizer = trained(torch.optim.Adam, width)
    batch = torch.randn(ROWS, 40)
    before = used()
    brimful.memory.set_limit("cpu", before + room)
    error = raised(sizer.step, batch, square)
    assert type(error) is brimful.BatchTooLarge
    assert error.rank == 0 and error.device == "cpu"
    assert error.limit_bytes == before + room
    assert [(pieces, rows) for pieces, rows, _ in error.tried] == [(1, 4), (2, 2), (4, 1)]
    assert all(before <= peak <= before + room for *_, peak in error.tried)

    state = [v for s in optimizer.state.values() for v in s.values()]
    assert error.bytes["parameters"] == bytes_of(model.parameters())
    assert error.bytes["gradients"] == 0
    assert error.bytes["optimizer state"] == bytes_of(state) > 2 * error.bytes["parameters"]
    assert error.bytes["buffers"] == 400
    assert error.bytes["other tensors"] == before - bytes_of(
        [*model.parameters(), *model.buffers(), *state]
    )
    assert error.bytes["activations and temporaries"] >= 160 * width
    assert sum(error.bytes.values()) == error.tried[-1][2]
    assert error.held["this process"] > 1 << 20 and error.held["free"] > 0

    words = str(error)
    assert words.startswith(
        "no split of the batch fits on rank 0 of 1 (device: cpu, rows: 4, retries: 2, max_retries: 8)"
    )
    assert "4 pieces of 1 row (peak: " in words and "buffers 400 B" in words
    assert "CPU out of memory. Tried to allocate" in words
    for number, advice in enumerate(error.advice, 1):
        assert f"{number}. {advice}" in words
    assert [a.split(" (")[0] for a in error.advice][:3] == [
        "raise the memory limit",
        "let the ladder recompute and offload what one row saves",
        "compute in bfloat16",
    ]


def test_gradients_that_were_there_when_memory_ran_out_are_counted():
    model, _, sizer = trained(torch.optim.SGD)
    sizes = iter([1, 3000])  # rows of the model's inner batch, by piece: the second does not fit

    def uneven(model, piece):
        return model.inner(torch.zeros(next(sizes), 40)).square().mean()

    sizer = brimful.BatchSizer(model, max_retries=0)
    brimful.memory.set_limit("cpu", used() + 100_000)
    error = raised(sizer.step, torch.randn(2, 40), uneven, split=[1, 1])
    assert type(error) is brimful.BatchTooLarge
    assert error.bytes["gradients"] == error.bytes["parameters"] == bytes_of(model.parameters())
    assert sum(error.bytes.values()) == error.tried[-1][2]
    assert "optimizer state" not in error.bytes  # no optimizer was given: nobody can say


def test_advice_depends_on_the_configuration():
    model, _, _ = trained(torch.optim.SGD)
    brimful.memory.set_limit("cpu", used() + 150_000)
    hopeless = torch.randn(2 * ROWS, 40)
    few = raised(brimful.BatchSizer(model, max_retries=1).step, hopeless, square)
    assert few.advice[0] == "raise max_retries, or begin with more pieces (pieces=4)"
    with torch.autocast("cpu", torch.bfloat16):
        narrow = raised(brimful.BatchSizer(model).step, hopeless, square)
    assert not any("bfloat16" in advice for advice in narrow.advice)
    assert not any("shard" in advice or "max_retries" in advice for advice in narrow.advice)


def test_every_attempt_of_a_step_has_its_rows_and_peak():
    model, _, sizer = trained(torch.optim.SGD)
    start = used()
    whole = sizer.step(torch.randn(ROWS, 40), square)
    model.zero_grad()
    (only,) = whole.attempts
    assert only.piece_rows == ROWS and only.peak_bytes == whole.peak_bytes
    brimful.memory.set_limit("cpu", start + (whole.peak_bytes - start) // 2 + 20_000)
    split = sizer.step(torch.randn(ROWS - 1, 40), square)
    first, second = split.attempts
    assert (first.pieces, first.piece_rows) == (1, 3)
    assert (second.pieces, second.piece_rows) == (2, 2)
    assert split.peak_bytes == max(first.peak_bytes, second.peak_bytes)
    assert start < first.peak_bytes < whole.peak_bytes


def rank_job(rank):
    model = wrap(dropout_net())
    before, random = values_of(model), rng_states()

    def loss(model, piece):
        if rank.index == 1:
            torch.empty(1 << 28)
        return cross_entropy(model, piece)

    brimful.memory.set_limit("cpu", used() + (1 << 20))
    error = raised(
        brimful.BatchSizer(model, ladder="split").step, classes(3, seed=rank.index), loss
    )
    brimful.memory.set_limit("cpu", None)
    assert same_bits(values_of(model), before) and rng_states() == random
    if rank.index == 1:
        return str(error), error.rank, error.tried, error.advice
    assert type(error) is brimful.RankOutOfMemory and error.rank == 1
    return str(error)


def test_the_rank_that_ran_out_says_so_and_the_others_name_it(ranks):
    healthy, (words, rank, tried, advice) = ranks(rank_job)
    assert words.startswith("no split of the batch fits on rank 1 of 2 (device: cpu, rows: 3, ")
    assert rank == 1 and [rows for _, rows, _ in tried] == [3, 2, 1]
    assert "failed on rank 1: out of memory: CPU out of memory. Tried" in healthy
    assert advice[-1] == "use a smaller model or input, or a device with more memory"


def test_what_the_ladder_has_tried_is_advised_no_more():
    width = max(1000, used() // 400)
    model = Widening(width)
    brimful.memory.set_limit("cpu", used() + 400 * width)
    error = raised(brimful.BatchSizer(model).step, torch.randn(2, 40), square)
    assert [(pieces, rows) for pieces, rows, _ in error.tried] == [(1, 2), (2, 1), (2, 1)]
    advice = "\n".join(error.advice)
    assert "several devices (Pipeline)" in advice and "checkpoint activations" not in advice
    error = raised(brimful.BatchSizer(model, max_retries=0).step, torch.randn(1, 40), square)
    assert len(error.tried) == 1, "no step is repeated where that is not wanted"


def test_map_batches_has_the_same_facts():
    width = max(1000, used() // 400)
    model = Widening(width)
    batch = torch.randn(2, 40)
    before = used()
    brimful.memory.set_limit("cpu", before + 300 * width)
    error = raised(brimful.map_batches, model, batch)
    assert type(error) is brimful.BatchTooLarge
    assert error.rank == 0 and error.device == "cpu"
    assert [(pieces, rows) for pieces, rows, _ in error.tried] == [(1, 2), (2, 1)]
    assert error.bytes["parameters"] == bytes_of(model.parameters())
    assert error.bytes["buffers"] == 400
    assert sum(error.bytes.values()) == error.tried[-1][2]
    assert error.limit_bytes == before + 300 * width and error.held["this process"] > 1 << 20
    assert str(error).startswith("a piece of one row does not fit on rank 0 of 1 (device: cpu, ")
    assert [a.split(" (")[0] for a in error.advice] == [
        "raise the memory limit",
        "compute in bfloat16",
        "use a smaller model or input, or a device with more memory",
    ]
    other = raised(brimful.map_batches, lambda piece: model(piece), batch)
    assert "parameters" not in other.bytes and sum(other.bytes.values()) == other.tried[-1][2]


def test_an_optimizer_without_room_has_the_same_facts():
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.Adam(model.parameters())
    sizer = brimful.BatchSizer(model, optimizer, ladder="split")
    batch = torch.randn(2, 1000)
    calls = []
    bytes = bytes_of(model.parameters())
    before = used()
    brimful.memory.set_limit("cpu", before + 4 * bytes)  # state and gradients, nothing beside
    error = raised(sizer.step, batch, lambda *_: calls.append(1))
    assert type(error) is brimful.BatchTooLarge and calls == []
    assert error.rank == 0 and error.device == "cpu" and error.tried == []
    assert error.bytes["parameters"] == bytes
    assert 2 * bytes <= error.bytes["optimizer state"] <= 2 * bytes + 100
    assert error.bytes["the optimizer's step"] > bytes
    assert sum(error.bytes.values()) > error.limit_bytes == before + 4 * bytes
    assert error.held["this process"] > 1 << 20
    words = str(error)
    assert words.startswith("the optimizer's step would run out of memory, whatever the split, on")
    for number, advice in enumerate(error.advice, 1):
        assert f"{number}. {advice}" in words
    assert "take an optimizer with less state" in error.advice


def falling_budget_job(rank, rows, max_retries):
    torch.manual_seed(0)
    model = wrap(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)))
    before = values_of(model)
    sizer = brimful.BatchSizer(model, max_retries=max_retries, ladder="split")
    pieces = []

    def fall(_):
        brimful.memory.set_limit("cpu", brimful.memory.stats("cpu").used_bytes)

    def loss(model, piece):
        brimful.memory.set_limit("cpu", None)
        pieces.append(len(piece[1]))
        return cross_entropy(model, piece)

    handle = model.module[2].bias.register_hook(fall) if rank.index == 1 else None
    error = raised(sizer.step, classes(rows, seed=rank.index), loss)
    brimful.memory.set_limit("cpu", None)
    assert same_bits(values_of(model), before)
    assert all(p.grad is None for p in model.parameters())
    if handle:
        handle.remove()
    model.zero_grad()
    sizer.step(classes(rows, seed=rank.index), loss)
    gradients = [None] * rank.size
    dist.all_gather_object(gradients, gradients_of(model))
    assert same_bits(gradients[0], gradients[1])
    return error, pieces


@pytest.mark.parametrize(("rows", "max_retries", "tries"), [(16, 2, [16, 8, 4]), (3, 8, [3, 2, 1])])
def test_a_budget_that_keeps_falling_ends_on_all_ranks(ranks, rows, max_retries, tries):
    (healthy, _), (failed, pieces) = ranks(falling_budget_job, rows, max_retries)
    assert type(failed) is brimful.BatchTooLarge
    assert f"max_retries: {max_retries}" in str(failed) and f"retries: {len(tries) - 1}" in str(
        failed
    )
    assert type(healthy) is brimful.RankOutOfMemory
    assert healthy.rank == 1 and "CPU out of memory" in str(healthy)
    assert pieces[: len(tries)] == tries  # the first piece of each try is where memory ran out
