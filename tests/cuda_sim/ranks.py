"""Runs a function on several ranks, each a process with a device of its own, under a watchdog."""

import datetime
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

WATCHDOG_S = 60

_context = multiprocessing.get_context("forkserver")


def preload():
    """Ranks are forks of a process that has imported torch. A test process has one such: of all its tests."""
    _context.set_forkserver_preload(["numpy", "torch"])


def _main(rank, size, port, backend, timeout_s, path, function, args, environment):
    os.environ.update(environment)
    try:
        with open(path, "w") as file:
            sys.stdout = sys.stderr = file
            torch.cuda.set_device(rank)
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            timeout = datetime.timedelta(seconds=timeout_s)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timeout
            )
            try:
                function(rank, *args)
                dist.destroy_process_group()
            except BaseException:
                traceback.print_exc()
                file.flush()
                raise
    except BaseException:
        sys.exit(1)


def run_ranks(function, *args, backend="nccl", size=2, timeout_s=40, killed=(), environment=()):
    """Call function(rank, *args) on every rank; the ranks in `killed` end by SIGKILL."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{rank}" for rank in range(size)]
        ranks = []
        for rank, path in enumerate(paths):
            given = (rank, size, store.port, backend, timeout_s, path, function, args)
            given += (dict(environment),)
            ranks.append(_context.Process(target=_main, args=given, daemon=True))
            ranks[-1].start()
        deadline = time.monotonic() + WATCHDOG_S
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for rank in late:
            ranks[rank].kill()
            ranks[rank].join()
        assert not late, (late, [Path(path).read_text() for path in paths])
        for rank, process in enumerate(ranks):
            wanted = -signal.SIGKILL if rank in killed else 0
            assert process.exitcode == wanted, (
                rank,
                process.exitcode,
                Path(paths[rank]).read_text(),
            )
