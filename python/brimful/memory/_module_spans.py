"""Which modules of a model run when: hooks that are gone afterwards."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from brimful import _C


class ModuleRows:
    """The rows of a model's modules, one for each, or, `by_call`, one for each call in the order of the calls.

    The model itself has the first one.
    """

    def __init__(self, model: nn.Module, by_call: bool) -> None:
        self.rows: list[_C.ModuleRow] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._by_call = by_call
        self._owned: set[nn.Parameter] = set()
        self._places: dict[nn.Module, int] = {}
        self._model = model
        for module in [model] if by_call else self._names:
            self._add(module)
        self.begin()

    def begin(self) -> None:
        """A step's forward begins."""
        self._next = 1

    def place(self, module: nn.Module, in_forward: bool) -> int:
        """Of the call that begins; a call in backward, as of a checkpoint, belongs to the last one in forward."""
        if self._by_call and in_forward and module is not self._model:
            if self._next == len(self.rows):
                self._add(module)
            self._places[module] = self._next
            self._next += 1
        return self._places.get(module, 0)

    def _add(self, module: nn.Module) -> None:
        row = _C.ModuleRow()
        is_script = isinstance(module, torch.jit.ScriptModule)
        row.name = self._names[module]
        row.type = str(module.original_name) if is_script else type(module).__name__
        row.depth = row.name.count(".") + 1 if row.name else 0
        parameters = list(module.parameters())
        row.trainable = sum(p.numel() for p in parameters if p.requires_grad)
        row.frozen = sum(p.numel() for p in parameters if not p.requires_grad)
        row.parameter_bytes = _bytes(parameters)
        row.buffer_bytes = _bytes(module.buffers())
        own = set(module.parameters(recurse=False))
        row.shares = not self._owned.isdisjoint(own)
        self._owned |= own
        self._places[module] = len(self.rows)
        self.rows.append(row)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


class _Running(AbstractContextManager[Any]):
    """Keeps the places of the modules that run, each inside the one before, in ``stack``."""

    def __init__(self, model: nn.Module, rows: ModuleRows) -> None:
        self._modules = list(model.modules())
        self._rows = rows
        self._hooks: list[Any] = []
        self._in_forward = False
        self.stack: list[int] = []

    def __enter__(self) -> Any:
        for module in self._modules:
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks: what it runs counts to the module around it
            self._hooks.append(
                module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
            )
            # Called for what raises, too: checkpoints leave their second forward in the middle.
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        return self

    def __exit__(self, *error: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.moved()
        place = self._rows.place(module, self._in_forward)
        self.stack.append(place)
        self.called(place, (args, kwargs))

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        self.moved()
        if self.stack:
            self.returned(self.stack.pop(), output)

    def moved(self) -> None:
        """Called where other modules are about to run."""

    def called(self, place: int, inputs: Any) -> None:
        """Called with what a module's forward is about to take."""

    def returned(self, place: int, output: Any) -> None:
        """Called with what it returned."""


class SavedBytes(_Running):
    """Writes calls, shapes, multiply-adds and saved bytes of one step into the rows."""

    def __init__(self, model: nn.Module, rows: ModuleRows, batch: Any) -> None:
        super().__init__(model, rows)
        self._flops = FlopCounterMode(display=False)
        self._flops_before = 0
        inputs = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor)]
        self._seen = set(map(_storage, [*model.parameters(), *model.buffers(), *inputs]))

    def part(self, name: str) -> AbstractContextManager[Any]:
        self._in_forward = name == "forward"
        return self._forward() if self._in_forward else nullcontext()

    @contextmanager
    def _forward(self) -> Iterator[None]:
        self._rows.begin()
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        with hooks, self._flops:
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        if storage is not None and storage not in self._seen:
            self._seen.add(storage)
            for place in set(self.stack):
                self._rows.rows[place].saved_bytes += tensor.untyped_storage().nbytes()
        return tensor

    def moved(self) -> None:
        if not self._in_forward:
            return
        flops = self._flops.get_total_flops()
        for place in set(self.stack):
            self._rows.rows[place].multiply_adds += (flops - self._flops_before) // 2
        self._flops_before = flops

    def called(self, place: int, inputs: Any) -> None:
        if self._in_forward:
            self._rows.rows[place].inputs = [list(t.shape) for t in _tensors(inputs)]

    def returned(self, place: int, output: Any) -> None:
        if not self._in_forward:
            return  # a checkpoint's second forward
        tensors = _tensors(output)
        row = self._rows.rows[place]
        row.calls += 1
        row.outputs = [list(t.shape) for t in tensors]
        row.output_bytes += _bytes(tensors)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int | None:
    if tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage().data_ptr()


class ModuleSpans(_Running):
    """One step cut into spans wherever other modules begin to run.

    In backward the modules of a node are those whose forward made it, by its sequence number.
    """

    def __init__(
        self, model: nn.Module, rows: ModuleRows, device: torch.device, uncounted: int
    ) -> None:
        super().__init__(model, rows)
        self._device, self._uncounted = device, uncounted
        self._made: list[tuple[int, list[int]]] = []  # the first node of a span, and its modules
        self.spans: list[_C._MemorySpan] = []

    def part(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext() if name == "optimizer" else _Part(self, name == "backward")

    def begin(self, backward: bool) -> None:
        self._in_forward, self.stack = not backward, []
        if self._in_forward:
            self._rows.begin()
        self._scope = _C._PeakScope(self._device)
        self._scope.__enter__()
        self._used = _C._memory_used_bytes(self._device)
        self._note_nodes()

    def end(self) -> None:
        self.moved()
        self._scope.__exit__()

    def moved(self) -> None:
        used = _C._memory_used_bytes(self._device)
        if self.stack:
            peak = self._scope.peak_bytes - self._uncounted
            span = _C._MemorySpan(self.stack, not self._in_forward, peak, used - self._used)
            self.spans.append(span)
        self._scope.__enter__()  # a new one
        self._used = used

    def called(self, place: int, inputs: Any) -> None:
        self._note_nodes()

    def returned(self, place: int, output: Any) -> None:
        self._note_nodes()

    def _note_nodes(self) -> None:
        if self._in_forward:
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
