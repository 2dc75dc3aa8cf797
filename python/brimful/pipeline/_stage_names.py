"""Parameters of a pipeline's stages by their names in the model that is not cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from brimful._log import text_of
from brimful.reducer import DistributedDataParallel


def bare(module: Any) -> torch.nn.Module:
    """Without what was put around it, whose prefix the model's names do not have."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif hasattr(module, "_orig_mod"):  # of torch.compile
            module = module._orig_mod
        else:
            found: torch.nn.Module = module
            return found


class StageNames:
    """Modules of the stages and the prefix of each one's names.

    Stages of a model that was cut keep its names. Where two stages have the same name, a stage's number is in front of
    all, as in ``torch.nn.Sequential(*stages)``.
    """

    def __init__(self, stages: Sequence[Sequence[torch.nn.Module]], numbers: Sequence[int]) -> None:
        self.modules: list[tuple[str, torch.nn.Module]] = []
        for modules in stages:
            several = len(modules) > 1  # of a function that uses them
            self.modules += [(f"{i}." if several else "", bare(m)) for i, m in enumerate(modules)]
        if self._clash():
            counts = [len(modules) for modules in stages]
            of_stage = [n for n, count in zip(numbers, counts, strict=True) for _ in range(count)]
            self.modules = [
                (f"{number}.{prefix}", module)
                for number, (prefix, module) in zip(of_stage, self.modules, strict=True)
            ]

    def _clash(self) -> bool:
        seen: dict[str, torch.Tensor] = {}
        for prefix, module in self.modules:
            parameters = module.named_parameters(remove_duplicate=False)
            buffers = module.named_buffers(remove_duplicate=False)
            for name, tensor in [*parameters, *buffers]:
                if seen.setdefault(prefix + name, tensor) is not tensor:
                    return True
        return False

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        seen = set()
        for prefix, module in self.modules:
            for name, parameter in module.named_parameters(prefix[:-1]):
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def state_dict(self, *, keep_vars: bool) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for prefix, module in self.modules:
            module.state_dict(destination=state, prefix=prefix, keep_vars=keep_vars)
        return state

    def load_state_dict(
        self, state: Mapping[str, Any], *, strict: bool, others_have_theirs: bool
    ) -> tuple[list[str], list[str]]:
        """Missing keys, and those that no stage here takes."""
        missing, errors = [], []
        for prefix, module in self.modules:
            own = {
                name[len(prefix) :]: value
                for name, value in state.items()
                if name.startswith(prefix)
            }
            try:
                missed = module.load_state_dict(own, strict=False).missing_keys
                missing += [prefix + name for name in missed]
            except RuntimeError as error:
                errors.append(text_of(error))
        known = self.state_dict(keep_vars=True)
        left = [] if others_have_theirs else [name for name in state if name not in known]
        if strict and missing:
            errors.append(f"missing keys: {', '.join(missing)}")
        if strict and left:
            errors.append(f"keys of no stage: {', '.join(left)}")
        if errors:
            raise RuntimeError(
                "the state does not fit the pipeline's stages (" + "; ".join(errors) + ")"
            )
        return missing, left
