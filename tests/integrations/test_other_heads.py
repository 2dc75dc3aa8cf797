"""Heads of transformers that no rule was written for: their steps in pieces are those of the batch, or refused."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
others = pytest.importorskip("other_heads")
compare = pytest.importorskip("test_model_heads").compare


@pytest.mark.parametrize(
    ("name", "config", "batch_of", "settings"), others.HEADS, ids=[row[0] for row in others.HEADS]
)
def test_a_step_in_pieces_is_that_of_the_batch(name, config, batch_of, settings):
    two_means = name == "ErnieForPreTraining"  # over labels, and over rows: by no one weight
    assert compare(name, config, batch_of, settings) != two_means
