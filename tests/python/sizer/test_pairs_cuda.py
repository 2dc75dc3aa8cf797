"""sizer.pair_step on a CUDA device: its random numbers, and shortages of its allocator."""

import pytest
import torch
from pair_models import TwoTowers, embed, equal, gradients_of, off, pairs

import brimful

pytestmark = pytest.mark.gpu


def clip_on_device(model):
    def loss(embeddings):
        image, text = embeddings
        scores = image @ text.T * model.scale.exp()
        matches = torch.arange(len(scores), device=scores.device)
        return torch.nn.functional.cross_entropy(scores, matches)

    return loss


def on_device(batch):
    return tuple(part.cuda() for part in batch)


def test_the_gradient_is_that_of_the_batch_in_one_piece():
    model = TwoTowers().cuda()
    batch = on_device(pairs(12))
    clip_on_device(model)(model(batch)).backward()
    reference = gradients_of(model)
    model.zero_grad()
    sizer = brimful.BatchSizer(model)
    for split in ([12], [5, 4, 3], [1] * 12):
        sizer.pair_step(batch, embed, clip_on_device(model), split=split)
        assert off(gradients_of(model), reference) < 1e-9, split
        model.zero_grad()


def test_dropout_draws_the_same_in_both_passes():
    model = TwoTowers(dropout=0.4).cuda()
    seen = []

    def watched(model, piece):
        towers = model(piece)
        seen.append([t.detach().clone() for t in towers])
        return towers

    torch.manual_seed(3)
    sizer = brimful.BatchSizer(model)
    sizer.pair_step(on_device(pairs(9)), watched, clip_on_device(model), split=[4, 3, 2])
    assert all(equal(a, b) for a, b in zip(seen[:3], seen[3:], strict=True))
    assert not equal(seen[0], [t[:4] for t in model(on_device(pairs(9)))])


def test_a_shortage_is_met_by_finer_pieces():
    model = TwoTowers().cuda()
    refused = []

    def embed_few(model, piece):
        if len(piece[0]) > 4:
            refused.append(len(piece[0]))
            raise torch.OutOfMemoryError("planted")
        return embed(model, piece)

    outcome = brimful.BatchSizer(model).pair_step(
        on_device(pairs(12)), embed_few, clip_on_device(model)
    )
    assert refused == [12, 6] and max(outcome.split) == 3
    assert all(g is not None for g in gradients_of(model))
