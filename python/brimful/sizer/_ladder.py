"""How modules run where one row does not fit: their forward once more in backward, or what they save in a file."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from brimful import _C, _random
from brimful._modules import entries_of, named_modules
from brimful.reducer import DistributedDataParallel

#: Hooks of a module inside a recomputed one would run twice.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_WITH_COLLECTIVES = (
    nn.SyncBatchNorm,
    DistributedDataParallel,
    nn.parallel.DistributedDataParallel,
)


class _NotAgainError(RuntimeError):
    """A module's forward cannot be run once more with the same result."""


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _place(tensor: torch.Tensor) -> int:
    """Another one where `tensor.data` was assigned, which changes no version."""
    return tensor.data_ptr() if tensor.layout == torch.strided else 0


def _fingerprint(output: Any) -> list[tuple[Any, ...]]:
    """Of an output's values: equal for equal ones. Takes no memory."""
    found: list[tuple[Any, ...]] = []
    for tensor in _tensors(output):
        plain = tensor.detach()
        if plain.is_floating_point() or plain.is_complex():
            numbers = plain.sum(), torch.linalg.vector_norm(plain)
            found.append((tensor.shape, *(complex(number.item()) for number in numbers)))
        else:
            found.append((tensor.shape, int(plain.sum())))
    return found


def _same(left: list[tuple[Any, ...]], right: list[tuple[Any, ...]], exact: bool) -> bool:
    """NaN is NaN. On CUDA kernels may add up in another order."""
    if len(left) != len(right):
        return False
    for (shape, *numbers), (other_shape, *others) in zip(left, right, strict=True):
        if shape != other_shape or len(numbers) != len(others):
            return False
        for a, b in zip(numbers, others, strict=True):
            close = a == b or (a != a and b != b)
            if not close and (exact or abs(a - b) > 1e-3 * max(abs(a), abs(b))):
                return False
    return True


