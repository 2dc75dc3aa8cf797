"""`brimful run script.py`: a program as it is, with its memory watched and its errors explained on stderr."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType

import torch

from brimful import _C, memory
from brimful._log import unheard
from brimful.errors import explain, record_in_background
from brimful.leaks import LeakFinder
from brimful.memory import _tracking

_LARGEST = 3
_NO_PROGRAM = 2  # the status that Python has then


class _NoProgram(Exception):
    """There is nothing to run."""


def main(arguments: Sequence[str]) -> int:
    """Run a program as ``python`` would, and report when it ends; returns its exit status."""
    options = _parse(arguments)
    try:
        code, module = _load(options.program, options.is_module)
    except _NoProgram as missing:
        print(f"brimful run: {missing}", file=sys.stderr)
        return _NO_PROGRAM
    except Exception as error:  # a syntax error, or one of a package on the way to the module
        own = _outside(error.__traceback__)
        sys.excepthook(type(error), BaseException.with_traceback(error, own), own)
        return 1
    sys.argv = [str(module.__file__) if options.is_module else options.program, *options.arguments]
    sys.modules["__main__"] = module
    _mark_warnings()
    if options.op_ring:
        record_in_background()
    elif options.op_ring is None:
        torch.cuda._lazy_call(record_in_background)  # type: ignore[no-untyped-call]
    page, recording = _OomPage(options), _Recording(options.record)
    _tracking.start(None, page.path, every_module=options.modules, give_way=recording.end)
    page.begin()
    recording.begin()
    with LeakFinder() as finder:
        try:
            exec(code, module.__dict__)
        except Exception as error:
            page.is_of_an_error = True
            own = _own_part(error, code)
            _tracking.add_oom_note(error)
            sys.excepthook(type(error), BaseException.with_traceback(error, own), own)
            with unheard("the explanation of the error"):
                _say(str(explain(error)))
            return 1
        except BaseException as error:  # Ctrl-C, sys.exit: Python ends by them
            raise BaseException.with_traceback(error, _own_part(error, code)) from error.__cause__
        finally:
            with unheard("the report of the memory"):
                _say(_report(finder))
            recording.end()
            page.settle()
            memory.stop_tracking()
            page.end()
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="brimful run",
        description="Runs a Python program as it is. On stderr: lines whose memory grows, what the peak was made of, "
        "and what an error means. stdout and exit status are the program's.",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="program is a module")
    parser.add_argument(
        "--op-ring",
        action=argparse.BooleanOptionalAction,
        help="record the last operators, to explain errors of a device; costs microseconds per operator (default: from "
        "the moment that CUDA is in use)",
    )
    parser.add_argument(
        "--modules",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="show the peak by module too; costs microseconds per forward of a module",
    )
    parser.add_argument(
        "--oom-page",
        metavar="FOLDER",
        help="folder for the page of the last out-of-memory error, oom-PID.html or oom-rankR-PID.html (default: the "
        "file that BRIMFUL_OOM_REPORT names, else the working directory)",
    )
    parser.add_argument(
        "--no-oom-page", dest="oom_page", action="store_const", const="", help="write none"
    )
    parser.add_argument(
        "--record",
        metavar="FILE",
        help="record memory over time, for `brimful report`; each rank has its file",
    )
    parser.add_argument("program", help="a file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own")
    return parser.parse_args(arguments)


class _OomPage:
    """The page of the last out-of-memory error."""

    def __init__(self, options: argparse.Namespace) -> None:
        rank = os.environ.get("RANK")
        name = f"oom-{f'rank{rank}-' if rank else ''}{os.getpid()}.html"
        asked = None if options.oom_page is not None else os.environ.get("BRIMFUL_OOM_REPORT")
        self._is_asked_for = bool(asked)
        self.path = (
            None
            if options.oom_page == ""
            else os.path.abspath(asked or os.path.join(options.oom_page or ".", name))
        )
        self._before = self._written()
        self.is_of_an_error = False

    def begin(self) -> None:
        _C._set_oom_report_path(self.path)

    def settle(self) -> None:
        """Before tracking stops: an error that a sizer handled is not written by itself where the program ends well."""
        if not (self.is_of_an_error or self._is_asked_for):
            _C._set_oom_report_path(None)

    def end(self) -> None:
        if self._written() != self._before:
            _say(f"what filled the memory where it ran out: {self.path}")

    def _written(self) -> int | None:
        try:
            return os.stat(self.path).st_mtime_ns if self.path else None
        except OSError:
            return None


class _Recording:
    """What memory did, until the program ends or records by itself."""

    def __init__(self, path: str | None) -> None:
        self._path = path and os.path.abspath(path)
        self._is_on = False

    def begin(self) -> None:
        if self._path:
            memory.start_recording()
            self._is_on = True

    def end(self) -> None:
        if self._is_on and self._path and memory.recording():  # not in a forked child
            written = _C._save_recording_anywhere(memory.stop_recording(), os.fsencode(self._path))
            _say(f"memory over time: brimful report {shlex.quote(written)}")
        self._is_on = False


def _load(program: str, is_module: bool) -> tuple[CodeType, ModuleType]:
    module = ModuleType("__main__")
    if is_module:
        return _load_module(program, module)
    path = os.path.abspath(program)  # as Python does
    if os.path.isdir(path):
        sys.path[0] = path
        path = os.path.join(path, "__main__.py")
    else:
        sys.path[0] = os.path.dirname(path)
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        raise _NoProgram(f"the program cannot be read (path: {path}): {error.strerror}") from None
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    return compile(source, path, "exec", dont_inherit=True), module


def _load_module(program: str, module: ModuleType) -> tuple[CodeType, ModuleType]:
    sys.path[0] = os.getcwd()
    try:
        spec = importlib.util.find_spec(program)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{program}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{program}.".startswith(f"{error.name}."):
            raise  # of what the package imports
        spec = None
    except ValueError:  # a name such as "..x"
        spec = None
    found = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec else None
    if spec is None or found is None:
        raise _NoProgram(f"there is no such module (name: {program})")
    module.__file__, module.__spec__, module.__package__ = spec.origin, spec, spec.parent
    module.__loader__ = spec.loader
    return found, module


def _outside(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames of this file and of the import system, with which it begins."""
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == __file__
        or trace.tb_frame.f_code.co_filename.startswith("<frozen importlib")
        or trace.tb_frame.f_globals.get("__name__") == "importlib.util"
    ):
        trace = trace.tb_next
    return trace


