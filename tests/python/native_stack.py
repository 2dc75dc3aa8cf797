"""brimful's own frames between a call of its API and the program's function that it calls, as the stack has them."""

import bisect
import ctypes
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import brimful

FRAMES = 1024
SOURCES = Path(brimful.__file__).resolve().parent
INSTALLED = Path(brimful.__file__).parent.resolve()  # the same, but for a build folder of links


def own_frames():
    """Names of functions, the outermost first: the package's Python, then C++."""
    return [*python_frames(), *native_frames()]


def python_frames():
    found, frame = [], sys._getframe(1)
    while frame is not None:
        if Path(frame.f_code.co_filename).resolve().is_relative_to(SOURCES):
            found.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return found[::-1]


def native_frames():
    """Of this thread. A call of std::function's that is compiled for a lambda stands for it."""
    libc = ctypes.CDLL(None)
    addresses = (ctypes.c_void_p * FRAMES)()
    count = libc.backtrace(addresses, FRAMES)
    loaded = loaded_libraries()
    names = []
    for address in reversed(addresses[:count]):
        for path, (first, last) in loaded.items():
            if first <= address < last:
                names.append(name_in(path, address - first - 1))
    return [
        short(name) for name in names if not re.search(r"pybind11::(cpp_function|detail)::", name)
    ]


def loaded_libraries():
    """Of the package: where each begins and ends."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split()[-1]
        if path.startswith("/") and Path(path).is_relative_to(INSTALLED):
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            found[path] = min(first, found.get(path, (first, 0))[0]), last
    return found


@cache
def functions_of(path):
    """Those that it does not export too, by where they begin."""
    listed = subprocess.run(
        ["nm", "-C", "--defined-only", path], capture_output=True, text=True, check=True
    ).stdout
    parts = (line.split(" ", 2) for line in listed.splitlines())
    return sorted((int(at, 16), name) for at, kind, name in parts if kind in "tTwW")


def name_in(path, offset):
    functions = functions_of(path)
    return functions[bisect.bisect_right(functions, (offset, "~")) - 1][1]


def short(name):
    """Without arguments, template arguments and what it returns; a lambda is one of the function that has it."""
    name = name.replace("(anonymous namespace)::", "")
    if found := re.search(
        r"^std::_Function_handler<.*?, (brimful::.*\{lambda.*)>::_M_invoke", name
    ):
        name = found[1]
    in_lambda = "{lambda" in name
    name = re.split(r"::\{lambda", name)[0] if in_lambda else name
    while (shorter := re.sub(r"<[^<>]*>|\([^()]*\)", "", name)) != name:
        name = shorter
    name = re.sub(r" const$|\[.*", "", name.strip()).strip().split(" ")[-1]
    return f"a lambda in {name}" if in_lambda else name
