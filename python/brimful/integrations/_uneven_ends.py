"""Ranks of a Hugging Face trainer whose loaders end at different steps: those without data take part until all end."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Trainer


class NoBatch(dict[str, Any]):
    """In the place of a batch, on a rank whose data has ended and that of others has not."""


class UnevenEnds:
    """The ranks meet once for each step of the optimizer, to say how many batches they have for it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._factors: deque[float] = deque()
        theirs = type(trainer).get_batch_samples is Trainer.get_batch_samples
        if trainer.accelerator.num_processes == 1 or not theirs:
            return
        self._values = trainer.set_initial_training_values
        self._prepare_inputs = trainer._prepare_inputs
        trainer.get_batch_samples = self._samples
        trainer.set_initial_training_values = self._longest
        trainer._prepare_inputs = self._prepared

    def factor(self) -> float:
        """All ranks over those that have data, for the batch that comes now: means are over the latter."""
        return self._factors.popleft() if self._factors else 1.0

    def _longest(self, *args: Any, **kwargs: Any) -> Any:
        from accelerate.utils import gather_object

        # (epochs, optimizer steps of an epoch, ..., batches of an epoch, steps of all)
        return max(gather_object([self._values(*args, **kwargs)]), key=lambda v: (v[1], v[5] or 0))

    def _samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        trainer = self._trainer
        samples = list(itertools.islice(epoch_iterator, num_batches))
        count = torch.tensor([len(samples)], device=device)
        counts = trainer.accelerator.gather(count).tolist()
        most = max(counts)
        active = [sum(other > index for other in counts) for index in range(most)]
        self._factors = deque(len(counts) / ranks for ranks in active)
        if min(counts) == most:
            return samples, trainer._get_num_items_in_batch(samples, device)
        items = self._items(samples, device)
        return samples + [NoBatch() for _ in range(most - len(samples))], items

    def _items(self, samples: list[Any], device: Any) -> Any:
        """Of the ranks that have batches: the trainer's own gathers only there."""
        from accelerate.utils import gather_object

        trainer = self._trainer
        everywhere = trainer.args.average_tokens_across_devices
        trainer.args.average_tokens_across_devices = False
        try:
            here = trainer._get_num_items_in_batch(samples, device)
        finally:
            trainer.args.average_tokens_across_devices = everywhere
        counts = [float(n) for n in gather_object([here]) if n is not None]
        if not everywhere or not counts:
            return here
        return torch.tensor(sum(counts), device=device)

    def _prepared(self, inputs: Any) -> Any:
        return inputs if isinstance(inputs, NoBatch) else self._prepare_inputs(inputs)
