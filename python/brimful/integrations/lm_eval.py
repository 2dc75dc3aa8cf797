"""lm-evaluation-harness: a model whose batches go on in pieces where memory runs out, in the place of ``auto``."""

from __future__ import annotations

from typing import Any

from brimful.integrations._extra import require

require("lm_eval")

import torch
from lm_eval.models.huggingface import HFLM

import brimful
from brimful.integrations._generate_in_pieces import of_rows

__all__ = ["BrimfulLM"]


class BrimfulLM(HFLM):
    """``HFLM`` with its arguments: requests that do not fit together run in smaller groups, and generate in pieces.

    Nothing is tried beforehand: ``batch_size="auto"`` means ``max_batch_size``. A size that fitted is kept for requests
    of that length and longer ones, and grows again for shorter ones. Each rank goes by its own memory.
    """

    def __init__(
        self, *args: Any, batch_size: int | str = "auto", max_batch_size: int = 64, **kwargs: Any
    ) -> None:
        if str(batch_size).startswith("auto"):
            batch_size = max_batch_size
        super().__init__(*args, batch_size=batch_size, max_batch_size=max_batch_size, **kwargs)
        # Its criteria for the end keep a state of each row, so that pieces get their own.
        self._model_generate = of_rows(super()._model_generate, self.tokenizer.pad_token_id)

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        whole = super()._loglikelihood_tokens
        # As the base class has them: the longest first, and those of one context together.
        order = sorted(
            range(len(requests)),
            key=lambda number: (
                -len(requests[number][1] + requests[number][2]),
                requests[number][1] + requests[number][2],
            ),
        )
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)

        def fn(numbers: torch.Tensor) -> torch.Tensor:
            group = numbers.tolist()
            found = whole([requests[number] for number in group], disable_tqdm=True)
            for number, answer in zip(group, found, strict=True):
                answers[number] = answer
            return numbers

        size = int(override_bs or self.batch_size)
        for begin in range(0, len(order), size):
            brimful.map_batches(fn, torch.tensor(order[begin : begin + size]))
        return answers
