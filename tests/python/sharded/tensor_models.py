"""A model of tensor parallelism, alone and under fully_shard."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import seed
from sharded_models import Fault, on_one_host
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, HEADS = 16, 8, 2


class Block(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second_norm = nn.RMSNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.recompute = recompute

    def mix(self, x):
        normed = self.norm(x)
        q, k, v = (
            part(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.second_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def forward(self, x):
        return checkpoint(self.mix, x, use_reentrant=False) if self.recompute else self.mix(x)


class Decoder(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.parallel_loss = False

    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _along_the_sequence(net, mesh):
    parallelize_module(
        net,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if net.parallel_loss else Replicate(),
                use_local_output=not net.parallel_loss,
            ),
        },
    )
    for block in net.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "norm": SequenceParallel(use_local_output=False),
                "q": ColwiseParallel(input_layouts=Shard(1)),
                "k": ColwiseParallel(input_layouts=Shard(1)),
                "v": ColwiseParallel(input_layouts=Shard(1)),
                "out": RowwiseParallel(output_layouts=Shard(1)),
                "second_norm": SequenceParallel(use_local_output=False),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "gate": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def _over_heads(net, mesh):
    for block in net.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "q": ColwiseParallel(),
                "k": ColwiseParallel(),
                "v": ColwiseParallel(),
                "out": RowwiseParallel(),
                "up": ColwiseParallel(),
                "gate": ColwiseParallel(),
                "down": RowwiseParallel(),
            },
        )


def parallel(*, mesh=None, sequence=True, recompute=False, parallel_loss=False, reshard=True):
    """`mesh`: of one dimension, or of two, data-parallel first."""
    seed(0)
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    net = Decoder(recompute).to(mesh.device_type)
    net.parallel_loss = parallel_loss
    (_along_the_sequence if sequence else _over_heads)(net, mesh["tensor"])
    if mesh.ndim == 2:
        for part in (net.embed, *net.blocks):
            fully_shard(part, mesh=mesh["data"], reshard_after_forward=reshard)
        fully_shard(net, mesh=mesh["data"], reshard_after_forward=reshard)
    return net


def words_of(rows, number, tokens=4):
    generator = torch.Generator().manual_seed(number)
    words = torch.randint(WORDS, (rows, tokens + 1), generator=generator)
    return words[:, :-1], words[:, 1:]


def word_loss(model, piece):
    Fault.in_pieces = True
    words, following = piece
    return F.cross_entropy(model(words).flatten(0, 1), following.flatten())


def expected_of(batches):
    return on_one_host(Decoder, batches, word_loss)
