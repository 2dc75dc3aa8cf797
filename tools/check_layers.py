"""Checks that includes only go down the layers, and the few rules that keep a layer what it is.

base -> memory -> step -> ladder -> { sizer | reducer | probes } -> { sharded | pipeline | launch } -> bindings

The simulated device is no layer: a project of its own (ALONE), which other projects can take as it is.
Folders of a layer have an order of their own (FOLDERS; "" is the files beside them): each may use lower levels.
A public header belongs to the folder that has a source of its name. What is in the folders stays small: check_sizes.py.
"""

import re
import sys
from pathlib import Path

import check_sizes

ROOT = Path(__file__).resolve().parent.parent
LEVELS = {
    "base": 0,
    "memory": 1,
    "step": 2,
    "ladder": 3,
    "sizer": 4,
    "reducer": 4,
    "probes": 4,
    "sharded": 5,
    "pipeline": 5,
    "launch": 5,
    "bindings": 6,
}
ALONE = "cuda_sim/"
FOLDERS = {
    "pipeline": {"schedule": 0, "backward": 0, "transport": 0, "executor": 1, "": 2},
    "probes": {
        **{"host": 0, "leak": 0, "page": 0},
        **{"gpu": 1, "oom": 1, "report": 1},
        **{"explain": 2, "monitor": 2},
    },
}
#: Pages and pictures are files beside the sources, which `brimful_asset` puts into the library.
MARKUP = re.compile(
    r'"\s*</?(a|b|body|div|g|head|html|i|p|path|pre|rect|script|span|style|svg|t[abdhr]\w*|title)\b'
)
#: What reads or writes numbers as the process's locale has them: "2.50 GiB" would be 2 beside a decimal comma.
BY_LOCALE = re.compile(
    r"\b(strto(d|f|ld)|sto(d|f|ld)|atof|setlocale)\s*\(|std::o?stringstream\b"
    r'|printf\(.*"[^"]*%[-+ #0-9.*]*[aefgAEFG]'
)
WITHOUT_LOCALE = "base/text_stream.h"
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')

# Foreign headers, and the only places in csrc/ that may include them.
ONLY_IN = [
    (r"torch/torch\.h|torch/extension\.h|torch/all\.h", (), "too heavy: include what is used"),
    (r"pybind11|Python\.h|torch/csrc/(utils/pybind|python_headers)", ("bindings/",), "is Python"),
    (r"nlohmann/", ("base/", "probes/"), "is for base/json.h and what probes write"),
    (r"torch/(version|headeronly/version)\.h", ("base/torch_compat.h",), "is torch_compat.h's"),
    # Its functions may be bound to torch's copy of them, of another compiler; with torch 2.11 one of these crashes.
    (r"(experimental/)?filesystem$", (), "may be bound to torch's own copy: call POSIX"),
]


def layer(path: str) -> str | None:
    """The layer of a path below csrc/ or of an include; None for a foreign one."""
    path = path.removeprefix("include/")
    first = path.removeprefix("brimful/").split("/")[0]
    if first in LEVELS:
        return first
    # <brimful/error.h> and its like are base; the umbrella header may include all.
    return "base" if path.startswith("brimful/") and path != "brimful/brimful.h" else None


def folder(path: str) -> str | None:
    """The folder within a layer; None where there is no order, or no source has a public header's name."""
    inner = path.removeprefix("include/").removeprefix("brimful/")
    first, _, rest = inner.partition("/")
    if first not in FOLDERS or not rest:
        return None
    if inner == path:
        return rest.rpartition("/")[0]
    sources = (ROOT / "csrc" / first).rglob(Path(rest).stem + ".cpp")
    return next((folder(s.relative_to(ROOT / "csrc").as_posix()) for s in sources), None)


def check(file: Path) -> list[str]:
    name = file.relative_to(ROOT / "csrc").as_posix()
    own, problems = layer(name), []
    public = name.startswith("include/")
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if MARKUP.search(line.partition("//")[0]):
            problems.append(f"csrc/{name}:{number}: markup belongs into an asset (sources.cmake)")
        if BY_LOCALE.search(line.partition("//")[0]) and name != WITHOUT_LOCALE:
            problems.append(
                f"csrc/{name}:{number}: depends on the locale: use base/format.h, base/text_stream.h"
            )
        if not (found := INCLUDE.match(line)):
            continue
        quote, path = found.groups()
        for pattern, places, why in ONLY_IN:
            if re.match(pattern, path) and not name.startswith(places or ("-",)):
                problems.append(f"csrc/{name}:{number}: {path} {why}")
        other = layer(path) if "/" in path else None  # <memory> is the standard library's
        if public and quote == '"':
            problems.append(f"csrc/{name}:{number}: a public header includes the private {path}")
        if own and other and own != other and LEVELS[other] >= LEVELS[own]:
            problems.append(f"csrc/{name}:{number}: {own} may not include {other} ({path})")
        if name.startswith(ALONE) != (ALONE in path) and (
            ALONE in path or other or "../../" in path
        ):
            problems.append(f"csrc/{name}:{number}: {ALONE[:-1]} is a project of its own ({path})")
        here, there = folder(name), folder(path)
        if own == other and None not in (here, there) and here != there:
            levels = FOLDERS[own]
            if levels[there] >= levels[here]:
                problems.append(f"csrc/{name}:{number}: {own}/{here} may not include {path}")
    return problems


def main() -> int:
    files = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cpp"})
    problems = [problem for file in files for problem in check(file)] + check_sizes.problems()
    print(*problems, f"layers: {len(files)} files, {len(problems)} problems", sep="\n")
    return 1 if problems or not files else 0


if __name__ == "__main__":
    sys.exit(main())
