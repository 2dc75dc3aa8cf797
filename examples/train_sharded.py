"""A small Llama-like model that fully_shard divides over two ranks, of which one has half the memory.

    torchrun --standalone --nproc-per-node 2 examples/train_sharded.py

It learns to count: each token is the sum of the two before it, modulo a number. After its first step rank 1 has a
limit of half of what that took beyond the model. Without a sizer it would run out of memory in the next one, and rank 0
would wait for it in a collective; here both ranks make each step in as many pieces as rank 1 needs.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import brimful

NUMBERS, WIDTH, HEADS, BLOCKS = 23, 128, 4, 4
MIB = 1 << 20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, False), nn.Linear(WIDTH, WIDTH, False)
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH, False), nn.Linear(WIDTH, 4 * WIDTH, False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, False)

    def forward(self, x):
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Counter(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.tokens, self.places = nn.Embedding(NUMBERS, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, NUMBERS, False)

    def forward(self, words):
        places = self.places(torch.arange(words.shape[1], device=words.device))
        return self.head(self.norm(self.blocks(self.tokens(words) + places)))


def rows(count, length, generator):
    words = [torch.randint(NUMBERS, (count,), generator=generator) for _ in range(2)]
    while len(words) <= length:
        words.append((words[-1] + words[-2]) % NUMBERS)
    return torch.stack(words, 1)


def loss_fn(model, words):
    logits = model(words[:, :-1])
    return F.cross_entropy(logits[:, 1:].flatten(0, 1), words[:, 2:].flatten())


def sharded(length):
    torch.manual_seed(0)
    model = Counter(length)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=64, help="of each rank")
    parser.add_argument("--length", type=int, default=32)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(rank)
    model = sharded(options.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sizer = brimful.BatchSizer(model, optimizer)
    batches = (rows(options.rows, options.length, generator) for _ in range(options.steps))
    for step, batch in enumerate(sizer.batches(batches)):
        outcome = sizer.step(batch, loss_fn)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            brimful.memory.reset_peak("cpu")
        if step == 0 and rank == 1:
            used = brimful.memory.stats("cpu").used_bytes
            brimful.memory.set_limit("cpu", used + (outcome.peak_bytes - used) // 2)
        if rank == 0 and (step % 10 == 0 or outcome.retries):
            print(f"step {step}: loss {outcome.loss:.3f}, pieces {outcome.pieces}", flush=True)
    peak = brimful.memory.stats("cpu").peak_bytes / MIB
    limit = brimful.memory.stats("cpu").limit_bytes
    bound = "no limit" if limit is None else f"limit {limit / MIB:.1f} MiB"
    retries = sizer.report().retries
    dist.barrier()
    print(f"rank {rank}: peak {peak:.1f} MiB, {bound}, retries {retries}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
