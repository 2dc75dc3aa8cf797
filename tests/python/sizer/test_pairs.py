"""sizer.pair_step: losses over pairs of rows, on one rank."""

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from models import rng_states, seed, used
from pair_models import (
    TwoTowers,
    clip_loss,
    embed,
    equal,
    gradients_of,
    off,
    own_clip_loss,
    pairs,
    unsplit,
)

import brimful
from brimful import _C

EXACT = {torch.float64: 1e-12, torch.float32: 1e-6}


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_the_gradient_is_that_of_the_batch_in_one_piece(dtype, tied):
    batch = pairs(24, dtype)
    model = TwoTowers(dtype, tied=tied)
    loss, reference = unsplit(TwoTowers(dtype, tied=tied), batch)
    for split in ([24], [8] * 3, [7, 11, 5, 1], [1] * 24):
        outcome = brimful.BatchSizer(model).pair_step(batch, embed, clip_loss(model), split=split)
        assert outcome.split == split
        assert outcome.loss == pytest.approx(loss, rel=1e-5)
        assert outcome.losses == pytest.approx([loss], rel=1e-5)
        assert off(gradients_of(model), reference) < EXACT[dtype], split
        model.zero_grad()


def test_dicts_labels_and_several_losses():
    batch = {"pair": pairs(12), "label": torch.arange(12) % 3}
    model = TwoTowers()

    def embed_all(model, piece):
        image, text = model(piece["pair"])
        return {"image": image, "text": text, "label": piece["label"]}

    def losses(embeddings):
        assert embeddings["label"].tolist() == batch["label"].tolist()
        same = embeddings["label"][:, None] == embeddings["label"]
        image, text = embeddings["image"], embeddings["text"]
        return {
            "clip": clip_loss(model)((image, text)),
            "classes": -(F.log_softmax(image @ image.T, 1) * same).sum() / 12,
        }

    whole = losses(embed_all(model, batch))
    sum(whole.values()).backward()
    reference = gradients_of(model)
    model.zero_grad()
    outcome = brimful.BatchSizer(model).pair_step(batch, embed_all, losses, split=[5, 5, 2])
    assert outcome.losses == pytest.approx([w.item() for w in whole.values()])
    assert outcome.loss == pytest.approx(sum(outcome.losses))
    assert off(gradients_of(model), reference) < 1e-12


def noisy(seen):
    def embed_noisy(model, piece):
        image = piece[0] * random.uniform(0.9, 1.1) + float(numpy.random.rand()) * 0.1
        towers = model((image, piece[1]))
        seen.append([t.detach().clone() for t in towers])
        return towers

    return embed_noisy


def test_dropout_draws_the_same_in_both_passes_and_once_for_what_follows():
    model = TwoTowers(dropout=0.4)
    sizer = brimful.BatchSizer(model)
    seen = []
    seed(3)
    for _ in range(2):  # the second step is not checked
        sizer.pair_step(pairs(9), noisy(seen), clip_loss(model), split=[4, 3, 2])
        model.zero_grad()
    after = rng_states()
    for step in (seen[:6], seen[6:]):
        assert all(equal(a, b) for a, b in zip(step[:3], step[3:], strict=True))
    assert not equal(seen[0], seen[6])
    seed(3)
    for _ in range(2):
        for rows in zip(*(t.split([4, 3, 2]) for t in pairs(9)), strict=True):
            noisy([])(model, rows)
    assert rng_states() == after


def test_a_recorded_split_repeats_the_step_bit_by_bit():
    model = TwoTowers(dropout=0.4)
    sizer = brimful.BatchSizer(model, pieces=4)
    seed(5)
    outcome = sizer.pair_step(pairs(10), embed, clip_loss(model))
    first = gradients_of(model)
    model.zero_grad()
    seed(5)
    sizer.pair_step(pairs(10), embed, clip_loss(model), split=outcome.split)
    assert equal(gradients_of(model), first)


