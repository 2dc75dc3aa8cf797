"""Installs brimful with pip into an empty folder, then builds and runs a C++ program that finds it.

python tests/consumer/run.py WORK_FOLDER [WHEEL]      (without a wheel: the source tree)
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BIN = Path(sys.executable).parent


def run(*command: object, **environment: str) -> str:
    """Runs a command; its output is shown only if it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        cwd=ROOT
        / "tests"
        / "consumer",  # not the root: nothing of the source tree is to be imported
    )
    if done.returncode:
        sys.exit(f"consumer: {' '.join(map(str, command))} failed\n{done.stdout}")
    return done.stdout


def main() -> None:
    work = Path(sys.argv[1]).resolve()
    site = work / "site"
    shutil.rmtree(site, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps"]
    run(*pip, "--target", site, Path(sys.argv[2]).resolve() if sys.argv[2:] else ROOT)

    # brimful-dev.pth would put the build folder first: import from `site` alone.
    where = f"import sys; sys.path.insert(0, {str(site)!r})"
    show = "import brimful; print(brimful.cmake_prefix_path)"
    prefix = run(sys.executable, "-c", f"{where}; {show}").strip()
    if not prefix.startswith(str(site)):
        sys.exit(
            f"consumer: brimful.cmake_prefix_path is outside the installation (path: {prefix})"
        )

    build = work / "build"
    run(
        *(BIN / "cmake", "-S", ROOT / "tests" / "consumer", "-B", build, "-G", "Ninja"),
        *("-UBRIMFUL_TORCH_*", f"-DPython_EXECUTABLE={sys.executable}"),
        *("-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_MAKE_PROGRAM={BIN / 'ninja'}"),
        f"-DCMAKE_PREFIX_PATH={prefix}",
    )
    run(BIN / "cmake", "--build", build)
    print(run(build / "consumer"), end="")


if __name__ == "__main__":
    main()
