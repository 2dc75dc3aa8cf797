"""Runs one part in this process: python -m tools.gpu.child MODULE FILE [--small]. A check is a line of FILE."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from pathlib import Path

from tools.gpu.check import Check


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("file", type=Path)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    with given.file.open("w") as file:

        def tell(found: Check) -> None:
            file.write(found.line() + "\n")
            file.flush()

        try:
            part = importlib.import_module(f"tools.gpu.parts.{given.module}")
            for found in part.run(given.small):
                tell(found)
        except Exception as error:
            traceback.print_exc()
            tell(Check("part", "bad", f"{type(error).__name__}: {error}"[:500]))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    # An autograd thread that still drops its last graph while Python ends aborts the process (torch 2.15, Python 3.11).
    os._exit(0)
