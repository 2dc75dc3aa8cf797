"""Heads of transformers under the Trainer: a step in pieces is that of the whole batch, or is refused."""

import pytest
import torch

pytest.importorskip("accelerate")
heads = pytest.importorskip("model_heads")
tf = pytest.importorskip("transformers")
BrimfulCallback = pytest.importorskip("brimful.integrations.transformers").BrimfulCallback


def names(rows):
    return [f"{name}-{batch.__name__}" for name, _, batch, _ in rows]


def compare(name, config, batch_of, settings):
    """Whether pieces were run; False where the loss was found to compare rows."""
    torch.manual_seed(3)
    batch = batch_of()
    more = heads.settings_of(config, settings)
    expected, loss, _ = heads.trained(heads.head(name, config, **more), batch)
    net = heads.head(name, config, **more)
    try:
        found, ours, callback = heads.trained(net, batch, lambda t: BrimfulCallback(t, pieces=3))
    except ValueError as error:
        assert "relative distances of gradients" in str(error) and "loss_rule=" in str(error)
        return False
    assert callback.sizer.report().history[-1].pieces == 3
    assert (found - expected).norm() / expected.norm() <= 2e-4
    assert ours == pytest.approx(loss, rel=1e-3)
    assert callback.sizer.report().trial_runs <= 6
    return True


@pytest.mark.parametrize(
    ("name", "config", "batch_of", "settings"), heads.HEADS, ids=names(heads.HEADS)
)
def test_a_step_in_pieces_is_that_of_the_batch(name, config, batch_of, settings):
    compares_rows = name == "CLIPModel"
    assert compare(name, config, batch_of, settings) != compares_rows


def rows_of(inputs):
    return next(len(value) for value in inputs.values() if isinstance(value, torch.Tensor))


def evaluated(net, batch, folder, most_rows):
    """The loss of an evaluation in which memory runs out for more rows."""
    refusals = []

    def check(_, args, inputs):
        if rows_of(inputs) > most_rows:
            refusals.append(rows_of(inputs))
            raise torch.OutOfMemoryError("planted")

    net.register_forward_pre_hook(check, with_kwargs=True)
    trainer = heads.trainer_of(folder, net, batch)
    if most_rows < heads.ROWS:
        BrimfulCallback(trainer)
    loss = trainer.evaluate()["eval_loss"]
    assert (len(refusals) > 0) == (most_rows < heads.ROWS)
    return loss


@pytest.mark.parametrize("most_rows", [4, 3])
@pytest.mark.parametrize(
    ("name", "config", "batch_of", "settings"),
    [
        row
        for row in heads.HEADS
        if row[0] in ("BertForTokenClassification", "BertForQuestionAnswering", "LlamaForCausalLM")
        or row[3].get("ctc_loss_reduction") == "sum"
    ],
)
def test_an_evaluation_in_pieces_has_the_loss_of_the_batch(
    tmp_path, name, config, batch_of, settings, most_rows
):
    torch.manual_seed(3)
    batch, more = batch_of(), heads.settings_of(config, settings)
    expected = evaluated(heads.head(name, config, **more), batch, str(tmp_path), heads.ROWS)
    found = evaluated(heads.head(name, config, **more), batch, str(tmp_path), most_rows)
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_loss_that_compares_rows_is_evaluated_whole_or_refused(tmp_path):
    name, config, batch_of, settings = heads.HEADS[-1]
    torch.manual_seed(3)
    batch, more = batch_of(), heads.settings_of(config, settings)
    with pytest.raises(ValueError, match="relative distances"):
        evaluated(heads.head(name, config, **more), batch, str(tmp_path), 4)


def test_a_batch_that_stays_whole_trains_as_without_the_callback():
    name, config, batch_of, settings = heads.HEADS[-1]
    torch.manual_seed(3)
    batch, more = batch_of(), heads.settings_of(config, settings)
    expected, _, _ = heads.trained(heads.head(name, config, **more), batch)
    found, _, callback = heads.trained(
        heads.head(name, config, **more), batch, lambda t: BrimfulCallback(t, loss_rule="whole")
    )
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert callback.sizer.report().trial_runs == 0
