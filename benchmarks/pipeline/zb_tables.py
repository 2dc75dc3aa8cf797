"""Bubble rates of the zero-bubble paper's tables 5 and 8, by its schedules in our simulator with its profiled times.

Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241. Times (F, B, W and communication, in microseconds)
are those in the script with which the authors computed both tables, `megatron/core/pipeline_parallel/efficiency.py`
of sail-sg/zero-bubble-pipeline-parallelism at f68d3879; rates are what it prints. A bubble rate is 1 - m (F + B + W)
/ cost; the cost is the makespan of 1F1B and ZB-H1, and of ZB-H2 and ZB-V the longest time of a rank from its first
action to its last, as optimizer steps of ranks do not wait for each other there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks import common

IDS = ("pipeline.zb_tables",)
PERIOD = ("zb_h2", "zbv")

TABLE_5 = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_h2")
TABLE_8 = (*TABLE_5, "zbv")


@dataclass(frozen=True)
class Row:
    """A setting of the paper: stages `p`, microbatches `m`, times of a rank, layers, and the rates of schedules."""

    table: int
    p: int
    m: int
    forward: float
    backward: float
    weight: float
    hop: float
    layers: int
    rates: dict[str, float]


def _five(p: int, m: int, times: tuple[float, ...], layers: int, *rates: float) -> Row:
    return Row(5, p, m, *times, layers, dict(zip(TABLE_5, rates, strict=True)))


def _eight(p: int, m: int, times: tuple[float, ...], layers: int, *rates: float) -> Row:
    *work, hop = times  # profiled for one of a rank's two stages
    whole = [2 * time for time in work]
    return Row(8, p, m, *whole, hop, layers, dict(zip(TABLE_8, rates, strict=True)))


ROWS = (
    _five(8, 24, (18522, 18086, 9337, 601), 24, 0.2431, 0.1055, 0.1585, 0.1083),
    _five(8, 32, (18513, 18086, 9331, 626), 24, 0.1985, 0.0818, 0.1242, 0.0837),
    _five(8, 64, (18546, 18097, 9321, 762), 24, 0.1240, 0.0443, 0.0674, 0.0444),
    _five(8, 24, (29718, 29444, 19927, 527), 32, 0.2347, 0.0808, 0.1323, 0.0698),
    _five(8, 32, (29802, 29428, 19530, 577), 32, 0.1898, 0.0628, 0.1045, 0.0559),
    _five(8, 64, (29935, 29621, 19388, 535), 32, 0.1091, 0.0320, 0.0554, 0.0294),
    _five(16, 48, (11347, 11248, 8132, 377), 48, 0.2552, 0.1104, 0.1397, 0.0672),
    _five(16, 64, (11307, 11254, 8101, 379), 48, 0.2082, 0.0852, 0.1088, 0.0516),
    _five(16, 128, (11325, 11308, 8109, 378), 48, 0.1251, 0.0445, 0.0576, 0.0266),
    _five(32, 96, (10419, 10207, 7715, 408), 64, 0.2646, 0.1493, 0.1421, 0.0641),
    _five(32, 128, (10408, 10204, 7703, 408), 64, 0.2168, 0.1164, 0.1106, 0.0490),
    _five(32, 256, (10402, 10248, 7698, 460), 64, 0.1352, 0.0624, 0.0594, 0.0257),
    _eight(16, 48, (14407, 14380, 9676, 1610), 32, 0.2668, 0.1499, 0.1536, 0.0823, 0.0697),
    _eight(16, 64, (14412, 14393, 9688, 1621), 32, 0.2206, 0.1169, 0.1198, 0.0630, 0.0533),
    _eight(16, 128, (14316, 14306, 9639, 1619), 32, 0.1390, 0.0621, 0.0637, 0.0325, 0.0274),
    _eight(24, 72, (6763, 6969, 5251, 755), 48, 0.2699, 0.1519, 0.1439, 0.0628, 0.0638),
    _eight(24, 96, (6783, 6984, 5259, 758), 48, 0.2229, 0.1184, 0.1121, 0.0480, 0.0483),
    _eight(24, 192, (6785, 6990, 5260, 770), 48, 0.1403, 0.0630, 0.0595, 0.0247, 0.0250),
    _eight(32, 96, (9458, 9748, 7288, 879), 64, 0.2676, 0.1509, 0.1429, 0.0629, 0.0593),
    _eight(32, 128, (9469, 9744, 7306, 892), 64, 0.2204, 0.1177, 0.1111, 0.0478, 0.0451),
    _eight(32, 256, (9447, 9644, 7193, 887), 64, 0.1362, 0.0626, 0.0593, 0.0251, 0.0236),
)


def bubble_rate(row: Row, name: str) -> float:
    """Returns what our simulator says of a schedule in the row's setting."""
    import brimful

    stages_per_rank = {"zbv": 2, "interleaved_1f1b": row.layers // row.p}.get(name, 1)
    schedule = brimful.Schedule(name, row.p, row.m, stages_per_rank=stages_per_rank)
    timeline = schedule.simulate(
        forward=row.forward / stages_per_rank,
        backward_input=row.backward / stages_per_rank,
        backward_weight=row.weight / stages_per_rank,
        hop=row.hop,
    )
    cost = timeline.period if name in PERIOD else timeline.makespan
    return 1 - row.m * (row.forward + row.backward + row.weight) / cost


def figures(quick: bool) -> Iterator[common.Figure]:
    """Yields the largest difference from a stated rate; all rates with ours stand beside it."""
    rates = []
    for row in ROWS:
        for name, paper in row.rates.items():
            if not quick or row.p * row.m < 1000:
                ours = round(bubble_rate(row, name), 4)
                where = {"table": row.table, "p": row.p, "m": row.m, "schedule": name}
                rates.append({**where, "paper": paper, "ours": ours})
    worst = max(rates, key=lambda rate: abs(rate["ours"] - rate["paper"]))
    value = abs(worst["ours"] - worst["paper"])
    by_schedule: dict[str, float] = {}
    for rate in rates:
        name = rate["schedule"]
        by_schedule[name] = max(by_schedule.get(name, 0), abs(rate["ours"] - rate["paper"]))
    yield common.Figure(
        "pipeline.zb_tables",
        "fraction",
        value,
        value,
        value,
        peer="the paper's tables 5 and 8",
        rounds=1,
        conditions={
            "worst": worst,
            "by_schedule": {name: round(error, 4) for name, error in by_schedule.items()},
            "rates": rates,
        },
    )
