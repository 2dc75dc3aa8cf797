"""Runs a program on simulated CUDA devices: python run.py [OPTION ...] -- COMMAND [ARGUMENT ...]

The libraries are in the folder that --libraries names, else in the only build/*/cuda_sim of the working folder. With
--guard SCRATCH the program changes no file of the machine: what it writes goes to that folder.
"""

import argparse
import os
import sys
from pathlib import Path

COMPUTING = (
    *("libcublasLt.so.13", "libcublas.so.13", "libcudnn.so.9"),
    *("libcufft.so.12", "libcusolver.so.12", "libcusparse.so.12", "libnvrtc.so.13"),
)


def environment(libraries):
    """What a process needs to see the simulated devices; what is set already stays."""
    runtime = Path(libraries).resolve() / "libcudart.so.13"
    if not runtime.exists():
        raise SystemExit(f"run.py: there is no {runtime}: build tests/cuda_sim (README.md)")
    names, defaults = (), {}
    if os.environ.get("SIM_CUDA_ARITHMETIC") == "0":
        # There is nothing to compute, and so none of NVIDIA's libraries that do.
        names = COMPUTING
        # Triton is told of its driver, which takes none of its kernels; torch's operators do without them.
        defaults = {"TRITON_LIBCUDA_PATH": str(runtime.parent), "TORCH_DISABLE_NATIVE_JIT": "1"}
    own = [str(runtime), *(str(runtime.with_name(name)) for name in names)]
    first = [*own, *filter(None, [os.environ.get("LD_PRELOAD")])]
    return {"SIM_CUDA_STRICT": "1", **defaults, **os.environ, "LD_PRELOAD": ":".join(first)}


def only_build():
    found = list(Path("build").glob("*/cuda_sim/libcudart.so.13"))
    if len(found) != 1:
        raise SystemExit(f"run.py: name the folder by --libraries (found: {len(found)})")
    return found[0].parent


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--libraries", type=Path)
    parser.add_argument("--guard", metavar="SCRATCH")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    libraries = options.libraries or only_build()
    command, variables = options.command, environment(libraries)
    if options.guard:  # which itself has no use for devices
        preload = f"LD_PRELOAD={variables.pop('LD_PRELOAD')}"
        guard = str(libraries.resolve() / "guard")
        command = [guard, "--scratch", options.guard, "--", "env", preload, *command]
    os.execvpe(command[0], command, variables)


if __name__ == "__main__":
    sys.exit(main())
