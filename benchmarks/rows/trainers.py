"""Trainers of language models under a limit of memory, and the lines that they take."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import common

IDS = ("rows.trl", "rows.trainers_lines")
ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^## (.*?)\n.*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NO_TRAINERS = ("Ray Train", "torch.distributed.checkpoint")  # whose loop is the user's
CLOSE = 1e-3


def lines_of_brimful(block: str) -> int:
    """Lines that import from brimful, or use what was imported from it."""
    names = re.findall(r"^from brimful[\w.]* import (.*)$", block, re.MULTILINE)
    used = [name.strip() for line in names for name in line.split(",")]
    # What a strategy of that name was registered for.
    words = "|".join([*(rf"\b{re.escape(name)}\b" for name in used), "brimful"])
    return sum(re.search(words, line) is not None for line in block.splitlines())


def _lines() -> common.Figure:
    page = (ROOT / "docs" / "integrations.md").read_text()
    found = {
        title: lines_of_brimful(block)
        for title, block in BLOCK.findall(page)
        if title not in NO_TRAINERS
    }
    most = max(found.values())
    return common.Figure(
        "rows.trainers_lines", "count", most, most, most, rounds=len(found), conditions=found
    )


def _model(folder: str) -> Any:
    import transformers

    path = Path(folder) / "model"
    if not path.is_dir():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            vocab_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=128,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=1,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(path)
    return transformers.LlamaForCausalLM.from_pretrained(path)


def _tokenizer() -> Any:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(60))]
    numbers = {name: number for number, name in enumerate(names)}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def _texts(rows: int, longest: int) -> list[str]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(rows):
        length = int(torch.randint(4, longest, (), generator=generator))
        picked = torch.randint(0, 60, (length,), generator=generator)
        found.append(" ".join(f"w{int(number)}" for number in picked))
    return found


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text.split())) + 0.1 * len(text) for text in completions]


def _trainer(kind: str, folder: str, steps: int, lora: bool, **more: Any) -> Any:
    import datasets
    import peft
    import trl

    options = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 1,
        "optim": "sgd",
        "learning_rate": 0.5,
        "logging_steps": 1,
        "max_steps": steps,
        "per_device_train_batch_size": 16,
        **more,
    }
    common_parts = {
        "model": _model(folder),
        "processing_class": _tokenizer(),
        "peft_config": peft.LoraConfig(r=4, target_modules="all-linear") if lora else None,
    }
    if kind == "sft":
        data = datasets.Dataset.from_dict({"text": _texts(16 * steps, 48)})
        arguments = trl.SFTConfig(max_length=64, **options)
        return trl.SFTTrainer(args=arguments, train_dataset=data, **common_parts)
    data = datasets.Dataset.from_dict({"prompt": _texts(16 * steps, 24)})
    arguments = trl.GRPOConfig(num_generations=16, max_completion_length=8, beta=0.0, **options)
    return trl.GRPOTrainer(args=arguments, reward_funcs=_reward, train_dataset=data, **common_parts)


def _curve(trainer: Any) -> list[tuple[float, float]]:
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(entry["loss"], entry["grad_norm"]) for entry in logs]


def _is_equal(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> bool:
    return len(found) == len(expected) and all(
        abs(a - b) <= CLOSE * max(abs(b), 1.0)
        for one, other in zip(found, expected, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def _halved(kind: str, folder: str, steps: int, lora: bool, expected: Any) -> str:
    """What the trainer's own way does under the limit."""
    try:
        trainer = _trainer(kind, folder, steps, lora, auto_find_batch_size=True)
        trainer.train()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}"
    curve = "the same" if _is_equal(_curve(trainer), expected) else "another"
    return f"batch {trainer._train_batch_size} of 16, {curve} loss curve"


def _run(kind: str, folder: str, steps: int, lora: bool) -> tuple[bool, dict[str, Any]]:
    import brimful
    from brimful.integrations.transformers import BrimfulCallback

    plain = _trainer(kind, folder, steps, lora)
    brimful.memory.reset_peak("cpu")
    used = brimful.memory.stats("cpu").used_bytes
    plain.train()
    peak = brimful.memory.stats("cpu").peak_bytes
    expected = _curve(plain)
    brimful.memory.set_limit("cpu", used + (peak - used) * 7 // 10)
    try:
        halved = _halved(kind, folder, steps, lora, expected)
        trainer = _trainer(kind, folder, steps, lora)
        callback = BrimfulCallback(trainer)
        trainer.add_callback(callback)
        trainer.train()
    except Exception as error:
        return False, {"error": f"{type(error).__name__}: {str(error)[:200]}", "halved": halved}
    finally:
        brimful.memory.set_limit("cpu", None)
    retries = callback.sizer.report().retries
    same = _is_equal(_curve(trainer), expected) and trainer._train_batch_size == 16 and retries > 0
    return same, {"retries": retries, "halved": halved}


def _trl(quick: bool) -> common.Figure:
    try:
        import trl  # noqa: F401
    except ModuleNotFoundError as error:
        return common.unmeasured("rows.trl", f"needs TRL and PEFT: {error}")
    steps = 2 if quick else 10
    conditions: dict[str, Any] = {"steps": steps}
    passed = 0
    for kind in ("sft", "grpo"):
        for lora in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                same, conditions[f"{kind}{' lora' if lora else ''}"] = _run(
                    kind, folder, steps, lora
                )
            passed += same
    share = passed / 4
    return common.Figure(
        "rows.trl", "fraction", share, share, share, rounds=4, conditions=conditions
    )


def measure(quick: bool) -> Iterator[common.Figure]:
    """Yields the share of runs that end as they would without a limit, and the most lines that a trainer takes."""
    yield _lines()
    yield _trl(quick)
