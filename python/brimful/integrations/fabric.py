"""Lightning Fabric: ``Fabric(strategy="ddp_brimful")``, registered when this is imported."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from brimful.integrations._extra import require

require("lightning")

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl

import brimful

__all__ = ["BrimfulFabricStrategy"]


class BrimfulFabricStrategy(DDPStrategy):
    """Fabric's DDPStrategy with brimful's class in the place of torch's; takes the keywords of both."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _SyncControl()

    def setup_module(self, module: torch.nn.Module) -> brimful.DistributedDataParallel:
        return brimful.DistributedDataParallel(
            module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs
        )

    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        state: dict[str, Any] = super().get_module_state_dict(_inner(module))
        return state

    def load_module_state_dict(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().load_module_state_dict(_inner(module), *args, **kwargs)


class _SyncControl(_BackwardSyncControl):
    def no_backward_sync(
        self, module: brimful.DistributedDataParallel, enabled: bool
    ) -> AbstractContextManager[None]:
        return module.no_sync() if enabled else nullcontext()


def _inner(module: torch.nn.Module) -> torch.nn.Module:
    return module.module if isinstance(module, brimful.DistributedDataParallel) else module


STRATEGY_REGISTRY.register(
    "ddp_brimful",
    BrimfulFabricStrategy,
    description=str(BrimfulFabricStrategy.__doc__).splitlines()[0],
)
