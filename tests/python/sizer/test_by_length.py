"""Rows in order of length: the gradient stays that of the padded batch, and pieces are trimmed."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from models import used

import brimful

ROWS, WIDTH = 24, 40


class Tokens(torch.nn.Module):
    """A causal language model. Without `mask` padding is attended to; `absolute` counts positions by column."""

    def __init__(self, dtype=torch.float32, mask=True, absolute=False, causal=True):
        super().__init__()
        torch.manual_seed(5)
        self.words = torch.nn.Embedding(50, 16, dtype=dtype)
        self.places = torch.nn.Embedding(64, 16, dtype=dtype)
        self.mix = torch.nn.Linear(16, 48, dtype=dtype)
        self.scores = torch.nn.Linear(16, 50, dtype=dtype)
        self.mask, self.absolute, self.causal = mask, absolute, causal

    def forward(self, input_ids, attention_mask=None, labels=None, position_ids=None, **_):
        length = input_ids.size(1)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if position_ids is None:
            position_ids = (mask.cumsum(1) - 1).clamp(min=0)
        if self.absolute:
            position_ids = torch.arange(length).expand_as(input_ids)
        x = self.words(input_ids) + self.places(position_ids)
        heads = [y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.mix(x).chunk(3, -1)]
        seen = torch.ones(length, length, dtype=torch.bool)
        seen = (seen.tril() if self.causal else seen)[None, None]
        if self.mask:
            seen = seen & (mask[:, None, None] != 0) | torch.eye(length, dtype=torch.bool)
        y = F.scaled_dot_product_attention(*heads, attn_mask=seen).transpose(1, 2).flatten(2)
        logits = self.scores(torch.tanh(x + y))
        if labels is None:
            return logits
        wanted = labels[:, 1:] if self.causal else labels
        shown = logits[:, :-1] if self.causal else logits
        return F.cross_entropy(shown.flatten(0, 1).double(), wanted.flatten())


@contextlib.contextmanager
def limited(limit_bytes):
    brimful.memory.set_limit("cpu", limit_bytes)
    try:
        yield
    finally:
        brimful.memory.set_limit("cpu", None)


def loss_fn(model, piece):
    return model(**piece)


def tokens(rows=ROWS, width=WIDTH, left=False, seed=0, lengths=None):
    """The usual dict; row 0 is the longest, and some labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    if lengths is None:
        lengths = torch.randint(4, width + 1, (rows,), generator=generator)
        lengths[0] = width
    lengths = torch.as_tensor(lengths)
    columns = torch.arange(width)[None]
    mask = columns >= width - lengths[:, None] if left else columns < lengths[:, None]
    ids = torch.randint(1, 50, (len(lengths), width), generator=generator) * mask
    labels = torch.where(mask, ids, -100)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    if left:
        labels[mask & (columns == width - lengths[:, None])] = -100
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def gradients_of(model):
    return [p.grad.clone() for p in model.parameters()]


def padded_gradients(model, batch):
    model.zero_grad()
    loss_fn(model, batch).backward()
    gradients = gradients_of(model)
    model.zero_grad()
    return gradients


def off(gradients, others):
    squares = sum((a - b).double().square().sum() for a, b in zip(gradients, others, strict=True))
    return float((squares / sum(b.double().square().sum() for b in others)).sqrt())


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
def test_the_gradient_is_that_of_the_padded_batch(dtype, left):
    model = Tokens(dtype)
    sizer = brimful.BatchSizer(model, by_length=True, pieces=3)
    for seed in range(4):
        batch = tokens(left=left, seed=seed)
        expected = padded_gradients(model, batch)
        outcome = sizer.step(batch, loss_fn)
        assert outcome.pieces >= 3
        assert off(gradients_of(model), expected) < (1e-5 if dtype == torch.float32 else 1e-12)
        assert outcome.weight == brimful.token_weight(batch)
        model.zero_grad()


