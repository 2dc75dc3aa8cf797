"""Hugging Face Trainer: pieces that fit instead of a restarted loop, and memory in the logs."""

import pytest
import torch
from models import values_of
from trainers import Memory, same, under_torchrun

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
BrimfulCallback = pytest.importorskip("brimful.integrations.transformers").BrimfulCallback


def model(memory=None):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 32}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16
    )
    net = transformers.LlamaForCausalLM(config)
    if memory is not None:
        net.model.register_forward_pre_hook(
            lambda _, args, kwargs: memory.check(kwargs["input_ids"]), with_kwargs=True
        )
    return net


def sentences(rows=32, length=8):
    """Of different lengths: a mean of pieces' means would be another loss."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(rows):
        ids = torch.randint(0, 32, (length,), generator=generator)
        labels = ids.clone()
        labels[int(torch.randint(2, length, (), generator=generator)) :] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def trainer(folder, net, **options):
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=4,
        num_train_epochs=1,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=1,
        **{"learning_rate": 0.01, **options},
    )
    return transformers.Trainer(model=net, args=arguments, train_dataset=sentences())


class Begins(transformers.TrainerCallback):
    def __init__(self):
        self.count = 0

    def on_train_begin(self, *_, **__):
        self.count += 1


def job(rank, folder, accumulation):
    under_torchrun(rank)
    plain = trainer(folder, model(), gradient_accumulation_steps=accumulation)
    plain.train()

    memory = Memory(2, here=rank.index == 1)
    ours = trainer(folder, model(memory), gradient_accumulation_steps=accumulation)
    callback, begins = BrimfulCallback(ours), Begins()
    ours.add_callback(callback)
    ours.add_callback(begins)
    ours.train()
    assert same(values_of(ours.model), values_of(plain.model))
    assert begins.count == 1 and ours.args.per_device_train_batch_size == 4
    assert (memory.refusals > 0) == (rank.index == 1)
    retries = callback.sizer.report().retries
    assert retries == rank.index  # once, and later batches begin with the pieces that fit
    logs = [entry for entry in ours.state.log_history if "loss" in entry]
    theirs = [entry for entry in plain.state.log_history if "loss" in entry]
    assert len(logs) == len(theirs) == 4 // accumulation
    for entry, other in zip(logs, theirs, strict=True):
        assert entry["peak_bytes"] >= entry["used_bytes"] > 0
        assert entry["pieces"] == (1, 2)[rank.index]
        assert entry["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    return values_of(ours.model), [entry["loss"] for entry in logs], [e["loss"] for e in theirs]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_memory_runs_out_on_one_rank_and_training_goes_on_as_if_it_had_not(
    ranks, tmp_path, accumulation
):
    (first, ours, theirs), (second, _, _) = ranks(job, str(tmp_path), accumulation)
    assert same(first, second)
    assert ours == pytest.approx(theirs, rel=0.2)


def alone_job(rank, folder):
    """Without a trainer: only the logs. With the argument that it replaces: refused."""
    plain = trainer(folder, model())
    plain.add_callback(BrimfulCallback())
    plain.train()
    assert all("peak_bytes" in entry for entry in plain.state.log_history)
    assert not any("pieces" in entry for entry in plain.state.log_history)
    with pytest.raises(ValueError, match="auto_find_batch_size: True"):
        BrimfulCallback(trainer(folder, model(), auto_find_batch_size=True))
    evaluated = trainer(folder, model())
    BrimfulCallback(evaluated)
    assert "eval_loss" in evaluated.evaluate(sentences(4))


def test_a_single_process_logs_and_evaluates(ranks, tmp_path):
    ranks(alone_job, str(tmp_path), size=1)


def token_classifier():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 32}
    dropouts = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    return transformers.BertForTokenClassification(
        transformers.BertConfig(
            **sizes, **dropouts, num_hidden_layers=1, num_attention_heads=2, num_labels=32
        )
    )


def sequence_to_sequence():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def mean_job(rank, folder, make, smoothing):
    """Of labels, by a model that drops ``num_items_in_batch``; some rows have none that counts."""
    data = sentences()
    for row in data[::5]:
        row["labels"] = torch.full_like(row["labels"], -100)
    runs = []
    for rows in (1 << 30, 1):
        net, memory = globals()[make](), Memory(rows)
        net.register_forward_pre_hook(
            lambda _, args, kwargs, memory=memory: memory.check(kwargs["input_ids"]),
            with_kwargs=True,
        )
        more = {"label_smoothing_factor": smoothing, "optim": "sgd", "learning_rate": 0.5}
        run = trainer(folder, net, **more)
        if rows == 1:
            run.add_callback(BrimfulCallback(run))
        run.train_dataset = data
        run.train()
        assert (memory.refusals > 0) == (rows == 1)
        runs.append((values_of(net), [e["loss"] for e in run.state.log_history if "loss" in e]))
    assert same(runs[0][0], runs[1][0])
    assert runs[0][1] == pytest.approx(runs[1][1], rel=1e-4)


@pytest.mark.parametrize(
    ("make", "smoothing"),
    [
        ("token_classifier", 0.0),
        ("token_classifier", 0.1),
        ("sequence_to_sequence", 0.0),
        ("model", 0.0),
        ("model", 0.1),
    ],
)
def test_a_mean_over_labels_is_weighed_by_the_labels_of_a_piece(ranks, tmp_path, make, smoothing):
    ranks(mean_job, str(tmp_path), make, smoothing, size=1)
