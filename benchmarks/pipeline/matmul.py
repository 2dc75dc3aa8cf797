"""Two stages of real matrix products on two cores, against two threads that need not wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import common, intervals
from benchmarks.pipeline import program

SIZE, MICROBATCHES = 512, 32
ROUNDS, QUICK_ROUNDS = 60, 3


def figures(quick: bool) -> Iterator[common.Figure]:
    """Yields the pipeline's speed-up over one thread, over what two free threads and the fill allow."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    conditions = common.machine_conditions()
    try:
        lines = program.run("matmul", SIZE, MICROBATCHES, rounds)
    except program.Unavailable as error:
        yield common.unmeasured("pipeline.matmul_share", str(error), conditions=conditions)
        return
    # (in turn / pipeline) / (in turn / free * 2m / (m + 1) / 2)
    fill = (MICROBATCHES + 1) / MICROBATCHES
    share = intervals.median_ratio(
        [line["free_s"] * fill for line in lines], [line["pipeline_s"] for line in lines]
    )
    conditions.update(
        size=SIZE,
        microbatches=MICROBATCHES,
        speed_up=intervals.median([line["in_turn_s"] / line["pipeline_s"] for line in lines]),
        speed_up_of_free_threads=intervals.median(
            [line["in_turn_s"] / line["free_s"] for line in lines]
        ),
    )
    yield common.Figure(
        "pipeline.matmul_share",
        "fraction",
        share.value,
        share.low,
        share.high,
        "two free threads",
        rounds=rounds,
        conditions=conditions,
    )
