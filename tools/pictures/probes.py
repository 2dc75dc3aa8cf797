"""Pictures of the probes: what grows, what a step takes, what an error was, and two pages in a browser."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from chart import BLUE, GREEN, GREY, ORANGE, RED, TEAL, Chart
from runs import MIB, EveryOperator, batch_of, cross_entropy, mlp, used
from torch import nn

import brimful
from brimful import memory
from brimful.cli import report


def program(source: str, **names: object) -> dict[str, object]:
    """What a program defines whose lines are those of `train.py`."""
    defined: dict[str, object] = {"torch": torch, "nn": nn, "memory": memory, **names}
    exec(compile(source, "train.py", "exec"), defined)
    return defined


def draw_leak() -> str:
    """What lives at the end of each step of a loop that keeps its losses' graphs, by function."""
    model = nn.Linear(64, 10)
    alive: list[dict[str, int]] = []

    def loss_fn(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate() -> None:
        total: torch.Tensor | float = 0
        for _ in range(12):
            batch = torch.randn(32, 64), torch.randint(10, (32,))
            total = total + loss_fn(batch)
            memory.mark_step()
            by_function: dict[str, int] = {}
            for use in memory.live():
                name = str(use.site).split("(")[-1].rstrip(")")
                by_function[name] = by_function.get(name, 0) + use.bytes
            alive.append(by_function)

    with memory.track():
        evaluate()
    names = ["evaluate", "loss_fn"]
    chart = Chart(
        "Bytes alive at the end of each step, by function",
        "step",
        len(alive) - 1,
        y_label="KiB",
        y_end=max(sum(of.values()) for of in alive) / 1024 * 1.1,
    )
    low = [0.0] * len(alive)
    for name, colour in zip(names, (BLUE, ORANGE), strict=True):
        high = [
            a + sum(size for key, size in of.items() if name in key) / 1024
            for a, of in zip(low, alive, strict=True)
        ]
        chart.area(range(len(alive)), low, high, colour, f"{name}()")
        low = high
    return chart.svg()


KEEPS = """
def train(model, optimizer, after_step):
    kept, masks = [], {}
    for step in range(10):
        x = torch.randn(64, 256)
        output = model(x)
        output.square().mean().backward()
        masks.setdefault(min(step, 3), torch.ones(64, 64))
        kept.append(output)
        optimizer.step()
        optimizer.zero_grad()
        after_step()
"""


def draw_leak_rule() -> str:
    """Of each line, the steps whose tensors live when a LeakFinder names the one that grows."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    lines = {
        10: ("optimizer.step()", TEAL),
        8: ("masks.setdefault()", GREEN),
        5: ("x = ...", GREY),
        6: ("output = ...", RED),
    }
    born: dict[int, list[int]] = {}
    steps = 0

    def after_step() -> None:
        nonlocal steps
        if born:
            return
        steps += 1
        if finder.leaks:
            for use in memory.live():
                born[use.site.line] = [step for step, _ in use.born]

    with brimful.LeakFinder() as finder:
        program(KEEPS)["train"](model, optimizer, after_step)  # type: ignore[operator]
    chart = Chart(
        f"After {steps} steps: what lives, by the step that made it",
        "step",
        steps,
        left=140,
    )
    for line, (words, colour) in lines.items():
        chart.lane(words)
        for step in born[line]:
            chart.bar(words, step, step + 1, colour, word=f"{step}")
    chart.mark(2, "only steps from here count", "#1f2933")
    chart.mark(steps - 1, "to here", "#1f2933")
    return chart.svg()


def draw_summary() -> str:
    """The bytes in use over the operators of a step, where each module begins, and the figures of a summary."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.MaxPool2d(4), nn.Flatten(), nn.Linear(32 * 64, 10)),
    )
    batch = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    found = brimful.summary(model, batch, loss_fn=cross_entropy)
    samples: list[float] = []
    marks: list[tuple[int, str]] = []
    for name, module in {"block": model[1], "head": model[2]}.items():
        module.register_forward_pre_hook(lambda *_, name=name: marks.append((len(samples), name)))
    with EveryOperator(lambda: samples.append(used())):
        loss = cross_entropy(model, batch)
        marks.append((len(samples), "backward"))
        loss.backward()
    (block,) = (module for module in found.modules if module.name == "1")
    chart = Chart(
        "A step of a small CNN, and two figures of its summary",
        "operators since the step began",
        len(samples) - 1,
        y_label="MiB in use",
        y_end=found.peak_bytes / MIB * 1.12,
    )
    chart.area(range(len(samples)), [0] * len(samples), samples, BLUE)
    chart.level(block.forward_peak_bytes / MIB, "the block's forward peak", ORANGE)
    chart.level(block.backward_peak_bytes / MIB, "the block's backward peak")
    for at, name in marks:
        chart.mark(at, name, "#1f2933")
    return chart.svg()


