"""A step under torch.compile, ours against torch's DDP with its DDPOptimizer; only reported."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks import common, intervals, ranks
from benchmarks.reducer import cases, report, rounds
from benchmarks.reducer.report import Conditions, Request
from benchmarks.reducer.rounds import Samples, Step

IDS = ("reducer.compile",)
WORLD_SIZE = 2
ROUNDS, QUICK_ROUNDS = 60, 3
# Compiling reports no progress, and takes minutes on a slow machine.
MIN_STALL_S = 400.0
BARE, OURS, OURS_AGAIN, OURS_EAGER = "bare", "brimful", "brimful_again", "brimful:not_compiled"
TORCH_CASES = {
    "default": cases.TorchCase({}),
    "view": cases.TorchCase({"gradient_as_bucket_view": True}),
    "static+view": cases.TorchCase({"static_graph": True, "gradient_as_bucket_view": True}),
}


@dataclass(frozen=True)
class Transformer:
    """The model's size."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    tokens: int = 64
    batch: int = 4


MODEL = Transformer()


class Encoder(nn.Module):
    """A small transformer without dropout: all cases compute the same."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = model.width
        layer = nn.TransformerEncoderLayer(width, model.heads, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, model.layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(x))
        return out


def measure(request: Request, conditions: Conditions) -> Iterator[common.Figure]:
    """Yields ours / the fastest of torch's, whole steps."""
    count = request.rounds(ROUNDS, QUICK_ROUNDS)
    ours = request.factory()
    # Without inductor the quick run takes seconds; what wraps the graph is the same.
    backend = "aot_eager" if request.quick else "inductor"
    conditions.update(
        ours=ours,
        model=f"transformer, {MODEL.layers} layers of {MODEL.width}, {MODEL.tokens} tokens",
        batch_per_rank=MODEL.batch,
        world_size=WORLD_SIZE,
        backend="gloo",
        compile_backend=backend,
        zero_grad="set_to_none=True",
        value="ratio of steps, torch.compile(wrapper) on both sides",
        warm_up_rounds=request.warm_up_rounds,
    )
    by_rank = ranks.run_ranks(
        WORLD_SIZE,
        work,
        MODEL,
        request.warm_up_rounds,
        count,
        ours,
        backend,
        stall_s=max(request.stall_s, MIN_STALL_S),
    )
    first = by_rank[0]
    conditions.update(parameters=first.parameters, gradient_bytes=first.gradient_bytes)
    conditions["graphs_after_warm_up"] = first.more["graphs_after_warm_up"]
    report.require_usable(by_rank)
    wall, cpu = report.wall_and_cpu(by_rank)
    peer = report.best_torch(wall)
    conditions["cases"] = report.medians_of(wall, cpu)
    ratio = intervals.median_ratio
    conditions["cpu_time"] = common.interval_dict(ratio(cpu[OURS], cpu[peer]))
    conditions["a_a"] = common.interval_dict(ratio(wall[OURS_AGAIN], wall[OURS]))
    report.print_cases("reducer.compile", conditions["cases"], BARE, peer)
    report.print_line("A/A", conditions["a_a"])
    report.print_line("graphs compiled after the warm-up", conditions["graphs_after_warm_up"])
    yield report.figure_of(
        "reducer.compile", ratio(wall[OURS], wall[peer]), count, conditions, peer
    )


def work(
    rank: int,
    world_size: int,
    progress: Callable[[], None],
    model: Transformer,
    warm_up_rounds: int,
    timed_rounds: int,
    ours: str,
    backend: str,
) -> Samples:
    """Compiles and runs the cases of one rank."""
    warnings.filterwarnings("ignore")
    make_ours = cases.resolve(ours)
    samples = Samples()
    base = Encoder(model)
    samples.describe(base)
    torch.manual_seed(1 + rank)
    x = torch.randn(model.batch, model.tokens, model.width)
    wrapped: dict[str, nn.Module] = {BARE: copy.deepcopy(base)}
    for name in (OURS, OURS_AGAIN, OURS_EAGER):
        wrapped[name] = make_ours(copy.deepcopy(base))
    for name, case in TORCH_CASES.items():
        wrapped[cases.TORCH + name] = cases.make_torch(copy.deepcopy(base), case)
    # All cases share the code of one class, and each is a variant of it.
    torch._dynamo.config.recompile_limit = 4 * len(wrapped)
    steps = {}
    for name, module in wrapped.items():
        compiled = module if name == OURS_EAGER else torch.compile(module, backend=backend)
        steps[name] = _step(module, compiled, x)
        steps[name].run()
        progress()

    def check() -> None:
        checked = {name: step for name, step in steps.items() if name != BARE}
        reference = cases.TORCH + "default"
        tolerance = rounds.Tolerance(rtol=1e-4, atol=1e-4)  # fused kernels round elsewhere
        rounds.check_gradients(checked, reference, samples, tolerance)
        graphs.append(_graphs())

    graphs: list[int] = []
    rounds.interleave(steps, warm_up_rounds, timed_rounds, progress, samples, check)
    samples.more["graphs_after_warm_up"] = graphs[1] - graphs[0]
    return samples


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _step(module: nn.Module, compiled: Callable[..., torch.Tensor], x: torch.Tensor) -> Step:
    def run() -> None:
        module.zero_grad(set_to_none=True)
        compiled(x).square().mean().backward()

    return Step(run, list(module.parameters()), cases.settle_steps(module))
