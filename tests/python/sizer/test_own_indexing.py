"""Classes of the program's own that keep state beside their tensors: they are cut by their own indexing, or refused."""

import collections
import dataclasses
from collections.abc import MutableMapping

import numpy
import pytest
import torch

import brimful
from brimful import _C

ROWS = 6
X = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(ROWS, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Plain(torch.Tensor):
    """Nothing but a name."""


class Scaled(torch.Tensor):
    """Has a scale for each row, which its own indexing cuts, and narrow does not."""

    @classmethod
    def of(cls, values, scales):
        made = values.as_subclass(cls)
        made.scales = scales
        return made

    def __getitem__(self, index):
        return Scaled.of(super().__getitem__(index).as_subclass(torch.Tensor), self.scales[index])


class Forgetful(torch.Tensor):
    """Its indexing loses the class, and it has nothing else to lose."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Lossy(torch.Tensor):
    """Its indexing keeps the class, and loses what it keeps."""


class Shifted(torch.Tensor):
    """Its indexing gives other rows."""

    def __getitem__(self, index):
        return self.as_subclass(torch.Tensor).roll(1, 0)[index].as_subclass(Shifted)


class Unwilling(torch.Tensor):
    def __getitem__(self, index):
        raise NotImplementedError("not by rows")


class Sized(MutableMapping):
    """A mapping with a batch size beside its entries, that is indexed by rows too, as TensorDict is."""

    def __init__(self, entries, size=None):
        self.entries, self.size = dict(entries), size

    def __getitem__(self, key):
        if isinstance(key, slice):
            cut = {k: v[key] for k, v in self.entries.items()}
            return Sized(cut, len(range(*key.indices(self.size))))
        return self.entries[key]

    def __setitem__(self, key, value):
        self.entries[key] = value

    def __delitem__(self, key):
        del self.entries[key]

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return len(self.entries)


class Unindexed(Sized):
    """The same, without the indexing by rows."""

    def __getitem__(self, key):
        return self.entries[key]


@dataclasses.dataclass
class Recorded:
    x: torch.Tensor
    y: torch.Tensor

    def __post_init__(self):
        self.rows = len(self.x)

    def __getitem__(self, index):
        return type(self)(self.x[index], self.y[index])


@dataclasses.dataclass
class Cached:
    """Keeps what it once computed."""

    x: torch.Tensor
    y: torch.Tensor

    def lengths(self):
        self.computed = self.x.sum(1)
        return self


class Named(dict):
    """A dict with something for each row beside its entries."""

    def __init__(self, entries, names):
        super().__init__(entries)
        self.names = names


class Samples(list):
    pass


class Grid(numpy.ndarray):
    """An array that loses its spacing."""


def grid():
    made = X.numpy().view(Grid)
    made.spacing = 2.0
    return made


def lossy():
    made = X.as_subclass(Lossy)
    made.scales = torch.arange(ROWS)
    return made


# What is cut by its own indexing: (the batch, what is looked at in a piece of rows 2 to 4 and in batch[2:4])
CUT = {
    "a name": lambda: X.as_subclass(Plain),
    "a scale for each row": lambda: Scaled.of(X, torch.arange(ROWS)),
    "a class that indexing loses": lambda: X.as_subclass(Forgetful),
    "a mapping with a size": lambda: Sized({"x": X, "y": Y}, ROWS),
    "a dataclass with a size": lambda: Recorded(X, Y),
}


def state_of(piece):
    if isinstance(piece, torch.Tensor):
        state = vars(piece)
    else:
        state = {"rows": getattr(piece, "rows", None), "size": getattr(piece, "size", None)}
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


@pytest.mark.parametrize("begin, end", [(0, ROWS), (2, 4), (5, 6)])
@pytest.mark.parametrize("name", CUT)
def test_pieces_are_what_own_indexing_gives(name, begin, end):
    batch = CUT[name]()
    splitter = _C.Splitter()
    assert splitter.rows_of(batch) == ROWS
    for holder, of in [(batch, lambda b: b), ({"b": [batch, Y]}, lambda b: b["b"][0])]:
        piece = of(splitter.slice(holder, ROWS, begin, end))
        assert type(piece) is type(batch)
        assert state_of(piece) == state_of(batch[begin:end])
    tensor = piece if isinstance(piece, torch.Tensor) else piece.x if name[2] == "d" else piece["x"]
    assert torch.equal(tensor.as_subclass(torch.Tensor), X[begin:end])


def test_rows_in_another_dimension_are_cut_by_own_indexing_too():
    class Wide(torch.Tensor):
        def __getitem__(self, index):
            made = super().__getitem__(index)
            made.asked = index
            return made

    piece = _C.Splitter(batch_dim=1).slice(X.as_subclass(Wide), 3, 1, 3)
    assert piece.asked == (slice(None), slice(1, 3, 1))
    assert torch.equal(piece.as_subclass(torch.Tensor), X[:, 1:3])


# What cannot be cut: (the batch, what the message says)
REFUSED = {
    "attributes are lost": (lossy, r"would lose .*Lossy.*attribute: scales\)"),
    "other rows": (lambda: X.as_subclass(Shifted), r"gives other rows .*Shifted"),
    "indexing raises": (lambda: X.as_subclass(Unwilling), r"cannot cut it .*Unwilling"),
    "a mapping's size": (lambda: Unindexed({"x": X}, ROWS), r"keeps state .*attribute: size\)"),
    "what was computed": (
        lambda: Cached(X, Y).lengths(),
        r"something for each row .*Cached.*attribute: computed\)",
    ),
    "a dict's names": (
        lambda: Named({"x": X}, list("abcdef")),
        r"something for each row .*Named.*attribute: names\)",
    ),
    "an array's attribute": (grid, r"keeps state .*Grid.*attribute: spacing\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_lost_is_refused(name):
    make, message = REFUSED[name]
    for wrapped in (lambda b: b, lambda b: {"y": Y, "b": b}):
        with pytest.raises(TypeError, match=message + r".*register_split"):
            _C.Splitter().slice(wrapped(make()), ROWS, 2, 4)


class Graphs:
    """Can be called, and has rows."""

    def __len__(self):
        return ROWS

    def __call__(self, *names):
        return names


def test_what_can_be_called_may_have_rows():
    with pytest.raises(TypeError, match=r"\(batch\[1\]: .*Graphs.*register_split"):
        _C.Splitter().rows_of((X, Graphs()))
    for whole in (len, torch.nn.Sequential(torch.nn.Linear(3, 1)), torch.nn.Identity(), dict):
        assert _C.Splitter().slice((X, whole), ROWS, 2, 4)[1] is whole


def test_a_chain_of_dicts_is_cut():
    chain = collections.ChainMap({"x": X}, {"s": list("abcdef")})
    piece = _C.Splitter().slice(chain, ROWS, 2, 4)
    assert type(piece) is collections.ChainMap and piece["s"] == list("cd")
    assert torch.equal(piece["x"], X[2:4])


def test_the_reason_why_indexing_raises_is_kept():
    with pytest.raises(TypeError) as caught:
        _C.Splitter().slice(X.as_subclass(Unwilling), ROWS, 2, 4)
    assert str(caught.value.__cause__) == "not by rows"


def test_lists_of_a_class_keep_it():
    batch = {"x": X, "names": Samples("abcdef")}
    piece = _C.Splitter().slice(batch, ROWS, 2, 4)["names"]
    assert type(piece) is Samples and piece == list("cd")
    batch["names"].source = "here"
    with pytest.raises(TypeError, match=r"keeps state .*attribute: source"):
        _C.Splitter().slice(batch, ROWS, 2, 4)


def test_the_gradient_is_that_of_each_rows_own_state():
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    batch = Scaled.of(X, torch.arange(1.0, ROWS + 1)), Y

    def loss_fn(model, piece):
        x, y = piece
        errors = (model(x.as_subclass(torch.Tensor)) - y).square()[:, 0]
        return (errors * x.scales).mean()

    loss_fn(model, batch).backward()
    expected = model.weight.grad.clone()
    for split in ([ROWS], [2, 4], [1] * ROWS):
        model.zero_grad()
        brimful.BatchSizer(model).step(batch, loss_fn, split=split)
        torch.testing.assert_close(model.weight.grad, expected, rtol=1e-12, atol=1e-13)
