"""What a step of one row holds on each rung of the ladder."""

from __future__ import annotations

import gc

import torch
from chart import BLUE, GREEN, ORANGE, VIOLET, Chart
from runs import EveryOperator, used
from torch import nn

import brimful
from brimful import _C

_EACH = 5  # operators of which the picture shows the most


def _encoder() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(8))
    )


def draw_ladder() -> str:
    """The bytes in use during a step of one row: as it is, with half of its modules on a rung, with all of them."""
    names = [str(block) for block in range(8)]
    ways = {
        "no rung": (_C.StepRungs(), BLUE),
        "4 of 8 blocks recomputed": (_C.StepRungs(recomputed=names[:4]), GREEN),
        "8 recomputed": (_C.StepRungs(recomputed=names), ORANGE),
        "all offloaded": (_C.StepRungs(everything=True), VIOLET),
    }
    row = torch.randn(1, 256, 64)
    curves: dict[str, list[float]] = {}
    for name, (rungs, _) in ways.items():
        model = _encoder()
        sizer = brimful.BatchSizer(model)
        for _ in range(2):  # the first compares what recomputed modules return
            model.zero_grad()
            gc.collect()
            samples = [used()]
            with EveryOperator(lambda samples=samples: samples.append(used())):  # type: ignore[misc]
                sizer.step(row, lambda model, x: model(x).square().mean(), split=[1], rungs=rungs)
        most = [max(samples[at : at + _EACH]) for at in range(0, len(samples), _EACH)]
        curves[name] = [sample - samples[0] for sample in most]
        del model, sizer
    chart = Chart(
        "One step of one row through 8 encoder layers, on each rung",
        "operators since the step began",
        _EACH * max(map(len, curves.values())),
        y_label="MiB more in use than before the step",
        y_end=max(map(max, curves.values())) * 1.15,
    )
    for name, samples in curves.items():
        chart.line(range(0, _EACH * len(samples), _EACH), samples, ways[name][1], name)
    return chart.svg()
