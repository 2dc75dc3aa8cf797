"""Rows by length, and packed sequences, under a Hugging Face trainer: trimmed pieces that train as the batch does."""

import pytest
import torch
from models import values_of
from trainers import same

import brimful

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
adapter = pytest.importorskip("brimful.integrations.transformers")
tiny = pytest.importorskip("tiny_language_models")


class Limited:
    """Memory for so many tokens of a forward in training, or of any."""

    def __init__(self, model, tokens, evaluating=False):
        self.tokens, self.evaluating, self.seen, self.refusals = tokens, evaluating, [], 0
        model.register_forward_pre_hook(self.check, with_kwargs=True)

    def check(self, _, args, kwargs):
        shape = tuple(kwargs["input_ids"].shape)
        self.seen.append(shape)
        if (torch.is_grad_enabled() or self.evaluating) and shape[0] * shape[1] > self.tokens:
            self.refusals += 1
            raise torch.OutOfMemoryError("planted")


def rows_of(count, width=32):
    """Of unequal lengths, of which unequally many labels count."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        length = 4 + (7 * number) % (width - 4)
        ids = torch.randint(2, 64, (length,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(1, length, (), generator=generator))] = -100
        found.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return found


def token_classifier():
    torch.manual_seed(0)
    dropouts = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=64,
        **dropouts,
    )
    return transformers.BertForTokenClassification(config)


def arguments(folder, **more):
    return {
        "output_dir": folder,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 1,
        "optim": "sgd",
        "learning_rate": 0.5,
        "logging_steps": 1,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        **more,
    }


def trainer(folder, make, **more):
    collator = transformers.DataCollatorForTokenClassification(tiny.tokenizer())
    return transformers.Trainer(
        model=make(),
        args=transformers.TrainingArguments(**arguments(folder, **more)),
        train_dataset=rows_of(32),
        eval_dataset=rows_of(16),
        data_collator=collator,
    )


def logged(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("make", [tiny.causal_model, token_classifier])
def test_rows_are_trimmed_and_train_as_the_batch_does(tmp_path, make, accumulation):
    more = {"gradient_accumulation_steps": accumulation, "eval_strategy": "epoch"}
    plain = trainer(str(tmp_path), make, **more)
    plain.train()
    ours = trainer(str(tmp_path), make, **more)
    memory = Limited(ours.model, 100)
    callback = adapter.BrimfulCallback(ours, by_length=True)
    ours.add_callback(callback)
    ours.train()
    assert memory.refusals > 0 and callback.sizer.report().retries > 0
    assert min(width for _, width in memory.seen) < 16
    assert same(values_of(ours.model), values_of(plain.model))
    assert logged(ours) == pytest.approx(logged(plain), rel=1e-4)
    losses = [
        [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
        for run in (ours, plain)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_function_of_lengths_and_one_that_trims_get_the_trainers_batch(tmp_path):
    def lengths(batch):
        return batch["attention_mask"].sum(1)

    def trim(batch, begin, end):
        longest = int(batch["attention_mask"].sum(1).max())
        return {name: value[begin:end, :longest] for name, value in batch.items()}

    plain, ours = (trainer(str(tmp_path), tiny.causal_model) for _ in range(2))
    plain.train()
    memory = Limited(ours.model, 100)
    ours.add_callback(adapter.BrimfulCallback(ours, by_length=lengths, trim_fn=trim))
    ours.train()
    assert min(width for _, width in memory.seen) < 16
    assert same(values_of(ours.model), values_of(plain.model))


def test_weights_are_the_trainers_and_no_option(tmp_path):
    run = trainer(str(tmp_path), tiny.causal_model)
    with pytest.raises(ValueError, match=r"weight_fn: given.*leave weight_fn out"):
        adapter.BrimfulCallback(run, weight_fn=len)


def sft(folder, **more):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    return trl.SFTTrainer(
        model=tiny.causal_model(),
        args=trl.SFTConfig(**arguments(folder, **{"bf16": False, "max_length": 64, **more})),
        processing_class=tiny.tokenizer(),
        train_dataset=datasets.Dataset.from_dict({"text": tiny.texts(64)}),
        eval_dataset=datasets.Dataset.from_dict({"text": tiny.texts(32)}),
    )


NOT_COMPARED = ("time", "per_second", "runtime", "_bytes", "pieces", "retries")


@pytest.mark.parametrize("how", [{"packing": True}, {"padding_free": True, "max_length": None}])
def test_packed_batches_are_cut_between_sequences(tmp_path, how):
    more = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, **how}
    plain = sft(str(tmp_path), **more)
    plain.train()
    ours = sft(str(tmp_path), **more)
    name = next(iter(how))
    with pytest.raises(ValueError, match=rf"\({name}: True\); pass by_length=True to Brimful"):
        adapter.BrimfulCallback(ours)
    whole = sum(len(row["input_ids"]) for row in list(ours.train_dataset)[:4])
    memory = Limited(ours.model, whole * 2 // 3, evaluating=True)
    callback = adapter.BrimfulCallback(ours, by_length=True)
    ours.add_callback(callback)
    ours.train()
    assert memory.refusals > 0 and callback.sizer.report().history[-1].pieces > 1
    assert same(values_of(ours.model), values_of(plain.model))
    assert len(ours.state.log_history) == len(plain.state.log_history)
    for entry, other in zip(ours.state.log_history, plain.state.log_history, strict=True):
        for key, value in other.items():
            if not any(part in key for part in NOT_COMPARED):
                assert entry[key] == pytest.approx(value, rel=1e-3, abs=1e-5), key
    memory.refusals = 0
    found, expected = (run.evaluate()["eval_loss"] for run in (ours, plain))
    assert memory.refusals > 0
    assert found == pytest.approx(expected, rel=1e-4)


def test_wrapped_rows_are_cut_as_any_others(tmp_path):
    more = {"packing": True, "packing_strategy": "wrapped", "per_device_train_batch_size": 4}
    plain, ours = (sft(str(tmp_path), **more) for _ in range(2))
    plain.train()
    memory = Limited(ours.model, 130)
    ours.add_callback(adapter.BrimfulCallback(ours))
    ours.train()
    assert memory.refusals > 0
    assert same(values_of(ours.model), values_of(plain.model))


def test_texts_in_several_columns_are_refused_with_a_remedy(tmp_path):
    pytest.importorskip("sentence_transformers")
    import sentence_transformers

    tiny.save_bert(str(tmp_path))
    model = tiny.sentence_model(str(tmp_path))
    run = sentence_transformers.SentenceTransformerTrainer(
        model=model,
        args=sentence_transformers.SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[]
        ),
        loss=tiny.losses().MultipleNegativesRankingLoss(model),
    )
    with pytest.raises(ValueError, match=r"SentenceTransformerTrainer.*leave by_length out"):
        adapter.BrimfulCallback(run, by_length=True)


def test_sizers_without_a_trainer_say_how_to_do_without_by_length():
    """A loss that compares rows is no mean of theirs."""
    net = tiny.causal_model()
    batch = {
        "input_ids": torch.arange(2, 34).reshape(4, 8),
        "attention_mask": torch.arange(8) < torch.tensor([[3], [8], [5], [6]]),
    }
    batch["attention_mask"] = batch["attention_mask"].long()

    def loss_fn(model, piece):
        logits = model(**piece, use_cache=False).logits
        ends = piece["attention_mask"].sum(1) - 1
        last = logits[torch.arange(len(ends)), ends]
        return (last - last.mean(0)).square().mean() + last.square().mean()

    with pytest.raises(
        ValueError, match=r"the loss of two rows is not the mean.*or drop by_length"
    ):
        brimful.BatchSizer(net, by_length=True).step(batch, loss_fn)