@pytest.mark.parametrize("outside", [False, True], ids=["inside", "around"])
def test_autocast(outside):
    batch = pairs(12, torch.float32)
    model = TwoTowers(torch.float32)

    def cast(model, piece):
        with torch.autocast("cpu", torch.bfloat16):
            return model(piece)

    dtypes = set()

    def loss(embeddings):
        dtypes.update(t.dtype for t in embeddings)
        return clip_loss(model)([t.float() for t in embeddings])

    reference = []
    for rows in ([12], [5, 4, 3]):
        with torch.autocast("cpu", torch.bfloat16, enabled=outside):
            embed_fn = embed if outside else cast
            brimful.BatchSizer(model).pair_step(batch, embed_fn, loss, split=rows)
        reference.append(gradients_of(model))
        model.zero_grad()
    assert off(*reference) < 0.02
    assert all(g.abs().sum() > 0 for g in reference[1])


def test_a_scaler_scales_once_and_its_gradients_keep_small_values():
    batch = pairs(12, torch.float32)
    model = TwoTowers(torch.float32)
    _, reference = unsplit(model, batch)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizer = brimful.BatchSizer(model, optimizer, scaler=scaler)
    outcome = sizer.pair_step(batch, embed, clip_loss(model), split=[5, 4, 3])
    assert off(gradients_of(model), [g * 2.0**12 for g in reference]) < 1e-6
    assert outcome.loss < 10
    scaler.unscale_(optimizer)
    assert off(gradients_of(model), reference) < 1e-6
    scaler.step(optimizer)
    scaler.update()


def test_statistics_move_once():
    model, other = TwoTowers(norm=True), TwoTowers(norm=True)
    batch = pairs(12)
    brimful.BatchSizer(model).pair_step(batch, embed, clip_loss(model), split=[6, 4, 2])
    for piece in zip(*(t.split([6, 4, 2]) for t in batch), strict=True):
        other(piece)
    assert equal(list(model.buffers()), list(other.buffers()))


def test_accumulates():
    model = TwoTowers()
    sizer = brimful.BatchSizer(model)
    references = [unsplit(TwoTowers(), pairs(8, seed=n))[1] for n in (1, 2)]
    for n in (1, 2):
        sizer.pair_step(pairs(8, seed=n), embed, clip_loss(model), split=[4, 4], accumulate=n == 2)
    assert off(gradients_of(model), [a + b for a, b in zip(*references, strict=True)]) < 1e-12


def test_own_rows_of_a_single_rank_are_all_rows():
    model = TwoTowers()
    _, reference = unsplit(model, pairs(8))
    brimful.BatchSizer(model).pair_step(
        pairs(8), embed, own_clip_loss(model), split=[4, 4], own=True
    )
    assert off(gradients_of(model), reference) < 1e-12


def test_a_frozen_tower_and_a_batch_that_one_piece_takes():
    model = TwoTowers()
    model.image.requires_grad_(False)
    _, reference = unsplit(model, pairs(8))
    brimful.BatchSizer(model).pair_step(pairs(8), embed, clip_loss(model), split=[3, 5])
    pairs_of = [(p.grad, r) for p, r in zip(model.parameters(), reference, strict=True)]
    assert all((a is None) == (b is None) for a, b in pairs_of)
    assert off(*zip(*(p for p in pairs_of if p[1] is not None), strict=True)) < 1e-12


def in_use():
    return brimful.memory.stats("cpu").used_bytes


