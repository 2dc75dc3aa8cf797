"""Batches of every structure: their pieces put together are the batch, and the gradient is that of the whole batch."""

import collections
import dataclasses
import datetime
import enum
import gc
import itertools
import pathlib
import re
import types
import typing
import weakref

import numpy
import pytest
import torch
from models import same_bits, values_of, wrap
from rank_processes import raised
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

import brimful
from brimful import _C

ROWS = 7
LENGTHS = [3, 1, 5, 2, 5, 4, 2]
Pair = collections.namedtuple("Pair", ["x", "y"])


def tensor(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


X, Y = tensor(ROWS, 4), tensor(ROWS, 3, seed=1)

IMAGES = list(tensor(ROWS, 3, 4, 4, seed=2))
SAMPLES = list(zip(IMAGES, range(ROWS), strict=True))
RAGGED = [tensor(length, 4, seed=i) for i, length in enumerate(LENGTHS)]


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "train"
    made: int = 0
    shared: typing.ClassVar[torch.Tensor] = torch.ones(2)

    def __post_init__(self):
        self.made += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor
    doubled: torch.Tensor = dataclasses.field(init=False)
    start: dataclasses.InitVar[int]
    note: str = dataclasses.field(init=False, default="kept")

    def __post_init__(self, start):
        object.__setattr__(self, "doubled", self.x * 2 + start)


class Encoding(collections.UserDict):
    """As transformers' BatchEncoding: entries are attributes too, and what the tokenizer said lies beside them."""

    def __init__(self, data, encodings, n_sequences):
        super().__init__(data)
        self._encodings = encodings
        self._n_sequences = n_sequences

    def __getattr__(self, item):
        try:
            return self.data[item]
        except KeyError:
            raise AttributeError(item) from None

    def __getstate__(self):
        return {"data": self.data, "encodings": self._encodings}

    def __setstate__(self, state):
        self.data, self._encodings = state["data"], state["encodings"]


class Store(collections.abc.MutableMapping):
    """A mapping whose shallow copies share one store."""

    def __init__(self, entries=()):
        self.store = dict(entries)

    def __getitem__(self, key):
        return self.store[key]

    def __setitem__(self, key, value):
        self.store[key] = value

    def __delitem__(self, key):
        del self.store[key]

    def __iter__(self):
        return iter(self.store)

    def __len__(self):
        return len(self.store)


class Color(enum.Enum):
    red = 1


class Tagged(torch.Tensor):
    pass


def encoding():
    return Encoding({"x": X, "y": Y}, [f"row {i}" for i in range(ROWS)], 1)


def packed(**options):
    sequences = [tensor(length, 4, seed=i) for i, length in enumerate(LENGTHS)]
    if options["enforce_sorted"]:
        sequences.sort(key=len, reverse=True)
    return pack_sequence(sequences, **options)


def jagged():
    x = torch.nested.as_nested_tensor(
        [tensor(length, 4, seed=i) for i, length in enumerate(LENGTHS)], layout=torch.jagged
    )
    y = torch.nested.nested_tensor_from_jagged(tensor(sum(LENGTHS), 3, seed=9), x.offsets())
    return x, y


def jagged_with_holes():
    start, length = torch.tensor([0, 2, 1, 0, 3, 1, 4]), torch.tensor(LENGTHS)
    padded = tensor(ROWS, 9, 4)
    x = torch.nested.narrow(padded, 1, start, length, layout=torch.jagged)
    assert x.lengths() is not None
    return x


def sparse_rows():
    x = X.clone()
    x[x < 0.3] = 0
    x[3] = 0
    return x


def uncoalesced():
    rows = torch.tensor([[0, 6, 2, 2, 5, 0], [1, 0, 3, 3, 2, 1]])
    x = torch.sparse_coo_tensor(rows, tensor(6), (ROWS, 4), check_invariants=True)
    assert not x.is_coalesced()
    return x


def made(batch):
    """Where making it warns, a function is given for it."""
    return batch() if isinstance(batch, types.FunctionType) else batch


# The rows of a leaf, as dense tensors or plain objects, in its order.
def rows_of_leaf(leaf, dim=0):
    if isinstance(leaf, torch.nn.utils.rnn.PackedSequence):
        return unpack_sequence(leaf)
    if isinstance(leaf, numpy.ndarray):
        return [torch.from_numpy(row) for row in leaf]
    if not isinstance(leaf, torch.Tensor):
        return [torch.from_numpy(row) if isinstance(row, numpy.ndarray) else row for row in leaf]
    if leaf.is_nested:
        return list(leaf.unbind())
    return list((leaf if leaf.layout == torch.strided else leaf.to_dense()).unbind(dim))


# What is split: (the batch, arguments of BatchSizer, its leaves that have rows)
CASES = {
    "tensor": (X, {}, lambda b: [b]),
    "tuple": ((X, Y), {}, list),
    "list": ([X, [Y, (X,)]], {}, lambda b: [b[0], b[1][0], b[1][1][0]]),
    "as many as rows": ([X] * ROWS, {"batch_dim": [0] * ROWS}, list),
    "rows in a list": ((IMAGES, Y), {}, list),
    "rows in a tuple": ({"x": tuple(IMAGES), "y": Y}, {}, lambda b: [b["x"], b["y"]]),
    "transposed rows": (tuple(zip(*SAMPLES, strict=True)), {}, list),
    "rows of several sizes": ((RAGGED, Y), {}, list),
    "rows of several sizes alone": ((RAGGED, tuple(RAGGED)), {}, list),
    "rows that are dicts": (([{"boxes": x} for x in RAGGED], Y), {}, lambda b: [b[1]]),
    "0-dim tensors": ((tuple(IMAGES), tuple(torch.arange(ROWS).unbind())), {}, list),
    "words in a tuple": ((X, tuple("abcdefg")), {}, list),
    "arrays": ({"x": X, "a": Y.numpy()}, {}, lambda b: [b["x"], b["a"]]),
    "arrays alone": ((X.numpy(), Y.numpy()), {}, list),
    "arrays in a list": (([x.numpy() for x in IMAGES], Y), {}, list),
    "triplets": ((X, [Y, Y + 1, Y + 2]), {}, lambda b: [b[0], *b[1]]),
    "triplets alone": ([Y, Y + 1, Y + 2], {}, list),
    "two views": ([X, X + 1], {}, list),
    "two views in a tuple": ((X, X + 1), {}, list),
    "pairs of pairs": ([[X, X + 1], [Y, Y + 1]], {}, lambda b: [*b[0], *b[1]]),
    "dict": ({"x": X, "y": {"z": Y}}, {}, lambda b: [b["x"], b["y"]["z"]]),
    "namedtuple": (Pair(X, Y), {}, lambda b: [b.x, b.y]),
    "max": (torch.return_types.max((X, Y)), {}, lambda b: [b.values, b.indices]),
    "ordered": (collections.OrderedDict(x=X, y=Y), {}, lambda b: [b["x"], b["y"]]),
    "default": (collections.defaultdict(list, x=X, y=Y), {}, lambda b: [b["x"], b["y"]]),
    "dataclass": (Sample(X, Y), {}, lambda b: [b.x, b.y]),
    "frozen": (Frozen(X, Y, 1), {}, lambda b: [b.x, b.y, b.doubled]),
    "encoding": (encoding(), {}, lambda b: [b["x"], b.y, b._encodings]),
    "proxy": (types.MappingProxyType({"x": X, "y": Y}), {}, lambda b: [b["x"], b["y"]]),
    "store": (Store({"x": X, "y": Y}), {}, lambda b: [b["x"], b["y"]]),
    "words": ((X, list("abcdefg")), {}, list),
    "packed": (packed(enforce_sorted=False), {}, lambda b: [b]),
    "packed and sorted": (packed(enforce_sorted=True), {}, lambda b: [b]),
    "jagged": (jagged(), {}, list),
    "jagged, second": ({"x": X, "j": jagged()[1]}, {}, lambda b: [b["x"], b["j"]]),
    "jagged, transposed": (jagged()[0].transpose(1, 2), {}, lambda b: [b]),
    "jagged with holes": (jagged_with_holes(), {}, lambda b: [b]),
    "nested": (lambda: torch.nested.nested_tensor([X[0], X[1, :2], *X[2:]]), {}, lambda b: [b]),
    "COO": (sparse_rows().to_sparse(), {}, lambda b: [b]),
    "COO, uncoalesced": (uncoalesced, {}, lambda b: [b]),
    "COO, dense columns": (sparse_rows().to_sparse(1), {}, lambda b: [b]),
    "CSR": (lambda: sparse_rows().to_sparse_csr(), {}, lambda b: [b]),
}


def split(batch, sizes, splitter=None, **options):
    splitter = splitter or _C.Splitter(**options)
    rows = splitter.rows_of(batch)
    ends = list(itertools.accumulate(sizes))
    assert ends[-1] == rows
    return [
        splitter.slice(batch, rows, begin, end) for begin, end in itertools.pairwise([0, *ends])
    ]


def compositions(rows):
    """Every way to cut `rows` rows into pieces, in their order."""
    for cuts in itertools.product((False, True), repeat=rows - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [rows]
        yield [end - begin for begin, end in itertools.pairwise([0, *ends])]


def same_rows(found, expected):
    assert len(found) == len(expected)
    for row, other in zip(found, expected, strict=True):
        if isinstance(row, torch.Tensor):
            assert row.dtype == other.dtype
            assert torch.equal(row, other), (row, other)
        else:
            assert row == other


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_the_pieces_of_every_split_are_the_batch(name):
    batch, options, leaves = CASES[name]
    batch = made(batch)
    before = [[str(row) for row in rows_of_leaf(leaf)] for leaf in leaves(batch)]
    splitter = _C.Splitter(**options)
    for sizes in compositions(ROWS):
        pieces = split(batch, sizes, splitter)
        for piece, size in zip(pieces, sizes, strict=True):
            assert type(piece) is type(batch)
            assert all(len(rows_of_leaf(leaf)) == size for leaf in leaves(piece))
            assert splitter.rows_of(piece) == size
        for i, leaf in enumerate(leaves(batch)):
            found = [row for piece in pieces for row in rows_of_leaf(leaves(piece)[i])]
            same_rows(found, rows_of_leaf(leaf))
    assert before == [[str(row) for row in rows_of_leaf(leaf)] for leaf in leaves(batch)]


def test_the_rows_of_a_list_are_samples():
    for batch in [(IMAGES, Y), (tuple(IMAGES), tuple(range(ROWS))), {"x": IMAGES, "y": Y[:, 0]}]:
        assert _C.Splitter().rows_of(batch) == ROWS
    piece = split((IMAGES, Y), [3, 4])[1]
    assert all(a is b for a, b in zip(piece[0], IMAGES[3:], strict=True))
    dicts = [{"boxes": x} for x in RAGGED]
    assert split((dicts, Y), [3, 4])[0][0] == dicts[:3]


# What could be rows as well as columns: (the batch, what the message says of it)
AMBIGUOUS = {
    "more samples than channels": (IMAGES, r"\(batch: 7 tensors of 3 rows each"),
    "as many as rows": ([X] * ROWS, r"\(batch: 7 tensors of 7 rows"),
    "beside as many rows": (([X] * ROWS, Y), r"\(batch\[0\]: 7 tensors of 7 rows"),
    "two samples": ((IMAGES[:2], [0, 1]), r"\(batch\[0\]: 2 tensors of 3 rows"),
    "two lists": ((IMAGES, IMAGES), r"\(batch\[0\]: 7 tensors of 3 rows"),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_list_that_could_be_both_is_refused(name):
    batch, words = AMBIGUOUS[name]
    with pytest.raises(ValueError, match=words + r".*batch_dim.*size_fn and split_fn"):
        _C.Splitter().rows_of(batch)


def test_an_earlier_batch_says_what_a_smaller_one_leaves_open():
    triplets, samples = _C.Splitter(), _C.Splitter()
    assert triplets.rows_of([Y, Y + 1, Y + 2]) == ROWS
    last = [y[:3] for y in (Y, Y + 1, Y + 2)]
    assert triplets.rows_of(last) == 3
    assert [len(y) for y in triplets.slice(last, 3, 0, 2)] == [2, 2, 2]
    assert samples.rows_of((IMAGES, list(range(ROWS)))) == ROWS
    for rows in (1, 2, 3):
        last = IMAGES[:rows], list(range(rows))
        assert samples.rows_of(last) == rows
        piece = samples.slice(last, rows, 0, 1)
        assert (len(piece[0]), piece[1]) == (1, [0])
        assert piece[0][0] is IMAGES[0]


def test_dense_pieces_are_views():
    (_, piece) = split({"x": X}, [3, 4])
    assert piece["x"].data_ptr() == X[3].data_ptr()
    nested, _ = jagged()
    (_, piece) = split(nested, [3, 4])
    assert piece.values().data_ptr() == nested.values()[sum(LENGTHS[:3])].data_ptr()


def test_what_has_no_rows_is_in_every_piece():
    size, scale = torch.Size([7, 3]), torch.tensor(2.0)
    plain = [1 + 2j, b"seven..", torch.float32, torch.device("cpu"), torch.strided, len, Color.red]
    plain += [numpy.float32(2), numpy.dtype("int8"), slice(7), range(7), pathlib.Path("x"), Pair]
    plain += [numpy.array(2.0), datetime.date(2026, 1, 1), torch.nn.Linear(7, 7), frozenset({1})]
    whole = {"text": "seven..", "none": None, "n": 7, "size": size, "plain": tuple(plain)}
    whole |= {"fields": Pair(1, 2), "tuple": (1, 2)}
    batch = {"x": X, "scale": scale, **whole, "two": ["a", "b"], "set": {1, 2}}
    for piece in split(batch, [4, 3]):
        assert all(piece[key] is value for key, value in whole.items())
        assert piece["scale"] is scale or torch.equal(piece["scale"], scale)
        assert piece["two"] == ["a", "b"]
        assert piece["set"] is batch["set"]


class Graphs:
    """Has rows, but no structure that could be seen."""

    def __init__(self, nodes):
        self.nodes = nodes


class Trees(Graphs):
    pass


class Settings:
    pass


brimful.register_split(
    Graphs,
    lambda graphs: None if graphs.nodes is None else len(graphs.nodes),
    lambda graphs, begin, end: type(graphs)(graphs.nodes[begin:end]),
)
brimful.register_split(Settings)


def test_a_registered_type_is_cut_by_its_functions():
    graphs, none, settings = Trees(list("abcdefg")), Graphs(None), Settings()
    batch = (graphs, {"x": X, "none": none}, [settings])
    first, second = split(batch, [4, 3])
    assert type(first[0]) is Trees and first[0].nodes == list("abcd")
    assert second[0].nodes == list("efg") and torch.equal(second[1]["x"], X[4:])
    assert first[1]["none"] is none and second[2][0] is settings
    assert _C.Splitter().rows_of(graphs) == ROWS  # alone too
    assert split((X, [graphs] * ROWS), [4, 3])[1][1][0].nodes == list("efg")
    assert split((X, [{"g": graphs}] * ROWS), [4, 3])[1][1][0]["g"].nodes == list("efg")
    with pytest.raises(ValueError, match=r"batch\[0\]: 7, batch\[1\]: 6"):
        split((X, Graphs([1] * 6)), [4, 3])


class Cloud:
    """Of no registered type."""


@pytest.mark.parametrize(
    "batch, path",
    [
        ((X, Cloud()), "batch[1]"),
        ({"x": X, "cloud": Cloud()}, "batch['cloud']"),
        ((X, [Cloud(), Cloud()]), "batch[1][0]"),
        ((X, {Cloud()}), "batch[1]"),
        ((X, collections.deque("abcdefg")), "batch[1]"),
        ((X, types.SimpleNamespace(y=Y)), "batch[1]"),
    ],
)
def test_what_is_neither_cut_nor_said_to_be_whole_is_refused(batch, path):
    with pytest.raises(TypeError, match=re.escape(f"({path}: <class")) as error:
        _C.Splitter().rows_of(batch)
    assert "register_split" in str(error.value)
    if path == "batch[1]":
        assert split(batch, [4, 3], batch_dim=(0, None))[0][1] is batch[1]


def test_a_column_of_anything_is_cut():
    clouds = [Cloud() for _ in range(ROWS)]
    first, second = split((clouds, X), [4, 3])
    assert (first[0], second[0]) == (clouds[:4], clouds[4:])
    samples = [{"cloud": cloud, "x": x} for cloud, x in zip(clouds, IMAGES, strict=True)]
    assert split({"samples": tuple(samples), "y": Y}, [4, 3])[1]["samples"] == tuple(samples[4:])
    columns = [{"cloud": cloud, "x": X} for cloud in clouds[:3]]
    with pytest.raises(TypeError, match=r"\(batch\[0\]\[0\]\['cloud'\]: <class"):
        split((columns, X), [4, 3])


def test_arrays_are_cut_as_tensors_are():
    array = numpy.arange(ROWS * 2).reshape(ROWS, 2)
    words = numpy.array(list("abcdefg"), dtype=object)
    batch = {"x": X, "a": array, "t": (array.T, words)}
    piece = split(batch, [4, 3], batch_dim={"t": (1, 0)})[1]
    assert (piece["a"] == array[4:]).all() and (piece["t"][0] == array.T[:, 4:]).all()
    assert list(piece["t"][1]) == list("efg")
    assert numpy.shares_memory(piece["a"], array)
    assert split([array, array], [4, 3])[1][1].shape == (3, 2)  # without any tensor
    assert split((X, array), [4, 3], batch_dim=(0, None))[1][1] is array
    with pytest.raises(ValueError, match=r"batch\[0\]: 7, batch\[1\]: 2"):
        split((X, array.T), [4, 3])
    with pytest.raises(ValueError, match=r"lacks the dimension .*batch\[1\]: \(7,\)"):
        split((X, words), [4, 3], batch_dim=(0, 1))


def test_a_list_of_an_array_for_each_row_is_cut_by_its_entries():
    arrays = [numpy.arange(i + 1) for i in range(ROWS)]
    assert [len(a) for a in split((X, arrays), [4, 3])[1][1]] == [5, 6, 7]
    with pytest.raises(ValueError, match="may hold a row in each entry, or a column"):
        split((X, [numpy.zeros(ROWS)] * ROWS), [4, 3])
    unlike = [numpy.zeros(ROWS, dtype="int32"), *[numpy.zeros(ROWS)] * (ROWS - 1)]
    with pytest.raises(ValueError, match="may hold a row in each entry, or a column"):
        split((X, unlike), [4, 3])


@pytest.mark.parametrize(
    "arguments, kind, text",
    [
        ((3, len, len), TypeError, "for a type"),
        ((Cloud, len), ValueError, "missing: slice_rows"),
        ((Cloud, None, len), ValueError, "missing: rows_of"),
        ((Cloud, 3, len), TypeError, "rows_of: 3"),
    ],
)
def test_a_bad_registration_is_refused(arguments, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        brimful.register_split(*arguments)


def test_functions_of_a_type_that_return_no_rows_are_named():
    class Bad:
        pass

    for found, kind in (("seven", TypeError), (-1, ValueError)):
        brimful.register_split(Bad, lambda _, found=found: found, lambda *_: None)
        with pytest.raises(kind, match=rf"rows_of .*Bad.*{found}"):
            split((X, Bad()), [4, 3])


def test_a_piece_can_be_changed():
    batch = {"x": X, "constants": {"a": 1}, "words": ["a", "b"]}
    first, second = split(batch, [3, 4])
    first.pop("x")
    first["constants"].pop("a")
    first["words"].append("c")
    assert second["constants"] == batch["constants"] == {"a": 1}
    assert second["words"] == batch["words"] == ["a", "b"]


def test_what_a_type_holds_beside_its_rows_is_kept():
    first, second = split(Sample(X, Y, "mine"), [3, 4])
    assert (first.name, first.made, second.made) == ("mine", 1, 1)
    assert first.shared is Sample.shared
    assert split(Frozen(X, Y, 1), [3, 4])[1].note == "kept"
    piece = split(encoding(), [3, 4])[1]
    assert piece._n_sequences == 1
    assert piece._encodings == ["row 3", "row 4", "row 5", "row 6"]
    assert split(collections.defaultdict(list, x=X), [3, 4])[0].default_factory is list


def test_a_tensor_keeps_its_class():
    assert type(split((X.as_subclass(Tagged), Y), [3, 4])[1][0]) is Tagged


def test_jagged_tensors_that_fit_each_other_still_do():
    x, y = jagged()
    other = torch.nested.nested_tensor_from_jagged(y.values().clone(), x.offsets().clone())
    for piece in split({"x": x, "y": [y, other], "float": x.float()}, [3, 3, 1]):
        assert piece["x"].shape[1] == piece["y"][0].shape[1] == piece["float"].shape[1]
        assert piece["x"].shape[1] != piece["y"][1].shape[1]
        assert (piece["x"][..., :3] * piece["y"][0]).size(0) == piece["x"].size(0)
    holes = jagged_with_holes()
    (piece, _) = split((holes, holes * 2), [2, 5])
    assert piece[0].shape[1] == piece[1].shape[1]
    same_rows(list((piece[0] * 3).unbind()), [row * 3 for row in holes.unbind()[:2]])


def test_a_piece_of_packed_sequences_is_what_packing_them_gives():
    whole = packed(enforce_sorted=False)
    piece = split(whole, [2, 3, 2])[1]
    expected = pack_sequence(unpack_sequence(whole)[2:5], enforce_sorted=False)
    for found, value in zip(piece, expected, strict=True):
        assert torch.equal(found, value)
    assert piece.batch_sizes.device.type == "cpu"


# batch_dim: (the batch, batch_dim, what the piece of rows 2 and 3 is, as a list of tensors)
SEQUENCE = tensor(5, ROWS, 4)
DIMS = {
    "int": (SEQUENCE, 1, lambda p: [(p, SEQUENCE[:, 2:4])]),
    "from the end": (SEQUENCE, -2, lambda p: [(p, SEQUENCE[:, 2:4])]),
    "int for all": (
        [SEQUENCE, (Y.T,)],
        1,
        lambda p: [(p[0], SEQUENCE[:, 2:4]), (p[1][0], Y.T[:, 2:4])],
    ),
    "tuple": ((SEQUENCE, Y), (1, 0), lambda p: [(p[0], SEQUENCE[:, 2:4]), (p[1], Y[2:4])]),
    "list for a tuple": ((SEQUENCE, Y), [1, 0], lambda p: [(p[1], Y[2:4])]),
    "None": ((X, SEQUENCE), (0, None), lambda p: [(p[0], X[2:4]), (p[1], SEQUENCE)]),
    "None for a part": (
        {"x": X, "table": {"a": SEQUENCE, "b": ["w"] * ROWS}},
        {"table": None},
        lambda p: [(p["x"], X[2:4]), (p["table"]["a"], SEQUENCE), (len(p["table"]["b"]), ROWS)],
    ),
    "the rest": (
        {"x": SEQUENCE, "y": Y},
        {"x": 1},
        lambda p: [(p["x"], SEQUENCE[:, 2:4]), (p["y"], Y[2:4])],
    ),
    "nested": (
        {"a": [Y, {"b": SEQUENCE}]},
        {"a": (0, {"b": 1})},
        lambda p: [(p["a"][0], Y[2:4]), (p["a"][1]["b"], SEQUENCE[:, 2:4])],
    ),
    "by index": ((Y, SEQUENCE), {1: 1}, lambda p: [(p[0], Y[2:4]), (p[1], SEQUENCE[:, 2:4])]),
    "by field": (Pair(SEQUENCE, Y), {"x": 1}, lambda p: [(p.x, SEQUENCE[:, 2:4]), (p.y, Y[2:4])]),
    "dataclass": (
        Sample(SEQUENCE, Y),
        {"x": 1},
        lambda p: [(p.x, SEQUENCE[:, 2:4]), (p.y, Y[2:4])],
    ),
    "user dict": (
        Encoding({"x": SEQUENCE}, None, 1),
        {"x": 1},
        lambda p: [(p["x"], SEQUENCE[:, 2:4])],
    ),
    "for what is None": ({"x": X, "y": None}, {"y": {"z": 1}}, lambda p: [(p["x"], X[2:4])]),
    "COO": (X.T.to_sparse(), 1, lambda p: [(p.to_dense(), X.T[:, 2:4])]),
    "packed": ((SEQUENCE, packed(enforce_sorted=True)), 1, lambda p: [(p[0], SEQUENCE[:, 2:4])]),
    "jagged": ((SEQUENCE, jagged()[0]), (1, -3), lambda p: [(p[0], SEQUENCE[:, 2:4])]),
}


@pytest.mark.parametrize("name", DIMS)
def test_batch_dim_says_where_rows_lie(name):
    batch, batch_dim, pairs = DIMS[name]
    piece = split(batch, [2, 2, 3], batch_dim=batch_dim)[1]
    for found, expected in pairs(piece):
        assert (
            torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected
        )


class LastOfLstm(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.lstm = torch.nn.LSTM(4, 3, dtype=torch.float64, **options)

    def forward(self, x):
        return self.lstm(x)[1][0][-1]


def linear():
    return torch.nn.Linear(4, 3, dtype=torch.float64)


def squares(prediction, target):
    return (prediction - target).square().sum(1).mean()


def jagged_loss(model, piece):
    x, y = piece
    return (torch.tanh(model(x)) * y).values().sum() / x.size(0)


def sparse_loss(model, piece):
    x, y = piece
    return squares(torch.sparse.mm(x, model.weight.T) + model.bias, y)


def flat_batch():
    """Sequences end to end, and where each begins, as variable-length attention takes them."""
    begins = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    return {"x": tensor(sum(LENGTHS), 4), "begins": begins}


def flat_piece(batch, begin, end):
    first, last = batch["begins"][begin], batch["begins"][end]
    return {"x": batch["x"][first:last], "begins": batch["begins"][begin : end + 1] - first}


def flat_loss(model, piece):
    lengths = piece["begins"].diff()
    sums = torch.segment_reduce(model(piece["x"]), "sum", lengths=lengths)
    return sums.tanh().sum(1).mean()


# A step: (model, batch, arguments of BatchSizer, loss function)
STEPS = {
    "rows in a list": (
        linear,
        (list(X), Y),
        {},
        lambda m, p: squares(m(torch.stack(p[0])), p[1]),
    ),
    "transposed rows": (
        linear,
        tuple(zip(*zip(RAGGED, Y.numpy(), strict=True), strict=True)),
        {},
        lambda m, p: squares(
            torch.stack([m(x).sum(0) for x in p[0]]), torch.from_numpy(numpy.stack(p[1]))
        ),
    ),
    "dataclass": (linear, Sample(X, Y), {}, lambda m, p: squares(m(p.x), p.y)),
    "encoding": (linear, encoding(), {}, lambda m, p: squares(m(p.x), p["y"])),
    "packed": (
        LastOfLstm,
        (packed(enforce_sorted=False), Y),
        {},
        lambda m, p: squares(m(p[0]), p[1]),
    ),
    "jagged": (linear, jagged(), {}, jagged_loss),
    "COO": (linear, (sparse_rows().to_sparse(), Y), {}, sparse_loss),
    "CSR": (linear, lambda: (sparse_rows().to_sparse_csr(), Y), {}, sparse_loss),
    "time first": (
        LastOfLstm,
        {"x": SEQUENCE, "y": Y, "bias": tensor(3)},
        {"batch_dim": {"x": 1, "bias": None}},
        lambda m, p: squares(m(p["x"]) + p["bias"], p["y"]),
    ),
    "functions": (
        linear,
        flat_batch(),
        {"size_fn": lambda batch: len(batch["begins"]) - 1, "split_fn": flat_piece},
        flat_loss,
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("sizes", [[7], [1, 6], [2, 4, 1], [1] * 7], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_the_gradient_is_that_of_the_whole_batch(name, sizes):
    make, batch, options, loss_fn = STEPS[name]
    batch = made(batch)
    torch.manual_seed(0)
    model = make()
    expected_loss = loss_fn(model, batch)
    expected_loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    assert all(gradient.abs().max() > 0.01 for gradient in expected)
    model.zero_grad()

    outcome = brimful.BatchSizer(model, **options).step(batch, loss_fn, split=sizes)
    assert (outcome.split, outcome.weight) == (sizes, ROWS)
    assert outcome.loss == pytest.approx(expected_loss.item(), rel=1e-12)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-13)


class Loop:
    """Refers to its sizer, and the sizer to its functions."""

    def __init__(self):
        self.model = linear()
        self.sizer = brimful.BatchSizer(self.model, size_fn=self.size, split_fn=self.piece)

    def size(self, batch):
        return len(batch["begins"]) - 1

    def piece(self, batch, begin, end):
        return flat_piece(batch, begin, end)


def test_a_sizer_dies_with_its_functions():
    loop = Loop()
    loop.sizer.step(flat_batch(), flat_loss, split=[3, 4])
    left = [weakref.ref(thing) for thing in (loop, loop.sizer, loop.sizer._core)]
    del loop
    gc.collect()
    assert [ref() for ref in left] == [None] * 3


def itself():
    batch = [X]
    batch.append(batch)
    return batch


class Unwilling(Store):
    def __init__(self, entries=None):
        if isinstance(entries, dict):
            raise LookupError("only from a file")
        super().__init__(entries)


# What is wrong: (the batch, arguments of BatchSizer, the error's type, its message)
BAD = {
    "no rows": (Sample(X[:0], Y[:0]), {}, ValueError, r"the batch is empty \(rows: 0\)"),
    "no rows in jagged": (
        torch.nested.nested_tensor_from_jagged(X[:0], torch.tensor([0])),
        {},
        ValueError,
        r"the batch is empty \(rows: 0\)",
    ),
    "dataclass": (
        {"a": Sample(X, Y[:6])},
        {},
        ValueError,
        r"disagree in size \(batch\['a'\]\.x: 7, batch\['a'\]\.y: 6\); give",
    ),
    "jagged": ((X[:5], jagged()[0]), {}, ValueError, r"\(batch\[0\]: 5, batch\[1\]: 7\)"),
    "packed": (
        (X[:5], packed(enforce_sorted=True)),
        {},
        ValueError,
        r"\(batch\[0\]: 5, batch\[1\]: 7\)",
    ),
    "no columns, and not as many as rows": (
        (RAGGED[:4], Y),
        {},
        ValueError,
        r"\(rows: 7, batch\[0\]: 4 entries of several sizes\).*size_fn and split_fn",
    ),
    "columns of other sizes": (
        [X, X[:6]],
        {},
        ValueError,
        r"disagree in size \(rows: 7, batch: 2 entries of several sizes\)",
    ),
    "other dimensions": (
        (SEQUENCE, X),
        {"batch_dim": (0, 0)},
        ValueError,
        r"\(batch\[0\]: 5, batch\[1\]: 7\); .*batch_dim",
    ),
    "missing key": (
        {"x": X, "inner": {"y": Y}},
        {"batch_dim": {"inner": {"z": 1}}},
        ValueError,
        r"an entry that the batch lacks \(key: 'z', batch\['inner'\] has: 'y'\); leave",
    ),
    "missing field": (
        Sample(X, Y),
        {"batch_dim": {"z": 1}},
        ValueError,
        r"lacks \(key: 'z', batch has: 'x', 'y', 'name', 'made'\)",
    ),
    "missing field of a tuple": (
        Pair(X, Y),
        {"batch_dim": {"z": 1}},
        ValueError,
        r"lacks \(key: 'z', batch has: 'x', 'y'\)",
    ),
    "missing index": (
        (X, Y),
        {"batch_dim": {2: 0}},
        ValueError,
        r"lacks \(key: 2, batch has: 0, 1\)",
    ),
    "length": (
        (X, Y),
        {"batch_dim": [0]},
        ValueError,
        r"differ in length \(batch_dim: 1, batch: 2\)",
    ),
    "sequence for a dict": (
        {"x": X},
        {"batch_dim": [0]},
        ValueError,
        r"\(batch: .*dict.*\); give it by",
    ),
    "entries of a tensor": (
        (X, Y),
        {"batch_dim": (0, {"y": 1})},
        ValueError,
        r"entries where the batch has none \(batch\[1\]: .*Tensor.*\); give",
    ),
    "too few dimensions": (
        {"x": SEQUENCE, "y": Y[:, 0]},
        {"batch_dim": 1},
        ValueError,
        r"lacks the dimension of its rows \(batch\['y'\]: .*7.*, batch_dim: 1\); give",
    ),
    "jagged dimension": (
        jagged()[0],
        {"batch_dim": 1},
        ValueError,
        r"jagged tensor has its rows in dimension 0 \(batch, batch_dim: 1\); give it 0",
    ),
    "nothing to split": (X, {"batch_dim": None}, TypeError, r"holds no tensor .*\(type: .*Tensor"),
    "words only": (["a", "b"], {}, TypeError, r"holds no tensor .*size_fn and split_fn"),
    "CSC": (
        lambda: X.to_sparse_csc(),
        {},
        TypeError,
        r"this layout .*\(layout: SparseCsc\); pass it as",
    ),
    "holds itself": (
        itself(),
        {},
        ValueError,
        r"holds itself, or .*\(levels: more than 500\); flatten",
    ),
    "cannot be made": (
        Unwilling([("x", X)]),
        {},
        TypeError,
        r"cannot be made again .*\(type: .*Unwilling.*\); pass size_fn and split_fn",
    ),
    "size of text": (
        X,
        {"size_fn": str, "split_fn": flat_piece},
        TypeError,
        r"size_fn returned no number of rows \(type: .*str",
    ),
    "negative size": (
        X,
        {"size_fn": lambda _: -3, "split_fn": flat_piece},
        ValueError,
        r"negative number of rows \(rows: -3\)",
    ),
    "size 0": (
        X,
        {"size_fn": lambda _: 0, "split_fn": flat_piece},
        ValueError,
        r"the batch is empty",
    ),
    "size_fn raises": (
        {"x": X},
        {"size_fn": lambda batch: len(batch["begins"]), "split_fn": flat_piece},
        KeyError,
        r"begins",
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSC tensor support:UserWarning")
@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_is_named_and_changes_nothing(name):
    batch, options, kind, message = BAD[name]
    batch = made(batch)
    model = linear()
    before = values_of(model)
    sizer = brimful.BatchSizer(model, **options)
    with pytest.raises(kind, match=message):
        sizer.step(batch, lambda model, piece: model(X).sum())
    assert same_bits(values_of(model), before)
    assert all(p.grad is None for p in model.parameters())


def test_the_reason_why_a_type_cannot_be_made_is_kept():
    with pytest.raises(TypeError) as caught:
        split(Unwilling([("x", X)]), [7])
    assert str(caught.value.__cause__) == "only from a file"


def test_a_batch_can_be_deep():
    batch = X
    for _ in range(400):
        batch = [batch]
    piece = split(batch, [3, 4])[1]
    for _ in range(400):
        (piece,) = piece
    assert torch.equal(piece, X[3:])


# What a sizer cannot be made with: (arguments, the error's type, its message)
ARGUMENTS = {
    "batch_dim of text": ({"batch_dim": "first"}, TypeError, r"\(batch_dim: 'first'\)"),
    "batch_dim of true": ({"batch_dim": True}, TypeError, r"\(batch_dim: True\)"),
    "inner text": ({"batch_dim": {"x": [0, 1.5]}}, TypeError, r"\(batch_dim\['x'\]\[1\]: 1.5\)"),
    "size_fn alone": (
        {"size_fn": len},
        ValueError,
        r"go together \(missing: split_fn\); pass both",
    ),
    "split_fn alone": ({"split_fn": flat_piece}, ValueError, r"\(missing: size_fn\)"),
    "both ways": (
        {"size_fn": len, "split_fn": flat_piece, "batch_dim": 1},
        ValueError,
        r"has no effect with size_fn and split_fn \(batch_dim: 1\); leave it out",
    ),
    "size_fn of text": ({"size_fn": "len", "split_fn": len}, TypeError, r"\(size_fn: 'len'\)"),
    "split_fn of text": ({"size_fn": len, "split_fn": "x"}, TypeError, r"\(split_fn: 'x'\)"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_sizer_is_not_made_with_what_says_nothing(name):
    options, kind, message = ARGUMENTS[name]
    with pytest.raises(kind, match=message):
        brimful.BatchSizer(linear(), **options)


def one_bad_rank_job(rank, name):
    batch, options, *_ = BAD[name] if rank.index == 1 else (Sample(X, Y), {})
    model = wrap(linear())
    before = values_of(model)
    sizer = brimful.BatchSizer(model, **options)
    found = raised(sizer.step, made(batch), lambda model, piece: model(piece.x).sum(1).mean())
    assert same_bits(values_of(model), before)
    assert all(p.grad is None for p in model.parameters())
    sizer = brimful.BatchSizer(model)
    assert sizer.step(Sample(X, Y), lambda m, p: squares(m(p.x), p.y)).weight == 2 * ROWS
    return found


@pytest.mark.parametrize("name", ["missing field", "cannot be made", "holds itself"])
def test_a_bad_batch_of_one_rank_is_reported_to_the_other(ranks, name):
    *_, kind, message = BAD[name]
    other, own = ranks(one_bad_rank_job, name)
    assert isinstance(own, kind)
    assert re.search(message, str(own))
    assert type(other) is brimful.RankFailed
    assert other.rank == 1
    assert re.search(message, str(other))
