"""What a step of thousands of ranks costs each of them in control records and shares, against a step of 250 ms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import callgrind, common, intervals

IDS = ("fleet.record", "fleet.rule", "fleet.cost_rule")
MODES = {"fleet.record": "record", "fleet.rule": "rule", "fleet.cost_rule": "cost"}
PROGRAM = "brimful_bench_fleet"
RANKS = (8, 512, 4096)
STEP_S = 0.25
ROUNDS, QUICK_ROUNDS = 200, 5
WARM_UP = 3
GBIT_S = (10, 200)  # of a rank's link


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the fractions for the most ranks; parts, bytes and fewer ranks are conditions."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    for figure_id in IDS:
        conditions = {**common.machine_conditions(), "step_s": STEP_S}
        try:
            program = callgrind.find_program(PROGRAM)
            by_ranks = {
                ranks: _columns(str(program), MODES[figure_id], ranks, rounds) for ranks in RANKS
            }
        except callgrind.Unavailable as error:
            yield common.unmeasured(figure_id, str(error), conditions=conditions)
            continue
        describe = _record if figure_id == "fleet.record" else _rule
        conditions["by_ranks"] = {ranks: describe(found) for ranks, found in by_ranks.items()}
        seconds = by_ranks[RANKS[-1]]["all"]
        ratio = intervals.median_ratio(seconds, [STEP_S] * len(seconds))
        yield common.Figure(
            figure_id, "fraction", *_ends(ratio), rounds=len(seconds), conditions=conditions
        )


def _ends(ratio: intervals.Interval) -> tuple[float, float, float]:
    return ratio.value, ratio.low, ratio.high


def _columns(program: str, mode: str, ranks: int, rounds: int) -> dict[str, list[float]]:
    printed = callgrind.run(
        [program, mode, str(ranks), str(rounds + WARM_UP)], PROGRAM, callgrind.TIMEOUT_S
    )
    lines = [[float(word) for word in line.split()] for line in printed.splitlines()][WARM_UP:]
    columns = [list(column) for column in zip(*lines, strict=True)]
    if mode != "record":
        return {"all": columns[0]}
    bytes, write, read, ask = columns
    every = [sum(parts) for parts in zip(write, read, ask, strict=True)]
    return {"all": every, "bytes": bytes, "write": write, "read": read, "ask": ask}


def _record(found: dict[str, list[float]]) -> dict[str, Any]:
    bytes = found["bytes"][0]
    return {
        "bytes": bytes,
        **{f"{part}_s": intervals.median(found[part]) for part in ("write", "read", "ask", "all")},
        # A ring sends a rank's part twice, to the sum and back.
        **{f"link_s_{gbit}_gbit": 2 * bytes / (gbit * 1e9 / 8) for gbit in GBIT_S},
    }


def _rule(found: dict[str, list[float]]) -> dict[str, Any]:
    return {"s": intervals.median(found["all"])}