def test_pieces_are_trimmed_and_the_longest_rows_come_first():
    seen = []

    def watching(model, piece):
        seen.append((piece["input_ids"].shape, piece["attention_mask"].sum(1).tolist()))
        return loss_fn(model, piece)

    model = Tokens()
    sizer = brimful.BatchSizer(model, by_length=True, pieces=4)
    batch = tokens()
    sizer.step(batch, loss_fn)
    model.zero_grad()
    outcome = sizer.step(batch, watching)
    assert [shape[0] for shape, _ in seen] == outcome.split
    lengths = [n for _, rows in seen for n in rows]
    assert lengths == sorted(lengths, reverse=True)
    assert all(shape[1] == rows[0] for shape, rows in seen)
    mask = batch["attention_mask"]
    assert lengths == mask.sum(1)[outcome.order].tolist()


def test_rows_that_share_a_length_keep_their_order():
    model = Tokens()
    batch = tokens(lengths=[7, 9, 7, 9, 7], width=9)
    outcome = brimful.BatchSizer(model, by_length=True).step(batch, loss_fn)
    assert outcome.order == [1, 3, 0, 2, 4]


def test_outputs_come_back_in_the_order_of_the_batch():
    outputs = []

    def gathering(model, piece):
        outputs.append(piece["input_ids"][:, 0] * piece["attention_mask"][:, 0])
        return loss_fn(model, piece)

    model = Tokens()
    batch = tokens()
    batch["labels"][3] = -100
    outcome = brimful.BatchSizer(model, by_length=True, pieces=3).step(batch, gathering)
    rows = brimful.in_batch_order(outputs, outcome)
    assert rows[3] is None
    assert [int(r) for i, r in enumerate(rows) if i != 3] == [
        int(v) for i, v in enumerate(batch["input_ids"][:, 0]) if i != 3
    ]
    with pytest.raises(ValueError, match=r"rows: 1, of the step: 23"):
        brimful.in_batch_order([torch.zeros(1)], outcome)


def test_a_row_without_labels_is_not_run():
    model = Tokens()
    batch = tokens()
    batch["labels"][5:20] = -100
    expected = padded_gradients(model, batch)
    outcome = brimful.BatchSizer(model, by_length=True).step(batch, loss_fn)
    assert sum(outcome.split) == ROWS - 15
    assert off(gradients_of(model), expected) < 1e-5


def test_a_row_whose_first_label_alone_counts_weighs_nothing():
    model = Tokens()
    batch = tokens()
    batch["labels"][20, 1:] = -100
    batch["labels"][20, 0] = 3
    expected = padded_gradients(model, batch)
    outcome = brimful.BatchSizer(model, by_length=True, pieces=24).step(batch, loss_fn)
    assert 20 in outcome.order
    assert off(gradients_of(model), expected) < 1e-5


def test_a_recorded_split_gives_the_same_bits():
    model = Tokens()
    batch = tokens()
    outcome = brimful.BatchSizer(model, by_length=True, pieces=5).step(batch, loss_fn)
    first = gradients_of(model)
    model.zero_grad()
    again = brimful.BatchSizer(model, by_length=True).step(batch, loss_fn, split=outcome.split)
    assert again.split == outcome.split
    assert again.order == outcome.order
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(model), first, strict=True))


def test_entries_of_one_for_each_row_go_with_their_rows():
    seen = []

    def noting(model, piece):
        seen.extend(zip(piece["name"], piece["number"].tolist(), strict=True))
        return model(**{k: v for k, v in piece.items() if k not in ("name", "number")})

    model = Tokens()
    batch = tokens()
    batch["number"] = torch.arange(ROWS)
    batch["name"] = [str(i) for i in range(ROWS)]
    outcome = brimful.BatchSizer(model, by_length=True, pieces=2).step(batch, noting)
    assert [number for _, number in seen[-ROWS:]] == outcome.order
    assert all(name == str(number) for name, number in seen)


def test_position_ids_and_token_types_are_trimmed_too():
    model = Tokens()
    batch = tokens(left=True)
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    expected = padded_gradients(model, batch)
    brimful.BatchSizer(model, by_length=True, pieces=3).step(batch, loss_fn)
    assert off(gradients_of(model), expected) < 1e-5


