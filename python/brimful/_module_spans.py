"""Which modules of a model run when: hooks that are gone afterwards."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from brimful import _C


def module_rows(model: nn.Module) -> list[_C.ModuleRow]:
    """What is known without running it."""
    rows = []
    owned: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        row = _C.ModuleRow()
        is_script = isinstance(module, torch.jit.ScriptModule)
        row.name, row.type = name, module.original_name if is_script else type(module).__name__
        row.depth = name.count(".") + 1 if name else 0
        parameters = list(module.parameters())
        row.trainable = sum(p.numel() for p in parameters if p.requires_grad)
        row.frozen = sum(p.numel() for p in parameters if not p.requires_grad)
        row.parameter_bytes = _bytes(parameters)
        row.buffer_bytes = _bytes(module.buffers())
        own = set(module.parameters(recurse=False))
        row.shares = not owned.isdisjoint(own)
        owned |= own
        rows.append(row)
    return rows


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


class _Running(AbstractContextManager[Any]):
    """Keeps the places of the modules that run, each inside the one before, in ``stack``."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._places = {module: place for place, module in enumerate(self._modules)}
        self._hooks: list[Any] = []
        self.stack: list[int] = []

    def __enter__(self) -> Any:
        for module in self._modules:
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks: what it runs counts to the module around it
            self._hooks.append(module.register_forward_pre_hook(self._enter, prepend=True))
            # Called for what raises, too: checkpoints leave their second forward in the middle.
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        return self

    def __exit__(self, *error: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self.moved()
        self.stack.append(self._places[module])

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        self.moved()
        if self.stack:
            self.stack.pop()
        self.returned(self._places[module], output)

    def moved(self) -> None:
        """Called where other modules are about to run."""

    def returned(self, place: int, output: Any) -> None:
        """Called with what a module's forward returned."""


class SavedBytes(_Running):
    """Writes calls, outputs and saved bytes of one step into the rows."""

    def __init__(self, model: nn.Module, rows: list[_C.ModuleRow], batch: Any) -> None:
        super().__init__(model)
        self._rows = rows
        inputs = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor)]
        self._seen = set(map(_storage, [*model.parameters(), *model.buffers(), *inputs]))
        self._in_forward = False

    def part(self, name: str) -> AbstractContextManager[Any]:
        self._in_forward = name == "forward"
        if not self._in_forward:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        if storage is not None and storage not in self._seen:
            self._seen.add(storage)
            for place in set(self.stack):
                self._rows[place].saved_bytes += tensor.untyped_storage().nbytes()
        return tensor

    def returned(self, place: int, output: Any) -> None:
        if not self._in_forward:
            return  # a checkpoint's second forward
        tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        row = self._rows[place]
        row.calls += 1
        row.outputs = [list(t.shape) for t in tensors]
        row.output_bytes += _bytes(tensors)


def _storage(tensor: torch.Tensor) -> int | None:
    if tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage().data_ptr()


class ModuleSpans(_Running):
    """One step cut into spans wherever other modules begin to run.

    In backward the modules of a node are those whose forward made it, by its sequence number.
    """

    def __init__(self, model: nn.Module, device: torch.device, uncounted: int) -> None:
        super().__init__(model)
        self._device, self._uncounted = device, uncounted
        self._in_backward = False
        self._made: list[tuple[int, list[int]]] = []  # the first node of a span, and its modules
        self.spans: list[_C._MemorySpan] = []

    def part(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext() if name == "optimizer" else _Part(self, name == "backward")

    def begin(self, backward: bool) -> None:
        self._in_backward, self.stack = backward, []
        self._scope = _C._PeakScope(self._device)
        self._scope.__enter__()
        self._used = _C.memory_stats(self._device).used_bytes
        self._note_nodes()

    def end(self) -> None:
        self.moved()
        self._scope.__exit__()

    def moved(self) -> None:
        used = _C.memory_stats(self._device).used_bytes
        if self.stack:
            peak = self._scope.peak_bytes - self._uncounted
            span = _C._MemorySpan(self.stack, self._in_backward, peak, used - self._used)
            self.spans.append(span)
        self._scope.__enter__()  # a new one
        self._used = used

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        super()._enter(module, inputs)
        self._note_nodes()

    def returned(self, place: int, output: Any) -> None:
        self._note_nodes()

    def _note_nodes(self) -> None:
        if not self._in_backward:
            self._made.append((torch._C._autograd._get_sequence_nr(), list(self.stack)))

    def follow(self, loss: torch.Tensor) -> None:
        """Lets each node of the loss's graph say when it runs."""
        firsts = [first for first, _ in self._made]
        nodes, seen = [loss.grad_fn], {loss.grad_fn}
        while nodes:
            node = nodes.pop()
            if node is None:
                continue
            number = node._sequence_nr()
            if number <= self._made[-1][0]:  # not a leaf's, which runs right behind its user
                stack = self._made[bisect_right(firsts, number) - 1][1]
                self._hooks.append(node.register_prehook(self._runs(stack)))
            following = [node for node, _ in node.next_functions if node not in seen]
            seen.update(following)
            nodes.extend(following)

    def _runs(self, stack: list[int]) -> Callable[[Any], None]:
        def prehook(_: Any) -> None:
            if stack != self.stack:
                self.moved()
                self.stack = list(stack)

        return prehook


class _Part(AbstractContextManager[ModuleSpans]):
    def __init__(self, spans: ModuleSpans, backward: bool) -> None:
        self._spans, self._backward = spans, backward

    def __enter__(self) -> ModuleSpans:
        self._spans.begin(self._backward)
        return self._spans

    def __exit__(self, *error: object) -> None:
        self._spans.end()
