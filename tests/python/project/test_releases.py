"""What a release is made of: the matrix of torch and Python, and the source distribution."""

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def job():
    (job,) = yaml.safe_load((ROOT / ".ci" / "matrix.yml").read_text())["jobs"].values()
    return job


def minors(versions):
    return [tuple(map(int, version.split(".")[:2])) for version in versions]


def test_the_matrix_has_every_torch_that_a_source_distribution_accepts(job):
    accepted = re.search(r'"torch>=2\.(\d+),<2\.(\d+)"', (ROOT / "setup.py").read_text())
    first, end = map(int, accepted.groups())
    versions = job["strategy"]["matrix"]["torch"]
    assert minors(versions) == [(2, minor) for minor in range(first, end)]
    named = dict(re.findall(r"^(OLDEST|DEFAULT)_TORCH := (\S+)$", MAKEFILE, re.M))
    assert (versions[0], versions[-1]) == (named["OLDEST"], named["DEFAULT"])


def test_the_matrix_begins_with_the_oldest_python_that_is_accepted(job):
    versions = minors(job["strategy"]["matrix"]["python"])
    assert PROJECT["requires-python"] == ">={}.{}".format(*versions[0])
    assert versions == [(3, minor) for minor in range(versions[0][1], versions[-1][1] + 1)]


def test_the_matrix_runs_targets_that_there_are(job):
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        target = re.fullmatch(r"make ([a-z-]+)( TORCH=\$\{\{ matrix\.torch \}\})?", command)
        assert target and target[1] in targets, command


def tracked(*paths):
    listed = subprocess.run(
        ["git", "ls-files", "--", *paths], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(listed.stdout.split())


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    """What `make sdist` packs."""
    folder = tmp_path_factory.mktemp("dist")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run(
        [sys.executable, "-c", build], cwd=ROOT, capture_output=True, check=True, timeout=100
    )
    (archive,) = folder.iterdir()
    assert archive.name == f"brimful-{PROJECT['version']}.tar.gz"  # of no torch
    with tarfile.open(archive) as files:
        names = [
            name.partition("/")[2] for name in files.getnames() if files.getmember(name).isfile()
        ]
        requires = files.extractfile(f"{archive.name[:-7]}/PKG-INFO").read().decode()
    assert "Requires-Dist: torch<2.16,>=2.11" in requires
    return set(names)


def test_a_source_distribution_has_what_a_build_reads_and_nothing_else(members):
    needed = tracked(
        *(
            "CMakeLists.txt",
            "setup.py",
            "pyproject.toml",
            "MANIFEST.in",
            "README.md",
            "CHANGELOG.md",
        ),
        *("LICENSE", "licenses", "cmake", "csrc", "python/brimful"),
    )
    made = {name for name in members if name.startswith("python/brimful.egg-info/")}
    assert members - made - {"PKG-INFO", "setup.cfg"} == needed


# Whose code is compiled in from headers, by the folder that they are included from.
LICENCE_OF = {
    **dict.fromkeys(["ATen", "c10", "torch"], "pytorch"),
    "pybind11": "pybind11",
    "nlohmann": "nlohmann_json",
}
NOT_COMPILED_IN = {"brimful", "sys", "net", "netinet", "linux", "internal"}


def test_every_library_of_headers_has_its_licence():
    included = {
        folder
        for path in tracked("csrc")
        for folder in re.findall(r"^#include <(\w+)/", (ROOT / path).read_text(), re.M)
    }
    licences = {LICENCE_OF[folder] for folder in included - NOT_COMPILED_IN} | {"pybind11"}
    assert licences == {path.stem for path in (ROOT / "licenses").glob("*.txt")}
