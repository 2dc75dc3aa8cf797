"""Scripts as rank_processes.run_script runs them, in forks of a process that has imported torch: they start at once."""

import atexit
import os
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist
from rank_processes import WATCHDOG_S, _context, print_to


def _main(source, arguments, output):
    """Ends as an interpreter does: the hook for what nobody caught, then what was registered for the exit."""
    print_to(output)
    sys.argv = ["-c", *arguments]
    status = 0
    try:
        exec(compile(source, "<script>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    os._exit(status)


def run_forked_script(source, *arguments, size=2, watchdog_s=2 * WATCHDOG_S):
    """Run Python source as `size` programs with the arguments rank, port of the store, *arguments.

    Returns exit status and output by rank; fails, with what each printed, if one is not done within `watchdog_s`.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [os.path.join(folder, str(rank)) for rank in range(size)]
        processes = [
            _context.Process(
                target=_main,
                args=(source, [str(rank), str(store.port), *map(str, arguments)], output),
                daemon=True,
            )
            for rank, output in enumerate(outputs)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + watchdog_s
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
        hanging = [rank for rank, process in enumerate(processes) if process.exitcode is None]
        for process in processes:
            process.kill()
            process.join()
        texts = [Path(output).read_text(errors="replace") for output in outputs]
        assert not hanging, f"not done within {watchdog_s} s: {hanging} of {texts}"
        return [(process.exitcode, text) for process, text in zip(processes, texts, strict=True)]
