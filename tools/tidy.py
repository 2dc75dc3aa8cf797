"""Runs clang-tidy on every source of csrc, with the flags that a build folder compiles them with.

python tools/tidy.py BUILD_FOLDER [--jobs N] [LAYER ...]

Sources of a layer are read as one file that includes them: of a source alone, torch's headers take most of the time.
The same pass finds who writes each struct (tools/check_writers.py), which is judged when all sources were read.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import check_writers
import yaml

ROOT = Path(__file__).resolve().parent.parent
FLAG = re.compile(r"(?:-isystem |-D|-I)\S+|-std=\S+")
CLANG_TIDY = Path(sys.executable).with_name("clang-tidy")
# A class is bound by an object without a name, pybind11 fails by an exception, an address is an int.
OFF_ON_BINDINGS = (
    "bugprone-exception-escape",
    "bugprone-unused-raii",
    "performance-no-int-to-ptr",
)
SOURCES_AT_ONCE = 16
ALONE = {"cuda_sim"}  # a project of its own, with functions of others' names and flags of its own


def sources_and_flags(build: Path, csrc: Path) -> tuple[list[Path], list[str]]:
    """The sources in the order in which they are compiled, and all flags that say what they include."""
    sources: dict[Path, None] = {}
    flags: dict[str, None] = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file = Path(entry["file"])
        unity = "Unity" in file.parts
        names = re.findall(r'^#include "(.+)"$', file.read_text(), re.M) if unity else [file]
        paths = [Path(name) for name in names if Path(name).is_relative_to(csrc)]
        ours = [path for path in paths if path.relative_to(csrc).parts[0] not in ALONE]
        if ours:
            sources.update(dict.fromkeys(ours))
            flags.update(dict.fromkeys(FLAG.findall(entry["command"])))
    return list(sources), [part for flag in flags for part in flag.split()]


def files_to_read(sources: list[Path], csrc: Path, folder: Path) -> list[Path]:
    """Writes the files that include the sources. The longest come first."""
    folder.mkdir(exist_ok=True)
    files = []
    for layer in dict.fromkeys(source.relative_to(csrc).parts[0] for source in sources):
        chosen = [source for source in sources if source.is_relative_to(csrc / layer)]
        for start in range(0, len(chosen), SOURCES_AT_ONCE):
            part = chosen[start : start + SOURCES_AT_ONCE]
            file = folder / f"{layer}_{start // SOURCES_AT_ONCE}.cpp"
            file.write_text("".join(f'#include "{source}"\n' for source in part))
            files.append((len(part), file))
    return [file for _, file in sorted(files, reverse=True)]


def read(file: Path, flags: list[str], config: str) -> tuple[bool, str]:
    """Whether clang-tidy finds nothing, and what it prints."""
    off = ["bugprone-suspicious-include"]
    off += OFF_ON_BINDINGS if file.name.startswith("bindings") else ()
    checks = ",".join(f"-{check}" for check in off)
    options = [
        "--quiet",
        "--experimental-custom-checks",
        f"--config={config}",
        f"--checks={checks}",
    ]
    done = subprocess.run(
        [CLANG_TIDY, *options, str(file), "--", *flags, "-ferror-limit=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # how many findings were left out
        text=True,
    )
    return done.returncode == 0, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--csrc", type=Path, default=ROOT / "csrc")
    parser.add_argument("layers", nargs="*")
    given = parser.parse_args()
    sources, flags = sources_and_flags(given.build, given.csrc)
    if given.layers:
        sources = [s for s in sources if s.relative_to(given.csrc).parts[0] in given.layers]
    files = files_to_read(sources, given.csrc, given.build / "tidy")
    config = json.dumps(check_writers.options(yaml.safe_load((ROOT / ".clang-tidy").read_text())))
    bad = 0
    writes: set[check_writers.Write] = set()
    with ThreadPoolExecutor(given.jobs) as pool:
        for good, text in pool.map(lambda file: read(file, flags, config), files):
            bad += not good
            found, findings = check_writers.writes_in(text)
            writes |= found
            print(findings or ("" if good else "clang-tidy failed without a finding\n"), end="")
    problems = [] if given.layers else check_writers.problems(writes, given.csrc)
    print("".join(f"{problem}\n" for problem in problems), end="")
    print(f"clang-tidy: {len(sources)} sources, {bad} of {len(files)} groups with findings")
    return int(bad > 0 or bool(problems))


if __name__ == "__main__":
    sys.exit(main())
