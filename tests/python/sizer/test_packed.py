"""Packed sequences: one row that holds a batch, in rows that hold some of its sequences."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from models import used

import brimful
from brimful import _C

LENGTHS = [5, 17, 3, 9, 9, 30, 1, 12, 4, 22]


class Packed(torch.nn.Module):
    """A causal language model whose attention keeps to a sequence, by the places or the positions that it is given."""

    def __init__(self, dtype=torch.float64, leaks=False, shift=True):
        super().__init__()
        torch.manual_seed(5)
        self.words = torch.nn.Embedding(50, 16, dtype=dtype)
        self.places = torch.nn.Embedding(64, 16, dtype=dtype)
        self.mix = torch.nn.Linear(16, 48, dtype=dtype)
        self.scores = torch.nn.Linear(16, 50, dtype=dtype)
        self.leaks, self.shift = leaks, shift

    def numbers(self, tokens, cu_seq_lens_q, position_ids, seq_idx):
        """Of the sequence that each token is in."""
        if cu_seq_lens_q is not None:
            assert cu_seq_lens_q[-1] == tokens
            return torch.bucketize(torch.arange(tokens), cu_seq_lens_q[1:], right=True)
        if seq_idx is not None:
            return seq_idx[0]
        return (position_ids[0].diff(prepend=position_ids[0, :1]) != 1).cumsum(0)

    def forward(
        self, input_ids, labels=None, cu_seq_lens_q=None, position_ids=None, seq_idx=None, **_
    ):
        tokens = input_ids.size(1)
        numbers = self.numbers(tokens, cu_seq_lens_q, position_ids, seq_idx)
        if position_ids is None:
            begins = torch.searchsorted(numbers, numbers)
            position_ids = (torch.arange(tokens) - begins)[None]
        x = self.words(input_ids) + self.places(position_ids)
        heads = [y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.mix(x).chunk(3, -1)]
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        if not self.leaks:
            seen &= numbers[:, None] == numbers
        y = F.scaled_dot_product_attention(*heads, attn_mask=seen).transpose(1, 2).flatten(2)
        logits = self.scores(torch.tanh(x + y))
        if labels is None:
            return logits
        shown, wanted = (logits[:, :-1], labels[:, 1:]) if self.shift else (logits, labels)
        return F.cross_entropy(shown.flatten(0, 1), wanted.flatten())


def loss_fn(model, piece):
    return model(**piece)


def flattened(says="places", lengths=LENGTHS, seed=0, width=50):
    """What DataCollatorWithFlattening makes: `says` is where the sequences are to be seen."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    ids = torch.randint(1, width, (1, tokens), generator=generator)
    labels = ids.clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    labels[:, ends[:-1].long()] = -100
    batch = {"input_ids": ids, "labels": labels}
    if says == "places":
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        batch |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    if says == "numbers":
        numbers = torch.arange(len(lengths), dtype=torch.int32)
        batch["seq_idx"] = numbers.repeat_interleave(torch.tensor(lengths))[None]
    if says != "numbers":
        batch["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    return batch


@contextlib.contextmanager
def limited(limit_bytes):
    brimful.memory.set_limit("cpu", limit_bytes)
    try:
        yield
    finally:
        brimful.memory.set_limit("cpu", None)


def weights_of(batch, lengths=LENGTHS):
    return [int((labels != -100).sum()) for labels in batch["labels"][0].split(lengths)]


def gradients_of(model):
    return [p.grad.clone() for p in model.parameters()]


def unsplit(model, batch):
    model.zero_grad()
    loss = loss_fn(model, batch)
    loss.backward()
    gradients = gradients_of(model)
    model.zero_grad()
    return loss.item(), gradients


def off(gradients, others):
    squares = sum((a - b).double().square().sum() for a, b in zip(gradients, others, strict=True))
    return float((squares / sum(b.double().square().sum() for b in others)).sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("says", ["places", "positions", "numbers"])
@pytest.mark.parametrize("how", [True, "auto"])
def test_the_gradient_is_that_of_the_row_in_one_piece(says, dtype, how):
    model = Packed(dtype)
    sizer = brimful.BatchSizer(model, by_length=how, pieces=3)
    for seed in range(3):
        batch = flattened(says, seed=seed)
        kept = {
            name: value.clone() for name, value in batch.items() if isinstance(value, torch.Tensor)
        }
        loss, expected = unsplit(model, batch)
        outcome = sizer.step(batch, loss_fn)
        assert 3 <= outcome.pieces <= 4
        assert sum(outcome.split) == sum(weight > 0 for weight in weights_of(batch))
        assert outcome.weight == brimful.token_weight(batch)
        assert outcome.loss == pytest.approx(loss, rel=1e-6)
        assert off(gradients_of(model), expected) < (1e-5 if dtype == torch.float32 else 1e-12)
        assert all(torch.equal(batch[name], value) for name, value in kept.items())
        model.zero_grad()


def test_a_piece_has_the_form_of_the_batch():
    seen = []

    def watching(model, piece):
        seen.append(piece)
        return loss_fn(model, piece)

    lengths = [4, 6, 2, 5]
    batch = flattened(lengths=lengths)
    batch["labels"][:, [11, 15]] = 3
    batch["seq_idx"] = flattened("numbers", lengths=lengths)["seq_idx"]
    batch["max_length_k"] = torch.tensor(6)
    batch["ids"] = ["a", "b", "c", "d"]
    batch["scale"] = torch.tensor(2.0)
    batch["scores"] = torch.arange(4.0)
    model = Packed()
    sizer = brimful.BatchSizer(model, by_length=True)
    sizer.step(batch, loss_fn)
    model.zero_grad()
    outcome = sizer.step(batch, watching, split=[2, 1, 1])
    assert outcome.order == [1, 3, 0, 2]
    first, second, _ = seen
    assert list(first) == list(batch)
    for name in ("input_ids", "labels", "position_ids"):
        row = batch[name]
        assert torch.equal(first[name], torch.cat([row[:, 4:10], row[:, 12:17]], 1))
        assert torch.equal(second[name], row[:, :4])
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert first[name].tolist() == [0, 6, 11] and first[name].dtype == torch.int32
    assert (first["max_length_q"], second["max_length_q"]) == (6, 4)
    assert torch.equal(second["max_length_k"], torch.tensor(4))
    assert first["seq_idx"].tolist() == [[0] * 6 + [1] * 5]
    assert first["ids"] == ["b", "d"] and first["scores"].tolist() == [1, 3]
    assert first["scale"] == 2


def test_memory_that_runs_out_is_met_by_fewer_tokens():
    model = Packed(torch.float32)
    lengths = [48, 40, 40, 30, 30, 30, 20, 20] * 3
    batch = flattened(lengths=lengths)
    _, expected = unsplit(model, batch)
    sizer = brimful.BatchSizer(model, by_length=True)
    with limited(used() + (2 << 20)):
        outcome = sizer.step(batch, loss_fn)
        assert outcome.retries > 0 and outcome.pieces > 1
        assert off(gradients_of(model), expected) < 1e-5
        model.zero_grad()
        assert sizer.step(flattened(lengths=lengths, seed=1), loss_fn).retries == 0


def test_a_recorded_split_repeats_the_step_bit_by_bit():
    model = Packed()
    sizer = brimful.BatchSizer(model, by_length=True, pieces=4)
    outcome = sizer.step(flattened(), loss_fn)
    first = gradients_of(model)
    model.zero_grad()
    sizer.step(flattened(), loss_fn, split=outcome.split)
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(model), first, strict=True))


