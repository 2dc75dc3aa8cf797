"""sentence-transformers' trainer: losses that are a mean over rows, in pieces; and other trainers."""

import pytest
from models import values_of
from trainers import Memory, same

sentence_transformers = pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")
adapter = pytest.importorskip("brimful.integrations.transformers")
tiny = pytest.importorskip("tiny_language_models")
losses = tiny.losses()


def trainer(folder, loss, memory=None, **settings):
    def check(_, args):
        if memory is not None:
            memory.check(args[0]["input_ids"])

    tiny.save_bert(f"{folder}/model")
    model = tiny.sentence_model(f"{folder}/model", check)
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        output_dir=folder,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        logging_steps=1,
        optim="sgd",
        learning_rate=0.5,
        seed=1,
    )
    data = {"one": tiny.texts(32), "two": tiny.texts(32)[::-1]}
    data["score"] = [number / 32 for number in range(32)]
    return sentence_transformers.SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict(data),
        loss=loss(model, **settings),
    )


def test_a_loss_of_rows_trains_the_same_in_pieces(tmp_path):
    plain = trainer(str(tmp_path), losses.CosineSimilarityLoss)
    plain.train()
    memory = Memory(3)
    ours = trainer(str(tmp_path), losses.CosineSimilarityLoss, memory)
    callback = adapter.BrimfulCallback(ours)
    ours.add_callback(callback)
    ours.train()
    assert memory.refusals == 3  # first of the four rows that show how the loss is composed
    assert callback.sizer.report().retries == 2
    assert same(values_of(ours.model), values_of(plain.model))
    found, expected = (
        [entry["loss"] for entry in run.state.log_history if "loss" in entry]
        for run in (ours, plain)
    )
    assert found == pytest.approx(expected)


def test_another_trainer_of_the_library_is_refused_with_a_remedy(tmp_path):
    tiny.save_bert(f"{tmp_path}/model")
    library = sentence_transformers.cross_encoder
    model = library.CrossEncoder(f"{tmp_path}/model", num_labels=1, device="cpu")
    arguments = library.CrossEncoderTrainingArguments(f"{tmp_path}/out", use_cpu=True, report_to=[])
    data = {"one": tiny.texts(8), "two": tiny.texts(8)[::-1], "label": [1.0, 0.0] * 4}
    ours = library.CrossEncoderTrainer(
        model=model, args=arguments, train_dataset=datasets.Dataset.from_dict(data)
    )
    with pytest.raises(ValueError, match=r"BinaryCrossEntropyLoss.*rows_are_independent=True"):
        adapter.BrimfulCallback(ours)
    adapter.BrimfulCallback(ours, rows_are_independent=True)