def _static_refusal(module: nn.Module) -> str | None:
    """Why a module cannot be run once more, as far as it can be seen without running it."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is scripted"
    if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
        return "it is compiled"
    for child in module.modules():
        if isinstance(child, _WITH_COLLECTIVES):
            return f"it has collectives ({type(child).__name__})"
        if isinstance(child, torch.jit.ScriptModule) or child._compiled_call_impl is not None:
            return "a part of it is compiled"
        if child is not module and any(getattr(child, hooks) for hooks in _HOOKS):
            return f"a module inside has hooks ({type(child).__name__})"
    return None


class _State:
    """What a forward may change of a module beside its output, and a second one would change again."""

    def __init__(self, module: nn.Module) -> None:
        skipped = {"_parameters", "_buffers", "_modules", "forward", *_HOOKS}
        self.plain = {
            name: (id(value), _version(value) if isinstance(value, torch.Tensor) else value)
            for name, value in vars(module).items()
            if name not in skipped
            and (value is None or isinstance(value, int | float | str | torch.Tensor))
        }
        self.names = set(vars(module))
        self.random, self.numpy = _random.marks()
        self.buffers = {
            name: (id(buffer), _version(buffer), tuple(buffer.shape), buffer.dtype, _place(buffer))
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def changed_buffers(self, after: _State) -> set[str]:
        """Names of those that a second forward would change in place: tensors that it replaces stay as they are."""
        return {
            name
            for name, now in after.buffers.items()
            if (before := self.buffers.get(name)) is None or (before[0] == now[0] and before != now)
        }

    def refusal(self, after: _State) -> str | None:
        if self.plain != after.plain or self.names != after.names:
            return "its forward changes its attributes"
        if self.random != after.random:
            return "its forward draws from Python's random"
        if self.numpy != after.numpy:
            return "its forward draws from numpy's random numbers"
        return None


class _Call:
    """One call of a recomputed module: what has to be as it was when it is run once more.

    Arguments are held as aliases apart from their graph, one for each tensor: torch's own checkpoints give a tensor
    that is passed twice as two, which attention takes for another case.
    """

    def __init__(self, owner: LadderModules, place: int, inner: Callable[..., Any]) -> None:
        self._owner, self._place, self._inner = owner, place, inner
        self._first: Any = None
        self._print: list[tuple[Any, ...]] | None = None
        self._versions: list[tuple[torch.Tensor, int]] = []

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        owner, module = self._owner, self._owner.module(self._place)
        leaves, self._form = tree_flatten((tuple(args), kwargs))
        self._first = args, kwargs
        aliases: dict[int, torch.Tensor] = {}
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                aliases[id(leaf)] = leaf.detach().requires_grad_(leaf.requires_grad)
        self._leaves = [aliases.get(id(leaf), leaf) for leaf in leaves]
        copied = owner.changing_buffers(self._place)
        kept = {id(buffer) for buffer in copied}
        inputs = [*aliases.values(), *module.parameters()]
        inputs += [b for b in module.buffers() if id(b) not in kept]
        self._versions = [(tensor, _version(tensor)) for tensor in inputs]
        self._again = _C._SecondRun(owner.entries(self._place), copied)
        return checkpoint(
            self._forward,
            torch.empty(
                0, device=owner.device
            ),  # by which torch knows whose random numbers to keep
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), self),
            early_stop=not owner.verifies(self._place),
        )

    def _forward(self, _: torch.Tensor) -> Any:
        first, self._first = self._first, None
        args, kwargs = first or tree_unflatten(self._leaves, self._form)
        output = self._inner(*args, **kwargs)
        if self._owner.verifies(self._place):
            found = _fingerprint(output)
            if self._print is None:
                self._print = found
            elif not _same(self._print, found, self._owner.is_exact):
                self._owner.reject(self._place, "its second forward gave another output")
        return output

    def __enter__(self) -> None:
        """Around each further run: a backward through a backward runs a module several times."""
        changed = [t for t, version in self._versions if _version(t) != version]
        if changed:
            shape = tuple(changed[0].shape)
            self._owner.reject(
                self._place,
                f"a tensor that it reads was changed in place behind it (shape: {shape})",
            )
        self._again.begin()

    def __exit__(self, *error: object) -> None:
        self._again.end()


class LadderModules:
    """The modules of a model, numbered, and how they run in the attempt that is under way."""

    def __init__(self, models: Sequence[nn.Module], device: torch.device) -> None:
        found = named_modules(models)
        self._names = [name for name, _ in found]
        self._modules = [weakref.ref(module) for _, module in found]
        self._models = [weakref.ref(model) for model in models]
        self.device = device
        self.is_exact = device.type == "cpu"
        self._refusals: dict[int, str] = {}  # places that are not recomputed, and why
        self._kept: set[int] = set()  # places that are not offloaded
        self._looked = False
        self._verified: set[int] = set()
        self._verifying: set[int] = set()
        self._changing = weakref.WeakKeyDictionary[nn.Module, set[str]]()  # names of buffers
        self._entries: dict[int, _C._ModuleEntries] = {}
        self._undo: list[tuple[nn.Module, Any]] = []
        self._rejected = ""
        self._hooks: Any = None
        self._put: Any = None
        self._everything = False
        self._aside: _C._Aside | None = None
        self._recorder: _C._StepEventRecorder | None = None
        self._watched: list[tuple[int, weakref.ref[torch.Tensor], int]] = []

    def module(self, place: int) -> nn.Module:
        module = self._modules[place]()
        assert module is not None  # of a model that is in a step
        return module

    def names(self) -> list[str]:
        return self._names

    def entries(self, place: int) -> _C._ModuleEntries:
        if place not in self._entries:
            self._entries[place] = entries_of([self.module(place)])
        return self._entries[place]

    def standing(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for model in self._models:
            if (module := model()) is not None:
                tensors += [*module.parameters(), *module.buffers()]
        return tensors

    def allowed(self) -> tuple[list[bool], list[bool], list[bool]]:
        self._look()
        places = range(len(self._names))
        recompute = [place not in self._refusals for place in places]
        offload = [place not in self._kept for place in places]
        return recompute, offload, [place not in self._verified for place in places]

    def coarse(self) -> list[int]:
        """The model's parts, those of its containers one by one."""
        self._look()
        places = {self.module(place): place for place in range(len(self._names))}
        found: list[int] = []
        waiting = [
            module
            for place, module in enumerate(map(self.module, places.values()))
            if self._names[place] == ""
        ]
        containers = nn.ModuleList | nn.ModuleDict | nn.Sequential
        waiting = [child for module in waiting for child in module.children()]
        while waiting:
            module = waiting.pop(0)
            if isinstance(module, containers) or places[module] in self._refusals:
                waiting += module.children()
            elif any(p.requires_grad for p in module.parameters()):
                found.append(places[module])
        return sorted(found)

    def _look(self) -> None:
        if not self._looked:
            self._looked = True
            for place in range(len(self._names)):
                module = self.module(place)
                if (why := _static_refusal(module)) is not None:
                    self._refusals[place] = why
                if isinstance(module, torch.jit.ScriptModule):
                    self._kept.add(place)

    def begin(
        self, rungs: _C._Rungs, aside: _C._Aside | None, recorder: _C._StepEventRecorder | None
    ) -> None:
        self._rejected, self._aside, self._recorder = "", aside, recorder
        self._everything = rungs.everything
        self._look()
        if recorder is not None:
            for place in range(len(self._names)):
                self._replace(place, self._recorded)
        for place in rungs.recomputed:
            if place not in self._refusals:
                self._replace(place, self._recomputed)
        for place in rungs.offloaded:
            self._replace(place, self._offloaded)

    def _replace(self, place: int, make: Callable[[int, Callable[..., Any]], Any]) -> None:
        module = self.module(place)
        if isinstance(module, torch.jit.ScriptModule):
            return
        before = vars(module).get("forward")
        self._undo.append((module, before))
        module.forward = make(place, module.forward)

    def end(self) -> None:
        while self._undo:
            module, before = self._undo.pop()
            if before is None:
                del module.forward
            else:
                module.forward = before
        if not self._rejected:
            self._verified |= self._verifying
        self._verifying = set()
        self._aside = self._recorder = self._put = None

    def begin_forward(self) -> None:
        if self._everything and self._aside is not None:
            self._put = self._aside.put
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._put, _C._Aside.get)
            self._hooks.__enter__()

    def end_forward(self) -> None:
        if self._hooks is not None:
            hooks, self._hooks = self._hooks, None
            hooks.__exit__(None, None, None)
        for place, tensor, version in self._watched:
            alive = tensor()
            if alive is not None and _version(alive) != version:
                self._refuse(place, "a tensor that it reads is changed in place behind it")
        self._watched.clear()

    def rejected(self) -> str:
        return self._rejected

    def reject(self, place: int, why: str) -> None:
        self._rejected = self._refuse(place, why)
        raise _NotAgainError(self._rejected)

    def _refuse(self, place: int, why: str) -> str:
        self._refusals.setdefault(place, why)
        return f"module '{self._names[place]}' is not recomputed any more: {why}"

    def verifies(self, place: int) -> bool:
        """The first time that a module is recomputed its outputs are compared."""
        if place in self._verified:
            return False
        self._verifying = self._verifying | {place}
        return True

    def changing_buffers(self, place: int) -> list[torch.Tensor]:
        """Those that a forward of the place changes in place."""
        found: list[torch.Tensor] = []
        for child in self.module(place).modules():
            every = isinstance(child, nn.modules.batchnorm._NormBase) and child.training
            names = child._buffers if every else self._changing.get(child, ())
            found += [b for name in names if (b := child._buffers.get(name)) is not None]
        return list({id(b): b for b in found}.values())

    def _recomputed(self, place: int, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            return _Call(self, place, inner).run(args, kwargs)

        return forward

    def _offloaded(self, place: int, inner: Callable[..., Any]) -> Callable[..., Any]:
        aside = self._aside
        assert aside is not None

        def forward(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(aside.put, _C._Aside.get):
                return inner(*args, **kwargs)

        return forward

    def _recorded(self, place: int, inner: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder
        assert recorder is not None

        def forward(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            module, inputs = self.module(place), _tensors((args, kwargs))
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
            if hooks is None or hooks[0] is not self._put:  # none: in its backward
                self._refuse(place, "it runs within a checkpoint of the program")
                self._kept.add(place)
            before = _State(module)
            self._watched += [(place, weakref.ref(t), _version(t)) for t in inputs]
            versions = [_version(t) for t in inputs]
            recorder.leave_out(1e3 * (time.perf_counter() - began))
            recorder.enter(place, inputs)
            try:
                return inner(*args, **kwargs)
            finally:
                recorder.leave()
                began = time.perf_counter()
                after = _State(module)
                if (why := before.refusal(after)) is not None:
                    self._refuse_around(module, why)
                if [_version(t) for t in inputs] != versions:
                    self._refuse(place, "its forward changes its inputs")
                if changed := before.changed_buffers(after):
                    self._changing.setdefault(module, set()).update(changed)
                if copied := self.changing_buffers(place):
                    recorder.note_copied(place, sum(b.nbytes for b in copied))
                recorder.leave_out(1e3 * (time.perf_counter() - began))

        return forward

    def _around(self, inner: nn.Module) -> Iterator[int]:
        """Its place, and those of all modules that it lies in."""
        for place in range(len(self._names)):
            if inner in set(self.module(place).modules()):
                yield place

    def _refuse_around(self, inner: nn.Module, why: str) -> None:
        for place in self._around(inner):
            self._refusals.setdefault(place, why)


def rungs_of(
    ladder: str | Iterable[str],
    known: Sequence[str] = ("split", "recompute", "offload", "state"),
) -> tuple[bool, bool]:
    """Whether to recompute, and to offload. Raises ValueError for what is no ladder of ``known`` rungs."""
    if ladder == "auto":
        return True, True
    chosen = {ladder} if isinstance(ladder, str) else set(ladder)
    if not chosen <= set(known) or "split" not in chosen:
        *first, last = map(repr, known)
        raise ValueError(
            f"a ladder is 'auto', 'split', or a list of {', '.join(first)} and {last} that begins with 'split' "
            f"(ladder: {ladder!r})"
        )
    return "recompute" in chosen, "offload" in chosen


def has_state(ladder: str | Iterable[str]) -> bool:
    """Whether the optimizer's state may lie elsewhere: only where it is asked for."""
    return not isinstance(ladder, str) and "state" in set(ladder)
