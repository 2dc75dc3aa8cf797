"""Builds brimful with CMake: one wheel of library, headers, CMake package and Python module."""

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
# `venv/bin/pip` without activating the venv: cmake and ninja are next to that Python.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def torch_folder():
    return Path(importlib.util.find_spec("torch").origin).parent


def torch_minor():
    """The "major.minor" of the torch that is installed, None without one."""
    try:
        return ".".join(importlib.metadata.version("torch").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_requirement():
    """A wheel fits only the torch minor it was built with; a source distribution fits all."""
    minor = None if "sdist" in sys.argv else torch_minor()
    return f"torch=={minor}.*" if minor else "torch>=2.11,<2.16"


def cmake(*args, **options):
    command = ["cmake", *map(str, args)]
    return subprocess.run(command, env={**os.environ, "PATH": PATH}, **options)


def cmake_options():
    """What a build and a question about it have in common."""
    nvidia = importlib.util.find_spec("nvidia")  # may be in another site-packages than torch
    return [
        *("-G", "Ninja"),
        "-UBRIMFUL_TORCH_*",  # torch may have moved since the folder was made
        f"-DCMAKE_PREFIX_PATH={torch_folder() / 'share' / 'cmake'}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DBRIMFUL_TORCH_NVIDIA={';'.join(nvidia.submodule_search_locations) if nvidia else ''}",
        f"-DBRIMFUL_CUDA={os.environ.get('BRIMFUL_CUDA') or 'ON'}",
        *shlex.split(os.environ.get("CMAKE_ARGS", "")),
    ]


def check_environment():
    """Ends a build that cannot work with one sentence; else the part of the version after "+".

    That part says which torch a wheel fits: torch2.15.cu13, or .cpu for a torch without CUDA.
    """
    if torch_minor() is None:
        sys.exit(
            "brimful is built against the torch that is installed, and there is none here: "
            "install torch, then run `pip install --no-build-isolation .`"
        )
    tools = all(shutil.which(tool, path=PATH) for tool in ("cmake", "ninja"))
    if not tools or int(setuptools.__version__.split(".")[0]) < 77:
        sys.exit(
            "brimful is built with tools that are not all here: run "
            "`pip install -U setuptools wheel cmake ninja`, then build again"
        )
    with tempfile.TemporaryDirectory() as folder:
        where = ("-S", ROOT / "cmake" / "ask", "-B", folder)
        done = cmake(*where, *cmake_options(), capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr.strip())
        answers = {path.name: path.read_text() for path in (Path(folder) / "answers").iterdir()}
    if answers["cuda_refusal"]:
        sys.exit(answers["cuda_refusal"])
    return "+" + answers["local_version"]


class CMakeBuild(build_ext):
    """Treats what `cmake --install` puts under brimful/ as one extension."""

    def finalize_options(self):
        super().finalize_options()
        # Kept between builds, shared with `make build`, and of one torch minor and one Python only.
        tag = f"torch-{torch_minor()}-{sys.implementation.cache_tag}"
        self.build_temp = str(ROOT / os.environ.get("BRIMFUL_BUILD", f"build/{tag}"))

    def build_extension(self, ext):
        jobs = self.parallel or os.environ.get("MAX_JOBS") or os.cpu_count()
        build_type = "Debug" if self.debug else "Release"
        where = ("-S", ROOT, "-B", self.build_temp)
        self.cmake(*where, f"-DCMAKE_BUILD_TYPE={build_type}", *cmake_options())
        self.cmake(
            "--build", self.build_temp, "--target", "brimful_package", "--parallel", str(jobs)
        )
        self.install(Path(self.get_ext_fullpath(ext.name)).parent)

    def copy_extensions_to_source(self):
        # `pip install -e .`: setuptools would copy _C only, without lib/, include/ and share/.
        self.install(ROOT / "python" / "brimful")

    def install(self, package):
        self.cmake("--install", self.build_temp, "--prefix", str(package.resolve()), "--strip")

    def cmake(self, *args):
        status = cmake(*args).returncode
        if status:
            sys.exit(f"brimful was not built: what CMake printed above says why (status: {status})")


BUILDS = {"dist_info", "bdist_wheel", "editable_wheel"}.intersection(sys.argv)
local_version = check_environment() if BUILDS else ""  # a source distribution fits every torch
if "sdist" in sys.argv:  # setuptools would add what an earlier list of files has
    (ROOT / "python" / "brimful.egg-info" / "SOURCES.txt").unlink(missing_ok=True)
# A fresh folder for what setuptools puts together: nothing of an earlier build slips into a wheel.
scratch = tempfile.TemporaryDirectory()
setup(
    options={"build": {"build_base": scratch.name}, "egg_info": {"tag_build": local_version}},
    ext_modules=[Extension("brimful._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    install_requires=[torch_requirement()],
)
