"""map_batches: inference in pieces that fit, equal to the whole, whatever allocation is refused."""

import collections
import random
import weakref

import numpy
import pytest
import torch
from models import rng_states, seed, used
from rank_processes import raised

import brimful
from brimful import _C, memory

NEVER = 1 << 40
ROW_BYTES = 1 << 16
Pair = collections.namedtuple("Pair", ["score", "names"])


pytestmark = pytest.mark.usefixtures("no_limit")


@pytest.fixture(autouse=True)
def nothing_was_called():
    _C._forget_map_sizes()


def allow(count):
    memory.set_limit("cpu", used() + count)


def whole_numbers(rows, columns=3):
    return torch.arange(float(rows * columns), dtype=torch.float64).view(rows, columns)


def heavy(x):
    """Takes ROW_BYTES a row; whole numbers, so that the result has the same bits in whatever pieces it was made."""
    wide = torch.empty(len(x), ROW_BYTES, dtype=torch.uint8)
    assert wide.numel() == len(x) * ROW_BYTES
    return x * 2 + 1


class Noting:
    """Calls a function and notes the rows of each call."""

    def __init__(self, function):
        self.function, self.sizes = function, []

    def __call__(self, x):
        self.sizes.append(len(x))
        return self.function(x)


@pytest.mark.smoke
def test_a_batch_that_does_not_fit_gives_the_result_of_the_whole():
    batch = whole_numbers(13)
    expected = heavy(batch)
    before = used()
    noting = Noting(heavy)
    allow(5 * ROW_BYTES)
    result = brimful.map_batches(noting, batch)
    memory.set_limit("cpu", None)
    assert noting.sizes == [13, 7, 4, 4, 4, 1]
    assert torch.equal(result, expected)
    del result
    assert used() == before


