"""What an error means: which shortage, which index, which rank; and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import cast

import torch

from brimful import _C
from brimful._C import Explanation, OpRecord
from brimful._log import text_of

__all__ = ["Explanation", "OpRecord", "OpRing", "explain", "op_ring"]

_NOT_THE_USERS = [
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    "<",  # frozen modules, generated code
]


def explain(
    error: BaseException | str,
    *,
    stderr: str = "",
    free_bytes: int | None = None,
    workspace_bytes: int | None = None,
) -> Explanation:
    """Explain an exception, or the text of one, by its message and by what can be measured now.

    ``stderr`` is what was printed with it: kernels print their assertions there. ``free_bytes``, of the device before
    the call, and ``workspace_bytes``, what the call needs beside tensors, show whether a library's "not initialized" is
    an OOM in disguise; without them the device is asked, or ``op_ring`` is. An exception of this process is explained
    with what ``op_ring`` kept; the text of one from elsewhere by that text alone. The result has ``kind``,
    ``is_memory`` (``None``: not known), ``cause``, ``remedy`` and ``evidence``; ``print`` shows all of it. Raises
    ``TypeError`` for anything else.
    """
    stderr = _utf8(stderr)
    if issubclass(type(error), str):  # not isinstance, which asks a proxy for its __class__
        error = cast(str, error)
        return _C._explain(_joined(_utf8(error), stderr), [], free_bytes, workspace_bytes, False)
    if not issubclass(type(error), BaseException):
        raise TypeError(
            f"an error is an exception or its text (type: {_C._type_name(error)}); pass one of them"
        )
    found: Explanation | None = None
    for link in _causes(cast(BaseException, error)):
        types = [_NAME_OF(kind) for kind in _BASES_OF(type(link))]
        text = _joined(text_of(link), stderr)
        explanation = _C._explain(text, types, free_bytes, workspace_bytes, True)
        if explanation.kind != "other":
            return explanation
        found = found or explanation
    assert found is not None
    return found


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on; each once."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = _CAUSE_OF(link)


# Of Python itself, past what a class of the program's makes of them.
_NAME_OF = type.__dict__["__name__"].__get__
_BASES_OF = type.__dict__["__mro__"].__get__
_CAUSE_OF = BaseException.__dict__["__cause__"].__get__


def _utf8(text: str) -> str:
    return str.encode(text, "utf-8", "backslashreplace").decode()


def _joined(text: str, more: str) -> str:
    return f"{text}\n{more}" if more else text


_in_background = False


class OpRing:
    """Keeps the last 256 operators that this process began, with shapes, dtypes, lines and short indices.

    While a CUDA device is behind, it keeps all since the oldest whose indices the device has not reached, up to 4096.
    For ``explain``: a device-side assert names a later line than the one to blame. On it costs microseconds an
    operator; off, nothing. After a ``with`` that an exception ended, and after ``stop()``, the records stay; a new
    start, or a ``with`` that ended well, forgets them.
    """

    def start(self) -> None:
        """Record from here on. Raises ``ValueError`` where operators are recorded already."""
        global _in_background
        if _in_background:
            _C._stop_op_ring()
        _in_background = False
        _C._start_op_ring(_NOT_THE_USERS)

    def stop(self) -> None:
        """Record no more, and keep what there is. Again does nothing."""
        _C._stop_op_ring()

    def records(self) -> list[OpRecord]:
        """What is kept, oldest first."""
        return _C._op_ring_records()

    def index_findings(self) -> list[str]:
        """Indices out of range among them, newest first."""
        return _C._op_ring_index_findings()

    def __enter__(self) -> OpRing:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        if error is None:
            _C._clear_op_ring()


def record_in_background() -> None:
    """Record, unless the program does; its own ring takes the place of this one."""
    global _in_background
    if not _C._op_ring_is_on():
        op_ring().start()
        _in_background = True


#: ``with brimful.op_ring():``, or ``ring = brimful.op_ring(); ring.start()``.
op_ring: Callable[[], OpRing] = OpRing