LOOKS_UP = """
def step(embedding, head, tokens):
    x = embedding(tokens)
    x = torch.relu(x)
    loss = head(x).square().mean()
    loss.backward()
"""


def draw_operators() -> str:
    """What the operator ring has after an index that is out of range, by line."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(100, 16), nn.Linear(16, 4)
    good, bad = torch.arange(8), torch.arange(93, 101)
    step = program(LOOKS_UP)["step"]
    ring = brimful.op_ring()
    told = ""
    with contextlib.suppress(IndexError), ring:
        step(embedding, head, good)  # type: ignore[operator]
        try:
            step(embedding, head, bad)  # type: ignore[operator]
        except IndexError as error:
            told = brimful.explain(error).cause.partition(": ")[2]
            raise
    records = [record for record in ring.records() if record.where]
    chart = Chart("The operator ring: two steps, by line of train.py", "operator", len(records))
    for line in range(3, 7):
        chart.lane(f"line {line}")
    for number, record in enumerate(records):
        line = record.where.partition(":")[2].split()[0]
        name = "backward, at its forward's line" if record.backward else "forward"
        colour = ORANGE if record.backward else BLUE
        chart.bar(f"line {line}", number, number + 1, colour, name)
    failed = max(at for at, record in enumerate(records) if record.name == "aten::embedding")
    chart.mark(failed, told)
    return chart.svg()


OUT_OF_MEMORY = """
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)))
x, y = torch.randn(2048, 512), torch.randn(2048, 512)


def loss_fn(x, y):
    return nn.functional.mse_loss(model(x), y)


memory.set_limit("cpu", memory.stats("cpu").used_bytes + (64 << 20))
with memory.track(report="oom.html"):
    loss_fn(x, y).backward()
"""


@contextlib.contextmanager
def photographed(target: Path, page: str, height: int) -> Iterator[None]:
    """A browser's picture of a page that is written within, in a folder of its own."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(f"{target.name} is left as it is: there is no chromium", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield
        if browser is not None:
            window = [f"--window-size=900,{height}", "--hide-scrollbars", f"--screenshot={target}"]
            address = Path(page).resolve().as_uri()
            subprocess.run(
                [browser, "--headless=new", "--no-sandbox", *window, address],
                check=True,
                stderr=subprocess.DEVNULL,
            )


def photograph_oom_report(target: Path) -> None:
    """The page of an out-of-memory error."""
    with photographed(target, "oom.html", 700), contextlib.suppress(torch.OutOfMemoryError):
        program(OUT_OF_MEMORY)


def photograph_report(target: Path) -> None:
    """The page of `brimful report` of three steps with Adam."""
    model, batch = mlp(256, 6), batch_of(1024, 256)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    with photographed(target, "report.html", 706):
        with memory.record("run.brimful", models=model, optimizers=optimizer):
            for _ in range(3):
                cross_entropy(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        report.main(["run.brimful"])
