"""Random operations that give the same for each row, so that a row's loss does not depend on the rows beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from brimful import _random

_KEEPING = ("bernoulli", "exponential", "geometric")
_ANYWHERE = (
    "rand",
    "uniform",
    "normal",
    "randn",
    "log_normal",
    "cauchy",
)  # zero would hide what it multiplies


class DrawsOff(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dropout keeps everything, and what else is drawn is a constant."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and (value := _constant(name, args)) is not None:
            result.fill_(value)
        return result


def _constant(name: str, args: Any) -> float | None:
    plain = name.rstrip("_").removesuffix("_like")
    if plain in _KEEPING:
        return 1.0
    if plain in ("randint", "random"):
        numbers = [arg for arg in args if isinstance(arg, int)]
        return float(numbers[0]) if len(numbers) > 1 else 0.0
    return 0.5 if plain in _ANYWHERE else None


def drawn_states(device: torch.device) -> Any:
    """Of all generators that torch, Python and NumPy have by themselves."""
    states = [torch.default_generator.get_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return (
        tuple(state.numpy().tobytes() for state in states),
        *_random.marks(),
    )
