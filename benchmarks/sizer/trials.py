"""One training step from a given start, with an allocation that is refused at a given place; what it leaves behind."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from benchmarks import common
from benchmarks.sizer import models

ROWS = 4  # a step of a few hundred allocations
WARM_UP = 2
WORK, OPTIMIZER = "work", "optimizer"  # copy-in, forward and backward; making the optimizer's state


@dataclass
class Result:
    """How a trial ended. `held_bytes`: in use above the start when the step has returned, gradients included."""

    split: list[int] | None = None
    retries: int = 0
    error: str | None = None
    half_step: bool = False
    fired: bool = False
    seen: dict[str, int] = field(default_factory=dict)
    held_bytes: int = 0
    left_bytes: int = 0
    peak_bytes: int = 0
    values: list[torch.Tensor] = field(default_factory=list)
    rng: tuple[Any, ...] = ()

    def differs_from(self, clean: Result) -> str | None:
        """Names what is not bit-equal to a clean run, or None."""
        if self.rng != clean.rng:
            return "random numbers differ"
        if not same_bits(self.values, clean.values):
            return "parameters, buffers or optimizer state differ"
        if self.held_bytes != clean.held_bytes:
            return f"{self.held_bytes - clean.held_bytes} bytes more in use after the step"
        if self.left_bytes != clean.left_bytes:
            return f"{self.left_bytes - clean.left_bytes} bytes left over"
        return None


class Subject:
    """A model that is put back to its start before each trial.

    `ladder`: the sizer's; `rungs`, which may be set later, are those of each step.
    """

    def __init__(
        self,
        case: models.Case,
        wrap: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
        rank: int = 0,
        ladder: str = "split",
    ) -> None:
        import brimful

        self.brimful = brimful
        common.collect_all()  # what others have left is not to go while a trial runs
        torch.manual_seed(0)
        module = case.make()
        self.model = module if wrap is None else wrap(module)
        torch.manual_seed(1 + rank)
        self.rank = rank
        self.ladder, self.rungs = ladder, None
        self.batch = case.batch(ROWS + rank)
        self.tensors = [*self.model.parameters(), *self.model.buffers()]
        # Bytes seen after clean runs: threads of a process group let go of a collective's tensors a moment later.
        self._known: set[int] = {0}
        self._settle_s = 0.0 if wrap is None else 0.25
        self.start = [tensor.detach().clone() for tensor in self.tensors]
        for _ in range(WARM_UP):  # what is made once is made in the first
            self.run()
            self.run(split=[1] * len(self.batch), is_clean=True)

    def run(
        self,
        fault: tuple[str, int] | None = None,
        split: Sequence[int] | None = None,
        hears_of: int | None = None,
        is_clean: bool = False,
    ) -> Result:
        """One step and the optimizer's; `fault` is the phase and the index of the refused allocation.

        `hears_of`: the rank that fails in its optimizer; this one begins another step, which must report that.
        `is_clean`: what is in use afterwards is what it should be after others.
        """
        self._reset()
        before = self._used()
        result = self._attempt(before, fault, split, hears_of, is_clean)
        kept = sum(value.numel() * value.element_size() for value in result.values)
        self.model.zero_grad()
        gc.collect()
        result.left_bytes = self._above(before + kept, is_clean)
        return result

    def _above(self, base: int, is_clean: bool) -> int:
        """Bytes in use above `base`, when the threads of the process group have let go of theirs."""
        if is_clean:
            time.sleep(self._settle_s / 5)
            above = self._used() - base
            self._known.add(above)
            return above
        deadline = time.monotonic() + self._settle_s
        while (above := self._used() - base) not in self._known and time.monotonic() < deadline:
            time.sleep(self._settle_s / 500)
        return above

    def _attempt(
        self,
        before: int,
        fault: tuple[str, int] | None,
        split: Sequence[int] | None,
        hears_of: int | None,
        is_clean: bool,
    ) -> Result:
        optimizer = torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad])
        sizer = self.brimful.BatchSizer(self.model, optimizer, predict=False, ladder=self.ladder)
        result = Result()
        rungs = self.rungs
        calls = (
            (WORK, lambda: sizer.step(self.batch, noisy_loss, split=split, rungs=rungs)),
            (OPTIMIZER, optimizer.step),
        )
        with self.brimful._C._PeakScope("cpu") as peak:
            for phase, call in calls:
                self._call(phase, call, fault, result)
                if result.error is not None:
                    break
                if phase == WORK:
                    result.held_bytes = self._above(before, is_clean)
        result.peak_bytes = peak.peak_bytes - before
        if hears_of is not None and result.error is None:
            result.error = self._learn(sizer, hears_of)
        with self.brimful._C._Unlimited():
            result.values = [t.detach().clone() for t in (*self.tensors, *_state_of(optimizer))]
            result.rng = rng_states()
        return result

    def _call(
        self, phase: str, call: Callable[[], Any], fault: tuple[str, int] | None, result: Result
    ) -> None:
        at = fault[1] if fault is not None and fault[0] == phase else 2**62
        with self.brimful._C._FaultAt(at) as planted:
            try:
                outcome = call()
            except Exception as error:
                result.error = f"{phase}: {type(error).__name__}: {str(error).splitlines()[0]}"
                result.half_step = type(error) is self.brimful.HalfStepError
                error.__traceback__ = error.__context__ = error.__cause__ = None
            else:
                if phase == WORK:
                    result.split, result.retries = list(outcome.split), outcome.retries
        result.seen[phase] = planted.seen
        result.fired = result.fired or planted.fired

    def _learn(self, sizer: Any, failed: int) -> str | None:
        self.model.zero_grad()
        try:
            sizer.step(self.batch, noisy_loss)
        except self.brimful.RankFailed as error:
            error.__traceback__ = None
            is_named = error.rank == failed and "failed in the middle of its step" in str(error)
            return None if is_named else f"the other rank's message is lost: {error}"
        return "the other rank's HalfStepError did not come"

    @contextmanager
    def limit(self, room: int) -> Iterator[None]:
        """Leaves `room` bytes beyond what is in use."""
        self._reset()
        self.brimful.memory.set_limit("cpu", self._used() + room)
        try:
            yield
        finally:
            self.brimful.memory.set_limit("cpu", None)

    def _reset(self) -> None:
        self.model.zero_grad()
        with torch.no_grad(), self.brimful._C._Unlimited():
            for tensor, value in zip(self.tensors, self.start, strict=True):
                tensor.copy_(value)
            torch.manual_seed(2 + self.rank)
        random.seed(2 + self.rank)
        numpy.random.seed(2 + self.rank)

    def _used(self) -> int:
        return int(self.brimful.memory.stats("cpu").used_bytes)


def noisy_loss(model: torch.nn.Module, piece: torch.Tensor) -> torch.Tensor:
    """Copies the piece, as a step does that moves it to its device, and draws from three generators."""
    noise = random.random() + numpy.random.random() + float(torch.rand(()))
    out: torch.Tensor = model(piece.clone()).square().mean() * (1 + noise)
    return out


def rng_states() -> tuple[Any, ...]:
    """Of torch's, Python's and numpy's generators, to be compared."""
    name, keys, *rest = numpy.random.get_state()
    return bytes(torch.get_rng_state().numpy()), random.getstate(), name, keys.tobytes(), *rest


def same_bits(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """True if all are equal to the bit, NaNs and signs of zeros included."""
    return len(one) == len(other) and all(
        a.shape == b.shape and a.dtype == b.dtype and bytes_of(a) == bytes_of(b)
        for a, b in zip(one, other, strict=True)
    )


def bytes_of(tensor: torch.Tensor) -> bytes:
    """What the tensor's elements are in memory."""
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def _state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        value
        for state in optimizer.state.values()
        for _, value in sorted(state.items())
        if isinstance(value, torch.Tensor)
    ]


@contextmanager
def quick_collections() -> Iterator[None]:
    """What lives now is left out of the collections inside, one of which each trial needs."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def indices(count: int, most: int | None) -> list[int]:
    """All of range(count), or `most` of them spread evenly, ends included."""
    if most is None or count <= most:
        return list(range(count))
    return sorted({round(k * (count - 1) / (most - 1)) for k in range(most)})
