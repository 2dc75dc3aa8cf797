"""Lists of equally long samples: what the rest of a batch says makes them rows, however few there are. What nothing
says is refused, and never cut along time."""

import dataclasses
import re

import numpy
import pytest
import torch

import brimful
from brimful import _C

TIME = 50
WORDS = ["yes", "no", "maybe"]


@dataclasses.dataclass
class Clip:
    audio: torch.Tensor
    text: str


def waves(n, *shape):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*(shape or (TIME,)), generator=generator, dtype=torch.float64) for _ in range(n)
    ]


def words(n):
    return [WORDS[i % 3] for i in range(n)]


def tokens(n):
    return [[i] * (1 + i % 2) for i in range(n)]


def boxes(n, each=2):
    return [
        {"boxes": torch.rand(each, 4), "labels": torch.ones(each, dtype=torch.long)}
        for _ in range(n)
    ]


def samples(n, **more):
    return [{"audio": w, **{k: v(i) for k, v in more.items()}} for i, w in enumerate(waves(n))]


# A batch of n rows, each an entry of its lists, and how many of them a piece has.
ROWS = {
    "beside texts": lambda n: {"audio": waves(n), "text": words(n)},
    "a tuple beside texts": lambda n: (tuple(waves(n)), tuple(words(n))),
    "beside lists of tokens": lambda n: {"audio": waves(n), "ids": tokens(n)},
    "beside metadata": lambda n: {"audio": waves(n), "meta": [{"rate": 16000} for _ in range(n)]},
    "beside texts that may be missing": lambda n: (
        waves(n),
        [None, *words(n)][:n] if n > 1 else ["a"],
    ),
    "beside tensors without a dimension": lambda n: (waves(n), list(torch.arange(n).unbind())),
    "beside labels": lambda n: (waves(n), torch.arange(n)),
    "beside boxes": lambda n: (waves(n, 3, 8, 8), boxes(n)),
    "beside as many boxes as channels": lambda n: (waves(n, 3, 8, 8), boxes(n, 3)),
    "arrays beside texts": lambda n: ([w.numpy() for w in waves(n)], words(n)),
    "dicts with texts": lambda n: samples(n, text=lambda i: WORDS[i % 3]),
    "dicts with numbers": lambda n: samples(n, label=lambda i: i % 3),
    "dicts with labels": lambda n: samples(n, label=lambda i: torch.tensor(i % 3)),
    "dicts with arrays": lambda n: samples(n, mask=lambda i: numpy.ones(3)),
    "dicts of which one lacks a key": lambda n: [
        *samples(n, text=lambda i: "a", more=lambda i: "b")[:1],
        *samples(n, text=lambda i: "a")[1:],
    ],
    "dicts of which some have no text": lambda n: samples(
        n, i=int, text=lambda i: None if i else "a"
    ),
    "dicts of blocks": lambda n: samples(n, labels=lambda i: torch.arange(TIME)),
    "dicts with lists of other lengths": lambda n: samples(
        n, more=lambda i: waves(1 + (i + n) % 3), text=lambda i: "a"
    ),
    "pairs with texts": lambda n: list(zip(waves(n), words(n), strict=True)),
    "pairs with labels": lambda n: list(zip(waves(n), range(n), strict=True)),
    "dataclasses": lambda n: [Clip(w, t) for w, t in zip(waves(n), words(n), strict=True)],
    "a tuple of dicts": lambda n: tuple(samples(n, text=lambda i: "a")),
    "images of several sizes": lambda n: [
        {"x": torch.ones(3, 8 + i, 8), "boxes": torch.ones(2 + i, 4)} for i in range(n)
    ],
}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", ROWS)
def test_samples_are_rows_however_few(name, n):
    batch = ROWS[name](n)
    splitter = _C.Splitter()
    assert splitter.rows_of(batch) == n
    piece = splitter.slice(batch, n, n - 1, n)
    assert splitter.rows_of(piece) == 1
    if name.startswith(("dicts", "pairs", "dataclasses", "a tuple of", "images")):
        assert type(piece) is type(batch) and len(piece) == 1
        assert piece[0] is batch[-1]
    else:
        lists = piece.values() if isinstance(piece, dict) else piece
        assert [len(part) for part in lists] == [1, 1]


