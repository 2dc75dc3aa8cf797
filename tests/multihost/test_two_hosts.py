"""Two network namespaces joined by a cable as two hosts, two ranks each: the demo, and a host that goes away."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PORT = 29500  # of the namespaces' own network: nobody else is there
NODES = 2
RANKS_OF_A_NODE = 2
WATCHDOG_S = 100


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Host:
    """A network namespace with one end of a cable."""

    def __init__(self, number):
        self.name = f"brimful-{os.getpid()}-{number}"
        self.interface = f"bf{os.getpid()}n{number}"
        self.address = f"10.0.0.{number + 1}"

    def up(self):
        self("addr", "add", f"{self.address}/24", "dev", self.interface)
        self("link", "set", self.interface, "up")
        self("link", "set", "lo", "up")

    def __call__(self, *arguments):
        ip("-n", self.name, *arguments)

    def start(self, output, *command):
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.interface}
        environment["PYTHONFAULTHANDLER"] = "1"  # SIGABRT prints every thread's stack
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # ranks that begin again meet anew
        with output.open("w") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *map(str, command)],
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
            )


def delete(host):
    subprocess.run(["ip", "netns", "del", host.name], capture_output=True)


@pytest.fixture(scope="module")
def hosts():
    pair = [Host(number) for number in range(NODES)]
    first, second = pair
    with ExitStack() as undo:
        try:
            for host in pair:
                ip("netns", "add", host.name)
                undo.callback(delete, host)
            cable = ["link", "add", first.interface, "netns", first.name, "type", "veth"]
            ip(*cable, "peer", "name", second.interface, "netns", second.name)
            for host in pair:
                host.up()
        except OSError as error:
            pytest.skip(f"network namespaces are not allowed here ({error})")
        yield pair


@contextmanager
def job(hosts, folder, *script, ranks=RANKS_OF_A_NODE, restarts=0):
    """Starts a job; each node's torchrun, whose output is in `folder`. Ends all that it started.

    With `restarts` the nodes meet again after a failure, as often.
    """
    nodes = []
    try:
        for node, host in enumerate(hosts):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", NODES]
            command += ["--nproc-per-node", ranks, "--local-addr", host.address]
            if restarts:
                command += ["--rdzv-backend", "c10d", "--rdzv-id", "job"]
                command += ["--rdzv-endpoint", f"{hosts[0].address}:{PORT}"]
                command += ["--rdzv-conf", f"is_host={1 - node}", "--max-restarts", restarts]
            else:
                command += ["--node-rank", node, "--master-addr", hosts[0].address]
                command += ["--master-port", PORT]
            command += script
            nodes.append(host.start(folder / f"output-{node}", *command))
        yield nodes
    finally:
        for host in hosts:
            end(host, signal.SIGKILL)
        for node in nodes:
            node.wait()


def end(host, by_signal):
    """Ends all processes of a host; torchrun gives each rank a session of its own."""
    found = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True)
    for process in map(int, found.stdout.split()):
        with suppress(ProcessLookupError):
            os.kill(process, by_signal)


def outputs(folder):
    return "\n".join(file.read_text() for file in sorted(folder.glob("output-*")))


def wait_until(done, hosts, folder):
    deadline = time.monotonic() + WATCHDOG_S
    while not done():
        if time.monotonic() > deadline:
            for host in hosts:
                end(host, signal.SIGABRT)
            pytest.fail(f"not done within {WATCHDOG_S} s\n{outputs(folder)}")
        time.sleep(0.05)


def test_demo_goes_on_over_two_hosts_after_a_shortage_on_one(hosts, tmp_path):
    result = tmp_path / "result.json"
    script = [ROOT / "examples" / "train_fashion_mnist.py", "--samples", 4000, "--epochs", 1]
    script += ["--batch", 256, "--budget-mib", 32, "--fault-rank", 3, "--json", result]
    with job(hosts, tmp_path, *script) as nodes:
        wait_until(lambda: all(node.poll() is not None for node in nodes), hosts, tmp_path)
        assert [node.returncode for node in nodes] == [0, 0], outputs(tmp_path)
    told = json.loads(result.read_text())
    assert told["difference"] == 0
    ranks = told["ranks"]
    assert [seen["rank"] for seen in ranks] == [0, 1, 2, 3]
    assert ranks[3]["buckets_launched"] >= 1
    assert all(seen["retries_agreed"] == ranks[3]["retries_agreed"] >= 1 for seen in ranks)


HOST_LOST = """
import datetime, os, sys
import torch, torch.distributed as dist
import brimful

def write(name, text):
    path = os.path.join(sys.argv[1], f"{name}-{dist.get_rank()}")
    with open(path + "~", "w") as file:
        file.write(text)
    os.rename(path + "~", path)

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
model = brimful.DistributedDataParallel(torch.nn.Linear(4, 2))
try:
    for step in range(10**9):
        model(torch.randn(8, 4)).sum().backward()
        model.zero_grad()
        if step == 5:
            write("steps", "")
except brimful.RankFailed as error:
    write("heard", f"{error.rank}, {error}")
"""


def test_ranks_of_the_other_host_learn_that_a_host_went_away(hosts, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(HOST_LOST)
    steps = [tmp_path / f"steps-{rank}" for rank in range(4)]
    heard = [tmp_path / f"heard-{rank}" for rank in range(2)]
    with job(hosts, tmp_path, script, tmp_path):
        wait_until(lambda: all(file.exists() for file in steps), hosts, tmp_path)
        end(hosts[1], signal.SIGKILL)
        wait_until(lambda: all(file.exists() for file in heard), hosts, tmp_path)
    for file in heard:
        words = file.read_text()
        assert words.startswith(("2, ", "3, ")), words
        assert "did not come (it left its loop, died or hangs)" in words


def rows_of_steps(folder):
    """By step the rows of all ranks, each rank's run by run."""
    found = {}
    for file in sorted(folder.glob("rows-*.jsonl")):
        runs = {}
        for line in map(json.loads, file.read_text().splitlines()):
            runs.setdefault(line["step"], []).append(line["rows"])
        for step, rows in runs.items():
            found.setdefault(step, []).append(rows)
    return found


def test_two_hosts_go_on_from_the_checkpoint_when_a_rank_of_one_is_killed(hosts, tmp_path):
    rows, steps = 500, 8  # of an epoch
    script = [ROOT / "examples" / "train_fleet.py", "--checkpoint", tmp_path / "job.pt"]
    script += ["--rows", rows, "--batch", 64, "--epochs", 1, "--every", 3, "--taken", tmp_path]
    script += ["--die-rank", 1, "--die-at", 5]
    with job(hosts, tmp_path, *script, ranks=1, restarts=2) as nodes:
        wait_until(lambda: all(node.poll() is not None for node in nodes), hosts, tmp_path)
        assert [node.returncode for node in nodes] == [0, 0], outputs(tmp_path)
    found = rows_of_steps(tmp_path)
    assert sorted(found) == list(range(1, steps + 1))
    assert sorted(r for ranks in found.values() for runs in ranks for r in runs[-1]) == list(
        range(rows)
    )
    # Ranks have other numbers when the nodes have met again; the rows of a step are the same.
    again = {step for step, ranks in found.items() if any(len(runs) == 2 for runs in ranks)}
    assert again == {4, 5}
    for step in again:
        first, second = (sorted(r for runs in found[step] for r in runs[n]) for n in (0, 1))
        assert first == second