def test_outputs_come_back_in_the_order_of_the_batch():
    outputs = []

    def watching(model, piece):
        outputs.append(model(**{**piece, "labels": None}).detach())
        return loss_fn(model, piece)

    model = Packed()
    batch = flattened()
    outcome = brimful.BatchSizer(model, by_length=True, pieces=3).step(batch, watching)
    found = brimful.in_batch_order(outputs, outcome, packed=batch)
    whole = model(**{**batch, "labels": None})[0].split(LENGTHS)
    assert len(found) == len(whole) and found[6] is None
    for row, (one, other) in enumerate(zip(found, whole, strict=True)):
        assert row == 6 or torch.allclose(one, other)
    with pytest.raises(ValueError, match="do not have the tokens of the step"):
        brimful.in_batch_order([o[:, 1:] for o in outputs], outcome, packed=batch)
    with pytest.raises(ValueError, match="not packed"):
        brimful.in_batch_order(outputs, outcome, packed={"input_ids": torch.ones(2, 3)})


def test_the_first_label_of_the_row_counts_as_little_as_in_the_batch():
    model = Packed()
    batch = flattened()
    batch["labels"][0, 0] = 7
    _, expected = unsplit(model, batch)
    brimful.BatchSizer(model, by_length=True, pieces=3).step(batch, loss_fn)
    assert off(gradients_of(model), expected) < 1e-12
    assert batch["labels"][0, 0] == 7


