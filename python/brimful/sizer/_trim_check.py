"""Whether rows may be trimmed: the loss of a row that loses padding, and of two rows of other lengths."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as torch_module

from brimful import _random
from brimful._log import text_of
from brimful._modules import unwrapped
from brimful._process_end import is_out_of_memory

if TYPE_CHECKING:
    from brimful.sizer._by_length import RowsByLength

_TF32_RTOL = 5e-3
_log = logging.getLogger("brimful")
_OFF = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd)


def require_same_loss(rows: RowsByLength, loss_fn: Callable[[Any, Any], Any], model: Any) -> None:
    """Runs two rows of the batch forward, whole and trimmed, with dropout off; buffers and random numbers stay."""
    plain = (
        unwrapped(model) if isinstance(model, torch.nn.Module) else [unwrapped(m) for m in model]
    )
    models = [plain] if isinstance(plain, torch.nn.Module) else plain
    last = len(rows.order) - 1
    with _undisturbed(models) as dtypes:

        def loss_of(piece: Any, weight: float) -> tuple[float, float]:
            result = loss_fn(plain, piece)
            loss: Any
            loss, weighs = result if type(result) is tuple else (result, weight)
            loss = getattr(loss, "loss", loss)
            dtypes.add(loss.dtype)
            return float(loss.detach()), float(weighs)

        def weight_of(*places: int) -> float:
            return sum(rows.weight_at(place) for place in places)

        def untrimmed(*places: int) -> float | None:
            """None where the model takes no row that is wider than its own length: only trimmed ones can be run."""
            try:
                return loss_of(rows.whole(places), weight_of(*places))[0]
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                _log.info(
                    "rows were not compared with their padding, which the model refuses: %s",
                    text_of(error),
                )
                return None

        short, short_weight = loss_of(rows.piece(last, last + 1), weight_of(last))
        whole = untrimmed(last)
        if whole is None:
            return
        rtol = _tolerance(models, dtypes)
        if _differ(short, whole, rtol):
            raise ValueError(
                f"trimming a row changes its loss (row: {rows.order[last]}, loss with padding: {whole:.8g}, without: "
                f"{short:.8g}); pass the attention mask to the model, and position_ids where rows are padded left "
                "(positions are counted from the first column else), or drop by_length"
            )
        if last == 0:
            return
        long, long_weight = loss_of(rows.piece(0, 1), weight_of(0))
        both = untrimmed(0, last)
        if both is None:
            return
        weight = long_weight + short_weight
        sums = [n * w for n, w in ((long, long_weight), (short, short_weight)) if w > 0]
        mean = sum(sums) / weight if weight > 0 else both
        if _differ(mean, both, rtol):
            raise ValueError(
                f"the loss of two rows is not the mean of theirs (loss: {both:.8g}, mean: {mean:.8g}, weights: "
                f"{long_weight:g} and {short_weight:g}); {rows.together}return (mean loss, weight) from loss_fn, with "
                "brimful.token_weight(piece), or with shift=False for a model that does not shift labels; "
                "verify_split finds what mixes rows; or drop by_length"
            )


def _differ(one: float, other: float, rtol: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) != math.isnan(other)
    return abs(one - other) > rtol * max(abs(one), abs(other))


def _tolerance(models: list[torch.nn.Module], dtypes: set[torch.dtype]) -> float:
    parameters = [p for model in models for p in model.parameters() if p.is_floating_point()]
    coarsest = max(torch.finfo(dtype).eps for dtype in {*dtypes, *(p.dtype for p in parameters)})
    on_cuda = any(p.is_cuda for p in parameters)
    return max(math.sqrt(coarsest), _TF32_RTOL if on_cuda else 0)


@contextlib.contextmanager
def _undisturbed(
    models: list[torch.nn.Module], *, evaluating: bool = True
) -> Iterator[set[torch.dtype]]:
    """Modules are in evaluation meanwhile, or only those that mix or drop rows. Gives the dtypes to which autocast was
    seen to cast."""
    dtypes: set[torch.dtype] = set()

    def note(module: torch.nn.Module, args: Any) -> None:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                dtypes.add(torch.get_autocast_dtype(device))

    modules = list(dict.fromkeys(child for model in models for child in model.modules()))
    training = [module.training for module in modules]
    devices = {p.device for model in models for p in model.parameters() if p.is_cuda}
    drawn = _random.states()
    hook = torch_module.register_module_forward_pre_hook(note)
    try:
        with torch.random.fork_rng(devices=sorted(d.index for d in devices)), torch.enable_grad():
            for module in modules:
                module.training &= not (evaluating or isinstance(module, _OFF))
            yield dtypes
    finally:
        hook.remove()
        for module, was in zip(modules, training, strict=True):
            module.training = was
        _random.set_states(drawn)
