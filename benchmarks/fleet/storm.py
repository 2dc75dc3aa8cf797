"""One long job whose ranks are killed, cut off and replaced at any moment."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "python"))

import fleet_ranks

WORLD_SIZE, STEPS_BETWEEN, STEPS_AN_EPOCH = 3, 5, 10
LAST_STEPS = 50  # in which nothing happens: who joins has to come before the end
CUT_OFF_EVERY, CUT_OFF_S = 6, 1.2
WATCHDOG_S = 600
TOLERANCE = 1e-9  # of parameters after a thousand steps in float64, whose sums have another order with other ranks


@dataclass
class Through:
    """What a job went through, and what was wrong at its end."""

    steps: int = 0
    kills: int = 0
    stops: int = 0
    joins: int = 0
    rows_bad: int = 0
    exact_bad: int = 0
    hangs: int = 0
    seconds: float = 0

    def conditions(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "killed": self.kills,
            "stopped past dead_after_ms": self.stops,
            "joined": self.joins,
            "seconds": round(self.seconds, 1),
        }


def run(steps: int, seed: int) -> Through:
    """Kills a rank each few steps, or stops it for a while, and starts another one in its place."""
    draw, through, begun = random.Random(seed), Through(steps=steps), time.monotonic()
    rows = STEPS_AN_EPOCH * fleet_ranks.BATCH
    epochs = steps // STEPS_AN_EPOCH
    plan = fleet_ranks.Plan(
        world_size=WORLD_SIZE,
        rows=rows,
        epochs=epochs,
        pause_s=0.05,
        options={"dead_after_ms": 400},
    )
    with fleet_ranks.Ranks() as ranks:
        alive = [ranks.start(plan) for _ in range(WORLD_SIZE)]
        done = 0
        while done + STEPS_BETWEEN + LAST_STEPS < steps:
            wanted = done + STEPS_BETWEEN
            while (done := _progress(ranks, alive[-1:])) < wanted:  # it has joined, too
                if time.monotonic() - begun > WATCHDOG_S:
                    through.hangs = 1
                    return through
                time.sleep(0.005)
            victim = alive.pop(draw.randrange(len(alive)))
            time.sleep(draw.random() * 0.02)  # at any moment of a step
            if (through.kills + through.stops) % CUT_OFF_EVERY == CUT_OFF_EVERY - 1:
                os.kill(ranks.processes[victim].pid, signal.SIGSTOP)
                time.sleep(CUT_OFF_S)
                os.kill(ranks.processes[victim].pid, signal.SIGCONT)  # it finds itself left out
                through.stops += 1
            else:
                ranks.processes[victim].kill()
                through.kills += 1
            ranks.processes[victim].join(timeout=30)
            with Path(ranks.log_of(victim)).open("a") as log:
                log.write("k -1 0\n")  # what stood on it alone does not count
            alive.append(ranks.start(plan))
            through.joins += 1
        try:
            answers = ranks.answers(within_s=WATCHDOG_S)
        except AssertionError as hang:
            print(hang, file=sys.stderr)
            through.hangs = 1
            return through
        ended = [answers[index][1] for index in alive if answers[index][0] == "ended"]
        if len(ended) < len(alive):
            print([answers[i] for i in alive if answers[i][0] != "ended"], file=sys.stderr)
        through.exact_bad = len(alive) - len(ended)
        through.rows_bad = ranks.rows_bad(plan)
        if ended:  # all began as one of the first ranks
            seeds = range(WORLD_SIZE)
            through.exact_bad += min(
                fleet_ranks.exact_bad(plan, ended, TOLERANCE, seed) for seed in seeds
            )
    through.seconds = time.monotonic() - begun
    return through


def _progress(ranks: fleet_ranks.Ranks, alive: list[int]) -> int:
    """Steps that stand on some rank."""
    done = 0
    for index in alive:
        for line in reversed(ranks.lines(index)):
            if line[0] == "s":
                done = max(done, int(line[1]) + 1)
                break
    return done
