"""Batches as loaders make them: of torch, of the standard library and of libraries of many fields."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, pad_sequence, unpack_sequence
from torch.utils.data import default_collate


@dataclasses.dataclass
class Kind:
    """``make(n, draw)`` is a batch of n rows, ``values(batch)`` a number for each row of it, or of a piece of it, that
    depends on all that the row has. ``refused``: what the message says where it cannot be cut."""

    make: Callable[[int, torch.Generator], Any]
    values: Callable[[Any], Any]
    refused: str = ""


def noise(draw, *shape):
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def waves(n, draw, *shape):
    return [noise(draw, *(shape or (40,))) for _ in range(n)]


def texts(n):
    return ["yes", "no", "a longer text"][:n] + ["again"] * max(0, n - 3)


def lengths(n, draw):
    return torch.randint(1, 9, (n,), generator=draw).tolist()


def ragged(n, draw, *rest):
    return [noise(draw, length, *rest) for length in lengths(n, draw)]


def flat(*tensors):
    """Of tensors with a row in each entry."""
    return [sum(float(t[i].double().sum()) for t in tensors) for i in range(len(tensors[0]))]


def sums(rows, labels=None):
    found = [float(torch.as_tensor(row).double().sum()) for row in rows]
    return found if labels is None else [a + code(b) for a, b in zip(found, labels, strict=True)]


def code(label):
    if isinstance(label, str | bytes):
        return float(len(label))
    if isinstance(label, dict):
        return sum(code(value) for value in label.values())
    if isinstance(label, list | tuple):
        return float(sum(code(value) for value in label))
    return 0.0 if label is None else float(torch.as_tensor(label).double().sum())


Named = collections.namedtuple("Named", ["x", "y"])


@dataclasses.dataclass
class Clip:
    audio: torch.Tensor
    text: str


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    texts: list


class Voxels(torch.Tensor):
    """Knows the size of each row's voxels."""

    sizes: torch.Tensor

    def __getitem__(self, index):
        made = super().__getitem__(index).as_subclass(torch.Tensor).as_subclass(Voxels)
        made.sizes = self.sizes[index]
        return made


def voxels(n, draw):
    made = noise(draw, n, 3).as_subclass(Voxels)
    made.sizes = noise(draw, n)
    return made


def boxes(n, draw):
    return [
        {"boxes": noise(draw, k, 4), "labels": torch.arange(k), "name": "x" * k}
        for k in lengths(n, draw)
    ]


def samples(n, draw, **more):
    made = zip(waves(n, draw), texts(n), strict=True)
    return [{"audio": audio, "text": text, **more} for audio, text in made]


def of_samples(batch):
    return [code(sample) for sample in batch]