def test_a_model_that_does_not_shift_its_labels():
    model = Packed(shift=False)
    batch = flattened()
    batch["labels"] = batch["input_ids"].clone()
    _, expected = unsplit(model, batch)
    sizer = brimful.BatchSizer(
        model,
        by_length=True,
        pieces=3,
        weight_fn=lambda piece: brimful.token_weight(piece, shift=False),
    )
    sizer.step(batch, loss_fn)
    assert off(gradients_of(model), expected) < 1e-12


def test_a_model_that_mixes_sequences_is_refused_in_the_first_step():
    model = Packed(leaks=True)
    sizer = brimful.BatchSizer(model, by_length=True)
    with pytest.raises(ValueError, match=r"not the mean of theirs.*cu_seq_lens_q.*position_ids"):
        sizer.step(flattened(), loss_fn)
    assert all(p.grad is None for p in model.parameters())


def places(*ends):
    return lambda batch: batch.update(cu_seq_lens_q=torch.tensor(ends, dtype=torch.int32))


REFUSED = {
    "begin": (places(1, 5, 18), r"cu_seq_lens_q does not begin at 0 .*\[1, 5, 18\]"),
    "nothing": (places(), "cu_seq_lens_q does not begin at 0"),
    "one": (places(0), "cu_seq_lens_q does not begin at 0"),
    "fall": (places(0, 9, 7, 18), r"does not rise \(at: 2, values: 9 and 7\)"),
    "empty": (places(0, 9, 9, 18), "does not rise .*leave empty sequences out$"),
    "short": (places(0, 9, 17), r"does not end at the number of tokens \(last: 17, tokens: 18\)"),
    "long": (places(0, 9, 19), r"does not end at the number of tokens \(last: 19, tokens: 18\)"),
    "other keys": (places(0, 9, 18), "queries and keys have other sequences"),
    "table": (lambda b: b.update(cu_seq_lens_q=torch.ones(2, 2)), "whole numbers in a row"),
    "list": (lambda b: b.update(cu_seq_lens_q=[0, 18]), "whole numbers in a row"),
    "rows": (lambda b: b.update(input_ids=torch.ones(2, 9)), "packed sequences lie in one row"),
    "labels": (
        lambda b: b.update(labels=torch.ones(1, 17).long()),
        "another shape than the tokens",
    ),
    "mask": (
        lambda b: b.update(bias=torch.ones(1, 1, 18, 18)),
        "not known whether an entry has a column for each token",
    ),
    "numbers": (
        lambda b: (b.clear(), b.update(flattened("numbers", [5, 13]), seq_idx=torch.ones(1, 17))),
        "seq_idx has no number for each token",
    ),
    "first label": (
        lambda b: b["labels"].__setitem__((0, 5), 3),
        r"first token counts.*\(sequence: 1, token: 5\)",
    ),
    "no label": (lambda b: b["labels"].fill_(-100), "no label of the batch counts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_a_remedy(case):
    change, text = REFUSED[case]
    batch = flattened(lengths=[5, 13])
    change(batch)
    model = Packed()
    sizer = brimful.BatchSizer(model, by_length=True)
    with pytest.raises(ValueError, match=text) as caught:
        sizer.step(batch, loss_fn)
    assert "; " in str(caught.value)
    assert all(p.grad is None for p in model.parameters())
    sizer.step(flattened(), loss_fn)


def test_lengths_of_your_own_are_for_rows_with_padding():
    sizer = brimful.BatchSizer(Packed(), by_length=lambda batch: [18])
    with pytest.raises(ValueError, match=r"length_fn.*\(sequences: 10\); pass by_length=True"):
        sizer.step(flattened(), loss_fn)


def test_one_row_with_one_sequence_is_no_packed_batch():
    batch = flattened("positions", lengths=[12])
    model = Packed()
    _, expected = unsplit(model, batch)
    brimful.BatchSizer(model, by_length=True).step(batch, loss_fn)
    assert off(gradients_of(model), expected) < 1e-12


@pytest.mark.parametrize("says", ["places", "positions"])
def test_a_forecast_and_a_loop_take_packed_batches(says):
    model = Packed(torch.float32)
    sizer = brimful.BatchSizer(model, by_length=True, predict=True)
    batch = flattened(says, lengths=[40, 30, 30, 20, 20, 20, 10, 10] * 2)
    _, expected = unsplit(model, batch)
    with limited(used() + (1 << 20)):
        plan = sizer.plan(batch, loss_fn)
        seen = []
        for loaded in sizer.batches([batch, batch]):
            outcome = sizer.step(loaded, loss_fn)
            seen.append(outcome.pieces)
            assert outcome.last == (len(seen) == 2)
            assert off(gradients_of(model), expected) < 1e-5
            model.zero_grad()
    assert len(seen) == 2 and all(pieces > 1 for pieces in seen)
    assert plan is None or sum(plan.split) == 16


def test_weights_of_your_own_are_asked_for_with_the_batch():
    asked = []

    def weigh(batch):
        asked.append(batch["labels"].shape[1])
        return brimful.token_weight(batch)

    model = Packed()
    batch = flattened()
    sizer = brimful.BatchSizer(model, by_length=True, pieces=3, weight_fn=weigh)
    for loaded in sizer.batches([batch, batch]):
        assert sizer.step(loaded, loss_fn).weight == brimful.token_weight(batch)
        model.zero_grad()
    assert sum(LENGTHS) in asked


def ranks_job(rank):
    lengths = [[9, 4, 14, 6], [7, 21, 3]][rank.index]
    batch = flattened(lengths=lengths, seed=rank.index)
    model = brimful.DistributedDataParallel(Packed())
    sizer = brimful.BatchSizer(model, by_length=True, pieces=2)
    outcome = sizer.step(batch, loss_fn)
    return gradients_of(model), outcome.weight


def test_ranks_weigh_by_their_tokens(ranks):
    (first, weight), (second, _) = ranks(ranks_job)
    one, two = (
        flattened(lengths=lengths, seed=seed)
        for seed, lengths in enumerate(([9, 4, 14, 6], [7, 21, 3]))
    )
    model = Packed()
    weights = [brimful.token_weight(batch) for batch in (one, two)]
    parts = [unsplit(model, batch)[1] for batch in (one, two)]
    expected = [
        (a * weights[0] + b * weights[1]) / sum(weights) for a, b in zip(*parts, strict=True)
    ]
    assert weight == sum(weights)
    assert off(first, expected) < 1e-12 and off(second, expected) < 1e-12


def test_an_allocation_that_is_refused_anywhere_leaves_the_gradient_exact():
    model = Packed()
    batch = flattened()
    _, expected = unsplit(model, batch)
    retried = 0
    for index in range(0, 400, 11):
        sizer = brimful.BatchSizer(model, by_length=True, pieces=2)
        sizer._by_length._checks_left = 0  # the check has allocations of its own
        with _C._FaultAt(index) as fault:
            outcome = sizer.step(batch, loss_fn)
        retried += outcome.retries
        assert off(gradients_of(model), expected) < 1e-12, index
        model.zero_grad()
        if not fault.fired:
            break
    assert retried > 5 and not fault.fired
