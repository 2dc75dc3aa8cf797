"""Lines of the C++ core go to the logger `brimful` of Python's logging."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from brimful import _C

_LEVELS = [logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR]


def connect_logging() -> None:
    """Send the core's lines to ``logging.getLogger("brimful")``; ``BRIMFUL_LOG`` sets the level of both."""
    logger = logging.getLogger("brimful")
    if os.environ.get("BRIMFUL_LOG"):
        core_level = _C._log_level()
        logger.setLevel(_LEVELS[core_level] if core_level < len(_LEVELS) else logging.CRITICAL + 1)
        if core_level <= 1 and not logging.getLogger().handlers and not logger.handlers:
            logger.addHandler(logging.StreamHandler())
    else:
        _C._set_log_level(1)  # info: whether it is shown is logging's decision
    _C._set_log_sink(lambda level, line: logger.log(_LEVELS[level], "%s", line))


@contextmanager
def unheard(what: str) -> Iterator[None]:
    """Around a probe's own work: what goes wrong in it is logged, and the program goes on. Ctrl-C passes."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # a handler of the program's
            logging.getLogger("brimful").warning("%s failed: %s", what, text_of(error))


def text_of(error: BaseException) -> str:
    """Its text, also where its class cannot say it, as UTF-8 has it and without NUL, at which C would end it."""
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:
        text = f"<unprintable {_C._type_name(error)}>"
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", r"\x00")
