"""Runs a function on several ranks, each a process of its own over gloo, under a watchdog."""

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection

import torch
import torch.distributed as dist

WATCHDOG_S = 20
PATIENCE_S = 2  # with the others when one rank has failed

# A fork of a process that has imported torch and run nothing: a rank starts in a tenth of a second. (The first step of
# an optimizer imports torch._dynamo, which takes seconds.)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["numpy", "torch._dynamo", "brimful"])


@dataclass
class Rank:
    """What the function of a rank gets as its first argument."""

    index: int
    size: int
    #: The watchdog begins anew.
    progress: Callable[[], None] = lambda: None


class RanksFailed(AssertionError):
    """`errors`: by rank what it raised or how it died, and None where it was not done."""

    def __init__(self, text, errors):
        super().__init__(text)
        self.errors = errors


def join_group(rank, size, port, timeout_s):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def print_to(output, errors=None):
    """What this process and its libraries print goes to the file, or to one for each of the two streams."""
    for number, path in ((1, output), (2, errors or output)):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))


def _rank_main(rank, size, port, timeout_s, output, pipe, function, args):
    print_to(output)
    faulthandler.enable(file=2)  # the watchdog's SIGABRT prints every thread's stack
    gc.freeze()  # what importing torch brings takes longer to collect than most steps
    try:
        join_group(rank, size, port, timeout_s)
        answer = (True, function(Rank(rank, size, lambda: pipe.send_bytes(b"")), *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    pipe.recv_bytes()  # all have answered: nobody needs this rank's sockets any more
    os._exit(0)


def run_ranks(
    function, *args, size=2, timeout_s=15, watchdog_s=WATCHDOG_S, lost=(), context=_context
):
    """Call function(Rank, *args) on every rank and return the results by rank.

    Fails, with what each rank printed, if one raises, dies, or is not done within `watchdog_s` of the start and of the
    last `Rank.progress()`. `timeout_s` is the process group's. The ranks in `lost` must be killed (SIGKILL); their
    result is None. `context`: how multiprocessing makes the processes.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [os.path.join(folder, str(rank)) for rank in range(size)]
        ends = [context.Pipe() for _ in range(size)]
        processes = [
            context.Process(
                target=_rank_main,
                args=(
                    rank,
                    size,
                    store.port,
                    timeout_s,
                    outputs[rank],
                    ends[rank][1],
                    function,
                    args,
                ),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for _, theirs in ends:
            theirs.close()
        try:
            answers = _wait(processes, [mine for mine, _ in ends], watchdog_s, lost)
            for rank in lost:
                processes[rank].join(5)
                if processes[rank].exitcode == -signal.SIGKILL:
                    answers[rank] = (True, None)
            if all(answer is not None and answer[0] for answer in answers):
                return [answer[1] for answer in answers]
            _abort(processes, [answer is None for answer in answers])
            errors = {rank: a and a[1] for rank, a in enumerate(answers) if a is None or not a[0]}
            raise RanksFailed(_describe(answers, outputs, watchdog_s), errors)
        finally:
            for mine, _ in ends:
                _release(mine)
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _wait(processes, pipes, watchdog_s, lost=()):
    """What each rank answered: (True, its result), (False, its traceback), or None for nothing."""
    answers = [None] * len(pipes)
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    deadline, failed = time.monotonic() + watchdog_s, False
    while open_pipes:
        ready = connection.wait(list(open_pipes), max(0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = open_pipes[pipe]
            answers[rank] = _answer(processes[rank], pipe)
            if answers[rank] is None:
                deadline = deadline if failed else time.monotonic() + watchdog_s
                continue
            del open_pipes[pipe]
            if (
                not answers[rank][0] and rank not in lost
            ):  # the others may wait for it: their stacks show it
                deadline, failed = min(deadline, time.monotonic() + PATIENCE_S), True
    return answers


def _answer(process, pipe):
    """None: progress."""
    try:
        said = pipe.recv_bytes()
    except EOFError:
        process.join(PATIENCE_S)
        code = process.exitcode
        if code is not None and code < 0:
            return False, f"killed by {signal.Signals(-code).name}"
        return False, f"ended without an answer (exit status: {code})"
    return pickle.loads(said) if said else None


def _abort(processes, hanging):
    for process, hangs in zip(processes, hanging, strict=True):
        if hangs and process.is_alive():
            os.kill(process.pid, signal.SIGABRT)
            process.join(5)


def _release(pipe):
    with contextlib.suppress(OSError):  # the process may have ended
        pipe.send_bytes(b"")
    pipe.close()


def _describe(answers, outputs, watchdog_s):
    lines = []
    for rank, (answer, output) in enumerate(zip(answers, outputs, strict=True)):
        if answer is None:
            lines.append(
                f"rank {rank} was not done (watchdog: {watchdog_s} s, {PATIENCE_S} s after a failure)"
            )
        else:
            lines.append(f"rank {rank} {'is done' if answer[0] else 'failed: ' + answer[1]}")
        failed = answer is None or not answer[0]
        if failed and os.path.exists(output):  # else it has not begun
            with open(output, errors="replace") as file:
                lines.append(file.read()[-4000:])
    return "\n".join(lines)


def run_script(source, *arguments, size=2, watchdog_s=3 * WATCHDOG_S):  # each imports torch first
    """Run Python source as `size` programs with the arguments rank, port of the store, *arguments.

    Returns exit status and output by rank; fails if one is not done within `watchdog_s`.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join([here, *filter(None, sys.path)])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", source, str(rank), str(store.port), *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    deadline = time.monotonic() + watchdog_s
    results = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            results.append((process.returncode, output))
    finally:
        for process in processes:
            process.kill()
    return results


def raised(function, *args, **kwargs):
    """The exception that a call raises, with the time it took as `seconds`, or None. Its frames are dropped."""
    start = time.monotonic()
    try:
        function(*args, **kwargs)
    except Exception as error:
        error.__traceback__ = error.__context__ = error.__cause__ = None
        error.seconds = time.monotonic() - start
        return error
    return None
