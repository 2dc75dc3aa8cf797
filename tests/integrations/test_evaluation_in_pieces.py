"""Trainer.evaluate, predict and generate where memory runs out: the same results, in pieces."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
adapter = pytest.importorskip("brimful.integrations.transformers")
tiny = pytest.importorskip("tiny_language_models")


class Limited:
    """Memory for so many rows, in training or not."""

    def __init__(self, model, rows, error=None):
        self.rows, self.refusals = rows, 0
        self.error = error or torch.OutOfMemoryError("planted")
        model.model.register_forward_pre_hook(self.check, with_kwargs=True)

    def check(self, _, args, kwargs):
        if len(kwargs["input_ids"]) > self.rows:
            self.refusals += 1
            raise self.error


def rows_of(count, labelled=True):
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(count):
        ids = torch.randint(2, 64, (6,), generator=generator)
        labels = ids.clone()
        labels[int(torch.randint(2, 6, (), generator=generator)) :] = -100
        found.append({"input_ids": ids, **({"labels": labels} if labelled else {})})
    return found


def trainer(folder, **more):
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_eval_batch_size=8,
        **more,
    )
    return transformers.Trainer(model=tiny.causal_model(), args=arguments)


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("loss_only", [True, False])
def test_evaluation_and_prediction_are_those_of_whole_batches(tmp_path, labelled, loss_only):
    data = rows_of(11, labelled)
    plain = trainer(str(tmp_path), prediction_loss_only=loss_only)
    expected = plain.predict(data)
    ours = trainer(str(tmp_path), prediction_loss_only=loss_only)
    adapter.BrimfulCallback(ours)
    memory = Limited(ours.model, 3)
    found = ours.predict(data)
    assert memory.refusals > 0
    if loss_only:
        assert found.predictions is expected.predictions is None
    else:
        assert found.predictions == pytest.approx(expected.predictions, abs=1e-5)
    assert found.metrics.get("test_loss") == pytest.approx(expected.metrics.get("test_loss"))
    assert ("test_loss" in found.metrics) == labelled


def test_a_shortage_that_has_lost_its_type_is_one(tmp_path):
    plain, ours = trainer(str(tmp_path)), trainer(str(tmp_path))
    adapter.BrimfulCallback(ours)
    memory = Limited(ours.model, 3, RuntimeError("CUDA error: out of memory"))
    expected, found = (run.predict(rows_of(8)) for run in (plain, ours))
    assert found.predictions == pytest.approx(expected.predictions, abs=1e-5)
    assert memory.refusals > 0


def test_outputs_that_cannot_be_joined_are_named(tmp_path):
    ours = trainer(str(tmp_path))
    adapter.BrimfulCallback(ours)
    ours.model.config.keys_to_ignore_at_inference = []
    ours.model.config.use_cache = True
    Limited(ours.model, 3)
    with pytest.raises(ValueError, match=r"(cache|past_key_values): DynamicCache.*keys_to_ignore"):
        ours.predict(rows_of(8))
    found = ours.predict(rows_of(8), ignore_keys=["cache", "past_key_values"])
    assert found.predictions.shape == (8, 6, 64)


def test_a_model_that_knows_no_labels_predicts_in_pieces(tmp_path):
    plain, ours = trainer(str(tmp_path)), trainer(str(tmp_path))
    plain.label_names = ours.label_names = []
    adapter.BrimfulCallback(ours)
    Limited(ours.model, 3)
    expected, found = (run.predict(rows_of(8, labelled=False)) for run in (plain, ours))
    assert found.predictions == pytest.approx(expected.predictions, abs=1e-5)


def test_generate_goes_on_in_pieces_of_their_own_lengths():
    model = tiny.causal_model()
    prompts = torch.stack([row["input_ids"] for row in rows_of(8)])
    settings = {"max_new_tokens": 12, "do_sample": False}
    # The last token of some rows ends them, so that pieces have different lengths.
    model.generation_config.eos_token_id = int(model.generate(prompts, **settings)[0, 8])
    expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)
    adapter.generate_in_pieces(model)
    memory = Limited(model, 3)
    for _ in range(2):
        found = model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)
        assert torch.equal(found, expected)
    assert memory.refusals > 0
    assert torch.equal(
        model.generate(prompts, return_dict_in_generate=True, **settings).sequences, expected
    )
    with pytest.raises(ValueError, match=r"output_scores: True\); leave it out"):
        model.generate(prompts, return_dict_in_generate=True, output_scores=True, **settings)
    with pytest.raises(ValueError, match="past_key_values: DynamicCache"):
        model.generate(prompts, past_key_values=transformers.DynamicCache(), **settings)


def test_a_row_that_does_not_fit_is_a_typed_error(tmp_path):
    ours = trainer(str(tmp_path))
    adapter.BrimfulCallback(ours)
    Limited(ours.model, 0)
    with pytest.raises(torch.OutOfMemoryError, match="row"):
        ours.evaluate(rows_of(4))
