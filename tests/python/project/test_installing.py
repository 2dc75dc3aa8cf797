"""Installing by the README's own lines where no CUDA toolkit is: what a build lacks, it says before it compiles."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

from check_wheel import link, required  # noqa: E402

README = (ROOT / "README.md").read_text()
SECTION = re.search(r"^## Install\n(.*?)^## ", README, re.M | re.S)[1]
LINES = [
    line
    for block in re.findall(r"```\w*\n(.*?)```", SECTION, re.S)
    for line in block.split("\n")
    if line
]
MINOR = ".".join(torch.__version__.split(".")[:2])
CUDA = torch.version.cuda
for_cuda = pytest.mark.skipif(CUDA is None, reason="this torch is built without CUDA")
# What a build reads.
NEEDED = [
    *("setup.py", "pyproject.toml", "README.md", "LICENSE", "licenses", "cmake", "csrc", "python"),
    *("CMakeLists.txt", "CMakePresets.json", "MANIFEST.in"),
]
COMPILES = "a compile would begin here"


def folders_of_toolkits():
    """Where CMake would find a toolkit's headers; a test has them ignored."""
    folders = [os.environ.get("CUDA_HOME", "") + "/include", "/usr/local/cuda/include"]
    folders += ["/usr/local/include", "/usr/include"]
    return [folder for folder in folders if os.path.exists(f"{folder}/crt/host_config.h")]


HIDE = f"-DCMAKE_IGNORE_PATH={';'.join(folders_of_toolkits())}"


class Box:
    """A checkout beside a virtual environment with torch, as pip installs it, and no CUDA toolkit."""

    def __init__(self, folder):
        self.folder, self.bin = folder, folder / "venv" / "bin"
        self.checkout = folder / "checkout"
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "--", *NEEDED],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in listed.stdout.split():
            if (ROOT / name).is_file():
                (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.checkout / name)
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        (self.site,) = folder.glob("venv/lib/python3*/site-packages")
        link([part for part in required("torch") if part.name != "setuptools"], self.site)
        # Configuring needs a ninja that works; the build of brimful ends as it begins.
        stand_in = folder / "ninja"
        stand_in.write_text(
            f'#!/bin/sh\ncase " $* " in *" brimful_package "*) echo "{COMPILES}"; exit 1;; esac\n'
            f'exec "{self.bin}/ninja" "$@"\n'
        )
        stand_in.chmod(0o755)

    def run(self, line, cmake_args="", **environment):
        """What a line of a shell prints, and its status."""
        shell = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("BRIMFUL_", "CUDA", "PYTHON", "CMAKE_"))
        }
        shell["PATH"] = f"{self.bin}:/usr/local/bin:/usr/bin:/bin"
        shell["BRIMFUL_BUILD"] = str(self.folder / "build")
        shell["CMAKE_ARGS"] = f"'{HIDE}' -DCMAKE_MAKE_PROGRAM={self.folder}/ninja {cmake_args}"
        done = subprocess.run(
            ["sh", "-c", line],
            env={**shell, **environment},
            cwd=self.checkout,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
        )
        return done.stdout, done.returncode

    def version(self, **environment):
        """The version that pip would name a wheel by."""
        program = (
            "import sys; from setuptools import build_meta; "
            "print(build_meta.prepare_metadata_for_build_wheel(sys.argv[1]))"
        )
        text, status = self.run(f'python -c "{program}" "$(mktemp -d)"', **environment)
        assert status == 0, text
        return re.fullmatch(r"brimful-(.*)\.dist-info", text.split("\n")[-2])[1]

    def built_with(self):
        found = {}
        path = self.folder / "build" / "python" / "brimful" / "_build_info.py"
        exec(path.read_text(), found)
        return found


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    folder = tmp_path_factory.mktemp("box")
    pip = [sys.executable, "-m", "pip", "--retries", "1", "download", "--quiet", "--no-deps"]
    if subprocess.run([*pip, "--dest", folder / "wheel", "wheel"], timeout=100).returncode:
        pytest.skip("pip reaches no package index here")
    box = Box(folder)
    assert all(line.startswith("pip install ") for line in LINES)
    assert LINES[-1].endswith(" .")
    for line in LINES[:-1]:
        text, status = box.run(line)
        assert status == 0, text
    return box


@for_cuda
@pytest.mark.timeout(300)
def test_a_build_without_cudas_headers_ends_with_the_command_that_brings_them(box):
    text, status = box.run(LINES[-1])
    assert status != 0
    assert "Traceback" not in text and "CMake" not in text, text
    assert re.search(r"\[1 lines? of output\]", text), text
    sentence = re.search(r"^ *(torch .* is built for CUDA .*)$", text, re.M)
    assert sentence, text
    assert "(missing: crt/host_config.h" in sentence[1] and "BRIMFUL_CUDA=OFF" in sentence[1]
    (command,) = re.findall(r"run `(pip install --no-deps [^`]*)`", sentence[1])
    assert f"nvidia-cuda-crt=={CUDA}.*" in shlex.join(shlex.split(command))
    try:
        text, status = box.run(command)
        assert status == 0, text
        text, status = box.run(LINES[-1])
        assert status != 0 and COMPILES in text and "Traceback" not in text, text
        built = box.built_with()
        assert built["cuda"] and built["version"].endswith(f"+torch{MINOR}.cu{CUDA.split('.')[0]}")
        assert box.version() == built["version"]
    finally:
        box.run("pip uninstall --yes nvidia-cuda-crt nvidia-cuda-cccl")


