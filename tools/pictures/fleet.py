"""What a job gets done by its number of ranks, where ranks differ and die: a simulation with the rule that runs."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from chart import BLUE, GREY, ORANGE, Chart

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.fleet import simulate

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
MTBF_H = 8_000.0


def draw_fleet() -> str:
    """Goodput with even shares and restarts, with shares and restarts, and with shares and survivors that go on."""
    failures = simulate.Failures(mtbf_h=MTBF_H)
    rows = [simulate.simulate(ranks, simulate.Speeds(), failures) for ranks in RANKS]
    xs = [math.log2(ranks / RANKS[0]) for ranks in RANKS]
    chart = Chart(
        "Goodput of ranks that differ and die (simulated; a rank dies every 8,000 hours)",
        "ranks",
        xs[-1],
        y_label="of perfectly divisible work",
        y_end=1,
        x_ticks={x: f"{ranks:,}" for x, ranks in zip(xs, RANKS, strict=True)},
    )
    kinds = {
        "shares, survivors go on": (BLUE, [row.shares_regroup for row in rows]),
        "shares, all restart": (ORANGE, [row.shares_restart for row in rows]),
        "even split, all restart": (GREY, [row.even_restart for row in rows]),
    }
    for name, (colour, ys) in kinds.items():
        chart.line(xs, ys, colour, name, marks=True)
    return chart.svg()
