"""TRL's trainers: batches in pieces with the losses, logs and generations of the whole batch, and what is refused."""

import os

import pytest
import torch
from models import values_of
from trainers import Memory, same, under_torchrun

import brimful

trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
adapter = pytest.importorskip("brimful.integrations.transformers")
BrimfulCallback = adapter.BrimfulCallback
tiny = pytest.importorskip("tiny_language_models")
causal_model, texts, tokenizer = tiny.causal_model, tiny.texts, tiny.tokenizer

NOT_COMPARED = ("time", "per_second", "runtime", "_bytes", "pieces", "retries")


def saved(folder):
    """With a folder behind it, from which TRL makes the reference model."""
    if not os.path.isdir(folder):
        causal_model().save_pretrained(folder)
    return transformers.LlamaForCausalLM.from_pretrained(folder)


def watched(model, memory, evaluating=False):
    def check(_, args, kwargs):
        if evaluating and not torch.is_grad_enabled() and len(kwargs["input_ids"]) > memory.rows:
            memory.refusals += 1
            raise torch.OutOfMemoryError("planted")
        memory.check(kwargs["input_ids"])

    if memory is not None:
        model.model.register_forward_pre_hook(check, with_kwargs=True)
    return model


def options(folder, **more):
    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 1,
        "optim": "sgd",  # which a gradient of another scale would change
        "learning_rate": 0.5,
        "logging_steps": 1,
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        **more,
    }


def sft(folder, memory=None, evaluating=False, peft_config=None, model=None, **more):
    arguments = trl.SFTConfig(**options(folder, **{"max_length": 32, **more}))
    return trl.SFTTrainer(
        model=watched(causal_model() if model is None else model, memory, evaluating),
        args=arguments,
        processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_dict({"text": texts(48)}),
        eval_dataset=datasets.Dataset.from_dict({"text": texts(16)}),
        peft_config=peft_config,
    )


def reward(completions, **_):
    return [len(set(text.split())) + 0.1 * len(text) for text in completions]


def grpo(folder, memory=None, evaluating=False, rows=32, **more):
    lengths = {"num_generations": 4, "max_completion_length": 8, "beta": 0.0}
    return trl.GRPOTrainer(
        model=watched(saved(f"{os.path.dirname(folder)}/model"), memory, evaluating),
        reward_funcs=reward,
        args=trl.GRPOConfig(**options(folder, **{**lengths, **more})),
        processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_dict({"prompt": texts(rows, longest=8)}),
    )


def ours(trainer, **settings):
    callback = BrimfulCallback(trainer, **settings)
    trainer.add_callback(callback)
    return callback


def assert_same_training(trainer, plain):
    assert same(values_of(trainer.model), values_of(plain.model))
    assert_same_logs(trainer, plain)