@for_cuda
@pytest.mark.timeout(300)
def test_a_build_that_is_asked_to_leaves_cuda_out_and_says_so(box):
    text, status = box.run(LINES[-1], BRIMFUL_CUDA="OFF")
    assert status != 0 and COMPILES in text, text
    built = box.built_with()
    assert not built["cuda"] and built["torch_cuda"] == CUDA.split(".")[0]
    assert built["version"].endswith(f"+torch{MINOR}.cu{CUDA.split('.')[0]}.cpu")
    assert box.version(BRIMFUL_CUDA="OFF") == built["version"]
    assert box.version(cmake_args="-DBRIMFUL_CUDA=OFF") == built["version"]


@pytest.mark.timeout(300)
def test_a_torch_without_cuda_needs_no_headers_of_it(box):
    """PyPI has no such torch for this machine: links to the one here, without what makes it one for CUDA."""
    site = box.folder / "cpu"
    shutil.copytree(
        box.site / "torch",
        site / "torch",
        symlinks=True,
        ignore=shutil.ignore_patterns("libtorch_cuda*", "libc10_cuda*", "version.py"),
    )
    version = (box.site / "torch" / "version.py").read_text()
    (site / "torch" / "version.py").write_text(re.sub("(?m)^cuda.*", "cuda = None", version))
    for path in box.site.glob("torch-*.dist-info"):
        (site / path.name).symlink_to(path)
    text, status = box.run(LINES[-1], PYTHONPATH=str(site))
    assert status != 0 and COMPILES in text, text
    built = box.built_with()
    assert not built["cuda"] and built["torch_cuda"] == ""
    assert built["version"].endswith(f"+torch{MINOR}.cpu")
    assert box.version(PYTHONPATH=str(site)) == built["version"]


@for_cuda
@pytest.mark.parametrize(("preset", "status"), [((), 1), (("--preset", "dev"), 0)])
def test_a_build_by_cmake_says_the_same(box, preset, status):
    """CMake alone ends with the sentence; what make builds, by a preset, goes on without CUDA and warns."""
    options = [
        *("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={box.bin}/ninja", *preset, HIDE),
        *("-DBRIMFUL_TESTS=OFF", "-DBRIMFUL_BENCHMARKS=OFF"),
        f"-DCMAKE_PREFIX_PATH={box.site}/torch/share/cmake",
        *(f"-DPython_EXECUTABLE={box.bin}/python", "--log-level=WARNING"),
    ]
    text, ended = box.run(f"cmake -S . -B {box.folder}/cmake-{status} {shlex.join(options)}")
    assert ended == status, text
    assert re.search(
        r"^ .*torch .* is built for CUDA .*: run `pip install .*` and build", text, re.M
    ), text
    assert ("building without CUDA" in text) == (status == 0)


# --- The question that setup.py and tools/setup.sh ask --------------------------------------------------
PATHS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
CMAKE, NINJA = (shutil.which(tool, path=PATHS) for tool in ("cmake", "ninja"))
NVIDIA = "site/nvidia"
HEADERS = ("crt/host_config.h", "nv/target", "cuda_runtime_api.h")


