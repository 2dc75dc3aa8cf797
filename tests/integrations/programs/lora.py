"""Trainer with LoRA: lora.py FOLDER

Mixed precision, recomputed activations, evaluation, checkpoints of which two are kept, the best one, and a resume.
"""

import json
import os
import sys

import tiny_language_models as tiny
import torch
import transformers
from peft import LoraConfig, get_peft_model

folder = sys.argv[1]
words = tiny.tokenizer()


def rows(count):
    found = []
    for text in tiny.texts(count):
        found.append(words(text))
    return found


def trainer():
    net = tiny.causal_model(hidden=64)
    model = get_peft_model(
        net,
        LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    model.enable_input_require_grads()
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        bf16=True,
        max_steps=4,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        save_total_limit=2,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
        lr_scheduler_type="cosine",
        warmup_steps=2,
    )
    return transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=rows(64),
        eval_dataset=rows(8),
        data_collator=transformers.DataCollatorForLanguageModeling(words, mlm=False),
    )


first = trainer()
first.train()
second = trainer()
second.args.max_steps = 6
second.train(resume_from_checkpoint=True)
second.evaluate()
second.save_model(f"{folder}/last")
assert second.state.global_step == 6
assert sorted(os.listdir(folder)) == ["checkpoint-2", "checkpoint-6", "last"]
every = sum(p.numel() for p in second.model.parameters())
trained = sum(p.numel() for p in second.model.parameters() if p.requires_grad)
# Both trainers' models, and of the second two moments of what is trained.
states = 4 * (2 * every + 2 * trained)
print(json.dumps({"states": states, "allocated": torch.cuda.memory_allocated()}))
