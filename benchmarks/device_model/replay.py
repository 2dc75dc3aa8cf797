"""Writes what operators took on the recorded device beside their results: python -m benchmarks.device_model.replay FILE

The simulated device with arithmetic takes it again (SIM_CUDA_REPLAY=FILE, csrc/cuda_sim/operators/replay.cpp).
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.device_model import recorded


def lines(files: list[Path] | None = None) -> list[str]:
    """Returns a line for each operator, shapes and bytes that some recorded step has."""
    found = set()
    for file in recorded.FILES if files is None else files:
        for steps in recorded.read(file).values():
            operators = [operator for step in steps for operator in step["ops"] or ()]
            found.update(
                (name_of(name), ",".join("x".join(map(str, shape)) for shape in shapes), beyond)
                for name, _, _, beyond, shapes in operators
                if beyond > 0 and all(shapes)
            )
    return [f"{name} {shapes} {beyond}" for name, shapes, beyond in sorted(found)]


def name_of(operator: str) -> str:
    """Returns torch's own name of an operator as its Python function is called: "aten::mm" of "aten.mm.default"."""
    space, name, overload = operator.split(".")
    return f"{space}::{name}" + ("" if overload == "default" else f".{overload}")


def main() -> None:
    Path(sys.argv[1]).write_text("".join(line + "\n" for line in lines()))


if __name__ == "__main__":
    main()
