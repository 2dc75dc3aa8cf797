"""Steps in which a random half of the parameters is unused, which the wrapper does not know."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks import common, intervals, ranks
from benchmarks.reducer import cases, report, rounds
from benchmarks.reducer.report import Conditions, Request
from benchmarks.reducer.rounds import Samples, Step

IDS = ("reducer.unused",)
MODEL = cases.Model(layers=400, width=64, batch=8, bias=True)
WORLD_SIZES = (1, 2)
ROUNDS, QUICK_ROUNDS = 60, 5
HALF, ALL, ALL_AGAIN = "brimful:half", "brimful:all", "brimful:all_again"
BARE_HALF, BARE_ALL = "bare:half", "bare:all"
# skip_all_reduce_unused_params needs the same half on all ranks, and hangs without.
FIND_UNUSED = {
    "find_unused": cases.TorchCase({"find_unused_parameters": True}),
    "find_unused+view": cases.TorchCase(
        {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    ),
}
TORCH_ALL = {
    "all": cases.TorchCase({}),
    "all+view": cases.TorchCase({"gradient_as_bucket_view": True}),
}


def measure(request: Request, conditions: Conditions) -> Iterator[common.Figure]:
    """Yields the larger of the fractions at 1 and at 2 ranks."""
    count = request.rounds(ROUNDS, QUICK_ROUNDS)
    ours = request.factory(cases.OURS_ORDERED)
    conditions.update(
        ours=ours,
        model=MODEL.text,
        batch_per_rank=MODEL.batch,
        backend="gloo",
        zero_grad="set_to_none=True",
        value="(half - bare half + bare all) / all - 1, whole steps; the larger of the world sizes",
        warm_up_rounds=request.warm_up_rounds,
        world_sizes={},
    )
    found: dict[int, intervals.Interval] = {}
    for world_size in WORLD_SIZES:
        by_rank = ranks.run_ranks(
            world_size,
            work,
            MODEL,
            request.warm_up_rounds,
            count,
            ours,
            stall_s=request.stall_s,
        )
        report.require_usable(by_rank)
        found[world_size] = _describe(world_size, by_rank, conditions)
    worst = max(found, key=lambda world_size: found[world_size].value)
    conditions["world_size"] = worst
    conditions["cpu_time"] = conditions["world_sizes"][worst]["cpu_time"]
    yield report.figure_of("reducer.unused", found[worst], count, conditions, ALL)


def _describe(
    world_size: int, by_rank: list[Samples], conditions: Conditions
) -> intervals.Interval:
    wall, cpu = report.wall_and_cpu(by_rank)
    medians = report.medians_of(wall, cpu)
    find_unused = report.best_torch({cases.TORCH + n: wall[cases.TORCH + n] for n in FIND_UNUSED})
    torch_all = report.best_torch({cases.TORCH + n: wall[cases.TORCH + n] for n in TORCH_ALL})
    value = _net(wall)
    described = {
        "value": common.interval_dict(value),
        "cpu_time": common.interval_dict(_net(cpu)),
        "half_above_all": common.interval_dict(report.above(wall, HALF, ALL)),
        "a_a": common.interval_dict(report.above(wall, ALL_AGAIN, ALL)),
        "bare_half_above_all": common.interval_dict(report.above(wall, BARE_HALF, BARE_ALL)),
        "torch_above_its_all": common.interval_dict(report.above(wall, find_unused, torch_all)),
        "step_to_torch_find_unused": common.interval_dict(
            intervals.median_ratio(wall[HALF], wall[find_unused])
        ),
        "cases": medians,
    }
    conditions["world_sizes"][world_size] = described
    conditions["parameters"] = by_rank[0].parameters
    report.print_cases(f"reducer.unused, W={world_size}", medians, BARE_ALL, find_unused)
    for text, key in {
        "half above all, the bare module's taken off": "value",
        "the same by CPU time": "cpu_time",
        "half above all": "half_above_all",
        "A/A, all again above all": "a_a",
        "bare module, half above all": "bare_half_above_all",
        "torch's find_unused above its own all": "torch_above_its_all",
        "step, ours / torch's find_unused": "step_to_torch_find_unused",
    }.items():
        report.print_line(text, described[key])
    return value


def _net(columns: report.Columns) -> intervals.Interval:
    """Half above all, without what the stand-ins cost the bare module in the same round."""
    rows = zip(columns[HALF], columns[BARE_HALF], columns[BARE_ALL], strict=True)
    net = [half - (bare_half - bare_all) for half, bare_half, bare_all in rows]
    return report.above({**columns, "net": net}, "net", ALL)


class Chain(nn.Module):
    """A chain in which an unused layer's place is taken by a stand-in of the same shape.

    Whatever is used, the same operations run in forward and backward. A stand-in's gradient is
    computed and dropped at once: kept, it would cost memory that only half steps pay for.
    """

    def __init__(self, model: cases.Model) -> None:
        super().__init__()
        made = model.make()
        assert isinstance(made, nn.Sequential)
        self.layers = nn.ModuleList(made)
        # Neither parameters nor submodules: no wrapper knows of them.
        self.stand_ins = [
            tuple(_without_gradient(parameter) for parameter in layer.parameters())
            for layer in made
        ]
        self.used = [True] * len(made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, stand_in, used in zip(self.layers, self.stand_ins, self.used, strict=True):
            x = layer(x) if used else nn.functional.linear(x, *stand_in)
        return x


def _without_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Returns a copy that needs a gradient, which a C++ node of the graph then throws away."""
    leaf = parameter.detach().clone().requires_grad_()
    dropped: Any = torch._C._functions.UndefinedGrad()(leaf)
    assert isinstance(dropped, torch.Tensor)
    return dropped


