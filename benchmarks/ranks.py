"""Ranks as spawned processes over gloo, under a watchdog that ends a hang."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"
# After the first error the others' are waited for this long: what arrives first may be an echo.
GRACE_S = 1.0
EXIT_S = 10.0


class RanksFailed(Exception):
    """A rank raised, died, or all of them made no progress for too long."""


RankFunction = Callable[..., Any]


def run_ranks(world_size: int, fn: RankFunction, *args: Any, stall_s: float) -> list[Any]:
    """Runs fn(rank, world_size, progress, *args) in `world_size` processes; returns their results.

    `progress()` is to be called at least every `stall_s` seconds; without a call from any rank for
    that long all are killed. Raises RanksFailed with the first rank's error, in its own words.
    """
    store = dist.TCPStore(  # type: ignore[attr-defined,unused-ignore]
        LOOPBACK, 0, is_master=True, wait_for_workers=False
    )
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="brimful-bench-") as folder:
        processes: list[BaseProcess] = []
        connections: list[Connection] = []
        try:
            for rank in range(world_size):
                mine, theirs = context.Pipe(duplex=False)
                log = Path(folder) / f"rank{rank}.log"
                process: BaseProcess = context.Process(
                    target=_rank_main,
                    args=(theirs, str(log), fn, rank, world_size, store.port, stall_s, args),
                    daemon=True,
                )
                process.start()
                theirs.close()
                processes.append(process)
                connections.append(mine)
            results = _collect(processes, connections, stall_s)
            _wait_for_exit(processes)
            return results
        except RanksFailed:
            _print_logs(Path(folder))
            raise
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(
    processes: list[BaseProcess], connections: list[Connection], stall_s: float
) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + stall_s
    while len(results) < len(connections):
        waiting = [c for rank, c in enumerate(connections) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RanksFailed(f"hang: no rank made progress for {stall_s:g} s; killed")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = connections.index(connection)
            kind, payload = _receive(connection, processes[rank])
            if kind == "error":
                errors = {rank: payload, **_other_errors(processes, connections, rank, results)}
                raise RanksFailed("; ".join(f"rank {r}: {errors[r]}" for r in sorted(errors)))
            if kind == "result":
                results[rank] = payload
        deadline = time.monotonic() + stall_s
    return [results[rank] for rank in range(len(connections))]


def _other_errors(
    processes: list[BaseProcess], connections: list[Connection], failed: int, done: dict[int, Any]
) -> dict[int, Any]:
    errors: dict[int, Any] = {}
    deadline = time.monotonic() + GRACE_S
    left = [c for rank, c in enumerate(connections) if rank != failed and rank not in done]
    while left:
        ready = wait(left, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = connections.index(connection)
            kind, payload = _receive(connection, processes[rank])
            if kind == "error":
                errors[rank] = payload
            if kind != "progress":
                left.remove(connection)
    return errors


def _receive(connection: Connection, process: BaseProcess) -> tuple[str, Any]:
    try:
        kind, payload = connection.recv()
    except EOFError:
        process.join(GRACE_S)
        code = process.exitcode
        if code is not None and code < 0:
            return "error", f"killed by {signal.Signals(-code).name}"
        return "error", f"ended without a result (exit status: {code})"
    return kind, payload


def _wait_for_exit(processes: list[BaseProcess]) -> None:
    deadline = time.monotonic() + EXIT_S
    for rank, process in enumerate(processes):
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            print(f"rank {rank} did not exit within {EXIT_S:g} s of its result", file=sys.stderr)


def _print_logs(folder: Path) -> None:
    for log in sorted(folder.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        for line in lines[-20:]:
            print(f"{log.stem}| {line}", file=sys.stderr)


def _rank_main(
    connection: Connection,
    log: str,
    fn: RankFunction,
    rank: int,
    world_size: int,
    port: int,
    stall_s: float,
    args: tuple[Any, ...],
) -> None:
    with open(log, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno() if sys.stdout else 1)
        os.dup2(file.fileno(), 2)
    try:
        torch.set_num_threads(1)
        _init_group(rank, world_size, port, stall_s)
        result = fn(rank, world_size, lambda: connection.send(("progress", None)), *args)
        connection.send(("result", result))
        dist.destroy_process_group()
    except BaseException as error:
        connection.send(("error", f"{type(error).__name__}: {error}"))
        # Another rank may be in a collective that this one will not join.
        os._exit(1)


def _init_group(rank: int, world_size: int, port: int, stall_s: float) -> None:
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(MASTER_ADDR=LOOPBACK, MASTER_PORT=str(port))
    # The watchdog is to fire first: it names the hang, gloo's timeout would name a collective.
    timeout = datetime.timedelta(seconds=2 * stall_s)
    store = dist.TCPStore(  # type: ignore[attr-defined,unused-ignore]
        LOOPBACK, port, is_master=False, timeout=timeout
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