def test_memory_that_is_lost_in_the_middle_makes_the_rest_finer():
    batch = whole_numbers(12)

    def fn(x):
        if x[0, 0] >= 18:  # from row 6 on
            allow(5 * ROW_BYTES // 2)
        return heavy(x)

    noting = Noting(fn)
    result = brimful.map_batches(noting, batch, pieces=2)
    memory.set_limit("cpu", None)
    assert noting.sizes == [6, 6, 2, 2, 2]  # what 6 rows took is known
    assert torch.equal(result, heavy(batch))


def test_the_function_runs_without_gradients_and_a_whole_batch_is_not_copied():
    net = torch.nn.Linear(3, 2).double()
    kept = []

    def fn(x):
        assert not torch.is_grad_enabled()
        kept.append(net(x))
        return kept[-1]

    result = brimful.map_batches(fn, whole_numbers(4))
    assert result is kept[0]
    assert not result.requires_grad
    assert torch.is_grad_enabled()
    in_pieces = brimful.map_batches(fn, whole_numbers(4), pieces=2)
    assert torch.allclose(in_pieces, result, rtol=1e-12, atol=0)
    with torch.inference_mode():
        assert torch.equal(
            brimful.map_batches(heavy, whole_numbers(4), pieces=2), heavy(whole_numbers(4))
        )


def test_a_graph_that_the_function_makes_is_not_kept():
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def fn(x):
        with torch.enable_grad():
            return x * weight

    for pieces in (1, 2):
        result = brimful.map_batches(fn, whole_numbers(4), pieces=pieces)
        assert not result.requires_grad
        assert torch.equal(result, whole_numbers(4))


STRUCTURES = {
    "tensor": lambda x: x + 1,
    "tuple": lambda x: (x, x.sum(1)),
    "list": lambda x: [x, (x.int(),)],
    "dict": lambda x: {"a": x, "b": {"c": x[:, :1]}},
    "ordered": lambda x: collections.OrderedDict(b=x, a=x * 2),
    "namedtuple": lambda x: Pair(x, [x * 3, None]),
    "torch's": lambda x: torch.max(x, dim=1),
}


def alike(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second) and first.dtype == second.dtype
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return list(first) == list(second) and all(alike(first[k], second[k]) for k in first)
    return first is second or all(alike(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("pieces", [1, 3])
def test_results_keep_their_structure(name, pieces):
    fn = STRUCTURES[name]
    batch = whole_numbers(7)
    assert alike(brimful.map_batches(fn, batch, pieces=pieces), fn(batch))


def test_batches_have_any_structure_that_a_sizer_takes():
    batch = {
        "x": whole_numbers(5),
        "scale": torch.tensor(3.0),
        "names": list("abcde"),
        "none": None,
    }

    def fn(piece):
        assert piece["none"] is None and len(piece["names"]) == len(piece["x"])
        codes = torch.tensor([ord(name) for name in piece["names"]])
        return piece["x"] * piece["scale"], codes

    values, codes = brimful.map_batches(fn, batch, pieces=2)
    assert torch.equal(values, batch["x"] * 3)
    assert codes.tolist() == [97, 98, 99, 100, 101]


def test_rows_may_lie_elsewhere_and_be_cut_by_functions():
    batch = {"x": whole_numbers(5).T, "table": whole_numbers(2)}
    result = brimful.map_batches(
        lambda piece: piece["x"].T + piece["table"][1],
        batch,
        pieces=2,
        batch_dim={"x": 1, "table": None},
    )
    assert torch.equal(result, whole_numbers(5) + whole_numbers(2)[1])
    noting = Noting(lambda texts: torch.tensor([[ord(c)] for c in texts]))
    result = brimful.map_batches(
        noting, "brimful", pieces=2, size_fn=len, split_fn=lambda text, begin, end: text[begin:end]
    )
    assert result.flatten().tolist() == list(b"brimful") and noting.sizes == [4, 3]
    error = raised(brimful.map_batches, heavy, batch, size_fn=len)
    assert type(error) is ValueError and "size_fn and split_fn go together" in str(error)


def test_a_piece_that_is_repeated_gets_the_same_random_numbers():
    batch = whole_numbers(13)

    def fn(x):
        noise = torch.rand(len(x), 1) + random.random() + float(numpy.random.rand())
        return heavy(torch.nn.functional.dropout(x, 0.5)) * noise

    seed(3)
    allow(5 * ROW_BYTES)
    retried = brimful.map_batches(fn, batch)
    memory.set_limit("cpu", None)
    after = rng_states()
    seed(3)
    assert torch.equal(retried, brimful.map_batches(fn, batch, pieces=4))
    assert rng_states() == after


def test_channels_last_stays():
    image = torch.arange(96.0).view(4, 3, 4, 2).contiguous(memory_format=torch.channels_last)
    result = brimful.map_batches(lambda x: x * 2, image, pieces=2)
    assert torch.equal(result, image * 2)
    assert result.is_contiguous(memory_format=torch.channels_last)


def test_a_row_that_does_not_fit_is_reported_with_the_sizes_tried():
    batch = whole_numbers(6)
    before = used()
    allow(ROW_BYTES // 2)
    error = raised(brimful.map_batches, heavy, batch)
    assert isinstance(error, torch.OutOfMemoryError) and isinstance(error, brimful.BatchTooLarge)
    assert str(error).startswith(
        "a piece of one row does not fit on rank 0 of 1 (device: cpu, rows: 6, done: 0, retries: 3, "
        "max_retries: 8).\nTried: 1 piece of 6 rows (peak: "
    )
    assert [rows for _, rows, _ in error.tried] == [6, 3, 2, 1]
    error = raised(brimful.map_batches, heavy, batch, max_retries=1)
    assert str(error).startswith(
        "no piece that was tried fits on rank 0 of 1 (device: cpu, rows: 6, done: 0, retries: 1, "
    )
    assert error.advice[0] == "raise max_retries, or begin with more pieces (pieces=4)"
    error = raised(brimful.map_batches, heavy, batch, max_retries=0)
    assert [rows for _, rows, _ in error.tried] == [6]
    memory.set_limit("cpu", None)
    del error
    assert used() == before


def test_what_a_piece_held_is_gone_before_the_next_one():
    class Held:
        pass

    references = []

    def fn(x):
        assert all(reference() is None for reference in references)
        local = Held()
        references.append(weakref.ref(local))
        if len(x) > 2:
            raise torch.OutOfMemoryError("planted")
        result = x.clone()
        references.append(weakref.ref(result))
        return result

    batch = whole_numbers(8)
    assert torch.equal(brimful.map_batches(fn, batch), batch)
    assert len(references) == 3 + 2 * 4  # 8, 4 and 3 rows do not fit


class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv1d(1, 4, 3)
        self.last = torch.nn.Linear(4, 2)
        with torch.no_grad():  # whole numbers, whose sums are exact in any order
            for p in self.parameters():
                p.copy_(torch.randint(-3, 4, p.shape))

    def forward(self, batch):
        hidden = self.conv(batch["x"][:, None]).relu().mean(2)
        return {"logits": self.last(hidden), "hidden": (hidden, batch["y"] + 1)}


@pytest.mark.parametrize("pieces", [1, 3])
def test_an_allocation_refused_anywhere_gives_the_same_result(pieces):
    net = Inner()
    batch = {"x": (whole_numbers(9, 6) % 8).float(), "y": torch.arange(9)}
    with torch.no_grad():
        expected = net(batch)
    brimful.map_batches(net, batch, pieces=pieces)
    before = used()
    for index in range(400):
        with _C._FaultAt(index) as fault:
            result = brimful.map_batches(net, batch, pieces=pieces)
        assert alike(result, expected), index
        del result
        assert used() == before, index
        if not fault.fired:
            break
    assert index > 10 * pieces and not fault.fired


def test_the_functions_own_errors_pass_as_they_are():
    noting = Noting(lambda x: {}["no such key"])
    error = raised(brimful.map_batches, noting, whole_numbers(4))
    assert type(error) is KeyError and noting.sizes == [4]
    told = torch.distributed.DistError("NCCL error: Failed to CUDA malloc: out of memory")
    noting = Noting(lambda x: (_ for _ in ()).throw(told))
    assert raised(brimful.map_batches, noting, whole_numbers(4)) is told
    assert noting.sizes == [4]


BAD = {
    "rows": (
        lambda x: x[1:],
        ValueError,
        "wrong number of rows (tensor of the result: 0, shape: [1, 3], rows of",
    ),
    "second": (
        lambda x: (x, x[0]),
        ValueError,
        "wrong number of rows (tensor of the result: 1, shape: [3]",
    ),
    "mean": (
        lambda x: x.mean(),
        ValueError,
        "wrong number of rows (tensor of the result: 0, shape: []",
    ),
    "number": (lambda x: 1.5, TypeError, "fn returned no tensor (type: float)"),
    "inside": (
        lambda x: {"a": x, "b": "text"},
        TypeError,
        "fn returned no tensor (type: str)",
    ),
    "nothing": (lambda x: None, TypeError, "fn returned no tensor"),
    "empty": (lambda x: (), TypeError, "fn returned no tensor"),
    "sparse": (lambda x: x.to_sparse(), TypeError, "fn returned no dense tensor"),
    "structure": (
        lambda x: [x] if x[0, 0] > 0 else (x,),
        ValueError,
        "another structure for rows 2 to 4 than for those before (structure: list(tensor, ) and tuple(tensor, ))",
    ),
    "shape": (
        lambda x: x[:, 1:] if x[0, 0] > 0 else x,
        ValueError,
        "something else for rows 2 to 4 than for those before (tensor of the result: 0, shape: [2, 2] and [*, [3]]",
    ),
    "dtype": (
        lambda x: x.float() if x[0, 0] > 0 else x,
        ValueError,
        "dtype: float and double",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_results_that_cannot_be_joined_are_refused(name):
    fn, kind, words = BAD[name]
    error = raised(brimful.map_batches, fn, whole_numbers(4), pieces=2)
    assert type(error) is kind and words in str(error), error


def test_bad_arguments():
    batch = whole_numbers(4)
    for arguments, kind, words in [
        (
            (None, batch),
            TypeError,
            "fn must be callable (type: <class 'NoneType'>)",
        ),
        ((heavy, whole_numbers(0)), ValueError, "the batch is empty (rows: 0)"),
        ((heavy, "text"), TypeError, "the batch holds no tensor"),
        ((heavy, (batch, whole_numbers(3))), ValueError, "disagree in size"),
    ]:
        error = raised(brimful.map_batches, *arguments)
        assert type(error) is kind and words in str(error), error
    error = raised(brimful.map_batches, heavy, batch, pieces=0)
    assert type(error) is ValueError and "(pieces: 0)" in str(error)
    error = raised(brimful.map_batches, heavy, batch, max_retries=-1)
    assert type(error) is ValueError and "(max_retries: -1)" in str(error)


@pytest.mark.gpu
def test_a_budget_on_a_gpu():
    batch = torch.arange(64.0, device="cuda")[:, None]

    def fn(x):
        return x * 2 + 0 * torch.ones(len(x), 1 << 22, device="cuda")[:, :1]

    memory.release_cached("cuda")
    memory.set_limit("cuda", memory.stats("cuda").reserved_bytes + (200 << 20))
    try:
        noting = Noting(fn)
        result = brimful.map_batches(noting, batch)
    finally:
        memory.set_limit("cuda", None)
    assert torch.equal(result, batch * 2)
    assert noting.sizes[0] == 64 and max(noting.sizes[-3:]) < 16


def test_a_loop_over_batches_is_refused_once():
    """Of one function, made anew for each batch as a lambda is, and of a module."""
    module = torch.nn.Identity()
    allow(5 * ROW_BYTES)
    refusals = []
    for _ in range(6):
        before = memory.stats("cpu").ooms
        brimful.map_batches(lambda x: heavy(module(x)), whole_numbers(13))
        refusals.append(memory.stats("cpu").ooms - before)
    assert refusals == [2, 0, 0, 0, 0, 0]
    noting = Noting(heavy)
    brimful.map_batches(noting, whole_numbers(13))
    assert noting.sizes[0] == 13, "another function"
    noting.sizes.clear()
    for _ in range(100):
        brimful.map_batches(noting, whole_numbers(13))
    assert sum(size > 4 for size in noting.sizes) <= 8, "tried anew seldom"
    noting.sizes.clear()
    brimful.map_batches(noting, whole_numbers(13, columns=6))  # rows of twice the elements
    assert noting.sizes[0] <= 4
    memory.set_limit("cpu", None)
    brimful.map_batches(noting, whole_numbers(13))
    assert noting.sizes[-1] == 13


def test_one_row_of_a_thousand_is_found_within_the_retries():
    batch = whole_numbers(1000)
    allow(3 * ROW_BYTES // 2)
    assert torch.equal(brimful.map_batches(heavy, batch), batch * 2 + 1)
