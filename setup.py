"""Builds brimful with CMake: one wheel of library, headers, CMake package and Python module."""

import importlib.metadata
import importlib.util
import os
import runpy
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


def local_version():
    """Tells which torch a wheel fits: "+torch2.15.cu13", or ".cpu" for a torch without CUDA."""
    minor = None if "sdist" in sys.argv else torch_minor()
    if minor is None:
        return ""
    cuda = runpy.run_path(torch_folder() / "version.py")["cuda"]
    return f"+torch{minor}." + (f"cu{cuda.split('.')[0]}" if cuda else "cpu")


def check_environment():
    """Ends a build that cannot work with one sentence. A source distribution needs none of this."""
    if not {"dist_info", "bdist_wheel", "editable_wheel"}.intersection(sys.argv):
        return
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


class CMakeBuild(build_ext):
    """Treats what `cmake --install` puts under brimful/ as one extension."""

    def finalize_options(self):
        super().finalize_options()
        # Kept between builds, shared with `make build`, and of one torch minor and one Python only.
        tag = f"torch-{torch_minor()}-{sys.implementation.cache_tag}"
        self.build_temp = str(ROOT / os.environ.get("BRIMFUL_BUILD", f"build/{tag}"))

    def build_extension(self, ext):
        jobs = self.parallel or os.environ.get("MAX_JOBS") or os.cpu_count()
        self.cmake(
            *("-S", ROOT, "-B", self.build_temp, "-G", "Ninja"),
            "-UBRIMFUL_TORCH_*",  # torch may have moved since the folder was made
            "-DCMAKE_BUILD_TYPE=" + ("Debug" if self.debug else "Release"),
            f"-DCMAKE_PREFIX_PATH={torch_folder() / 'share' / 'cmake'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        )
        self.cmake("--build", self.build_temp, "--target", "brimful", "_C", "--parallel", str(jobs))
        self.install(Path(self.get_ext_fullpath(ext.name)).parent)

    def copy_extensions_to_source(self):
        # `pip install -e .`: setuptools would copy _C only, without lib/, include/ and share/.
        self.install(ROOT / "python" / "brimful")

    def install(self, package):
        self.cmake("--install", self.build_temp, "--prefix", str(package.resolve()), "--strip")

    def cmake(self, *args):
        subprocess.run(["cmake", *args], check=True, env={**os.environ, "PATH": PATH})


check_environment()
if "sdist" in sys.argv:  # setuptools would add what an earlier list of files has
    (ROOT / "python" / "brimful.egg-info" / "SOURCES.txt").unlink(missing_ok=True)
# A fresh folder for what setuptools puts together: nothing of an earlier build slips into a wheel.
scratch = tempfile.TemporaryDirectory()
setup(
    options={"build": {"build_base": scratch.name}, "egg_info": {"tag_build": local_version()}},
    ext_modules=[Extension("brimful._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    install_requires=[torch_requirement()],
)
