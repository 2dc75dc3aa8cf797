"""Checks a wheel: what is in it, and that it works in an environment that has torch and nothing else.

python tools/check_wheel.py WHEEL WORK_FOLDER      (the Python: one whose environment has torch, pytest and CMake)
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LARGEST = 64 << 20  # bytes: what travels to a machine with a GPU (make gpu)
ROOT = Path(__file__).resolve().parent.parent
SITE = Path(sysconfig.get_path("purelib"))
DLOPEN = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(open('/proc/self/maps').read())"
SHOW = "import brimful; print(brimful.__file__, brimful.__version__, sep='\\n')"
# Of these libraries the simulated device has its own.
SIMULATED = (
    *("libcuda.so.1", "libcudart.so.13", "libcupti.so.13", "libnccl.so.2", "libnvidia-ml.so.1"),
    *("libcublas.so.13", "libcublasLt.so.13", "libcudnn.so.9", "libcufft.so.12"),
    *("libcusolver.so.12", "libcusparse.so.12", "libnvrtc.so.13"),
)
FILLS = "import torch; torch.empty(130 << 30, dtype=torch.uint8, device='cuda'); print(torch.cuda.get_device_name())"
MODULES = """
import importlib, pkgutil, brimful
for module in pkgutil.walk_packages(brimful.__path__, "brimful."):
    if "._" in module.name:
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # an adapter, and there is no trainer
        if "pip install 'brimful[" not in str(error):
            raise
"""


def fail(what: str) -> None:
    sys.exit(f"check_wheel: {what}")


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Runs a command without the shell's Python and library paths; its output is shown only if it fails."""
    hidden = ("PYTHONPATH", "LD_LIBRARY_PATH")
    shell = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(part) for part in command],
        env={**shell, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
        cwd=cwd,
    )
    if done.returncode:
        fail(f"{' '.join(map(str, command))} failed\n{done.stdout}")
    return done.stdout


def simulated_device(version: str) -> set[str]:
    """Its files, in a wheel for a torch for CUDA: "0.1.0+torch2.15.cu13"."""
    torch, _, cuda = version.partition("+torch")[2].rpartition(".")
    if cuda == "cpu":
        return set()
    own = {"guard", "run.py", "README.md", "sim_cuda.h", "libsim_cuda_operators.so"}
    return {
        f"brimful/cuda_sim/{name}" for name in (*SIMULATED, *own, f"libsim_cuda_values-{torch}.so")
    }


def expected_members(info: str) -> set[str]:
    """What a user of Python, of type checkers, of CMake and of the licences looks for."""
    python = ROOT / "python"
    kinds = ("*.py", "*.pyi", "py.typed")
    sources = [path for kind in kinds for path in (python / "brimful").rglob(kind)]
    include = ROOT / "csrc" / "include"
    headers = [path.relative_to(include).as_posix() for path in include.rglob("*.h")]
    cmake = ("Config", "ConfigVersion", "Targets", "Targets-release")
    licenses = ["LICENSE", *(f"licenses/{path.name}" for path in ROOT.glob("licenses/*.txt"))]
    return {
        *(path.relative_to(python).as_posix() for path in sources),
        *(f"brimful/include/{header}" for header in [*headers, "brimful/version.h"]),
        *(f"brimful/share/cmake/brimful/brimful{part}.cmake" for part in cmake),
        "brimful/share/cmake/brimful/torch.cmake",
        "brimful/lib/libbrimful.so",
        f"brimful/_C{sysconfig.get_config_var('EXT_SUFFIX')}",
        "brimful/_build_info.py",
        *(f"{info}/licenses/{path}" for path in licenses),
        *(f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")),
        f"{info}/top_level.txt",
    }


def check_contents(wheel: Path) -> None:
    if wheel.stat().st_size > LARGEST:
        fail(f"it is too large (bytes: {wheel.stat().st_size}, at most: {LARGEST})")
    name, version, *_, platform = wheel.stem.split("-")
    if "manylinux" not in platform or "+torch" not in version:
        fail(f"the name tells no manylinux or no torch (wheel: {wheel.name})")
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if not name.endswith("/")}
    expected = expected_members(f"{name}-{version}.dist-info") | simulated_device(version)
    if found != expected:
        fail(
            f"its files are not the package's (missing: {sorted(expected - found)}, "
            f"too many: {sorted(found - expected)})"
        )