def test_lengths_follow_from_labels_where_there_is_no_mask():
    model = Tokens()
    batch = tokens()
    del batch["attention_mask"]
    expected = padded_gradients(model, batch)
    outcome = brimful.BatchSizer(model, by_length=True, pieces=3).step(batch, loss_fn)
    assert outcome.pieces >= 3
    assert off(gradients_of(model), expected) < 1e-5


def test_functions_of_the_program_say_how_long_rows_are_and_how_they_are_trimmed():
    trimmed = []

    def length_fn(batch):
        return (batch[0] != 0).sum(1)

    def trim_fn(batch, begin, end):
        ids, wanted = (part[begin:end] for part in batch)
        length = int((ids != 0).sum(1).max())
        trimmed.append((end - begin, length))
        return ids[:, :length], wanted

    def loss(model, piece):
        ids, wanted = piece
        hidden = torch.tanh(model.words(ids)) * (ids != 0)[..., None]
        return F.cross_entropy(model.scores(hidden.sum(1)), wanted)

    model = Tokens()
    batch = tokens()["input_ids"], torch.arange(ROWS) % 50
    loss(model, batch).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    sizer = brimful.BatchSizer(model, by_length=length_fn, trim_fn=trim_fn, pieces=3)
    outcome = sizer.step(batch, loss)
    got = [p.grad for p in model.parameters() if p.grad is not None]
    assert off(got, expected) < 1e-5
    assert [rows for rows, _ in trimmed[-outcome.pieces :]] == outcome.split
    assert outcome.weight == ROWS


def fixed_width(bad=None):
    """A model whose mask is as wide as the longest row, so that it takes no row that is padded further."""

    def length_fn(batch):
        return (batch[0] != 0).sum(1)

    def trim_fn(batch, begin, end):
        ids, wanted = (part[begin:end] for part in batch)
        return ids[:, : int((ids != 0).sum(1).max())], wanted

    def loss(model, piece):
        ids, wanted = piece
        mask = torch.arange(int((ids != 0).sum(1).max())) < (ids != 0).sum(1, keepdim=True)
        if bad is not None and bad in wanted:
            raise KeyError("planted")
        hidden = torch.tanh(model.words(ids)) * mask[..., None]
        return F.cross_entropy(model.scores(hidden.sum(1)), wanted)

    batch = tokens()["input_ids"], torch.arange(ROWS) % 50
    return batch, loss, {"by_length": length_fn, "trim_fn": trim_fn}


def test_a_model_that_takes_trimmed_rows_alone_is_trained():
    model = Tokens()
    batch, loss, options = fixed_width()
    loss(model, batch).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    assert brimful.BatchSizer(model, pieces=3, **options).step(batch, loss).pieces == 3
    got = [p.grad for p in model.parameters() if p.grad is not None]
    assert off(got, expected) < 1e-5


def test_an_error_in_a_piece_names_its_rows():
    model = Tokens()
    batch, loss, options = fixed_width(bad=0)
    sizer = brimful.BatchSizer(model, pieces=3, **options)
    longest = int((batch[0] != 0).sum(1).argmax())
    batch[1][longest] = 0
    batch[1][[i for i in range(ROWS) if i != longest]] = 1
    with pytest.raises(KeyError) as caught:
        sizer.step(batch, loss)
    assert f"(rows: {longest}" in caught.value.__notes__[0]
    batch, loss, _ = fixed_width()
    with pytest.raises(RuntimeError, match="size") as caught:
        narrow = batch[0][(batch[0] != 0).sum(1).argsort()], batch[1]
        brimful.BatchSizer(model, pieces=3).step(narrow, loss)
    note = caught.value.__notes__[0]
    assert "never run whole (rows: 0 to" in note and "size_fn and split_fn" in note


def test_auto_trims_the_usual_dict_alone():
    model = Tokens()
    sizer = brimful.BatchSizer(model, by_length="auto", pieces=2)
    assert sizer.step(tokens(), loss_fn).order
    model.zero_grad()
    plain = sizer.step((torch.ones(4, 6, dtype=torch.long),), lambda m, p: m(p[0]).square().mean())
    assert plain.order == []
    assert plain.split == [2, 2]


