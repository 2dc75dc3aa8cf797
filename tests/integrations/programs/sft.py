"""TRL's SFTTrainer: sft.py FOLDER

Texts that it tokenizes and packs, and checkpoints of which one is kept. TRL's loss is a kernel of Triton's, or torch's
operators where there is no Triton.
"""

import importlib
import json
import os
import sys

import datasets
import tiny_language_models as tiny
import torch
import transformers.utils

transformers.utils.is_triton_available = lambda *_: False
trl = importlib.import_module("trl")

folder = sys.argv[1]

data = datasets.Dataset.from_list([{"text": text} for text in tiny.texts(32)])
arguments = trl.SFTConfig(
    output_dir=folder,
    max_length=32,
    packing=True,
    packing_strategy="wrapped",
    per_device_train_batch_size=2,
    max_steps=3,
    save_steps=1,
    save_total_limit=1,
    logging_steps=1,
    bf16=True,
    gradient_checkpointing=True,
    report_to=[],
    disable_tqdm=True,
)
trainer = trl.SFTTrainer(
    model=tiny.causal_model(hidden=64),
    args=arguments,
    train_dataset=data,
    processing_class=tiny.tokenizer(),
)
trainer.train()
assert trainer.state.global_step == 3
assert sorted(os.listdir(folder)) == ["README.md", "checkpoint-3"]
# Parameters and two moments.
states = 4 * 3 * sum(p.numel() for p in trainer.model.parameters())
print(json.dumps({"states": states, "allocated": torch.cuda.memory_allocated()}))
