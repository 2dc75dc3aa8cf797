"""``summary(limit=)``: what a step would have to do, before it has to."""

import gc
import re

import pytest
import torch
from torch import nn

import brimful


class Encoder(nn.Module):
    def __init__(self, blocks=6):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
            for _ in range(blocks)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def square(model, x):
    return model(x).square().mean()


def test_the_plan_gets_tighter_with_the_limit_and_holds():
    torch.manual_seed(0)
    model, batch = Encoder(), torch.randn(4, 128, 32)
    plain = brimful.summary(model, batch, loss_fn=square)
    assert plain.limit_plan == ""
    room = plain.peak_bytes - plain.used_bytes
    kinds = []
    for share in (1.1, 0.5, 0.2, 0.02):
        found = brimful.summary(
            model, batch, loss_fn=square, limit=plain.used_bytes + int(share * room)
        )
        assert found.limit_plan in str(found)
        kinds.append(re.sub(r"^within [^:]+: |[\d.]+", "", found.limit_plan).split(",")[0])
        if share == 0.2:
            assert "recomputed" in found.limit_plan or "offloaded" in found.limit_plan
            sizer = brimful.BatchSizer(model)
            gc.collect()
            brimful.memory.set_limit(
                "cpu", brimful.memory.stats("cpu").used_bytes + int(share * room)
            )
            try:
                assert sizer.step(batch, square).rungs
            finally:
                brimful.memory.set_limit("cpu", None)
            model.zero_grad()
    assert kinds == [
        "the whole batch",
        " pieces of at most  rows",
        " pieces of  row",
        "no plan",
    ]


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "1 GiB"])
def test_what_is_no_limit_is_refused(limit):
    with pytest.raises(ValueError, match="limit must be a positive whole number of bytes"):
        brimful.summary(nn.Linear(2, 2), torch.ones(2, 2), limit=limit)
    with pytest.raises(ValueError, match="one of training"):
        brimful.summary(nn.Linear(2, 2), torch.ones(2, 2), train=False, limit=1 << 20)
