"""A model, its optimizer, its batch and random numbers as they were, whatever was run on them."""

from __future__ import annotations

import copy
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from brimful import _C, _random
from brimful._modules import entries_of


class Unchanged:
    """Within it gradients begin empty; ``bytes`` of the device is what it holds itself and what it put aside."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
    ) -> None:
        self._model, self._batch, self._optimizer, self._device = model, batch, optimizer, device
        asked = [p for g in optimizer.param_groups for p in g["params"]] if optimizer else []
        self._parameters = list(dict.fromkeys([*model.parameters(), *asked]))
        self.bytes = 0

    def __enter__(self) -> Unchanged:
        before = _C.memory_stats(self._device).used_bytes
        parameters = self._parameters if self._optimizer else []
        self._state = _C._ForwardState(parameters, entries_of([self._model]))
        self._state.capture()
        self._kept_batch = _C._KeptBatch(self._batch)
        self._kept_optimizer = self._optimizer and _OptimizerState(self._optimizer)
        self._modes = [(m, m.training) for m in self._model.modules()]
        self._random = _random.states(), torch.get_rng_state()
        cuda = self._device.type == "cuda"
        self._cuda_random = torch.cuda.get_rng_state(self._device) if cuda else None
        # Checked by the backward of a graph from before: what is put back has not changed.
        buffers = dict.fromkeys(self._model.buffers())
        self._versions = _unsafe_preserve_version_counter((*self._parameters, *buffers))
        self._versions.__enter__()
        self._gradients = [(p, p.grad) for p in self._parameters]
        if before is not None:  # else its allocator keeps no statistics
            self.bytes = _C._memory_used_bytes(self._device) - before
            self.bytes += _storage_bytes(
                self._device, [g for _, g in self._gradients if g is not None]
            )
        self.empty_gradients()
        return self

    def between_runs(self) -> None:
        self.empty_gradients()
        self._kept_batch.restore()

    def tensors(self) -> list[torch.Tensor]:
        """What `bytes` counts."""
        kept = [*self._state.copies, *self._kept_batch.copies]
        kept += [gradient for _, gradient in self._gradients if gradient is not None]
        kept += self._kept_optimizer.copies() if self._kept_optimizer else []
        return [*kept, self._random[1]]

    def empty_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._state.restore()
        self._kept_batch.restore()
        if self._kept_optimizer:
            self._kept_optimizer.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for module, mode in self._modes:
            module.training = mode
        drawn, cpu = self._random
        _random.set_states(drawn)
        torch.set_rng_state(cpu)
        if self._cuda_random is not None:
            torch.cuda.set_rng_state(self._cuda_random, self._device)
        self._versions.__exit__(kind, error, trace)


class _OptimizerState:
    """Puts back the same objects with the same values: others may hold them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._attributes = dict(vars(optimizer))
        self._entries = [(p, s, self._kept(s)) for p, s in optimizer.state.items()]
        self._groups = [(group, self._kept(group)) for group in optimizer.param_groups]

    @staticmethod
    def _kept(values: Any) -> list[tuple[Any, Any, Any]]:
        kept: list[tuple[Any, Any, Any]] = []
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                kept.append((key, value, value.detach().clone()))
            else:
                kept.append((key, value if key == "params" else copy.deepcopy(value), None))
        return kept

    @staticmethod
    def _put_back(values: Any, kept: list[tuple[Any, Any, Any]]) -> None:
        values.clear()
        for key, value, numbers in kept:
            values[key] = value if numbers is None else value.copy_(numbers)

    def copies(self) -> list[torch.Tensor]:
        kept = [kept for _, _, kept in self._entries] + [kept for _, kept in self._groups]
        return [copy for values in kept for _, _, copy in values if copy is not None]

    def restore(self) -> None:
        vars(self._optimizer).clear()
        vars(self._optimizer).update(self._attributes)
        with torch.no_grad():
            self._optimizer.state.clear()
            for parameter, state, kept in self._entries:
                self._put_back(state, kept)
                self._optimizer.state[parameter] = state
            for group, kept in self._groups:
                self._put_back(group, kept)


def _storage_bytes(device: torch.device, tensors: list[torch.Tensor]) -> int:
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if t.layout == torch.strided and t.device == device
    }
    return sum(storages.values())
