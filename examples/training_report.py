"""What train_fashion_mnist.py shows: a progress line, what brimful logs, and a table at the end."""

import json
import logging
import shutil
import sys
import time

import torch.distributed as dist

import brimful
from brimful import memory

EVERY = 20  # steps from one plain line to the next


def mib(count):
    return f"{count / (1 << 20):.1f} MiB"


class Screen(logging.Handler):
    """Lines, and below them one that is written over; plain lines where stdout is not a terminal."""

    def __init__(self):
        super().__init__()
        self.terminal = sys.stdout.isatty()
        self.shown_at = 0.0

    def line(self, text):
        # One write: the ranks share the screen.
        sys.stdout.write(f"\r\033[K{text}\n" if self.terminal else f"{text}\n")
        sys.stdout.flush()

    def progress(self, text, step):
        if self.terminal and time.monotonic() - self.shown_at > 0.1:
            self.shown_at = time.monotonic()
            sys.stdout.write(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}")
            sys.stdout.flush()
        elif not self.terminal and step % EVERY == 0:
            self.line(text)

    def emit(self, record):
        self.line(f"  {record.getMessage()}")


class Report:
    """Keeps count on every rank; rank 0 shows the progress and the table, each rank its own shortages."""

    def __init__(self, args, needed, samples, batches):
        self.args, self.rank, self.started = args, dist.get_rank(), time.monotonic()
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, batches)
        self.steps_in_all = args.epochs * max(everyones)
        self.screen = Screen()
        logger = logging.getLogger("brimful")  # every retry is a line there
        logger.addHandler(self.screen)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        self.seen = {"rank": self.rank, "samples": samples, "steps": 0, "no_data": 0, "splits": []}
        self.seen |= {
            "retries_alone": 0,
            "retries_agreed": 0,
            "ran_out": 0,
            "buckets_launched": None,
        }
        self.seen |= {"budgets": [memory.stats("cpu").limit_bytes], "peaks": []}
        self.losses, self.accuracy = [], None
        if self.rank == 0:
            self.screen.line(
                f"{dist.get_world_size()} ranks, batches of {args.batch} each: unsplit, a step needs "
                f"{mib(needed)} and the budget is {mib(self.seen['budgets'][0])}"
            )

    def after_step(self, epoch, batch, outcome):
        seen = self.seen
        seen["steps"] += 1
        seen["no_data"] += batch is brimful.NO_DATA
        seen["splits"].append(outcome.split)
        for attempt in outcome.attempts:
            if attempt.ran_out:
                seen["retries_alone" if attempt.alone else "retries_agreed"] += 1
                seen["ran_out"] += self.rank in attempt.ran_out
            if self.rank in attempt.ran_out and not attempt.alone:
                seen["buckets_launched"] = attempt.buckets_launched
        budget = memory.stats("cpu").limit_bytes
        if budget != seen["budgets"][-1]:  # cut in this step
            self.note_peak()
            seen["budgets"].append(budget)
        self.losses.append(outcome.loss)
        if self.rank == 0:
            split = f"{outcome.pieces} x {outcome.split[0]}" if outcome.split else "no data"
            text = f"epoch {epoch + 1}/{self.args.epochs}  step {seen['steps']}/{self.steps_in_all}"
            text += f"  loss {outcome.loss:.3f}  split {split}"
            text += f"  peak {mib(outcome.peak_bytes)} of {mib(budget)}"
            text += f"  retries {seen['retries_alone'] + seen['retries_agreed']}"
            self.screen.progress(text, seen["steps"])

    def after_cut(self, used, buckets_launched):
        self.screen.line(
            f"  rank {self.rank} loses memory inside backward: its budget is cut to the {mib(used)} in use "
            f"(buckets launched: {buckets_launched})"
        )

    def note_peak(self):
        self.seen["peaks"].append(memory.stats("cpu").peak_bytes)
        memory.reset_peak("cpu")

    def after_epoch(self, epoch, accuracy):
        self.accuracy = accuracy
        if self.rank == 0:
            recent = self.losses[-EVERY:]
            self.screen.line(
                f"epoch {epoch + 1}/{self.args.epochs}  loss {sum(recent) / len(recent):.3f}  "
                f"test accuracy {accuracy:.1%}"
            )

    def finish(self, difference):
        """Shows the table and writes the JSON file, on rank 0. Returns whether all ranks agree."""
        self.note_peak()
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.seen)
        if self.rank == 0:
            seconds = time.monotonic() - self.started
            for line in table(everyone, self.accuracy, difference, seconds):
                self.screen.line(line)
            if self.args.json:
                result = {"ranks": everyone, "losses": self.losses, "accuracy": self.accuracy}
                result |= {"difference": difference, "seconds": seconds}
                with open(self.args.json, "w") as file:
                    json.dump(result, file)
        return difference == 0


def table(everyone, accuracy, difference, seconds):
    def row(title, show):
        return f"{title:<34}" + "".join(f"{show(seen)!s:>26}" for seen in everyone)

    def then(values):
        return ", then ".join(mib(value) for value in values)

    yield ""
    yield row("", lambda s: f"rank {s['rank']}")
    yield row("samples", lambda s: s["samples"])
    yield row("steps (without data)", lambda s: f"{s['steps']} ({s['no_data']})")
    yield row("times out of memory", lambda s: s["ran_out"])
    yield row("retries alone", lambda s: s["retries_alone"])
    yield row("retries agreed by all ranks", lambda s: s["retries_agreed"])
    yield row("buckets launched when it ran out", lambda s: s["buckets_launched"] or "-")
    yield row("budget", lambda s: then(s["budgets"]))
    yield row("peak", lambda s: then(s["peaks"]))
    yield f"{'test accuracy':<34}{accuracy:>26.1%}"
    yield f"{'largest difference of parameters':<34}{difference:>26g}"
    yield f"{'time':<34}{f'{seconds:.0f} s':>26}"
