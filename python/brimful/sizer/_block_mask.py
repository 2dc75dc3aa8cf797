"""BlockMasks of flex attention, cut by their first dimension; imported when the first one is met."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from brimful.sizer._split_types import register_split


class OpenedBlockMask(tuple[dict[str, Any]]):
    """What a BlockMask is made of: its tensors can be found in it and be moved."""


def opened(mask: BlockMask) -> OpenedBlockMask:
    return OpenedBlockMask([dict(vars(mask))])


def closed(parts: OpenedBlockMask) -> BlockMask:
    mask = BlockMask.__new__(BlockMask)  # what its constructor takes differs from torch to torch
    vars(mask).update(parts[0])
    return mask


def rows_of(mask: BlockMask) -> int | None:
    rows = mask.kv_num_blocks.size(0)
    return None if rows == 1 else rows  # one mask is that of every row


def slice_rows(mask: BlockMask, begin: int, end: int) -> BlockMask:
    def cut(tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else tensor.narrow(0, begin, end - begin)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask.mask_mod(b + begin, h, q_idx, kv_idx)

    return BlockMask.from_kv_blocks(
        cut(mask.kv_num_blocks),
        cut(mask.kv_indices),
        cut(mask.full_kv_num_blocks),
        cut(mask.full_kv_indices),
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask_mod,
        seq_lengths=mask.seq_lengths,
    )


register_split(BlockMask, rows_of, slice_rows)