def _own_part(error: BaseException, code: CodeType) -> TracebackType | None:
    """The traceback from the program's first line on."""
    own = error.__traceback__
    while own is not None and own.tb_frame.f_code is not code:
        own = own.tb_next
    return own


def _report(finder: LeakFinder) -> str:
    peak = memory.peak_by_category()
    parts = sorted(peak.by_category.items(), key=lambda part: -part[1])
    uses = ", ".join(f"{name} {_C._format_bytes(size)}" for name, size in parts if size > 0)
    lines = [f"peak {_C._format_bytes(peak.bytes)} (step {peak.step}, {peak.phase}): {uses}"]
    by_line: dict[str, Counter[str]] = {}  # of whatever module and category
    for use in peak.by_site:
        by_line.setdefault(str(use.site), Counter())[use.category] += use.bytes
    for site, kinds in sorted(by_line.items(), key=lambda part: -part[1].total())[:_LARGEST]:
        names = ", ".join(name for name, _ in kinds.most_common())
        lines.append(f"  {_C._format_bytes(kinds.total())} of {names}: {site}")
    modules = {name: sum(use.values()) for name, use in peak.by_module.items() if name}
    lines += [
        f"  {_C._format_bytes(size)} in module {name}"
        for name, size in sorted(modules.items(), key=lambda part: -part[1])[:_LARGEST]
    ]
    lines += [f"memory grew: {leak}" for leak in finder.leaks]
    return "\n".join(lines)


def _marked(text: str) -> str:
    rank = os.environ.get("RANK")
    mark = f"brimful{f' (rank {rank})' if rank else ''}: "
    return "\n".join(mark + line for line in text.splitlines())


def _say(text: str) -> None:
    with suppress(Exception):  # what the program has made of stderr
        sys.stderr.write(_marked(text) + "\n")  # at once: other ranks write there too
        sys.stderr.flush()


def _mark_warnings() -> None:
    """Of this package, where the program sets up no logging."""

    class Marked(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            text = super().format(record)
            return _marked(text) if record.name == "brimful" else text

    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Marked())