def test_memory_that_runs_out_makes_pieces_finer_and_the_bits_are_those_of_the_split():
    model = Tokens()
    batch = tokens(rows=48)
    expected = padded_gradients(model, batch)
    sizer = brimful.BatchSizer(model, by_length=True)
    before = used()
    with limited(before + 450_000):
        outcome = sizer.step(batch, loss_fn)
        assert outcome.retries > 0
    gradients = gradients_of(model)
    assert off(gradients, expected) < 1e-5
    model.zero_grad()
    brimful.BatchSizer(model, by_length=True).step(batch, loss_fn, split=outcome.split)
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(model), gradients, strict=True))
    model.zero_grad()
    with limited(before + 450_000):
        assert sizer.step(batch, loss_fn).retries == 0


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_a_forecast_chooses_pieces_by_bytes(left):
    model = Tokens()
    limit = used() + 1_500_000
    sizer = brimful.BatchSizer(model, by_length=True, predict=True)
    for seed in range(4):
        batch = tokens(rows=64, left=left, seed=seed)
        expected = padded_gradients(model, batch)
        with limited(limit):
            plan = sizer.plan(batch, loss_fn)
            outcome = sizer.step(batch, loss_fn)
        assert outcome.retries == 0
        assert sum(plan.split) == 64
        assert plan.pieces == len(plan.split) > 1
        assert plan.peak_bytes <= limit
        assert off(gradients_of(model), expected) < 1e-5
        model.zero_grad()


def test_a_compiled_model_meets_few_lengths():
    shapes = set()

    def watching(model, piece):
        shapes.add(tuple(piece["input_ids"].shape))
        return loss_fn(model, piece)

    model = Tokens()
    sizer = brimful.BatchSizer(model, by_length=True, equal_pieces=True, pieces=6)
    sizer.step(tokens(), loss_fn)
    for seed in range(6):
        model.zero_grad()
        sizer.step(tokens(seed=seed), watching)
    assert {length for _, length in shapes} <= {4, 6, 8, 12, 16, 24, 32, WIDTH}


