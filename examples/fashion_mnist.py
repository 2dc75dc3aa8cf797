"""Reads Fashion-MNIST from Debian's package dataset-fashion-mnist; needs only torch."""

import gzip
import os
import struct
from pathlib import Path

import torch

DEBIAN_FOLDER = "/usr/share/datasets/fashion-mnist"


def load(part: str, folder: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (uint8, n x 1 x 28 x 28) and labels (int64) of "train" or "t10k".

    The folder is the given one, else BRIMFUL_FASHION_MNIST, else that of the Debian package.
    Raises FileNotFoundError if the files are not there.
    """
    path = Path(folder or os.environ.get("BRIMFUL_FASHION_MNIST") or DEBIAN_FOLDER)
    images = _read(path / f"{part}-images-idx3-ubyte.gz")
    labels = _read(path / f"{part}-labels-idx1-ubyte.gz")
    return images.unsqueeze(1), labels.long()


def _read(path: Path) -> torch.Tensor:
    """An IDX file: two zero bytes, the type (8: bytes), the number of dimensions, the sizes, the values."""
    if not path.exists():
        raise FileNotFoundError(
            f"Fashion-MNIST is not there (file: {path}); apt-get install dataset-fashion-mnist, or name "
            "a folder that holds its four .gz files by --data or BRIMFUL_FASHION_MNIST"
        )
    data = bytearray(gzip.decompress(path.read_bytes()))
    sizes = struct.unpack_from(f">{data[3]}I", data, 4)
    return torch.frombuffer(data, dtype=torch.uint8, offset=4 + 4 * len(sizes)).view(sizes)


def share(count: int, rank: int, world_size: int) -> slice:
    """A rank's part of `count` samples, uneven on purpose: an eighth less than the rank before has."""
    parts = [(7 / 8) ** i for i in range(world_size)]
    begin, end = (round(count * sum(parts[:i]) / sum(parts)) for i in (rank, rank + 1))
    return slice(begin, end)