@pytest.fixture
def ask(tmp_path):
    """ask(cuda, files, options): the answers beside a made-up torch for that CUDA and these files."""
    if not (CMAKE and NINJA):
        pytest.skip("CMake or Ninja is missing here")

    def touch(name, text=""):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def ask(cuda, *files, **options):
        touch("site/torch/share/cmake/Torch/TorchConfig.cmake")
        touch("site/torch/lib/libtorch_cuda.so")
        numbers = zip(("MAJOR", "MINOR", "PATCH"), (2, 15, 1), strict=True)
        lines = [f"#define TORCH_VERSION_{name} {number}\n" for name, number in numbers]
        touch("site/torch/include/torch/headeronly/version.h", "".join(lines))
        if cuda:
            touch("site/torch/version.py", f"cuda: Optional[str] = '{cuda}'\n")
            requires = (
                f"Requires-Dist: nvidia-nccl-cu{cuda[:2]}==2.30.7; platform_system == 'Linux'"
            )
            touch("site/torch-2.15.1.dist-info/METADATA", requires)
        for name in files:
            touch(name)
        build = tmp_path / "ask"
        done = subprocess.run(
            [
                *(CMAKE, "-S", ROOT / "cmake" / "ask", "-B", build),
                *("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={NINJA}", HIDE),
                f"-DCMAKE_PREFIX_PATH={tmp_path}/site/torch/share/cmake",
                *(f"-D{name}={value}" for name, value in options.items()),
            ],
            env={name: value for name, value in os.environ.items() if name != "CUDA_HOME"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return {path.name: path.read_text() for path in (build / "answers").iterdir()}

    return ask


CUDART = f"{NVIDIA}/cu13/lib/libcudart.so.13"
NCCL = f"{NVIDIA}/nccl/include/nccl.h"


@pytest.mark.parametrize(
    ("cuda", "there", "packages"),
    [
        (
            "13.2",
            [
                NCCL,
                CUDART,
                f"{NVIDIA}/cu13/include/nv/target",
                f"{NVIDIA}/cu13/include/cuda_runtime_api.h",
            ],
            "nvidia-cuda-crt==13.2.*",
        ),
        (
            "13.0",
            [NCCL, CUDART, f"{NVIDIA}/cu13/include/cuda_runtime_api.h"],
            "nvidia-cuda-crt==13.0.* nvidia-cuda-cccl==13.0.*",
        ),
        (
            "13.2",
            [],
            "nvidia-cuda-crt==13.2.* nvidia-cuda-cccl==13.2.* nvidia-cuda-runtime==13.2.* nvidia-nccl-cu13==2.30.7",
        ),
        (
            "13.2",
            [CUDART, *(f"{NVIDIA}/cu13/include/{name}" for name in HEADERS)],
            "nvidia-nccl-cu13==2.30.7",
        ),
        (
            "12.8",
            [
                NCCL,
                f"{NVIDIA}/cuda_runtime/include/cuda_runtime_api.h",
                f"{NVIDIA}/cuda_runtime/lib/libcudart.so.12",
            ],
            "nvidia-cuda-nvcc-cu12==12.8.* nvidia-cuda-cccl-cu12==12.8.*",
        ),
    ],
)
def test_what_is_missing_is_named_by_the_packages_that_have_it(ask, cuda, there, packages):
    answers = ask(cuda, *there)
    assert answers["cuda_packages"].split() == packages.split()
    quoted = " ".join(f"'{package}'" for package in packages.split())
    assert f"CUDA {cuda}, and" in answers["cuda_refusal"]
    assert f": run `pip install --no-deps {quoted}` and build again, or" in answers["cuda_refusal"]
    assert not answers["cuda_warning"]


def test_without_pip_the_remedy_is_a_toolkit(ask):
    answers = ask(None)  # a libtorch
    assert not answers["cuda_packages"]
    assert answers["cuda_refusal"].startswith("torch 2.15.1 is built for CUDA, and what")
    assert "install CUDA's toolkit" in answers["cuda_refusal"]
    assert "pip" not in answers["cuda_refusal"]


WHEELS_OF_12 = [
    *("cuda_nvcc/include/crt/host_config.h", "cuda_cccl/include/nv/target"),
    *("cuda_runtime/include/cuda_runtime_api.h", "cuda_runtime/lib/libcudart.so.12"),
]


@pytest.mark.parametrize(
    ("cuda", "there"),
    [
        ("13.2", [NCCL, CUDART, *(f"{NVIDIA}/cu13/include/{name}" for name in HEADERS)]),
        ("12.8", [NCCL, *(f"{NVIDIA}/{name}" for name in WHEELS_OF_12)]),
        # pip puts them into the virtual environment, and torch is outside of it
        ("13.2", [NCCL, CUDART, *(f"venv/nvidia/cu13/include/{name}" for name in HEADERS)]),
    ],
)
def test_the_headers_are_found_where_pip_puts_them(ask, tmp_path, cuda, there):
    answers = ask(cuda, *there, BRIMFUL_TORCH_NVIDIA=tmp_path / "venv" / "nvidia")
    assert answers.pop("local_version") == f"torch2.15.cu{cuda[:2]}"
    assert not any(answers.values())


@pytest.mark.parametrize("value", ["AUTO", "auto"])
def test_a_build_may_go_on_without_cuda_with_a_warning(ask, value):
    refusal = ask("13.2")["cuda_refusal"]
    answers = ask("13.2", BRIMFUL_CUDA=value)
    assert answers["cuda_warning"] == f"building without CUDA: {refusal}"
    assert answers["cuda_packages"] and not answers["cuda_refusal"]
    assert answers["local_version"] == "torch2.15.cu13.cpu"


@pytest.mark.parametrize("value", ["OFF", "0", "no"])
def test_nothing_is_missing_where_cuda_is_not_wanted(ask, value):
    answers = ask("13.2", BRIMFUL_CUDA=value)
    assert answers.pop("local_version") == "torch2.15.cu13.cpu"
    assert not any(answers.values())


def test_another_value_is_named(ask):
    refusal = ask("13.2", BRIMFUL_CUDA="maybe")["cuda_refusal"]
    assert refusal == "BRIMFUL_CUDA is none of ON, AUTO and OFF (value: maybe)"