def test_a_shortage_at_any_allocation_is_repeated_or_leaves_all_as_it_was():
    model = TwoTowers(dropout=0.3)
    batch = pairs(4)
    ended = {"stood": 0, "repeated": 0, "raised": 0}
    index, fired = 0, True
    while fired:
        seed(index)
        states = rng_states()
        before = in_use()
        sizer = brimful.BatchSizer(model, pieces=2)
        with _C._FaultAt(index) as fault:
            try:
                outcome = sizer.pair_step(batch, embed, clip_loss(model))
            except torch.OutOfMemoryError:
                assert rng_states() == states, index
                assert all(p.grad is None for p in model.parameters()), index
                ended["raised"] += 1
                outcome = None
        fired = fault.fired
        if outcome is not None:
            ended["repeated" if outcome.retries else "stood"] += 1
            if index % 8 == 0:
                gradients = gradients_of(model)
                model.zero_grad()
                seed(index)
                brimful.BatchSizer(model).pair_step(
                    batch, embed, clip_loss(model), split=outcome.split
                )
                assert equal(gradients_of(model), gradients), index
        model.zero_grad()
        del outcome, sizer
        gradients = None
        assert in_use() <= before, index
        index += 1
    assert index > 60
    assert ended["repeated"] > 50, ended
    assert ended["raised"] <= 2, ended


def test_under_a_limit_the_batch_is_split_until_it_fits():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 2048), torch.nn.Tanh(), torch.nn.Linear(2048, 8)
    )
    batch = torch.randn(256, 64)

    def loss(embeddings):
        return F.cross_entropy(embeddings @ embeddings.T, torch.arange(256))

    loss(model(batch)).backward()
    reference = gradients_of(model)
    model.zero_grad()
    sizer = brimful.BatchSizer(model)
    brimful.memory.set_limit("cpu", used() + (4 << 20))
    try:
        outcome = sizer.pair_step(batch, lambda model, x: model(x), loss)
    finally:
        brimful.memory.set_limit("cpu", None)
    assert outcome.retries >= 1 and outcome.pieces > 1
    assert off(gradients_of(model), reference) < 1e-5


def test_a_loss_that_does_not_fit_says_that_no_split_helps():
    model = torch.nn.Linear(4, 4)
    sizer = brimful.BatchSizer(model)
    evaluations = []

    def loss(embeddings):
        evaluations.append(None)
        raise torch.OutOfMemoryError("planted")

    with pytest.raises(
        brimful.BatchTooLarge, match="the loss over all pairs does not fit"
    ) as caught:
        sizer.pair_step(torch.randn(64, 4), lambda model, x: model(x), loss)
    assert len(evaluations) == 2
    assert "own=True" in str(caught.value)
    assert "piece_rows" not in str(caught.value)


class Refused:
    """Embeddings, losses and batches that a step refuses, with what it says."""

    @staticmethod
    def other_rows(model, piece):
        return model(piece)[0][:1]

    @staticmethod
    def no_graph(model, piece):
        return [t.detach() for t in model(piece)]

    @staticmethod
    def nothing(model, piece):
        return None

    @staticmethod
    def whole_numbers(model, piece):
        return model(piece)[0].long()

    @staticmethod
    def not_finite(model, piece):
        return [t / (piece[0][:, :1] * 0) for t in model(piece)]

    @staticmethod
    def never_the_same(model, piece, generator=torch.Generator()):  # noqa: B008
        return [t + torch.randn(t.shape, generator=generator) for t in model(piece)]

    @staticmethod
    def of_other_widths(model, piece):
        return model(piece)[0][:, : 4 + len(piece[0]) % 2]