def halves(layers: int, rank: int, count: int) -> list[list[bool]]:
    """Returns which layers a rank uses, step by step: a random half, another on every rank."""
    source = random.Random(1000 + rank)
    found = []
    for _ in range(count):
        used = [k < layers // 2 for k in range(layers)]
        source.shuffle(used)
        found.append(used)
    return found


def work(
    rank: int,
    world_size: int,
    progress: Callable[[], None],
    model: cases.Model,
    warm_up_rounds: int,
    timed_rounds: int,
    ours: str,
) -> Samples:
    """Runs the cases of one rank; half steps of all cases use the same layers in a round."""
    warnings.filterwarnings("ignore")
    make_ours = cases.resolve(ours)
    samples = Samples()
    x = model.data(rank)
    samples.describe(Chain(model))
    every = [[True] * model.layers]
    half = halves(model.layers, rank, warm_up_rounds + timed_rounds)
    steps = {
        BARE_HALF: _step(Chain(model), lambda module: module, x, half),
        BARE_ALL: _step(Chain(model), lambda module: module, x, every),
        HALF: _step(Chain(model), make_ours, x, half),
        ALL: _step(Chain(model), make_ours, x, every),
        ALL_AGAIN: _step(Chain(model), make_ours, x, every),
    }
    for torch_cases, used in ((FIND_UNUSED, half), (TORCH_ALL, every)):
        for name, case in torch_cases.items():

            def wrap(module: nn.Module, case: cases.TorchCase = case) -> nn.Module:
                return cases.make_torch(module, case)

            steps[cases.TORCH + name] = _step(Chain(model), wrap, x, used)

    def check() -> None:
        for reference, names in (
            (cases.TORCH + "find_unused", (HALF,)),
            (cases.TORCH + "all", (ALL, ALL_AGAIN)),
        ):
            compared = {name: steps[name] for name in (reference, *names)}
            rounds.check_gradients(compared, reference, samples)

    rounds.interleave(steps, warm_up_rounds, timed_rounds, progress, samples, check)
    return samples


def _step(
    chain: Chain,
    wrap: Callable[[nn.Module], nn.Module],
    x: torch.Tensor,
    used: list[list[bool]],
) -> Step:
    wrapped = wrap(chain)
    following = itertools.cycle(used)

    def run() -> None:
        chain.used = next(following)
        wrapped.zero_grad(set_to_none=True)
        wrapped(x).sum().backward()

    return Step(run, list(chain.parameters()))
