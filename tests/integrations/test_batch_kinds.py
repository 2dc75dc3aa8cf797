"""Batches of many loaders and collate functions in pieces against whole: right, or refused with a remedy."""

import collections
import types

import batch_kinds
import numpy
import pytest
import torch
from batch_kinds import Kind, code, flat, lengths, noise, of_samples, samples, sums, texts, waves

import brimful
from brimful import _C


def _lazy(n, draw):
    tensordict = pytest.importorskip("tensordict")
    rows = [tensordict.TensorDict({"x": w}, batch_size=[]) for w in waves(n, draw)]
    return tensordict.lazy_stack(rows)


def _decollated(n, draw):
    data = pytest.importorskip("monai.data")
    return data.decollate_batch(batch_kinds._metatensors(n, draw), detach=False)


def _structured(n, draw):
    made = numpy.zeros(n, dtype=[("x", "f8", 3), ("y", "i4")])
    made["x"], made["y"] = noise(draw, n, 3).numpy(), numpy.arange(n)
    return {"rows": made, "z": noise(draw, n)}


def _masked(n, draw):
    x = noise(draw, n, 3).numpy()
    return numpy.ma.masked_array(x, mask=x > 0)


def _frame(n, draw):
    pandas = pytest.importorskip("pandas")
    return {"x": noise(draw, n, 3), "table": pandas.DataFrame({"a": range(n)})}


def _arrow(n, draw):
    arrow = pytest.importorskip("pyarrow")
    return {"x": noise(draw, n, 3), "table": arrow.table({"a": list(range(n))})}


def _boxes(n, draw):
    boxes = pytest.importorskip("kornia.geometry.boxes").Boxes
    corners = torch.tensor([1.0, 1, 3, 3]).expand(n, 2, 4)
    return {"x": noise(draw, n, 3), "boxes": boxes.from_tensor(corners, mode="xyxy")}


# Kept apart: none of these was looked at when the rules were written.
APART: dict[str, Kind] = {
    "crops of two resolutions": Kind(
        lambda n, d: {
            "large": [noise(d, n, 3, 8, 8) for _ in range(2)],
            "small": [noise(d, n, 3, 4, 4) for _ in range(6)],
            "index": torch.arange(n),
        },
        lambda b: flat(*b["large"], *b["small"], b["index"]),
    ),
    "a structured array": Kind(
        _structured,
        lambda b: [
            float(r["x"].sum() + r["y"] + z) for r, z in zip(b["rows"], b["z"], strict=True)
        ],
    ),
    "a masked array": Kind(_masked, lambda b: [float(row.filled(0).sum()) for row in b]),
    "a chain of dicts": Kind(
        lambda n, d: collections.ChainMap({"x": noise(d, n, 3)}, {"s": texts(n)}),
        lambda b: [a + code(s) for a, s in zip(flat(b["x"]), b["s"], strict=True)],
    ),
    "samples within samples": Kind(
        lambda n, d: [
            {"query": s, "passages": waves(k, d)}
            for s, k in zip(samples(n, d), lengths(n, d), strict=True)
        ],
        of_samples,
    ),
    "bytes beside images": Kind(
        lambda n, d: [waves(n, d, 6, 4, 4), [t.encode() for t in texts(n)]],
        lambda b: sums(b[0], [len(x) for x in b[1]]),
    ),
    "tensordict: lazy_stack": Kind(_lazy, lambda b: flat(b["x"])),
    "MONAI: decollate_batch": Kind(
        _decollated,
        lambda b: [
            float(r["image"].as_tensor().sum() * r["image"].pixdim[0] + r["label"].sum()) for r in b
        ],
    ),
    "pandas: DataFrame": Kind(_frame, flat, refused="register_split"),
    "pyarrow: Table": Kind(_arrow, flat, refused="register_split"),
    "kornia: Boxes": Kind(_boxes, flat, refused="register_split"),
    "a namespace": Kind(
        lambda n, d: {"x": noise(d, n), "more": types.SimpleNamespace(y=noise(d, n))},
        flat,
        refused="register_split",
    ),
    "a list of another kind": Kind(
        lambda n, d: {"x": noise(d, n), "more": collections.UserList(texts(n))},
        flat,
        refused="register_split",
    ),
}
ALL = {**batch_kinds.KINDS, **batch_kinds.LIBRARIES, **APART}


def some_split(rows, draw):
    sizes = []
    while sum(sizes) < rows:
        sizes.append(int(torch.randint(1, rows - sum(sizes) + 1, (1,), generator=draw)))
    return sizes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ALL)
def test_pieces_are_the_batch_or_it_is_refused(name, seed):
    kind = ALL[name]
    draw = torch.Generator().manual_seed(seed)
    rows = [1, 2, 3, 8][seed]
    batch = kind.make(rows, draw)
    model = torch.nn.Linear(1, 1, dtype=torch.float64)

    def loss_fn(model, piece):
        values = torch.tensor(kind.values(piece), dtype=torch.float64)[:, None]
        return (model(values.tanh()) - values.cos()).square().mean()

    if kind.refused:
        if rows == 1 and "disagree" in kind.refused:
            return  # a row's own values are as many as there are rows
        with pytest.raises((TypeError, ValueError), match=kind.refused):
            brimful.BatchSizer(model).step(batch, loss_fn)
        return
    expected = kind.values(batch)
    splitter = _C.Splitter()
    assert splitter.rows_of(batch) == len(expected) == rows
    for _ in range(3):
        split, begin = some_split(rows, draw), 0
        for size in split:
            piece = splitter.slice(batch, rows, begin, begin + size)
            assert kind.values(piece) == pytest.approx(expected[begin : begin + size])
            begin += size
        model.zero_grad()
        loss_fn(model, batch).backward()
        whole = model.weight.grad.clone()
        model.zero_grad()
        outcome = brimful.BatchSizer(model).step(batch, loss_fn, split=split)
        assert outcome.split == split
        torch.testing.assert_close(model.weight.grad, whole, rtol=1e-9, atol=1e-12)
