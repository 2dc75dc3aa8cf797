"""Runs a program on simulated CUDA devices: python run.py [OPTION ...] -- COMMAND [ARGUMENT ...]"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COMPUTING = (
    *("libcublasLt.so.13", "libcublas.so.13", "libcudnn.so.9"),
    *("libcufft.so.12", "libcusolver.so.12", "libcusparse.so.12", "libnvrtc.so.13"),
)


def own_name():
    """run.py, or what a command of another package calls itself."""
    return Path(sys.argv[0]).name


def environment(libraries):
    """What a process needs to see the simulated devices; what is set already stays."""
    runtime = Path(libraries).resolve() / "libcudart.so.13"
    if not runtime.exists():
        raise SystemExit(
            f"{own_name()}: there is no {runtime}: build csrc/cuda_sim (its README.md says how)"
        )
    names, defaults = (), {}
    if os.environ.get("SIM_CUDA_ARITHMETIC") == "0":
        # There is nothing to compute, and so none of NVIDIA's libraries that do.
        names = COMPUTING
        # Triton is told of its driver, which takes none of its kernels; torch's operators do without them.
        defaults = {"TRITON_LIBCUDA_PATH": str(runtime.parent), "TORCH_DISABLE_NATIVE_JIT": "1"}
    own = [str(runtime), *(str(runtime.with_name(name)) for name in names)]
    first = [*own, *filter(None, [os.environ.get("LD_PRELOAD")])]
    return {"SIM_CUDA_STRICT": "1", **defaults, **os.environ, "LD_PRELOAD": ":".join(first)}


NO_PROGRAM = 127  # as a shell says it
FIND_TORCH = (
    "import importlib.util as u; found = u.find_spec('torch'); print(found.origin if found else '')"
)


def check_torch(command):
    """Ends with a sentence if the program's Python has a torch for another CUDA: these libraries would not be asked."""
    if not Path(command[0]).name.startswith("python"):
        return
    done = subprocess.run([command[0], "-c", FIND_TORCH], capture_output=True, text=True)
    version = Path(done.stdout.strip()).with_name("version.py") if done.stdout.strip() else None
    if version is None or not version.exists():
        return
    found = re.search(r"^cuda\b.*= '([0-9.]+)'", version.read_text(), re.MULTILINE)
    cuda = found.group(1) if found else "none"
    if cuda.split(".")[0] != "13":
        raise SystemExit(
            f"{own_name()}: these libraries take the place of CUDA 13's, and the torch of {command[0]} is for another "
            f"(CUDA: {cuda}): name a Python whose torch is for CUDA 13"
        )


def near():
    """Where the libraries are unless they are named: beside this file, else in the only build of the working folder."""
    here = Path(__file__).absolute().parent  # in a build folder this file is a link
    if (here / "libcudart.so.13").exists():
        return here
    found = list(Path("build").glob("*/python/brimful/cuda_sim/libcudart.so.13"))
    if len(found) != 1:
        raise SystemExit(f"{own_name()}: name the folder by --libraries (found: {len(found)})")
    return found[0].parent


def peaks(command, variables, unknown):
    """Runs the program: its status, and for each device what the process took that took the most of it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        report.touch()
        set_ = {"SIM_CUDA_UNKNOWN": unknown, "SIM_CUDA_REPORT": str(report)}
        status = subprocess.run(command, env={**variables, **set_}).returncode
        lines = [json.loads(line)["peak_bytes"] for line in report.read_text().splitlines()]
    return status, [max(of_device) for of_device in zip(*lines, strict=True)]


def run_twice(command, variables):
    """Says on stderr between which bytes the peaks lie; returns the first status that is not 0."""
    if variables.get("SIM_CUDA_ARITHMETIC") != "0":
        raise SystemExit(
            f"{own_name()}: --interval is for devices without arithmetic: name one by --device"
        )
    (status, least), (again, most) = (peaks(command, variables, word) for word in ("least", "most"))
    for device, ends in enumerate(zip(least, most, strict=False)):
        if any(ends):
            between = " to ".join(f"{end:,}" for end in ends)
            print(f"simulated CUDA: device {device}: {between} bytes at the peak", file=sys.stderr)
    return status or again


def main():
    parser = argparse.ArgumentParser(
        description="Runs a program on simulated CUDA devices; README.md beside this file has the variables.",
    )
    parser.add_argument(
        "--device",
        help="one without arithmetic, which takes the memory that this one takes: h200, rtx4090, 24GiB,sms=82,cc=8.9",
    )
    parser.add_argument(
        "--guard",
        metavar="SCRATCH",
        help="the program changes no file of the machine: what it writes goes to this folder",
    )
    parser.add_argument(
        "--interval",
        action="store_true",
        help="run it twice, with the least and with the most that figures which are not known can be",
    )
    parser.add_argument("--libraries", type=Path, help="their folder, if it is not that of run.py")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND ...")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("name the program to run: -- python train.py")
    if shutil.which(command[0]) is None:
        print(f"{own_name()}: there is no such program (command: {command[0]})", file=sys.stderr)
        return NO_PROGRAM
    if options.device:
        os.environ.update(SIM_CUDA_ARITHMETIC="0", SIM_CUDA_DEVICE=options.device)
    libraries = options.libraries or near()
    variables = environment(libraries)
    check_torch(command)
    if options.interval and options.guard:
        parser.error(
            "--interval and --guard do not go together: guard a run with SIM_CUDA_UNKNOWN=least, and one with most"
        )
    if options.interval:
        return run_twice(command, variables)
    if options.guard:  # which itself has no use for devices
        preload = f"LD_PRELOAD={variables.pop('LD_PRELOAD')}"
        guard = str(libraries.resolve() / "guard")
        command = [guard, "--scratch", options.guard, "--", "env", preload, *command]
    os.execvpe(command[0], command, variables)


if __name__ == "__main__":
    sys.exit(main())