# What may be rows as well as columns, and nothing says which: (the batch)
UNKNOWN = {
    "waves alone": lambda: waves(8),
    "waves alone in a dict": lambda: {"audio": waves(8)},
    "waves in a tuple": lambda: tuple(waves(8)),
    "noisy and clean": lambda: (waves(8), waves(8)),
    "pairs of noisy and clean": lambda: list(zip(waves(8), waves(8), strict=True)),
    "a tuple of pairs": lambda: tuple(zip(waves(8), waves(8), strict=True)),
    "dicts of images": lambda: [{"x": x, "y": x} for x in waves(8, 3, 8, 8)],
    "two numbers": lambda: (waves(2), [224, 224]),
    "as many images as channels": lambda: (waves(3, 3, 8, 8), words(3)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_nothing_says_is_refused(name):
    with pytest.raises(ValueError, match=r"may hold a row in each entry, or a column.*batch_dim"):
        _C.Splitter().rows_of(UNKNOWN[name]())


@pytest.mark.parametrize("count", [4, 5, 9])
@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_the_batch_dim_that_a_refusal_names_makes_them_columns(kind, count):
    columns = [torch.randn(4, 3) + i for i in range(count)]
    batch = {"views": columns} if kind is dict else kind(columns)
    with pytest.raises(ValueError, match="may hold a row in each entry") as caught:
        _C.Splitter().rows_of(batch)
    dims = [0] * int(re.search(r"for this list \[0\] \* (\d+)", str(caught.value)).group(1))
    splitter = _C.Splitter(batch_dim={"views": dims} if kind is dict else dims)
    assert splitter.rows_of(batch) == 4
    piece = splitter.slice(batch, 4, 1, 3)
    for part, column in zip(piece["views"] if kind is dict else piece, columns, strict=True):
        assert torch.equal(part, column[1:3])


X = torch.randn(7, 4)

# What is a column in each entry, still: (the batch, whose rows are 7)
COLUMNS = {
    "a pair": lambda: [X, X + 1],
    "a triplet": lambda: [X, X + 1, X + 2],
    "a triplet in a tuple": lambda: (X, X + 1, X + 2),
    "four, beside labels": lambda: ([X, X, X, X], torch.arange(7)),
    "four, beside seven texts": lambda: ([X, X, X, X], list("abcdefg")),
    "query and passage": lambda: [{"ids": X, "mask": X}, {"ids": X, "mask": X}],
    "pairs of pairs": lambda: [[X, X + 1], [X, X + 1]],
    "four fields": lambda: (X, torch.arange(7), X[:, 0], X[:, :2]),
    "four in order": lambda: [X, torch.arange(7), X[:, 0], X[:, :2]],
    "two batches with texts": lambda: [
        {"x": X, "ids": list("abcdefg")},
        {"x": X, "ids": list("abcdefg")},
    ],
    "two batches in a tuple": lambda: ({"x": X, "y": X[:, 0]}, {"x": X, "y": X[:, 0]}),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_stay_columns(name):
    splitter = _C.Splitter()
    assert splitter.rows_of(COLUMNS[name]()) == 7
    piece = splitter.slice(COLUMNS[name](), 7, 2, 4)
    assert splitter.rows_of(piece) == 2


class Loudest(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv1d(1, 4, 3, padding=1, dtype=torch.float64)
        self.head = torch.nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, sounds):
        return self.head(torch.tanh(self.conv(torch.stack(sounds)[:, None])).amax(-1))


@pytest.mark.parametrize("name", ["beside texts", "pairs with texts", "dicts with texts"])
def test_the_gradient_is_that_of_the_samples(name):
    batch = ROWS[name](6)
    model = Loudest()

    def loss_fn(model, piece):
        if isinstance(piece, dict):
            sounds, texts = piece["audio"], piece["text"]
        elif isinstance(piece[0], dict):
            sounds, texts = [s["audio"] for s in piece], [s["text"] for s in piece]
        else:
            sounds, texts = zip(*piece, strict=True)
        target = torch.tensor([WORDS.index(text) for text in texts])
        return torch.nn.functional.cross_entropy(model(list(sounds)), target)

    loss_fn(model, batch).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    assert brimful.BatchSizer(model).step(batch, loss_fn, split=[4, 2]).split == [4, 2]
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-13)


# Entries that hold the places of rows: (the batch, what is named)
PLACES = {
    "speech": (
        {"inputs": X, "supervisions": {"sequence_idx": torch.arange(7), "text": list("abcdefg")}},
        r"batch\['supervisions'\]\['sequence_idx'\]",
    ),
    "detection": ({"img": X, "batch_idx": torch.arange(7)}, r"batch\['batch_idx'\]"),
}


@pytest.mark.parametrize("name", PLACES)
def test_places_of_rows_are_refused_unless_a_dimension_is_given(name):
    batch, path = PLACES[name]
    with pytest.raises(ValueError, match=rf"places of its rows.*{path}.*size_fn and split_fn"):
        _C.Splitter().rows_of(batch)
    said = {"supervisions": {"sequence_idx": 0}} if name == "speech" else {"batch_idx": 0}
    assert _C.Splitter(batch_dim=said).rows_of(batch) == 7
    assert _C.Splitter().rows_of({"x": X, "batch_idx": 3}) == 7  # a step's number


def test_patches_that_are_no_rows_are_refused():
    batch = {
        "input_ids": torch.ones(2, 9, dtype=torch.long),
        "pixel_values": torch.ones(12, 4),
        "image_grid_thw": torch.ones(2, 3, dtype=torch.long),
    }
    with pytest.raises(ValueError, match=r"batch\['pixel_values'\]: 12.*size_fn and split_fn"):
        _C.Splitter().rows_of(batch)
