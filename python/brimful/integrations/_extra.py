"""What an adapter says where its package is not installed."""

from __future__ import annotations

import importlib


def require(package: str, *, extra: str | None = None) -> None:
    """Raise ``ModuleNotFoundError`` that names the pip command, in one line, if there is no such package."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:  # it is there, and lacks something itself
            raise
        raise ModuleNotFoundError(
            f"this adapter needs a package that is not installed (name: {package}); run: "
            f"pip install 'brimful[{extra or package}]'",
            name=package,
        ) from None