# Of torch and the standard library.
KINDS: dict[str, Kind] = {
    "a tensor": Kind(lambda n, d: noise(d, n, 3), flat),
    "default_collate of dicts": Kind(
        lambda n, d: default_collate(
            [{"x": w, "y": i, "s": "a" * i} for i, w in enumerate(waves(n, d))]
        ),
        lambda b: [a + code(s) for a, s in zip(flat(b["x"], b["y"]), b["s"], strict=True)],
    ),
    "default_collate of pairs": Kind(
        lambda n, d: default_collate([(w, w[:3]) for w in waves(n, d)]), lambda b: flat(*b)
    ),
    "default_collate of namedtuples": Kind(
        lambda n, d: default_collate([Named(w, i) for i, w in enumerate(waves(n, d))]),
        lambda b: flat(b.x, b.y),
    ),
    "default_collate of nested dicts": Kind(
        lambda n, d: default_collate([{"a": {"x": w}, "b": [w[:2], w[2:5]]} for w in waves(n, d)]),
        lambda b: flat(b["a"]["x"], *b["b"]),
    ),
    "default_collate of NumPy": Kind(
        lambda n, d: default_collate(
            [{"x": w.numpy(), "y": numpy.float64(i)} for i, w in enumerate(waves(n, d))]
        ),
        lambda b: flat(b["x"], b["y"]),
    ),
    "dicts as they are": Kind(samples, of_samples),
    "dicts with missing keys": Kind(
        lambda n, d: [
            {k: v for k, v in s.items() if k != "more" or i}
            for i, s in enumerate(samples(n, d, more=1))
        ],
        of_samples,
    ),
    "a tuple of dicts": Kind(lambda n, d: tuple(samples(n, d)), of_samples),
    "pairs as they are": Kind(
        lambda n, d: list(zip(waves(n, d), range(n), strict=True)), of_samples
    ),
    "dataclasses as they are": Kind(
        lambda n, d: [Clip(w, t) for w, t in zip(waves(n, d), texts(n), strict=True)],
        lambda b: [code([c.audio, c.text]) for c in b],
    ),
    "zip of rows": Kind(
        lambda n, d: tuple(zip(*zip(waves(n, d), texts(n), strict=True), strict=True)),
        lambda b: sums(*b),
    ),
    "zip of ragged rows": Kind(
        lambda n, d: tuple(
            zip(*zip(ragged(n, d), torch.arange(n).unbind(), strict=True), strict=True)
        ),
        lambda b: sums(*b),
    ),
    "waves and texts": Kind(
        lambda n, d: {"audio": waves(n, d), "text": texts(n)}, lambda b: sums(b["audio"], b["text"])
    ),
    "waves and tokens": Kind(
        lambda n, d: {"audio": waves(n, d), "ids": [[1] * k for k in lengths(n, d)]},
        lambda b: sums(b["audio"], b["ids"]),
    ),
    "images and metadata": Kind(
        lambda n, d: (waves(n, d, 6, 4, 4), [{"file": t, "id": i} for i, t in enumerate(texts(n))]),
        lambda b: sums(*b),
    ),
    "detection": Kind(lambda n, d: (waves(n, d, 6, 4, 4), boxes(n, d)), lambda b: sums(*b)),
    "padded": Kind(
        lambda n, d: (
            lambda rows: {
                "x": pad_sequence(rows, batch_first=True),
                "n": torch.tensor([len(r) for r in rows]),
            }
        )(ragged(n, d)),
        lambda b: flat(b["x"], b["n"]),
    ),
    "packed": Kind(
        lambda n, d: pack_sequence(ragged(n, d), enforce_sorted=False),
        lambda b: sums(unpack_sequence(b)),
    ),
    "jagged": Kind(
        lambda n, d: torch.nested.nested_tensor(ragged(n, d, 2), layout=torch.jagged),
        lambda b: sums(b.unbind()),
    ),
    "sparse": Kind(lambda n, d: noise(d, n, 5).relu().to_sparse(), lambda b: flat(b.to_dense())),
    "a dataclass": Kind(
        lambda n, d: Batch(noise(d, n, 3), texts(n)),
        lambda b: [a + code(t) for a, t in zip(flat(b.x), b.texts, strict=True)],
    ),
    "a proxy": Kind(
        lambda n, d: types.MappingProxyType({"x": noise(d, n, 3)}), lambda b: flat(b["x"])
    ),
    "arrays of objects": Kind(
        lambda n, d: {
            "x": noise(d, n, 3).numpy(),
            "o": numpy.array([*texts(n), None], dtype=object)[:-1],
        },
        lambda b: [float(x.sum()) + code(o) for x, o in zip(b["x"], b["o"], strict=True)],
    ),
    "a subclass of Tensor": Kind(voxels, lambda b: flat(b.as_subclass(torch.Tensor), b.sizes)),
    "views beside labels": Kind(
        lambda n, d: ([noise(d, n, 3), noise(d, n, 3)], torch.arange(n)),
        lambda b: flat(*b[0], b[1]),
    ),
    "waves alone": Kind(lambda n, d: waves(n + 4, d), flat, refused="may hold a row in each entry"),
}


def _tensordict(n, draw):
    tensordict = pytest.importorskip("tensordict")
    return tensordict.TensorDict(
        {"x": noise(draw, n, 3), "in": {"y": noise(draw, n, 1)}}, batch_size=[n]
    )


def _of_tensordict(batch):
    assert batch.batch_size == batch["in"].batch_size == batch["x"].shape[:1]
    return flat(batch["x"], batch["in", "y"])


def _tensorclass(n, draw):
    tensordict = pytest.importorskip("tensordict")
    if not hasattr(_tensorclass, "type"):

        class Rows:
            x: torch.Tensor
            y: torch.Tensor

        _tensorclass.type = tensordict.tensorclass(Rows)
    return _tensorclass.type(x=noise(draw, n, 3), y=noise(draw, n), batch_size=[n])


def _of_tensorclass(batch):
    assert batch.batch_size == batch.x.shape[:1]
    return flat(batch.x, batch.y)


def _metatensors(n, draw, collate="list_data_collate"):
    data = pytest.importorskip("monai.data")
    made = [
        {
            "image": data.MetaTensor(
                noise(draw, 1, 4, 4), affine=torch.diag(torch.tensor([1.0 + i, 1, 1, 1]))
            ),
            "label": noise(draw, 1, 4, 4),
            "file": text,
        }
        for i, text in enumerate(texts(n))
    ]
    return getattr(data, collate)(made)


def _of_metatensors(batch):
    decollate = pytest.importorskip("monai.data").decollate_batch
    images = decollate(batch["image"], detach=False)
    labels = zip(images, batch["label"], batch["file"], strict=True)
    return [float(i.as_tensor().sum() * i.pixdim[0] + y.sum()) + code(f) for i, y, f in labels]


