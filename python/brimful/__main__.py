"""`brimful run`, `report`, `top`, `doctor`, `simulate`; `--cmake-dir`: where find_package(brimful) is to look."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import brimful

# Each is brimful.cli.<name>.main(arguments) -> exit status.
_COMMANDS = {
    "top": "a live table of the host's memory, the GPUs and their processes",
    "doctor": "is this machine fit for training?",
    "report": "a page that shows recordings of memory",
    "simulate": "a program on CUDA devices that are not there: does it fit?",
    "run": "a program as it is, its memory watched and its errors explained",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, or print what an option asks for; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _COMMANDS:
        module = importlib.import_module(f"brimful.cli.{arguments[0]}")
        return int(module.main(arguments[1:]))
    commands = "\n".join(f"  {name:8} {what}" for name, what in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="brimful",
        description=f"commands (with --help for each):\n{commands}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("command", nargs="?", choices=list(_COMMANDS), help=argparse.SUPPRESS)
    choice.add_argument("--version", action="version", version=brimful.__version__)
    choice.add_argument(
        "--cmake-dir", action="store_true", help="print the folder to add to CMAKE_PREFIX_PATH"
    )
    given = parser.parse_args(arguments)
    if given.cmake_dir:
        print(brimful.cmake_prefix_path)
    else:
        parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