BAD = {
    "no lengths": (
        lambda b: b.pop("attention_mask") is None or b.pop("labels"),
        "how long the rows are",
    ),
    "tokens in a row": (
        lambda b: b.update(input_ids=b["input_ids"][0]),
        r"input_ids must be .* \[rows, tokens\] \(type: Tensor, shape: \[\d+\]\)",
    ),
    "another mask": (lambda b: b.update(attention_mask=torch.ones(ROWS, 1, 9, 9)), "another shape"),
    "holes": (
        lambda b: b["attention_mask"][0].__setitem__(5, 0) or b["labels"][0].__setitem__(5, -100),
        "holes",
    ),
    "negative labels": (
        lambda b: b["labels"][2].__setitem__(1, -1),
        r"negative and not -100 \(row: 2",
    ),
    "all ignored": (lambda b: b["labels"].fill_(-100), "no label of the batch counts"),
    "labels on padding": (lambda b: b["labels"].clamp_(min=0), "where attention_mask is 0"),
    "an empty row": (
        lambda b: b.pop("labels") is None or b["attention_mask"][4].fill_(0),
        r"no length \(row: 4",
    ),
    "both ends": (
        lambda b: (
            b["attention_mask"][0].__setitem__(slice(0, 3), 0)
            or b["labels"][0].__setitem__(slice(0, 4), -100)
        ),
        "left as well as right",
    ),
    "an entry of its own": (lambda b: b.update(scores=torch.zeros(ROWS, WIDTH)), r"entry: scores"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_trimmed_is_refused(name):
    spoil, text = BAD[name]
    model = Tokens()
    batch = tokens()
    spoil(batch)
    sizer = brimful.BatchSizer(model, by_length=True)
    with pytest.raises(ValueError, match=text):
        sizer.step(batch, loss_fn)
    assert all(p.grad is None for p in model.parameters())
    sizer.step(tokens(), loss_fn)


def test_a_first_label_behind_padding_is_refused():
    batch = tokens(left=True)
    batch["labels"] = torch.where(batch["attention_mask"] != 0, batch["input_ids"], -100)
    with pytest.raises(ValueError, match=r"behind padding .*\(row: \d+\); give it the value -100"):
        brimful.BatchSizer(Tokens(), by_length=True).step(batch, loss_fn)


@pytest.mark.parametrize(
    ("model", "left"),
    [
        (lambda: Tokens(mask=False, causal=False), False),
        (lambda: Tokens(mask=False), True),
        (lambda: Tokens(absolute=True), True),
    ],
    ids=["padding attended to", "padding attended to from behind", "absolute positions"],
)
def test_a_trim_that_changes_the_loss_is_refused_with_both_losses(model, left):
    sizer = brimful.BatchSizer(model(), by_length=True, weight_fn=lambda b: brimful.token_weight(b))
    with pytest.raises(
        ValueError, match=r"changes its loss \(row: \d+, loss with padding: [\d.]+, without: [\d.]+"
    ):
        sizer.step(tokens(left=left), loss_fn)


def test_a_loss_of_other_weight_is_refused():
    def by_rows(model, piece):
        return model(**piece), len(piece["input_ids"])

    with pytest.raises(ValueError, match=r"is not the mean of theirs .*token_weight"):
        brimful.BatchSizer(Tokens(), by_length=True).step(tokens(), by_rows)


def test_the_check_leaves_no_trace():
    model = torch.nn.Sequential(torch.nn.Dropout(0.5))
    model.inner = Tokens()
    state = torch.get_rng_state()
    modes = []

    def noting(model, piece):
        modes.append(model.training)
        return model.inner(**piece) + 0 * torch.rand(())

    brimful.BatchSizer(model, by_length=True).step(tokens(), noting)
    assert modes[:4] == [False] * 4
    assert set(modes[4:]) == {True}
    torch.set_rng_state(state)
    torch.rand(len(modes) - 4)
    assert model.training


def test_lengths_of_the_program_are_checked():
    for given, text in [([3] * 5, "lengths: 5, rows"), ([0] * ROWS, "row: 0, length: 0")]:
        sizer = brimful.BatchSizer(Tokens(), by_length=lambda batch, n=given: n)
        with pytest.raises(ValueError, match=text):
            sizer.step(tokens(), loss_fn)
    with pytest.raises(TypeError, match="an int for each row"):
        brimful.BatchSizer(Tokens(), by_length=lambda batch: 3).step(tokens(), loss_fn)


def test_options_that_do_not_go_together_are_refused():
    model = Tokens()
    with pytest.raises(TypeError, match="by_length"):
        brimful.BatchSizer(model, by_length="always")
    with pytest.raises(ValueError, match="nothing says how long"):
        brimful.BatchSizer(model, by_length=True, trim_fn=lambda *a: a)
    with pytest.raises(ValueError, match="trim_fn is for rows by length"):
        brimful.BatchSizer(model, trim_fn=lambda *a: a)
    with pytest.raises(ValueError, match="batch_dim"):
        brimful.BatchSizer(model, by_length=True, batch_dim=1)


@pytest.mark.gpu
@pytest.mark.parametrize("predict", [False, True])
def test_on_cuda_pieces_fit_and_the_gradient_is_that_of_the_padded_batch(predict):
    model = Tokens(torch.float64).cuda()
    sizer = brimful.BatchSizer(model, by_length=True, pieces=3, predict=predict)
    batches = [{k: entry.cuda() for k, entry in tokens(seed=seed).items()} for seed in range(3)]
    with torch.device("cuda"):  # that of the masks which the model makes
        for batch in batches:
            expected = padded_gradients(model, batch)
            outcome = sizer.step(batch, loss_fn)
            assert outcome.pieces >= 3 or predict
            assert off(gradients_of(model), expected) < 1e-12
            model.zero_grad()
