"""Which torch this is. The only Python file that may ask."""

import torch

from brimful import _build_info


def check_torch() -> None:
    """Raises ImportError unless torch is of the minor version that brimful was built with.

    torch keeps no stable binary interface for what brimful uses, so that any other would crash.
    """
    built, installed = _build_info.torch_minor, str(torch.__version__)
    if installed.split(".")[:2] != built.split("."):
        raise ImportError(
            f"brimful was built for torch {built} and this is torch {installed}: "
            f"install torch {built}, or build brimful again with `pip install "
            "--no-build-isolation --no-deps --force-reinstall .` in its source folder"
        )
