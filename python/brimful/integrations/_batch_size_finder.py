"""Lightning's BatchSizeFinder on several ranks: its parts that are for one are replaced while it runs."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from lightning.pytorch import callbacks
from lightning.pytorch.tuner import batch_size_scaling

from brimful.finder import ran_out_on_any_rank


class BatchSizeFinder(callbacks.BatchSizeFinder):
    """Lightning's, with its texts, on several ranks too: all try a size together, and go down if memory ran out on one.

    It changes the batch. ``BrimfulStrategy(sizer=True)`` keeps it, and changes only how it is run.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str | None = None) -> None:
        # Lightning's own is for one rank, and says so.
        with patch.object(type(trainer._accelerator_connector), "is_distributed", False):
            super().setup(trainer, pl_module, stage)

    def scale_batch_size(self, trainer: Any, pl_module: Any) -> None:
        alone = batch_size_scaling._try_loop_run

        def together(*args: Any) -> None:
            if ran_out_on_any_rank(lambda: alone(*args)):
                # What Lightning takes for a shortage, of any device.
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        # All ranks restore the file that rank 0 has saved.
        name = trainer.strategy.broadcast(str(uuid.uuid4()))
        one_name = SimpleNamespace(uuid4=lambda: name)
        with patch.multiple(batch_size_scaling, _try_loop_run=together, uuid=one_name):
            super().scale_batch_size(trainer, pl_module)