def check_library(library: Path) -> None:
    """Stripped, and looking for others only beside itself."""
    text = run("readelf", "--wide", "--sections", "--dynamic", library, cwd=ROOT)
    if ".symtab" in text:
        fail(f"it is not stripped (library: {library.name})")
    (path,) = (line for line in text.splitlines() if "(RUNPATH)" in line)
    folders = path.partition("[")[2].rstrip("]").split(":")
    if not all(folder.startswith("$ORIGIN") for folder in folders):
        fail(f"it looks for others in a folder of this machine (library: {library.name}, {path})")


def check_loading(python: Path, library: Path, work: Path) -> None:
    """Before any torch: all others are found, and the system's CUDA runtime is not taken for torch's."""
    loaded = set(run(python, "-c", DLOPEN, library, cwd=work).split())
    for path in loaded:
        if "/libcudart" in path and not Path(path).resolve().is_relative_to(SITE.resolve()):
            fail(f"it loads another CUDA runtime than torch's (path: {path})")


def check_simulated_device(python: Path, work: Path) -> None:
    """It finds its own libraries and this torch's."""
    simulate = [python, "-m", "brimful", "simulate", "--device", "h200", "--", python]
    said = run(*simulate, "-W", "ignore", "-c", FILLS, cwd=work).splitlines()
    if "NVIDIA H200" not in said:
        fail(f"its simulated device is another one (expected: NVIDIA H200, said: {said})")


def required(*names: str) -> list[metadata.Distribution]:
    """What pip has installed here for these distributions, with all that they require."""
    found: dict[tuple[str, str], metadata.Distribution] = {}
    left = [(name, "") for name in names]
    while left:
        name, extra = left.pop()
        if (canonicalize_name(name), extra) in found:
            continue
        of_name = metadata.distribution(name)
        found[canonicalize_name(name), extra] = of_name
        for requirement in map(Requirement, of_name.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                left += [(requirement.name, part) for part in ("", *requirement.extras)]
    return list({of_name.name: of_name for of_name in found.values()}.values())


def link(distributions: list[metadata.Distribution], folder: Path) -> None:
    """Puts links to their files in a folder, as a download of a gigabyte would put the files."""
    for distribution in distributions:
        for file in distribution.files or ():
            if ".." in file.parts:  # a command
                continue
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(distribution.locate_file(file))


def make_environment(folder: Path) -> Path:
    """A virtual environment of torch and what it requires; its Python."""
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=ROOT)
    (site,) = folder.glob("lib/python3*/site-packages")
    link(required("torch"), site)
    return folder / "bin" / "python"


def make_test_tools(folder: Path) -> Path:
    """What runs the tests there, in a folder of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    link(required("pytest", "pytest-timeout", "numpy", "pyyaml"), folder)
    return folder


def main() -> None:
    wheel, work = (Path(argument).resolve() for argument in sys.argv[1:3])
    check_contents(wheel)
    python = make_environment(work / "environment")
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--no-index", wheel, cwd=work)  # with its requirements
    run(python, "-c", MODULES, cwd=work)

    path, version = run(python, "-W", "ignore", "-c", SHOW, cwd=work).splitlines()
    if version != wheel.stem.split("-")[1]:
        fail(f"brimful.__version__ is not the wheel's (version: {version}, wheel: {wheel.name})")
    package = Path(path).parent
    if not package.is_relative_to(work):
        fail(f"brimful is not imported from the environment (path: {package})")
    for library in (
        package / "lib" / "libbrimful.so",
        *package.glob("_C.*.so"),
        *package.glob("cuda_sim/lib*"),
    ):
        check_library(library)
    if (package / "cuda_sim").exists():
        check_simulated_device(python, work)
    check_loading(python, package / "lib" / "libbrimful.so", work)

    tools = make_test_tools(work / "test-tools")
    pytest = [python, "-m", "pytest", "-m", "smoke", "-p", "no:cacheprovider"]
    smoke = run(*pytest, cwd=ROOT, PYTHONPATH=str(tools))
    print(smoke.splitlines()[-1])
    consumer = ROOT / "tests" / "consumer" / "run.py"
    print(run(sys.executable, consumer, work / "consumer", wheel, cwd=work), end="")
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, right")


if __name__ == "__main__":
    main()