def assert_same_logs(trainer, plain):
    logs, expected = trainer.state.log_history, plain.state.log_history
    assert len(logs) == len(expected)
    for entry, other in zip(logs, expected, strict=True):
        for name, value in other.items():
            if not any(part in name for part in NOT_COMPARED):
                assert entry[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("with_lora", [False, True])
def test_sft_in_pieces_trains_logs_and_evaluates_as_the_whole_batch(tmp_path, with_lora):
    more = {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    if with_lora:
        peft = pytest.importorskip("peft")
        more["peft_config"] = peft.LoraConfig(r=4, target_modules="all-linear")
        more["gradient_checkpointing"] = True
    plain = sft(str(tmp_path), **more)
    plain.train()
    memory = Memory(3)
    trainer = sft(str(tmp_path), memory, evaluating=True, **more)
    callback = ours(trainer)
    trainer.train()
    assert_same_training(trainer, plain)
    assert callback.sizer.report().retries == 2
    assert memory.refusals > 2  # in the evaluation too


def test_sft_evaluates_by_the_tokens_of_a_piece(tmp_path):
    """Without their count in the batch its loss is a mean over those of a piece."""
    plain, trainer = sft(str(tmp_path)), sft(str(tmp_path), Memory(3), evaluating=True)
    ours(trainer)
    found, expected = (run.evaluate()["eval_loss"] for run in (trainer, plain))
    assert found == pytest.approx(expected, rel=1e-5)


def test_sft_resumes_in_pieces_where_it_was_interrupted(tmp_path):
    plain = sft(str(tmp_path / "plain"), max_steps=4)
    plain.train()
    first = sft(str(tmp_path), Memory(3), max_steps=4, save_strategy="steps", save_steps=2)
    ours(first)
    first.train()
    again = sft(str(tmp_path), Memory(3), max_steps=4)
    ours(again)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_training(first, plain)
    assert same(values_of(again.model), values_of(plain.model))


@pytest.mark.parametrize(
    ("loss_type", "more"),
    [
        ("dapo", {}),
        ("bnpo", {"gradient_accumulation_steps": 2}),
        ("grpo", {"beta": 0.1, "gradient_accumulation_steps": 2, "steps_per_generation": 4}),
    ],
)
def test_grpo_in_pieces_has_the_loss_of_the_whole_batch(tmp_path, loss_type, more):
    plain = grpo(str(tmp_path), loss_type=loss_type, **more)
    plain.train()
    memory = Memory(3)
    trainer = grpo(str(tmp_path), memory, loss_type=loss_type, **more)
    ours(trainer)
    trainer.train()
    assert_same_training(trainer, plain)
    assert memory.refusals == 2


def few_tokens(trainer):
    """Two of a batch's tokens count: fewer than its pieces."""
    prepare = trainer._prepare_inputs

    def prepared(inputs):
        batch = dict(prepare(inputs))
        mask = torch.zeros_like(batch["completion_mask"])
        mask[0, 0] = mask[5, 0] = 1
        return {**batch, "completion_mask": mask, "num_items_in_batch": mask.sum()}

    trainer._prepare_inputs = prepared
    return trainer


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_a_count_of_few_tokens_is_bounded_once_for_the_batch(tmp_path, loss_type):
    plain = few_tokens(grpo(str(tmp_path), loss_type=loss_type))
    plain.train()
    memory = Memory(3)
    trainer = few_tokens(grpo(str(tmp_path), memory, loss_type=loss_type))
    ours(trainer)
    trainer.train()
    assert memory.refusals == 2
    assert_same_training(trainer, plain)


def test_grpo_generates_and_scores_in_pieces_where_that_runs_out(tmp_path):
    """Without sampling, so that pieces generate the same."""
    more = {"beta": 0.1, "steps_per_generation": 2, "generation_kwargs": {"do_sample": False}}
    plain = grpo(str(tmp_path), **more)
    plain.train()
    memory = Memory(3)
    trainer = grpo(str(tmp_path), memory, evaluating=True, **more)
    ours(trainer)
    trainer.train()
    assert memory.refusals > 4
    assert_same_training(trainer, plain)


def test_grpo_evaluates_in_pieces_as_the_whole_batch(tmp_path):
    """Its batch is a list of prompts, which it generates from before there is a loss."""
    more = {"per_device_eval_batch_size": 8, "generation_kwargs": {"do_sample": False}}
    prompts = datasets.Dataset.from_dict({"prompt": texts(8, longest=8)})
    plain = grpo(str(tmp_path), **more)
    expected = plain.evaluate(prompts)
    memory = Memory(3)
    trainer = grpo(str(tmp_path), memory, evaluating=True, **more)
    ours(trainer)
    found = trainer.evaluate(prompts)
    assert memory.refusals > 1
    for name, value in expected.items():
        if not any(part in name for part in NOT_COMPARED):
            assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def peak_of(train):
    brimful.memory.reset_peak("cpu")
    used = brimful.memory.stats("cpu").used_bytes
    train()
    return used, brimful.memory.stats("cpu").peak_bytes


def test_grpo_trains_on_under_a_limit_that_halving_the_batch_breaks(tmp_path):
    """A half batch holds no group of generations, so that TRL refuses to halve it."""
    more = {"num_generations": 8, "max_steps": 2}
    with pytest.raises(ValueError, match="num_generations"):
        grpo(str(tmp_path), auto_find_batch_size=True, **more)
    with pytest.raises(ValueError, match="num_generations"):
        grpo(str(tmp_path), **{**more, "per_device_train_batch_size": 4})
    plain = grpo(str(tmp_path), **more)
    used, peak = peak_of(plain.train)
    without = grpo(str(tmp_path), **more)
    brimful.memory.set_limit("cpu", used + (peak - used) * 7 // 10)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            without.train()
        trainer = grpo(str(tmp_path), **more)  # which seeds what generates
        callback = ours(trainer)
        trainer.train()
    finally:
        brimful.memory.set_limit("cpu", None)
    assert callback.sizer.report().retries > 0
    assert trainer.args.per_device_train_batch_size == 8
    assert_same_training(trainer, plain)


def two_ranks_job(rank, folder, make, more):
    under_torchrun(rank)
    plain = globals()[make](f"{folder}/plain{rank.index}", **more)
    plain.train()
    memory = Memory(3, here=rank.index == 1)
    trainer = globals()[make](f"{folder}/ours{rank.index}", memory, **more)
    callback = ours(trainer)
    trainer.train()
    assert (memory.refusals > 0) == (rank.index == 1)
    assert callback.sizer.report().retries == (0, 2)[rank.index]
    assert_same_training(trainer, plain)
    return values_of(trainer.model)


@pytest.mark.parametrize("make", ["sft", "grpo"])
def test_ranks_of_which_one_has_less_memory_log_and_train_as_if_it_had_not(ranks, tmp_path, make):
    saved(str(tmp_path / "model"))  # of several processes each would wait for another
    first, second = ranks(two_ranks_job, str(tmp_path), make, {})
    assert same(first, second)


@pytest.mark.parametrize(
    ("make", "more", "text"),
    [
        (sft, {"padding_free": True, "max_length": None}, "padding_free: True"),
        (grpo, {"top_entropy_quantile": 0.5}, "top_entropy_quantile: 0.5"),
        (grpo, {"entropy_coef": 0.1}, "entropy_coef: 0.1"),
    ],
)
def test_what_mixes_the_rows_of_a_batch_is_refused_with_a_remedy(tmp_path, make, more, text):
    trainer = make(str(tmp_path), **more)
    with pytest.raises(ValueError, match=f"{text}.*leave"):
        BrimfulCallback(trainer)


def test_a_trainer_whose_rows_are_pairs_is_refused_with_a_remedy(tmp_path):
    pairs = {"prompt": texts(8), "chosen": texts(8), "rejected": texts(8)}
    trainer = trl.DPOTrainer(
        model=saved(str(tmp_path / "model")),
        args=trl.DPOConfig(**options(str(tmp_path))),
        processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_dict(pairs),
    )
    with pytest.raises(ValueError, match=r"trainer: DPOTrainer.*gradient_accumulation_steps"):
        BrimfulCallback(trainer)