def _tv_tensors(n, draw):
    tv = pytest.importorskip("torchvision.tv_tensors")
    return {"image": tv.Image(noise(draw, n, 3, 4, 4)), "mask": tv.Mask(noise(draw, n, 4, 4))}


def _of_tv_tensors(batch):
    tv = pytest.importorskip("torchvision.tv_tensors")
    assert type(batch["image"]) is tv.Image and type(batch["mask"]) is tv.Mask
    flip = pytest.importorskip("torchvision.transforms.v2").RandomHorizontalFlip(p=1.0)
    flipped = flip(batch)
    weight = torch.arange(4)
    return [
        float((i * m * weight).sum())
        for i, m in zip(
            flipped["image"].as_subclass(torch.Tensor),
            flipped["mask"].as_subclass(torch.Tensor),
            strict=True,
        )
    ]


def _torchio(n, draw):
    tio = pytest.importorskip("torchio")
    subjects = [
        tio.Subject(t1=tio.ScalarImage(tensor=noise(draw, 1, 4, 4, 4)), age=40 + i, name=text)
        for i, text in enumerate(texts(n))
    ]
    return next(iter(tio.SubjectsLoader(tio.SubjectsDataset(subjects), batch_size=n)))


def _torchgeo(n, draw):
    stack = pytest.importorskip("torchgeo.datasets").stack_samples
    return stack(
        [
            {"image": noise(draw, 3, 4, 4), "crs": text, "bounds": (i, 2, 3)}
            for i, text in enumerate(texts(n))
        ]
    )


def _gluonts(n, draw):
    batchify = pytest.importorskip("gluonts.torch.batchify").batchify
    pandas = pytest.importorskip("pandas")
    start = pandas.Period("2020-01-01", "D")
    return batchify(
        [
            {"past": w.numpy(), "item_id": t, "start": start}
            for w, t in zip(waves(n, draw), texts(n), strict=True)
        ]
    )


def _pytorch_forecasting(n, draw):
    library = pytest.importorskip("pytorch_forecasting")
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(
        [{"g": str(g), "t": t, "v": float(noise(draw)) + 5} for g in range(4) for t in range(12)]
    )
    data = library.TimeSeriesDataSet(
        table,
        "t",
        "v",
        ["g"],
        max_encoder_length=6,
        max_prediction_length=3,
        static_categoricals=["g"],
        time_varying_unknown_reals=["v"],
    )
    return next(iter(data.to_dataloader(train=False, batch_size=n)))


def _speechbrain(n, draw):
    batch = pytest.importorskip("speechbrain.dataio.batch").PaddedBatch
    return batch([{"id": t, "wav": w} for w, t in zip(ragged(n, draw), texts(n), strict=True)])


def _lhotse(n, draw):
    pytest.importorskip("lhotse")
    from lhotse import CutSet
    from lhotse.dataset import K2SpeechRecognitionDataset
    from lhotse.dataset.input_strategies import AudioSamples
    from lhotse.testing.dummies import dummy_cut, dummy_recording, dummy_supervision

    cuts = [
        dummy_cut(
            i,
            duration=1.0,
            recording=dummy_recording(i, with_data=True),
            supervisions=[dummy_supervision(i)],
        )
        for i in range(n)
    ]
    return K2SpeechRecognitionDataset(input_strategy=AudioSamples())[CutSet.from_cuts(cuts)]


def _schnetpack(n, draw):
    loader = pytest.importorskip("schnetpack.data.loader", exc_type=ImportError)
    names = pytest.importorskip("schnetpack.properties", exc_type=ImportError)
    return loader._atoms_collate_fn(
        [
            {
                names.n_atoms: torch.tensor([k]),
                names.R: noise(draw, k, 3),
                names.idx_i: torch.zeros(2, dtype=torch.long),
                names.idx_j: torch.zeros(2, dtype=torch.long),
                "energy": noise(draw, 1),
            }
            for k in lengths(n, draw)
        ]
    )


def _pyg(n, draw):
    data = pytest.importorskip("torch_geometric.data")
    return data.Batch.from_data_list(
        [data.Data(x=noise(draw, k, 2), y=noise(draw, 1)) for k in lengths(n, draw)]
    )


def _chemprop(n, draw):
    data = pytest.importorskip("chemprop.data", exc_type=ImportError)
    points = [data.MoleculeDatapoint.from_smi("C" * k, [1.0]) for k in lengths(n, draw)]
    return next(
        iter(data.build_dataloader(data.MoleculeDataset(points), batch_size=n, shuffle=False))
    )


