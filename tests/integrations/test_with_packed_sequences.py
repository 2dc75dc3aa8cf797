"""Batches that transformers' collator has flattened, in pieces of whole sequences."""

import pytest
import torch

import brimful

transformers = pytest.importorskip("transformers")
tiny = pytest.importorskip("tiny_language_models")

LENGTHS = [5, 17, 3, 9, 30, 12, 4, 22]


def batch(**options):
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": torch.randint(2, 60, (length,), generator=generator).tolist()}
        for length in LENGTHS
    ]
    found = transformers.DataCollatorWithFlattening(return_tensors="pt", **options)(rows)
    return dict(found)


def loss_fn(model, piece):
    return model(**piece, use_cache=False).loss


def gradients_of(model):
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "options", [{}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}], ids=["", "places"]
)
def test_the_gradient_is_that_of_the_flattened_batch(attention, options):
    model = tiny.causal_model().double()
    model.set_attn_implementation(attention)
    whole = batch(**options)
    loss_fn(model, whole).backward()
    expected = gradients_of(model)
    sizer = brimful.BatchSizer(model, by_length=True, pieces=3)
    outcome = sizer.step(whole, loss_fn)
    assert outcome.pieces >= 3 and sum(outcome.split) == len(LENGTHS)
    for one, other in zip(gradients_of(model), expected, strict=True):
        assert (one - other).norm() <= 1e-7 * other.norm()  # the loss is in float32


def test_a_model_that_does_not_look_at_positions_is_refused():
    """With a cache transformers does not."""
    model = tiny.causal_model()
    sizer = brimful.BatchSizer(model, by_length=True)
    with pytest.raises(ValueError, match="not the mean of theirs"):
        sizer.step(batch(), lambda model, piece: model(**piece, use_cache=True).loss)
