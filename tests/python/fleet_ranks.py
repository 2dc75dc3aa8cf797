"""Ranks of a fleet, each a process, which are killed at points of a step; the store is served beside them."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

import brimful

ROWS, BATCH, WATCHDOG_S = 96, 24, 100
HELD = 2
# A busy machine may keep a rank's thread from its heartbeat for longer than the default of 400 ms.
PATIENT = {"patience_ms": 20000, "dead_after_ms": 1500}

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch._dynamo", "brimful", "brimful.pipeline_fleet", "fleet_ranks"]
)


@dataclass
class Plan:
    """What a rank does."""

    world_size: int = 3
    epochs: int = 2
    dtype: torch.dtype = torch.float64
    rows: int = ROWS
    #: point and step at which the process is killed: see `Rank.at`.
    dies: tuple[str, int] | None = None
    torn_in: int | None = None  # a collective of its own fails behind this step's sizer.step
    stops: tuple[str, int] | None = None  # the same, for a SIGSTOP
    holds: bool = False  # it waits before the step HELD until Ranks.go_on_with_more
    width: int = 16
    version: str = "one"
    pause_s: float = 0.0  # after each step
    device: str = "cpu"
    metrics: str | None = None  # a folder
    options: dict = field(default_factory=dict)
    pipeline_size: int = 1  # processes of a replica, which are started one after the other


class Data(torch.utils.data.Dataset):
    def __init__(self, rows, dtype):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(rows, 6, generator=generator, dtype=dtype)
        self.y = torch.randn(rows, 3, generator=generator, dtype=dtype)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return row, self.x[row], self.y[row]


def net(plan, seed):
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(6, plan.width), nn.Tanh(), nn.Linear(plan.width, 3))
    layers.register_buffer("seen", torch.zeros(1, dtype=plan.dtype))
    return layers.to(plan.dtype)


def loss_of(model, batch):
    device = next(model.parameters()).device
    x, y = (tensor.to(device) for tensor in batch[1:])
    return torch.nn.functional.mse_loss(model(x), y)


def make_optimizer(model, plan):
    """Adam divides by what may be close to zero: float32 would not stay within 1e-6."""
    if plan.dtype == torch.float64:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)


def values_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def expected(plan, seed=0):
    """Of one process: rows by step, and the parameters at the end."""
    data = Data(plan.rows, plan.dtype)
    model = net(plan, seed)
    optimizer, scheduler = make_optimizer(model, plan)
    sampler = brimful.GlobalSampler(data, batch_size=BATCH, rank=0, world_size=1, seed=5)
    steps = []
    for _ in range(plan.epochs):
        for rows in sampler:
            loss_of(model, sampler.load(rows)).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            sampler.note(None)
            steps.append(sorted(rows))
    return steps, values_of(model)


class Rank:
    """One process's program; it writes down what it was given, and what stood."""

    sizes: ClassVar = {"pieces": 2}
    wrap: ClassVar = {"bucket_cap_mb": 1e-4}

    def __init__(self, index, plan, port, log):
        self.plan, self.log, self.timed = plan, log, []
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        self.store = store = dist.TCPStore("127.0.0.1", port, is_master=False)
        device = torch.device(plan.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            plan.options["device"] = device
        members = brimful.Members(
            store, f"r{index}", world_size=plan.world_size, **{**PATIENT, **plan.options}
        )
        self.model = net(plan, seed=index).to(device)
        self.optimizer, self.scheduler = make_optimizer(self.model, plan)
        self.fleet = self.make_fleet(brimful.Fleet, members)
        self.metrics = contextlib.nullcontext()
        if plan.metrics is not None:
            lines = brimful.metrics.JsonLines(plan.metrics)
            self.metrics = brimful.metrics.Metrics(sizer=self.fleet.sizer, to=[lines], interval_s=0)
        self.model[0].weight.register_hook(self.last_gradient)
        self.pieces = 0
        self.watch("regroup", members, "enter", calls_before=1)
        self.watch("first_heal", self.fleet, "_transfer", calls_before=0)
        self.watch("heal", self.fleet, "_transfer", calls_before=1)
        self.watch("compare", self.fleet, "_compare", calls_before=1)
        # One in the first transfer, and one in the comparison behind it.
        self.watch("broadcast", self.fleet, "_tensors", calls_before=2)

    def make_fleet(self, kind, *engine):
        return kind(
            *engine,
            self.model,
            self.optimizer,
            Data(self.plan.rows, self.plan.dtype),
            batch_size=BATCH,
            seed=5,
            state=[self.scheduler],
            version=self.plan.version,
            sizes=self.sizes,
            wrap=self.wrap,
        )

    def watch(self, point, owner, name, calls_before):
        inner, calls = getattr(owner, name), []

        def call(*args, **kwargs):
            calls.append(1)
            if len(calls) > calls_before:
                self.at(point, None)
            return inner(*args, **kwargs)

        setattr(owner, name, call)

    def at(self, point, step):
        def is_here(place):
            return place is not None and place[0] == point and step in (None, place[1])

        if is_here(self.plan.dies):
            self.write(f"k {step} {time.time()}")
            os.kill(os.getpid(), signal.SIGKILL)
        if is_here(self.plan.stops):
            self.plan.stops = None
            os.kill(os.getpid(), signal.SIGSTOP)

    def write(self, line):
        os.write(self.log, f"{line}\n".encode())

    def loss(self, model, piece):
        """The loss of a piece, whose backward passes a point."""
        loss = loss_of(model, piece)
        index, self.pieces = self.pieces, self.pieces + 1
        step = self.fleet.progress
        loss.register_hook(lambda _: self.at(f"piece{index}", step))
        return loss

    def step(self, batch):
        fleet, step = self.fleet, self.fleet.progress
        rows = [] if batch is brimful.NO_DATA else batch[0].tolist()
        if self.plan.holds and step == HELD:
            self.store.wait(["go on"])
        self.write(f"h {step} {fleet.epoch} {' '.join(map(str, rows))}")
        self.at("before", step)
        self.pieces = 0
        outcome = fleet.sizer.step(batch, self.loss)
        self.at("accepted", step)
        if self.plan.torn_in == step:
            time.sleep(1.5)  # the others have found the group broken
            fleet.model.reducer.gather(bytes(8))
        self.optimizer.step()
        self.at("stepped", step)
        self.scheduler.step()
        self.optimizer.zero_grad()
        return outcome

    def last_gradient(self, _):
        """Of the last piece: the buckets before it were launched."""
        if self.pieces == 2:
            self.at("exchange", self.fleet.progress)

    def run(self):
        with self.metrics:
            self.train()
        return self.result()

    def train(self):
        fleet = self.fleet
        for _ in fleet.steps(self.step, epochs=self.plan.epochs):
            done = fleet.progress - 1
            epoch = int(fleet.last_regroup["epoch"])
            self.write(f"s {done} {epoch}")
            self.at("between", done)
            if not self.timed or self.timed[-1]["epoch"] != epoch:
                self.timed.append({**fleet.last_regroup, "at": time.time()})
            if self.plan.pause_s:
                time.sleep(self.plan.pause_s)

    def result(self):
        fleet = self.fleet
        return {
            "values": values_of(self.model).cpu(),
            "progress": fleet.progress,
            "epoch": int(fleet.last_regroup["epoch"]),
            "rate": self.scheduler.get_last_lr(),
            "optimizer": [
                value.detach().cpu().clone()
                for value in self.optimizer.state_dict()["state"][0].values()
                if isinstance(value, torch.Tensor)
            ],
            "regroups": self.timed,
        }


def _main(kind, index, plan, port, log_path, pipe):
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        answer = ("ended", kind(index, plan, port, log).run())
    except BaseException as error:
        answer = ("raised", (type(error).__name__, str(error)))
        if isinstance(error, brimful.LeftOut):
            os.write(log, b"l 0 0\n")
    with contextlib.suppress(OSError):
        pipe.send_bytes(pickle.dumps(answer))
    os._exit(0)


class Ranks:
    """Processes of a fleet, each a `kind`. `start` may be called while others run."""

    def __init__(self, kind=Rank):
        self.kind = kind
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.folder = tempfile.TemporaryDirectory()
        self.processes, self.pipes = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()

    def start(self, plan):
        index = len(self.processes)
        mine, theirs = _context.Pipe()
        process = _context.Process(
            target=_main,
            args=(self.kind, index, plan, self.store.port, self.log_of(index), theirs),
            daemon=True,
        )
        process.start()
        theirs.close()
        self.processes.append(process)
        self.pipes.append(mine)
        return index

    def log_of(self, index):
        return os.path.join(self.folder.name, f"{index}.log")

    def lines(self, index):
        path = Path(self.log_of(index))
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, index, line, within_s=WATCHDOG_S):
        """Until the rank has written a line that begins so."""
        until = time.monotonic() + within_s
        while not any(" ".join(found).startswith(line) for found in self.lines(index)):
            assert time.monotonic() < until, (line, self.lines(index))
            time.sleep(0.01)

    def go_on_with_more(self, plan, count=1):
        """Processes are started that join those who hold; these go on when they see that all ask, or one ended."""
        self.wait_for(0, f"s {HELD - 1}")
        members = range(1, len(self.processes) + 1)
        pipes = [self.pipes[self.start(plan)] for _ in range(count)]

        def reach(numbers):
            until = time.monotonic() + WATCHDOG_S
            while any(self.number(key) < number for key, number in numbers.items()):
                if any(pipe.poll() for pipe in pipes):
                    return
                assert time.monotonic() < until, numbers
                time.sleep(0.01)

        reach({"joins/1": count})
        beats = [f"beat/{member}" for member in members]
        reach({beat: self.number(beat) + 2 for beat in beats})  # each looks after each beat
        self.store.set("go on", "")

    def number(self, key):
        """What the members have set."""
        key = f"brimful/members/{key}"
        return int(self.store.get(key)) if self.store.check([key]) else 0

    def answers(self, within_s=WATCHDOG_S):
        """By process: ("ended", its result), ("raised", (type, message)) or ("killed", None)."""
        until, all_answers = time.monotonic() + within_s, []
        for index, pipe in enumerate(self.pipes):
            answer = ("killed", None)
            with contextlib.suppress(EOFError, ConnectionResetError):
                if not pipe.poll(max(0, until - time.monotonic())):
                    raise AssertionError(
                        f"a hang (process: {index}, wrote: {self.lines(index)[-4:]})"
                    )
                answer = pickle.loads(pipe.recv_bytes())
            all_answers.append(answer)
        return all_answers

    def rows_bad(self, plan):
        """Rows that were lost or doubled in the steps that stand, by what every process wrote down."""
        steps, _ = expected(plan)
        given, stood, survived = {}, {}, {}
        size = plan.pipeline_size
        for index in range(len(self.processes)):
            replica = range(index - index % size, index - index % size + size)
            # One that is left out may have finished the step for which the others had sent all before they gave it up.
            alive = not any(line[0] in "kl" for rank in replica for line in self.lines(rank))
            for kind, step, epoch, *rows in self.lines(index):
                if kind == "h" and index % size == 0:
                    given.setdefault((int(step), int(epoch)), []).extend(map(int, rows))
                elif kind == "s":
                    stood.setdefault(int(step), set()).add(int(epoch))
                    if alive:
                        survived.setdefault(int(step), set()).add(int(epoch))
        bad = 0
        for step, rows in enumerate(steps):
            # What one rank alone finished before it died was made again by the others.
            epochs = stood.get(step, set())
            found = sorted(given.get((step, max(epochs)), [])) if epochs else []
            lost, doubled = set(rows) - set(found), len(found) - len(set(found))
            twice = len(survived.get(step, set())) > 1
            bad += len(lost) + doubled + len(set(found) - set(rows)) + twice * len(rows)
        return bad


def exact_bad(plan, results, tolerance, seed=None):
    """Ranks whose parameters are not those of the first, or not those of one process."""
    if seed is None:  # all begin as rank 0
        begun = next(r["regroups"][0] for r in results if r["regroups"][0]["epoch"] == 1)
        seed = int(begun["names"][0][1:])
    _, values = expected(plan, seed=seed)
    first = results[0]["values"]
    return sum(
        not torch.equal(result["values"], first)
        or (result["values"] - values).abs().max().item() > tolerance
        for result in results
    )
