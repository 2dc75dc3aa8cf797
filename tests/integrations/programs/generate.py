"""transformers' generate: generate.py FOLDER. It ends at its last token, since ends follow from logits."""

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    eos_token_id=2,
    pad_token_id=0,
)
model = LlamaForCausalLM(config).cuda().eval()
ids = torch.randint(3, 320, (2, 9)).cuda()
for do_sample in (False, True):
    rows = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=do_sample
    )
    assert rows.shape == (2, 21)
torch.save(model.state_dict(), Path(sys.argv[1]) / "model.pt")
states = sum(tensor.nbytes for tensor in model.state_dict().values())
print(json.dumps({"states": states, "allocated": torch.cuda.memory_allocated()}))
