"""Ranks with different numbers of batches: model.join(), and torch's Join over a model and other joinables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig

from brimful.reducer._wrapping import Contents

if TYPE_CHECKING:
    from brimful.reducer import DistributedDataParallel


def not_joined() -> _JoinConfig:
    """What torch's Join has set before and behind it."""
    return _JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)


@contextmanager
def joining(
    model: DistributedDataParallel, mean_of_active: bool, throw_early: bool
) -> Iterator[None]:
    """What a wrapped model's join() does."""
    reducer = model.reducer
    reducer.begin_join(mean_of_active, throw_early)
    model._before_forward = _require_data if throw_early else None
    try:
        yield
        while reducer.join_step():
            pass
        _take_last_values(model)
    finally:
        model._before_forward = None
        reducer.end_join()


def _require_data(model: DistributedDataParallel) -> None:
    model._settle()
    model.reducer.require_data()


def _take_last_values(model: DistributedDataParallel) -> None:
    """Parameters and buffers of the highest rank that made the last step, on every rank."""
    reducer = model.reducer
    contents = Contents(model.module)
    buffers = contents.buffers if model.forward_sync_buffers else []
    source = reducer.active[-1] if reducer.active else 0
    tensors = [*contents.trainable, *contents.frozen, *(place.tensor for place in buffers)]
    reducer.broadcast(tensors, source)


class InTorchsJoin(JoinHook):
    """What torch's Join calls on a rank that has left: the model's part of the steps that the others make.

    This rank gets the mean as well: an optimizer that is joined too (ZeroRedundancyOptimizer) steps with it.
    """

    def __init__(self, model: DistributedDataParallel, mean_of_active: bool) -> None:
        self.model = model
        self.begun = False
        self.mean_of_active = mean_of_active
        model._before_forward = self._before_forward

    def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            self.model.reducer.begin_join(self.mean_of_active, False)

    def _before_forward(self, model: DistributedDataParallel) -> None:
        if not model._join_config.enable:
            return
        self._begin()
        model._settle()
        try:
            Join.notify_join_context(model)
        except RuntimeError:  # on all ranks: one has left, and the context is to raise then
            model.reducer.call_off()
            raise
        model.reducer.any_rank(torch.is_grad_enabled() and model.reducer.sync)

    def main_hook(self) -> None:
        self._begin()
        if self.model.reducer.any_rank(False):
            self.model.reducer.join_step(keep_gradients=True)

    def post_hook(self, is_last_joiner: bool) -> None:
        _take_last_values(self.model)
        self.model.reducer.end_join()
        self.model._before_forward = None
        self.model._join_config = not_joined()
