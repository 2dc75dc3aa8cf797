"""How long the ranks wait for one that fails in a step whose collectives are others than those before."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks import common, ranks

IDS = ("sharded.unlike",)
STALL_S = 60.0
ROUNDS, QUICK_ROUNDS = 5, 1


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the longest time until a rank has raised."""
    conditions = {**common.machine_conditions(), "ranks": "2 over gloo"}
    rounds = QUICK_ROUNDS if quick else ROUNDS
    try:
        seen = [ranks.run_ranks(2, _rank, stall_s=STALL_S) for _ in range(rounds)]
    except ranks.RanksFailed as error:
        yield common.unmeasured(IDS[0], str(error), conditions=conditions)
        return
    conditions["errors_and_s"] = seen
    longest = [max(waited for _, waited in by_rank) for by_rank in seen]
    yield common.Figure(
        IDS[0], "s", max(longest), min(longest), max(longest), rounds=rounds, conditions=conditions
    )


def _rank(rank: int, world_size: int, progress: Callable[[], None]) -> tuple[str, float]:
    from rank_processes import Rank
    from test_fsdp2 import parts_from_its_tape

    return parts_from_its_tape(Rank(rank, world_size), True)  # type: ignore[no-any-return]
