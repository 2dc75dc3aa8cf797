"""How long 512 ranks take to exchange control records between hosts, by the measured cost of each round's message."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import callgrind, common, intervals

IDS = ("agree.host_512",)
PROGRAM = "brimful_bench_agree"
RANKS = (2, 8, 64, 512)
ROUNDS, QUICK_ROUNDS = 2000, 20
WARM_UP = 50


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the seconds of an exchange; those of fewer ranks are conditions."""
    conditions = {
        **common.machine_conditions(),
        "ranks": "2, threads of one process over gloo on loopback, of which each stands for all of the other's peers",
        "warm_up_rounds": WARM_UP,
    }
    rounds = QUICK_ROUNDS if quick else ROUNDS
    try:
        program = str(callgrind.find_program(PROGRAM))
        seconds = {ranks: _seconds(program, ranks, rounds) for ranks in RANKS}
    except callgrind.Unavailable as error:
        yield common.unmeasured(IDS[0], str(error), conditions=conditions)
        return
    conditions["s_by_ranks"] = {ranks: intervals.median(of) for ranks, of in seconds.items()}
    all_of_them = seconds[RANKS[-1]]
    value = intervals.median_ratio(all_of_them, [1.0] * len(all_of_them))
    yield common.Figure(
        IDS[0],
        "s",
        value.value,
        value.low,
        value.high,
        rounds=len(all_of_them),
        conditions=conditions,
    )


def _seconds(program: str, ranks: int, rounds: int) -> list[float]:
    arguments = [program, str(ranks), str(rounds + WARM_UP)]
    printed = callgrind.run(arguments, PROGRAM, callgrind.TIMEOUT_S)
    return [float(line) for line in printed.splitlines()][WARM_UP:]
