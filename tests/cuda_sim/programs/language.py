"""A language model trained by a loop of its own: language.py FOLDER DTYPE

Tokens in a file, batches from pinned memory, mixed precision, checkpoints, a resume, and text at the end.
"""

import json
import math
import os
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

folder, dtype = sys.argv[1], sys.argv[2]
BLOCK, BATCH, VOCABULARY = 64, 4, 128
torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
context = torch.amp.autocast("cuda", dtype=getattr(torch, dtype))


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.mixed, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.heads, self.drop = heads, nn.Dropout(0.1)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.mixed(x).split(c, dim=2)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=0.1 if self.training else 0, is_causal=True
        )
        return self.drop(self.out(y.transpose(1, 2).contiguous().view(b, t, c)))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, width=128, heads=4, layers=2):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(BLOCK, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.words.weight = self.head.weight

    def forward(self, ids, targets=None):
        place = torch.arange(ids.shape[1], device=ids.device)
        x = self.words(ids) + self.places(place)
        for block in self.blocks:
            x = block(x)
        if targets is None:
            return self.head(self.last(x[:, [-1], :])), None
        logits = self.head(self.last(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def generate(self, ids, count, top_k=10):
        for _ in range(count):
            logits = self(ids[:, -BLOCK:])[0][:, -1, :] / 0.8
            least, _ = torch.topk(logits, top_k)
            logits[logits < least[:, [-1]]] = -float("inf")
            ids = torch.cat((ids, torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)), 1)
        return ids


np.random.default_rng(0).integers(0, VOCABULARY, 5000).astype(np.uint16).tofile(
    os.path.join(folder, "train.bin")
)


def get_batch():
    data = np.memmap(os.path.join(folder, "train.bin"), dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - BLOCK, (BATCH,))
    x = torch.stack([torch.from_numpy(data[i : i + BLOCK].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + BLOCK].astype(np.int64)) for i in ix])
    return x.pin_memory().to("cuda", non_blocking=True), y.pin_memory().to(
        "cuda", non_blocking=True
    )


def optimizer_of(model):
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    losses = torch.zeros(2)
    for k in range(2):
        with context:
            losses[k] = model(*get_batch())[1].item()
    model.train()
    return losses.mean()


def train(until, resume):
    model = GPT()
    begin = 0
    path = os.path.join(folder, "ckpt.pt")
    if resume:
        saved = torch.load(path, map_location="cuda")
        model.load_state_dict(saved["model"])
        begin = saved["iter_num"]
    model.to("cuda")
    optimizer = optimizer_of(model)
    if resume:
        optimizer.load_state_dict(saved["optimizer"])
        saved = None
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
    x, y = get_batch()
    for number in range(begin, until):
        rate = 6e-4 * 0.5 * (1 + math.cos(math.pi * number / until))
        for group in optimizer.param_groups:
            group["lr"] = rate
        if number % 2 == 0:
            estimate_loss(model)
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "iter_num": number,
                },
                path,
            )
        for _ in range(2):
            with context:
                loss = model(x, y)[1] / 2
            x, y = get_batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        print(f"iter {number}: loss {loss.item() * 2:.4f}")
    return model, optimizer


train(3, False)
model, optimizer = train(5, True)
model.eval()
ids = model.generate(torch.zeros((1, 1), dtype=torch.long, device="cuda"), 8)
assert ids.shape == (1, 9)
found = {
    "parameters": sum(p.numel() for p in model.parameters()),
    "copies": 3,  # themselves and two moments; gradients are given back
    "allocated": torch.cuda.memory_allocated(),
}
print(json.dumps(found))
