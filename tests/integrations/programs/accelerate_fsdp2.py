"""A model that Accelerate shards (fsdp_version 2) over two CUDA devices, of which one runs out of memory."""

import os

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

import brimful
from brimful.integrations.accelerate import attach

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="size_based_wrap",
    min_num_params=50,
    cpu_ram_efficient_loading=False,
)
accelerator = Accelerator(fsdp_plugin=plugin)
rank = accelerator.process_index
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
plain.load_state_dict(net.state_dict())
model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
assert attach(accelerator, model) is model
sizer = brimful.BatchSizer(model, optimizer)
rows = torch.arange(64.0).view(8, 8) / 64
fails = rank == 1


def loss_fn(model, batch):
    global fails
    loss = model(batch).square().mean()
    if fails and len(batch) == 4:
        fails = False
        raise torch.OutOfMemoryError("planted")
    return loss


outcome = sizer.step(rows[4 * rank :][:4].to(accelerator.device), loss_fn)
plain(rows).square().mean().backward()
for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(parameter.grad.full_tensor().cpu(), expected.grad)
accelerator.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
print(f"rank {rank} made {outcome.pieces} pieces", flush=True)
accelerator.end_training()
os._exit(0)