def _datasets(n, draw):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict(
        {"x": [w.tolist() for w in waves(n, draw)], "y": list(range(n)), "s": texts(n)}
    )
    return made.with_format("torch")[0:n]


def _encoding(n, draw):
    kind = pytest.importorskip("transformers").BatchEncoding
    return kind({"x": noise(draw, n, 4), "y": torch.arange(n)})


def _features(n, draw):
    kind = pytest.importorskip("transformers").BatchFeature
    return kind({"input_values": noise(draw, n, 4), "text": texts(n)})


def _hf_collate(n, draw):
    collate = pytest.importorskip("transformers").default_data_collator
    return collate([{"x": w, "label": i} for i, w in enumerate(waves(n, draw))])


def _hf_output(n, draw):
    kind = pytest.importorskip("transformers.modeling_outputs").BaseModelOutput
    return kind(
        last_hidden_state=noise(draw, n, 3), hidden_states=(noise(draw, n, 2), noise(draw, n, 2))
    )


def _torchdata(n, draw):
    nodes = pytest.importorskip("torchdata.nodes")
    rows = [{"x": w, "s": t} for w, t in zip(waves(n, draw), texts(n), strict=True)]
    return next(iter(nodes.Loader(nodes.Batcher(nodes.IterableWrapper(rows), n, drop_last=False))))


def _combined(n, draw):
    loader = pytest.importorskip("lightning.pytorch.utilities").CombinedLoader
    rows = torch.utils.data.TensorDataset(noise(draw, n, 3), torch.arange(n))
    loaders = {k: torch.utils.data.DataLoader(rows, batch_size=n) for k in ("a", "b")}
    return next(iter(loader(loaders, "min_size")))[0]


def _of_combined(batch):
    return flat(*batch["a"], *batch["b"])


# Of libraries, as their own loaders and collate functions make them.
LIBRARIES: dict[str, Kind] = {
    "tensordict: TensorDict": Kind(_tensordict, _of_tensordict),
    "tensordict: tensorclass": Kind(_tensorclass, _of_tensorclass),
    "MONAI: list_data_collate": Kind(_metatensors, _of_metatensors),
    "MONAI: pad_list_data_collate": Kind(
        lambda n, d: _metatensors(n, d, "pad_list_data_collate"), _of_metatensors
    ),
    "torchvision: tv_tensors": Kind(_tv_tensors, _of_tv_tensors),
    "torchio: SubjectsLoader": Kind(
        _torchio,
        lambda b: [
            a + code(t) for a, t in zip(flat(b["t1"]["data"], b["age"]), b["name"], strict=True)
        ],
    ),
    "torchgeo: stack_samples": Kind(
        _torchgeo,
        lambda b: [
            a + code([c, x])
            for a, c, x in zip(flat(b["image"]), b["crs"], b["bounds"], strict=True)
        ],
    ),
    "GluonTS: batchify": Kind(
        _gluonts,
        lambda b: [a + code(t) for a, t in zip(flat(b["past"]), b["item_id"], strict=True)],
    ),
    "pytorch-forecasting: to_dataloader": Kind(
        _pytorch_forecasting,
        lambda b: flat(b[0]["encoder_cont"], b[0]["encoder_lengths"], b[0]["groups"], b[1][0]),
    ),
    "datasets: format torch": Kind(
        _datasets,
        lambda b: [a + code(s) for a, s in zip(flat(b["x"], b["y"]), b["s"], strict=True)],
    ),
    "transformers: BatchEncoding": Kind(_encoding, lambda b: flat(b["x"], b.y)),
    "transformers: BatchFeature": Kind(
        _features,
        lambda b: [a + code(t) for a, t in zip(flat(b["input_values"]), b["text"], strict=True)],
    ),
    "transformers: default_data_collator": Kind(_hf_collate, lambda b: flat(b["x"], b["labels"])),
    "transformers: BaseModelOutput": Kind(
        _hf_output, lambda b: flat(b.last_hidden_state, *b.hidden_states)
    ),
    "torchdata: Batcher": Kind(_torchdata, of_samples),
    "Lightning: CombinedLoader": Kind(_combined, _of_combined),
    "speechbrain: PaddedBatch": Kind(_speechbrain, flat, refused="register_split"),
    "lhotse: K2SpeechRecognitionDataset": Kind(_lhotse, flat, refused="places of its rows"),
    "schnetpack: _atoms_collate_fn": Kind(
        _schnetpack, flat, refused="disagree in size|places of its rows"
    ),
    "PyG: Batch": Kind(_pyg, flat, refused="register_split"),
    "PyG: Batch beside labels": Kind(
        lambda n, d: (_pyg(n, d), noise(d, n)), flat, refused="register_split"
    ),
    "chemprop: build_dataloader": Kind(_chemprop, flat, refused="disagree|register_split"),
}
