"""Lightning's Trainer: the strategy "ddp_brimful", a batch size finder for several ranks, and memory in the logs.

``import brimful.integrations.lightning`` registers the strategy, for Fabric too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from brimful.integrations._extra import require

require("lightning")

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn

import brimful
from brimful.integrations import fabric  # noqa: F401  (registers the strategy there)
from brimful.integrations._batch_size_finder import BatchSizeFinder
from brimful.integrations._step_as_loss import step_as_loss
from brimful.integrations._step_outputs import BatchSkipped, OfPieces, StepOutputs
from brimful.integrations._until_all_end import until_all_end
from brimful.sampler import global_sampler_of

__all__ = ["BatchSizeFinder", "BrimfulStrategy", "MemoryReport", "OfPieces"]


class BrimfulStrategy(DDPStrategy):
    """``Trainer(strategy="ddp_brimful")``: Lightning's DDPStrategy with brimful's class in the place of torch's.

    Takes the keywords of ``DDPStrategy`` and of ``brimful.DistributedDataParallel``. With ``sizer=True``, or a dict of
    options of ``BatchSizer``, every batch runs in pieces that fit: ``training_step`` is called for each piece. What it
    logs is logged once for the batch, and what it returns beside the loss is put together: rows in their order, floats
    as their mean, anything else as ``OfPieces`` where there were several. ``None`` for any piece leaves the batch out.
    That is for automatic optimization. What the loss is a mean or sum over is found out in the first steps, on four
    rows, of which ``training_step`` is called (``loss_rule`` of ``BatchSizer``; ``"rows"``: a mean over rows).
    A rank whose training data ends before that of others takes part until all end; hooks get ``brimful.NO_DATA`` there.
    A ``GlobalSampler`` that is the training loader's ``batch_sampler`` learns each step's outcome.
    A scaler (``precision="16-mixed"``) scales the gradients of a batch when they are made; bfloat16 needs none.
    """

    def __init__(self, *args: Any, sizer: bool | Mapping[str, Any] = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sizer_options = {} if sizer is True else sizer
        self.sizer: brimful.BatchSizer | None = None
        self._sampler: brimful.GlobalSampler | None = None
        self._outputs: StepOutputs | None = None

    def _setup_model(self, model: torch.nn.Module) -> brimful.DistributedDataParallel:
        return brimful.DistributedDataParallel(
            model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs
        )

    def _register_ddp_hooks(self) -> None:
        hook, wrapper = self._ddp_comm_hook, self._ddp_comm_wrapper
        if hook is not None:
            self.model.register_comm_hook(self._ddp_comm_state, wrapper(hook) if wrapper else hook)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if self._sizer_options is False or trainer.state.fn != TrainerFn.FITTING:
            return
        if not self.lightning_module.automatic_optimization:
            raise ValueError(
                "sizer= needs automatic optimization (automatic_optimization: False); leave sizer out, or set "
                "automatic_optimization to True"
            )
        options = {"loss_rule": "find", **self._sizer_options}
        if options.get("by_length") or options.get("weight_fn"):  # they say how pieces weigh
            options["loss_rule"] = None
        self.sizer = brimful.BatchSizer(self.model, self.optimizers, **options)
        self._outputs = StepOutputs(self.lightning_module)
        self.sizer._keepers = self._outputs.keepers

    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        if self.sizer is None or not self.lightning_module.trainer.training:
            return dataloader
        self._sampler = global_sampler_of(dataloader)
        return until_all_end(dataloader, self.root_device)

    def training_step(self, batch: Any, *args: Any) -> Any:
        if self.sizer is None:
            return super().training_step(batch, *args)
        outputs, one_piece = self._outputs, super().training_step
        assert outputs is not None
        trainer = self.lightning_module.trainer
        if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            self.model.zero_grad()  # as Lightning will, before it is a copy that is kept in the step

        def of_rows(piece: Any) -> Any:
            with self.precision_plugin.train_step_context():
                return self.lightning_module.training_step(piece, *args)

        def loss_fn(model: Any, piece: Any) -> Any:
            # A few rows that are tried concern this rank alone, and do without the wrapper.
            if model is self.model:
                return outputs.of_piece(lambda: one_piece(piece, *args), self._weight_of(piece))
            return outputs.of_piece(lambda: of_rows(piece), self._weight_of(piece))

        sizer = self.sizer
        sizer._sampler = self._sampler
        outcomes: list[Any] = []

        def step() -> Any:
            outcomes.append(sizer.step(batch, loss_fn))
            return outcomes[0]

        try:
            loss = step_as_loss(sizer, step)
        except BatchSkipped:
            outputs.log([])
            return None
        outputs.log(outcomes[0].split)
        return outputs.output(loss, outcomes[0].split, outcomes[0].order)

    def _weight_of(self, piece: Any) -> float | None:
        """Of a piece in means: its labels that count, where rows go by length, else its rows."""
        by_length = isinstance(self._sizer_options, Mapping) and self._sizer_options.get(
            "by_length"
        )
        labels = piece.get("labels") if by_length and isinstance(piece, Mapping) else None
        if not isinstance(labels, torch.Tensor) or labels.dim() != 2 or labels.is_floating_point():
            return None
        return float(brimful.token_weight(piece))

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        super().pre_backward(closure_loss)
        if not self.lightning_module.automatic_optimization:  # within the wrapper's forward
            self.model.reducer.watch(closure_loss)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        if self.sizer is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        computed = [closure()]  # its errors leave no optimizer in the middle of a step

        def once_more() -> Any:
            """An optimizer may call it again, as LBFGS does."""
            return computed.pop() if computed else closure()

        return super().optimizer_step(optimizer, once_more, model, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        if self.sizer is not None:  # its step is one of all ranks
            yield
            return
        with super().block_backward_sync():
            yield

    def teardown(self) -> None:
        self.model = self.lightning_module
        self._sampler = None
        self._outputs = None
        self.sizer = None  # which holds the wrapper, and its buckets
        super().teardown()


class MemoryReport(Callback):
    """Logs the peak of each training batch as ``peak_bytes``, and prints the sizer's report when training ends."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        brimful.memory.reset_peak(pl_module.device)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        peak = brimful.memory.stats(pl_module.device).peak_bytes
        pl_module.log("peak_bytes", float(peak), reduce_fx="max", on_step=True, on_epoch=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        sizer = getattr(trainer.strategy, "sizer", None)
        if sizer is not None and trainer.is_global_zero:
            print(sizer.report())


StrategyRegistry.register(
    "ddp_brimful", BrimfulStrategy, description=str(BrimfulStrategy.__doc__).splitlines()[0]
)
