"""Runs clang-tidy on every source of csrc, with the flags that a build folder compiles them with.

python tools/tidy.py BUILD_FOLDER [--jobs N] [LAYER ...]

The sources of a layer are read as one file that includes them: of a source alone, torch's headers take most of
the time. LIGHT ones, without a precompiled header, get all checks; the others do without those that take longest.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
FLAG = re.compile(r"(?:-isystem |-D|-I)\S+|-std=\S+")
# Most of the time; the last three are g++'s warnings or need assert().
OFF_ON_HEAVY = (
    "performance-unnecessary-value-param",
    "bugprone-reserved-identifier",
    "bugprone-stringview-nullptr",
    "bugprone-suspicious-string-compare",
    "modernize-use-using",
    "bugprone-assert-side-effect",
    "bugprone-multiple-statement-macro",
    "bugprone-suspicious-semicolon",
)
# A class is bound by an object without a name, a destructor takes the GIL, an address is an int.
OFF_ON_BINDINGS = (
    "bugprone-exception-escape",
    "bugprone-forward-declaration-namespace",
    "bugprone-unused-raii",
    "performance-no-int-to-ptr",
)
BINDINGS_AT_ONCE = 12  # more take time out of proportion


def sources_and_flags(build: Path) -> tuple[list[Path], list[str]]:
    """The sources of csrc in the order in which they are compiled, and all flags that say what they include."""
    sources: dict[Path, None] = {}
    flags: dict[str, None] = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file = Path(entry["file"])
        unity = "Unity" in file.parts
        names = re.findall(r'^#include "(.+)"$', file.read_text(), re.M) if unity else [file]
        ours = [Path(name) for name in names if Path(name).is_relative_to(CSRC)]
        if ours:
            sources.update(dict.fromkeys(ours))
            flags.update(dict.fromkeys(FLAG.findall(entry["command"])))
    return list(sources), [part for flag in flags for part in flag.split()]


def files_to_read(sources: list[Path], light: set[Path], folder: Path) -> list[tuple[Path, bool]]:
    """Writes the files that include the sources; of each whether it is a heavy one. The longest come first."""
    folder.mkdir(exist_ok=True)
    files = []
    for layer in dict.fromkeys(source.relative_to(CSRC).parts[0] for source in sources):
        for heavy in (True, False):
            chosen = [
                source
                for source in sources
                if source.is_relative_to(CSRC / layer) and (source not in light) == heavy
            ]
            size = BINDINGS_AT_ONCE if layer == "bindings" else len(sources)
            for start in range(0, len(chosen), size):
                part = chosen[start : start + size]
                file = folder / f"{layer}_{'heavy' if heavy else 'light'}_{start // size}.cpp"
                file.write_text("".join(f'#include "{source}"\n' for source in part))
                files.append((layer == "bindings", len(part), file, heavy))
    return [(file, heavy) for _, _, file, heavy in sorted(files, reverse=True)]


def read(file: Path, heavy: bool, flags: list[str]) -> tuple[bool, str]:
    """Whether clang-tidy finds nothing, and what it prints."""
    off = ["bugprone-suspicious-include"]
    off += OFF_ON_HEAVY if heavy else ()
    off += OFF_ON_BINDINGS if file.name.startswith("bindings") else ()
    checks = ",".join(f"-{check}" for check in off)
    options = ["--quiet", f"--config-file={ROOT / '.clang-tidy'}", f"--checks={checks}"]
    done = subprocess.run(
        ["clang-tidy", *options, str(file), "--", *flags, "-ferror-limit=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # how many findings were left out
        text=True,
    )
    return done.returncode == 0, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("layers", nargs="*")
    given = parser.parse_args()
    sources, flags = sources_and_flags(given.build)
    if given.layers:
        sources = [s for s in sources if s.relative_to(CSRC).parts[0] in given.layers]
    light = {ROOT / line for line in (given.build / "light.txt").read_text().split()}
    files = files_to_read(sources, light, given.build / "tidy")
    bad = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        for good, text in pool.map(lambda item: read(*item, flags), files):
            bad += not good
            print(text or ("" if good else "clang-tidy failed without a finding\n"), end="")
    print(f"clang-tidy: {len(sources)} sources, {bad} of {len(files)} groups with findings")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
