"""Random numbers of Python and NumPy, of whichever generator: a unit of work that is repeated draws the same again."""

from __future__ import annotations

import random
import sys
from typing import Any


def states() -> tuple[Any, Any]:
    """For ``set_states``. NumPy's is None where the program has not imported it."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False)


def set_states(states: tuple[Any, Any]) -> None:
    """What ``states`` has returned."""
    python, numpy = states
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)


#: What a step captures and restores.
KEEPER = (states, set_states)


def marks() -> tuple[Any, Any]:
    """Of Python and of NumPy: equal as long as nothing has been drawn from it."""
    python, numpy = states()
    return python, _hashable(numpy)


def _hashable(state: Any) -> Any:
    if isinstance(state, dict):
        return tuple((name, _hashable(value)) for name, value in state.items())
    return state.tobytes() if hasattr(state, "tobytes") else state