@pytest.mark.parametrize(
    ("embed_fn", "error", "text"),
    [
        (Refused.other_rows, ValueError, "another number of rows than their piece"),
        (Refused.no_graph, ValueError, "the embeddings have no graph"),
        (Refused.nothing, TypeError, "embed_fn returned something else than tensors"),
        (Refused.whole_numbers, TypeError, "no embeddings with floating values"),
        (Refused.not_finite, ValueError, "embeddings are not finite"),
        (Refused.never_the_same, ValueError, "gave other embeddings for the same rows"),
        (Refused.of_other_widths, ValueError, "differ in shape or dtype"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refused_embeddings(embed_fn, error, text):
    model = TwoTowers()
    states = rng_states()
    with pytest.raises(error, match=text):
        brimful.BatchSizer(model).pair_step(
            pairs(9),
            embed_fn,
            lambda e: sum((t @ t.T).logsumexp(1).mean() for t in e),
            split=[5, 4],
        )
    assert all(p.grad is None for p in model.parameters())
    assert rng_states() == states


def test_refused_losses():
    model = TwoTowers()
    generator = torch.Generator()
    foreign = torch.nn.Parameter(torch.ones(()).double())
    stale = model.image(pairs(9)[0])
    clip = clip_loss(model)
    calls = []
    for loss, error, text in (
        (lambda e: clip(e) * torch.rand(()), ValueError, "has another value for the same"),
        (lambda e: clip(e) + torch.rand((), generator=generator), ValueError, "has another value"),
        (lambda e: clip(e) + len(calls) + (calls.append(0) or 0), ValueError, "has another value"),
        (lambda e: clip(e) * foreign, ValueError, "that the sizer does not know"),
        (lambda e: clip((stale, e[1])), ValueError, "whose graph was made before it"),
        (lambda e: clip(e) * float("nan"), ValueError, "is not finite"),
        (lambda e: (e[0] @ e[1].T).mean(1), ValueError, "is not a scalar"),
        (lambda e: model.scale * 1, ValueError, "does not depend on the embeddings"),
        (lambda e: torch.ones(()), ValueError, "does not depend on the embeddings"),
        (lambda e: 1.0, TypeError, "pair_loss returned something else"),
        (lambda e: None, TypeError, "pair_loss returned something else"),
    ):
        with pytest.raises(error, match=text):
            brimful.BatchSizer(model).pair_step(pairs(9), embed, loss, split=[5, 4])
        assert all(p.grad is None for p in [*model.parameters(), foreign]), text


def test_refused_arguments():
    model = TwoTowers()
    sizer = brimful.BatchSizer(model)
    with pytest.raises(TypeError, match="embed_fn must be callable"):
        sizer.pair_step(pairs(4), None, clip_loss(model))
    with pytest.raises(TypeError, match="pair_loss must be callable"):
        sizer.pair_step(pairs(4), embed, None)
    with pytest.raises(ValueError, match="only for a loss over the rank's own rows"):
        sizer.pair_step(pairs(4), embed, clip_loss(model), gathered_gradient=False)
    with pytest.raises(ValueError, match="the batch is empty"):
        sizer.pair_step(pairs(0), embed, clip_loss(model))
    with pytest.raises(ValueError, match="split must be positive numbers of rows"):
        sizer.pair_step(pairs(4), embed, clip_loss(model), split=[1, 2])
    sizer.pair_step(pairs(4), embed, clip_loss(model))


def test_a_batch_that_embed_fn_changes_is_refused_once_and_then_put_back():
    model = TwoTowers()
    sizer = brimful.BatchSizer(model)

    def change(model, piece):
        piece[0].mul_(2)
        return model(piece)

    with pytest.raises(ValueError, match="a tensor of the batch was changed in place"):
        sizer.pair_step(pairs(4), change, clip_loss(model))
    batch = pairs(4)
    _, reference = unsplit(model, (batch[0] * 2, batch[1]))
    sizer.pair_step(batch, change, clip_loss(model), split=[2, 2])
    assert off(gradients_of(model), reference) < 1e-12


def test_a_temperature_and_plain_steps_beside_steps_over_pairs():
    model = TwoTowers()
    sizer = brimful.BatchSizer(model)
    _, reference = unsplit(model, pairs(8))
    for _ in range(2):
        sizer.pair_step(pairs(8), embed, clip_loss(model), split=[4, 4])
        assert off(gradients_of(model), reference) < 1e-12
        model.zero_grad()
        sizer.step(pairs(8), lambda model, piece: model(piece)[0].square().mean())
        model.zero_grad()
